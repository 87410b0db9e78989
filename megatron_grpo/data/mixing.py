"""Select and order the rows of the data sets of a run, and rename their columns. No torch.

The result follows from settings and seed alone, so every rank, every parallel layout and every resumed run gets the same rows.
`read_sets` reads whole data sets; `open_sets` yields rows in the same order one at a time, without sampling or shuffling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from megatron_grpo.base.errors import config_error
from megatron_grpo.config.config import DataConfig
from megatron_grpo.config.evaluation import SPLIT
from megatron_grpo.data.files import Read, Rows, Source, behind_each_other, open_source, plain_name, read_rows

Part = Literal["all", "trained", "held out"]
_SPLIT_EPOCH = 1 << 62  # epoch number of the held-out permutation, distinct from all epochs of a run
_DRAW_EPOCH = _SPLIT_EPOCH + 1


def read_sets(cfg: DataConfig, names: Sequence[str], *, flag: str, seed: int, part: Part) -> Rows:
    """Read the rows of several data sets.

    Args:
        cfg: Data settings.
        names: Data sets, each optionally with a `#count` suffix.
        flag: Setting that names them, for error messages.
        seed: Seed for sampling rows and for the held-out split.
        part: Which rows to return, as divided by `split_dataset_ratio`.

    Raises:
        ConfigError: If a data set cannot be read, or a count or ratio leaves no rows.
    """
    read = [_read_set(name, cfg, flag=flag, seed=seed) for name in names]
    rows = read[0] if len(read) == 1 else Rows([(one, one.place) for one in read], _merged([len(one) for one in read], cfg))
    if part == "all" or not cfg.split_dataset_ratio:
        return rows
    return Rows([(rows, rows.place)], _part(len(rows), cfg.split_dataset_ratio, seed, part, flag))


def open_sets(cfg: DataConfig, names: Sequence[str], flag: str) -> Source:
    """Open several data sets for streaming.

    Args:
        cfg: Data settings.
        names: Data sets, each optionally with a `#count` suffix.
        flag: Setting that names them, for error messages.

    Raises:
        ConfigError: If a data set cannot be opened.
    """
    sources = [_open_set(name, cfg, flag) for name in names]
    if len(sources) > 1 and cfg.interleave_prob:
        return _mixed(sources, cfg.interleave_prob, ends_with_first=cfg.stopping_strategy == "first_exhausted")
    return behind_each_other(sources)


# ---- one data set


def _with_count(name: str) -> tuple[str, int | None]:
    """Split `name#n` into (name, n)."""
    plain = plain_name(name)
    return plain, None if plain == name else int(name.rpartition("#")[2])


def _read_set(name: str, cfg: DataConfig, *, flag: str, seed: int) -> Rows:
    """Read a data set and select the number of rows in its name.

    `name#n` gives n rows: the whole set as often as it fits into n, and the remainder sampled (the first rows, if dataset_shuffle is
    false).
    """
    plain, count = _with_count(name)
    rows = read_rows(plain, split=cfg.dataset_split, flag=flag)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} of {len(rows)} rows. Use at least 1.")
    if count is not None:
        whole, rest = divmod(count, len(rows))
        order = permutation(len(rows), seed, _DRAW_EPOCH) if cfg.dataset_shuffle else np.arange(len(rows))
        rows = Rows([(rows, rows.place)], np.concatenate([*([np.arange(len(rows))] * whole), np.sort(order[:rest])]))
    return Rows([(rows, rows.place)], columns=names_here(rows[0], cfg.columns, flag)) if cfg.columns else rows


def _open_set(name: str, cfg: DataConfig, flag: str) -> Source:
    """Open a data set for streaming. `name#n` gives its first n rows, starting again if it has fewer.

    The first row is read, to check that it exists and has the columns to rename.
    """
    plain, count = _with_count(name)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} rows. Use at least 1.")
    source = open_source(plain, cfg.dataset_split, flag)
    first = next(source(None), None)
    if first is None:
        raise config_error(flag, f"{flag} {plain!r} has no rows.")
    if isinstance(first.row, str):
        raise config_error(flag, f"{first.stands} is not a JSON object: {first.row}.")
    if cfg.columns:
        source = _renamed(source, names_here(first.row, cfg.columns, flag))
    return source if count is None else _limited(source, count)


def names_here(first: Mapping[str, Any], columns: Mapping[str, str], flag: str) -> dict[str, str]:
    """Return the column renames that apply to a data set, new names by old names.

    Args:
        first: First row of the data set.
        columns: Renames requested by the setting `columns`.
        flag: Setting that names the data set, for error messages.

    Raises:
        ConfigError: If a column does not exist, or a new name is already in use.
    """
    missing = [theirs for theirs, ours in columns.items() if theirs not in first and ours not in first]
    if missing:
        message = f"columns: the first row of {flag} has no {', '.join(missing)}; it has {', '.join(first) or 'none'}."
        raise config_error(("columns", flag), message)
    named = {theirs: ours for theirs, ours in columns.items() if theirs in first}
    both = [ours for ours in named.values() if ours in first and ours not in named]
    if both:
        message = f"columns: the first row of {flag} already has a column {', '.join(both)}. Rename that column too."
        raise config_error(("columns", flag), message)
    return named


def _renamed(source: Source, names: Mapping[str, str]) -> Source:
    def begin(at: Any) -> Iterator[Read]:
        for read in source(at):
            row = read.row if isinstance(read.row, str) else {names.get(name, name): value for name, value in read.row.items()}
            yield read._replace(row=row)

    return begin


def _limited(source: Source, count: int) -> Source:
    """Limit a source to `count` rows. A position is [rows before it, position in the source]."""

    def begin(at: Any) -> Iterator[Read]:
        given, inner = at or (0, None)
        reader = source(inner)
        while given < count:
            read = next(reader, None)
            if read is None:
                reader = source(None)
                read = _existing(next(reader, None))
            given += 1
            yield read._replace(after=[given, read.after])

    return begin


def _existing(read: Read | None) -> Read:
    """Return a row that existed when its data set was last read.

    Raises:
        ConfigError: If it no longer exists; a data set without rows could never yield its share.
    """
    if read is None:
        raise config_error("dataset", "A data set of `dataset` has fewer rows than when this run last read it. Restore its files.")
    return read


# ---- several


def _merged(sizes: Sequence[int], cfg: DataConfig) -> np.ndarray:
    """Return the order of the rows of several data sets, as row numbers of their concatenation.

    Without weights the sets follow one another. With weights they are interleaved as evenly as possible at every position. A set that is
    exhausted starts again, until the first set is exhausted or until all have been (stopping_strategy).
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if not cfg.interleave_prob or min(cfg.interleave_prob) <= 0:  # a weight of 0 or less is rejected elsewhere
        return np.arange(starts[-1])
    weights = np.array(cfg.interleave_prob) / sum(cfg.interleave_prob)
    # Set i yields its k-th row when its share reaches k - 1/2; the sets are merged in the order of these positions.
    rounds = np.array(sizes) / weights
    length = rounds.min() if cfg.stopping_strategy == "first_exhausted" else rounds.max()
    counts = [max(1, int(np.floor(length * weight + 1e-9))) for weight in weights]
    places = np.concatenate([(np.arange(count) + 0.5) / weight for count, weight in zip(counts, weights, strict=True)])
    numbers = np.concatenate([start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes)])
    return numbers[np.argsort(places, kind="stable")]


