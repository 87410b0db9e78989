"""Track the best checkpoint of a run (`--metric_for_best_model`) in checkpoints/best.json. No torch; rank 0 only.

A metric value belongs to the checkpoint of the same optimizer step. Evaluation metrics of a step are measured with the weights as saved;
training metrics of a step were measured on samples from earlier weights. The file has the field names of transformers.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.base.files import write_whole
from megatron_grpo.checkpoint.manifest import Folder
from megatron_grpo.config.evaluation import FORMER_METRICS

FILE = "best.json"


class Best:
    """The best checkpoint in a folder by one metric. In case of a tie the earlier one wins.

    `record_saved` may be called from the thread that writes checkpoints.

    Args:
        folder: The `checkpoints` directory.
        metric: Name of a metric in metrics.jsonl, or eval/..., as services receive it.
        greater: Whether larger values are better.
        print_line: Called with each message. Default: print.
    """

    def __init__(self, folder: Path, metric: str, *, greater: bool, print_line: Callable[[str], None] | None = None):
        self.folder, self.metric, self.greater = Folder(folder), metric, greater
        self.print_line = print_line or partial(print, flush=True)
        self.values: dict[int, float] = {}  # metric values of checkpoints, by step
        self._heard: tuple[int, float] | None = None  # last (step, value), whether or not a checkpoint of that step exists
        self._saved: int | None = None  # step of the last checkpoint
        self._lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """Step of the best checkpoint; None if no checkpoint has a value yet."""
        sign = 1 if self.greater else -1
        return max(self.values, key=lambda step: (sign * self.values[step], -step), default=None)

    def record(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Record the metrics of a step or an evaluation.

        Args:
            step: Number of optimizer steps done.
            numbers: Metrics by name.
        """
        value = numbers.get(self.metric)
        if value is not None and math.isfinite(value):
            with self._lock:
                self._heard = step, float(value)
                self._update()

    def record_saved(self, step: int) -> None:
        """Record that the checkpoint for `step` has been written."""
        with self._lock:
            self._saved = step
            self.values.pop(step, None)  # a value for the weights of this step before the run was rolled back
            self._update()

    def resume(self, step: int, *, is_saved: bool) -> None:
        """Restore the record at the beginning of a run. Values of later steps are dropped.

        Args:
            step: Number of optimizer steps done.
            is_saved: Whether the run continues from a checkpoint of this folder.
        """
        self._saved = step if is_saved else None
        before = self._read()
        metric = FORMER_METRICS.get(before.get("metric", ""), before.get("metric")), before.get("greater_is_better")
        if before and metric != (self.metric, self.greater):
            self.print_line(
                f"{self.folder.path / FILE} was written for {metric[0]}; from now on, the best checkpoint is selected by {self.metric}."
            )
        elif before:
            there = {one for one in self.folder.steps() if one <= step}
            self.values = {saved: value for saved, value in before["values"].items() if saved in there}

    def describe(self) -> str | None:
        """Return the final message about the best checkpoint; None if no checkpoint has a value."""
        if self.step is None:
            return None
        return f"The best checkpoint is {self.folder.directory(self.step)} ({self.metric} {self.values[self.step]:.4g})."

    def _update(self) -> None:
        if self._heard is None or self._heard[0] != self._saved or self._saved in self.values:
            return
        before = self.step
        self.values[self._saved] = self._heard[1]
        there = set(self.folder.steps())
        self.values = {step: value for step, value in self.values.items() if step in there}
        self._write()
        if self.step != before and (text := self.describe()):
            self.print_line(text)

    def _write(self) -> None:
        step = self.step
        assert step is not None
        found = {
            "metric": self.metric,
            "greater_is_better": self.greater,
            "best_global_step": step,
            "best_metric": self.values[step],
            "best_model_checkpoint": str(self.folder.directory(step)),
            "values": dict(sorted(self.values.items())),
        }
        try:
            write_whole(self.folder.path / FILE, json.dumps(found, indent=1) + "\n", durable=True)
        except OSError as error:  # the run itself is unaffected
            self.print_line(
                f"WARNING: the record of the best checkpoint cannot be written ({error.strerror}); the next evaluation tries again"
            )

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder.path / FILE).read_text(encoding="utf-8"))
            return {**found, "values": {int(step): float(value) for step, value in found["values"].items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
