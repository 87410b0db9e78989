"""Which rollout servers a run samples from: addresses out of settings and files, and the token. No torch here, and nothing is asked."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.base.files import read_text
from megatron_grpo.config.config import Config, GrpoConfig, RolloutConfig
from megatron_grpo.config.tuner import Pair

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"  # environment variable that both sides read the token from
CALLS = 2  # at a time and server, each able to fill it: so it never runs half empty before the end
FROM_FILE = "@"  # before the name of a file or directory of addresses
NAMES = ("vllm_server_host", "vllm_server_base_url")
# What an engine is started with. Of servers it is theirs: the trainer has no engine.
OF_THE_ENGINE = (
    *("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_kv_cache_memory_mb", "vllm_max_model_len", "vllm_max_num_seqs"),
    *("vllm_dtype", "vllm_enforce_eager", "vllm_enable_prefix_caching", "sleep_level"),
)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    is_https: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_https}://{host}:{self.port}"

    @property
    def is_here(self) -> bool:
        """On this machine, so that nothing that is sent leaves it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Raises ValueError, with the end of a sentence."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is no address like http://host:8000")
        if parts.path.strip("/") or parts.query or parts.username:
            raise ValueError("has more in it than scheme, host and port")
        return cls(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")


def addresses_of(cfg: RolloutConfig) -> list[Address]:
    """Of all servers that are known now. Files are read anew each time: servers come and go, and may not have written theirs yet.

    Raises ValueError where a file holds something else than addresses.
    """
    found = [Address.of_url(url) for url in cfg.vllm_server_base_url]
    hosts = [host for host in cfg.vllm_server_host if not host.startswith(FROM_FILE)]
    ports = cfg.vllm_server_port
    if hosts:
        hosts, ports = (hosts * len(ports) if len(hosts) == 1 else hosts), (ports * len(hosts) if len(ports) == 1 else ports)
        found += [Address(host, port, cfg.vllm_server_ca is not None) for host, port in zip(hosts, ports, strict=True)]
    for host in cfg.vllm_server_host:
        if host.startswith(FROM_FILE):
            found += _in_files(Path(host.removeprefix(FROM_FILE)))
    return list(dict.fromkeys(found))


def teacher_addresses(cfg: GrpoConfig) -> list[Address]:
    """Of a teacher's servers that are known now, as `addresses_of` those that sample. Raises ValueError."""
    found: list[Address] = []
    for word in cfg.teacher_model_server:
        if word.startswith(FROM_FILE):
            found += _in_files(Path(word.removeprefix(FROM_FILE)))
            continue
        try:
            found.append(Address.of_url(word))
        except ValueError as error:
            raise ValueError(f"{word[:80]!r} {error}") from error
    return list(dict.fromkeys(found))


def _in_files(path: Path) -> Iterator[Address]:
    """An address a line, of a file or of all files in a directory; nothing where there is none yet."""
    try:
        files = sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]
        for file in files:
            for number, line in enumerate(read_text(file).splitlines(), 1):
                if line.strip():
                    try:
                        yield Address.of_url(line.strip())
                    except ValueError as error:
                        raise ValueError(f"{file}, line {number}: {line.strip()[:80]!r} {error}") from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"@{path} cannot be read: {error.strerror}") from error


def default_token_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a server that was given no token keeps the one that it makes."""
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megatron-grpo" / "token"


def read_token(cfg: RolloutConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The token of all servers: of the file that is named, else of the variable, else of the file in which a server keeps one that it made.

    Raises ConfigError where there is none, and where others can read the file that it is in.
    """
    path, flags = cfg.vllm_server_token_file, ("vllm_server_token_file",)
    if path is None:
        if token := environment.get(TOKEN_VARIABLE, "").strip():
            return token
        path = str(default_token_file(environment))
        if not Path(path).exists():
            raise ConfigError([Problem(flags=flags, message=(
                f"servers that sample or teach answer to nobody without their token: set the variable {TOKEN_VARIABLE}, or name "
                "the file in which they keep it with vllm_server_token_file."))])  # fmt: skip
    try:
        mode, token = Path(path).stat().st_mode, read_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError([Problem(flags=flags, message=f"vllm_server_token_file ({path}) cannot be read: {reason}.")]) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"vllm_server_token_file ({path}) can be read by others (mode {stat.S_IMODE(mode):o}). Say `chmod 600 {path}`."
        raise ConfigError([Problem(flags=flags, message=message)])
    if not token:
        raise ConfigError([Problem(flags=flags, message=f"vllm_server_token_file ({path}) is empty.")])
    return token


