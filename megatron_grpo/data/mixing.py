"""Which rows of which data sets a run trains on, in which order, under which names of columns. No torch.

All of it follows from settings and seed alone, so every rank, every layout and every resumed run makes the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import DataConfig
from megatron_grpo.config.evaluation import SPLIT
from megatron_grpo.data.files import Rows, plain_name, read_rows, wrong

Part = Literal["all", "trained", "held out"]
_SPLIT_EPOCH = 1 << 62  # of the permutation that holds rows out, so that it is none of the run's own
_DRAW_EPOCH = _SPLIT_EPOCH + 1


class Chosen(Rows):
    """Rows of other rows, by their numbers there, with other names for some columns."""

    def __init__(self, rows: Rows, numbers: np.ndarray, columns: Mapping[str, str]):
        """columns: names here by names there."""
        self.rows, self.numbers, self.columns = rows, numbers, columns

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # a row by its number; slices are not asked for
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = self.rows[int(self.numbers[index])]
        return {self.columns.get(name, name): value for name, value in row.items()} if self.columns else row

    def place(self, index: int) -> str:
        return self.rows.place(int(self.numbers[index]))


def read_sets(cfg: DataConfig, names: Sequence[str], *, flag: str, seed: int, part: Part) -> Rows:
    """The rows of these data sets together. part: of them, as `split_dataset_ratio` divides them. Raises ConfigError."""
    read = [_with_columns(_drawn(name, cfg, flag=flag, seed=seed), cfg.columns, flag) for name in names]
    rows = read[0]
    if len(read) > 1:
        rows = Chosen(_Together(read), _mixed([len(one) for one in read], cfg), {})
    if part == "all" or not cfg.split_dataset_ratio:
        return rows
    return Chosen(rows, _part(len(rows), cfg.split_dataset_ratio, seed, part, flag), {})


class _Together(Rows):
    """Data sets behind each other; a row is named as its own set names it."""

    def __init__(self, read: Sequence[Rows]):
        super().__init__([("", "", rows, None) for rows in read])
        self._read = read

    def place(self, index: int) -> str:
        part, offset = self._locate(index)
        return self._read[part].place(offset)


def with_count(name: str) -> tuple[str, int | None]:
    """`name#n` as (name, n)."""
    plain = plain_name(name)
    return plain, None if plain == name else int(name.rpartition("#")[2])


def _drawn(name: str, cfg: DataConfig, *, flag: str, seed: int) -> Rows:
    """`name#n` is n rows: all of them as often as they go into n, and the rest drawn (the first ones, with dataset_shuffle false)."""
    plain, count = with_count(name)
    rows = read_rows(plain, split=cfg.dataset_split, flag=flag)
    if count is None:
        return rows
    if count < 1:
        raise wrong(flag, f"{flag} ({name}) asks for {count} rows of {len(rows)}. Ask for at least 1.")
    whole, rest = divmod(count, len(rows))
    order = permutation(len(rows), seed, _DRAW_EPOCH) if cfg.dataset_shuffle else np.arange(len(rows))
    return Chosen(rows, np.concatenate([*([np.arange(len(rows))] * whole), np.sort(order[:rest])]), {})


def _with_columns(rows: Rows, columns: Mapping[str, str], flag: str) -> Rows:
    return Chosen(rows, np.arange(len(rows)), names_here(rows[0], columns, flag)) if columns else rows


def names_here(first: Mapping[str, Any], columns: Mapping[str, str], flag: str) -> dict[str, str]:
    """Other names of columns, of those that a set has. first: its first row. Raises ConfigError."""
    missing = [theirs for theirs, ours in columns.items() if theirs not in first and ours not in first]
    if missing:
        message = f"columns: the first row of {flag} has no {', '.join(missing)}; it has {', '.join(first) or 'none'}."
        raise ConfigError([Problem(flags=("columns", flag), message=message)])
    named = {theirs: ours for theirs, ours in columns.items() if theirs in first}
    both = [ours for ours in named.values() if ours in first and ours not in named]
    if both:
        message = f"columns: the first row of {flag} has a column {', '.join(both)} already. Give that one another name too."
        raise ConfigError([Problem(flags=("columns", flag), message=message)])
    return named


def _mixed(sizes: Sequence[int], cfg: DataConfig) -> np.ndarray:
    """Numbers of rows in the sets behind each other. Without weights, all rows of all; else by them, as evenly as can be at every place.

    A set whose rows are used up begins anew, until the first one is used up, or all have been (stopping_strategy).
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if not cfg.interleave_prob or min(cfg.interleave_prob) <= 0:  # the second is refused
        return np.arange(starts[-1])
    weights = np.array(cfg.interleave_prob) / sum(cfg.interleave_prob)
    # Set i gives its k-th row where its share has come to k - 1/2: the sets merge in the order of these places.
    rounds = np.array(sizes) / weights
    length = rounds.min() if cfg.stopping_strategy == "first_exhausted" else rounds.max()
    counts = [max(1, int(np.floor(length * weight + 1e-9))) for weight in weights]
    places = np.concatenate([(np.arange(count) + 0.5) / weight for count, weight in zip(counts, weights, strict=True)])
    numbers = np.concatenate([start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes)])
    return numbers[np.argsort(places, kind="stable")]


def _part(size: int, ratio: float, seed: int, part: Part, flag: str) -> np.ndarray:
    if ratio >= 1:  # which is refused as a number
        return np.arange(size)
    num_held = max(1, round(size * ratio))
    if num_held >= size:
        raise ConfigError([Problem(flags=("split_dataset_ratio", "dataset"), message=(
            f"split_dataset_ratio ({ratio}) would hold out {num_held} of {size} rows, and leave none to train on."))])  # fmt: skip
    order = permutation(size, seed, _SPLIT_EPOCH)
    return np.sort(order[:num_held] if part == "held out" else order[num_held:])


def part_of_flag(flag: str, cfg: DataConfig) -> Part:
    """What a setting's rows are of the training data's."""
    return "held out" if flag == SPLIT else "trained" if flag == "dataset" and cfg.split_dataset_ratio else "all"


def permutation(size: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """A permutation of range(size), int64, that depends on (seed, epoch, block) alone.

    It sorts the raw stream of a counter-based generator: numpy promises that stream for ever, and does not promise `Generator.permutation`.
    """
    counter = np.array([0, 0, 0, block], dtype=np.uint64)  # the last word: two blocks of one epoch never meet
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64), counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable")
