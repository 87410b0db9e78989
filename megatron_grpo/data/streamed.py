"""Prompts of a data set that is read as the run goes (`streaming`): a block of `shuffle_buffer_size` rows at a time, each looked at when it
comes as a whole data set is before a run.

An epoch is the blocks in their order; inside a block the order is a permutation that depends on (seed, epoch, block) alone. So every rank
and every layout derives the same order, and a data set of one block is trained on in the order that it has without `streaming`. What a
block holds depends on nothing but the rows, so a place in the data set is all that a checkpoint needs for going on; where a prompt is older
than the places that are remembered, they are found again by reading from the beginning.
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

from megatron_grpo.base import launcher
from megatron_grpo.base.errors import ConfigError, Problem, RowsError, RunError, config_error, problem_with
from megatron_grpo.config.config import DataConfig
from megatron_grpo.data import checks
from megatron_grpo.data.chat import PromptEncoder
from megatron_grpo.data.checks import Encode, PromptRows
from megatron_grpo.data.files import NAMED_ROWS, Read, Rows, Source
from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.data.mixing import open_sets, permutation
from megatron_grpo.data.prompts import PromptStream, load_rows, names_of, open_stream
from megatron_grpo.types import Image, Prompt

logger = logging.getLogger(__name__)

# A collective that gives what every rank tells to all: (what is wrong with its rows, or "", a checksum of them).
Ask = Callable[[tuple[str, int]], Sequence[tuple[str, int]]]
REMEMBERED = 16  # blocks before the place of a checkpoint, whose places it holds
MOST_MARKS = 1000  # whose places a process remembers
_BLIND = "streaming reads rows of text alone: the sampler is made for the most pictures of a prompt, which only the whole data set tells"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a block is. begin, after: places in the data set; after is None where the epoch ends.

    first: its first prompt, counted over the run, as is that of its epoch. digest: of its rows. left_out: rows of the run up to its end
    that were too long.
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
        """The first prompt behind it."""
        return self.first + self.num_prompts


NOTHING = Mark(epoch=-1, block=0, begin=None, after=None, first=0, num_prompts=0, num_rows=0, first_of_epoch=-1, left_out=0, digest=0)


def open_prompts(
    cfg: DataConfig, tokenizer: Any, *, seed: int, eyes: ImageProcessorSpec | None = None, tools: Sequence[Mapping[str, Any]] | None = None
) -> PromptStream:
    """The training set's stream: read whole and checked (`open_stream`), or as the run goes. Raises ConfigError."""
    opened = open_streamed if cfg.streaming else open_stream
    return opened(cfg, tokenizer, seed=seed, eyes=eyes, tools=tools)


def rows_to_look_at(cfg: DataConfig, *, eyes: ImageProcessorSpec | None, is_blind: bool, seed: int) -> PromptRows:
    """Rows of the training set, no tokenizer needed: all of them, or the first block. Raises ConfigError."""
    if not cfg.streaming:
        return load_rows(cfg, eyes=eyes, is_blind=is_blind, seed=seed)
    flag, names = "dataset", names_of(cfg, None, "dataset")
    read = list(islice(open_sets(cfg, names, flag)(None), max(1, cfg.shuffle_buffer_size)))
    with _named(0, len(read), flag):
        prompts = checks.check_rows(_rows_of(read, flag), cfg, names, eyes=eyes, is_blind=is_blind)
        checks.check_without_pictures(prompts, flag, _BLIND)
    return replace(prompts, is_beginning=True)


def open_streamed(
    cfg: DataConfig, tokenizer: Any, *, seed: int, eyes: ImageProcessorSpec | None = None, tools: Sequence[Mapping[str, Any]] | None = None
) -> StreamedPrompts:
    """Reads the first block, and no more. eyes, tools: as for `open_stream`. Raises ConfigError."""
    flag, names = "dataset", names_of(cfg, None, "dataset")
    encode = PromptEncoder.of(cfg, tokenizer, eyes, tools)

    def look(rows: Rows) -> PromptRows:
        prompts = checks.check_rows(rows, cfg, names, eyes=eyes)
        checks.check_without_pictures(prompts, flag, _BLIND)
        if tools is not None:
            checks.check_for_episodes(prompts, flag)
        checks.check_template(prompts, tokenizer, flag)
        return checks.check_lengths(prompts, encode, cfg, tokens=checks.tokenised(prompts, encode, flag), may_be_none=True)

    return StreamedPrompts(open_sets(cfg, names, flag), look, encode, cfg=cfg, seed=seed)


