"""External experiment trackers besides metrics.jsonl (`--report_to`), each in a background thread."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, one_line, problem_with
from megatron_grpo.run.metrics import registry
from megatron_grpo.run.metrics.records import to_python_number

logger = logging.getLogger(__name__)

PROJECT = "megatron-grpo"  # default project, if neither the settings nor the service's environment variable name one
SECONDS_TO_CLOSE = 30.0  # longest wait for a service at the end of a run
MOST_WAITING = 10_000  # calls queued for a service; a service further behind is given up
MOST_ROWS = 1000  # rows in a table of completions
ALL = "all"

Table = Mapping[str, Sequence[Any]]  # by column


@dataclass(frozen=True, slots=True, kw_only=True)
class ReporterInit:
    """Data that a service receives when it starts.

    Args:
        output_dir: Directory of the run.
        config: Resolved settings, flat.
        first_step: Number of the first optimizer step that will be logged.
    """

    output_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 1

    def name_or(self, variable: str = "") -> str:
        """Return the run's name: from the settings, else from the service's environment variable, else the name of the output directory."""
        return self.config.get("run_name") or os.environ.get(variable) or self.output_dir.absolute().name

    def project_or(self, variable: str) -> str:
        """Return the project: from the settings, else from the service's environment variable, else `PROJECT`."""
        return self.config.get("project") or os.environ.get(variable) or PROJECT


class Reporter:
    """Connection to a service that has started."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step.

        Args:
            values: Finite numbers only, by name.
        """

    def completions(self, step: int, table: Table) -> None:
        """Log rows of a rollout that this step trained. Does nothing if the service has no tables.

        Args:
            table: Values per completion, by column.
        """

    def close(self) -> None:
        """Finish the run. No further calls follow."""


class Tensorboard(Reporter):
    """Writer of event files under output_dir/tensorboard. Steps after the one resumed from are hidden."""

    def __init__(self, begin: ReporterInit):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(begin.output_dir / "tensorboard"), purge_step=begin.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbReporter(Reporter):
    """Reporter to a service with the interface of Weights & Biases: init, log, finish.

    The service's environment variables (WANDB_MODE, ...) apply.

    Args:
        as_table: Function (module, rows by column) -> the service's table object; None if it has no tables.
        kwargs: Further arguments of `init`.
    """

    def __init__(self, begin: ReporterInit, module: str, as_table: Callable[[Any, Table], Any] | None = None, **kwargs: Any):
        self.service, self._as_table = importlib.import_module(module), as_table
        self.service.init(project=begin.project_or(f"{module.upper()}_PROJECT"), config=dict(begin.config), **kwargs)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.service.log(dict(values), step=step)

    def completions(self, step: int, table: Table) -> None:
        if self._as_table is not None:
            self.service.log({"completions": self._as_table(self.service, table)}, step=step)

    def close(self) -> None:
        self.service.finish()


def wandb(begin: ReporterInit) -> WandbReporter:
    """Start Weights & Biases, with its files in output_dir."""

    def as_table(service: Any, table: Table) -> Any:
        return service.Table(columns=list(table), data=[list(row) for row in zip(*table.values(), strict=True)])

    name, settings = begin.name_or("WANDB_NAME"), {"init_timeout": SECONDS_TO_CLOSE}
    return WandbReporter(begin, "wandb", as_table, name=name, dir=str(begin.output_dir), resume="allow", settings=settings)


def swanlab(begin: ReporterInit) -> WandbReporter:
    """Start SwanLab, with its log directory in output_dir/swanlab."""
    return WandbReporter(begin, "swanlab", experiment_name=begin.name_or("SWANLAB_EXP_NAME"), logdir=str(begin.output_dir / "swanlab"))


def trackio(begin: ReporterInit) -> WandbReporter:
    """Start Trackio, with its database in output_dir/trackio (or TRACKIO_DIR), or in a Space of the Hub (TRACKIO_SPACE_ID)."""
    folder = str((begin.output_dir / "trackio").absolute())
    os.environ.setdefault("TRACKIO_DIR", folder)  # read once, when trackio is imported; its default is a folder in the user's cache
    if is_installed("matplotlib"):
        # Trackio compares values with this module's classes and drops them while another thread, which draws plots, still imports it.
        import matplotlib.figure  # noqa: F401

    def as_table(service: Any, table: Table) -> Any:
        import pandas

        return service.Table(dataframe=pandas.DataFrame(dict(table)))  # it accepts `columns` too, but ignores them

    space = os.environ.get("TRACKIO_SPACE_ID")
    return WandbReporter(begin, "trackio", as_table, name=begin.name_or("TRACKIO_NAME"), resume="allow", space_id=space)


