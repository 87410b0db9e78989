"""A sharded model that does not train: it is pushed to a sampler, and asked whether what arrived is what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from megatron_grpo.policy.hf_export import WeightExchange
from megatron_grpo.policy.lora import Adapters
from megatron_grpo.policy.scorer import ModelScorer
from megatron_grpo.types import Sequence
from megatron_grpo.weights.update import WeightUpdate


class LoadedModel:
    """What `sync.PushedPolicy` asks for. Every method is collective. adapters: beside the chunks; they are pushed merged."""

    def __init__(self, chunks: SequenceOf[Any], scorer: ModelScorer, exchange: WeightExchange, adapters: Adapters | None):
        self.chunks, self.scorer, self.exchange, self.adapters = chunks, scorer, exchange, adapters

    def updates(self, version: int, *, has_base: bool) -> Iterator[WeightUpdate]:
        tensors = self.exchange.tensors(self.chunks)
        if self.adapters is None:
            yield WeightUpdate(kind="weights", version=version, tensors=self.exchange.stream(tensors, "weights"))
        else:
            merged = self.exchange.stream(tensors, "merged", prepare=self.adapters.merged)
            yield WeightUpdate(kind="merged", version=version, tensors=merged)

    def score(self, sequences: SequenceOf[Sequence], *, temperature: float | None = None) -> list[np.ndarray]:
        return self.scorer.score(sequences, temperature=temperature)

    def trial(self) -> AbstractContextManager[None]:
        """Nothing to try: what is pushed is scored as it is."""
        return nullcontext(None)

    def resident(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()

    def make_room(self, *, keep: str = "nothing") -> None:
        self.exchange.forget_memory()
