"""`.jsonl` files of a run: one object a line, each about a step, that forget what a resumed run has not done yet."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.files import written_whole

LONG = 1 << 16  # bytes of a line from which on it is known by its beginning and its end alone: a step's rows on thousands of ranks
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


class Records:
    """Appends objects with a `step` to a file. A line is in the file when `append` returns, and whole: a reader may follow along."""

    def __init__(self, path: Path):
        self.path = path

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """As `cut`; returns what is kept, oldest first."""
        self.cut(step)
        return self.all() if self.path.exists() else []

    def all(self) -> list[dict[str, Any]]:
        """Oldest first; a line that is being written is left out."""
        with self.path.open("rb") as lines:
            return [record for line in lines if (record := _parse(line)) is not None]

    def cut(self, step: int) -> None:
        """Drops records of steps beyond `step`, and a last line cut short by a kill. Holds one line at a time."""
        if not self.path.exists():
            return
        kept_until = num_kept = num_bytes = 0
        with self.path.open("rb") as lines:
            for line in lines:
                num_bytes += len(line)
                if _is_until(line, step):
                    num_kept += len(line)
                    kept_until = num_bytes
        if num_kept == kept_until:
            if kept_until < num_bytes:
                os.truncate(self.path, kept_until)
            return
        with self.path.open("rb") as lines, written_whole(self.path) as stream:
            stream.writelines(line for line in lines if _is_until(line, step))

    def append(self, record: Mapping[str, Any]) -> None:
        """NaN and infinity become null: JSON has no word for them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({name: plain(value) for name, value in record.items()}, allow_nan=False) + "\n"
        try:
            with self.path.open("a") as stream:
                stream.write(line)
        except OSError as error:  # a full disk does not say which file it was
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own; None for NaN and infinity."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_until(line: bytes, step: int) -> bool:
    if len(line) < LONG:
        record = _parse(line)
        return record is not None and record["step"] <= step
    found = _STEP.match(line)
    return found is not None and line.endswith(b"}\n") and int(found[1]) <= step


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None where there is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
