"""Deals the rows of a pass to ranks and micro-batches: integers in, places out. Nothing else cuts a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.batching.collate import Alignment
from megatron_grpo.batching.pack import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """How a batch is cut for the data-parallel ranks. `max_tokens` and `even_length`: see `batching.pack`."""

    dp_size: int
    micro_batch_size: int
    alignment: Alignment = field(default_factory=Alignment)
    multiple: int = 1  # micro-batches on a rank are a multiple of it
    max_tokens: int | None = None  # None: micro_batch_size completions each, whatever their lengths
    even_length: float = math.inf
    even_streams: bool = False  # the n-th micro-batches of all ranks are padded to one length

    @property
    def rows_per_slice(self) -> int:
        """Completions of one micro-step, over all data-parallel ranks."""
        return self.micro_batch_size * self.dp_size

    def home_of(self, row: int) -> int:
        """The data-parallel rank that trains a row of a rollout, unless a token budget rearranges rows."""
        return row // self.micro_batch_size % self.dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One micro-batch: which rows, and the least length of its stream, in tokens."""

    rows: tuple[int, ...]  # places in the list that was dealt
    at_least: int


def deal(contexts: Sequence[Sequence[int]], cut: BatchCut) -> list[list[Portion]]:
    """[data-parallel rank][micro-batch]: every row exactly once. Every rank gets as many micro-batches, a multiple of `cut.multiple`.

    contexts: tokens of each context of each row. As the timetable has it: slices in order, each shared out in rank order. With a token
    budget: rearranged (`batching.pack`). Raises ValueError where the rows do not come out even.
    """
    lengths = [cut.alignment.of_contexts(row) for row in contexts]
    if cut.max_tokens is not None:
        # The stream is rounded up at its end: a budget that is a multiple of what it is rounded to is kept all the same.
        grain = cut.alignment.grain
        budget = max(cut.max_tokens // grain * grain, grain)
        dealt = pack(lengths, max_tokens=budget, dp_size=cut.dp_size, multiple=cut.multiple, even_length=cut.even_length)
    else:
        if len(lengths) % (cut.rows_per_slice * cut.multiple):
            raise ValueError(f"{len(lengths)} samples are no multiple of {cut.rows_per_slice} x {cut.multiple}")
        dealt = np.arange(len(lengths)).reshape(-1, cut.dp_size, cut.micro_batch_size).swapaxes(0, 1).tolist()
    longest = [0] * len(dealt[0])
    if cut.even_streams:
        longest = [
            max(cut.alignment.of_stream(sum(lengths[i] for i in rows)) for rows in together) for together in zip(*dealt, strict=True)
        ]
    return [[Portion(rows=tuple(rows), at_least=least) for rows, least in zip(mine, longest, strict=True)] for mine in dealt]


def deal_filled(contexts: Sequence[Sequence[int]], cut: BatchCut) -> list[list[Portion]]:
    """As `deal`, for a pass that trains nothing: rows that do not come out even are filled up with the first one again.

    Places beyond the rows are copies of row 0, whose results nobody needs.
    """
    missing = -len(contexts) % (cut.rows_per_slice * cut.multiple)
    return deal([*contexts, *[contexts[0]] * missing], cut)
