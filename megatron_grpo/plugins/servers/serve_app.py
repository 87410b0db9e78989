"""HTTP routes of a rollout server and their authentication.

Every route requires the token. `serve_state` decides whether a request is allowed, and `serve_engine` executes it; this module decodes
request bodies and encodes responses (`wire`).
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

from megatron_grpo.core.base.errors import keep_secret, one_line
from megatron_grpo.core.rollout.sampling_mask import MOST
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.serve_engine import ServedEngine, WeightUpdateError
from megatron_grpo.plugins.servers.serve_state import ImageCache, Ownership, RequestRefusedError, ServerMetrics

Done = TypeVar("Done")
Line = TypeVar("Line", bound=Struct)
SECONDS_BETWEEN_ABORTS = 0.1


class AuthenticationMiddleware:
    """ASGI middleware that answers 401 to every request without the token, whatever its path or method.

    Args:
        metrics: Counts responses whose status is not 200.
        let_in: Called with the (host, port) of each client that has sent the token.
    """

    def __init__(self, app: Any, token: str, metrics: ServerMetrics, let_in: Callable[[tuple[str, int]], None]):
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

        authorization = dict(scope["headers"]).get(b"authorization", b"")
        # Compares digests, so that the response time reveals neither the length of the token nor a matching prefix.
        if scope["type"] != "http" or not hmac.compare_digest(hashlib.sha256(authorization).digest(), self._wanted):
            refusal = _error(401, "the token is missing or wrong")
            refusal.headers["Connection"] = "close"
            return await refusal(scope, receive, counted)
        self._let_in(scope["client"])
        await self._app(scope, receive, counted)


class App:
    """State and routes of one server.

    Args:
        shape: `weights.shape.flat_values` of the model.
        serves_metrics: Whether GET /metrics is answered.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        model: str,
        shape: dict[str, Any],
        metrics: ServerMetrics,
        serves_metrics: bool,
        print_line: Callable[[str], None],
    ):
        self.ownership = Ownership()
        self._engine, self._model, self._metrics, self._print_line = engine, model, metrics, print_line
        self._serves_metrics = serves_metrics
        self._shape, self._boot = shape, secrets.token_hex(8)
        self._images = ImageCache()
        self._changing = asyncio.Lock()  # serializes joins, weight syncs and the abort of an earlier owner's requests
        self._work: set[asyncio.Task[Any]] = set()  # tasks of this weight epoch in the engine
        self._over: asyncio.Future[None] = asyncio.Future()  # done when this weight epoch ends
        self._has_orphans = False
        metrics.watch(self)

    @property
    def running(self) -> int:
        """Number of requests in the engine."""
        return len(self._work)

    def asgi(self, token: str, let_in: Callable[[tuple[str, int]], None]) -> AuthenticationMiddleware:
        """Return the ASGI application with all routes behind `AuthenticationMiddleware`.

        Args:
            let_in: Called with the (host, port) of each client that has sent the token.
        """
        readable = (self.state, self.metrics)
        routes = [Route(f"/{route.__name__}", route, methods=["GET"]) for route in readable]
        routes += [Route(f"/{route.__name__}", route, methods=["POST"]) for route in self.served()]
        exceptions = (*_STATUS, self._engine.Dead, HTTPException, Exception)
        app = Starlette(routes=routes, exception_handlers={kind: _failed for kind in exceptions})
        return AuthenticationMiddleware(app, token, self._metrics, let_in)

    def served(self) -> tuple[Callable[[Request], Awaitable[Response]], ...]:
        """Return the handlers of POST routes. The name of a handler is the path of its route."""
        return (self.claim, self.release, self.join, self.weights, self.adapter, self.generate, self.abort, self.score)

    async def stop(self) -> None:
        """End all response streams and cancel their requests."""
        await self._end_weight_epoch()

    # ---- ownership

    async def state(self, request: Request) -> Response:
        """Answer GET /state with `wire.ServerState`. A request with an incarnation renews the owner's lease."""
        await self._engine.check()
        if request.headers.get(wire.INCARNATION) is not None:  # an owner keeps its lease this way while it trains
            self._require_owner(request)
        return self._state()

    async def claim(self, request: Request) -> Response:
        """Answer POST /claim: give the server to a run. A new owner ends the requests of the old one, and there are no weights."""
        claim = await decode_body(request, wire.ClaimRequest)
        if self.ownership.claim(claim):
            self._print_line(f"claimed by run {one_line(claim.run, repr)}")
            self._has_orphans = True
            await self._end_weight_epoch()
        if self._has_orphans:
            async with self._changing:
                await self._engine.abort()
                self._has_orphans = False
        return self._state()

    async def release(self, request: Request) -> Response:
        """Answer POST /release: end the ownership of the caller, with its requests."""
        await decode_body(request, wire.EmptyBody)
        self.ownership.release(request.headers.get(wire.INCARNATION))
        await self._end_weight_epoch()
        self._print_line("released")
        return self._state()

    def _require_owner(self, request: Request) -> None:
        self.ownership.require(request.headers.get(wire.INCARNATION))

    def _state(self) -> Response:
        return _json(self._build_state())

    def _build_state(self) -> wire.ServerState:
        engine, ownership = self._engine, self.ownership
        return wire.ServerState(
            boot=self._boot, version=ownership.version, has_base=ownership.has_base, owner=ownership.owner, running=self.running,
            model=self._model,
            dtype=engine.dtype, world_size=engine.world_size, max_model_len=engine.max_model_len, max_num_seqs=engine.max_num_seqs,
            adapter_rank=engine.adapter_rank, returns_experts=engine.returns_experts, max_mask_size=MOST, limit_images=engine.limit_images,
            max_pixels=engine.max_pixels, shape=self._shape,
        )  # fmt: skip

    # ---- weights

    async def join(self, request: Request) -> Response:
        """Answer POST /join: all workers join a link. Responds when all members have joined."""
        self._require_owner(request)
        join = await decode_body(request, wire.JoinRequest)
        if not (0 < join.seconds <= wire.LONGEST_JOIN and 0 < join.first_rank < join.world <= wire.MOST_MEMBERS):
            raise ValueError(  # no other request can change the server during a join
                f"Join.seconds ({join.seconds:g}) must be above 0 and at most {wire.LONGEST_JOIN:g}; Join.first_rank ({join.first_rank}) "
                f"must be above 0 and below Join.world ({join.world}), which must be at most {wire.MOST_MEMBERS}"
            )
        async with self._changing:
            self._require_owner(request)
            await self._engine.join(join)
        return _json(wire.EmptyBody())

    async def weights(self, request: Request) -> Response:
        """Answer POST /weights: receive all weights over the link. Ends running requests."""
        self._require_owner(request)
        update = await decode_body(request, wire.WeightUpdateRequest)
        is_base, has_base = update.kind == "weights", self.ownership.has_base
        return await self._update_weights(
            request, update.kind, lambda: self._engine.update_weights(update, has_base), update.version, is_base=is_base
        )

    async def adapter(self, request: Request) -> Response:
        """Answer POST /adapter: receive an adapter over the link. Ends running requests; refused without base weights of this owner."""
        self._require_owner(request)
        update = await decode_body(request, wire.AdapterUpdateRequest)
        return await self._update_weights(request, "adapter", lambda: self._engine.update_adapter(update), update.version, is_base=True)

    async def _update_weights(
        self, request: Request, kind: str, take: Callable[[], Awaitable[None]], version: int | None, *, is_base: bool
    ) -> Response:
        started = time.monotonic()
        async with self._changing:
            self._require_owner(request)
            if kind == "adapter" and not self.ownership.has_base:
                raise RequestRefusedError("this server has no base weights of this run; send them before an adapter")
            weight_epoch = self.ownership.begin_update(keeps_base=kind == "adapter")
            await self._end_weight_epoch()
            try:
                await take()
                self.ownership.end_update(weight_epoch, version, is_base=is_base)
            except Exception as error:
                self._metrics.weight_updates.labels(kind=kind, outcome="failed").inc()
                self._print_line(f"{kind} update failed: {one_line(error, max_characters=wire.LONGEST_REFUSAL)}")
                raise
        seconds = time.monotonic() - started
        self._metrics.weight_updates.labels(kind=kind, outcome="complete").inc()
        self._metrics.weight_update_seconds.set(seconds)
        self._print_line(
            f"{kind}: received version {version} in {seconds:.1f} s" if version is not None else f"{kind}: received; the adapter follows"
        )
        return self._state()

    # ---- sampling

    async def generate(self, request: Request) -> Response:
        """Answer POST /generate: stream one `wire.GenerateLine` per request, in order of completion."""
        self._require_owner(request)
        body = await decode_body(request, wire.GenerateRequest)
        self._require_owner(request)
        self.ownership.require_version(body.version)

        def answers() -> Iterator[Coroutine[Any, Any, wire.GenerateLine]]:
            new_images = self._images.take(body.image_data)
            for index, request in enumerate(body.requests):
                image_data = self._images.find([placed.key for placed in request.images], new_images)
                yield self._engine.answer(
                    request, body.sampling, version=body.version, index=index, image_data=image_data, bounds=body.bounds
                )

        return self._streamed(answers, lambda answer: "error" if answer.error is not None else "answered")

    async def abort(self, request: Request) -> Response:
        """Answer POST /abort: end all running requests. Each stream ends with the tokens sampled so far. Responds when no request runs."""
        self._require_owner(request)
        body = await decode_body(request, wire.AbortRequest)
        self._require_owner(request)
        self.ownership.require_version(body.version)
        work, epoch_end = set(self._work), self._over
        while work and not epoch_end.done():  # again for a request that had not reached the engine
            await self._engine.abort(clear_cache=False)
            await asyncio.wait(work, timeout=SECONDS_BETWEEN_ABORTS)
            work = {task for task in work if not task.done()}
        return self._state()

    def _streamed(self, coroutines: Callable[[], Iterable[Coroutine[Any, Any, Line]]], name_outcome: Callable[[Line], str]) -> Response:
        return StreamingResponse(self._as_they_end(coroutines, name_outcome, self._over), media_type=wire.STREAM_TYPE)

    async def _as_they_end(
        self,
        coroutines: Callable[[], Iterable[Coroutine[Any, Any, Line]]],
        name_outcome: Callable[[Line], str],
        epoch_end: asyncio.Future[None],
    ) -> AsyncIterator[bytes]:
        """Yield one line per result, and empty lines as heartbeats.

        The stream ends early when the weights or the owner change; the client notices that lines are missing.
        """
        if epoch_end.done():
            return
        weight_epoch, waiting = self.ownership.weight_epoch, {self._start(work) for work in coroutines()}
        try:
            while waiting:
                done_tasks = await _first([*waiting, epoch_end], wire.BEAT_SECONDS)
                if epoch_end.done():
                    return
                self.ownership.renew(weight_epoch)
                ended_tasks = [task for task in waiting if task in done_tasks]
                waiting.difference_update(ended_tasks)
                lines = [task.result() for task in ended_tasks]
                for line in lines:
                    self._metrics.answered.labels(outcome=name_outcome(line)).inc()
                yield b"".join(map(wire.encode_line, lines)) or b"\n"
        except self._engine.Dead:
            return  # the server process exits with the reason
        finally:  # the client may have disconnected; vLLM aborts the requests of cancelled tasks
            for task in waiting:
                task.cancel()

    async def score(self, request: Request) -> Response:
        """Answer POST /score with `wire.ScoreResponse`."""
        self._require_owner(request)
        body = await decode_body(request, wire.ScoreRequest)
        self._require_owner(request)
        version = self.ownership.version
        if version is None:
            raise RequestRefusedError("this server has no weights; update the weights first")
        task, epoch_end = self._start(self._engine.score(body)), self._over
        await _first([task, epoch_end])
        if epoch_end.done():
            raise RequestRefusedError("the weights or the owner changed during scoring")
        return _json(wire.ScoreResponse(version=version, logprobs=task.result()))

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics with Prometheus text, or with 404 if the server was started with `--metrics false`."""
        if not self._serves_metrics:
            raise HTTPException(404, "this server was started with --metrics false")
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # ---- requests that end with a weight epoch

    def _start(self, work: Coroutine[Any, Any, Done]) -> asyncio.Task[Done]:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._end_call)
        return task

    def _end_call(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: only the first failure is reported, and asyncio would log the others

    async def _end_weight_epoch(self) -> None:
        """Cancel all work of the current weight epoch without answering it, and begin a new one."""
        epoch_end, self._over = self._over, asyncio.Future()
        epoch_end.set_result(None)
        work = list(self._work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


class FrozenApp(App):
    """App of a frozen server: it answers /state, /metrics and /prompt_logprobs, and refuses all routes that concern the weights of a run.

    Args:
        args: As for `App`.
        vocabulary: `data.chat.fingerprint_vocabulary` of the model's tokenizer.
        fingerprint: `model_fingerprint` of the model.
        kwargs: As for `App`.
    """

    def __init__(self, *args: Any, vocabulary: str, fingerprint: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._vocabulary, self._fingerprint = vocabulary, fingerprint

    def served(self) -> tuple[Callable[[Request], Awaitable[Response]], ...]:
        return (self.prompt_logprobs, *(_refused(route.__name__) for route in super().served()))

    def _build_state(self) -> wire.ServerState:
        fields = dict(vocabulary=self._vocabulary, fingerprint=self._fingerprint, vocab_size=self._engine.vocab_size)
        return structs.replace(super()._build_state(), is_frozen=True, **fields)

    def _require_owner(self, request: Request) -> None:
        """Accept every caller with the token, since a frozen server has no owner."""

    async def prompt_logprobs(self, request: Request) -> Response:
        """Answer POST /prompt_logprobs: stream one `wire.LogprobsLine` per sequence, in order of completion."""
        body = await decode_body(request, wire.PromptLogprobsRequest)
        if fault := body.fault(self._engine.max_model_len, self._engine.vocab_size):
            raise wire.MalformedMessageError(fault)

        async def scored(index: int) -> wire.LogprobsLine:
            logprobs = await self._engine.prompt_logprobs(body.sequences[index], index)
            return wire.LogprobsLine(place=index, logprobs=np.array(logprobs[body.first[index] - 1 :], np.float32))

        return self._streamed(lambda: map(scored, range(len(body.sequences))), lambda line: "answered")


def _refused(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        raise RequestRefusedError(
            f"/{name} is not available: this server is frozen (serve --frozen true). It keeps its initial weights, cannot be claimed or "
            "updated, and only scores tokens for runs that use it as teacher_model_server"
        )

    route.__name__ = name
    return route


async def _first(futures: list[asyncio.Future[Any]], seconds: float | None = None) -> set[asyncio.Future[Any]]:
    """Wait until one future is done or the time is up. Returns the futures that are done by then."""
    return (await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED))[0]


async def decode_body(request: Request, cls: type[wire.Body]) -> wire.Body:
    """Decode the body of a request.

    Raises:
        MalformedMessageError: The body is not a `cls`.
    """
    return wire.decode(cls, await request.body())


def _json(body: Struct) -> Response:
    return Response(wire.encode(body), media_type="application/json")


def _error(status: int, sentence: str) -> Response:
    return Response(wire.encode_error(sentence), status, media_type="application/json")


# ValueError: the body has the right form, but asks for something impossible.
_STATUS: dict[type[Exception], int] = {RequestRefusedError: 409, wire.MalformedMessageError: 400, ValueError: 400, WeightUpdateError: 500}


async def _failed(request: Request, error: Exception) -> Response:
    """Convert an exception to a response.

    An exception that `_STATUS` does not list is an engine failure or a bug: 500, and the traceback is in the server's log.
    """
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    return _error(status, str(error) or type(error).__name__)
