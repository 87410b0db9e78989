"""A frozen server: it keeps the model that it was started with, and scores tokens for all who have the token. Nobody owns it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from megatron_grpo.servers import wire
from megatron_grpo.servers.serve_app import App, body_of
from megatron_grpo.servers.serve_ownership import Refused


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
        return msgspec.structs.replace(super()._told(), is_frozen=True, **own)

    async def state(self, request: Request) -> Response:
        await self._engine.check()
        return self._state()

    async def prompt_logprobs(self, request: Request) -> Response:
        asked = await body_of(request, wire.PromptLogprobs)
        if fault := asked.fault(self._engine.max_model_len, self._engine.vocab_size):
            raise wire.Malformed(fault)
        return StreamingResponse(self._scores(asked), media_type=wire.STREAM_TYPE)

    async def _scores(self, asked: wire.PromptLogprobs) -> AsyncIterator[bytes]:
        async def scored(place: int) -> wire.Scored:
            logprobs = await self._engine.prompt_logprobs(asked.sequences[place], place)
            self._metrics.answered.labels(outcome="answered").inc()
            return wire.Scored(place=place, logprobs=np.array(logprobs[asked.first[place] - 1 :], np.float32))

        works = [scored(place) for place in range(len(asked.sequences))]
        async with aclosing(self._as_they_end(works, self._over, wire.encode_line)) as lines:
            async for line in lines:
                yield line


def _refused(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        raise Refused(
            f"/{name} is refused: this server is frozen (serve --frozen true). It keeps the weights that it was started with, nobody may "
            "claim it or push to it, and it scores tokens for runs whose teacher_model_server it is"
        )

    route.__name__ = name
    return route
