"""Streaming data sets (`streaming`): prompts are read during the run, a block of `shuffle_buffer_size` rows at a time.

`open_sets` mixes data sets row by row; `StreamedPrompts` is the stream of prompts.

Each block is checked when it is read, like a whole data set before a run. An epoch is the blocks in their order; inside a block the order
is a permutation that depends on (seed, epoch, block) alone. So every rank and every parallel layout derives the same order, and a data
set of one block is trained on in the same order as without `streaming`. The contents of a block depend only on the rows, so a checkpoint
only needs a position in the data set to continue. If a prompt precedes the remembered positions, its block is found by reading from the
beginning.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import ConfigError, Problem, RowsError, RunError, config_error, problem_with
from megatron_grpo.core.types import Prompt
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data import checks
from megatron_grpo.run.data.checks import PromptDataset
from megatron_grpo.run.data.files import NAMED_ROWS, ConcatRows, RawRow, Source, concatenated, open_source, split_count
from megatron_grpo.run.data.prompts import Ask, PromptStream, conversion, find_shares, rows_per_epoch

logger = logging.getLogger(__name__)

REMEMBERED = 16  # blocks before the position of a checkpoint whose positions it stores
MOST_MARKS = 1000  # blocks whose positions a process remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPosition:
    """Position and size of a block. The defaults are those of the block before the first.

    Args:
        epoch: Epoch of the block.
        block: Number of the block in its epoch.
        begin: Position in the data set where the block begins.
        after: Position after the block; None at the end of the epoch.
        first: First prompt of the block, counted over the run.
        num_prompts: Prompts of the block.
        num_rows: Rows of the block.
        first_of_epoch: First prompt of the epoch, counted over the run.
        left_out: Rows of the run up to the end of the block that were too long.
        digest: Checksum of the rows.
    """

    epoch: int = -1
    block: int = 0
    begin: Any = None
    after: Any = None
    first: int = 0
    num_prompts: int = 0
    num_rows: int = 0
    first_of_epoch: int = -1
    left_out: int = 0
    digest: int = 0

    @property
    def end(self) -> int:
        """Number of the first prompt after the block, counted over the run."""
        return self.first + self.num_prompts


# ---- data sets


def open_sets(cfg: DataConfig, names: Sequence[str], flag: str) -> Source:
    """Open several data sets: their rows in the order of `read_sets`, one at a time and without sampling.

    Args:
        names: Data sets, each optionally with a `#count` suffix.

    Raises:
        ConfigError: If a data set cannot be opened.
    """
    sources = [_open_set(name, cfg, flag) for name in names]
    shares = find_shares(cfg, len(sources))
    return _repeated(sources, shares, partial(rows_per_epoch, shares=shares, cfg=cfg)) if shares else concatenated(sources)


def _open_set(name: str, cfg: DataConfig, flag: str) -> Source:
    """Open a data set. `name#n` gives its first n rows, starting again if it has fewer.

    The first row is read, to check that it exists and has the columns to rename.
    """
    plain, count = split_count(name)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} rows. Use at least 1.")
    source = open_source(plain, cfg.dataset_split, flag)
    first = next(source(None), None)
    if first is None:
        raise config_error(flag, f"{flag} {plain!r} has no rows.")
    if isinstance(first.row, str):
        raise config_error(flag, f"{first.stands} is not a JSON object: {first.row}.")
    convert = conversion(first.row, cfg, flag)

    def converted(position: Any) -> Iterator[RawRow]:
        for entry in source(position):
            yield entry if isinstance(entry.row, str) else entry._replace(row=convert(entry.row))

    return converted if count is None else _repeated([converted], [1.0], lambda sizes: [count])


def _existing(entry: RawRow | None) -> RawRow:
    """Return a row that existed when its data set was last read.

    Raises:
        ConfigError: If it no longer exists; a data set without rows could never yield its share.
    """
    if entry is None:
        raise config_error("dataset", "A data set of `dataset` has fewer rows than when this run last read it. Restore its files.")
    return entry


def _repeated(
    sources: Sequence[Source], shares: Sequence[float], count_rows: Callable[[Sequence[int | None]], Sequence[int] | None]
) -> Source:
    """Interleave sources of unknown length like `read_sets`. A source that is exhausted starts again.

    A position holds, per source, the rows it has yielded, the position in it, and its length if known. The length becomes known with the
    last row, so by then a set may have yielded one row more than its share of the epoch.

    Args:
        count_rows: Maps the length of each source, None where unknown, to the rows that an epoch takes of each; None while it has no end.
    """

    def find_incomplete(counts: Sequence[int], sizes: Sequence[int | None]) -> list[int]:
        """Return the sources that have not yielded their share of the epoch."""
        most = count_rows(sizes)
        return [number for number, count in enumerate(counts) if most is None or count < most[number]]

    def begin(position: Any) -> Iterator[RawRow]:
        empty = [None] * len(sources)
        counts, positions, sizes = [list(values) for values in position or ([0] * len(sources), empty, empty)]
        readers = [source(begin_at) for source, begin_at in zip(sources, positions, strict=True)]
        next_entries = [_existing(next(reader, None)) for reader in readers]
        while incomplete := find_incomplete(counts, sizes):
            number = min(incomplete, key=lambda i: (counts[i] + 0.5) / shares[i])
            entry, following = next_entries[number], next(readers[number], None)
            counts[number] += 1
            positions[number] = entry.after
            if following is None:
                sizes[number] = sizes[number] or counts[number]
                positions[number], readers[number] = None, sources[number](None)
                following = _existing(next(readers[number], None))
            next_entries[number] = following
            yield entry._replace(after=[list(counts), list(positions), list(sizes)])

    return begin


def read_beginning(source: Source, check: Callable[[ConcatRows], PromptDataset], cfg: DataConfig) -> PromptDataset:
    """Return the first block of a data set.

    Args:
        check: Checks the rows of a block; raises ConfigError.

    Raises:
        ConfigError: If the rows cannot be read, or fail a check.
    """
    entries = list(islice(source(None), max(1, cfg.shuffle_buffer_size)))
    return replace(_check_block(entries, 0, check), is_beginning=True)


# ---- prompts


class StreamedPrompts(PromptStream):
    """A prompt stream that holds only the rows of the blocks that prompts are being taken from."""

    COMPARED = (("seed", "seed", "{}"), ("shuffle", "dataset_shuffle", "{}"), ("block_size", "shuffle_buffer_size", "{}"))

    def __init__(
        self,
        source: Source,
        check: Callable[[ConcatRows], PromptDataset],
        *,
        cfg: DataConfig,
        seed: int,
        shuffle: bool = True,
    ):
        """Read blocks until one has a prompt.

        Args:
            check: Checks the rows of a block; raises ConfigError.
            seed: Seed of the order.
            shuffle: Whether the order in each block is a permutation.
        """
        self._source, self._check, self._size = source, check, max(1, cfg.shuffle_buffer_size)
        self._ask: Ask = lambda gathered: [gathered]
        self._reader_ahead: tuple[Any, Iterator[RawRow]] | None = None  # (position, reader at that position)
        self._held: dict[tuple[int, int], tuple[BlockPosition, PromptDataset]] = {}
        self._marks: list[BlockPosition] = []
        while not self._marks or not self._marks[-1].num_prompts:
            self._remember(self._next(self._marks[-1] if self._marks else BlockPosition()))
        # Assume the maximum length for prompts that have not been read yet.
        begin = self._collect_rows(self._marks[-1])
        begin = replace(begin, is_beginning=True, longest_prompt=cfg.max_prompt_length or begin.longest_prompt)
        super().__init__(begin, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        raise TypeError("the number of prompts of a streamed data set is unknown")

    def agree_by(self, gather: Ask) -> None:
        self._ask = gather
        self._agree("", self._marks[-1])

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. Collective after `agree_by`.

        Raises:
            RowsError: On every rank, if rows cannot be read or fail a check on any rank.
        """
        while self._marks[-1].end < self.taken + count:
            mark, fault = BlockPosition(), ""
            try:
                mark = self._next(self._marks[-1])
            except (ConfigError, OSError) as error:
                fault = str(error)
            self._agree(fault, mark)
            self._remember(mark)
        return super().take(count)

    def _agree(self, fault: str, mark: BlockPosition) -> None:
        gathered = self._ask((fault, mark.digest))
        if faults := [text for text, _ in gathered if text]:
            raise RowsError(f"{faults[0]} Fix these rows, or remove them without changing earlier rows, and run the same command again")
        if len({digest for _, digest in gathered}) > 1:
            difference = f"dataset: {self._named(mark).lower()} differ between ranks."
            raise RowsError(f"{difference} Copy the same files to every machine, and run the same command again")

    def state(self) -> dict[str, Any]:
        index = _place_among(self._marks, self.taken)
        marks = [asdict(mark) for mark in self._marks[max(0, index - REMEMBERED) :]]
        order = {"seed": self.seed, "shuffle": self.shuffle, "block_size": self._size}
        return {"streaming": True, "taken": self.taken, **order, "marks": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        marks_by_key = {(mark.epoch, mark.block): mark for mark in (*self._marks, *_read_marks(state))}
        self._marks = [marks_by_key[key] for key in sorted(marks_by_key)]

    def _check_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        """Check that the block in which the saved run stopped is unchanged. Other blocks are checked when they are read."""
        marks = _read_marks(state)
        mark = marks[_place_among(marks, int(state["taken"]))]
        if mark in self._marks or not mark.num_rows:
            return []
        try:
            self._collect_rows(mark)
        except ConfigError as error:
            return list(error.problems)
        except OSError as error:
            return [problem_with("dataset", f"dataset: rows that this run was reading can no longer be read: {error}.")]
        return []

    # ---- blocks

    def _found(self, number: int) -> tuple[PromptDataset, int, int]:
        mark = self._marks[_place_among(self._marks, number)]
        try:
            while mark.end <= number:  # the position of the block is not remembered
                mark = self._next(mark)
            rows = self._collect_rows(mark)
        except (ConfigError, OSError) as error:  # these exception types are for problems before a run
            raise RunError(str(error)) from error
        index = self._index_at(number - mark.first, mark.num_prompts, mark.epoch, mark.block)
        return rows, index, mark.block * self._size + int(rows.keep[index])

    def _next(self, mark: BlockPosition) -> BlockPosition:
        """Read and check the block after `mark`. Raises ConfigError."""
        epoch, block, begins = mark.epoch, mark.block + 1, mark.first_of_epoch
        if mark.after is None:
            if mark.end == begins:
                message = f"No row of the data set can be used: {mark.left_out} are longer than max_prompt_length."
                raise config_error(("dataset", "max_prompt_length"), message)
            epoch, block, begins = mark.epoch + 1, 0, mark.end
        entries, next_position = self._read(mark.after)
        rows = _check_block(entries, block * self._size, self._check) if entries else None
        num_prompts = 0 if rows is None else len(rows)
        new_mark = BlockPosition(
            epoch=epoch, block=block, begin=mark.after, after=next_position, first=mark.end, num_prompts=num_prompts, num_rows=len(entries),
            first_of_epoch=begins, left_out=mark.left_out + len(entries) - num_prompts, digest=_digest(entries),
        )  # fmt: skip
        if rows is not None:
            self._hold(new_mark, rows)
        return new_mark

    def _collect_rows(self, mark: BlockPosition) -> PromptDataset:
        """Return the rows of a block. Raises ConfigError if they have changed since they were first read."""
        key = (mark.epoch, mark.block)
        if key not in self._held or self._held[key][0] != mark:
            entries, _ = self._read(mark.begin)
            if len(entries) != mark.num_rows or _digest(entries) != mark.digest:
                message = f"{self._named(mark)} of the data set have changed since this run read them. Restore them, or start a new run \
in another output_dir."
                raise config_error("dataset", message)
            rows = _check_block(entries, mark.block * self._size, self._check)
            assert len(rows) == mark.num_prompts, "the same rows have been checked before"
            self._hold(mark, rows)
        return self._held[key][1]

    def _read(self, begin: Any) -> tuple[list[RawRow], Any]:
        """Read one block from a position. Return its rows and the position after them, None at the end of the epoch."""
        reader_ahead, self._reader_ahead = self._reader_ahead, None
        reader = reader_ahead[1] if reader_ahead is not None and reader_ahead[0] == begin else self._source(begin)
        entries = list(islice(reader, self._size))
        next_position = entries[-1].after if len(entries) == self._size else None
        if next_position is not None:
            self._reader_ahead = (next_position, reader)
        return entries, next_position

    def _hold(self, mark: BlockPosition, rows: PromptDataset) -> None:
        """Keep the blocks that prompts are still taken from, and one block before them, because prompts may be given back."""
        trained_keys = [key for key, (mark, _) in self._held.items() if mark.end <= self.taken]
        for key in trained_keys[:-1]:
            del self._held[key]
        self._held[mark.epoch, mark.block] = (mark, rows)

    def _remember(self, mark: BlockPosition) -> None:
        self._marks = [*self._marks[:1], *self._marks[1:][-MOST_MARKS:], mark]
        count = mark.num_rows - mark.num_prompts
        if count and launcher.read().is_logging_rank:
            logger.warning(
                "dataset: %d of %s are longer than max_prompt_length and are left out (truncation_strategy delete); %s so far.",
                *(count, self._named(mark).lower(), f"{mark.left_out:,}"),
            )

    def _named(self, mark: BlockPosition) -> str:
        first = mark.block * self._size
        return f"Rows {first:,} to {first + mark.num_rows - 1:,}"


def _read_marks(state: Mapping[str, Any]) -> list[BlockPosition]:
    return [BlockPosition(**fields) for fields in state["marks"]]


def _place_among(marks: Sequence[BlockPosition], number: int) -> int:
    """Return the index of the last mark that begins at prompt `number` or before it."""
    return max(0, bisect_right(marks, number, key=lambda mark: mark.first) - 1)


def _digest(entries: Sequence[RawRow]) -> int:
    """Return a checksum of rows, to detect other rows at the same position."""
    digest = 0
    for entry in entries:
        digest = zlib.crc32(checks.serialize_row(entry.row) if isinstance(entry.row, dict) else b"", digest)
    return digest


def _collect_rows(entries: Sequence[RawRow], flag: str) -> ConcatRows:
    """Collect the rows that were read. Raises ConfigError with the lines that hold no row."""
    faults = [f"{entry.stands}: {entry.row}" for entry in entries if isinstance(entry.row, str)]
    if faults:
        listed = f"{'; '.join(faults[:NAMED_ROWS])}{'; ...' if len(faults) > NAMED_ROWS else ''}"
        raise config_error(flag, f"{len(faults)} line(s) are not JSON objects: {listed}.")
    return ConcatRows([([entry.row for entry in entries if isinstance(entry.row, dict)], lambda index: entries[index].stands)])


def _check_block(entries: Sequence[RawRow], first: int, check: Callable[[ConcatRows], PromptDataset]) -> PromptDataset:
    """Check the rows of a block, which begins at row `first`. Raises ConfigErrors that name the range of its rows."""
    try:
        return check(_collect_rows(entries, "dataset"))
    except ConfigError as error:
        place_text = f"dataset, rows {first:,} to {first + len(entries) - 1:,}, which streaming reads together: "
        raise ConfigError([replace(problem, message=place_text + problem.message) for problem in error.problems]) from error