class StreamedPrompts(PromptStream):
    """Hands out prompts as `PromptStream` does, and holds no more rows than those of the blocks that they are taken from."""

    COMPARED = (("seed", "seed", "{}"), ("shuffle", "dataset_shuffle", "{}"), ("block_size", "shuffle_buffer_size", "{}"))

    def __init__(self, source: Source, look: Callable[[Rows], PromptRows], encode: Encode, *, cfg: DataConfig, seed: int):
        """look: at the rows of a block; raises ConfigError. Reads blocks until one has a prompt."""
        nothing = PromptRows(rows=Rows([([], str)]), keep=np.empty(0, dtype=np.int64), longest_prompt=None)
        super().__init__(nothing, encode, seed=seed, shuffle=cfg.dataset_shuffle)
        self._source, self._look, self._size = source, look, max(1, cfg.shuffle_buffer_size)
        self._ask: Ask = lambda told: [told]
        self._going_on: tuple[Any, Iterator[Read]] | None = None  # a reader that stands at a place
        self._held: dict[tuple[int, int], tuple[Mark, PromptRows]] = {}
        self._marks: list[Mark] = []
        while not self._marks or not self._marks[-1].num_prompts:
            self._remember(self._next(self._marks[-1] if self._marks else NOTHING))
        # Prompts that nobody has read yet are as long as they may be.
        begin = self._rows_of(self._marks[-1])
        self.rows = replace(begin, is_beginning=True, longest_prompt=cfg.max_prompt_length or begin.longest_prompt)

    def __len__(self) -> int:
        raise TypeError("nobody knows how many prompts an epoch has that is read as the run goes")

    def agree_by(self, ask: Ask) -> None:
        """From here on all ranks read the same rows, or end together. ask: see there. Raises RowsError, on every rank."""
        self._ask = ask
        self._agree("", self._marks[-1])

    def take(self, count: int) -> list[Prompt]:
        """As of any stream. Raises RowsError, on every rank, where rows cannot be read, or are not what rows must be."""
        while self._marks[-1].end < self.taken + count:
            made, fault = NOTHING, ""
            try:
                made = self._next(self._marks[-1])
            except (ConfigError, OSError) as error:
                fault = str(error)
            self._agree(fault, made)
            self._remember(made)
        return super().take(count)

    def _agree(self, fault: str, mark: Mark) -> None:
        told = self._ask((fault, mark.digest))
        if faults := [one for one, _ in told if one]:
            raise RowsError(f"{faults[0]} Mend the rows, or take them out behind this place, and start the same command again")
        if len({digest for _, digest in told}) > 1:
            where = f"dataset: {self._named(mark).lower()} are not the same for all ranks."
            raise RowsError(f"{where} Give every machine the same files, and start the same command again")

    def state(self) -> dict[str, Any]:
        at = _place_among(self._marks, self.taken)
        marks = [asdict(mark) for mark in self._marks[max(0, at - REMEMBERED) :]]
        order = {"seed": self.seed, "shuffle": self.shuffle, "block_size": self._size}
        return {"streaming": True, "taken": self.taken, **order, "marks": marks}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        known = {(mark.epoch, mark.block): mark for mark in (*self._marks, *_marks_of(state))}
        self._marks = [known[key] for key in sorted(known)]

    def pictures_of(self, number: int) -> tuple[tuple[int, Image], ...]:
        return ()  # rows that show some are refused

    def _of_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        """Whether the block that the run stopped in is what it was: its rows are read, the others when they are asked for."""
        marks = _marks_of(state)
        at = marks[_place_among(marks, int(state["taken"]))]
        if at in self._marks or not at.num_rows:
            return []
        try:
            self._rows_of(at)
        except ConfigError as error:
            return list(error.problems)
        except OSError as error:
            return [problem_with("dataset", f"dataset: rows that this run was reading cannot be read any more: {error}.")]
        return []

    # ---- blocks

    def _found(self, number: int) -> tuple[PromptRows, int, int]:
        mark = self._marks[_place_among(self._marks, number)]
        try:
            while mark.end <= number:  # its place is not remembered
                mark = self._next(mark)
            rows = self._rows_of(mark)
        except (ConfigError, OSError) as error:  # which are for before a run
            raise RunError(str(error)) from error
        if self._order[0] != mark.first:
            count = mark.num_prompts
            self._order = (mark.first, permutation(count, self.seed, mark.epoch, mark.block) if self.shuffle else np.arange(count))
        return rows, int(self._order[1][number - mark.first]), mark.block * self._size

    def _next(self, mark: Mark) -> Mark:
        """The block behind another one, read and looked at. Raises ConfigError."""
        epoch, block, begins = mark.epoch, mark.block + 1, mark.first_of_epoch
        if mark.after is None:
            if mark.end == begins:
                message = f"No row of the whole data set can be trained on: {mark.left_out} are longer than max_prompt_length."
                raise config_error(("dataset", "max_prompt_length"), message)
            epoch, block, begins = mark.epoch + 1, 0, mark.end
        read, after = self._read(mark.after)
        rows = self._looked_at(read, block)
        num_prompts = 0 if rows is None else len(rows)
        made = Mark(
            epoch=epoch, block=block, begin=mark.after, after=after, first=mark.end, num_prompts=num_prompts, num_rows=len(read),
            first_of_epoch=begins, left_out=mark.left_out + len(read) - num_prompts, digest=_digest(read),
        )  # fmt: skip
        if rows is not None:
            self._hold(made, rows)
        return made

    def _rows_of(self, mark: Mark) -> PromptRows:
        """Raises ConfigError where they are not what they were."""
        key = (mark.epoch, mark.block)
        if key not in self._held or self._held[key][0] != mark:
            read, _ = self._read(mark.begin)
            if len(read) != mark.num_rows or _digest(read) != mark.digest:
                message = f"{self._named(mark)} of the data set are not what they were when this run read them. Restore them, or start \
afresh in another output_dir."
                raise config_error("dataset", message)
            rows = self._looked_at(read, mark.block)
            assert rows is not None and len(rows) == mark.num_prompts, "the same rows have been looked at before"
            self._hold(mark, rows)
        return self._held[key][1]

    def _looked_at(self, read: Sequence[Read], block: int) -> PromptRows | None:
        if not read:
            return None
        with _named(block * self._size, len(read), "dataset"):
            return self._look(_rows_of(read, "dataset"))

    def _read(self, begin: Any) -> tuple[list[Read], Any]:
        """(rows of the block that begins there, the place behind it: None where the epoch ends)."""
        going_on, self._going_on = self._going_on, None
        reader = going_on[1] if going_on is not None and going_on[0] == begin else self._source(begin)
        read = list(islice(reader, self._size))
        after = read[-1].after if len(read) == self._size else None
        if after is not None:
            self._going_on = (after, reader)
        return read, after

    def _hold(self, mark: Mark, rows: PromptRows) -> None:
        """Blocks that prompts are still taken from, and the one before them: prompts may be given back."""
        behind = [key for key, (one, _) in self._held.items() if one.end <= self.taken]
        for key in behind[:-1]:
            del self._held[key]
        self._held[mark.epoch, mark.block] = (mark, rows)

    def _remember(self, mark: Mark) -> None:
        self._marks = [*self._marks[:1], *self._marks[1:][-MOST_MARKS:], mark]
        count = mark.num_rows - mark.num_prompts
        if count and launcher.read().speaks:
            logger.warning(
                "dataset: %d of %s are longer than max_prompt_length and are left out (truncation_strategy delete); %s so far.",
                *(count, self._named(mark).lower(), f"{mark.left_out:,}"),
            )

    def _named(self, mark: Mark) -> str:
        first = mark.block * self._size
        return f"Rows {first:,} to {first + mark.num_rows - 1:,}"


