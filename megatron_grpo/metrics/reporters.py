"""Where metrics go besides metrics.jsonl: services that are told of a run, each in a thread of its own."""

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
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import Problem, problem_with, said_by

logger = logging.getLogger(__name__)

PROJECT = "megatron-grpo"  # where neither the settings nor the service's own variable names one
SECONDS_TO_CLOSE = 30.0  # that the end of a run waits for a service
MOST_WAITING = 10_000  # words that a service has not taken yet; one that is so far behind is given up
MOST_ROWS = 1000  # of a table of completions
ALL = "all"

Table = Mapping[str, Sequence[Any]]  # by column


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a service is told first. config: the resolved settings, flat. first_step: the one that is told next."""

    output_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    first_step: int = 1

    def name_or(self, variable: str = "") -> str:
        """The run's name in the settings, else that of the service's own variable, else that of its folder."""
        return self.config.get("run_name") or os.environ.get(variable) or self.output_dir.absolute().name

    def project_or(self, variable: str) -> str:
        """The project of the settings, else that of the service's own variable."""
        return self.config.get("project") or os.environ.get(variable) or PROJECT


class Reporter:
    """A service that has begun."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers only."""

    def completions(self, step: int, table: Table) -> None:
        """Rows of a rollout that this step trained. Does nothing where a service has no tables."""

    def close(self) -> None:
        """Nothing more comes."""


class Tensorboard(Reporter):
    """Event files under output_dir/tensorboard. Steps beyond the one resumed from are hidden."""

    def __init__(self, begin: Begin):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(begin.output_dir / "tensorboard"), purge_step=begin.first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbReporter(Reporter):
    """A service with the interface of Weights & Biases: init, log, finish. Its own environment variables (WANDB_MODE, ...) apply.

    as_table: (its module, rows by column) -> what it logs as a table; None for one without tables. further: arguments of `init`.
    """

    def __init__(self, begin: Begin, module: str, as_table: Callable[[Any, Table], Any] | None = None, **further: Any):
        self.service, self._as_table = importlib.import_module(module), as_table
        self.service.init(project=begin.project_or(f"{module.upper()}_PROJECT"), config=dict(begin.config), **further)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.service.log(dict(values), step=step)

    def completions(self, step: int, table: Table) -> None:
        if self._as_table is not None:
            self.service.log({"completions": self._as_table(self.service, table)}, step=step)

    def close(self) -> None:
        self.service.finish()


def wandb(begin: Begin) -> WandbReporter:
    def as_table(service: Any, table: Table) -> Any:
        return service.Table(columns=list(table), data=[list(row) for row in zip(*table.values(), strict=True)])

    name, settings = begin.name_or("WANDB_NAME"), {"init_timeout": SECONDS_TO_CLOSE}
    return WandbReporter(begin, "wandb", as_table, name=name, dir=str(begin.output_dir), resume="allow", settings=settings)


def swanlab(begin: Begin) -> WandbReporter:
    return WandbReporter(begin, "swanlab", experiment_name=begin.name_or("SWANLAB_EXP_NAME"), logdir=str(begin.output_dir / "swanlab"))


def trackio(begin: Begin) -> WandbReporter:
    """On this machine, or on a Space of the Hub (TRACKIO_SPACE_ID)."""

    def as_table(service: Any, table: Table) -> Any:
        import pandas

        return service.Table(dataframe=pandas.DataFrame(dict(table)))  # it takes `columns` too, and ignores them

    space = os.environ.get("TRACKIO_SPACE_ID")
    return WandbReporter(begin, "trackio", as_table, name=begin.name_or("TRACKIO_NAME"), resume="allow", space_id=space)


class Mlflow(Reporter):
    """MLflow; its own environment variables (MLFLOW_TRACKING_URI, ...) apply. A project is an experiment there."""

    def __init__(self, begin: Begin):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(begin.project_or("MLFLOW_EXPERIMENT_NAME"))
        mlflow.start_run(run_name=begin.name_or("MLFLOW_RUN_NAME"))
        mlflow.log_params({name: str(value)[:500] for name, value in begin.config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # It takes no @ in a name.
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def completions(self, step: int, table: Table) -> None:
        self.mlflow.log_table({name: list(column) for name, column in table.items()}, f"completions/step_{step:06d}.json")

    def close(self) -> None:
        self.mlflow.end_run()


REPORTERS: dict[str, Callable[[Begin], Reporter]] = {
    "tensorboard": Tensorboard,
    "wandb": wandb,
    "swanlab": swanlab,
    "mlflow": Mlflow,
    "trackio": trackio,
}


class InBackground:
    """A service in a thread of its own, so that it never holds a run up. What it raises first is said, and then it is off."""

    def __init__(self, name: str, make: Callable[[], Reporter]):
        self.name = name
        self._words: queue.Queue[Callable[[Reporter], None] | None] = queue.Queue(MOST_WAITING)
        self._is_off = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"report-to-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._tell(lambda reporter: reporter.log(step, values))

    def completions(self, step: int, table: Table) -> None:
        rows = {name: column[:MOST_ROWS] for name, column in table.items()}
        self._tell(lambda reporter: reporter.completions(step, rows))

    def close(self) -> None:
        """Waits for what it was told, but not for ever."""
        self._tell(None)
        if not self._is_off.is_set():
            self._thread.join(SECONDS_TO_CLOSE)
        if self._thread.is_alive():
            self._give_up(f"it has not taken everything {SECONDS_TO_CLOSE:g} s after the end")

    def _tell(self, word: Callable[[Reporter], None] | None) -> None:
        if self._is_off.is_set():
            return
        try:
            self._words.put_nowait(word)
        except queue.Full:
            self._give_up(f"it is {MOST_WAITING} words behind")

    def _work(self, make: Callable[[], Reporter]) -> None:
        try:
            reporter = make()
            while (word := self._words.get()) is not None:
                if not self._is_off.is_set():
                    word(reporter)
            reporter.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - services raise anything
            self._give_up(f"{type(error).__name__}: {said_by(error)}")

    def _give_up(self, why: str) -> None:
        if not self._is_off.is_set():
            self._is_off.set()
            logger.warning("%s failed, and the run goes on without it: %s", self.name, why)


def services(report_to: Sequence[str]) -> list[str]:
    """The services of `--report_to`, each once. `all` are those that are installed, as in transformers."""
    named = [one for name in report_to for one in ([*filter(is_installed, REPORTERS)] if name == ALL else [name])]
    return [name for name in dict.fromkeys(named) if name != "none"]


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def report_to_problems(report_to: Sequence[str]) -> list[Problem]:
    """What is wrong with `--report_to`: unknown names, and services whose package is not installed. Imports none of them."""
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
