"""All that a run tells: metrics, which rows were trained, completions, where the time went, and what a person should be warned about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megatron_grpo.base import activity
from megatron_grpo.base.clock import Clock
from megatron_grpo.base.files import write_whole
from megatron_grpo.metrics import Metrics
from megatron_grpo.metrics.evaluations import Evaluated
from megatron_grpo.metrics.records import Records
from megatron_grpo.metrics.rollout import Completions, JudgedRollout, rollout_stats, selection_stats
from megatron_grpo.metrics.summary import TimeSpent
from megatron_grpo.types import GlobalBatch, Progress

UNTOLD = "untold.json"  # in output_dir, while a run rests between a rollout and the step that tells of it

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


# Metrics of the step just taken -> what to warn about, if anything.
Watch = Callable[[Progress, Mapping[str, float]], "str | None"]


class Trained(Protocol):
    """What an optimizer step says of itself."""

    @property
    def metrics(self) -> dict[str, float]: ...

    @property
    def skipped(self) -> str | None: ...


class Journal:
    """One a rank; rank 0's is heard. Collective where it says so.

    tells_selection: rollouts choose among what they sample. from_all: one object of each data-parallel rank -> all of them, by rank
    (collective). watches: further warnings, asked after every step.
    """

    def __init__(
        self,
        metrics: Metrics,
        schedule: ScheduleLog,
        completions: Completions,
        *,
        clock: Clock,
        reward_weights: Sequence[float],
        tells_selection: bool,
        from_all: Callable[[Any], list[Any]],
        watches: Sequence[Watch] = (),
    ):
        self.metrics, self.schedule, self.completions, self.clock = metrics, schedule, completions, clock
        self.reward_weights, self.tells_selection = reward_weights, tells_selection
        self._from_all, self._watches = from_all, watches
        self._heard: list[JudgedRollout] = []
        self._untold = metrics.output_dir / UNTOLD
        self._spent = TimeSpent()

    def open(self) -> None:
        """From now on phases are told: loading comes before `start`."""
        self.metrics.open()

    def start(self, progress: Progress) -> None:
        """Begins after `progress.step` optimizer steps: what the files say beyond it, a run that was given up, is dropped."""
        self.metrics.start(progress)
        self.completions.start(progress)
        self.schedule.start(progress)
        activity.reached(progress.step)
        self._spent.before(self.clock.take()["time/step"], step=progress.step)  # loading and restoring are no part of a step

    def rollout(self, judged: JudgedRollout) -> None:
        """A rollout has come in. Collective."""
        self._heard.append(judged)
        self.completions.write(judged)

    def step(self, progress: Progress, batch: GlobalBatch, trained: Trained) -> None:
        """An optimizer step has been taken; `progress` counts it. Collective."""
        rows = [micro_batch.rows for micro_batch in batch.micro_batches]
        self.schedule.record(progress, batch, self._from_all(rows))
        activity.reached(progress.step)
        for watch in self._watches:
            warning = watch(progress, trained.metrics)
            if warning:
                self.metrics.say(f"WARNING: {warning}")
        if trained.skipped:
            self.metrics.say(f"optimizer step {progress.step} is skipped: {trained.skipped}")
        stats = self._rollout_stats() if self._heard else self._kept(before=progress.step)
        self._heard = []
        taken = self.clock.take()
        self._spent.add(taken)
        self._spent.step(is_skipped=trained.skipped is not None)
        self.metrics.log(progress, stats | trained.metrics | batch.metrics | taken)
        if self.metrics.tells:
            self._untold.unlink(missing_ok=True)

    def keep(self, progress: Progress) -> None:
        """The run ends before the step that tells of the rollouts it has heard of: the run that goes on from here will."""
        if self._heard and self.metrics.tells:
            write_whole(self._untold, json.dumps({"step": progress.step, "stats": self._rollout_stats()}, default=float) + "\n")

    def _kept(self, *, before: int) -> dict[str, float]:
        """What `keep` wrote just before this optimizer step; nothing, if it did not."""
        if not self.metrics.tells:
            return {}
        with suppress(OSError, ValueError, KeyError):
            kept = json.loads(self._untold.read_text(encoding="utf-8"))
            if kept["step"] == before - 1:
                return kept["stats"]
        return {}

    def _rollout_stats(self) -> dict[str, float]:
        stats = rollout_stats(self._heard, self.completions.reward_names)
        return stats | (selection_stats(self._heard, self.reward_weights) if self.tells_selection else {})

    def refusal(self, progress: Progress, record: Mapping[str, Any], lines: Sequence[str]) -> None:
        """The guard has refused the step just taken. lines: who made its gradient, in words."""
        for line in lines:
            self.metrics.say(f"  {line}")
        self.metrics.log_skipped(progress, record)

    def evaluation(self, progress: Progress, evaluated: Sequence[Evaluated]) -> None:
        self.metrics.log_evaluation(progress, evaluated)

    def close(self, *, summary: bool = True) -> None:
        """The end of the run. summary: it ended well enough to be compared with its beginning."""
        self._spent.add(self.clock.take())
        self.metrics.close(summary=summary, spent=self._spent)
