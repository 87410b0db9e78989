"""schedule.jsonl: which rows each optimizer step really trained, and how stale they were. `plan.json` says which it should have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.metrics.records import Records
from megatron_grpo.types import GlobalBatch, Progress

# Of one data-parallel rank: micro-batches, each a list of (rollout, row).
RowsOfRank = Sequence[Sequence[tuple[int, int]]]


class ScheduleLog:
    """One line an optimizer step: {"step", "optimizer_step", "rows": [micro-batch][DP rank][(rollout, row)], "staleness": [sequence]}."""

    def __init__(self, output_dir: str | Path, *, rank: int):
        self._records = Records(Path(output_dir) / "schedule.jsonl")
        self._writes = rank == 0

    def start(self, progress: Progress) -> None:
        """Drops what a run that is resumed from `progress` did after it."""
        if self._writes:
            self._records.begin(progress.step)

    def record(self, progress: Progress, batch: GlobalBatch, of_each_rank: Sequence[RowsOfRank]) -> None:
        """After a step. of_each_rank: the rows of every data-parallel rank's micro-batches, in rank order."""
        if self._writes:
            rows = [list(micro_batch) for micro_batch in zip(*of_each_rank, strict=True)]
            self._records.append(
                {"step": progress.step, "optimizer_step": progress.step - 1, "rows": rows, "staleness": list(batch.staleness)}
            )
