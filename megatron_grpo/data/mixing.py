"""Which rows of which data sets a run trains on, in which order, under which names of columns. No torch.

All of it follows from settings and seed alone, so every rank, every layout and every resumed run makes the same rows. `read_sets` reads
them whole; `open_sets` gives the same order one row after the other, before anything is drawn or shuffled.
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
_SPLIT_EPOCH = 1 << 62  # of the permutation that holds rows out, so that it is none of the run's own
_DRAW_EPOCH = _SPLIT_EPOCH + 1


def read_sets(cfg: DataConfig, names: Sequence[str], *, flag: str, seed: int, part: Part) -> Rows:
    """The rows of these data sets together. part: of them, as `split_dataset_ratio` divides them. Raises ConfigError."""
    read = [_drawn(name, cfg, flag=flag, seed=seed) for name in names]
    rows = read[0] if len(read) == 1 else Rows([(one, one.place) for one in read], _merged([len(one) for one in read], cfg))
    if part == "all" or not cfg.split_dataset_ratio:
        return rows
    return Rows([(rows, rows.place)], _part(len(rows), cfg.split_dataset_ratio, seed, part, flag))


def open_sets(cfg: DataConfig, names: Sequence[str], flag: str) -> Source:
    """The rows of these data sets together, read as they are asked for. Raises ConfigError."""
    sources = [_open_set(name, cfg, flag) for name in names]
    if len(sources) > 1 and cfg.interleave_prob:
        return _mixed(sources, cfg.interleave_prob, ends_with_first=cfg.stopping_strategy == "first_exhausted")
    return behind_each_other(sources)


# ---- one data set


def _with_count(name: str) -> tuple[str, int | None]:
    """`name#n` as (name, n)."""
    plain = plain_name(name)
    return plain, None if plain == name else int(name.rpartition("#")[2])


def _drawn(name: str, cfg: DataConfig, *, flag: str, seed: int) -> Rows:
    """`name#n` is n rows: all of them as often as they go into n, and the rest drawn (the first ones, with dataset_shuffle false)."""
    plain, count = _with_count(name)
    rows = read_rows(plain, split=cfg.dataset_split, flag=flag)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) asks for {count} rows of {len(rows)}. Ask for at least 1.")
    if count is not None:
        whole, rest = divmod(count, len(rows))
        order = permutation(len(rows), seed, _DRAW_EPOCH) if cfg.dataset_shuffle else np.arange(len(rows))
        rows = Rows([(rows, rows.place)], np.concatenate([*([np.arange(len(rows))] * whole), np.sort(order[:rest])]))
    return Rows([(rows, rows.place)], columns=names_here(rows[0], cfg.columns, flag)) if cfg.columns else rows


def _open_set(name: str, cfg: DataConfig, flag: str) -> Source:
    """`name#n` is its first n rows; it begins anew where it has fewer. Looks at the first row: there is one, with the columns named."""
    plain, count = _with_count(name)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) asks for {count} rows. Ask for at least 1.")
    source = open_source(plain, cfg.dataset_split, flag)
    first = next(source(None), None)
    if first is None:
        raise config_error(flag, f"{flag} {plain!r} has no rows.")
    if isinstance(first.row, str):
        raise config_error(flag, f"{first.stands} is not a JSON object: {first.row}.")
    if cfg.columns:
        source = _renamed(source, names_here(first.row, cfg.columns, flag))
    return source if count is None else _so_many(source, count)


def names_here(first: Mapping[str, Any], columns: Mapping[str, str], flag: str) -> dict[str, str]:
    """Other names of columns, of those that a set has. first: its first row. Raises ConfigError."""
    missing = [theirs for theirs, ours in columns.items() if theirs not in first and ours not in first]
    if missing:
        message = f"columns: the first row of {flag} has no {', '.join(missing)}; it has {', '.join(first) or 'none'}."
        raise config_error(("columns", flag), message)
    named = {theirs: ours for theirs, ours in columns.items() if theirs in first}
    both = [ours for ours in named.values() if ours in first and ours not in named]
    if both:
        message = f"columns: the first row of {flag} has a column {', '.join(both)} already. Give that one another name too."
        raise config_error(("columns", flag), message)
    return named


def _renamed(source: Source, names: Mapping[str, str]) -> Source:
    def begin(at: Any) -> Iterator[Read]:
        for read in source(at):
            row = read.row if isinstance(read.row, str) else {names.get(name, name): value for name, value in read.row.items()}
            yield read._replace(row=row)

    return begin


def _so_many(source: Source, count: int) -> Source:
    """A place: rows before it, and the place in the source."""

    def begin(at: Any) -> Iterator[Read]:
        given, inner = at or (0, None)
        reader = source(inner)
        while given < count:
            read = next(reader, None)
            if read is None:
                reader = source(None)
                read = _there(next(reader, None))
            given += 1
            yield read._replace(after=[given, read.after])

    return begin


def _there(read: Read | None) -> Read:
    """A row that was there when its set was last read. Raises ConfigError where it is gone: a set without rows never comes to its share."""
    if read is None:
        raise config_error("dataset", "One of the sets of dataset has fewer rows than when this run read it last. Restore its files.")
    return read


# ---- several


def _merged(sizes: Sequence[int], cfg: DataConfig) -> np.ndarray:
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


def _mixed(sources: Sequence[Source], weights: Sequence[float], *, ends_with_first: bool) -> Source:
    """As `_merged`, of sets of which nobody knows how long they are; one that is used up begins anew.

    A place: of each source the rows that it has given, the place in it, and how many it has, where that is known. It is known with its
    last row, so a set may by then have given one row more than its share of the epoch.
    """
    shares = [weight / sum(weights) for weight in weights]

    def left(counts: Sequence[int], sizes: Sequence[int | None]) -> list[int]:
        """Sources that have not given their share of the epoch."""
        rounds = [size / share for size, share in zip(sizes, shares, strict=True) if size is not None]
        if not rounds or (not ends_with_first and len(rounds) < len(sources)):
            return list(range(len(sources)))
        length = min(rounds) if ends_with_first else max(rounds)
        return [one for one, count in enumerate(counts) if count < max(1, int(length * shares[one] + 1e-9))]

    def begin(at: Any) -> Iterator[Read]:
        empty = [None] * len(sources)
        counts, places, sizes = [list(one) for one in at or ([0] * len(sources), empty, empty)]
        readers = [source(place) for source, place in zip(sources, places, strict=True)]
        ahead = [_there(next(reader, None)) for reader in readers]
        while open_ones := left(counts, sizes):
            which = min(open_ones, key=lambda one: (counts[one] + 0.5) / shares[one])
            read, following = ahead[which], next(readers[which], None)
            counts[which] += 1
            places[which] = read.after
            if following is None:
                sizes[which] = sizes[which] or counts[which]
                places[which], readers[which] = None, sources[which](None)
                following = _there(next(readers[which], None))
            ahead[which] = following
            yield read._replace(after=[list(counts), list(places), list(sizes)])

    return begin


def _part(size: int, ratio: float, seed: int, part: Part, flag: str) -> np.ndarray:
    if ratio >= 1:  # which is refused as a number
        return np.arange(size)
    num_held = max(1, round(size * ratio))
    if num_held >= size:
        message = f"split_dataset_ratio ({ratio}) would hold out {num_held} of {size} rows, and leave none to train on."
        raise config_error(("split_dataset_ratio", "dataset"), message)
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
