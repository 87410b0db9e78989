"""Pack whole sequences, or groups of them, into micro-batches under a token budget, evenly over data-parallel ranks. No torch.

Token weights are fixed before rows are packed, so the gradient does not depend on the packing (docs/parallelism.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_grpo.core.arrays import ragged

# Largest gap, in tokens, that the last two sequences may leave in a micro-batch before one that merely fits is taken.
MOST_GAPS_TRIED = 8
# Above this number of rows, each rank has many micro-batches, which are balanced without further work.
MOST_ROWS_SPREAD = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows(Sequence[list[np.ndarray]]):
    """Rows by data-parallel rank and micro-batch: `packed[dp_rank][number]` are the rows of a micro-batch, int64 [n].

    Args:
        rows: Row indices, rank by rank and micro-batch by micro-batch; int64 [rows].
        counts: Number of rows of each micro-batch, int64 [data-parallel ranks, micro-batches].
    """

    rows: np.ndarray
    counts: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        """Index in `rows` of the first row of each micro-batch, int64 [data-parallel ranks, micro-batches]."""
        return np.cumsum(self.counts).reshape(self.counts.shape) - self.counts

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, dp_rank: Any) -> Any:
        starts, counts = self.starts[dp_rank], self.counts[dp_rank]
        return [self.rows[start : start + count] for start, count in zip(starts, counts, strict=True)]


def pack(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    dp_size: int = 1,
    multiple: int = 1,
    balance_length: float = math.inf,
    costs: np.ndarray | None = None,
) -> PackedRows:
    """Pack rows into micro-batches, every row exactly once. The result is indexed by data-parallel rank, then micro-batch.

    Every rank gets the same number of micro-batches, and the n-th of each rank cost about the same, since ranks wait for each other there.

    Args:
        lengths: Tokens of each row in the stream, alignment included; int [rows].
        max_tokens: Token budget of one micro-batch. A longer row gets a micro-batch to itself.
        dp_size: Number of data-parallel ranks.
        multiple: The number of micro-batches on a rank is a multiple of it, as interleaved pipeline stages require.
        balance_length: Sequence length in tokens at which attention costs as much per token as all other computation; it only affects the
            balance.
        costs: Cost of each row, float [rows]; None computes it from `lengths` and `balance_length`.

    Raises:
        ValueError: There are fewer rows than micro-batches.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    unit = dp_size * multiple
    if len(lengths) < unit:
        raise ValueError(f"{len(lengths)} sequences cannot fill {dp_size} ranks x {multiple} micro-batches")
    cost_of_row = lengths + lengths / balance_length * lengths if costs is None else costs
    order, counts = _full_bins(lengths, max_tokens)
    num_bins = -(-len(counts) // unit) * unit
    balanced_bins = _spread(lengths, cost_of_row, num_bins, max_tokens) if len(lengths) <= MOST_ROWS_SPREAD else None
    if balanced_bins is not None:
        order, counts = (
            np.concatenate([np.array(rows, dtype=np.int64) for rows in balanced_bins]),
            np.array([len(rows) for rows in balanced_bins]),
        )
        starts, cost = np.cumsum(counts) - counts, np.array([cost_of_row[rows].sum() for rows in balanced_bins])
    else:
        order, starts, counts, cost = _split_until(order, counts, cost_of_row, num_bins)
    bins_of_ranks = _distribute(cost, dp_size)
    return PackedRows(order[ragged(starts, counts, bins_of_ranks.ravel())], counts[bins_of_ranks])


def segment_sums(values: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the sum of each stretch of `values`, rounded as `values[start : start + count].sum()` is.

    Args:
        values: float64 [n].
        starts: First element of each stretch, int64.
        counts: Elements of each stretch, int64 of the same shape.
    """
    result = np.empty(counts.shape)
    for count in np.unique(counts):
        has_count = counts == count
        result[has_count] = values[starts[has_count][:, None] + np.arange(count)].sum(axis=1)
    return result


def _full_bins(lengths: np.ndarray, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill bins; return their rows, bin by bin, and the number of rows in each.

    First-fit-decreasing, one bin after another: the longest rows that fit, and the last two such that they fill the bin exactly where such
    a pair exists. The filling of one bin is repeated as often as the rows allow, so the work grows with the number of different lengths.
    """
    clipped = np.clip(lengths, 1, max_tokens)
    by_length = np.argsort(clipped.astype(np.min_scalar_type(max_tokens)), kind="stable")  # 16 bits are sorted six times as fast as 64
    shelf = _RowCounts(np.bincount(clipped, minlength=max_tokens + 1))
    end = np.cumsum(shelf.left).tolist()  # rows of length n are by_length[end[n] - left[n] : end[n]]
    fillings: list[tuple[int, int]] = []  # (bins that are filled alike, rows in each)
    lines: list[tuple[int, int, int, int]] = []  # (filling, first row in by_length, rows in each bin, rows before them in the bin)
    while shelf.longest_within(max_tokens) > 0:
        chosen = _fill(shelf, max_tokens)
        times = 1 + min(shelf.left[length] // count for length, count in chosen.items())
        num_before = 0
        for length, count in chosen.items():
            size = times * count
            end[length] -= size
            lines.append((len(fillings), end[length], count, num_before))
            shelf.take(length, size - count)  # _fill took the first
            num_before += count
        fillings.append((times, num_before))
    bins, rows = np.array(fillings, dtype=np.int64).reshape(-1, 2).T
    filling, first, per_line, column = np.array(lines, dtype=np.int64).reshape(-1, 4).T
    size, begin = bins[filling] * per_line, (np.cumsum(bins * rows) - bins * rows)[filling]
    line = np.repeat(np.arange(len(size)), size)  # of each row in by_length, as are the next two
    position = np.arange(len(line)) - (np.cumsum(size) - size)[line]
    number, index_in_line = np.divmod(position, per_line[line])
    order = np.empty(len(line), dtype=np.int64)
    order[(begin + column)[line] + number * rows[filling][line] + index_in_line] = by_length[first[line] + position]
    return order, np.repeat(rows, bins)


class _RowCounts:
    """Number of remaining rows of each length, with fast queries."""

    def __init__(self, counts: np.ndarray):
        self.left = counts.tolist()
        self.size = len(counts)
        # The same flags in both directions: searches run forward through contiguous bytes.
        self.upward = counts > 0
        self.upward[0] = False
        self.downward = self.upward[::-1].copy()
        self._without_pair: set[int] = set()  # totals; rows are only taken, so they stay without

    def take(self, length: int, count: int) -> None:
        """Remove `count` rows of a length."""
        self.left[length] -= count
        if not self.left[length]:
            self.upward[length] = self.downward[self.size - 1 - length] = False

    def longest_within(self, capacity: int) -> int:
        """Return the largest remaining length of at most `capacity` tokens; 0 if nothing fits."""
        start = self.size - 1 - capacity
        distance = int(self.downward[start:].argmax())
        return capacity - distance if self.downward[start + distance] else 0

    def pair(self, total: int) -> tuple[int, ...]:
        """Return two remaining lengths with exactly this total, as equal as possible, which keeps short rows for later gaps.

        Returns an empty tuple if there is no such pair.
        """
        if total in self._without_pair:
            return ()
        half = total // 2
        if total == 2 * half and self.left[half] > 1:
            return half, half
        # Lengths half+1, half+2, ... against total-half-1, total-half-2, ...
        count, downward_start = total - half - 1, self.size - (total - half)
        has_both = self.upward[half + 1 : half + 1 + count] & self.downward[downward_start : downward_start + count]
        first_match = int(has_both.argmax()) if count else 0
        if count and has_both[first_match]:
            return half + 1 + first_match, total - half - 1 - first_match
        self._without_pair.add(total)
        return ()


def _fill(shelf: _RowCounts, max_tokens: int) -> dict[int, int]:
    """Take the rows of one bin from the shelf, beginning with the longest row left; return length -> number of rows."""
    chosen: dict[int, int] = {}
    capacity = max_tokens
    while (longest := shelf.longest_within(capacity)) > 0:
        # Far from full, several of a length at a time.
        pick = (longest,) * max(1, min(shelf.left[longest], capacity // longest - 2))
        if chosen and longest < capacity <= 2 * longest:
            pick = next(filter(None, map(shelf.pair, range(capacity, max(capacity - MOST_GAPS_TRIED, 1), -1))), pick)
        for length in pick:
            chosen[length] = chosen.get(length, 0) + 1
            shelf.take(length, 1)
            capacity -= length
    return chosen


def _spread(lengths: np.ndarray, cost_of_row: np.ndarray, num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Fill `num_bins` micro-batches of nearly equal cost: the costliest row left goes to the cheapest one with room.

    Returns None if a row finds no room. Filling one micro-batch after another would leave the last ones nearly empty; with few
    micro-batches per rank, a rank would then wait.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    capacity = [max_tokens] * num_bins
    heap = [(0.0, i) for i in range(num_bins)]
    for row in np.argsort(-cost_of_row, kind="stable").tolist():
        length, full = int(lengths[row]), []
        while heap and capacity[heap[0][1]] < length and bins[heap[0][1]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, i = heap[0]
        bins[i].append(row)
        capacity[i] -= length
        heapq.heapreplace(heap, (cost + float(cost_of_row[row]), i))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins if all(bins) else None


def _split_until(
    order: np.ndarray, counts: np.ndarray, cost_of_row: np.ndarray, num_bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split the costliest bins in two until there are `num_bins` bins.

    Args:
        counts: Rows of each bin.
        cost_of_row: Cost of each row.
        num_bins: Number of bins.

    Returns:
        Rows; of each bin the index of its first row among them, the number of its rows, and its cost.
    """
    starts = np.cumsum(counts) - counts
    cost, missing = segment_sums(cost_of_row[order], starts, counts), num_bins - len(counts)
    if not missing:
        return order, starts, counts, cost
    # Each split takes the costliest bin, so it is one of the `missing` costliest, or a part of one.
    divisible = np.flatnonzero(counts > 1)
    costliest = divisible[np.argsort(-cost[divisible], kind="stable")[:missing]].tolist()
    bins = {i: order[starts[i] : starts[i] + counts[i]] for i in costliest}
    heap = [(-float(cost[i]), i) for i in costliest]
    heapq.heapify(heap)
    costs = [*cost]
    for j in range(len(counts), num_bins):
        if not heap:
            raise ValueError(f"{len(order)} sequences cannot fill {num_bins} micro-batches")
        _, i = heapq.heappop(heap)
        bins[i], bins[j] = bins[i][::2], bins[i][1::2]  # rows lie sorted by length: both halves get long and short ones
        costs.append(0.0)
        for k in (i, j):
            costs[k] = cost_of_row[bins[k]].sum()
            if len(bins[k]) > 1:
                heapq.heappush(heap, (-float(costs[k]), k))
    starts, counts = (np.concatenate([values, np.zeros(missing, dtype=np.int64)]) for values in (starts, counts))
    changed, sizes = list(bins), np.array([len(rows) for rows in bins.values()])
    starts[changed], counts[changed] = len(order) + np.cumsum(sizes) - sizes, sizes
    return np.concatenate([order, *bins.values()]), starts, counts, np.array(costs)


def _distribute(cost: np.ndarray, dp_size: int) -> np.ndarray:
    """Distribute bins over ranks in rounds of similar cost; the costliest bin of a round goes to the rank with the lowest total.

    Returns:
        Bins, int64 [data-parallel rank, round].
    """
    rounds = np.argsort(-cost, kind="stable").reshape(-1, dp_size)
    total, ranks = [0.0] * dp_size, range(dp_size)
    orders: list[int] = []
    for round_costs in cost[rounds].tolist():
        order = sorted(ranks, key=total.__getitem__)
        orders += order
        for rank, added in zip(order, round_costs, strict=True):
            total[rank] += added
    result = np.empty_like(rounds)
    np.put_along_axis(result, np.array(orders).reshape(rounds.shape), rounds, axis=1)
    return result.T
