"""Ranges of a weight's elements as boxes: the part of a distributed optimizer's state on a rank, as a checkpoint describes it."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.policy.sharded_state import boxes


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_moment_boxes_cover_range_exactly_with_minimal_number(shape, data):
    numbers = np.arange(prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, numbers.size))
    end = data.draw(st.integers(start, numbers.size))
    found = list(boxes(start, end, shape))
    cut = [numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] for offset, size in found]
    assert [part.shape for part in cut] == [size for _, size in found]
    assert [int(number) for part in cut for number in part.ravel()] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_moment_boxes_of_range_across_rows_are_three():
    assert list(boxes(5, 18, (5, 4))) == [((1, 1), (1, 3)), ((2, 0), (2, 4)), ((4, 0), (1, 2))]
    assert list(boxes(5, 7, (5, 4))) == [((1, 1), (1, 2))]  # within a row
    assert list(boxes(4, 12, (5, 4))) == [((1, 0), (2, 4))]  # whole rows
