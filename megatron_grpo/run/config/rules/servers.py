"""Addresses and token of the rollout servers, from settings and files. No torch, and no connection is made."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.base.files import read_text
from megatron_grpo.core.settings import GrpoConfig, RolloutConfig
from megatron_grpo.run.config.rules import Rule, changed

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"  # environment variable from which both sides read the token
CALLS = 2  # concurrent calls per server, each large enough to fill it, so that it is never half empty before the end
FROM_FILE = "@"  # prefix of the name of a file or directory of addresses
NAMES = ("vllm_server_host", "vllm_server_base_url")
# Settings with which an engine is started. Servers have their own: the trainer then has no engine.
OF_THE_ENGINE = (
    *("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_kv_cache_memory_mb", "vllm_max_model_len", "vllm_max_num_seqs"),
    *("vllm_dtype", "vllm_enforce_eager", "vllm_enable_prefix_caching", "sleep_level"),
)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Address of a server.

    Args:
        host: Host name or IP address.
        port: TCP port.
        is_https: Whether the server uses TLS.
    """

    host: str
    port: int
    is_https: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_https}://{host}:{self.port}"

    @property
    def is_here(self) -> bool:
        """Return whether the server is on this machine, so that no traffic leaves it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Parse a URL of scheme, host and port.

        Args:
            url: Such as http://host:8000.

        Raises:
            ValueError: With the end of a sentence, if it is no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is not a URL of the form http://host:8000")
        if parts.path.strip("/") or parts.query or parts.username:
            raise ValueError("contains more than scheme, host and port")
        return cls(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")


def addresses_of(cfg: RolloutConfig) -> list[Address]:
    """Return the addresses of all rollout servers that are known now.

    Files are read anew on each call: servers come and go, and may not have written theirs yet.

    Args:
        cfg: Settings of the rollout.

    Raises:
        ValueError: If a file contains anything but addresses.
    """
    addresses = [_read_url(url, "vllm_server_base_url ") for url in cfg.vllm_server_base_url]
    hosts = [host for host in cfg.vllm_server_host if not host.startswith(FROM_FILE)]
    ports = cfg.vllm_server_port
    if hosts:
        hosts, ports = (hosts * len(ports) if len(hosts) == 1 else hosts), (ports * len(hosts) if len(ports) == 1 else ports)
        addresses += [Address(host, port, cfg.vllm_server_ca is not None) for host, port in zip(hosts, ports, strict=True)]
    for host in cfg.vllm_server_host:
        if host.startswith(FROM_FILE):
            addresses += _in_files(Path(host.removeprefix(FROM_FILE)))
    return list(dict.fromkeys(addresses))


def teacher_addresses(cfg: GrpoConfig) -> list[Address]:
    """Return the addresses of the teacher's servers that are known now, as `addresses_of` does for rollout servers.

    Args:
        cfg: Settings that name the teacher.

    Raises:
        ValueError: If a word or a file is not an address.
    """
    addresses: list[Address] = []
    for word in cfg.teacher_model_server:
        if word.startswith(FROM_FILE):
            addresses += _in_files(Path(word.removeprefix(FROM_FILE)))
            continue
        addresses.append(_read_url(word))
    return list(dict.fromkeys(addresses))


def _read_url(url: str, prefix: str = "") -> Address:
    """Return the address of a server. An error begins with `prefix`."""
    try:
        return Address.of_url(url)
    except ValueError as error:
        raise ValueError(f"{prefix}{url[:80]!r} {error}") from error


def _in_files(path: Path) -> Iterator[Address]:
    """Yield the addresses in a file, or in all files of a directory, one per line; nothing if it does not exist yet."""
    try:
        files = sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]
        for file in files:
            for number, line in enumerate(read_text(file).splitlines(), 1):
                if line.strip():
                    yield _read_url(line.strip(), f"{file}, line {number}: ")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"@{path} cannot be read: {error.strerror}") from error


def default_token_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file in which a server stores the token that it generates if it was given none.

    Args:
        environment: Environment variables.
    """
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megatron-grpo" / "token"


def read_private(path: Path, flag: str) -> str:
    """Return the content of a file that only its owner may read.

    Args:
        path: The file.
        flag: Setting that names it.

    Raises:
        ConfigError: If it cannot be read, or if others can read it.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            content = stream.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(flag, f"{flag} ({path}) cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise config_error(flag, f"{flag} ({path}) is readable by other users (mode {mode:o}). Run `chmod 600 {path}`.")
    return content


def read_token(cfg: RolloutConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token of all servers.

    It is read from the file that is configured, else from the environment variable, else from the file where a server stores a generated
    one.

    Args:
        cfg: Settings of the rollout.
        environment: Environment variables.

    Raises:
        ConfigError: If there is no token, or if others can read its file.
    """
    path, flag = cfg.vllm_server_token_file, "vllm_server_token_file"
    if path is None:
        if token := environment.get(TOKEN_VARIABLE, "").strip():
            return token
        path = str(default_token_file(environment))
        if not Path(path).exists():
            raise config_error(flag, f"rollout and teacher servers require a token. Set the variable {TOKEN_VARIABLE}, or set {flag} to "
                                     "the file that contains it.")  # fmt: skip
    token = read_private(Path(path), flag)
    if not token:
        raise config_error(flag, f"{flag} ({path}) is empty.")
    return token


