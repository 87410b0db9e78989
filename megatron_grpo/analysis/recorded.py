"""Completions that a run has recorded with their tokens and the sampler's log-probs: `completions/step_*.parquet`. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_grpo.metrics.rollout import TOKENS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """tokens int64 [T]; logprobs float32 [T], NaN where the sampler drew nothing."""

    version: int
    tokens: np.ndarray
    logprobs: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return ~np.isnan(self.logprobs)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.tokens[: int(np.argmax(self.mask))].tolist())


def recorded(run: Path, *, version: int | None = None) -> list[Drawn]:
    """What weights of this version drew; of None, what was recorded last. Empty where nothing was, or by a run that kept no tokens."""
    tables: dict[int, list[Path]] = {}
    for path in sorted((run / "completions").glob("step_*")):
        if match := re.fullmatch(r"step_(\d{6,})(_\d+)?(\.parquet)?", path.name):
            tables.setdefault(int(match[1]), []).extend(sorted(path.glob("node_*.parquet")) if path.is_dir() else [path])
    wanted = sorted(tables, reverse=True) if version is None else [version]
    for number in wanted:
        if rows := [row for path in tables.get(number, []) for row in _rows(path)]:
            return rows
    return []


def _rows(path: Path) -> list[Drawn]:
    import pyarrow
    import pyarrow.parquet

    names = ("version", *TOKENS)
    try:
        if not set(names) <= set(pyarrow.parquet.read_schema(path).names):
            return []
        table = pyarrow.parquet.read_table(path, columns=list(names))
    except (OSError, pyarrow.ArrowException):
        return []
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    found = [
        Drawn(version=version, tokens=np.array(tokens, dtype=np.int64), logprobs=np.array(logprobs, dtype=np.float32))
        for version, tokens, logprobs in rows
        if tokens is not None
    ]
    return [one for one in found if one.mask.any() and one.prompt]


def spread(rows: list[Drawn], most: int) -> list[Drawn]:
    """At most so many, evenly over all."""
    return [rows[i * len(rows) // most] for i in range(most)] if len(rows) > most else rows