class Mlflow(Reporter):
    """Reporter to MLflow, whose environment variables (MLFLOW_TRACKING_URI, ...) apply. A project is an MLflow experiment."""

    def __init__(self, begin: ReporterInit):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(begin.project_or("MLFLOW_EXPERIMENT_NAME"))
        mlflow.start_run(run_name=begin.name_or("MLFLOW_RUN_NAME"))
        mlflow.log_params({name: str(value)[:500] for name, value in begin.config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # MLflow does not allow @ in a name.
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def completions(self, step: int, table: Table) -> None:
        self.mlflow.log_table({name: list(column) for name, column in table.items()}, f"completions/step_{step:06d}.json")

    def close(self) -> None:
        self.mlflow.end_run()


REPORTERS: dict[str, Callable[[ReporterInit], Reporter]] = {
    "tensorboard": Tensorboard,
    "wandb": wandb,
    "swanlab": swanlab,
    "mlflow": Mlflow,
    "trackio": trackio,
}


class BackgroundReporter:
    """Reporter that runs in its own thread, so that it never blocks the run.

    The first exception of the service is logged as a warning, and the service is switched off.

    Args:
        make: Function that starts the service, called in the thread.
    """

    def __init__(self, name: str, make: Callable[[], Reporter]):
        self.name = name
        self._words: queue.Queue[Callable[[Reporter], None] | None] = queue.Queue(MOST_WAITING)
        self._is_off = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"report-to-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of an optimizer step."""
        self._notify(lambda reporter: reporter.log(step, values))

    def completions(self, step: int, table: Table) -> None:
        """Queue a table of completions, cut to `MOST_ROWS` rows."""
        rows = {name: column[:MOST_ROWS] for name, column in table.items()}
        self._notify(lambda reporter: reporter.completions(step, rows))

    def close(self) -> None:
        """Wait until the queue is empty and the service is closed, for at most `SECONDS_TO_CLOSE`."""
        self._notify(None)
        if not self._is_off.is_set():
            self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            self._give_up(f"it has not received everything {SECONDS_TO_CLOSE:g} s after the end")

    def _notify(self, word: Callable[[Reporter], None] | None) -> None:
        if self._is_off.is_set():
            return
        try:
            self._words.put_nowait(word)
        except queue.Full:
            self._give_up(f"it is {MOST_WAITING} messages behind")

    def _work(self, make: Callable[[], Reporter]) -> None:
        try:
            reporter = make()
            while (word := self._words.get()) is not None:
                if not self._is_off.is_set():
                    word(reporter)
            reporter.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - services raise anything
            self._give_up(f"{type(error).__name__}: {one_line(error)}")

    def _give_up(self, reason: str) -> None:
        if not self._is_off.is_set():
            self._is_off.set()
            logger.warning("%s failed, and the run continues without it: %s", self.name, reason)


class TrackingServices:
    """The services of `--report_to`, which receive the steps, evaluations and completions of a run. Rank 0 alone starts them.

    Raises:
        ConfigError: A service is unknown or not installed.
    """

    def __init__(self, output_dir: Path, config: Mapping[str, Any]):
        if problems := report_to_problems(config["report_to"]):
            raise ConfigError(problems)
        self.output_dir, self.config = output_dir, config
        self._reporters: list[BackgroundReporter] = []
        self._completions: Table | None = None  # rows of a rollout that the next step trains
        self._unsent: list[Mapping[str, Any]] = []  # steps not yet sent

    def start(self, step: int) -> None:
        """Start the services."""
        begin = ReporterInit(output_dir=self.output_dir, config=self.config, first_step=step + 1)
        self._reporters = [BackgroundReporter(name, partial(REPORTERS[name], begin)) for name in services(self.config["report_to"])]

    def keep_completions(self, version: int, table: Table) -> None:
        """Keep rows of a rollout, which the services receive with the next step.

        Args:
            table: Values per completion, by column.
        """
        self._completions = table

    def log_step(self, record: Mapping[str, Any], *, is_last: bool) -> None:
        """Send an optimizer step, or keep it until `logging_steps` of them are sent together.

        Args:
            is_last: Whether it is the last step of the run.
        """
        self._unsent.append(record)
        if record["step"] % self.config.get("logging_steps", 1) == 0 or is_last:
            self.send_steps()

    def send_steps(self) -> None:
        """Send the steps since the last call: the mean of each metric over the steps that have it, and current totals."""
        if not self._unsent:
            return
        records, self._unsent = self._unsent, []
        values: dict[str, list[Any]] = {}
        for record in records:
            for name, value in record.items():
                values.setdefault(name, []).append(value)
        means = {name: column[-1] if registry.is_total(name) else _mean(column) for name, column in values.items()}
        self.log(records[-1]["step"], means)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Send the finite numbers of a record, and the completions that were kept."""
        values = {name: to_python_number(value) for name, value in record.items() if name != "step"}
        finite = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        for reporter in self._reporters:
            reporter.log(step, finite)
            if self._completions is not None:
                reporter.completions(step, self._completions)
        self._completions = None

    def close(self) -> None:
        """Wait for each service, as `BackgroundReporter.close` does."""
        for reporter in self._reporters:
            reporter.close()


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of the numbers; the last value if there are none."""
    numbers = [number for number in map(to_python_number, values) if number is not None]
    return sum(numbers) / len(numbers) if numbers else values[-1]


def services(report_to: Sequence[str]) -> list[str]:
    """Return the services of `--report_to`, each once. `all` means all installed services, as in transformers.

    Args:
        report_to: Setting `report_to`.
    """
    names = [service for name in report_to for service in ([*filter(is_installed, REPORTERS)] if name == ALL else [name])]
    return [name for name in dict.fromkeys(names) if name != "none"]


def is_installed(name: str) -> bool:
    """Return whether the package of a service is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def report_to_problems(report_to: Sequence[str]) -> list[Problem]:
    """Return the problems of `--report_to`: unknown names, and services whose package is not installed. Imports none of them.

    Args:
        report_to: Setting `report_to`.
    """
    problems = []
    for name in services(report_to):
        if name not in REPORTERS:
            close = difflib.get_close_matches(name, [*REPORTERS, ALL], n=1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(REPORTERS)}, all or none."
            problems.append(Problem(flags=("report_to",), message=f"report_to {name} is unknown: {hint}", nearest={"report_to": close}))
        elif not is_installed(name):
            extra = f"pip install 'megatron-grpo[{name}]'"
            problems.append(problem_with("report_to", f"report_to {name} needs the package {name}, which is not installed: {extra}."))
    return problems
