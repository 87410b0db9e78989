"""Files that a run writes to output_dir: names, ownership, removal, and the best checkpoint (`--metric_for_best_model`). No torch.

The best checkpoint is in checkpoints/best.json, with the field names of transformers; rank 0 writes it. A metric value belongs to the
checkpoint of the same optimizer step. Evaluation metrics of a step are measured with the weights as saved; training metrics of a step were
measured on samples from earlier weights.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.base.files import MARK, atomic_write_text, export_obstacle, parse_json, read_mark, write_mark
from megatron_grpo.run.checkpoint.manifest import POINTER, CheckpointDirectory

RUN, LOCK = "train", "run.lock"
# Names in output_dir -> patterns of the entries written into a directory; () for a file.
WRITTEN_BY_A_RUN = {
    **dict.fromkeys(("config.yaml", "plan.json", "metrics.jsonl", "evaluations.jsonl", "skipped.jsonl", "schedule.jsonl"), ()),
    **dict.fromkeys(("events.jsonl", "now.json"), ()),
    "checkpoints": ("iter_*", ".*_iter_*", POINTER, "best.json"),
    "completions": ("step_*", ".step_*"),
    "evaluations": ("*/prompts.jsonl", "*/step_*.parquet"),
    "debug_dump": ("step_*", ".step_*"),
    "plots": tuple(f"{name}.png" for name in ("reward", "length", "kl", "entropy", "step_time", "compare_losses")),
    "hf": ("*",),
    "hf_merged": ("*",),
    "tensorboard": ("events.*",),
    "watchdog": ("*.txt",),
}  # fmt: skip
_NAMES, _EXPORTS = tuple(WRITTEN_BY_A_RUN), ("hf", "hf_merged")


def holds_run(output_dir: str | Path) -> bool:
    """Return whether `output_dir` holds the records of an earlier run.

    Args:
        output_dir: Directory; it may not exist.
    """
    return next(_written(Path(output_dir), _NAMES[2:]), None) is not None


def remove_run(output_dir: str | Path) -> None:
    """Remove what an earlier run wrote to `output_dir`, and nothing else. For one rank, before anything is built."""
    for path in list(_written(Path(output_dir))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in (Path(output_dir) / name for name, patterns in WRITTEN_BY_A_RUN.items() if patterns):
        if [path.name for path in folder.glob("*")] == [MARK]:
            (folder / MARK).unlink()
        for emptied in [*folder.glob("*/"), folder]:
            with suppress(OSError):  # not empty, a link, or missing
                emptied.rmdir()


def _written(out: Path, names: Collection[str] = _NAMES) -> Iterator[Path]:
    """Yield the existing paths that a run writes; of an export, those that its mark lists."""
    for name in names:
        path, patterns = out / name, WRITTEN_BY_A_RUN[name]
        if not patterns and path.is_file() and path.stat().st_size:
            yield path
        listed = read_mark(path).get("files") if name in _EXPORTS else None
        for entry in [entry for pattern in patterns for entry in path.glob(pattern)]:
            if listed is None or entry.name in listed:
                yield entry


def overwrite_obstacle(out: Path, command: str = RUN, names: Collection[str] = _NAMES) -> str | None:
    """Return the reason why a command must not write files of these names; None if it may.

    Existing files are only replaced in a directory where the same command wrote before.
    """
    for name in names:
        path, is_folder = out / name, bool(WRITTEN_BY_A_RUN[name])
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, which does not exist. Restore (mount) it, or use another output_dir."
        if path.exists() and path.is_dir() != is_folder:
            kind, expected = ("a file", "a folder") if is_folder else ("a folder", "a file")
            return f"{path} is {kind}, expected {expected}. Move it, or use another output_dir."
    writer = read_mark(out).get("command")
    if writer == command:
        return next(filter(None, (export_obstacle(out / name) for name in _EXPORTS if name in names)), None)
    if writer is None and ((out / LOCK).is_file() or any(out.glob("checkpoints/iter_*/manifest.json"))):
        return None  # of a version that wrote no mark
    if foreign := next(_written(out, names), None):
        return f"{foreign} was not written by `{command}`, which would replace it. Move it, or use another output_dir."
    return None


def claim(out: Path) -> None:
    """Mark `out` as the directory of a training run, with the step it saved last.

    For one rank, before the run writes anything else there.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not read_mark(out):
        for export in (out / name for name in _EXPORTS if (out / name).is_dir()):  # of a version that wrote no mark
            write_mark(export, "export", files=os.listdir(export))
    write_mark(out, RUN, saved=max(CheckpointDirectory(out / "checkpoints").steps(), default=None))


