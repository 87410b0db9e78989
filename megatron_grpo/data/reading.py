"""Reads rows one after the other, from any place on: of a data set that is not held in memory, no more lies there than is asked for.

A `Source` is a function of a place and gives what comes behind it, without holding it. A place is JSON, so that a checkpoint can hold one;
None is the beginning. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_grpo.base.errors import first_line, said_by
from megatron_grpo.config.config import DataConfig
from megatron_grpo.data.files import (
    files_of,
    from_hub,
    is_json_array,
    kind_of,
    pyarrow_parquet,
    read_as_parquet,
    row_of,
    saved_by_datasets,
    text_lines,
    wrong,
)
from megatron_grpo.data.mixing import names_here, with_count

BATCH = 256  # rows of a Parquet file that are decoded together
BUFFER = 1 << 20  # bytes of each of its columns that are read together


class Read(NamedTuple):
    """A row. after: the place behind it. stands: where it stands, for errors: `data.jsonl line 7`. row: a string says why it is none."""

    after: Any
    stands: str
    row: dict[str, Any] | str


Source = Callable[[Any], Iterator[Read]]


def open_sets(cfg: DataConfig, names: Sequence[str], flag: str) -> Source:
    """The rows of these data sets together, in the order of `data.mixing.read_sets` before anything is shuffled. Raises ConfigError."""
    sources = [_open_set(name, cfg, flag) for name in names]
    if len(sources) > 1 and cfg.interleave_prob:
        return _mixed(sources, cfg.interleave_prob, ends_with_first=cfg.stopping_strategy == "first_exhausted")
    return _behind_each_other(sources)


def _open_set(name: str, cfg: DataConfig, flag: str) -> Source:
    """`name#n` is its first n rows; it begins anew where it has fewer. Looks at the first row: there is one, with the columns named."""
    plain, count = with_count(name)
    if count is not None and count < 1:
        raise wrong(flag, f"{flag} ({name}) asks for {count} rows. Ask for at least 1.")
    source = _opened(plain, cfg.dataset_split, flag)
    first = next(source(None), None)
    if first is None:
        raise wrong(flag, f"{flag} {plain!r} has no rows.")
    if isinstance(first.row, str):
        raise wrong(flag, f"{first.stands} is not a JSON object: {first.row}.")
    if cfg.columns:
        source = _renamed(source, names_here(first.row, cfg.columns, flag))
    return source if count is None else _so_many(source, count)


# ---- where rows come from


def _opened(dataset: str, split: str, flag: str) -> Source:
    kind = kind_of(dataset, flag)
    if kind == "hub":
        return _hub(dataset, lambda: from_hub(dataset, split, flag, streaming=True), flag)
    if kind == "saved":
        return _table(Path(dataset).name, saved_by_datasets(dataset, flag))
    return _behind_each_other([_file(file, name, flag) for file, name in files_of(Path(dataset), split, flag)])


def _file(file: Path, name: str, flag: str) -> Source:
    if file.suffix == ".parquet":
        pyarrow_parquet(flag)
        return lambda at: _parquet(file, name, flag, at or 0)
    if is_json_array(file):
        raise wrong(flag, f"{name} is one JSON array, which can only be read whole. Write one object a line, or leave streaming out.")
    return lambda at: _lines(file, name, flag, *(at or (0, 0)))


def _lines(file: Path, name: str, flag: str, before: int, begin: int) -> Iterator[Read]:
    """A place: (lines before it, bytes before it)."""
    for number, end, text in text_lines(file, name, flag, before=before, begin=begin):
        yield Read([number, end], f"{name} line {number}", row_of(text))


def _parquet(file: Path, name: str, flag: str, begin: int) -> Iterator[Read]:
    """A place: rows before it. Row groups before it are not read."""
    import psutil

    buffers = {"buffer_size": BUFFER, "pre_buffer": False}  # without either, a whole row group is read, which may be the file
    with read_as_parquet(name, flag), pyarrow_parquet(flag).ParquetFile(file, **buffers) as source:
        groups, row = list(range(source.metadata.num_row_groups)), 0
        while groups and row + source.metadata.row_group(groups[0]).num_rows <= begin:
            row += source.metadata.row_group(groups.pop(0)).num_rows
        for batch in source.iter_batches(batch_size=BATCH, row_groups=groups) if groups else ():
            # A column of one value, many times, takes a few bytes in a file.
            room = psutil.virtual_memory().available // 2
            if batch.nbytes > room:
                raise wrong(flag, f"{name}: rows {row} to {row + len(batch)} take {batch.nbytes:,} bytes, more than half of what is free.")
            given = max(0, begin - row)
            for offset, values in enumerate(batch.slice(given).to_pylist(), start=row + given):
                yield Read(offset + 1, f"{name} row {offset}", values)
            row += len(batch)


def _table(name: str, rows: Sequence[dict[str, Any]]) -> Source:
    """Of a table in mapped memory. A place: rows before it."""
    return lambda at: (Read(row + 1, f"{name} row {row}", rows[row]) for row in range(at or 0, len(rows)))


def _hub(name: str, open_it: Callable[[], Any], flag: str) -> Source:
    """A place: rows before it, and where `datasets` says it is."""

    def begin(at: Any) -> Iterator[Read]:
        row, state = at or (0, None)
        rows = open_it()
        if state is not None:
            rows.load_state_dict(state)
        try:
            for number, values in enumerate(rows, start=row):
                yield Read([number + 1, rows.state_dict()], f"{name} row {number}", values)
        except Exception as error:
            reason = said_by(error, first_line)
            raise wrong(flag, f"{name} could not be read from the Hub any further ({type(error).__name__}: {reason}).") from error

    return begin


# ---- sources made of others


def _there(read: Read | None) -> Read:
    """A row that was there when its set was last read. Raises ConfigError where it is gone: a set without rows never comes to its share."""
    if read is None:
        raise wrong("dataset", "One of the sets of dataset has fewer rows than when this run read it last. Restore its files.")
    return read


def _behind_each_other(sources: Sequence[Source]) -> Source:
    """A place: number of the source, and the place in it."""

    def begin(at: Any) -> Iterator[Read]:
        first, inner = at or (0, None)
        for number in range(first, len(sources)):
            for read in sources[number](inner if number == first else None):
                yield read._replace(after=[number, read.after])

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


def _mixed(sources: Sequence[Source], weights: Sequence[float], *, ends_with_first: bool) -> Source:
    """As `data.mixing` mixes: the k-th row of a set comes where its share has come to k - 1/2; a set that is used up begins anew.

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


def _renamed(source: Source, names: Mapping[str, str]) -> Source:
    def begin(at: Any) -> Iterator[Read]:
        for read in source(at):
            row = read.row if isinstance(read.row, str) else {names.get(name, name): value for name, value in read.row.items()}
            yield read._replace(row=row)

    return begin
