"""HTTP endpoint of agents: an ASGI application in a thread beside the engine. A key is an episode; nothing is answered without one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.core.base.errors import RunError, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.plugins.environments import agent_forms
from megatron_grpo.plugins.environments.agent_programs import AgentResult, Endpoint
from megatron_grpo.plugins.environments.agent_session import AgentRefusalError, AgentSession, AgentTurn, episode_over
from megatron_grpo.plugins.environments.players import Episode
from megatron_grpo.plugins.environments.protocol import as_finite_number
from megatron_grpo.plugins.listener import Listener, rate_limited_handler

MOST_BYTES, MOST_OPEN = 16 << 20, 32  # of one request; open requests of one session
SECONDS_OF_BODY = 60.0  # in which a client must have sent its request
SECONDS_BETWEEN_COMMENTS = 10.0  # of a stream that waits for its answer
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_LOG = logging.getLogger(__name__)
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAddress:
    """Address at which the endpoint of agents listens, with its certificate.

    Args:
        port: Port number; 0: a free one.
        certfile: TLS certificate.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certfile: str | None = None
    keyfile: str | None = None

    def listen(self) -> tuple[Listener, str]:
        """Return the listening socket, and its URL without a path. The URL of a wildcard address has the name of the machine.

        Raises:
            RunError: The address is in use or not of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server((self.host, self.port), family=family, backlog=1024)
        except OSError as error:
            raise RunError(
                f"The endpoint of agents cannot listen on {self.host} port {self.port} (agent_host, agent_port): {error}."
            ) from error
        port = listening.getsockname()[1]
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else f"[{self.host}]" if ":" in self.host else self.host
        return Listener(fileno=listening.detach()), f"{'https' if self.certfile else 'http'}://{name}:{port}"


@dataclass(slots=True, eq=False)
class AgentCall:
    """One sampled answer, with the clients that wait for it.

    Args:
        num_waiting: Number of clients that wait.
    """

    turn: AgentTurn
    session: AgentSession
    done: asyncio.Future[None]
    asked_at: float = field(default_factory=time.monotonic)
    num_waiting: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class AgentEpisode(Episode):
    """State of one episode of an agent.

    Args:
        api_key: Key of the agent.
        verdict_key: Key for the reward.
        reward: Reward that was sent to /v1/verdict, or that the agent returned.
    """

    session: AgentSession
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    verdict_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    endpoint: Endpoint | None = None
    reward: float | None = None
    result: AgentResult = AgentResult()


@dataclass(slots=True, eq=False)
class _Entry:
    episode: AgentEpisode
    calls: dict[str, AgentCall] = field(default_factory=dict)  # the last one of each body
    num_open: int = 0


class AgentServer:
    """The endpoint of the episodes of one rollout.

    Args:
        on_call: Passes a call to the engine's thread. `answered` is called when its turn is sampled.
        notify: Receives a description of each refused request, and of each sampling parameter that is not the run's.

    Attributes:
        url: Where it listens, without a path.
    """

    def __init__(
        self, episodes: Sequence[AgentEpisode], sampling: SamplingSettings, *, on_call: Callable[[AgentCall], None],
        notify: Callable[[str], None], address: EndpointAddress = EndpointAddress(),
    ):  # fmt: skip
        entries = [_Entry(episode) for episode in episodes]
        self._agents = {_digest(entry.episode.api_key): entry for entry in entries}
        self._verdicts = {_digest(entry.episode.verdict_key): entry for entry in entries}
        self._sampling, self._ask, self._notify = sampling, on_call, notify
        self._socket, self.url = address.listen()
        self._loop, self._server = asyncio.new_event_loop(), _server(self._app, address)
        self._loop.set_exception_handler(rate_limited_handler())
        self._thread = threading.Thread(target=self._run, name="agents' endpoint", daemon=True)
        self._thread.start()

    def answered(self, call: AgentCall) -> None:
        """Wake up the clients of a call. Called from the engine's thread."""
        self._loop.call_soon_threadsafe(_finish, call.done)

    def close(self) -> None:
        """End the endpoint and its open requests."""
        self._agents, self._verdicts = {}, {}
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    # ---- one request

    async def _app(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, headers = scope["path"], {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            entry = _entry(self._verdicts if path == "/v1/verdict" else self._agents, headers)
            self._socket.has_shown_the_token(tuple(scope["client"][:2]))
            await self._answer(scope["method"], path, headers, entry, receive, send)
        except AgentRefusalError as refusal:
            await _refuse(send, path, refusal)
        except Exception:  # noqa: BLE001 - a fault of the endpoint, which must not be repeated by a client
            _LOG.exception("The agents' endpoint failed to answer %s.", path)
            await _refuse(send, path, AgentRefusalError(500, "internal", "the endpoint failed; the log of the run has the traceback."))

    async def _answer(self, method: str, path: str, headers: dict[str, str], entry: _Entry, receive: Receive, send: Send) -> None:
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megatron-grpo"}
            return await _send_json(send, 200, {"object": "list", "data": [model]})
        form = agent_forms.FORMS.get(path.removesuffix("/count_tokens") if path.startswith("/v1/messages") else path)
        if method != "POST" or (form is None and path != "/v1/verdict"):
            raise AgentRefusalError(404, "not_found", f"{method} {path} is not a route of this endpoint.")
        if entry.num_open >= MOST_OPEN:
            raise AgentRefusalError(429, "too_many", f"{MOST_OPEN} requests of this key are open.", retry_after=1)
        entry.num_open += 1
        try:
            try:
                raw = await asyncio.wait_for(_body(receive), SECONDS_OF_BODY)
            except TimeoutError as error:
                raise AgentRefusalError(408, "too_slow", f"the body did not arrive within {SECONDS_OF_BODY:g} s.") from error
            body = _parse(raw)
            if form is None:
                return await _send_json(send, 200, _verdict(entry.episode, body))
            try:
                request = form.read(body)
                count = entry.episode.session.count_tokens(request) if path.endswith("/count_tokens") else 0
                stop = [text for text in request.stop if not entry.episode.session.template.is_end(text)]
                refusal = agent_forms.unsupported(body, self._sampling, stop)
            except (KeyError, TypeError, AttributeError, ValueError) as error:  # a field of another type than the protocol's
                raise agent_forms.invalid_request(f"the request cannot be read: {type(error).__name__} {one_line(error)}") from error
            if path.endswith("/count_tokens"):
                return await _send_json(send, 200, {"input_tokens": count})
            if refusal is not None:
                raise refusal
            call = self._call(entry, path, raw, headers, request, body)
            await _Reply(call, form, path, receive, send).run()
        except AgentRefusalError as refusal:
            entry.episode.session.counts["refused"] += 1
            if refusal.code != "episode_over":
                self._notify(f"{path} refused ({refusal.status} {refusal.code}): {refusal}")
            raise
        finally:
            entry.num_open -= 1

    def _call(
        self, entry: _Entry, path: str, raw: bytes, headers: dict[str, str], request: agent_forms.AgentRequest, body: dict[str, Any]
    ) -> AgentCall:
        """Return the call of a request: a new one, or the earlier one that it repeats."""
        session = entry.episode.session
        key = headers.get("idempotency-key", "")
        digest = hashlib.blake2b(f"{path}\0{key}\0".encode() + raw, digest_size=16).hexdigest()
        existing = entry.calls.get(digest)
        is_marked = headers.get("x-stainless-retry-count", "0") != "0" or bool(key)
        if existing is not None and not session.end_reason and (is_marked or (not existing.num_waiting and not existing.turn.is_read)):
            session.counts["retries"] += 1
            return existing
        turn = session.prepare(request)
        for words in agent_forms.overridden_parameters(body, self._sampling):
            session.counts["overruled"] += 1
            self._notify(words)
        call = entry.calls[digest] = AgentCall(turn, session, asyncio.get_running_loop().create_future())
        self._ask(call)
        return call


class _Reply:
    """The answer of one call to one client."""

    def __init__(self, call: AgentCall, form: agent_forms.ApiProtocol, path: str, receive: Receive, send: Send):
        self._call, self._form, self._path, self._receive, self._send = call, form, path, receive, send
        self._has_begun = False

    async def run(self) -> None:
        """Wait for the turn and send it. A client that leaves may send the request again: its turn is sampled all the same."""
        call, client_gone = self._call, asyncio.ensure_future(self._receive())  # after the body it returns when the client leaves
        is_streamed = call.turn.request.is_streamed
        call.num_waiting += 1
        try:
            while not call.done.done():
                await asyncio.wait(
                    [call.done, client_gone], timeout=SECONDS_BETWEEN_COMMENTS if is_streamed else None, return_when=asyncio.FIRST_COMPLETED
                )
                if client_gone.done():
                    return
                if not call.done.done():
                    await self._write(": wait\n\n")
            if call.turn.refusal is not None:
                await self._refuse(call.turn.refusal)
            elif is_streamed:
                *first, last = self._form.events(call.turn)
                await self._write("".join(first))
                await asyncio.sleep(0)  # a client that has left is noticed here
                if not client_gone.done():
                    await self._deliver(self._send({"type": "http.response.body", "body": last.encode()}))
            elif not client_gone.done():
                await self._deliver(_send_json(self._send, 200, self._form.answer(call.turn)))
        finally:
            call.num_waiting -= 1
            client_gone.cancel()

    async def _deliver(self, sending: Awaitable[None]) -> None:
        """Send the end of the answer. It counts as read before: the episode may end as soon as the agent has it."""
        turn = self._call.turn
        was_delivered, turn.is_read = turn.is_read, True
        try:
            await sending
        except BaseException:
            turn.is_read = was_delivered
            raise

    async def _write(self, text: str) -> None:
        if not self._has_begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_begun = True
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def _refuse(self, refusal: AgentRefusalError) -> None:
        if not self._has_begun:
            raise refusal
        text = f"event: error\ndata: {json.dumps(agent_forms.error_body(self._path, refusal))}\n\n"
        await self._send({"type": "http.response.body", "body": text.encode()})


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _server(app: Any, address: EndpointAddress) -> Any:
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
                                         timeout_keep_alive=60, interface="asgi3", proxy_headers=False, http="h11",
                                         ssl_certfile=address.certfile, ssl_keyfile=address.keyfile))  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _entry(entries: dict[bytes, _Entry], headers: dict[str, str]) -> _Entry:
    """Return the open episode of a key. It is found by its digest, so the time of the answer tells nothing about the keys."""
    entry = entries.get(_digest(headers.get("x-api-key") or headers.get("authorization", "").partition(" ")[2]))
    if entry is None:
        raise AgentRefusalError(401, "episode_over", "no open episode has this key.")
    if entry.episode.session.end_reason == "done":
        raise episode_over("done")
    return entry


