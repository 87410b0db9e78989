"""Stretches of flat arrays: sampling masks, and the lengths of rows.

What the rows have is concatenated in one array, with the number of elements of each row in another. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


def empty_index() -> np.ndarray:
    """Return an int64 array without elements."""
    return np.zeros(0, dtype=np.int64)


def ragged(starts: np.ndarray, counts: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the indices of the elements of some stretches of a flat array, one stretch after another.

    Args:
        starts: First element of each stretch, int64 [n].
        counts: Elements of each stretch, int64 [n].
        index: Stretches to select, int64 [k].
    """
    chosen = counts[index]
    ends = np.cumsum(chosen)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[index] - ends + chosen, chosen)


class SamplingMask(NamedTuple):
    """Token IDs that survived top-k/top-p/min-p filtering at each of n positions, in CSR layout.

    Each row includes the sampled token itself. An empty row means no filtering: the token was sampled from the whole vocabulary.

    Args:
        at: Offset of each position's row in `ids`, [n + 1].
        ids: Token IDs of all rows, concatenated; [m].
    """

    at: NDArray[np.int64]
    ids: NDArray[np.int32]

    @property
    def counts(self) -> np.ndarray:
        """Number of surviving token IDs at each position, int64 [n]."""
        return np.diff(self.at)

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate the masks of consecutive tokens.

        Args:
            parts: Masks in the order of the tokens.
        """
        counts = np.concatenate([np.zeros(1, dtype=np.int64), *(part.counts for part in parts)])
        return cls(np.cumsum(counts), np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]))

    @classmethod
    def unfiltered(cls, count: int) -> SamplingMask:
        """Return the mask of `count` positions without filtering.

        Args:
            count: Number of positions.
        """
        return cls(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))

    def take(self, index: np.ndarray) -> SamplingMask:
        """Select positions in the given order.

        Args:
            index: Positions to select, int [k].
        """
        at = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.counts[index])])
        return SamplingMask(at, self.ids[ragged(self.at[:-1], self.counts, index)])


class SequenceLengths(NamedTuple):
    """Lengths of a row, as needed for packing. Rows of one group begin with the same tokens.

    Args:
        contexts: Tokens of each context.
        group: (rollout, prompt number); None if it shares with none.
        prefix: Computed tokens that every context of the group begins with, as far as it is known.
    """

    contexts: tuple[int, ...]
    group: tuple[int, int] | None = None
    prefix: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """Lengths of rows, as `SequenceLengths`: one array per field.

    Args:
        group: Number of the row's group, int64 [rows].
        prefix: Tokens of the common prefix, int64 [rows].
        num_contexts: Number of contexts of each row, int64 [rows].
        contexts: Tokens of each context, row by row; int64 [contexts].
    """

    group: np.ndarray
    prefix: np.ndarray
    num_contexts: np.ndarray
    contexts: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    @classmethod
    def from_rows(cls, rows: RowLengths | Sequence[SequenceLengths]) -> RowLengths:
        """Return the lengths of rows as arrays. A row that shares with none has a group to itself.

        Args:
            rows: Lengths of each row.
        """
        if isinstance(rows, RowLengths):
            return rows
        numbers: dict[object, int] = {}
        names = [-1 - i if row.group is None else row.group for i, row in enumerate(rows)]
        return cls(
            group=np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64),
            prefix=np.array([row.prefix for row in rows], dtype=np.int64),
            num_contexts=np.array([len(row.contexts) for row in rows], dtype=np.int64),
            contexts=np.array([tokens for row in rows for tokens in row.contexts], dtype=np.int64),
        )

    def take(self, index: np.ndarray) -> RowLengths:
        """Select rows in the given order.

        Args:
            index: Rows to select, int64 [k].
        """
        contexts = self.contexts[ragged(np.cumsum(self.num_contexts) - self.num_contexts, self.num_contexts, index)]
        return RowLengths(self.group[index], self.prefix[index], self.num_contexts[index], contexts)
