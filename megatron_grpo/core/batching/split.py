"""Partition the rows of a pass over ranks and micro-batches: integers in, indices out. No other module splits a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_grpo.core.arrays import RowLengths, SequenceLengths, ragged
from megatron_grpo.core.batching.batch_sizes import SCORED_TOKENS
from megatron_grpo.core.batching.pack import PackedRows
from megatron_grpo.core.batching.prefix_groups import Alignment, PrefixGroup, RowColumns, pack_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartitioner:
    """Partitioning of a batch over the data-parallel ranks. `batching.pack` documents `max_tokens` and `balance_length`.

    Args:
        multiple: Number that the micro-batches on a rank must be a multiple of.
        max_tokens: Maximum number of tokens; None: micro_batch_size completions each, whatever their lengths.
        scored_tokens: Tokens up to which rows that are only scored are packed, if micro-batches are smaller.
        pad_to_longest: Whether the n-th micro-batches of all ranks are padded to one length.
    """

    dp_size: int
    micro_batch_size: int
    alignment: Alignment = field(default_factory=Alignment)
    multiple: int = 1
    max_tokens: int | None = None
    scored_tokens: int = SCORED_TOKENS
    balance_length: float = math.inf
    pad_to_longest: bool = False
    # Rows of a group share their prefix if that saves at least this fraction of their tokens; None: never.
    min_saving_ratio: float | None = None

    @property
    def rows_per_slice(self) -> int:
        """Completions of one micro-step, over all data-parallel ranks."""
        return self.micro_batch_size * self.dp_size

    def num_missing(self, num_rows: int) -> int:
        """Return how many rows must be added, so that no micro-batch is empty even if each holds a single row.

        Args:
            num_rows: Number of rows.
        """
        unit = self.dp_size * self.multiple
        return max(-num_rows % unit, unit - num_rows)

    def find_dp_rank(self, row: np.ndarray) -> np.ndarray:
        """Return the data-parallel rank that trains each row, unless a token budget rearranges rows.

        Args:
            row: Index of each row in its rollout, int64 [n].
        """
        return row // self.micro_batch_size % self.dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSpec:
    """One micro-batch: its rows, which of them may share a prefix, and the minimum length of its packed stream.

    Args:
        rows: Indices into the partitioned list.
        prefix_groups: Prefix groups, whose members are indices into `rows`.
        at_least: Minimum tokens in its stream.
        num_tokens: Maximum tokens in its stream.
    """

    rows: tuple[int, ...]
    prefix_groups: tuple[PrefixGroup, ...]
    at_least: int
    num_tokens: int


class Partition(Sequence[list[MicroBatchSpec]]):
    """Micro-batches of all data-parallel ranks: `partition[dp_rank]` is the list of a rank's, which is made when it is asked for.

    `num_tokens` are the maximum tokens in the stream of each, int64 [data-parallel ranks, micro-batches].
    """

    def __init__(self, rows: RowColumns, packed: PackedRows, cut: BatchPartitioner):
        self.packed, self._rows, self._cut = packed, rows, cut
        self.num_tokens = _num_tokens(rows, packed, cut.alignment)
        self._longest = self.num_tokens.max(axis=0) if cut.pad_to_longest else np.zeros(packed.counts.shape[1], dtype=np.int64)

    @property
    def dp_ranks(self) -> np.ndarray:
        """Data-parallel rank of each row, int64 [rows]."""
        result = np.empty(len(self.packed.rows), dtype=np.int64)
        result[self.packed.rows] = np.repeat(np.arange(len(self)), self.packed.counts.sum(axis=1))
        return result

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, dp_rank: Any) -> Any:
        micro_batches = zip(self.packed[dp_rank], self._longest.tolist(), self.num_tokens[dp_rank].tolist(), strict=True)
        return [
            MicroBatchSpec(rows=rows, prefix_groups=self._prefix_groups(rows), at_least=least, num_tokens=tokens)
            for rows, least, tokens in ((tuple(members.tolist()), least, tokens) for members, least, tokens in micro_batches)
        ]

    def _prefix_groups(self, members: tuple[int, ...]) -> tuple[PrefixGroup, ...]:
        if self._cut.min_saving_ratio is None:
            return ()
        by_group: dict[int, list[int]] = {}
        for index, row in enumerate(members):
            by_group.setdefault(int(self._rows.group[row]), []).append(index)
        return tuple(
            PrefixGroup(tuple(indices), int(self._rows.prefix[members[indices[0]]]), self._cut.min_saving_ratio)
            for indices in by_group.values()
        )


def partition(lengths: RowLengths | Sequence[SequenceLengths], cut: BatchPartitioner) -> Partition:
    """Partition rows into micro-batches, every row exactly once. The result is indexed by data-parallel rank, then micro-batch.

    Every rank gets the same number of micro-batches, a multiple of `cut.multiple`. Without a token budget, rows follow the training
    schedule: slices in order, each distributed in rank order. Rows that do not fill all micro-batches are spread evenly over as few as
    possible. With a token budget, rows are rearranged (`batching.pack`), and groups stay together where possible.

    Args:
        lengths: Lengths of each row, in tokens.

    Raises:
        ValueError: There are fewer rows than micro-batches.
    """
    rows = RowColumns.from_lengths(lengths, cut.alignment, balance_length=cut.balance_length, min_saving_ratio=cut.min_saving_ratio)
    min_saving_ratio = cut.min_saving_ratio or 0.0
    if cut.max_tokens is not None:
        # The stream is rounded up at its end. It stays within a budget that is a multiple of its alignment.
        grain = cut.alignment.grain
        budget = max(cut.max_tokens // grain * grain, grain)
        rows = rows.worth(rows.group, min_saving_ratio)
        packed = pack_groups(rows, max_tokens=budget, dp_size=cut.dp_size, multiple=cut.multiple)
    else:
        count = -(-len(rows) // (cut.rows_per_slice * cut.multiple)) * cut.multiple  # micro-batches of each rank
        if not 0 < count * cut.dp_size <= len(rows):
            raise ValueError(f"{len(rows)} sequences cannot fill {cut.dp_size} ranks x {count} micro-batches")
        numbers = np.arange(count * cut.dp_size).reshape(count, cut.dp_size).T  # in the order of the rows
        counts = len(rows) // numbers.size + (np.arange(numbers.size) < len(rows) % numbers.size)
        packed = PackedRows(ragged(np.cumsum(counts) - counts, counts, numbers.ravel()), counts[numbers])
        rows = rows.worth(_pieces(rows, packed)[0], min_saving_ratio)
    return Partition(rows, packed, cut)


def _pieces(rows: RowColumns, packed: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return (piece of each row, micro-batch of each piece). Rows of a group in one micro-batch are a piece. Rank by rank."""
    count = packed.counts.size
    number = np.empty(len(rows), dtype=np.int64)
    number[packed.rows] = np.repeat(np.arange(count), packed.counts.ravel())
    keys, piece = np.unique(rows.group * count + number, return_inverse=True)
    return piece, keys % count


