"""Addresses, certificates and token of servers, from settings and files. No torch, and no connection is made."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.base.files import read_text
from megatron_grpo.core.settings import GrpoConfig, RolloutConfig

TOKEN_VARIABLE = "MEGATRON_GRPO_TOKEN"  # environment variable from which both sides read the token
FROM_FILE = "@"  # prefix of the name of a file or directory of addresses


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
        return is_loopback(self.host)

    @classmethod
    def from_url(cls, url: str) -> Address:
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


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_certificate_fault(certfile: str, keyfile: str | None, key_flag: str) -> str | None:
    """Return why a certificate cannot be used, as the end of a sentence behind its file; None if it can."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        key = f" and {key_flag} ({keyfile})" if keyfile else ""
        return f"{key} cannot be used: {getattr(error, 'strerror', None) or error}. Use PEM files, and a key without a password."
    return None


def list_addresses(cfg: RolloutConfig) -> list[Address]:
    """Return the addresses of all rollout servers that are known now.

    Files are read anew on each call: servers come and go, and may not have written theirs yet.

    Raises:
        ValueError: If a file contains anything but addresses.
    """
    addresses = [_read_url(url, "vllm_server_base_url ") for url in cfg.vllm_server_base_url]
    hosts = [host for host in cfg.vllm_server_host if not host.startswith(FROM_FILE)]
    ports = cfg.vllm_server_port
    if hosts:
        hosts, ports = (hosts * len(ports) if len(hosts) == 1 else hosts), (ports * len(hosts) if len(ports) == 1 else ports)
        addresses += [Address(host, port, cfg.vllm_server_ca is not None) for host, port in zip(hosts, ports, strict=True)]
    addresses += [address for host in cfg.vllm_server_host if host.startswith(FROM_FILE) for address in _read_word(host)]
    return list(dict.fromkeys(addresses))


def teacher_addresses(cfg: GrpoConfig) -> list[Address]:
    """Return the addresses of the teacher's servers that are known now, as `list_addresses` does for rollout servers.

    Args:
        cfg: Settings that name the teacher.

    Raises:
        ValueError: If a word or a file is not an address.
    """
    return list(dict.fromkeys(address for word in cfg.teacher_model_server for address in _read_word(word)))


def _read_word(word: str) -> Iterable[Address]:
    """Return the address that a word is, or those in the file or directory that it names."""
    return _in_files(Path(word.removeprefix(FROM_FILE))) if word.startswith(FROM_FILE) else [_read_url(word)]


def _read_url(url: str, prefix: str = "") -> Address:
    """Return the address of a server. An error begins with `prefix`."""
    try:
        return Address.from_url(url)
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
    """Return the file in which a server stores the token that it generates if it was given none."""
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megatron-grpo" / "token"


def read_private(path: Path, flag: str) -> str:
    """Return the content of a file that only its owner may read.

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
