"""Whole sequences, or groups of them, into micro-batches of at most so many tokens, evenly over data-parallel ranks. No torch.

Token weights are fixed before rows are packed, so the gradient does not depend on how they are (docs/parallelism.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_grpo.batching.prefix_groups import Alignment
from megatron_grpo.types import Extent

# How far from a full micro-batch the last two sequences may end before one that merely fits is taken, in tokens.
MOST_GAPS_TRIED = 8
# Above, micro-batches are many to a rank, and even without further care.
MOST_ROWS_SPREAD = 20_000
# A group is cut into pieces no dearer than an even share of a micro-batch on every rank; or than these parts of it, until ranks are even.
PARTS_OF_A_SHARE = (1, 2, 4, 8)
EVEN_ENOUGH = 0.97  # mean over slowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Columns over rows: all that packing knows of them. Tokens include alignment; costs are tokens and, in their measure, attention.

    A row by itself takes `apart`. A piece of a group, which computes the group's prefix once, takes `trunk` and the `tails` of its rows.
    """

    group: np.ndarray  # int64, 0..; a row that shares with none has one of its own
    prefix: np.ndarray  # int64, 0 if the row shares nothing
    apart: np.ndarray  # int64
    apart_cost: np.ndarray  # float64
    trunk: np.ndarray  # int64
    trunk_cost: np.ndarray  # float64
    tail: np.ndarray  # int64
    tail_cost: np.ndarray  # float64

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def of(cls, extents: Sequence[Extent], alignment: Alignment, *, even_length: float, least_saving: float | None) -> Rows:
        """even_length: see `pack`. least_saving: None if nothing is to be shared."""
        numbers: dict[object, int] = {}
        names = (extent.group if least_saving is not None and extent.group is not None else -1 - i for i, extent in enumerate(extents))
        group = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
        return cls.of_columns(
            group=group,
            prefix=np.array([extent.prefix for extent in extents], dtype=np.int64) * (least_saving is not None),
            num_contexts=np.array([len(extent.contexts) for extent in extents], dtype=np.int64),
            computed=np.array([tokens - 1 for extent in extents for tokens in extent.contexts], dtype=np.int64),
            alignment=alignment,
            even_length=even_length,
        )

    @classmethod
    def of_columns(
        cls, *, group: np.ndarray, prefix: np.ndarray, num_contexts: np.ndarray, computed: np.ndarray, alignment: Alignment,
        even_length: float,
    ) -> Rows:  # fmt: skip
        """computed: of each context, row by row."""
        row = np.repeat(np.arange(len(group)), num_contexts)
        # Attention pairs every query with every key before it: half of length^2, and for a child all of the trunk besides.
        apart, trunk = alignment.of_segment(computed), alignment.of_segment(prefix)
        tail = alignment.of_segment(computed - prefix[row])
        apart_cost = apart + apart / even_length * apart
        tail_cost = tail + (tail + 2 * trunk[row]) / even_length * tail

        def of_rows(values: np.ndarray) -> np.ndarray:
            return np.bincount(row, weights=values, minlength=len(group)) if len(row) > len(group) else values

        return cls(
            group=group,
            prefix=prefix,
            apart=of_rows(apart).astype(np.int64),
            apart_cost=of_rows(apart_cost),
            trunk=trunk,
            trunk_cost=trunk + trunk / even_length * trunk,
            tail=of_rows(tail).astype(np.int64),
            tail_cost=of_rows(tail_cost),
        )

    def worth(self, together: np.ndarray, least_saving: float) -> Rows:
        """The same rows; those with one number in `together` share their prefix only if that part of their tokens need not be computed."""
        apart, shared = _sums(together, self.apart), _sums(together, self.tail)
        trunk = np.zeros_like(shared)
        trunk[together] = self.trunk
        pays = ((trunk + shared < apart) & (trunk + shared <= (1 - least_saving) * apart))[together]
        return replace(
            self,
            prefix=np.where(pays, self.prefix, 0),
            trunk=np.where(pays, self.trunk, 0),
            trunk_cost=np.where(pays, self.trunk_cost, 0.0),
            tail=np.where(pays, self.tail, self.apart),
            tail_cost=np.where(pays, self.tail_cost, self.apart_cost),
        )

    def sizes(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, cost) of each piece. piece: of each row, numbers 0.. without a gap; rows of a piece are of one group."""
        apart, tails = _sums(piece, self.apart), _sums(piece, self.tail)
        trunk, trunk_cost = np.zeros_like(tails), np.zeros(len(tails))
        trunk[piece], trunk_cost[piece] = self.trunk, self.trunk_cost
        is_shared = trunk + tails < apart
        cost = np.where(is_shared, trunk_cost + np.bincount(piece, self.tail_cost), np.bincount(piece, self.apart_cost))
        return np.where(is_shared, trunk + tails, apart), cost


def _sums(number: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.bincount(number, weights=values).astype(np.int64)  # exact: token counts are far below 2^53


def pack_groups(rows: Rows, *, max_tokens: int, dp_size: int = 1, multiple: int = 1) -> list[list[list[int]]]:
    """As `pack`, where rows of a group that meet in a micro-batch share their prefix: [data-parallel rank][micro-batch] -> rows.

    A group stays together if the budget, the number of micro-batches and the balance of ranks allow it; each piece computes the prefix
    once. A piece takes at most the budget, or what its longest row takes by itself. ValueError as from `pack`.
    """
    sizes = {"max_tokens": max_tokens, "dp_size": dp_size, "multiple": multiple}
    if not rows.prefix.any():
        return pack(rows.apart, costs=rows.apart_cost, **sizes)
    whole = _within_budget(rows, max_tokens)
    total = rows.sizes(whole)[1].sum()
    best: list[list[list[int]]] = []
    fastest = math.inf
    for parts in PARTS_OF_A_SHARE:
        piece = _no_dearer_than(total / (dp_size * multiple * parts), rows, whole)
        piece, dealt = _pack_pieces(rows, piece, **sizes)
        cost = rows.sizes(piece)[1]
        of_rounds = np.array([[cost[pieces].sum() for pieces in mine] for mine in dealt])
        time = of_rounds.max(axis=0).sum()  # ranks wait for each other at every micro-batch
        if time < fastest:
            best, fastest = _rows_of(piece, dealt), time
        if of_rounds.sum() >= EVEN_ENOUGH * time * dp_size:
            break
    return best


def _pack_pieces(rows: Rows, piece: np.ndarray, **sizes: int) -> tuple[np.ndarray, list[list[list[int]]]]:
    """(piece of each row, [rank][micro-batch] -> pieces). The dearest are halved while they are too few, half of the missing at once."""
    unit = sizes["dp_size"] * sizes["multiple"]
    while True:
        tokens, cost = rows.sizes(piece)
        try:
            return piece, pack(tokens, costs=cost, **sizes)
        except ValueError:
            cost[np.bincount(piece) == 1] = -1.0
            if cost.max() < 0:
                raise
            dearest = np.argsort(-cost, kind="stable")[: max(-len(cost) % unit // 2, 1)]
            which = np.zeros(len(cost), dtype=bool)
            which[dearest] = cost[dearest] >= 0
            piece = _halved(rows, piece, which)


def _rows_of(piece: np.ndarray, dealt: list[list[list[int]]]) -> list[list[list[int]]]:
    order = np.argsort(piece, kind="stable").tolist()
    end = np.cumsum(np.bincount(piece)).tolist()
    begin = [0, *end]
    return [[[row for i in pieces for row in order[begin[i] : end[i]]] for pieces in mine] for mine in dealt]


def _within_budget(rows: Rows, max_tokens: int) -> np.ndarray:
    """The piece of each row: groups, and in as few pieces as fit where a group takes more than the budget."""
    shares = rows.prefix > 0
    key = np.where(shares, rows.group, rows.group.max() + 1 + np.arange(len(rows)))
    piece = np.unique(key, return_inverse=True)[1]
    tokens, _ = rows.sizes(piece)
    longest = np.zeros_like(tokens)
    np.maximum.at(longest, piece, rows.apart)
    limit = np.maximum(longest, max_tokens)
    large = np.flatnonzero((tokens > limit)[piece])
    if not len(large):
        return piece
    # The rows of each large group, longest first, as a line of a matrix; then each column into the first piece of its line with room.
    large = large[np.lexsort((-rows.tail[large], piece[large]))]
    _, first, line = np.unique(piece[large], return_index=True, return_inverse=True)
    column = np.arange(len(large)) - first[line]
    shape = len(first), int(column.max()) + 1
    tails, used = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    tails[line, column] = rows.tail[large]
    into = np.zeros(shape, dtype=np.int64)
    room = (limit[piece[large[first]]] - rows.trunk[large[first]])[:, None]
    for number in range(shape[1]):
        tail = tails[:, number, None]
        chosen = ((used == 0) | (used + tail <= room)).argmax(axis=1)
        used[np.arange(shape[0]), chosen] += tail[:, 0]
        into[:, number] = chosen
    key = piece * shape[1]
    key[large] += into[line, column]
    return np.unique(key, return_inverse=True)[1]


def _no_dearer_than(limit: float, rows: Rows, piece: np.ndarray) -> np.ndarray:
    while True:
        _, cost = rows.sizes(piece)
        dear = (cost > limit) & (np.bincount(piece) > 1)
        if not dear.any():
            return piece
        piece = _halved(rows, piece, dear)


def _halved(rows: Rows, piece: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The piece of each row, where each of `which` has become two. Both get long and short rows."""
    cut = np.flatnonzero(which[piece])
    cut = cut[np.lexsort((rows.tail[cut], piece[cut]))]
    _, first, line = np.unique(piece[cut], return_index=True, return_inverse=True)
    is_second = (np.arange(len(cut)) - first[line]) % 2 == 1
    piece = piece.copy()
    piece[cut[is_second]] = len(which) + line[is_second]
    return piece