def chunk_size(num_prompts: int, *, n: int, num_servers: int, max_num_seqs: int) -> int:
    """Return the prompts of one call: enough to fill the server, at most an equal share of all calls to all servers.

    Args:
        num_prompts: Prompts of the rollout.
        n: Completions per prompt.
        num_servers: Number of servers.
        max_num_seqs: Sequences that a server processes at once.
    """
    return max(1, min(max_num_seqs // n, -(-num_prompts // (num_servers * CALLS))))


# ---- rules


def _of_the_engine(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for typed engine settings if the engine belongs to a server."""
    engine = [name for name in OF_THE_ENGINE if name in c.cfg.typed and not (name == "vllm_max_model_len" and c.cfg.turns.has_agent)]
    settings = changed(c, *engine) if c.vllm_mode == "server" else []
    if not settings:
        return None
    names, defaults = ", ".join(f"{s['name']} ({s['value']})" for s in settings), {s["name"]: [s["off"]] for s in settings}
    return {"flags": " ".join(defaults), "said": names, "near": defaults, "them": "it" if len(settings) == 1 else "them"}


def _idle(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for settings that name servers if no server samples."""
    idle_names = [name for name in NAMES if getattr(c, name)] if c.vllm_mode != "server" else []
    return {"flags": " ".join(idle_names), "named": " and ".join(idle_names)} if idle_names else None


def _server_addresses(c: SimpleNamespace) -> tuple[list[Address], str]:
    """Return (addresses of the rollout servers, what is wrong with them)."""
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


def _servers_that_are_teachers(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for a server that is named both as rollout server and as teacher."""
    teachers = teacher_addresses(c.cfg.grpo)
    common = [address for address in _server_addresses(c)[0] if address in teachers]
    return {"address": common[0]} if common else None


def _plain_http_servers(c: SimpleNamespace) -> dict[str, Any] | None:
    plain = [str(address) for address in _server_addresses(c)[0] if not address.is_https]
    return {"plain": ", ".join(plain)} if c.vllm_server_ca is not None and plain else None


# fmt: off
SERVERS = (
    Rule("teacher_model teacher_model_server", lambda c: c.teacher_model and c.teacher_model_server,
         "teacher_model ({teacher_model}), a teacher in the training ranks, and teacher_model_server, a teacher on servers, cannot be "
         "combined. Use one of them."),
    Rule("offload_teacher_model", lambda c: c.offload_teacher_model and not c.teacher_model,
         "offload_teacher_model requires teacher_model, which is not set. Omit it.",
         {"offload_teacher_model": [False]}),
    (
        Rule("teacher_model_server", _wrong_teacher, "teacher_model_server: {error}."),
        Rule("teacher_model_server vllm_server_host", _servers_that_are_teachers,
             "{address} is both a rollout server, whose weights the run updates, and a teacher server, whose weights are fixed. Start the "
             "teacher on another port (megatron-grpo serve --frozen true)."),
    ),
    Rule("{flags} vllm_mode", _idle,
         "{named} sets addresses of rollout servers, but vllm_mode ({vllm_mode}) samples inside the training ranks. Use vllm_mode server, "
         "or omit it.", {"vllm_mode": ["server"]}),
    Rule("vllm_server_host vllm_mode", lambda c: c.vllm_mode == "server" and not c.vllm_server_host and not c.vllm_server_base_url,
         "vllm_mode server requires rollout servers. Set vllm_server_host (and vllm_server_port), or vllm_server_base_url."),
    (
        Rule("vllm_server_port vllm_server_host", lambda c: c.vllm_mode == "server" and len(_hosts(c)) > 1
             and len(c.vllm_server_port) not in (1, len(_hosts(c))) and {"ports": len(c.vllm_server_port), "hosts": len(_hosts(c))},
             "vllm_server_port has {ports} ports for {hosts} hosts. Set one port for all hosts, or one per host."),
        Rule("vllm_server_base_url "
            "vllm_server_host", lambda c: c.vllm_mode == "server" and (invalid := _server_addresses(c)[1]) and {"wrong": invalid},
             "servers: {wrong}."),
        Rule("vllm_server_host", lambda c: c.vllm_mode == "server"
             and (invalid := [url for url in _hosts(c) if "/" in url or url.count(":") == 1]) and {"wrong": ", ".join(invalid)},
             "vllm_server_host ({wrong}) must be a host without a port. Set the port with vllm_server_port."),
    ),
    Rule("vllm_server_ca vllm_server_base_url", lambda c: c.vllm_mode == "server" and _plain_http_servers(c),
         "vllm_server_ca requires https, and {plain} does not use it. Use https://."),
    Rule("{flags}", _of_the_engine,
         "{said}: no effect with vllm_mode server. Pass {them} to `megatron-grpo serve`, and omit {them} here.",
         lambda c: c.near),
    Rule("vllm_server_ca", lambda c: c.vllm_mode == "server" and c.vllm_server_ca is not None and not Path(c.vllm_server_ca).is_file(),
         "vllm_server_ca ({vllm_server_ca}) is not a file. Expected a file with certificates (PEM)."),
)
# fmt: on