def _verdict(episode: AgentEpisode, body: dict[str, Any]) -> dict[str, Any]:
    number = None if isinstance(body.get("reward"), bool) else as_finite_number(body.get("reward"))
    if number is None:
        raise agent_forms.invalid_request("reward must be a finite number.")
    episode.reward = number
    return {}


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode()
        body = parse_json(text)
        if _SURROGATE.search(text):  # half of a pair is no text: neither tokenizers nor files accept it
            json.dumps(body, ensure_ascii=False).encode()
    except ValueError as error:
        raise agent_forms.invalid_request(f"the body is not JSON in UTF-8: {one_line(error)}") from error
    if not isinstance(body, dict):
        raise agent_forms.invalid_request("the body must be a JSON object.")
    return body


async def _body(receive: Receive) -> bytes:
    parts, size, has_more = list[bytes](), 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise agent_forms.invalid_request("the body is incomplete.")
        parts.append(message.get("body", b""))
        size, has_more = size + len(parts[-1]), message.get("more_body", False)
        if size > MOST_BYTES:
            raise AgentRefusalError(413, "too_large", f"the body has more than {MOST_BYTES >> 20} MiB.")
    return b"".join(parts)


async def _refuse(send: Send, path: str, refusal: AgentRefusalError) -> None:
    headers = [(b"x-should-retry", b"false" if refusal.retry_after is None else b"true")]
    if refusal.retry_after is not None:
        headers.append((b"retry-after", str(refusal.retry_after).encode()))
    if refusal.status in (401, 408, 413):
        headers.append((b"connection", b"close"))
    await _send_json(send, refusal.status, agent_forms.error_body(path, refusal), headers)


async def _send_json(send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps(value).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
