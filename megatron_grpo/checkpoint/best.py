"""Which checkpoint of a run is the best one (`--metric_for_best_model`), in checkpoints/best.json. No torch; rank 0 alone.

A number is of a checkpoint where it is told of the same optimizer step: held-out prompts are answered by the weights as they were saved.
What training metrics say of a step was measured on what earlier weights sampled. The names in the file are those of transformers.
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

FILE = "best.json"


class Best:
    """The best of the checkpoints in a folder, by one metric. Of equals the earlier one stays.

    metric: a name of metrics.jsonl, or eval/..., as services hear it. `published` may be called by the thread that writes checkpoints.
    """

    def __init__(self, folder: Path, metric: str, *, greater: bool, say: Callable[[str], None] | None = None):
        self.folder, self.metric, self.greater = Folder(folder), metric, greater
        self.say = say or partial(print, flush=True)
        self.values: dict[int, float] = {}  # of checkpoints, by step
        self._heard: tuple[int, float] | None = None  # the last, whether or not there is a checkpoint of that step
        self._saved: int | None = None  # the last checkpoint
        self._lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """Of the best one; None where none has a number yet."""
        sign = 1 if self.greater else -1
        return max(self.values, key=lambda step: (sign * self.values[step], -step), default=None)

    def hear(self, step: int, numbers: Mapping[str, Any]) -> None:
        """What a step or an evaluation tells, after so many optimizer steps."""
        value = numbers.get(self.metric)
        if value is not None and math.isfinite(value):
            with self._lock:
                self._heard = step, float(value)
                self._judge()

    def published(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        with self._lock:
            self._saved = step
            self.values.pop(step, None)  # of weights that were at this step before the run went back
            self._judge()

    def go_on(self, step: int, *, is_saved: bool) -> None:
        """The run begins, after so many optimizer steps. is_saved: from a checkpoint of this folder. What is later was given up."""
        self._saved = step if is_saved else None
        before = self._read()
        said = before.get("metric"), before.get("greater_is_better")
        if before and said != (self.metric, self.greater):
            self.say(f"{self.folder.path / FILE} was made by {said[0]}: the best checkpoint by {self.metric} is looked for from here on.")
        elif before:
            there = {one for one in self.folder.steps() if one <= step}
            self.values = {saved: value for saved, value in before["values"].items() if saved in there}

    def words(self) -> str | None:
        """What is said of the best one at the end; None where none has a number."""
        if self.step is None:
            return None
        return f"The best checkpoint is {self.folder.directory(self.step)} ({self.metric} {self.values[self.step]:.4g})."

    def _judge(self) -> None:
        if self._heard is None or self._heard[0] != self._saved or self._saved in self.values:
            return
        before = self.step
        self.values[self._saved] = self._heard[1]
        there = set(self.folder.steps())
        self.values = {step: value for step, value in self.values.items() if step in there}
        self._write()
        if self.step != before and (words := self.words()):
            self.say(words)

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
        except OSError as error:  # the run is as good as it was
            self.say(f"WARNING: which checkpoint is best cannot be written down ({error.strerror}); the next number tries again")

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder.path / FILE).read_text(encoding="utf-8"))
            return {**found, "values": {int(step): float(value) for step, value in found["values"].items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
