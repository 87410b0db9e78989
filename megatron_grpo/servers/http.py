"""One rollout server, as the trainer speaks to it: calls and streams over HTTP, all on one asyncio loop of this process. No torch."""

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

from megatron_grpo.base.errors import config_error, keep_secret, said_by
from megatron_grpo.base.files import write_whole
from megatron_grpo.config.servers import Address
from megatron_grpo.servers import wire

if TYPE_CHECKING:
    import httpx2

SILENCE = 15.0  # seconds: who says nothing for so long, not even an empty line, is given up
CONNECT = 5.0  # seconds for what a server that lives answers at once
_REFUSAL = 1 << 16  # bytes of one that are read
NOT_HTTP = 0  # the status of a refusal that is ours
RUN_FILE = "server_run"  # in output_dir: the name by which servers know the run


class ServerGoneError(Exception):
    """The server did not answer, or stopped in the middle. The end of a sentence.

    is_silent: nobody closed the connection, so its machine or the way to it stands still, and the next call would wait as long.
    """

    def __init__(self, why: str, *, is_silent: bool = False):
        super().__init__(said_by(why))
        self.is_silent = is_silent


class ServerRefusedError(Exception):
    """The server answered, and said no. status: of HTTP."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence

    @property
    def is_conflict(self) -> bool:
        """The server is another run's now, or holds other weights."""
        return self.status == http.HTTPStatus.CONFLICT

    @property
    def is_failure(self) -> bool:
        """Of the engine, so nobody can use this server."""
        return self.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR


class Server:
    """An address, and how to speak to it. Every call has a connection of its own: one that waited for the next call may have been closed
    by the server, which would look like a server that has gone."""

    def __init__(self, address: Address, *, token: str, incarnation: str, trust: ssl.SSLContext | None = None):
        """trust: what vouches for servers that speak https (default: what vouches for the web)."""
        self.address, self.name = address, str(address)
        keep_secret(token)
        self._trust = trust
        self._headers = {wire.AUTHORIZATION: f"Bearer {token}", wire.INCARNATION: incarnation, "Content-Type": "application/json"}

    def __str__(self) -> str:
        return self.name

    async def state(self, *, as_owner: bool = True) -> wire.State:
        """as_owner: keeps the server, and is refused where it is not this process's; without, whoever has the token may ask."""
        return wire.decode(wire.State, await self.call("GET", "/state", timeout=CONNECT, as_owner=as_owner))

    async def call(self, method: str, path: str, body: Struct | None = None, *, timeout: float, as_owner: bool = True) -> bytes:
        """The whole answer. timeout: seconds without a byte. Raises Refused and Gone."""
        async with self._opened(method, path, body, timeout, as_owner) as answer:
            return b"".join([piece async for piece in answer.aiter_raw()])

    async def hear(self, path: str, body: Struct, take: Callable[[bytes], object]) -> None:
        """Gives the lines of an answer to `take` as they come; an empty one only says that the server lives. Raises Refused and Gone."""
        line: list[bytes] = []
        async with self._opened("POST", path, body, SILENCE) as answer:
            async for piece in answer.aiter_raw():
                *ends, rest = piece.split(b"\n")
                for end in ends:
                    take(b"".join([*line, end, b"\n"]))
                    line = []
                line.append(rest)
        if any(line):
            take(b"".join(line))

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Struct | None, timeout: float, as_owner: bool = True
    ) -> AsyncIterator[httpx2.Response]:
        headers = {name: value for name, value in self._headers.items() if as_owner or name != wire.INCARNATION}
        content = None if body is None else wire.encode(body)
        with _as_gone():
            async with self._client.stream(method, self.name + path, content=content, headers=headers, timeout=timeout) as answer:
                if answer.status_code != http.HTTPStatus.OK:
                    raise ServerRefusedError(answer.status_code, wire.decode_error(await _beginning(answer)))
                yield answer

    @cached_property
    def _client(self) -> httpx2.AsyncClient:
        import httpx2  # a tenth of a second: for who asks servers alone

        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        trust = (self._trust or ssl.create_default_context()) if self.address.is_https else False
        return httpx2.AsyncClient(verify=trust, limits=limits, trust_env=False)  # no proxy, whatever the environment names


async def _beginning(answer: httpx2.Response) -> bytes:
    found = b""
    async for piece in answer.aiter_raw():
        found += piece
        if len(found) >= _REFUSAL:
            break
    return found[:_REFUSAL]


@contextmanager
def _as_gone() -> Iterator[None]:
    """All ways in which the other end can fail, as one."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException as error:
        raise ServerGoneError("it said nothing for too long", is_silent=True) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        root = _root(error)
        if isinstance(root, ssl.SSLCertVerificationError):
            who = f"its certificate is not vouched for ({root.verify_message}); vllm_server_ca names who does"
            raise ServerRefusedError(NOT_HTTP, who) from error
        number = root.errno if isinstance(root, OSError) and not isinstance(root, ssl.SSLError) else None
        if number is not None and number > 0:  # asyncio has other words, with the address in them
            raise ServerGoneError(f"[Errno {number}] {os.strerror(number)}") from error
        raise ServerGoneError(str(root) or type(root).__name__) from error


def _root(error: BaseException) -> BaseException:
    """What the operating system or TLS said, where one of them did."""
    root, below = error, error.__cause__ or error.__context__
    while below is not None:
        root = below if isinstance(below, OSError) else root
        below = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below.__cause__ or below.__context__
    return root


# ---- the loop

Answered = TypeVar("Answered")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """On which all calls to servers are made, in a thread of its own: the main thread trains meanwhile."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="calls to servers", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a child does not have the thread


def begun(work: Coroutine[Any, Any, Answered]) -> Future[Answered]:
    """Work on the loop, for another thread, which may wait for it or cancel it."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def together(works: Iterable[Coroutine[Any, Any, Answered]]) -> list[Answered]:
    """What all of these come to, done at the same time; waits for them. Raises what the first one raises that fails."""

    async def all_of_them() -> list[Answered]:
        return await asyncio.gather(*works)

    return begun(all_of_them()).result()


async def within(seconds: float, work: Awaitable[Answered]) -> Answered:
    """Raises Gone where it takes longer."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise _late(seconds) from error


def answer_of(call: Future[Answered], seconds: float) -> Answered:
    """What `begun` work comes to, within so many seconds from now. Raises what went wrong."""
    try:
        return call.result(max(0.0, seconds))
    except TimeoutError as error:
        call.cancel()
        raise _late(seconds) from error


def _late(seconds: float) -> ServerGoneError:
    return ServerGoneError(f"it has not answered within {seconds:.0f} s", is_silent=True)


# ---- who is asked in whose name


def trust_of(path: str | None) -> ssl.SSLContext | None:
    """What vouches for servers. Raises ConfigError where the file holds no certificates."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise config_error("vllm_server_ca", f"vllm_server_ca ({path}) holds no certificates as PEM: {error}.") from error


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
