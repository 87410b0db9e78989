"""HTTP client of a rollout server: calls and streams on one asyncio event loop per process. The module does not import torch."""

from __future__ import annotations

import asyncio
import http
import os
import secrets
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from megatron_grpo.core.base.errors import config_error, keep_secret, one_line
from megatron_grpo.core.base.files import atomic_write_text
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import Address

if TYPE_CHECKING:
    import httpx2

SILENCE = 15.0  # seconds without a byte, not even a heartbeat line, after which a stream counts as lost
CONNECT = 5.0  # timeout in seconds of calls that a healthy server answers at once
_REFUSAL = 1 << 16  # largest number of bytes read of an error response
NOT_HTTP = 0  # status of a refusal by the client itself
RUN_FILE = "server_run"  # file in output_dir with the name of the run


class ServerGoneError(Exception):
    """Error raised if a server does not answer, or stops in the middle of a response.

    Args:
        is_silent: True if the connection was not closed: the server's machine or the network hangs, and another call would wait as long.
    """

    def __init__(self, reason: str, *, is_silent: bool = False):
        super().__init__(one_line(reason))
        self.is_silent = is_silent


class ServerRefusedError(Exception):
    """Error raised if a server refuses a request.

    Args:
        status: HTTP status, or `NOT_HTTP`.
    """

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence

    @property
    def is_conflict(self) -> bool:
        """Whether another run owns the server, or it has other weights (409)."""
        return self.status == http.HTTPStatus.CONFLICT

    @property
    def is_failure(self) -> bool:
        """Whether the engine failed, so that the server is unusable (500 and above)."""
        return self.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR


class Server:
    """Client of one server.

    Every call opens a new connection: the server may close an idle connection, and a call on it would look like a lost server.

    Args:
        trust: TLS context that verifies https servers; default: the system's certificates.
    """

    def __init__(self, address: Address, *, token: str, incarnation: str, trust: ssl.SSLContext | None = None):
        self.address, self.name = address, str(address)
        keep_secret(token)
        self._trust = trust
        self._headers = {wire.AUTHORIZATION: f"Bearer {token}", wire.INCARNATION: incarnation, "Content-Type": "application/json"}

    def __str__(self) -> str:
        return self.name

    async def state(self, *, as_owner: bool = True) -> wire.ServerState:
        """Request the state of the server.

        Args:
            as_owner: Whether to send the incarnation: this renews the lease, and is refused if this process does not own the server.
                Otherwise the token suffices.

        Raises:
            ServerRefusedError: The server refused the request.
            ServerGoneError: The server did not answer.
            MalformedMessageError: The response is not a `wire.ServerState`.
        """
        return wire.decode(wire.ServerState, await self.call("GET", "/state", timeout=CONNECT, as_owner=as_owner))

    async def call(self, method: str, path: str, body: Struct | None = None, *, timeout: float, as_owner: bool = True) -> bytes:
        """Make a request and return the whole response body.

        Args:
            timeout: Longest time without a byte in seconds.
            as_owner: Whether to send the incarnation.

        Raises:
            ServerRefusedError: The status is not 200.
            ServerGoneError: The connection failed or timed out.
        """
        async with self._opened(method, path, body, timeout, as_owner) as answer:
            return b"".join([piece async for piece in answer.aiter_raw()])

    async def stream(self, path: str, body: Struct, take: Callable[[bytes], object]) -> None:
        """Make a POST request and pass each line of the response to `take` as it arrives. An empty line is a heartbeat.

        Args:
            take: Called with each line, including its newline; an incomplete last line has none.

        Raises:
            ServerRefusedError: The status is not 200.
            ServerGoneError: The connection failed, or no byte arrived for `SILENCE` seconds.
        """
        line: list[bytes] = []
        async with self._opened("POST", path, body, SILENCE) as answer:
            async for piece in answer.aiter_raw():
                *ends, last = piece.split(b"\n")
                for end in ends:
                    take(b"".join([*line, end, b"\n"]))
                    line = []
                line.append(last)
        if any(line):
            take(b"".join(line))

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Struct | None, timeout: float, as_owner: bool = True
    ) -> AsyncIterator[httpx2.Response]:
        headers = {name: value for name, value in self._headers.items() if as_owner or name != wire.INCARNATION}
        content = None if body is None else wire.encode(body)
        with _connection_errors():
            async with self._client.stream(method, self.name + path, content=content, headers=headers, timeout=timeout) as answer:
                if answer.status_code != http.HTTPStatus.OK:
                    raise ServerRefusedError(answer.status_code, wire.decode_error(await _beginning(answer)))
                yield answer

    @cached_property
    def _client(self) -> httpx2.AsyncClient:
        import httpx2  # takes a tenth of a second, so it is imported at first use

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        trust = (self._trust or ssl.create_default_context()) if self.address.is_https else False
        return httpx2.AsyncClient(verify=trust, limits=limits, trust_env=False)  # ignores proxies in environment variables


