"""Metrics that a run logs, with unit, meaning, when each is logged, and which other system has it: the table `registry.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

EVALUATIONS = "Evaluations"  # group of the numbers of evaluations.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, or a family of metrics with a pattern as its name. `registry.yaml` explains the fields."""

    name: str
    meaning: str
    when: str = ""
    unit: str = ""
    elsewhere: str = ""
    page: str = ""
    is_total: bool = False

    def matches(self, name: str) -> bool:
        """Return whether the metric has this name, or its pattern matches."""
        return _pattern(self.name).fullmatch(name) is not None


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(r"\S+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", name)))


@cache
def groups() -> Mapping[str, tuple[Metric, ...]]:
    """Return the metrics of each group, in the order of docs/metrics.md."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {title: tuple(Metric(name=name, **row) for name, row in rows.items()) for title, rows in table.items()}


def metrics() -> list[Metric]:
    """Return the metrics of metrics.jsonl."""
    return [metric for title, rows in groups().items() if title != EVALUATIONS for metric in rows]


@cache
def find(name: str) -> Metric | None:
    """Return the metric with this name in metrics.jsonl; None if no row of the table has it."""
    return next((metric for metric in metrics() if metric.matches(name)), None)


def is_total(name: str) -> bool:
    """Return whether a metric counts since the run began. A metric that the table does not have, such as one of a custom part, does not."""
    metric = find(name)
    return metric is not None and metric.is_total
