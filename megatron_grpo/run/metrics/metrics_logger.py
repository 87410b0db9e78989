"""All records of a run: metrics, rows trained, completions, evaluations, plots, the time per phase, warnings, and the live status line."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.metadata import Progress
from megatron_grpo.core.trainer.scored_rollout import ScoredRollout
from megatron_grpo.core.types import GlobalBatch
from megatron_grpo.run.config.evaluation import name_curve
from megatron_grpo.run.metrics.display import Display
from megatron_grpo.run.metrics.evaluations import EvaluationResult, Evaluations, compare_evaluations, curves_in, describe, score_of_record
from megatron_grpo.run.metrics.records import EVENTS, BestEffort, EventsWriter, History, JsonlFile, can_draw, remember, to_python_number
from megatron_grpo.run.metrics.rollout import Completions, rollout_stats
from megatron_grpo.run.metrics.summary import GradientSummary, TimeSummary

if TYPE_CHECKING:
    from megatron_grpo.run.metrics.reporters import TrackingServices

logger = logging.getLogger(__name__)
SCHEDULE = "schedule.jsonl"  # rows each optimizer step trained and their staleness; `plan.json` has the planned ones
WARNING = "WARNING: "  # start of printed lines that are warnings
TRAINING_ROWS = {"reward": "reward while training", "completions/mean_length": "tokens per completion"}
# (progress, metrics of the step just taken and of the rollouts before it) -> text of a warning, or None.
Watch = Callable[[Progress, Mapping[str, float]], "str | None"]


class MetricsLogger:
    """Logger of a run, one per rank. Only rank 0 writes and prints. Methods are collective where they say so.

    Args:
        completions: Writer of the completions tables. Its `output_dir` and `rank` are also the logger's.
        services: The services of `report_to`; None without any.
        selection_weights: Weight of each reward function if rollouts select among the sampled groups (dynamic sampling), else None.
        watches: Further warnings, evaluated after every step.
    """

    def __init__(
        self,
        completions: Completions,
        display: Display,
        *,
        timers: Timers,
        config: Mapping[str, Any],
        services: TrackingServices | None = None,
        selection_weights: Sequence[float] | None = None,
        watches: Sequence[Watch] = (),
        on_metrics: Callable[[int, Mapping[str, Any]], None] | None = None,
    ):
        self.completions, self.timers, self.config = completions, timers, config
        self.output_dir = out = completions.output_dir
        self.is_logging = completions.rank == 0
        self._display, self._services, self._selection_weights, self._watches = display, services, selection_weights, watches
        self._on_metrics = on_metrics or (lambda step, numbers: None)
        self._steps, self._schedule, self._skipped = (JsonlFile(out / name) for name in ("metrics.jsonl", SCHEDULE, "skipped.jsonl"))
        self._events = EventsWriter(out / EVENTS)
        self.evaluations = Evaluations(out, writes_completions=bool(config.get("log_completions_steps", 1)))
        self.learnt = GradientSummary(
            compares_groups=bool(config.get("reward_funcs")) and config.get("advantage_estimator") != "reinforce_plus_plus"
        )
        self._history: History = {}  # of the metrics that plots show
        self._best_effort = BestEffort()
        self._spent = TimeSummary()
        self._rollouts: list[ScoredRollout] = []  # not yet reported by a step
        self.restored_stats: dict[str, float] = {}  # metrics of rollouts of the checkpoint that no step has reported
        self._num_tokens = 0
        self._started = self._warned_of_matplotlib = False

    def open(self) -> None:
        """Start displaying phases and recording warnings. Loading comes before `start`."""
        if self.is_logging:
            self._display.open()
            self._events.open()

    def start(self, progress: Progress) -> None:
        """Start logging after `progress.step` optimizer steps. Records beyond that step, from an abandoned run, are dropped."""
        activity.report_step(progress.step)
        if self.is_logging:
            self._start_records(progress)
        self.completions.start(progress)
        self._spent.before(self.timers.take()["time/step"], step=progress.step)  # loading and restoring do not belong to a step

    def _start_records(self, progress: Progress) -> None:
        self._started, self._num_tokens = True, progress.num_tokens
        self._steps.begin(progress.step)
        for record in self._steps.all():
            self._remember(record)
        self._skipped.cut(progress.step)
        self.evaluations.start(progress.step or -1)  # without a checkpoint, the evaluation before step 1 is dropped too
        self._show_scores()
        if self._services:
            self._services.start(progress.step)
        if progress.step:
            self._events.add("resumed", f"The run resumed after optimizer step {progress.step:,}.")
        self._display.start(progress.step)
        self._schedule.begin(progress.step)

    def rollout(self, rollout: ScoredRollout) -> None:
        """Record a finished rollout. Collective."""
        self._rollouts.append(rollout)
        self.completions.write(rollout)

    def step(self, progress: Progress, batch: GlobalBatch, metrics: Mapping[str, float], *, skipped: str | None = None) -> None:
        """Record an optimizer step.

        Args:
            skipped: Reason why the step was skipped, if it was.
        """
        activity.report_step(progress.step)
        rollouts, self._rollouts = self._rollouts, []
        if not self.is_logging:
            self.timers.take()
            return
        record: dict[str, Any] = {"step": progress.step, "optimizer_step": progress.step - 1}
        record |= {"rows": batch.rows_by_micro_batch(), "staleness": batch.staleness.tolist()}
        self._schedule.append(record | ({"tokens_by_version": batch.tokens_by_version} if batch.tokens_by_version else {}))
        stats = (self._rollout_stats(rollouts) if rollouts else self.restored_stats) | dict(metrics)
        self.restored_stats = {}
        for watch in self._watches:
            if warning := watch(progress, stats):
                self.print_line(f"{WARNING}{warning}")
        if skipped:
            self.print_line(f"optimizer step {progress.step} is skipped: {skipped}")
            self.record_event("skipped", f"Optimizer step {progress.step:,} was skipped: {skipped}.")
        times = self.timers.take()
        self._spent.add(times)
        self._spent.step(is_skipped=skipped is not None)
        self.log(progress, stats | batch.metrics | times)

    def log(self, progress: Progress, stats: Mapping[str, float]) -> None:
        """Log an optimizer step as a line of metrics.jsonl, with step, num_tokens and tokens_per_second. For rank 0.

        Args:
            stats: Metrics by name, including `time/step` (seconds).
        """
        step, seconds = progress.step, stats["time/step"]
        record = {"step": step, "num_tokens": progress.num_tokens, **stats}
        if progress.num_tokens > self._num_tokens and seconds > 0:
            record["tokens_per_second"] = (progress.num_tokens - self._num_tokens) / seconds
        self._num_tokens = progress.num_tokens
        self._steps.append(record)
        self._remember(record)
        self._on_metrics(step, record)
        if self._services:
            self._services.log_step(record, is_last=step == self._display.total)
        if (reward := to_python_number(record.get("reward"))) is not None:  # not every optimizer step has a new rollout
            self._display.show(reward=reward)
        self._display.step(step, seconds=seconds)
        if step == 2 and (reason := self.learnt.alike()):
            self.print_line(f"{WARNING}{reason}: the rewards give no gradient.")
        plot_steps = self.config.get("save_steps", 0)
        if plot_steps and step % plot_steps == 0:
            self.refresh_plots()

    def _remember(self, record: Mapping[str, Any]) -> None:
        self.learnt.take(record)
        remember(self._history, record)

    def skipped_step(self, progress: Progress, record: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Record that the gradient check refused the step just taken.

        Args:
            record: Line of skipped.jsonl: metrics of the step, and the reason.
        """
        if self.is_logging:
            for line in lines:
                self.print_line(f"  {line}")
            self._skipped.append({"step": progress.step, **record})

    def compute_unreported_stats(self) -> dict[str, float]:
        """Return the metrics of rollouts that no step has reported yet, for the checkpoint of a run that stops before their step."""
        return self._rollout_stats(self._rollouts) if self._rollouts else self.restored_stats

    def _rollout_stats(self, rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
        return rollout_stats(rollouts, self.completions.reward_names, selection_weights=self._selection_weights)

    def evaluation(self, progress: Progress, evaluated: Sequence[EvaluationResult]) -> None:
        """Log an evaluation of every set, one line of evaluations.jsonl each. The scores are displayed, plotted and compared.

        Args:
            evaluated: Results, one for each set.
        """
        if not self.is_logging:
            return
        records = [self.evaluations.add(progress.step, result) for result in evaluated]
        self._show_scores()
        values = {f"{name_curve(record['name'])}/{name}": value for record in records for name, value in record.items() if name != "step"}
        if self._services:
            self._services.log(progress.step, values)
        self._on_metrics(progress.step, values)
        sampling_text, heads, rows = describe(records)
        self._display.table(f"Evaluation at step {progress.step} ({sampling_text})", heads, rows)

    def _show_scores(self) -> None:
        self._display.show(**{name: points[-1][1] for name, points in curves_in(self.evaluations.records).items()})

    def refresh_plots(self) -> list[Path]:
        """Draw plots/*.png from everything logged so far and return their paths. For rank 0.

        Without matplotlib nothing is drawn, and a warning is logged once.
        """
        if can_draw():
            with self._best_effort("plots"):
                from megatron_grpo.run.metrics import plots

                return plots.refresh(self.output_dir, self._history | curves_in(self.evaluations.records))
        elif not self._warned_of_matplotlib:
            self._warned_of_matplotlib = True
            logger.warning("plots/ is not drawn: matplotlib is not installed (pip install 'megatron-grpo[plot]')")
        return []

    def print_line(self, text: str) -> None:
        """Print a line above the live one. Lines that begin with `WARNING: ` are recorded."""
        if self.is_logging:
            self._display.print_line(text)
            self.record_warning(text)

    def record_warning(self, line: str) -> None:
        """Record a line that is printed elsewhere, if it begins with `WARNING: `."""
        if line.startswith(WARNING):
            self.record_event("warning", line.removeprefix(WARNING))

    def record_event(self, kind: str, text: str) -> None:
        """Record an event in events.jsonl, as `EventsWriter.add` does."""
        if self.is_logging:
            self._events.add(kind, text)

    def close(self, *, summary: bool = True) -> None:
        """End the run, successful or not: send the last records, draw the last plots, and print the summary.

        Args:
            summary: Whether to print the comparison of before and after and the time table. False for a failed run.
        """
        self._spent.add(self.timers.take())
        if not self.is_logging:
            return
        if self._services:
            self._services.send_steps()
        self._display.stop()
        if self._started:
            self._started = False
            self.refresh_plots()
            if summary:
                self._print_summary()
            if self._services:
                self._services.close()
            self._best_effort.summary()
            if self.learnt.num_steps:
                self._display.print_line(f"Page of this run: megatron-grpo report {shlex.quote(str(self.output_dir))}")
        self._display.close()
        self._events.close()

    def _print_summary(self) -> None:
        for first, last in self.evaluations.first_and_last():
            heads = (f"step {first['step']}", f"step {last['step']}")
            self._display.compare(f"Held-out prompts: {score_of_record(last)[0]}", heads, compare_evaluations(first, last))
        rows = []
        for name, label in TRAINING_ROWS.items():
            values = [value for _, value in self._history.get(name, [])]
            if len(values) >= 2:
                window = max(1, min(10, len(values) // 2))
                rows.append((label, sum(values[:window]) / window, sum(values[-window:]) / window))
        if rows:
            self._display.compare("Training", ("first rollouts", "last rollouts"), rows)
        if time_rows := self._spent.rows():
            self._display.table("Where the time went", ("seconds", "share"), time_rows)
            self._display.print_line(self._spent.describe())
        if reason := self.learnt.alike():
            self.print_line(f"{WARNING}{reason}: other terms of the loss changed the weights.")
