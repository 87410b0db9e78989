"""What the loss needs to know about one packed micro-batch, as tensors; and the gate no stale sample passes without old log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_grpo.types import MicroBatch


class StaleSampleError(RuntimeError):
    """A sample trained by newer weights than sampled it has no old log-probs: its ratio would silently be 1. A bug, never the user's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """C trained positions of S packed sequences. Build it with `LossInputs.of`, which checks it.

    num_loss_tokens: sum of the loss mask over the whole global batch, all ranks (the entropy bonus is a mean over it).
    """

    weights: torch.Tensor  # float64 [C], u of the normalisation contract; 0 where a filter took the completion out
    advantages: torch.Tensor  # float [C]
    sampler_logprobs: torch.Tensor  # float [C], NaN where the sampler gave none
    old_logprobs: torch.Tensor  # float [C], NaN where on-policy: there the current log-prob, held constant, is the old one
    sequence: torch.Tensor  # int64 [C], 0..S-1
    num_sequences: int  # S
    num_loss_tokens: int

    @classmethod
    def of(
        cls, micro_batch: MicroBatch, *, staleness: Sequence[int], num_loss_tokens: int, device: torch.device | str = "cpu"
    ) -> LossInputs:
        """staleness: of each of the S sequences, trained version - sampled version. Checked in numpy, so that a GPU need not wait."""
        require_old_logprobs(micro_batch, staleness)
        return cls(
            weights=torch.as_tensor(micro_batch.weights, dtype=torch.float64, device=device),
            advantages=torch.as_tensor(micro_batch.advantages, device=device),
            sampler_logprobs=torch.as_tensor(micro_batch.sampler_logprobs, device=device),
            old_logprobs=torch.as_tensor(micro_batch.old_logprobs, device=device),
            sequence=torch.as_tensor(micro_batch.sequence, dtype=torch.int64, device=device),
            num_sequences=micro_batch.num_sequences,
            num_loss_tokens=num_loss_tokens,
        )

    def take(self, positions: torch.Tensor) -> LossInputs:
        """The same micro-batch seen by a context-parallel rank that holds these positions of the C (int64 or bool)."""
        return LossInputs(
            weights=self.weights[positions],
            advantages=self.advantages[positions],
            sampler_logprobs=self.sampler_logprobs[positions],
            old_logprobs=self.old_logprobs[positions],
            sequence=self.sequence[positions],
            num_sequences=self.num_sequences,
            num_loss_tokens=self.num_loss_tokens,
        )


def require_old_logprobs(micro_batch: MicroBatch, staleness: Sequence[int]) -> None:
    """Raise StaleSampleError, naming the rows, unless every stale sequence has an old log-prob at each of its trained positions."""
    if len(staleness) != micro_batch.num_sequences:
        raise ValueError(f"staleness of {len(staleness)} sequences given for a micro-batch of {micro_batch.num_sequences}")
    is_stale = np.asarray(staleness, dtype=np.int64) != 0
    missing = np.unique(micro_batch.sequence[is_stale[micro_batch.sequence] & np.isnan(micro_batch.old_logprobs)])
    if missing.size:
        rows = ", ".join(f"rollout {micro_batch.rows[s][0]} row {micro_batch.rows[s][1]} (staleness {staleness[s]})" for s in missing)
        raise StaleSampleError(f"no old log-probs for stale samples: {rows}. The timetable should have anchored them before this step.")
