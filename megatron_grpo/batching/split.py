"""Deals the rows of a pass to ranks and micro-batches: integers in, places out. Nothing else cuts a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_grpo.batching.batch_sizes import SCORED_TOKENS
from megatron_grpo.batching.prefix_groups import Alignment, PrefixGroup, RowColumns, pack_groups
from megatron_grpo.types import SequenceLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartitioner:
    """How a batch is cut for the data-parallel ranks. `max_tokens` and `balance_length`: see `batching.pack`."""

    dp_size: int
    micro_batch_size: int
    alignment: Alignment = field(default_factory=Alignment)
    multiple: int = 1  # micro-batches on a rank are a multiple of it
    max_tokens: int | None = None  # None: micro_batch_size completions each, whatever their lengths
    scored_tokens: int = SCORED_TOKENS  # what is only scored is packed up to this, if micro-batches are smaller
    balance_length: float = math.inf
    pad_to_longest: bool = False  # the n-th micro-batches of all ranks are padded to one length
    # Rows of a group share what they begin with if this part of their tokens, at least, need not be computed then; None: never.
    min_saving_ratio: float | None = None

    @property
    def rows_per_slice(self) -> int:
        """Completions of one micro-step, over all data-parallel ranks."""
        return self.micro_batch_size * self.dp_size

    def dp_rank_of(self, row: int) -> int:
        """The data-parallel rank that trains a row of a rollout, unless a token budget rearranges rows."""
        return row // self.micro_batch_size % self.dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSpec:
    """One micro-batch: which rows, which of them may share what they begin with, and the least length of its stream."""

    rows: tuple[int, ...]  # places in the list that was dealt
    families: tuple[PrefixGroup, ...]  # their members are places in `rows`
    at_least: int  # tokens
    num_tokens: int  # in its stream, at most


def partition(extents: Sequence[SequenceLengths], cut: BatchPartitioner) -> list[list[MicroBatchSpec]]:
    """[data-parallel rank][micro-batch]: every row exactly once. Every rank gets as many micro-batches, a multiple of `cut.multiple`.

    As the timetable has it: slices in order, each shared out in rank order. With a token budget: rearranged (`batching.pack`), groups kept
    together where that is possible. Raises ValueError where the rows do not come out even.
    """
    rows = RowColumns.of(extents, cut.alignment, balance_length=cut.balance_length, min_saving_ratio=cut.min_saving_ratio)
    min_saving_ratio = cut.min_saving_ratio or 0.0
    if cut.max_tokens is not None:
        # The stream is rounded up at its end: a budget that is a multiple of what it is rounded to is kept all the same.
        grain = cut.alignment.grain
        budget = max(cut.max_tokens // grain * grain, grain)
        rows = rows.worth(rows.group, min_saving_ratio)
        dealt = pack_groups(rows, max_tokens=budget, dp_size=cut.dp_size, multiple=cut.multiple)
    else:
        if len(rows) % (cut.rows_per_slice * cut.multiple):
            raise ValueError(f"{len(rows)} samples are no multiple of {cut.rows_per_slice} x {cut.multiple}")
        dealt = np.arange(len(rows)).reshape(-1, cut.dp_size, cut.micro_batch_size).swapaxes(0, 1).tolist()
        rows = rows.worth(_pieces(rows, dealt)[0], min_saving_ratio)
    num_tokens = _num_tokens(rows, dealt, cut.alignment)
    longest = num_tokens.max(axis=0) if cut.pad_to_longest else np.zeros(len(dealt[0]), dtype=np.int64)
    return [
        [
            MicroBatchSpec(rows=tuple(members), families=_families(rows, members, cut), at_least=int(least), num_tokens=int(tokens))
            for members, least, tokens in zip(mine, longest, of_mine, strict=True)
        ]
        for mine, of_mine in zip(dealt, num_tokens, strict=True)
    ]


def _pieces(rows: RowColumns, dealt: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """(piece of each row, micro-batch of each piece): rows of a group that meet in one are a piece. Rank by rank."""
    micro_batches = [members for mine in dealt for members in mine]
    number = np.empty(len(rows), dtype=np.int64)
    number[np.concatenate(micro_batches)] = np.repeat(np.arange(len(micro_batches)), [len(members) for members in micro_batches])
    keys, piece = np.unique(rows.group * len(micro_batches) + number, return_inverse=True)
    return piece, keys % len(micro_batches)


def _num_tokens(rows: RowColumns, dealt: list[list[list[int]]], alignment: Alignment) -> np.ndarray:
    """Tokens in the stream of each micro-batch, [data-parallel rank, micro-batch]."""
    piece, micro_batch = _pieces(rows, dealt)
    totals = np.bincount(micro_batch, weights=rows.sizes(piece)[0]).astype(np.int64)
    return np.array([alignment.of_stream(int(total)) for total in totals]).reshape(len(dealt), -1)


def _families(rows: RowColumns, members: Sequence[int], cut: BatchPartitioner) -> tuple[PrefixGroup, ...]:
    if cut.min_saving_ratio is None:
        return ()
    by_group: dict[int, list[int]] = {}
    for place, row in enumerate(members):
        by_group.setdefault(int(rows.group[row]), []).append(place)
    return tuple(PrefixGroup(tuple(places), int(rows.prefix[members[places[0]]]), cut.min_saving_ratio) for places in by_group.values())


def partition_padded(extents: Sequence[SequenceLengths], cut: BatchPartitioner) -> list[list[MicroBatchSpec]]:
    """As `partition`, for a pass that trains nothing: rows that do not come out even are filled up with the first one again.

    Places beyond the rows are copies of row 0, whose results nobody needs.
    """
    missing = -len(extents) % (cut.rows_per_slice * cut.multiple)
    return partition([*extents, *[extents[0]] * missing], cut)


def partition_for_scoring(extents: Sequence[SequenceLengths], cut: BatchPartitioner) -> list[list[MicroBatchSpec]]:
    """As `partition_padded`, for a pass without a backward: it keeps one layer's activations alone, so small micro-batches are put
    together.
    """
    dealt = partition_padded(extents, cut)
    if (cut.max_tokens or max(portion.num_tokens for mine in dealt for portion in mine)) >= cut.scored_tokens:
        return dealt
    return partition_padded(extents, replace(cut, max_tokens=cut.scored_tokens))
