"""Shared prefixes in a packed stream: alignment of lengths, common prefixes of a group (docs/shared_prompts.md), packing of groups.

Two tokens have equal hidden states if all tokens up to them are equal, at equal positions. So a prefix group is identified by its tokens:
those that its contexts begin with alike are computed once, as a shared prefix, and the rest of each context as a suffix (`tail`)
of it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_grpo.core.arrays import RowLengths, SequenceLengths, ragged
from megatron_grpo.core.batching.pack import PackedRows, pack, segment_sums
from megatron_grpo.core.types import Completion, TokenSequence

TokenCount = TypeVar("TokenCount", int, np.ndarray)
# A group is split into pieces that cost at most total / (dp_size * multiple * n), for each n until ranks are even.
PARTS_OF_A_SHARE = (1, 2, 4, 8)
EVEN_ENOUGH = 0.97  # mean over slowest rank
FREE = np.full((1, 1, 1), -1, dtype=np.int16)  # marks tokens that route freely; broadcasts to experts of any shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples that lengths are rounded up to, in tokens: each segment, and the whole stream. See `parallel.layout.sequence_alignment`."""

    sequence: int = 1
    stream: int = 1

    @property
    def grain(self) -> int:
        """Tokens that the length of every stream is a multiple of."""
        return math.lcm(self.sequence, self.stream)

    def count_segment(self, tokens: TokenCount) -> TokenCount:
        """Return the tokens that a segment takes in the stream, padding included.

        Args:
            tokens: Tokens of the segment, an int or an int array.
        """
        return -(-tokens // self.sequence) * self.sequence

    def count_stream(self, total: int) -> int:
        """Return the tokens of a stream, padding included. Never 0: Megatron's layers accept no empty stream.

        Args:
            total: Tokens of its segments, each rounded up.
        """
        return max(-(-total // self.grain), 1) * self.grain


class ContextSpan(NamedTuple):
    """One context of a sequence: the sequence's row in the micro-batch, and the token range of the context.

    Args:
        num_computed: Tokens that are computed: all but the last, which predicts nothing.
    """

    row: int
    first: int
    end: int
    num_computed: int


def list_contexts(sequences: Sequence[TokenSequence]) -> list[ContextSpan]:
    """Return the contexts of all sequences, row by row."""
    return [ContextSpan(row, first, end, end - first - 1) for row, sequence in enumerate(sequences) for first, end in sequence.contexts]


class PrefixGroup(NamedTuple):
    """Rows of one group in the same micro-batch.

    Args:
        members: Their indices in the micro-batch.
        prefix: Tokens that packing counts once; 0 if it counts each row by itself.
        min_saving_ratio: With `prefix` 0, rows still share a prefix if their tokens turn out to have so long a common prefix that at least
            this fraction of them need not be computed.
    """

    members: tuple[int, ...]
    prefix: int
    min_saving_ratio: float


def num_tokens(computed: Sequence[int], shared: int, alignment: Alignment) -> int:
    """Return the tokens of contexts in the stream if their first `shared` computed tokens are computed once.

    Args:
        computed: Computed tokens of each context.
    """
    return alignment.count_segment(shared) + sum(alignment.count_segment(tokens - shared) for tokens in computed)


def num_shared(computed: Sequence[int], common: int, prefix_group: PrefixGroup, alignment: Alignment) -> int:
    """Return the number of tokens that a micro-batch computes once for the contexts of a prefix group.

    The result never takes more tokens than packing counted. It exceeds the prefix that packing knew of if that takes no more tokens.

    Args:
        computed: Computed tokens of each context.
        common: Computed tokens that all contexts begin with.
    """
    unshared, packed = (num_tokens(computed, shared, alignment) for shared in (0, prefix_group.prefix))
    chosen, min_tokens = (prefix_group.prefix, packed) if packed < unshared else (0, unshared)
    shared_common = num_tokens(computed, common, alignment)
    max_tokens = min_tokens if prefix_group.prefix else (1 - prefix_group.min_saving_ratio) * unshared
    return common if shared_common < unshared and shared_common <= max_tokens else chosen


def common_prefix(sequences: Sequence[TokenSequence], contexts: Sequence[ContextSpan]) -> int:
    """Return the number of computed tokens that all contexts begin with: equal tokens, equal images, equal forced experts.

    Args:
        contexts: Contexts to compare; not empty.
    """
    length = max(min(context.num_computed for context in contexts), 0)
    differs = np.zeros(length, dtype=bool)
    reference, first = sequences[contexts[0].row], contexts[0].first
    images = _images(reference, contexts[0])
    for context in contexts[1:]:
        sequence = sequences[context.row]
        differs |= reference.token_ids[first : first + length] != sequence.token_ids[context.first : context.first + length]
        if reference.experts is not None or sequence.experts is not None:
            routes = _routes(reference, first, length) != _routes(sequence, context.first, length)
            differs |= routes.reshape(length, math.prod(routes.shape[1:])).any(axis=1)
        for position, _ in images ^ _images(sequence, context):
            differs[position:] = True
    return int(differs.argmax()) if differs.any() else length


def _routes(sequence: TokenSequence, first: int, length: int) -> np.ndarray:
    return FREE if sequence.experts is None else sequence.experts[first : first + length]


def _images(sequence: TokenSequence, context: ContextSpan) -> set[tuple[int, str]]:
    return {(position - context.first, image.key) for position, image in sequence.images if context.first <= position < context.end}


def find_prefix(completions: Sequence[Completion]) -> int:
    """Return the `prefix` of a group: computed tokens that every context of every completion begins with."""
    sequences = [completion.sequence for completion in completions]
    return common_prefix(sequences, list_contexts(sequences))


# ---- packing: whole groups, or pieces of them ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """Columns over rows, with all that packing uses. Tokens include alignment; costs are tokens plus attention in the same unit.

    A row by itself takes `apart`. A part of a group computes the group's prefix once: it takes its length plus the `tail` of each row.

    Args:
        group: Number of the group of each row from 0; a row that shares with none has its own; int64.
        prefix: Tokens of the common prefix, int64; 0 if the row shares nothing.
        apart: Tokens of the row by itself, int64.
        apart_cost: Cost of the row by itself, float64.
        shared_prefix: Tokens of the group's prefix, computed once, int64.
        prefix_cost: Cost of that prefix, float64.
        tail: Tokens that the row adds to a shared prefix, int64.
        tail_cost: Cost of these tokens, float64.
    """

    group: np.ndarray
    prefix: np.ndarray
    apart: np.ndarray
    apart_cost: np.ndarray
    shared_prefix: np.ndarray
    prefix_cost: np.ndarray
    tail: np.ndarray
    tail_cost: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def from_lengths(
        cls,
        lengths: RowLengths | Sequence[SequenceLengths],
        alignment: Alignment,
        *,
        balance_length: float,
        min_saving_ratio: float | None,
    ) -> RowColumns:
        """Build the columns of some rows.

        Args:
            lengths: Lengths of each row, in tokens.
            balance_length: See `pack`.
            min_saving_ratio: None if no prefix is to be shared.
        """
        rows, shares = RowLengths.from_rows(lengths), min_saving_ratio is not None
        return cls.from_columns(
            group=_numbered(rows.group) if shares else np.arange(len(rows)),
            prefix=rows.prefix * shares,
            num_contexts=rows.num_contexts,
            computed=rows.contexts - 1,
            alignment=alignment,
            balance_length=balance_length,
        )

    @classmethod
    def from_columns(
        cls, *, group: np.ndarray, prefix: np.ndarray, num_contexts: np.ndarray, computed: np.ndarray, alignment: Alignment,
        balance_length: float,
    ) -> RowColumns:  # fmt: skip
        """Build the columns from arrays.

        Args:
            group: Group of each row, int64 [rows].
            prefix: Shared prefix of each row in tokens, int64 [rows]; 0 if the row shares nothing.
            num_contexts: Contexts of each row, int64 [rows].
            computed: Computed tokens of each context, row by row, int64 [contexts].
            balance_length: See `pack`.
        """
        row = np.repeat(np.arange(len(group)), num_contexts)
        # Attention pairs every query with every key before it: half of length^2, and for a suffix also the whole shared prefix.
        unshared, shared_prefix = alignment.count_segment(computed), alignment.count_segment(prefix)
        tail = alignment.count_segment(computed - prefix[row])
        apart_cost = unshared + unshared / balance_length * unshared
        tail_cost = tail + (tail + 2 * shared_prefix[row]) / balance_length * tail

        def collect_rows(values: np.ndarray) -> np.ndarray:
            return np.bincount(row, weights=values, minlength=len(group)) if len(row) > len(group) else values

        return cls(
            group=group,
            prefix=prefix,
            apart=collect_rows(unshared).astype(np.int64),
            apart_cost=collect_rows(apart_cost),
            shared_prefix=shared_prefix,
            prefix_cost=shared_prefix + shared_prefix / balance_length * shared_prefix,
            tail=collect_rows(tail).astype(np.int64),
            tail_cost=collect_rows(tail_cost),
        )

    def worth(self, together: np.ndarray, min_saving_ratio: float) -> RowColumns:
        """Return the same rows, sharing a prefix only where it saves enough tokens.

        Args:
            together: Number of the piece that each row is in, int64 [rows]; the rows of a piece are of one group.
            min_saving_ratio: Minimum fraction of the tokens of a piece that need not be computed.
        """
        unshared, shared = _sums(together, self.apart), _sums(together, self.tail)
        shared_prefix = np.zeros_like(shared)
        shared_prefix[together] = self.shared_prefix
        is_shared = ((shared_prefix + shared < unshared) & (shared_prefix + shared <= (1 - min_saving_ratio) * unshared))[together]
        return replace(
            self,
            prefix=np.where(is_shared, self.prefix, 0),
            shared_prefix=np.where(is_shared, self.shared_prefix, 0),
            prefix_cost=np.where(is_shared, self.prefix_cost, 0.0),
            tail=np.where(is_shared, self.tail, self.apart),
            tail_cost=np.where(is_shared, self.tail_cost, self.apart_cost),
        )

    def sizes(self, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, cost) of each piece.

        Args:
            piece: Piece of each row, int64 [rows], numbered from 0 without gaps; the rows of a piece are of one group.
        """
        unshared, tails = _sums(piece, self.apart), _sums(piece, self.tail)
        shared_prefix, prefix_cost = np.zeros_like(tails), np.zeros(len(tails))
        shared_prefix[piece], prefix_cost[piece] = self.shared_prefix, self.prefix_cost
        is_shared = shared_prefix + tails < unshared
        cost = np.where(is_shared, prefix_cost + np.bincount(piece, self.tail_cost), np.bincount(piece, self.apart_cost))
        return np.where(is_shared, shared_prefix + tails, unshared), cost


def _numbered(group: np.ndarray) -> np.ndarray:
    """Return numbers of the groups in the order in which they appear, from 0; int64 [rows]."""
    _, first, number = np.unique(group, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _sums(number: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.bincount(number, weights=values).astype(np.int64)  # exact: token counts are far below 2^53


def pack_groups(rows: RowColumns, *, max_tokens: int, dp_size: int = 1, multiple: int = 1) -> PackedRows:
    """Pack rows as `pack` does, where rows of a group in one micro-batch share their prefix.

    A group stays together if the budget, the number of micro-batches and the balance of ranks allow it; each piece computes the prefix
    once. A piece takes at most the budget, or what its longest row takes by itself.

    Args:
        max_tokens: Token budget of one micro-batch.
        dp_size: Number of data-parallel ranks.
        multiple: Number that the micro-batches on a rank must be a multiple of.

    Returns:
        Rows of each micro-batch, indexed by data-parallel rank, then micro-batch.

    Raises:
        ValueError: There are fewer rows than micro-batches.
    """
    sizes = {"max_tokens": max_tokens, "dp_size": dp_size, "multiple": multiple}
    if not rows.prefix.any():
        return pack(rows.apart, costs=rows.apart_cost, **sizes)
    group_pieces = _within_budget(rows, max_tokens)
    total = rows.sizes(group_pieces)[1].sum()
    best, fastest = PackedRows(group_pieces, group_pieces[None]), math.inf
    for parts in PARTS_OF_A_SHARE:
        piece = _no_dearer_than(total / (dp_size * multiple * parts), rows, group_pieces)
        piece, packed = _pack_pieces(rows, piece, **sizes)
        cost = rows.sizes(piece)[1]
        round_costs = segment_sums(cost[packed.rows], packed.starts, packed.counts)
        time = round_costs.max(axis=0).sum()  # ranks wait for each other at every micro-batch
        if time < fastest:
            best, fastest = _select_rows(piece, packed), time
        if round_costs.sum() >= EVEN_ENOUGH * time * dp_size:
            break
    return best


def _pack_pieces(rows: RowColumns, piece: np.ndarray, **sizes: int) -> tuple[np.ndarray, PackedRows]:
    """Return (piece of each row, pieces of each micro-batch, indexed by rank, then micro-batch).

    While there are too few pieces, the costliest are split in two, half of the missing number at a time.
    """
    unit = sizes["dp_size"] * sizes["multiple"]
    while True:
        tokens, cost = rows.sizes(piece)
        try:
            return piece, pack(tokens, costs=cost, **sizes)
        except ValueError:
            cost[np.bincount(piece) == 1] = -1.0
            if cost.max() < 0:
                raise
            costliest = np.argsort(-cost, kind="stable")[: max(-len(cost) % unit // 2, 1)]
            is_halved = np.zeros(len(cost), dtype=bool)
            is_halved[costliest] = cost[costliest] >= 0
            piece = _halved(rows, piece, is_halved)


def _select_rows(piece: np.ndarray, packed: PackedRows) -> PackedRows:
    counts = np.bincount(piece)
    rows = np.argsort(piece, kind="stable")[ragged(np.cumsum(counts) - counts, counts, packed.rows)]
    return PackedRows(rows, np.add.reduceat(counts[packed.rows], packed.starts.ravel()).reshape(packed.counts.shape))


def _within_budget(rows: RowColumns, max_tokens: int) -> np.ndarray:
    """Return the piece of each row: whole groups; a group that exceeds the budget is split into as few pieces as fit."""
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
    # Each large group is a line of a matrix, its rows longest first; column by column, a row goes to the first piece of its line with room.
    large = large[np.lexsort((-rows.tail[large], piece[large]))]
    _, first, line = np.unique(piece[large], return_index=True, return_inverse=True)
    column = np.arange(len(large)) - first[line]
    shape = len(first), int(column.max()) + 1
    tails, used = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    tails[line, column] = rows.tail[large]
    into = np.zeros(shape, dtype=np.int64)
    capacity = (limit[piece[large[first]]] - rows.shared_prefix[large[first]])[:, None]
    for number in range(shape[1]):
        tail = tails[:, number, None]
        chosen = ((used == 0) | (used + tail <= capacity)).argmax(axis=1)
        used[np.arange(shape[0]), chosen] += tail[:, 0]
        into[:, number] = chosen
    key = piece * shape[1]
    key[large] += into[line, column]
    return np.unique(key, return_inverse=True)[1]


def _no_dearer_than(limit: float, rows: RowColumns, piece: np.ndarray) -> np.ndarray:
    while True:
        _, cost = rows.sizes(piece)
        dear = (cost > limit) & (np.bincount(piece) > 1)
        if not dear.any():
            return piece
        piece = _halved(rows, piece, dear)


def _halved(rows: RowColumns, piece: np.ndarray, is_halved: np.ndarray) -> np.ndarray:
    """Return the piece of each row after splitting each piece of `is_halved` in two. Both halves get long and short rows."""
    cut = np.flatnonzero(is_halved[piece])
    cut = cut[np.lexsort((rows.tail[cut], piece[cut]))]
    _, first, line = np.unique(piece[cut], return_index=True, return_inverse=True)
    is_second = (np.arange(len(cut)) - first[line]) % 2 == 1
    piece = piece.copy()
    piece[cut[is_second]] = len(is_halved) + line[is_second]
    return piece
