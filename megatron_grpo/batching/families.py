"""What contexts of one group have in common, and whether computing it once pays (docs/shared_prompts.md). No torch.

Two tokens have equal hidden states if all tokens up to them are equal, at equal positions. So a family is told by its tokens: those that
its contexts begin with alike are computed once, as a trunk, and the rest of each context as a child of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_grpo.batching.alignment import Alignment
from megatron_grpo.types import Completion, Extent, Sequence

FREE = np.full((1, 1, 1), -1, dtype=np.int16)  # what routes freely, beside experts of any form


class Context(NamedTuple):
    """One context of a sequence: the sequence's row in the micro-batch, and where the context begins and ends in its tokens."""

    row: int
    first: int
    end: int

    @property
    def num_computed(self) -> int:
        """The last token predicts nothing, so it is not computed."""
        return self.end - self.first - 1


class Family(NamedTuple):
    """Rows of one group that meet in a micro-batch.

    members: their places in it. prefix: tokens that packing counts once, 0 if it counts each row by itself. least_saving: in that case they
    share all the same if their tokens turn out to begin alike for so long that this part of them need not be computed.
    """

    members: tuple[int, ...]
    prefix: int
    least_saving: float


def num_tokens(computed: SequenceOf[int], shared: int, alignment: Alignment) -> int:
    """Tokens in the stream of contexts of so many computed tokens, if the first `shared` of them are computed once."""
    return alignment.of_segment(shared) + sum(alignment.of_segment(tokens - shared) for tokens in computed)


def num_shared(computed: SequenceOf[int], common: int, family: Family, alignment: Alignment) -> int:
    """How many tokens a micro-batch computes once for a family of contexts of so many computed tokens, of which `common` are equal.

    Never in a way that takes more tokens than packing counted. More than packing knew of if that takes no more tokens.
    """
    apart, packed = (num_tokens(computed, shared, alignment) for shared in (0, family.prefix))
    chosen, fewest = (family.prefix, packed) if packed < apart else (0, apart)
    found = num_tokens(computed, common, alignment)
    most = fewest if family.prefix else (1 - family.least_saving) * apart
    return common if found < apart and found <= most else chosen


def common_prefix(sequences: SequenceOf[Sequence], contexts: SequenceOf[Context]) -> int:
    """Computed tokens that all these contexts begin with: equal tokens, equal pictures, equal forced experts."""
    length = max(min(context.num_computed for context in contexts), 0)
    differs = np.zeros(length, dtype=bool)
    ours, first = sequences[contexts[0].row], contexts[0].first
    shown = _shown(ours, contexts[0])
    for context in contexts[1:]:
        other = sequences[context.row]
        differs |= ours.token_ids[first : first + length] != other.token_ids[context.first : context.first + length]
        if ours.experts is not None or other.experts is not None:
            routes = _routes(ours, first, length) != _routes(other, context.first, length)
            differs |= routes.reshape(length, math.prod(routes.shape[1:])).any(axis=1)
        for place, _ in shown ^ _shown(other, context):
            differs[place:] = True
    return int(differs.argmax()) if differs.any() else length


def _routes(sequence: Sequence, first: int, length: int) -> np.ndarray:
    return FREE if sequence.experts is None else sequence.experts[first : first + length]


def _shown(sequence: Sequence, context: Context) -> set[tuple[int, str]]:
    return {(place - context.first, picture.key) for place, picture in sequence.shown if context.first <= place < context.end}


def prefix_of(completions: SequenceOf[Completion]) -> int:
    """`prefix` of a group: computed tokens that every context of every completion begins with."""
    sequences = [completion.sequence for completion in completions]
    return common_prefix(sequences, [Context(row, *ends) for row, one in enumerate(sequences) for ends in one.contexts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What packing knows of rows, as columns over them. Tokens include alignment; costs are tokens and, in their measure, attention.

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
    def of(cls, extents: SequenceOf[Extent], alignment: Alignment, *, even_length: float, least_saving: float | None) -> Rows:
        """even_length: see `batching.pack`. least_saving: None if nothing is to be shared."""
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
        return Rows(
            group=self.group,
            prefix=np.where(pays, self.prefix, 0),
            apart=self.apart,
            apart_cost=self.apart_cost,
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
