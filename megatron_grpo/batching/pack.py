"""Pack whole sequences, or groups of them, into micro-batches under a token budget, evenly over data-parallel ranks. No torch.

Token weights are fixed before rows are packed, so the gradient does not depend on the packing (docs/parallelism.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

# Largest gap, in tokens, that the last two sequences may leave in a micro-batch before one that merely fits is taken.
MOST_GAPS_TRIED = 8
# Above this number of rows, each rank has many micro-batches, which are balanced without further work.
MOST_ROWS_SPREAD = 20_000


def pack(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    dp_size: int = 1,
    multiple: int = 1,
    balance_length: float = math.inf,
    costs: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Pack rows into micro-batches: [data-parallel rank][micro-batch] -> rows, every row exactly once.

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
    bins: list[list[int]] = []
    cost_of_bins: list[np.ndarray] = []
    for rows in _full_bins(lengths, max_tokens):
        bins += rows.tolist()
        cost_of_bins.append(cost_of_row[rows].sum(axis=1))
    wanted = -(-len(bins) // unit) * unit
    even = _spread(lengths, cost_of_row, wanted, max_tokens) if len(lengths) <= MOST_ROWS_SPREAD else None
    if even is not None:
        bins = even
        cost = np.array([cost_of_row[rows].sum() for rows in bins])
    else:
        cost = _split_until(bins, np.concatenate(cost_of_bins), cost_of_row, wanted)
    return [[bins[i] for i in mine] for mine in _distribute(cost, dp_size)]


def _full_bins(lengths: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Yield arrays [bins, rows] of bins that are filled alike.

    First-fit-decreasing, one bin after another: the longest rows that fit, and the last two such that they fill the bin exactly where such
    a pair exists. The filling of one bin is repeated as often as the rows allow, so the work grows with the number of different lengths.
    """
    clipped = np.clip(lengths, 1, max_tokens)
    by_length = np.argsort(clipped, kind="stable")
    shelf = _Shelf(np.bincount(clipped, minlength=max_tokens + 1))
    end = np.cumsum(shelf.left).tolist()  # rows of length n are by_length[end[n] - left[n] : end[n]]
    while shelf.longest_within(max_tokens) > 0:
        chosen = _fill(shelf, max_tokens)
        times = 1 + min(shelf.left[length] // count for length, count in chosen.items())
        columns = []
        for length, count in chosen.items():
            size = times * count
            columns.append(by_length[end[length] - size : end[length]].reshape(times, count))
            end[length] -= size
            shelf.take(length, size - count)  # _fill took the first
        yield np.concatenate(columns, axis=1)


class _Shelf:
    """Number of remaining rows of each length, with fast queries."""

    def __init__(self, counts: np.ndarray):
        self.left = counts.tolist()
        self.size = len(counts)
        # The same flags in both directions: searches run forward through contiguous bytes.
        self.upward = counts > 0
        self.upward[0] = False
        self.downward = self.upward[::-1].copy()

    def take(self, length: int, count: int) -> None:
        """Remove `count` rows of a length."""
        self.left[length] -= count
        if not self.left[length]:
            self.upward[length] = self.downward[self.size - 1 - length] = False

    def longest_within(self, capacity: int) -> int:
        """Return the largest remaining length of at most `capacity` tokens; 0 if nothing fits."""
        start = self.size - 1 - capacity
        place = int(self.downward[start:].argmax())
        return capacity - place if self.downward[start + place] else 0

    def pair(self, total: int) -> tuple[int, ...]:
        """Return two remaining lengths with exactly this total, as equal as possible, which keeps short rows for later gaps.

        Returns an empty tuple if there is no such pair.
        """
        half = total // 2
        if total == 2 * half and self.left[half] > 1:
            return half, half
        # Lengths half+1, half+2, ... against total-half-1, total-half-2, ...
        count, other = total - half - 1, self.size - (total - half)
        both = self.upward[half + 1 : half + 1 + count] & self.downward[other : other + count]
        place = int(both.argmax()) if count else 0
        return (half + 1 + place, total - half - 1 - place) if count and both[place] else ()


def _fill(shelf: _Shelf, max_tokens: int) -> dict[int, int]:
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


def _spread(lengths: np.ndarray, cost_of_row: np.ndarray, wanted: int, max_tokens: int) -> list[list[int]] | None:
    """Fill `wanted` micro-batches of nearly equal cost: the costliest row left goes to the cheapest one with room.

    Returns None if a row finds no room. Filling one micro-batch after another would leave the last ones nearly empty; with few
    micro-batches per rank, a rank would then wait.
    """
    bins: list[list[int]] = [[] for _ in range(wanted)]
    capacity = [max_tokens] * wanted
    heap = [(0.0, i) for i in range(wanted)]
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


def _split_until(bins: list[list[int]], cost: np.ndarray, cost_of_row: np.ndarray, wanted: int) -> np.ndarray:
    """Split the costliest bins in two, in place, until there are `wanted` bins; return the cost of each."""
    missing = wanted - len(bins)
    heap = [(-float(cost[i]), int(i)) for i in np.argsort(-cost)[: len(bins)] if len(bins[i]) > 1] if missing else []
    heapq.heapify(heap)
    cost = np.concatenate([cost, np.zeros(missing)])
    for _ in range(missing):
        if not heap:
            raise ValueError(f"{sum(map(len, bins))} sequences cannot fill {wanted} micro-batches")
        _, i = heapq.heappop(heap)
        halves = bins[i][::2], bins[i][1::2]  # rows lie sorted by length: both halves get long and short ones
        bins[i] = halves[0]
        bins.append(halves[1])
        for j in (i, len(bins) - 1):
            cost[j] = cost_of_row[bins[j]].sum()
            if len(bins[j]) > 1:
                heapq.heappush(heap, (-float(cost[j]), j))
    return cost


def _distribute(cost: np.ndarray, dp_size: int) -> list[list[int]]:
    """Distribute bins over ranks in rounds of similar cost; the costliest bin of a round goes to the rank with the lowest total."""
    rounds = np.argsort(-cost, kind="stable").reshape(-1, dp_size)
    total = np.zeros(dp_size)
    for number, round_ in enumerate(rounds):
        order = np.argsort(total, kind="stable")
        dealt = np.empty_like(round_)
        dealt[order] = round_
        rounds[number] = dealt
        total += cost[dealt]
    return rounds.T.tolist()
