"""Which tokens of the packed stream a context-parallel rank holds, as arithmetic: no process group, no torch.

Context parallelism cuts every segment into 2*cp equal chunks; rank r holds chunk r and its mirror 2*cp-1-r, so that
causal work is even ("zigzag", the order that Megatron-Core and Transformer Engine expect). Segments are padded to a multiple of 2*cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_grpo.types import Segment


def held_positions(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """Offsets, within a sequence of `length` tokens, that `cp_rank` holds; int64 [length / cp_size], ascending."""
    if length % (2 * cp_size) and cp_size > 1:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into 2 x {cp_size} equal chunks")
    if cp_size == 1:
        return np.arange(length)
    chunk = length // (2 * cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return np.concatenate([np.arange(cp_rank * chunk, (cp_rank + 1) * chunk), np.arange(mirror * chunk, (mirror + 1) * chunk)])


def held_tokens(segments: Sequence[Segment], cp_size: int, cp_rank: int) -> np.ndarray:
    """Places in the whole stream that `cp_rank` holds, in the order it holds them; int64 [T / cp_size]."""
    return np.concatenate([s.start + held_positions(s.end - s.start, cp_size, cp_rank) for s in segments])


def gathered_places(segment: Segment, total: int, cp_size: int) -> np.ndarray:
    """Where the tokens of a segment, in their order, lie in what all ranks hold of a stream of `total` tokens, rank after rank; int64."""
    length = segment.end - segment.start
    held = np.concatenate([held_positions(length, cp_size, rank) for rank in range(cp_size)])
    mine = segment.start // cp_size + np.arange(length // cp_size)
    return np.concatenate([rank * (total // cp_size) + mine for rank in range(cp_size)])[np.argsort(held)]