def pairs(cfg: Config) -> Iterator[Pair]:
    """What does not go together where servers sample, or where they do not."""
    rollout = cfg.rollout
    yield from _of_a_teacher(cfg)
    if rollout.vllm_mode != "server":
        named = [name for name in NAMES if getattr(rollout, name)]
        if named:
            yield (
                (*named, "vllm_mode"),
                f"{' and '.join(named)} says where rollout servers are, and vllm_mode ({rollout.vllm_mode}) samples inside the training "
                "ranks. Use vllm_mode server, or leave it out.",
                {"vllm_mode": ["server"]},
            )
        return
    yield from _addresses(rollout)
    if typed := of_the_engine(cfg, cfg.typed):
        said, them = ", ".join(f"{name} ({getattr(rollout, name)})" for name in typed), "it" if len(typed) == 1 else "them"
        yield (
            tuple(typed),
            f"{said}: with vllm_mode server the engine is the server's, which is started with {them} (megatron-grpo serve). Leave {them} "
            "out.",
            {name: [getattr(RolloutConfig(), name)] for name in typed},
        )
    if rollout.vllm_server_ca is not None and not Path(rollout.vllm_server_ca).is_file():
        yield ("vllm_server_ca",), f"vllm_server_ca ({rollout.vllm_server_ca}) is not a file. It holds certificates as PEM.", {}


def _of_a_teacher(cfg: Config) -> Iterator[Pair]:
    if cfg.grpo.teacher_model and cfg.grpo.teacher_model_server:
        yield (
            ("teacher_model", "teacher_model_server"),
            f"teacher_model ({cfg.grpo.teacher_model}) is held in the training ranks, and teacher_model_server says that servers hold the "
            "teacher. Keep one of them.",
            {},
        )
    if cfg.grpo.offload_teacher_model and not cfg.grpo.teacher_model:
        yield (
            ("offload_teacher_model",),
            "offload_teacher_model moves the teacher_model of the training ranks, and there is none. Leave it out.",
            {"offload_teacher_model": [False]},
        )
    try:
        teachers = teacher_addresses(cfg.grpo)
    except ValueError as error:
        yield ("teacher_model_server",), f"teacher_model_server: {error}.", {}
        return
    with suppress(ValueError):  # which is said of them elsewhere
        both = [address for address in addresses_of(cfg.rollout) if address in teachers]
        if both:
            yield (
                ("teacher_model_server", "vllm_server_host"),
                f"{both[0]} is named as a rollout server, which takes the run's weights, and as the teacher's, which keeps its own. Start "
                "the teacher at another port (megatron-grpo serve --frozen true).",
                {},
            )


def of_the_engine(cfg: Config, among: Collection[str]) -> list[str]:
    """The settings of an engine `among` these that are not their defaults."""
    return [name for name in OF_THE_ENGINE if name in among and getattr(cfg.rollout, name) != getattr(RolloutConfig(), name)]


def _addresses(rollout: RolloutConfig) -> Iterator[Pair]:
    hosts, ports = [host for host in rollout.vllm_server_host if not host.startswith(FROM_FILE)], rollout.vllm_server_port
    if not rollout.vllm_server_host and not rollout.vllm_server_base_url:
        yield (
            ("vllm_server_host", "vllm_mode"),
            "vllm_mode server needs servers: name them with vllm_server_host (and vllm_server_port), or vllm_server_base_url.",
            {},
        )
    if len(hosts) > 1 and len(ports) not in (1, len(hosts)):
        yield (
            ("vllm_server_port", "vllm_server_host"),
            f"vllm_server_port has {len(ports)} ports for {len(hosts)} hosts: one for all of them, or one each.",
            {},
        )
        return
    try:
        known = addresses_of(rollout)
    except ValueError as error:
        yield ("vllm_server_base_url", "vllm_server_host"), f"servers: {error}.", {}
        return
    wrong = [url for url in hosts if "/" in url or url.count(":") == 1]
    if wrong:
        yield ("vllm_server_host",), f"vllm_server_host ({', '.join(wrong)}) is a host alone: its port goes to vllm_server_port.", {}
    plain = [str(address) for address in known if not address.is_https]
    if rollout.vllm_server_ca is not None and plain:
        yield (
            ("vllm_server_ca", "vllm_server_base_url"),
            f"vllm_server_ca vouches for servers that are spoken to by https, and {', '.join(plain)} is not. Use https://.",
            {},
        )


def chunk_size(num_prompts: int, *, n: int, num_servers: int, max_num_seqs: int) -> int:
    """Prompts of one call: as many as fill the server, and no more than its share if all calls of all servers begin at once."""
    return max(1, min(max_num_seqs // n, -(-num_prompts // (num_servers * CALLS))))
