"""Streaming data sets (`streaming`): prompts are read during the run, a block of `shuffle_buffer_size` rows at a time.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import ConfigError, Problem, RowsError, RunError, config_error, problem_with
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.settings import DataConfig
from megatron_grpo.core.types import Image, Prompt
from megatron_grpo.run.data import checks
from megatron_grpo.run.data.chat import PromptEncoder
from megatron_grpo.run.data.checks import Encode, PromptRows
from megatron_grpo.run.data.files import NAMED_ROWS, Rows, Source, SourceRow
from megatron_grpo.run.data.prompts import PromptStream, load_rows, names_of, open_sets, open_stream, permutation

logger = logging.getLogger(__name__)

# An all-gather over ranks of (problem with the rank's rows, or ""; checksum of the rows).
Ask = Callable[[tuple[str, int]], Sequence[tuple[str, int]]]
REMEMBERED = 16  # blocks before the position of a checkpoint whose positions it stores
MOST_MARKS = 1000  # blocks whose positions a process remembers
_BLIND = "streaming supports text only: the sampler needs the largest number of images per prompt, which requires reading all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPosition:
    """Position and size of a block.

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

    epoch: int
    block: int
    begin: Any
    after: Any
    first: int
    num_prompts: int
    num_rows: int
    first_of_epoch: int
    left_out: int
    digest: int

    @property
    def end(self) -> int:
        """Number of the first prompt after the block, counted over the run."""
        return self.first + self.num_prompts


NOTHING = BlockPosition(
    epoch=-1, block=0, begin=None, after=None, first=0, num_prompts=0, num_rows=0, first_of_epoch=-1, left_out=0, digest=0
)


