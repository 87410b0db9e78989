"""What lengths are rounded up to before anything lies in a stream. Integers only; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Tokens = TypeVar("Tokens", int, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What lengths are rounded up to, in tokens: each segment, and the whole stream. See `parallel.layout.sequence_alignment`."""

    sequence: int = 1
    stream: int = 1

    @property
    def grain(self) -> int:
        """Every stream is a multiple of it."""
        return math.lcm(self.sequence, self.stream)

    def of_segment(self, tokens: Tokens) -> Tokens:
        """Tokens that a segment of so many takes in the stream."""
        return -(-tokens // self.sequence) * self.sequence

    def of_stream(self, total: int) -> int:
        """Tokens in a stream whose segments take `total`. Never 0: Megatron's layers take no empty stream."""
        return max(-(-total // self.grain), 1) * self.grain
