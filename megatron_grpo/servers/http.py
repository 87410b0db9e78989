"""One rollout server, as the trainer speaks to it: calls and streams over HTTP, by the standard library alone. No torch."""

from __future__ import annotations

import http.client
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar, cast

from msgspec import Struct

from megatron_grpo.base.errors import ConfigError, Problem, keep_secret, said_by
from megatron_grpo.base.files import write_whole
from megatron_grpo.config.servers import Address
from megatron_grpo.servers import wire

SILENCE = 15.0  # seconds: who says nothing for so long, not even an empty line, is given up
CONNECT = 5.0  # seconds for what a server that lives answers at once
_REFUSAL = 1 << 16  # bytes of one that are read
NOT_HTTP = 0  # the status of a refusal that is ours
RUN_FILE = "server_run"  # in output_dir: the name by which servers know the run


class Gone(Exception):
    """The server did not answer, or stopped in the middle. The end of a sentence.

    is_silent: nobody closed the connection, so its machine or the way to it stands still, and the next call would wait as long.
    """

    def __init__(self, why: str, *, is_silent: bool = False):
        super().__init__(said_by(why))
        self.is_silent = is_silent


class Refused(Exception):
    """The server answered, and said no. status: of HTTP."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence

    @property
    def is_conflict(self) -> bool:
        """The server is another run's now, or holds other weights."""
        return self.status == http.client.CONFLICT

    @property
    def is_failure(self) -> bool:
        """Of the engine, so nobody can use this server."""
        return self.status >= http.client.INTERNAL_SERVER_ERROR


class Server:
    """An address, and how to speak to it. Every call has a connection of its own, so calls may come from any thread."""

    def __init__(self, address: Address, *, token: str, incarnation: str, trust: ssl.SSLContext | None = None):
        """trust: what vouches for servers that speak https (default: what vouches for the web)."""
        self.address, self.name = address, str(address)
        keep_secret(token)
        self._trust = trust
        self._headers = {wire.AUTHORIZATION: f"Bearer {token}", wire.INCARNATION: incarnation, "Content-Type": "application/json"}

    def __str__(self) -> str:
        return self.name

    def state(self, *, as_owner: bool = True) -> wire.State:
        """as_owner: keeps the server, and is refused where it is not this process's; without, whoever has the token may ask."""
        return wire.decode(wire.State, self.call("GET", "/state", timeout=CONNECT, as_owner=as_owner))

    def call(self, method: str, path: str, body: Struct | None = None, *, timeout: float, as_owner: bool = True) -> bytes:
        """The whole answer. timeout: seconds without a byte. Raises Refused and Gone."""
        with self._opened(method, path, body, timeout, as_owner) as answer, _as_gone():
            return answer.read()

    def lines(self, path: str, body: Struct) -> Iterator[bytes]:
        """The lines of an answer as they come; an empty one only says that the server lives. Raises Refused and Gone."""
        with self._opened("POST", path, body, SILENCE) as answer:
            while True:
                with _as_gone():
                    line = answer.readline()
                if not line:
                    return
                yield line

    @contextmanager
    def _opened(
        self, method: str, path: str, body: Struct | None, timeout: float, as_owner: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        host, port = self.address.host, self.address.port
        with _as_gone():
            connection = (
                http.client.HTTPSConnection(host, port, timeout=timeout, context=self._trust)
                if self.address.is_https
                else http.client.HTTPConnection(host, port, timeout=timeout)
            )
        headers = {name: value for name, value in self._headers.items() if as_owner or name != wire.INCARNATION}
        try:
            with _as_gone():
                connection.request(method, path, None if body is None else wire.encode(body), headers)
                answer = connection.getresponse()
                refusal = None if answer.status == http.client.OK else wire.decode_error(answer.read(_REFUSAL))
            if refusal is not None:
                raise Refused(answer.status, refusal)
            yield answer
        finally:
            connection.close()


@contextmanager
def _as_gone() -> Iterator[None]:
    """All ways in which the other end can fail, as one."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise Refused(NOT_HTTP, f"its certificate is not vouched for ({error.verify_message}); vllm_server_ca names who does") from error
    except TimeoutError as error:
        raise Gone("it said nothing for too long", is_silent=True) from error
    except (OSError, http.client.HTTPException) as error:
        raise Gone(str(error) or type(error).__name__) from error


Answered = TypeVar("Answered")


class Call(Generic[Answered]):
    """Something that is done in a thread: a server answers only after the trainer has done its part."""

    def __init__(self, work: Callable[[], Answered]):
        self.answer: Answered | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the thread is to have it
            self.error = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> Answered:
        """Its answer, within so many seconds. Raises what went wrong."""
        self._thread.join(max(0.0, seconds))
        if not self.has_ended:
            raise Gone(f"it has not answered within {seconds:.0f} s", is_silent=True)
        if self.error is not None:
            raise self.error
        return cast(Answered, self.answer)


def trust_of(path: str | None) -> ssl.SSLContext | None:
    """What vouches for servers. Raises ConfigError where the file holds no certificates."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as error:
        message = f"vllm_server_ca ({path}) holds no certificates as PEM: {error}."
        raise ConfigError([Problem(flags=("vllm_server_ca",), message=message)]) from error


def new_incarnation() -> str:
    """The name of this process among those of its run; a later one is greater."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


def run_name(output_dir: Path) -> str | None:
    """The name of the run that writes there; None if it has none yet."""
    try:
        return (output_dir / RUN_FILE).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def named_run(output_dir: Path) -> str:
    """As `run_name`; gives it one. The name stays when the run is started again, and tells a person which run it is."""
    name = run_name(output_dir)
    if name is None:
        name = f"{output_dir.resolve().name}-{secrets.token_hex(4)}"
        write_whole(output_dir / RUN_FILE, name + "\n")
    return name
