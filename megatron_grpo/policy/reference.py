"""Models that do not train: who the KL is measured against, chosen in `build`; and one that is only pushed to a sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from megatron_grpo.policy.hf_export import MegatronToHF
from megatron_grpo.policy.lora import Adapters
from megatron_grpo.policy.passes import ModelScorer
from megatron_grpo.types import MicroBatch
from megatron_grpo.weights.buckets import WeightUpdate

# This rank's parameters under their names in the whole model, as they are now.
Tensors = Callable[[], dict[str, torch.Tensor]]


class Reference(Protocol):
    """Log-probs that the policy is held to. Every method is collective."""

    def logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """float32 [C] of each of this share's micro-batches, on every rank of the share."""

    def last_stage_logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """As `logprobs`, on ranks of the last pipeline stage alone; an empty list elsewhere."""

    def after_step(self, step: int, policy: Tensors) -> None:
        """The policy has taken an optimizer step, its `step`-th."""

    @property
    def chunks(self) -> SequenceOf[Any]:
        """Model chunks that it asks, which may be the policy's own. They make room for the sampler as the policy does."""

    @property
    def saved_chunks(self) -> SequenceOf[Any]:
        """Those of them that a checkpoint must hold, because nothing else does."""


class FrozenReference:
    """The model that the run began with, or another that stays."""

    saved_chunks: SequenceOf[Any] = ()

    def __init__(self, scorer: ModelScorer):
        self.scorer, self.chunks = scorer, scorer.model
        self.logprobs, self.last_stage_logprobs = scorer.logprobs, scorer.last_stage_logprobs

    def after_step(self, step: int, policy: Tensors) -> None:
        """Stays."""


class SyncedReference(FrozenReference):
    """reference = alpha * policy + (1 - alpha) * reference, weight by weight, every so many steps (TR-DPO, arXiv:2404.09656)."""

    def __init__(self, scorer: ModelScorer, *, tensors: Tensors, every: int, alpha: float):
        """tensors: of the reference. every: in optimizer steps. alpha: 1 copies the policy."""
        super().__init__(scorer)
        self.saved_chunks = scorer.model
        self._tensors, self._every, self._alpha = tensors, every, alpha

    @torch.no_grad()
    def after_step(self, step: int, policy: Tensors) -> None:
        if step % self._every:
            return
        ours = policy()
        for name, theirs in self._tensors().items():
            theirs.lerp_(ours[name].to(theirs.dtype), self._alpha)


class FrozenPolicy:
    """What `sync.PushedPolicy` asks for. Every method is collective. adapters: beside the chunks; they are pushed merged."""

    def __init__(self, chunks: SequenceOf[Any], scorer: ModelScorer, exchange: MegatronToHF, adapters: Adapters | None):
        self.chunks, self.scorer, self.exchange, self.adapters = chunks, scorer, exchange, adapters

    def tensors(self) -> dict[str, Any]:
        """This rank's weights, by name."""
        return self.exchange.tensors(self.chunks)

    def updates(self, version: int, *, has_base: bool) -> Iterator[WeightUpdate]:
        if self.adapters is None:
            yield WeightUpdate(kind="weights", version=version, tensors=self.exchange.stream(self.tensors(), "weights"))
        else:
            merged = self.exchange.stream(self.tensors(), "merged", prepare=self.adapters.merged)
            yield WeightUpdate(kind="merged", version=version, tensors=merged)

    def trial(self) -> AbstractContextManager[None]:
        """Nothing to try: what is pushed is scored as it is."""
        return nullcontext(None)

    def resident(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()

    def make_room(self, *, keep: str = "nothing") -> None:
        self.exchange.forget_memory()
