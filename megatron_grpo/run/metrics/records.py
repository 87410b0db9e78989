"""Files of a run: `.jsonl` files with one object per line and step, cut to the current step on resume; and Parquet tables."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import one_line
from megatron_grpo.core.base.files import atomic_write, parse_json

logger = logging.getLogger(__name__)
EVENTS = "events.jsonl"
LONG = 1 << 16  # bytes; longer lines (a step's rows on thousands of ranks) are checked only at their beginning and end
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class JsonlFile:
    """File of objects with a `step`, one per line, that grows while it is read.

    When `append` returns, the complete line is in the file, so a reader may follow along.

    Args:
        path: The `.jsonl` file.
    """

    def __init__(self, path: Path):
        self.path = path

    def begin(self, step: int) -> None:
        """Apply `cut` to a file that has a line for every step, and warn if steps that this run has done are missing.

        A run that began in another output_dir has its earlier lines there, and none here from before its first.
        """
        steps = self.cut(step)
        is_own = any((self.path.parent / "checkpoints").glob("iter_*"))
        num_missing = (step - steps[0] + 1 if steps else step if is_own else 0) - len(set(steps))
        if num_missing > 0:
            logger.warning(
                "%s has no line of %d of the %d optimizer steps done so far: it was cut or removed. They are not written again; the run "
                "continues from its checkpoint.",
                self.path,
                num_missing,
                step,
            )

    def all(self) -> list[dict[str, Any]]:
        """Return all records, oldest first; empty if there is no file.

        A line that is still being written is left out. An unreadable line is left out with a warning.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as lines:
            parsed = [(number, line, _parse(line)) for number, line in enumerate(lines, 1)]
        self._warn([number for number, line, record in parsed if record is None and line.endswith(b"\n")])
        return [record for _, _, record in parsed if record is not None]

    def cut(self, step: int) -> list[int]:
        """Drop records of steps beyond `step`, an incomplete last line (from a kill), and unreadable lines (with a warning).

        Holds one line in memory at a time.

        Returns:
            The steps of the remaining records, in file order.
        """
        steps, garbled = list[int](), list[int]()
        if not self.path.exists():
            return steps
        kept_until = num_kept = num_bytes = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                num_bytes += len(line)
                step_of_line = _parse_step(line)
                if step_of_line is None and line.endswith(b"\n"):
                    garbled.append(number)
                if step_of_line is not None and step_of_line <= step:
                    num_kept += len(line)
                    kept_until = num_bytes
                    steps.append(step_of_line)
        self._warn(garbled)
        if num_kept == kept_until:
            if kept_until < num_bytes:
                os.truncate(self.path, kept_until)
            return steps
        with self.path.open("rb") as lines, atomic_write(self.path) as stream:
            stream.writelines(line for line in lines if (step_of_line := _parse_step(line)) is not None and step_of_line <= step)
        return steps

    def _warn(self, garbled: Sequence[int]) -> None:
        if garbled:
            numbers = f"{', '.join(map(str, garbled[:5]))}{' ...' if len(garbled) > 5 else ''}"
            logger.warning("%s: line %s cannot be read and is skipped", self.path, numbers)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record. NaN and infinity become null, because JSON cannot represent them.

        Raises:
            OSError: The file cannot be written; its path is included.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({name: to_python_number(value) for name, value in record.items()}, allow_nan=False) + "\n"
        try:
            with self.path.open("a") as stream:
                stream.write(line)
        except OSError as error:  # the error of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(self.path)) from error


# ---- what plots show: here, so that a run imports `plots` only when it draws -------------------------------------------------------------

# Metrics of an optimizer step that the plots and the table at the end of a run show.
_PLOTTED = re.compile(r"reward|rewards/.+/mean|completions/(mean|max)_length|kl|sampling/kl_k3|entropy|time/.+")
History = dict[str, list[tuple[int, float]]]  # metric name -> (step, value), ascending


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def remember(history: History, record: Mapping[str, Any]) -> None:
    """Add the metrics of an optimizer step that plots show to `history`.

    Args:
        history: Points of each metric; changed in place.
    """
    for name, value in record.items():
        if _PLOTTED.fullmatch(name) and (number := to_python_number(value)) is not None:
            history.setdefault(name, []).append((record["step"], number))


# ---- values and tables -------------------------------------------------------------------------------------------------------------------


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write a Parquet file, completely or not at all.

    Args:
        path: The file. Its directory is created if needed.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(dict(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        pyarrow.parquet.write_table(table, stream)


def to_python_number(value: Any) -> Any:
    """Convert a numpy or torch scalar to a Python number; NaN and infinity become None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse_step(line: bytes) -> int | None:
    if len(line) < LONG:
        record = _parse(line)
        return None if record is None else record["step"]
    match = _STEP.match(line)
    return int(match[1]) if match is not None and line.endswith(b"}\n") else None


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record on a complete line; None if it is not a record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class EventsWriter(logging.Handler):
    """Writer of events.jsonl, with one object of step, time, kind and text per event of the run.

    As a handler it records warnings of this program's loggers. Earlier events are kept when a run is resumed.
    """

    def __init__(self, path: Path):
        super().__init__(logging.WARNING)
        self._file = JsonlFile(path)
        self._best_effort = BestEffort()

    def open(self) -> None:
        """Start recording warnings."""
        with self._best_effort(self._file.path.name):
            self._file.cut(sys.maxsize)  # a line that a kill cut short would spoil the next one
        logging.getLogger("megatron_grpo").addHandler(self)

    def close(self) -> None:
        """Stop recording warnings."""
        logging.getLogger("megatron_grpo").removeHandler(self)
        super().close()

    def add(self, kind: str, text: str) -> None:
        """Record an event. A failure to write it is a warning."""
        time_text = datetime.now(UTC).isoformat(timespec="seconds")
        with self._best_effort(self._file.path.name):
            self._file.append({"step": activity.step, "time": time_text, "kind": kind, "text": text})

    def emit(self, record: logging.LogRecord) -> None:
        self.add("warning", record.getMessage())


class BestEffort:
    """Context manager for optional work: `with best_effort("plots"): ...` never raises.

    The first failure of each kind is logged as a warning; `missed` counts them all.
    """

    def __init__(self) -> None:
        self.missed: dict[str, int] = {}

    @contextmanager
    def __call__(self, action: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - drawing libraries and services raise anything; rich exits on a closed pipe
            self.missed[action] = self.missed.get(action, 0) + 1
            if self.missed[action] == 1:
                self._print_line(f"{action} failed, and the run continues without it: {type(error).__name__}: {one_line(error)}")

    def summary(self) -> None:
        """Log how often each kind of work failed, if more than once. Called at the end of a run."""
        for action, times in self.missed.items():
            if times > 1:
                self._print_line(f"{action} failed {times} times")

    def _print_line(self, text: str) -> None:
        try:
            logger.warning(text)
        except (Exception, SystemExit):  # noqa: BLE001 - the terminal is what failed
            pass
