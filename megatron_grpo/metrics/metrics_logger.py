"""All that a run tells: metrics, which rows were trained, completions, where the time went, and what a person should be warned about."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_grpo.base import activity
from megatron_grpo.base.activity import Timers
from megatron_grpo.base.files import write_whole
from megatron_grpo.metrics import Metrics
from megatron_grpo.metrics.evaluations import Evaluated
from megatron_grpo.metrics.records import Records
from megatron_grpo.metrics.rollout import Completions, JudgedRollout, rollout_stats, selection_stats
from megatron_grpo.metrics.summary import TimeSummary
from megatron_grpo.types import GlobalBatch, Progress

UNTOLD = "untold.json"  # in output_dir, while a run rests between a rollout and the step that tells of it

SCHEDULE = "schedule.jsonl"  # which rows each optimizer step really trained, and how stale; `plan.json` says which it should have
# Metrics of the step just taken -> what to warn about, if anything.
Watch = Callable[[Progress, Mapping[str, float]], "str | None"]


class MetricsLogger:
    """One a rank; rank 0's is heard. Collective where it says so.

    tells_selection: rollouts choose among what they sample. from_all: one object of each data-parallel rank -> all of them, by rank
    (collective). watches: further warnings, asked after every step.
    """

    def __init__(
        self,
        metrics: Metrics,
        completions: Completions,
        *,
        clock: Timers,
        reward_weights: Sequence[float],
        tells_selection: bool,
        from_all: Callable[[Any], list[Any]],
        watches: Sequence[Watch] = (),
    ):
        self.metrics, self.completions, self.clock = metrics, completions, clock
        self._schedule = Records(metrics.output_dir / SCHEDULE)
        self.reward_weights, self.tells_selection = reward_weights, tells_selection
        self._from_all, self._watches = from_all, watches
        self._heard: list[JudgedRollout] = []
        self._untold = metrics.output_dir / UNTOLD
        self._spent = TimeSummary()

    def start(self, progress: Progress) -> None:
        """Begins after `progress.step` optimizer steps: what the files say beyond it, a run that was given up, is dropped."""
        self.metrics.start(progress)
        self.completions.start(progress)
        if self.metrics.tells:
            self._schedule.begin(progress.step)
        activity.reached(progress.step)
        self._spent.before(self.clock.take()["time/step"], step=progress.step)  # loading and restoring are no part of a step

    def rollout(self, judged: JudgedRollout) -> None:
        """A rollout has come in. Collective."""
        self._heard.append(judged)
        self.completions.write(judged)

    def step(self, progress: Progress, batch: GlobalBatch, metrics: Mapping[str, float], *, skipped: str | None = None) -> None:
        """An optimizer step has been taken; `progress` counts it. metrics, skipped: what it says of itself. Collective."""
        of_each_rank = self._from_all([micro_batch.rows for micro_batch in batch.micro_batches])
        if self.metrics.tells:  # rows: [micro-batch][data-parallel rank][(rollout, row)]
            rows = [list(micro_batch) for micro_batch in zip(*of_each_rank, strict=True)]
            one = {"step": progress.step, "optimizer_step": progress.step - 1, "rows": rows, "staleness": list(batch.staleness)}
            self._schedule.append(one)
        activity.reached(progress.step)
        for watch in self._watches:
            warning = watch(progress, metrics)
            if warning:
                self.metrics.say(f"WARNING: {warning}")
        if skipped:
            self.metrics.say(f"optimizer step {progress.step} is skipped: {skipped}")
        stats = self._rollout_stats() if self._heard else self._kept(before=progress.step)
        self._heard = []
        taken = self.clock.take()
        self._spent.add(taken)
        self._spent.step(is_skipped=skipped is not None)
        self.metrics.log(progress, stats | dict(metrics) | batch.metrics | taken)
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
