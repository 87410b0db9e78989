"""Tokens of the packed stream that a context-parallel rank holds, as arithmetic: no process group, no torch.

Context parallelism splits every segment into 2*cp equal chunks; rank r holds chunk r and its mirror 2*cp-1-r, so that causal attention is
balanced ("zigzag", the order that Megatron-Core and Transformer Engine expect). Segments are padded to a multiple of 2*cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_grpo.types import Segment


def held_positions(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """Return the offsets within a sequence that `cp_rank` holds; int64 [length / cp_size], ascending.

    Args:
        length: Tokens of the sequence.
        cp_size: Number of context-parallel ranks.
        cp_rank: The rank.

    Raises:
        ValueError: The sequence does not divide into 2 * cp_size equal chunks.
    """
    if length % (2 * cp_size) and cp_size > 1:
        raise ValueError(f"a sequence of {length} tokens cannot be split into 2 x {cp_size} equal chunks")
    if cp_size == 1:
        return np.arange(length)
    chunk = length // (2 * cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return np.concatenate([np.arange(cp_rank * chunk, (cp_rank + 1) * chunk), np.arange(mirror * chunk, (mirror + 1) * chunk)])


def held_tokens(segments: Sequence[Segment], cp_size: int, cp_rank: int) -> np.ndarray:
    """Return the indices in the whole stream that `cp_rank` holds, in the order it holds them; int64 [T / cp_size].

    Args:
        segments: Segments of the stream.
        cp_size: Number of context-parallel ranks.
        cp_rank: The rank.
    """
    return np.concatenate([s.start + held_positions(s.end - s.start, cp_size, cp_rank) for s in segments])


def gathered_places(segment: Segment, total: int, cp_size: int) -> np.ndarray:
    """Return where the tokens of a segment, in order, are in the concatenation of all ranks' parts of a stream; int64 [length].

    Args:
        segment: The segment.
        total: Tokens of the whole stream.
        cp_size: Number of context-parallel ranks.
    """
    length = segment.end - segment.start
    held = np.concatenate([held_positions(length, cp_size, rank) for rank in range(cp_size)])
    mine = segment.start // cp_size + np.arange(length // cp_size)
    return np.concatenate([rank * (total // cp_size) + mine for rank in range(cp_size)])[np.argsort(held)]
