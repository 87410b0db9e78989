"""Which rollout servers a run samples from: addresses out of settings and files, and the token. No torch here, and nothing is asked."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from megatron_grpo.base.errors import config_error
from megatron_grpo.base.files import read_text
from megatron_grpo.config.config import GrpoConfig, RolloutConfig
from megatron_grpo.config.rules import Rule, changed

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


def read_private(path: Path, flag: str) -> str:
    """What a file holds that is for its owner alone. flag: the setting that names it. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            held = stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(flag, f"{flag} ({path}) cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise config_error(flag, f"{flag} ({path}) can be read by others (mode {mode:o}). Say `chmod 600 {path}`.")
    return held


def read_token(cfg: RolloutConfig, environment: Mapping[str, str] = os.environ) -> str:
    """The token of all servers: of the file that is named, else of the variable, else of the file in which a server keeps one that it made.

    Raises ConfigError where there is none, and where others can read the file that it is in.
    """
    path, flag = cfg.vllm_server_token_file, "vllm_server_token_file"
    if path is None:
        if token := environment.get(TOKEN_VARIABLE, "").strip():
            return token
        path = str(default_token_file(environment))
        if not Path(path).exists():
            raise config_error(flag, f"servers that sample or teach answer to nobody without their token: set the variable "
                               f"{TOKEN_VARIABLE}, or name the file in which they keep it with {flag}.")  # fmt: skip
    token = read_private(Path(path), flag)
    if not token:
        raise config_error(flag, f"{flag} ({path}) is empty.")
    return token


def chunk_size(num_prompts: int, *, n: int, num_servers: int, max_num_seqs: int) -> int:
    """Prompts of one call: as many as fill the server, and no more than its share if all calls of all servers begin at once."""
    return max(1, min(max_num_seqs // n, -(-num_prompts // (num_servers * CALLS))))


# ---- what does not go together


def _of_the_engine(c: SimpleNamespace) -> dict[str, Any] | None:
    """Settings of an engine that somebody typed, where the engine is a server's."""
    found = changed(c, *(name for name in OF_THE_ENGINE if name in c.cfg.typed)) if c.vllm_mode == "server" else []
    if not found:
        return None
    said, near = ", ".join(f"{one['name']} ({one['value']})" for one in found), {one["name"]: [one["off"]] for one in found}
    return {"flags": " ".join(near), "said": said, "near": near, "them": "it" if len(found) == 1 else "them"}


def _idle(c: SimpleNamespace) -> dict[str, Any] | None:
    """What names servers where none samples."""
    named = [name for name in NAMES if getattr(c, name)] if c.vllm_mode != "server" else []
    return {"flags": " ".join(named), "named": " and ".join(named)} if named else None


def _known(c: SimpleNamespace) -> tuple[list[Address], str]:
    """Servers that sample, and what is wrong with their addresses."""
    try:
        return addresses_of(c.cfg.rollout), ""
    except ValueError as error:
        return [], str(error)


def _hosts(c: SimpleNamespace) -> list[str]:
    return [host for host in c.vllm_server_host if not host.startswith(FROM_FILE)]


def _wrong_teacher(c: SimpleNamespace) -> dict[str, Any] | None:
    try:
        teacher_addresses(c.cfg.grpo)
    except ValueError as error:
        return {"error": error}
    return None


def _both(c: SimpleNamespace) -> dict[str, Any] | None:
    """A server that would sample and teach."""
    teachers = teacher_addresses(c.cfg.grpo)
    both = [address for address in _known(c)[0] if address in teachers]
    return {"address": both[0]} if both else None


def _spoken_to_plainly(c: SimpleNamespace) -> dict[str, Any] | None:
    plain = [str(address) for address in _known(c)[0] if not address.is_https]
    return {"plain": ", ".join(plain)} if c.vllm_server_ca is not None and plain else None


# fmt: off
SERVERS = (
    Rule("teacher_model teacher_model_server", lambda c: c.teacher_model and c.teacher_model_server,
         "teacher_model ({teacher_model}) is held in the training ranks, and teacher_model_server says that servers hold the teacher. Keep "
         "one of them."),
    Rule("offload_teacher_model", lambda c: c.offload_teacher_model and not c.teacher_model,
         "offload_teacher_model moves the teacher_model of the training ranks, and there is none. Leave it out.",
         {"offload_teacher_model": [False]}),
    (
        Rule("teacher_model_server", _wrong_teacher, "teacher_model_server: {error}."),
        Rule("teacher_model_server vllm_server_host", _both,
             "{address} is named as a rollout server, which takes the run's weights, and as the teacher's, which keeps its own. Start the "
             "teacher at another port (megatron-grpo serve --frozen true)."),
    ),
    Rule("{flags} vllm_mode", _idle,
         "{named} says where rollout servers are, and vllm_mode ({vllm_mode}) samples inside the training ranks. Use vllm_mode server, or "
         "leave it out.", {"vllm_mode": ["server"]}),
    Rule("vllm_server_host vllm_mode", lambda c: c.vllm_mode == "server" and not c.vllm_server_host and not c.vllm_server_base_url,
         "vllm_mode server needs servers: name them with vllm_server_host (and vllm_server_port), or vllm_server_base_url."),
    (
        Rule("vllm_server_port vllm_server_host", lambda c: c.vllm_mode == "server" and len(_hosts(c)) > 1
             and len(c.vllm_server_port) not in (1, len(_hosts(c))) and {"ports": len(c.vllm_server_port), "hosts": len(_hosts(c))},
             "vllm_server_port has {ports} ports for {hosts} hosts: one for all of them, or one each."),
        Rule("vllm_server_base_url vllm_server_host", lambda c: c.vllm_mode == "server" and (wrong := _known(c)[1]) and {"wrong": wrong},
             "servers: {wrong}."),
        Rule("vllm_server_host", lambda c: c.vllm_mode == "server"
             and (wrong := [url for url in _hosts(c) if "/" in url or url.count(":") == 1]) and {"wrong": ", ".join(wrong)},
             "vllm_server_host ({wrong}) is a host alone: its port goes to vllm_server_port."),
    ),
    Rule("vllm_server_ca vllm_server_base_url", lambda c: c.vllm_mode == "server" and _spoken_to_plainly(c),
         "vllm_server_ca vouches for servers that are spoken to by https, and {plain} is not. Use https://."),
    Rule("{flags}", _of_the_engine,
         "{said}: with vllm_mode server the engine is the server's, which is started with {them} (megatron-grpo serve). Leave {them} out.",
         lambda c: c.near),
    Rule("vllm_server_ca", lambda c: c.vllm_mode == "server" and c.vllm_server_ca is not None and not Path(c.vllm_server_ca).is_file(),
         "vllm_server_ca ({vllm_server_ca}) is not a file. It holds certificates as PEM."),
)
# fmt: on
