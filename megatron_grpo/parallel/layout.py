"""Where a rank stands on the TP x CP x DP x PP grid, and which tokens it holds, as arithmetic: no process group, no torch.

Ranks are numbered as Megatron-Core numbers them (order "tp-cp-ep-dp-pp"): TP varies fastest, PP slowest.

Context parallelism cuts every segment of the packed stream into 2*cp equal chunks; rank r holds chunk r and its mirror 2*cp-1-r, so that
causal work is even ("zigzag", the order that Megatron-Core and Transformer Engine expect). Segments are padded to a multiple of 2*cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the grid. `dp_size` is derived, never set. Sizes are checked by `batching.rules` before this is built."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp_size(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def num_chunks(self) -> int:
        """Model chunks on one rank: 1, or `vpp` with the interleaved schedule."""
        return self.vpp or 1

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.tp * (cp + self.cp * (dp + self.dp_size * pp))

    def ranks_of_share(self, dp: int) -> list[int]:
        """The ranks that train one data-parallel share together, the first of the first stage first."""
        return [self.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for pp in range(self.pp) for cp in range(self.cp) for tp in range(self.tp)]


def sequence_alignment(layout: Layout, sequence_parallel: bool, rank_multiple: int = 1) -> tuple[int, int]:
    """(multiple of a sequence, multiple of the whole stream) that the layout needs, in tokens.

    Context parallelism cuts every sequence into 2*cp equal chunks; sequence parallelism cuts what one CP rank holds into tp parts.
    rank_multiple: of the tokens that one rank computes.
    """
    per_sequence = 2 * layout.cp if layout.cp > 1 else 1
    per_stream = layout.cp * layout.tp if sequence_parallel else 1
    if rank_multiple > 1:
        per_stream = layout.cp * (layout.tp if sequence_parallel else 1) * rank_multiple
    return per_sequence, per_stream


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
