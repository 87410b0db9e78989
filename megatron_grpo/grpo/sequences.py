"""Sums over whole sequences of a packed micro-batch, whose trained positions may lie on several context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

# Adds a tensor, such as one number a sequence [S], over the ranks that hold parts of the same sequences; differentiable. Every such rank
# sees the total, so its backward must add the gradients over the same ranks.
SumOverContext = Callable[[torch.Tensor], torch.Tensor]


def whole_sequences(per_sequence: torch.Tensor) -> torch.Tensor:
    """The SumOverContext of a rank that holds every sequence whole."""
    return per_sequence


class Sequences:
    """Which of the S sequences each of the C trained positions belongs to.

    Each quantity costs at most one reduction, in an order that depends on the configuration alone, so context-parallel ranks agree on it.
    """

    def __init__(self, index: torch.Tensor, num_sequences: int, sum_over_context: SumOverContext):
        self.index = index
        self.num_sequences = num_sequences
        self.over_context = sum_over_context  # of parts of which each context-parallel rank has those of its own positions

    def sum(self, per_token: torch.Tensor) -> torch.Tensor:
        """[C] -> [S], over all context-parallel ranks."""
        return self.over_context(per_token.new_zeros(self.num_sequences).index_add(0, self.index, per_token))

    def mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """[C] -> [S], over the trained positions of each sequence."""
        return self.sum(per_token) / self.lengths

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """[S] -> [C]."""
        return per_sequence[self.index]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Trained positions of each sequence, float64 [S]; at least 1, so that a sequence without any has mean 0."""
        return self.sum(torch.ones_like(self.index, dtype=torch.float64)).clamp(min=1.0)

    @cached_property
    def one_over_length(self) -> torch.Tensor:
        """[C]: 1 / length of the position's sequence. Summed over positions it counts each sequence once."""
        return self.spread(1.0 / self.lengths)