async def _beginning(answer: httpx2.Response) -> bytes:
    beginning = b""
    async for piece in answer.aiter_raw():
        beginning += piece
        if len(beginning) >= _REFUSAL:
            break
    return beginning[:_REFUSAL]


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Convert all connection errors to ServerGoneError, and an invalid certificate to ServerRefusedError."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException as error:
        raise ServerGoneError("it did not respond in time", is_silent=True) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        root = _root(error)
        if isinstance(root, ssl.SSLCertVerificationError):
            reason = f"its certificate is not trusted ({root.verify_message}); set vllm_server_ca to its CA"
            raise ServerRefusedError(NOT_HTTP, reason) from error
        number = root.errno if isinstance(root, OSError) and not isinstance(root, ssl.SSLError) else None
        if number is not None and number > 0:  # asyncio's own message differs and includes the address
            raise ServerGoneError(f"[Errno {number}] {os.strerror(number)}") from error
        raise ServerGoneError(str(root) or type(root).__name__) from error


def _root(error: BaseException) -> BaseException:
    """Return the innermost OSError (of the operating system or TLS) in the chain of causes, or the error itself."""
    root, inner = error, error.__cause__ or error.__context__
    while inner is not None:
        root = inner if isinstance(inner, OSError) else root
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__ or inner.__context__
    return root


# ---- the loop

Answered = TypeVar("Answered")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all calls to servers. It runs in a separate thread, since the main thread trains meanwhile."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="calls to servers", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a forked child does not inherit the thread


def start_coroutine(work: Coroutine[Any, Any, Answered]) -> Future[Answered]:
    """Start a coroutine on the event loop of calls to servers.

    Returns:
        A future that another thread can wait for or cancel.
    """
    return asyncio.run_coroutine_threadsafe(work, _loop())


def gather_results(coroutines: Iterable[Coroutine[Any, Any, Answered]]) -> list[Answered]:
    """Execute coroutines concurrently on the event loop, and wait for all results.

    Returns:
        Their results in order. The first exception of any of them is raised.
    """

    async def all_of_them() -> list[Answered]:
        return await asyncio.gather(*coroutines)

    return start_coroutine(all_of_them()).result()


async def with_timeout(seconds: float, work: Awaitable[Answered]) -> Answered:
    """Await `work` with a timeout.

    Raises:
        ServerGoneError: The timeout passed.
    """
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise _timeout_error(seconds) from error


def wait_for_answer(call: Future[Answered], seconds: float) -> Answered:
    """Wait for a call that `run_in_thread` started, and cancel it after a timeout.

    Raises:
        ServerGoneError: The timeout passed. Exceptions of the call are raised as they are.
    """
    try:
        return call.result(max(0.0, seconds))
    except TimeoutError as error:
        call.cancel()
        raise _timeout_error(seconds) from error


def _timeout_error(seconds: float) -> ServerGoneError:
    return ServerGoneError(f"it did not respond within {seconds:.0f} s", is_silent=True)


# ---- certificates and names


def make_tls_context(path: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for `vllm_server_ca`.

    Args:
        path: PEM file with CA certificates; None: the default of `Server`.

    Raises:
        ConfigError: The file holds no certificates.
    """
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise config_error("vllm_server_ca", f"vllm_server_ca ({path}) is not a PEM file with certificates: {error}.") from error


def new_incarnation() -> str:
    """Return a name for this process within its run. The name of a later process is greater."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


def run_name(output_dir: Path) -> str | None:
    """Return the name of a run, or None if it has none yet."""
    try:
        return (output_dir / RUN_FILE).read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def read_run_name(output_dir: Path) -> str:
    """Return the name of a run, and create one if it has none.

    The name begins with that of the directory, and stays the same when the run is resumed.
    """
    name = run_name(output_dir)
    if name is None:
        name = f"{output_dir.resolve().name}-{secrets.token_hex(4)}"
        atomic_write_text(output_dir / RUN_FILE, name + "\n")
    return name