def _num_tokens(rows: RowColumns, packed: PackedRows, alignment: Alignment) -> np.ndarray:
    """Return the tokens in the stream of each micro-batch; int64 [data-parallel rank, micro-batch]."""
    piece, micro_batch = _pieces(rows, packed)
    totals = np.bincount(micro_batch, weights=rows.sizes(piece)[0]).astype(np.int64)
    return (-(-np.maximum(totals, 1) // alignment.grain) * alignment.grain).reshape(packed.counts.shape)  # as `Alignment.count_stream`


def partition_padded(lengths: RowLengths | Sequence[SequenceLengths], cut: BatchPartitioner) -> Partition:
    """Partition rows for a pass that trains nothing; if there are too few for all micro-batches, copies of row 0 are added.

    Indices beyond the rows are those copies; their results are discarded.

    Args:
        lengths: As in `partition`.
        cut: As in `partition`.
    """
    index = np.concatenate([np.arange(len(lengths)), np.zeros(cut.num_missing(len(lengths)), dtype=np.int64)])
    return partition(RowLengths.from_rows(lengths).take(index), cut)


def partition_for_scoring(lengths: RowLengths | Sequence[SequenceLengths], cut: BatchPartitioner) -> Partition:
    """Partition rows as `partition_padded` does, for a pass without a backward: small micro-batches are merged.

    Such a pass keeps the activations of one layer alone, so streams may be longer than in training.

    Args:
        lengths: As in `partition`.
        cut: As in `partition`. Micro-batches are packed up to `cut.scored_tokens`, if they are smaller.
    """
    partition_of_rows = partition_padded(lengths, cut)
    if (cut.max_tokens or partition_of_rows.num_tokens.max()) >= cut.scored_tokens:
        return partition_of_rows
    return partition_padded(lengths, replace(cut, max_tokens=cut.scored_tokens))
