"""Contexts in a stream: what lengths are rounded up to, and what contexts of one group have in common (docs/shared_prompts.md).

Two tokens have equal hidden states if all tokens up to them are equal, at equal positions. So a family is told by its tokens: those that
its contexts begin with alike are computed once, as a trunk, and the rest of each context as a child of it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from megatron_grpo.types import Completion, Sequence

Tokens = TypeVar("Tokens", int, np.ndarray)
FREE = np.full((1, 1, 1), -1, dtype=np.int16)  # what routes freely, beside experts of any form


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Multiples that lengths are rounded up to, in tokens: each segment, and the whole stream. See `parallel.layout.sequence_alignment`."""

    sequence: int = 1
    stream: int = 1

    @property
    def grain(self) -> int:
        """Every stream is a multiple of it."""
        return math.lcm(self.sequence, self.stream)

    def of_segment(self, tokens: Tokens) -> Tokens:
        """Tokens that a segment of so many takes in the stream."""
        return -(-tokens // self.sequence) * self.sequence

    def of_stream(self, total: int) -> int:
        """Tokens in a stream whose segments take `total`. Never 0: Megatron's layers take no empty stream."""
        return max(-(-total // self.grain), 1) * self.grain


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
    """Counts the tokens that a micro-batch computes once for a family of contexts of so many computed tokens, of which `common` are equal.

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
