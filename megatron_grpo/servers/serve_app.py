"""The routes of a rollout server, and the door before them. There are no others, and nothing behind the door is reached without the token.

What is asked is decided by `serve_state`, and done by `serve_engine`; this file reads bodies and writes answers (`wire`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, structs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megatron_grpo.base.errors import keep_secret, said_by
from megatron_grpo.config.sampling_mask import MOST
from megatron_grpo.servers import wire
from megatron_grpo.servers.serve_engine import ServedEngine, WeightPushError
from megatron_grpo.servers.serve_state import Ownership, RequestRefusedError, SentPictures, ServerMetrics

Done = TypeVar("Done")
Line = TypeVar("Line", bound=Struct)


class AuthenticationMiddleware:
    """The outermost layer: without the token nothing is answered but 401, whatever the path or the method."""

    def __init__(self, app: Any, token: str, metrics: ServerMetrics, let_in: Callable[[tuple[str, int]], None]):
        """let_in: is told from where the token has come."""
        self._app, self._metrics, self._let_in = app, metrics, let_in
        keep_secret(token)
        self._wanted = hashlib.sha256(f"Bearer {token}".encode()).digest()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] != 200:
                self._metrics.refusals.labels(status=message["status"]).inc()
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        # Of digests, so that the time tells neither how much of it is right nor how long it is.
        if scope["type"] != "http" or not hmac.compare_digest(hashlib.sha256(given).digest(), self._wanted):
            refusal = _error(401, "the token is missing or wrong")
            refusal.headers["Connection"] = "close"
            return await refusal(scope, receive, counted)
        self._let_in(scope["client"])
        await self._app(scope, receive, counted)


class App:
    """One server's state and its routes."""

    def __init__(
        self,
        engine: ServedEngine,
        *,
        model: str,
        shape: dict[str, Any],
        metrics: ServerMetrics,
        tells_metrics: bool,
        say: Callable[[str], None],
    ):
        """shape: `weights.shape.flat` of the model. tells_metrics: whether /metrics answers. say: tells a person what happens."""
        self.ownership = Ownership()
        self._engine, self._model, self._metrics, self._tells_metrics, self._say = engine, model, metrics, tells_metrics, say
        self._shape, self._boot = shape, secrets.token_hex(8)
        self._pictures = SentPictures()
        self._changing = asyncio.Lock()  # joins, pushes, and what an earlier owner left: one at a time
        self._work: set[asyncio.Task[Any]] = set()  # of this tenure, in the engine
        self._over: asyncio.Future[None] = asyncio.Future()  # when this tenure ends
        self._has_orphans = False
        metrics.watch(self)

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._work)

    def asgi(self, token: str, let_in: Callable[[tuple[str, int]], None]) -> AuthenticationMiddleware:
        asked = (self.state, self.metrics)
        routes = [Route(f"/{route.__name__}", route, methods=["GET"]) for route in asked]
        routes += [Route(f"/{route.__name__}", route, methods=["POST"]) for route in self.served()]
        known = (*_STATUS, self._engine.Dead, HTTPException, Exception)
        app = Starlette(routes=routes, exception_handlers={kind: _failed for kind in known})
        return AuthenticationMiddleware(app, token, self._metrics, let_in)

    def served(self) -> tuple[Callable[[Request], Awaitable[Response]], ...]:
        """What is asked by POST, by the name of its route."""
        return (self.claim, self.release, self.join, self.weights, self.adapter, self.generate, self.score)

    async def stop(self) -> None:
        """Ends the streams."""
        await self._end_tenure()

    # ---- who

    async def state(self, request: Request) -> Response:
        await self._engine.check()
        if request.headers.get(wire.INCARNATION) is not None:  # so an owner is heard of while it trains
            self._require_owner(request)
        return self._state()

    async def claim(self, request: Request) -> Response:
        claim = await body_of(request, wire.Claim)
        if self.ownership.claim(claim):
            self._say(f"run {said_by(claim.run, repr)} has the server now")
            self._has_orphans = True
            await self._end_tenure()
        if self._has_orphans:
            async with self._changing:
                await self._engine.abort()
                self._has_orphans = False
        return self._state()

    async def release(self, request: Request) -> Response:
        await body_of(request, wire.Nothing)
        self.ownership.release(request.headers.get(wire.INCARNATION))
        await self._end_tenure()
        self._say("the server is free")
        return self._state()

    def _require_owner(self, request: Request) -> None:
        self.ownership.require(request.headers.get(wire.INCARNATION))

    def _state(self) -> Response:
        return _json(self._told())

    def _told(self) -> wire.State:
        engine, own = self._engine, self.ownership
        return wire.State(
            boot=self._boot, version=own.version, has_base=own.has_base, owner=own.owner, running=self.running, model=self._model,
            dtype=engine.dtype, world_size=engine.world_size, max_model_len=engine.max_model_len, max_num_seqs=engine.max_num_seqs,
            adapter_rank=engine.adapter_rank, tells_experts=engine.tells_experts, most_kept=MOST, limit_images=engine.limit_images,
            max_pixels=engine.max_pixels, shape=self._shape,
        )  # fmt: skip

    # ---- weights

    async def join(self, request: Request) -> Response:
        self._require_owner(request)
        join = await body_of(request, wire.Join)
        if not (0 < join.seconds <= wire.LONGEST_JOIN and 0 < join.first_rank < join.world <= wire.MOST_MEMBERS):
            raise ValueError(  # nobody else gets the server meanwhile
                f"Join.seconds ({join.seconds:g}) is above 0 and at most {wire.LONGEST_JOIN:g}; Join.first_rank ({join.first_rank}) is "
                f"above 0 and below Join.world ({join.world}), which is at most {wire.MOST_MEMBERS}"
            )
        async with self._changing:
            self._require_owner(request)
            await self._engine.join(join)
        return _json(wire.Nothing())

    async def weights(self, request: Request) -> Response:
        self._require_owner(request)
        push = await body_of(request, wire.WeightPush)
        is_base, has_base = push.kind == "weights", self.ownership.has_base
        return await self._push(request, push.kind, lambda: self._engine.take_weights(push, has_base), push.version, is_base=is_base)

    async def adapter(self, request: Request) -> Response:
        self._require_owner(request)
        push = await body_of(request, wire.AdapterPush)
        return await self._push(request, "adapter", lambda: self._engine.take_adapter(push), push.version, is_base=True)

    async def _push(
        self, request: Request, kind: str, take: Callable[[], Awaitable[None]], version: int | None, *, is_base: bool
    ) -> Response:
        started = time.monotonic()
        async with self._changing:
            self._require_owner(request)
            if kind == "adapter" and not self.ownership.has_base:
                raise RequestRefusedError("this server holds no base weights of this run; push them before an adapter")
            tenure = self.ownership.begin_push(keeps_base=kind == "adapter")
            await self._end_tenure()
            try:
                await take()
                self.ownership.end_push(tenure, version, is_base=is_base)
            except Exception as error:
                self._metrics.pushes.labels(kind=kind, outcome="failed").inc()
                self._say(f"a push of {kind} failed: {said_by(error, most=wire.LONGEST_REFUSAL)}")
                raise
        seconds = time.monotonic() - started
        self._metrics.pushes.labels(kind=kind, outcome="came").inc()
        self._metrics.push_seconds.set(seconds)
        self._say(f"{kind}: version {version} came in {seconds:.1f} s" if version is not None else f"{kind} came; an adapter is to follow")
        return self._state()

    # ---- sampling

    async def generate(self, request: Request) -> Response:
        self._require_owner(request)
        asked = await body_of(request, wire.Generate)
        self._require_owner(request)
        self.ownership.require_version(asked.version)

        def works() -> Iterator[Coroutine[Any, Any, wire.Answer]]:
            came = self._pictures.take(asked.pictures)
            for place, one in enumerate(asked.requests):
                pictures = self._pictures.find([shown.key for shown in one.shown], came)
                yield self._engine.answer(one, asked.sampling, version=asked.version, place=place, pictures=pictures, bounds=asked.bounds)

        return self._streamed(works, lambda answer: "error" if answer.error is not None else "answered")

    def _streamed(self, works: Callable[[], Iterable[Coroutine[Any, Any, Line]]], outcome_of: Callable[[Line], str]) -> Response:
        return StreamingResponse(self._as_they_end(works, outcome_of, self._over), media_type=wire.STREAM_TYPE)

    async def _as_they_end(
        self, works: Callable[[], Iterable[Coroutine[Any, Any, Line]]], outcome_of: Callable[[Line], str], over: asyncio.Future[None]
    ) -> AsyncIterator[bytes]:
        """A line of each, and empty ones between them. Ends early where the weights or the owner change: whoever counts lines sees that
        some are missing."""
        if over.done():
            return
        tenure, waiting = self.ownership.tenure, {self._start(work) for work in works()}
        try:
            while waiting:
                done = await _first([*waiting, over], wire.BEAT_SECONDS)
                if over.done():
                    return
                self.ownership.heard(tenure)
                ended = [task for task in waiting if task in done]
                waiting.difference_update(ended)
                lines = [task.result() for task in ended]
                for line in lines:
                    self._metrics.answered.labels(outcome=outcome_of(line)).inc()
                yield b"".join(map(wire.encode_line, lines)) or b"\n"
        except self._engine.Dead:
            return  # the server ends too, and says why
        finally:  # the caller has gone, perhaps: vLLM aborts what is cancelled
            for task in waiting:
                task.cancel()

    async def score(self, request: Request) -> Response:
        self._require_owner(request)
        asked = await body_of(request, wire.Score)
        self._require_owner(request)
        version = self.ownership.version
        if version is None:
            raise RequestRefusedError("this server holds no weights of a version; push them first")
        task, over = self._start(self._engine.score(asked)), self._over
        await _first([task, over])
        if over.done():
            raise RequestRefusedError("the weights or the owner changed while this was scored")
        return _json(wire.ScoreResponse(version=version, logprobs=task.result()))

    async def metrics(self, request: Request) -> Response:
        if not self._tells_metrics:
            raise HTTPException(404, "this server was started with --metrics false")
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # ---- what ends with a tenure

    def _start(self, work: Coroutine[Any, Any, Done]) -> asyncio.Task[Done]:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # of several that fail, the first is told; asyncio would complain of each other one

    async def _end_tenure(self) -> None:
        """Whatever the engine was asked for before now is given up, and nobody is told of it."""
        over, self._over = self._over, asyncio.Future()
        over.set_result(None)
        work = list(self._work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


class FrozenApp(App):
    """Answers /state, /metrics and /prompt_logprobs. What would change its weights, or ask for those of a run, is refused."""

    def __init__(self, *args: Any, vocabulary: str, fingerprint: str, **more: Any):
        """vocabulary: `data.chat.vocabulary_of` the model's tokenizer. fingerprint: of the model."""
        super().__init__(*args, **more)
        self._vocabulary, self._fingerprint = vocabulary, fingerprint

    def served(self) -> tuple[Callable[[Request], Awaitable[Response]], ...]:
        return (self.prompt_logprobs, *(_refused(route.__name__) for route in super().served()))

    def _told(self) -> wire.State:
        own = dict(vocabulary=self._vocabulary, fingerprint=self._fingerprint, vocab_size=self._engine.vocab_size)
        return structs.replace(super()._told(), is_frozen=True, **own)

    def _require_owner(self, request: Request) -> None:
        """It has none."""

    async def prompt_logprobs(self, request: Request) -> Response:
        asked = await body_of(request, wire.PromptLogprobs)
        if fault := asked.fault(self._engine.max_model_len, self._engine.vocab_size):
            raise wire.MalformedMessageError(fault)

        async def scored(place: int) -> wire.Scored:
            logprobs = await self._engine.prompt_logprobs(asked.sequences[place], place)
            return wire.Scored(place=place, logprobs=np.array(logprobs[asked.first[place] - 1 :], np.float32))

        return self._streamed(lambda: map(scored, range(len(asked.sequences))), lambda line: "answered")


def _refused(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        raise RequestRefusedError(
            f"/{name} is refused: this server is frozen (serve --frozen true). It keeps the weights that it was started with, nobody may "
            "claim it or push to it, and it scores tokens for runs whose teacher_model_server it is"
        )

    route.__name__ = name
    return route


async def _first(futures: list[asyncio.Future[Any]], seconds: float | None = None) -> set[asyncio.Future[Any]]:
    """Those that are done when the first one is."""
    return (await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]


async def body_of(request: Request, cls: type[wire.Body]) -> wire.Body:
    """Raises Malformed."""
    return wire.decode(cls, await request.body())


def _json(body: Struct) -> Response:
    return Response(wire.encode(body), media_type="application/json")


def _error(status: int, sentence: str) -> Response:
    return Response(wire.encode_error(sentence), status, media_type="application/json")


# ValueError: of a body that has the right form, and cannot be done.
_STATUS: dict[type[Exception], int] = {RequestRefusedError: 409, wire.MalformedMessageError: 400, ValueError: 400, WeightPushError: 500}


async def _failed(request: Request, error: Exception) -> Response:
    """Every other error is the engine's, or a bug: 500, and its traceback is in the server's log."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    return _error(status, str(error) or type(error).__name__)