def restart_obstacle(out: Path) -> str | None:
    """Return the reason why the records in `out` must not be replaced, or None.

    The reason is that their run saved checkpoints, and none of them exists any more.
    """
    saved = read_mark(out).get("saved")
    if not saved or CheckpointDirectory(out / "checkpoints").steps():
        return None
    return (
        f"{out} contains the records of a run that saved step {saved}, but {out / 'checkpoints'} has no checkpoint. Restore (mount) "
        "them, or start again with --resume never --overwrite_output_dir, which removes the records."
    )


def check_output_dir(out: Path) -> None:
    """Check that `out` has not been removed or emptied since `claim`. Raises RunError."""
    if not (out / MARK).exists():
        raise RunError(
            f"output_dir ({out}) was removed or emptied while the run wrote to it ({MARK} is missing), with all its earlier contents. "
            "Start the run again from a checkpoint in another place, or from the beginning."
        )


FILE = "best.json"


class BestCheckpoint:
    """The best checkpoint in a folder by one metric. In case of a tie the earlier one wins.

    `record_saved` may be called from the thread that writes checkpoints.

    Args:
        folder: The `checkpoints` directory.
        greater: Whether larger values are better.
        print_line: Called with each message. Default: print.
    """

    def __init__(self, folder: Path, metric: str, *, greater: bool, print_line: Callable[[str], None] | None = None):
        self.folder, self.metric, self.greater = CheckpointDirectory(folder), metric, greater
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
        """Record the metrics of a step or an evaluation."""
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
            is_saved: Whether the run continues from a checkpoint of this folder.
        """
        self._saved = step if is_saved else None
        stored = self._read()
        metric = stored.get("metric"), stored.get("greater_is_better")
        if stored and metric != (self.metric, self.greater):
            self.print_line(
                f"{self.folder.path / FILE} was written for {metric[0]}; from now on, the best checkpoint is selected by {self.metric}."
            )
        elif stored:
            steps = {saved_step for saved_step in self.folder.steps() if saved_step <= step}
            self.values = {saved: value for saved, value in stored["values"].items() if saved in steps}

    def describe(self) -> str | None:
        """Return the final message about the best checkpoint; None if no checkpoint has a value."""
        if self.step is None:
            return None
        return f"The best checkpoint is {self.folder.directory(self.step)} ({self.metric} {self.values[self.step]:.4g})."

    def _update(self) -> None:
        if self._heard is None or self._heard[0] != self._saved or self._saved in self.values:
            return
        old_step = self.step
        self.values[self._saved] = self._heard[1]
        steps = set(self.folder.steps())
        self.values = {step: value for step, value in self.values.items() if step in steps}
        self._write()
        if self.step != old_step and (text := self.describe()):
            self.print_line(text)

    def _write(self) -> None:
        step = self.step
        assert step is not None
        content = {
            "metric": self.metric,
            "greater_is_better": self.greater,
            "best_global_step": step,
            "best_metric": self.values[step],
            "best_model_checkpoint": str(self.folder.directory(step)),
            "values": dict(sorted(self.values.items())),
        }
        try:
            atomic_write_text(self.folder.path / FILE, json.dumps(content, indent=1) + "\n", durable=True)
        except OSError as error:  # the run itself is unaffected
            self.print_line(
                f"WARNING: the record of the best checkpoint cannot be written ({error.strerror}); the next evaluation tries again"
            )

    def _read(self) -> dict[str, Any]:
        try:
            content = parse_json((self.folder.path / FILE).read_text(encoding="utf-8"))
            return {**content, "values": {int(step): float(value) for step, value in content["values"].items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
