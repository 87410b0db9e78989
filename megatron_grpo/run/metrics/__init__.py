"""Records of a run: metrics.jsonl, evaluations.jsonl, completions, plots, the live status line, and the services of `--report_to`.

Only rank 0 writes; on other ranks every method returns at once. docs/metrics.md is the page for users.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.types import Progress
from megatron_grpo.run.config.evaluation import curve_of
from megatron_grpo.run.metrics import registry
from megatron_grpo.run.metrics.display import Display
from megatron_grpo.run.metrics.evaluations import EvaluationResult, Evaluations, compare_evaluations, curves_in, describe, score_of_record
from megatron_grpo.run.metrics.records import EVENTS, BestEffort, Events, History, Records, can_draw, remember, to_python_number
from megatron_grpo.run.metrics.reporters import REPORTERS, BackgroundReporter, ReporterInit, Table, report_to_problems, services
from megatron_grpo.run.metrics.summary import LearningSignal, TimeSummary

__all__ = ["Metrics", "report_to_problems"]

logger = logging.getLogger(__name__)
WARNING = "WARNING: "  # start of printed lines that are warnings
TRAINING_ROWS = {"reward": "reward while training", "completions/mean_length": "tokens per completion"}


class Metrics:
    """Records of a run.

    Construct it before any model loads, because it raises for a service that is not installed; call `start` after restoring.

    Args:
        output_dir: Directory of the run.
        report_to: Services of `--report_to`.
        rank: Global rank.
        total_steps: Optimizer steps of the whole run.
        plot_steps: Optimizer steps between two refreshes of plots/; 0 draws only at the end.
        config: Resolved settings, flat, for the services.
        console: Console to print to, for tests.
        on_metrics: Callback (step, numbers by name) for every optimizer step and evaluation, as soon as the numbers are known.

    Raises:
        ConfigError: A service of `report_to` is unknown or not installed.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        report_to: Sequence[str] = ("none",),
        rank: int = 0,
        total_steps: int | None = None,
        plot_steps: int = 0,
        config: Mapping[str, Any] | None = None,
        console: Console | None = None,
        on_metrics: Callable[[int, Mapping[str, Any]], None] | None = None,
    ):
        problems = report_to_problems(report_to)
        if problems:
            raise ConfigError(problems)
        self.output_dir = Path(output_dir)
        self.is_logging = rank == 0
        self.total_steps, self.plot_steps, self.config = total_steps, plot_steps, dict(config or {})
        self._services = services(report_to)
        self._reporters: dict[str, BackgroundReporter] = {}
        self._completions: Table | None = None  # rows of a rollout that the next step trains
        self._display = Display(console, total=total_steps, folder=self.output_dir)
        self._best_effort = BestEffort()
        self._on_metrics = on_metrics or (lambda step, numbers: None)
        self._steps = Records(self.output_dir / "metrics.jsonl")
        self.evaluations = Evaluations(self.output_dir, writes_completions=bool(self.config.get("log_completions_steps", 1)))
        self._events = Events(self.output_dir / EVENTS)
        self._skipped = Records(self.output_dir / "skipped.jsonl")
        self._history: History = {}
        self.learnt = LearningSignal(
            compares_groups=bool(self.config.get("reward_funcs")) and self.config.get("advantage_estimator") != "reinforce_plus_plus"
        )
        self._started = False
        self._num_tokens = 0
        self._unsent: list[dict[str, Any]] = []  # steps not yet sent to the services

    def open(self) -> None:
        """Start displaying phases and recording warnings. Loading comes before `start`."""
        if self.is_logging:
            self._display.open()
            self._events.open()

    def start(self, progress: Progress) -> None:
        """Start logging after `progress.step` optimizer steps. Records beyond that step, from an abandoned run, are dropped.

        Args:
            progress: Position of the run.
        """
        if not self.is_logging or self._started:
            return
        self._started = True
        self._steps.begin(progress.step)
        for record in self._steps.all():
            self._remember(record)
        self._skipped.cut(progress.step)
        self.evaluations.start(progress.step or -1)  # without a checkpoint, the evaluation before step 1 is dropped too
        self._show_evaluations()
        begin = ReporterInit(output_dir=self.output_dir, config=self.config, first_step=progress.step + 1)
        for name in self._services:
            self._reporters[name] = BackgroundReporter(name, partial(REPORTERS[name], begin))
        self._num_tokens = progress.num_tokens
        if progress.step:
            self._events.add("resumed", f"The run resumed after optimizer step {progress.step:,}.")
        self._display.start(progress.step)

    def log(self, progress: Progress, stats: Mapping[str, float]) -> None:
        """Log one optimizer step as a line of metrics.jsonl, with step, num_tokens and tokens_per_second.

        Args:
            progress: Progress that includes this step.
            stats: Metrics by name, including `time/step` (seconds).
        """
        if not self.is_logging:
            return
        if not self._started:
            self.start(Progress(step=progress.step - 1, num_tokens=0))
        record = {"step": progress.step, "num_tokens": progress.num_tokens, **stats}
        seconds = stats["time/step"]
        if progress.num_tokens > self._num_tokens and seconds > 0:
            record["tokens_per_second"] = (progress.num_tokens - self._num_tokens) / seconds
        self._num_tokens = progress.num_tokens
        self._steps.append(record)
        self._remember(record)
        self._unsent.append(record)
        self._on_metrics(progress.step, record)
        if progress.step % self.config.get("logging_steps", 1) == 0 or progress.step == self.total_steps:
            self._send_to_services()
        if to_python_number(record.get("reward")) is not None:  # not every optimizer step has a new rollout
            self._display.show(reward=to_python_number(record["reward"]))
        self._display.step(progress.step, seconds=seconds)
        if progress.step == 2 and (reason := self.learnt.alike()):
            self.print_line(f"WARNING: {reason}: the rewards give no gradient.")
        if self.plot_steps and progress.step % self.plot_steps == 0:
            self.refresh_plots()

    def _send_to_services(self) -> None:
        """Send the steps since the last call to the services: the mean of each metric over the steps that have it, and current totals."""
        if not self._unsent:
            return
        records, self._unsent = self._unsent, []
        values: dict[str, list[Any]] = {}
        for record in records:
            for name, value in record.items():
                values.setdefault(name, []).append(value)
        self._report(
            records[-1]["step"], {name: column[-1] if registry.is_total(name) else _mean(column) for name, column in values.items()}
        )

    def completions(self, version: int, table: Table) -> None:
        """Keep rows of a rollout for the services, which receive them with the next step.

        Args:
            version: Version of the weights that sampled the rollout.
            table: Values per completion, by column.
        """
        self._completions = table

    def log_evaluation(self, progress: Progress, evaluated: Sequence[EvaluationResult]) -> None:
        """Log one evaluation of every set, one line of evaluations.jsonl each. The scores are displayed, plotted and compared.

        Args:
            progress: Position of the run.
            evaluated: Results, one for each set.
        """
        if not self.is_logging:
            return
        if not self._started:
            self.start(progress)
        records = [self.evaluations.add(progress.step, evaluation) for evaluation in evaluated]
        self._show_evaluations()
        values = {f"{curve_of(record['name'])}/{name}": value for record in records for name, value in record.items() if name != "step"}
        self._report(progress.step, values)
        self._on_metrics(progress.step, values)
        sampling_text, heads, rows = describe(records)
        self._display.table(f"Evaluation at step {progress.step} ({sampling_text})", heads, rows)

    def log_skipped(self, progress: Progress, record: Mapping[str, Any]) -> None:
        """Log an optimizer step that the gradient check refused as a line of skipped.jsonl.

        Args:
            progress: Position of the run.
            record: Metrics of the step, and the reason.
        """
        if self.is_logging:
            self._skipped.append({"step": progress.step, **record})

    def refresh_plots(self) -> list[Path]:
        """Draw plots/*.png from everything logged so far and return their paths. Without matplotlib a warning is logged once."""
        if self.is_logging and not can_draw():
            _warn_without_matplotlib()
        elif self.is_logging:
            with self._best_effort("plots"):
                from megatron_grpo.run.metrics import plots

                return plots.refresh(self.output_dir, self._history | curves_in(self.evaluations.records))
        return []

    def print_line(self, text: str) -> None:
        """Print a line above the live one. Lines that begin with `WARNING: ` are recorded.

        Args:
            text: The line.
        """
        if self.is_logging:
            self._display.print_line(text)
            self.record_warning(text)

    def record_warning(self, line: str) -> None:
        """Record a line that is printed elsewhere, if it begins with `WARNING: `.

        Args:
            line: The line.
        """
        if line.startswith(WARNING):
            self.record_event("warning", line.removeprefix(WARNING))

    def record_event(self, kind: str, text: str) -> None:
        """Record an event in events.jsonl, as `Events.add` does.

        Args:
            kind: Kind of the event.
            text: Description of the event.
        """
        if self.is_logging:
            self._events.add(kind, text)

    def close(self, *, summary: bool = True, times: TimeSummary | None = None) -> None:
        """End the run, successful or not: send the last records, draw the last plots, and print the summary.

        Args:
            summary: Whether to print the comparison of before and after and the time table. False for a failed run.
            times: Time per phase.
        """
        if not self.is_logging:
            return
        self._send_to_services()
        self._display.stop()
        if self._started:
            self._started = False
            self._summarize(summary, times)
        self._display.close()
        self._events.close()

    def _summarize(self, summary: bool, times: TimeSummary | None) -> None:
        self.refresh_plots()
        if summary:
            self._compare()
        if summary and times is not None and times.rows():
            self._display.table("Where the time went", ("seconds", "share"), times.rows())
            self._display.print_line(times.describe())
        if summary and (reason := self.learnt.alike()):
            self.print_line(f"WARNING: {reason}: other terms of the loss changed the weights.")
        for reporter in self._reporters.values():
            reporter.close()
        self._best_effort.summary()
        if self.learnt.num_steps:
            self._display.print_line(f"Page of this run: megatron-grpo report {shlex.quote(str(self.output_dir))}")

    def _compare(self) -> None:
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

    def _report(self, step: int, record: Mapping[str, Any]) -> None:
        values = {name: to_python_number(value) for name, value in record.items() if name != "step"}
        finite = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for reporter in self._reporters.values():
            reporter.log(step, finite)
            if self._completions is not None:
                reporter.completions(step, self._completions)
        self._completions = None

    def _remember(self, record: Mapping[str, Any]) -> None:
        self.learnt.take(record)
        remember(self._history, record)

    def _show_evaluations(self) -> None:
        self._display.show(**{name: points[-1][1] for name, points in curves_in(self.evaluations.records).items()})


@cache
def _warn_without_matplotlib() -> None:
    logger.warning("plots/ is not drawn: matplotlib is not installed (pip install 'megatron-grpo[plot]')")


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of the numbers; the last value if there are none."""
    numbers = [number for number in map(to_python_number, values) if number is not None]
    return sum(numbers) / len(numbers) if numbers else values[-1]