def _mixed(sources: Sequence[Source], weights: Sequence[float], *, ends_with_first: bool) -> Source:
    """Interleave sources of unknown length like `_merged`. A source that is exhausted starts again.

    A position holds, per source, the rows it has yielded, the position in it, and its length if known. The length becomes known with the
    last row, so by then a set may have yielded one row more than its share of the epoch.
    """
    shares = [weight / sum(weights) for weight in weights]

    def left(counts: Sequence[int], sizes: Sequence[int | None]) -> list[int]:
        """Return the sources that have not yielded their share of the epoch."""
        rounds = [size / share for size, share in zip(sizes, shares, strict=True) if size is not None]
        if not rounds or (not ends_with_first and len(rounds) < len(sources)):
            return list(range(len(sources)))
        length = min(rounds) if ends_with_first else max(rounds)
        return [one for one, count in enumerate(counts) if count < max(1, int(length * shares[one] + 1e-9))]

    def begin(at: Any) -> Iterator[Read]:
        empty = [None] * len(sources)
        counts, places, sizes = [list(one) for one in at or ([0] * len(sources), empty, empty)]
        readers = [source(place) for source, place in zip(sources, places, strict=True)]
        ahead = [_existing(next(reader, None)) for reader in readers]
        while open_ones := left(counts, sizes):
            which = min(open_ones, key=lambda one: (counts[one] + 0.5) / shares[one])
            read, following = ahead[which], next(readers[which], None)
            counts[which] += 1
            places[which] = read.after
            if following is None:
                sizes[which] = sizes[which] or counts[which]
                places[which], readers[which] = None, sources[which](None)
                following = _existing(next(readers[which], None))
            ahead[which] = following
            yield read._replace(after=[list(counts), list(places), list(sizes)])

    return begin


def _part(size: int, ratio: float, seed: int, part: Part, flag: str) -> np.ndarray:
    if ratio >= 1:  # rejected by the checks of the settings
        return np.arange(size)
    num_held = max(1, round(size * ratio))
    if num_held >= size:
        message = f"split_dataset_ratio ({ratio}) would hold out {num_held} of {size} rows, leaving none for training."
        raise config_error(("split_dataset_ratio", "dataset"), message)
    order = permutation(size, seed, _SPLIT_EPOCH)
    return np.sort(order[:num_held] if part == "held out" else order[num_held:])


def part_of_flag(flag: str, cfg: DataConfig) -> Part:
    """Return the part of the training data that the rows of a setting come from.

    Args:
        flag: The setting.
        cfg: Data settings.
    """
    return "held out" if flag == SPLIT else "trained" if flag == "dataset" and cfg.split_dataset_ratio else "all"


def permutation(size: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """Return a permutation of range(size), int64 [size], that depends on (seed, epoch, block) alone.

    It sorts the raw stream of a counter-based generator (Philox). NumPy guarantees that stream across versions, but not
    `Generator.permutation`.

    Args:
        size: Number of elements.
        seed: Seed of the run.
        epoch: Number of the epoch.
        block: Number of the block in the epoch, for streamed data sets.
    """
    counter = np.array([0, 0, 0, block], dtype=np.uint64)  # the highest word, so that the counters of two blocks of an epoch never overlap
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64), counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable")
