"""`.jsonl` files of a run: one object a line, each about a step, that forget what a resumed run has not done yet."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.files import written_whole


class Records:
    """Appends objects with a `step` to a file. A line is in the file when `append` returns, and whole: a reader may follow along."""

    def __init__(self, path: Path):
        self.path = path

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drops records of steps beyond `step`, and a last line cut short by a kill; returns what is kept, oldest first."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        kept: list[tuple[bytes, dict[str, Any]]] = []
        for line in content.splitlines(keepends=True):
            record = _parse(line)
            if record is not None and record["step"] <= step:
                kept.append((line, record))
        whole = b"".join(line for line, _ in kept)
        if whole != content:
            with written_whole(self.path) as stream:
                stream.write(whole)
        return [record for _, record in kept]

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


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None where there is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
