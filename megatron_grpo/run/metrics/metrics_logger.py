"""All records of a training loop: metrics, the rows trained, completions, the time per phase, and warnings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.files import atomic_write_text, parse_json
from megatron_grpo.core.trainer.scored_rollout import ScoredRollout
from megatron_grpo.core.types import GlobalBatch, Progress
from megatron_grpo.run.metrics import Metrics
from megatron_grpo.run.metrics.evaluations import EvaluationResult
from megatron_grpo.run.metrics.records import Records
from megatron_grpo.run.metrics.rollout import Completions, rollout_stats, selection_stats
from megatron_grpo.run.metrics.summary import TimeSummary

PENDING_FILE = "untold.json"  # in output_dir, while a run is stopped between a rollout and the step that reports it

SCHEDULE = "schedule.jsonl"  # rows each optimizer step trained and their staleness; `plan.json` has the planned ones
# (progress, metrics of the step just taken and of the rollouts before it) -> text of a warning, or None.
Watch = Callable[[Progress, Mapping[str, float]], "str | None"]


class MetricsLogger:
    """Logger of the training loop, one per rank. Only rank 0 writes. Methods are collective where they say so.

    Args:
        metrics: Records of the run.
        completions: Writer of the completions tables.
        timers: Timers of the phases.
        reward_weights: Weight of each reward function.
        logs_selection: Whether rollouts select among the sampled groups (dynamic sampling).
        watches: Further warnings, evaluated after every step.
    """

    def __init__(
        self,
        metrics: Metrics,
        completions: Completions,
        *,
        timers: Timers,
        reward_weights: Sequence[float],
        logs_selection: bool,
        watches: Sequence[Watch] = (),
    ):
        self.metrics, self.completions, self.timers = metrics, completions, timers
        self._schedule = Records(metrics.output_dir / SCHEDULE)
        self.reward_weights, self.logs_selection = reward_weights, logs_selection
        self._watches = watches
        self._rollouts: list[ScoredRollout] = []
        self._pending_file = metrics.output_dir / PENDING_FILE
        self._spent = TimeSummary()

    def start(self, progress: Progress) -> None:
        """Start logging after `progress.step` optimizer steps. Records beyond that step, from an abandoned run, are dropped.

        Args:
            progress: Position of the run.
        """
        activity.report_step(progress.step)
        self.metrics.start(progress)
        self.completions.start(progress)
        if self.metrics.is_logging:
            self._schedule.begin(progress.step)
        self._spent.before(self.timers.take()["time/step"], step=progress.step)  # loading and restoring do not belong to a step

    def rollout(self, rollout: ScoredRollout) -> None:
        """Record a finished rollout. Collective.

        Args:
            rollout: Scored groups of this rank, and metadata of all.
        """
        self._rollouts.append(rollout)
        self.completions.write(rollout)

    def step(self, progress: Progress, batch: GlobalBatch, metrics: Mapping[str, float], *, skipped: str | None = None) -> None:
        """Record an optimizer step. Collective.

        Args:
            progress: Progress that includes this step.
            batch: The global batch that it trained.
            metrics: Metrics of the step, by name.
            skipped: Reason why the step was skipped, if it was.
        """
        if self.metrics.is_logging:
            record: dict[str, Any] = {"step": progress.step, "optimizer_step": progress.step - 1}
            record |= {"rows": batch.rows_by_micro_batch(), "staleness": batch.staleness.tolist()}
            self._schedule.append(record | ({"tokens_by_version": batch.tokens_by_version} if batch.tokens_by_version else {}))
        activity.report_step(progress.step)
        stats = self._rollout_stats() if self._rollouts else self._pending_stats(before=progress.step)
        self._rollouts = []
        for watch in self._watches:
            warning = watch(progress, stats | dict(metrics))
            if warning:
                self.metrics.print_line(f"WARNING: {warning}")
        if skipped:
            self.metrics.print_line(f"optimizer step {progress.step} is skipped: {skipped}")
            self.metrics.record_event("skipped", f"Optimizer step {progress.step:,} was skipped: {skipped}.")
        times = self.timers.take()
        self._spent.add(times)
        self._spent.step(is_skipped=skipped is not None)
        self.metrics.log(progress, stats | dict(metrics) | batch.metrics | times)
        if self.metrics.is_logging:
            self._pending_file.unlink(missing_ok=True)

    def keep(self, progress: Progress) -> None:
        """Save the metrics of rollouts that no step has reported yet, when the run ends. The resumed run reports them.

        Args:
            progress: Position of the run.
        """
        if self._rollouts and self.metrics.is_logging:
            atomic_write_text(self._pending_file, json.dumps({"step": progress.step, "stats": self._rollout_stats()}, default=float) + "\n")

    def _pending_stats(self, *, before: int) -> dict[str, float]:
        """Return the metrics that `keep` saved just before this optimizer step; empty if there are none."""
        if not self.metrics.is_logging:
            return {}
        with suppress(OSError, ValueError, KeyError):
            pending = parse_json(self._pending_file.read_text(encoding="utf-8"))
            if pending["step"] == before - 1:
                return pending["stats"]
        return {}

    def _rollout_stats(self) -> dict[str, float]:
        stats = rollout_stats(self._rollouts, self.completions.reward_names)
        return stats | (selection_stats(self._rollouts, self.reward_weights) if self.logs_selection else {})

    def skipped_step(self, progress: Progress, record: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Record that the gradient check refused the step just taken.

        Args:
            progress: Progress of the run.
            record: Line of skipped.jsonl.
            lines: Sentences about the rows that produced the gradient.
        """
        for line in lines:
            self.metrics.print_line(f"  {line}")
        self.metrics.log_skipped(progress, record)

    def evaluation(self, progress: Progress, evaluated: Sequence[EvaluationResult]) -> None:
        """Record an evaluation of every set.

        Args:
            progress: Position of the run.
            evaluated: Results, one for each set.
        """
        self.metrics.log_evaluation(progress, evaluated)

    def close(self, *, summary: bool = True) -> None:
        """End the run.

        Args:
            summary: Whether the run ended well enough to compare its end with its beginning.
        """
        self._spent.add(self.timers.take())
        self.metrics.close(summary=summary, times=self._spent)
