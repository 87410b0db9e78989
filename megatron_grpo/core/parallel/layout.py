"""Position of a rank on the TP x CP x DP x PP grid, as arithmetic: no process group, no torch.

Ranks are numbered as in Megatron-Core (order "tp-cp-ep-dp-pp"): TP varies fastest, PP slowest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallelism grid. `dp_size` is derived, never set. `run.config.rules.sizes` checks them before a layout is built."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp_size(self) -> int:
        """Number of data-parallel ranks of expert weights."""
        return self.world_size // (self.etp * self.ep * self.pp)

    @property
    def num_chunks(self) -> int:
        """Model chunks on one rank: 1, or `vpp` with the interleaved schedule."""
        return self.vpp or 1

    def model_parallel_ranks(self, dp: int) -> list[int]:
        """Return the global ranks of a data-parallel rank's model-parallel group, the first rank of the first stage first."""
        stages, cps, tps = range(self.pp), range(self.cp), range(self.tp)
        return [tp + self.tp * (cp + self.cp * (dp + self.dp_size * pp)) for pp in stages for cp in cps for tp in tps]


def sequence_alignment(layout: Layout, sequence_parallel: bool, rank_multiple: int = 1) -> tuple[int, int]:
    """Return (multiple of a sequence, multiple of the whole stream) that the layout requires, in tokens.

    Context parallelism splits every sequence into 2*cp equal chunks; sequence parallelism splits the tokens of one CP rank into tp parts.

    Args:
        rank_multiple: Required multiple of the tokens that one rank computes.
    """
    per_sequence = 2 * layout.cp if layout.cp > 1 else 1
    per_stream = layout.cp * layout.tp if sequence_parallel else 1
    if rank_multiple > 1:
        per_stream = layout.cp * (layout.tp if sequence_parallel else 1) * rank_multiple
    return per_sequence, per_stream