def pack(
    lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    dp_size: int = 1,
    multiple: int = 1,
    even_length: float = math.inf,
    costs: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """[data-parallel rank][micro-batch] -> rows, every row exactly once.

    lengths: tokens of each row as they will lie in the stream (alignment included). max_tokens: of one micro-batch; a longer row gets one
    of its own. multiple: the number of micro-batches on a rank is a multiple of it (interleaved pipeline stages ask for that).
    even_length: the length at which attention costs a token as much as everything else does; it only steers the balance. costs: of each
    row, instead of what even_length says.

    Every rank gets as many micro-batches, and the n-th of each rank cost about the same, since ranks wait for each other there.
    ValueError where there are too few rows for one in every micro-batch.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    unit = dp_size * multiple
    if len(lengths) < unit:
        raise ValueError(f"{len(lengths)} sequences cannot fill {dp_size} ranks x {multiple} micro-batches")
    cost_of_row = lengths + lengths / even_length * lengths if costs is None else costs
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
    return [[bins[i] for i in mine] for mine in _deal(cost, dp_size)]


def _full_bins(lengths: np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Arrays [bins, rows] of bins that are filled alike.

    First-fit-decreasing, one bin after another: the longest rows that fit, and the last two so that nothing is left over where such a pair
    exists. What is found for one bin is done for as many as the rows allow, so the work grows with the number of different lengths.
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
    """How many rows are left of each length, and quick answers about it."""

    def __init__(self, counts: np.ndarray):
        self.left = counts.tolist()
        self.size = len(counts)
        # The same flags in both directions: searches run forward through contiguous bytes.
        self.upward = counts > 0
        self.upward[0] = False
        self.downward = self.upward[::-1].copy()

    def take(self, length: int, count: int) -> None:
        self.left[length] -= count
        if not self.left[length]:
            self.upward[length] = self.downward[self.size - 1 - length] = False

    def longest_within(self, room: int) -> int:
        """0 where nothing fits."""
        start = self.size - 1 - room
        place = int(self.downward[start:].argmax())
        return room - place if self.downward[start + place] else 0

    def pair(self, total: int) -> tuple[int, ...]:
        """Two lengths of exactly this total, as equal as can be: short rows are kept for later gaps. Nothing where there are none."""
        half = total // 2
        if total == 2 * half and self.left[half] > 1:
            return half, half
        # Lengths half+1, half+2, ... against total-half-1, total-half-2, ...
        count, other = total - half - 1, self.size - (total - half)
        both = self.upward[half + 1 : half + 1 + count] & self.downward[other : other + count]
        place = int(both.argmax()) if count else 0
        return (half + 1 + place, total - half - 1 - place) if count and both[place] else ()


def _fill(shelf: _Shelf, max_tokens: int) -> dict[int, int]:
    """length -> how many of it, for one bin that begins with the longest row there is. Takes them from the shelf."""
    chosen: dict[int, int] = {}
    room = max_tokens
    while (longest := shelf.longest_within(room)) > 0:
        # Far from full, several of a length at a time.
        pick = (longest,) * max(1, min(shelf.left[longest], room // longest - 2))
        if chosen and longest < room <= 2 * longest:
            pick = next(filter(None, map(shelf.pair, range(room, max(room - MOST_GAPS_TRIED, 1), -1))), pick)
        for length in pick:
            chosen[length] = chosen.get(length, 0) + 1
            shelf.take(length, 1)
            room -= length
    return chosen


def _spread(lengths: np.ndarray, cost_of_row: np.ndarray, wanted: int, max_tokens: int) -> list[list[int]] | None:
    """So many micro-batches of nearly equal cost: the costliest row left goes to the cheapest with room. None where it ends without room.

    Filling one after another leaves the last ones nearly empty; with few micro-batches to a rank, that is a rank that waits.
    """
    bins: list[list[int]] = [[] for _ in range(wanted)]
    room = [max_tokens] * wanted
    heap = [(0.0, i) for i in range(wanted)]
    for row in np.argsort(-cost_of_row, kind="stable").tolist():
        length, full = int(lengths[row]), []
        while heap and room[heap[0][1]] < length and bins[heap[0][1]]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, i = heap[0]
        bins[i].append(row)
        room[i] -= length
        heapq.heapreplace(heap, (cost + float(cost_of_row[row]), i))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins if all(bins) else None


def _split_until(bins: list[list[int]], cost: np.ndarray, cost_of_row: np.ndarray, wanted: int) -> np.ndarray:
    """Halves the costliest bins, in place, until there are as many as wanted; returns the cost of each."""
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


def _deal(cost: np.ndarray, dp_size: int) -> list[list[int]]:
    """Bins in rounds of similar cost, the costliest of a round to the rank that has least so far."""
    rounds = np.argsort(-cost, kind="stable").reshape(-1, dp_size)
    total = np.zeros(dp_size)
    for number, round_ in enumerate(rounds):
        order = np.argsort(total, kind="stable")
        dealt = np.empty_like(round_)
        dealt[order] = round_
        rounds[number] = dealt
        total += cost[dealt]
    return rounds.T.tolist()