def _marks_of(state: Mapping[str, Any]) -> list[Mark]:
    return [Mark(**fields) for fields in state["marks"]]


def _place_among(marks: Sequence[Mark], number: int) -> int:
    """Of the last one that begins at this prompt or before it."""
    return max(0, bisect_right(marks, number, key=lambda mark: mark.first) - 1)


def _digest(read: Sequence[Read]) -> int:
    """A checksum of rows: enough to notice other ones at the same place."""
    digest = 0
    for one in read:
        digest = zlib.crc32(checks.bytes_of(one.row) if isinstance(one.row, dict) else b"", digest)
    return digest


def _rows_of(read: Sequence[Read], flag: str) -> Rows:
    """Raises ConfigError with what are no rows."""
    bad = [f"{one.stands}: {one.row}" for one in read if isinstance(one.row, str)]
    if bad:
        named = f"{'; '.join(bad[:NAMED_ROWS])}{'; ...' if len(bad) > NAMED_ROWS else ''}"
        raise config_error(flag, f"{len(bad)} line(s) are not JSON objects: {named}.")
    return Rows([([one.row for one in read if isinstance(one.row, dict)], lambda index: read[index].stands)])


@contextmanager
def _named(first: int, count: int, flag: str) -> Iterator[None]:
    """Around what looks at rows: what is wrong with some is said of those that were read together."""
    try:
        yield
    except ConfigError as error:
        where = f"{flag}, rows {first:,} to {first + count - 1:,}, which streaming reads together: "
        raise ConfigError([replace(problem, message=where + problem.message) for problem in error.problems]) from error
