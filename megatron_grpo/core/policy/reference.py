"""Models that do not train: references for the KL term, and a policy whose weights are only synced to a sampler.

`build` chooses the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.policy.passes import ModelScorer
from megatron_grpo.core.types import MicroBatch
from megatron_grpo.core.weights.buckets import WeightUpdate

if TYPE_CHECKING:
    from megatron_grpo.core.policy.lora import Adapters

# Returns this rank's current parameters by their names in the whole model.
Tensors = Callable[[], dict[str, torch.Tensor]]


class Reference(Protocol):
    """Reference model for the KL term. Every method is collective."""

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the log-probs of each micro-batch, float32 [C], on every rank of the model-parallel group.

        Args:
            micro_batches: Micro-batches; the same on every rank of the model-parallel group.
        """

    def last_stage_logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the same as `logprobs`, on ranks of the last pipeline stage only; an empty list elsewhere.

        Args:
            micro_batches: Micro-batches; the same on every rank of the model-parallel group.
        """

    def after_step(self, step: int, policy: Tensors) -> None:
        """Update the reference after an optimizer step of the policy.

        Args:
            step: Number of optimizer steps that the policy has taken, this one included.
            policy: Returns the policy's current parameters on this rank.
        """

    @property
    def chunks(self) -> Sequence[Any]:
        """Model chunks that the reference runs, which may be the policy's. They are offloaded together with the policy."""

    @property
    def saved_chunks(self) -> Sequence[Any]:
        """Chunks that a checkpoint must hold because no other file has their weights."""


class FrozenReference:
    """Reference whose weights never change: the initial model of the run, or another one."""

    saved_chunks: Sequence[Any] = ()

    def __init__(self, scorer: ModelScorer):
        self.scorer, self.chunks = scorer, scorer.model
        self.logprobs, self.last_stage_logprobs = scorer.logprobs, scorer.last_stage_logprobs

    def after_step(self, step: int, policy: Tensors) -> None:
        """Do nothing: the weights stay."""


class SyncedReference(FrozenReference):
    """Reference that is mixed with the policy every `sync_steps` optimizer steps (TR-DPO, arXiv:2404.09656).

    For each weight: reference = alpha * policy + (1 - alpha) * reference.

    Args:
        tensors: Returns this rank's current parameters of the reference.
        alpha: Weight of the policy; 1 copies it.
    """

    def __init__(self, scorer: ModelScorer, *, tensors: Tensors, sync_steps: int, alpha: float):
        super().__init__(scorer)
        self.saved_chunks = scorer.model
        self._tensors, self._every, self._alpha = tensors, sync_steps, alpha

    @torch.no_grad()
    def after_step(self, step: int, policy: Tensors) -> None:
        if step % self._every:
            return
        policy_tensors = policy()
        for name, reference in self._tensors().items():
            reference.lerp_(policy_tensors[name].to(reference.dtype), self._alpha)


class FrozenPolicy:
    """Model that does not train and can be synced to a sampler, like `Policy`.

    Every method is collective.

    Args:
        adapters: Adapters of the chunks, synced merged into the weights; None if there are none.
    """

    def __init__(self, chunks: Sequence[Any], scorer: ModelScorer, exchange: MegatronToHF, adapters: Adapters | None):
        self.chunks, self.scorer, self.exchange, self.adapters = chunks, scorer, exchange, adapters

    def tensors(self) -> dict[str, Any]:
        """Return this rank's parameters by their names in the whole model."""
        return self.exchange.tensors(self.chunks)

    def updates(self, version: int, *, has_base: bool) -> Iterator[WeightUpdate]:
        if self.adapters is None:
            yield WeightUpdate(kind="weights", version=version, tensors=self.exchange.stream(self.tensors(), "weights", in_slices=True))
        else:
            merged = self.exchange.stream(self.tensors(), "merged", prepare=self.adapters.merged, in_slices=True)
            yield WeightUpdate(kind="merged", version=version, tensors=merged)

    def trial(self) -> AbstractContextManager[None]:
        """Return a context that yields None: the synced weights are scored as they are."""
        return nullcontext(None)

    def on_device(self, part: str) -> AbstractContextManager[None]:
        return nullcontext()

    def free_memory(self, *, keep: str = "nothing") -> None:
        self.exchange.forget_memory()