def open_prompts(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    image_spec: ImageProcessorSpec | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> PromptStream:
    """Open the training set's stream, read as a whole (`open_stream`) or streamed.

    Args:
        cfg: Data settings.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order.
        image_spec: Image processor of the model, or None for a text model.
        tools: JSON schemas shown to the model if completions are episodes; None if they are single answers.

    Raises:
        ConfigError: If the data set cannot be read, or a prompt fails a check.
    """
    open_function = open_streamed if cfg.streaming else open_stream
    return open_function(cfg, tokenizer, seed=seed, image_spec=image_spec, tools=tools)


def rows_to_check(cfg: DataConfig, *, image_spec: ImageProcessorSpec | None, is_blind: bool, seed: int) -> PromptRows:
    """Return checked rows of the training set: all, or the first block with `streaming`. Needs no tokenizer.

    Args:
        cfg: Data settings.
        image_spec: Image processor of the model, or None.
        is_blind: Whether the model is known to take text only.
        seed: Seed for sampling rows.

    Raises:
        ConfigError: If the data set cannot be read, or a row holds no usable prompt.
    """
    if not cfg.streaming:
        return load_rows(cfg, image_spec=image_spec, is_blind=is_blind, seed=seed)
    flag, names = "dataset", names_of(cfg, None, "dataset")
    entries = list(islice(open_sets(cfg, names, flag)(None), max(1, cfg.shuffle_buffer_size)))
    with _named(0, len(entries), flag):
        prompts = checks.check_rows(_rows_of(entries, flag), cfg, names, image_spec=image_spec, is_blind=is_blind)
        checks.check_without_images(prompts, flag, _BLIND)
    return replace(prompts, is_beginning=True)


def open_streamed(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    image_spec: ImageProcessorSpec | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> StreamedPrompts:
    """Open a streamed data set. Reads blocks until one has a prompt, normally only the first.

    Args:
        cfg: Data settings.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order.
        image_spec: Image processor of the model, or None for a text model.
        tools: JSON schemas shown to the model if completions are episodes; None if they are single answers.

    Raises:
        ConfigError: If the data set cannot be read, or a prompt fails a check.
    """
    flag, names = "dataset", names_of(cfg, None, "dataset")
    encode = PromptEncoder.of(cfg, tokenizer, image_spec, tools)

    def check(rows: Rows) -> PromptRows:
        prompts = checks.check_rows(rows, cfg, names, image_spec=image_spec)
        checks.check_without_images(prompts, flag, _BLIND)
        if tools is not None:
            checks.check_for_episodes(prompts, flag)
        checks.check_template(prompts, tokenizer, flag)
        return checks.check_lengths(prompts, encode, cfg, tokens=checks.tokenised(prompts, encode, flag), may_be_none=True)

    return StreamedPrompts(open_sets(cfg, names, flag), check, encode, cfg=cfg, seed=seed)


class StreamedPrompts(PromptStream):
    """A prompt stream that holds only the rows of the blocks that prompts are being taken from."""

    COMPARED = (("seed", "seed", "{}"), ("shuffle", "dataset_shuffle", "{}"), ("block_size", "shuffle_buffer_size", "{}"))

    def __init__(self, source: Source, check: Callable[[Rows], PromptRows], encode: Encode, *, cfg: DataConfig, seed: int):
        """Read blocks until one has a prompt.

        Args:
            source: Rows of the data set from any position.
            check: Checks the rows of a block; raises ConfigError.
            encode: Maps a prompt to token IDs.
            cfg: Data settings.
            seed: Seed of the order.
        """
        empty = PromptRows(rows=Rows([([], str)]), keep=np.empty(0, dtype=np.int64), longest_prompt=None)
        super().__init__(empty, encode, seed=seed, shuffle=cfg.dataset_shuffle)
        self._source, self._check, self._size = source, check, max(1, cfg.shuffle_buffer_size)
        self._ask: Ask = lambda gathered: [gathered]
        self._reader_ahead: tuple[Any, Iterator[SourceRow]] | None = None  # (position, reader at that position)
        self._held: dict[tuple[int, int], tuple[BlockPosition, PromptRows]] = {}
        self._marks: list[BlockPosition] = []
        while not self._marks or not self._marks[-1].num_prompts:
            self._remember(self._next(self._marks[-1] if self._marks else NOTHING))
        # Assume the maximum length for prompts that have not been read yet.
        begin = self._rows_of(self._marks[-1])
        self.rows = replace(begin, is_beginning=True, longest_prompt=cfg.max_prompt_length or begin.longest_prompt)

    def __len__(self) -> int:
        raise TypeError("the number of prompts of a streamed data set is unknown")

    def agree_by(self, gather: Ask) -> None:
        """Verify from here on that all ranks read the same rows, and fail on all ranks otherwise. Collective.

        Args:
            gather: All-gather of (problem, checksum) over the ranks.

        Raises:
            RowsError: On every rank, if the rows read so far differ.
        """
        self._ask = gather
        self._agree("", self._marks[-1])

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts. Collective after `agree_by`.

        Args:
            count: Number of prompts.

        Raises:
            RowsError: On every rank, if rows cannot be read or fail a check on any rank.
        """
        while self._marks[-1].end < self.taken + count:
            mark, fault = NOTHING, ""
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
        marks_by_key = {(mark.epoch, mark.block): mark for mark in (*self._marks, *_marks_of(state))}
        self._marks = [marks_by_key[key] for key in sorted(marks_by_key)]

    def images_of(self, number: int) -> tuple[tuple[int, Image], ...]:
        return ()  # rows with images are rejected

    def _of_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        """Check that the block in which the saved run stopped is unchanged. Other blocks are checked when they are read."""
        marks = _marks_of(state)
        mark = marks[_place_among(marks, int(state["taken"]))]
        if mark in self._marks or not mark.num_rows:
            return []
        try:
            self._rows_of(mark)
        except ConfigError as error:
            return list(error.problems)
        except OSError as error:
            return [problem_with("dataset", f"dataset: rows that this run was reading can no longer be read: {error}.")]
        return []

    # ---- blocks

    def _found(self, number: int) -> tuple[PromptRows, int, int]:
        mark = self._marks[_place_among(self._marks, number)]
        try:
            while mark.end <= number:  # the position of the block is not remembered
                mark = self._next(mark)
            rows = self._rows_of(mark)
        except (ConfigError, OSError) as error:  # these exception types are for problems before a run
            raise RunError(str(error)) from error
        if self._order[0] != mark.first:
            count = mark.num_prompts
            self._order = (mark.first, permutation(count, self.seed, mark.epoch, mark.block) if self.shuffle else np.arange(count))
        return rows, int(self._order[1][number - mark.first]), mark.block * self._size

    def _next(self, mark: BlockPosition) -> BlockPosition:
        """Read and check the block after `mark`. Raises ConfigError."""
        epoch, block, begins = mark.epoch, mark.block + 1, mark.first_of_epoch
        if mark.after is None:
            if mark.end == begins:
                message = f"No row of the data set can be used: {mark.left_out} are longer than max_prompt_length."
                raise config_error(("dataset", "max_prompt_length"), message)
            epoch, block, begins = mark.epoch + 1, 0, mark.end
        entries, next_position = self._read(mark.after)
        rows = self._checked(entries, block)
        num_prompts = 0 if rows is None else len(rows)
        new_mark = BlockPosition(
            epoch=epoch, block=block, begin=mark.after, after=next_position, first=mark.end, num_prompts=num_prompts, num_rows=len(entries),
            first_of_epoch=begins, left_out=mark.left_out + len(entries) - num_prompts, digest=_digest(entries),
        )  # fmt: skip
        if rows is not None:
            self._hold(new_mark, rows)
        return new_mark

    def _rows_of(self, mark: BlockPosition) -> PromptRows:
        """Return the rows of a block. Raises ConfigError if they have changed since they were first read."""
        key = (mark.epoch, mark.block)
        if key not in self._held or self._held[key][0] != mark:
            entries, _ = self._read(mark.begin)
            if len(entries) != mark.num_rows or _digest(entries) != mark.digest:
                message = f"{self._named(mark)} of the data set have changed since this run read them. Restore them, or start a new run \
in another output_dir."
                raise config_error("dataset", message)
            rows = self._checked(entries, mark.block)
            assert rows is not None and len(rows) == mark.num_prompts, "the same rows have been checked before"
            self._hold(mark, rows)
        return self._held[key][1]

    def _checked(self, entries: Sequence[SourceRow], block: int) -> PromptRows | None:
        if not entries:
            return None
        with _named(block * self._size, len(entries), "dataset"):
            return self._check(_rows_of(entries, "dataset"))

    def _read(self, begin: Any) -> tuple[list[SourceRow], Any]:
        """Read one block from a position. Return its rows and the position after them, None at the end of the epoch."""
        reader_ahead, self._reader_ahead = self._reader_ahead, None
        reader = reader_ahead[1] if reader_ahead is not None and reader_ahead[0] == begin else self._source(begin)
        entries = list(islice(reader, self._size))
        next_position = entries[-1].after if len(entries) == self._size else None
        if next_position is not None:
            self._reader_ahead = (next_position, reader)
        return entries, next_position

    def _hold(self, mark: BlockPosition, rows: PromptRows) -> None:
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


def _marks_of(state: Mapping[str, Any]) -> list[BlockPosition]:
    return [BlockPosition(**fields) for fields in state["marks"]]


def _place_among(marks: Sequence[BlockPosition], number: int) -> int:
    """Return the index of the last mark that begins at prompt `number` or before it."""
    return max(0, bisect_right(marks, number, key=lambda mark: mark.first) - 1)


def _digest(entries: Sequence[SourceRow]) -> int:
    """Return a checksum of rows, to detect other rows at the same position."""
    digest = 0
    for entry in entries:
        digest = zlib.crc32(checks.bytes_of(entry.row) if isinstance(entry.row, dict) else b"", digest)
    return digest


def _rows_of(entries: Sequence[SourceRow], flag: str) -> Rows:
    """Collect the rows that were read. Raises ConfigError with the lines that hold no row."""
    faults = [f"{entry.stands}: {entry.row}" for entry in entries if isinstance(entry.row, str)]
    if faults:
        listed = f"{'; '.join(faults[:NAMED_ROWS])}{'; ...' if len(faults) > NAMED_ROWS else ''}"
        raise config_error(flag, f"{len(faults)} line(s) are not JSON objects: {listed}.")
    return Rows([([entry.row for entry in entries if isinstance(entry.row, dict)], lambda index: entries[index].stands)])


@contextmanager
def _named(first: int, count: int, flag: str) -> Iterator[None]:
    """Add the range of a block's rows to the messages of ConfigErrors raised in the `with` block."""
    try:
        yield
    except ConfigError as error:
        place_text = f"{flag}, rows {first:,} to {first + count - 1:,}, which streaming reads together: "
        raise ConfigError([replace(problem, message=place_text + problem.message) for problem in error.problems]) from error
