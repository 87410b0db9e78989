"""Packing of whole sequences into micro-batches within a token budget, balanced over ranks."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.batching import pack as pack_module
from megatron_grpo.core.batching.pack import pack

LENGTHS = {
    "long tail, cut at the limit": lambda rng, n: (np.clip(rng.lognormal(6.5, 1.0, n), 1, 8192), 8192),
    "uniform": lambda rng, n: (rng.integers(1, 8193, n), 16384),
    "many in each": lambda rng, n: (rng.integers(1, 1025, n), 65536),
    "long contexts": lambda rng, n: (np.clip(rng.lognormal(8.0, 1.2, n), 1, 131072), 131072),
    "no short ones": lambda rng, n: (rng.integers(200, 32769, n), 32768),
}


def list_rows(packed):
    return sorted(row for rank in packed for rows in rank for row in rows)


@pytest.mark.parametrize("name", LENGTHS)
def test_pack_of_a_million_completions_wastes_0_2_percent(name):
    lengths, max_tokens = LENGTHS[name](np.random.default_rng(0), 1_000_000)
    lengths = lengths.astype(np.int64)
    packed = pack(lengths, max_tokens=max_tokens, dp_size=8, balance_length=48_000.0)
    assert lengths.sum() / (sum(map(len, packed)) * max_tokens) >= 0.998
    assert list_rows(packed) == list(range(len(lengths)))


@given(data=st.data(), dp_size=st.integers(1, 5), multiple=st.integers(1, 3), max_tokens=st.integers(1, 60), is_large=st.booleans())
@settings(max_examples=500)
def test_every_row_is_in_one_micro_batch_within_the_budget(data, dp_size, multiple, max_tokens, is_large):
    """is_large: as a batch is packed that has too many rows to be spread evenly one by one."""
    unit = dp_size * multiple
    count = unit * data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=count, max_size=count))
    with mock.patch.object(pack_module, "MOST_ROWS_SPREAD", 0 if is_large else pack_module.MOST_ROWS_SPREAD):
        packed = pack(lengths, max_tokens=max_tokens, dp_size=dp_size, multiple=multiple)
    assert list_rows(packed) == list(range(count))
    assert len({len(rank) for rank in packed}) == 1 and len(packed[0]) % multiple == 0
    for rows in (rows for rank in packed for rows in rank):
        assert len(rows) and (sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1)


@pytest.mark.parametrize("num_rows", [256, 4_096, 100_000])
def test_ranks_get_the_same_cost_attention_included(num_rows):
    lengths = np.clip(np.random.default_rng(1).lognormal(7, 0.8, num_rows), 1, 32_768).astype(np.int64)
    packed = pack(lengths, max_tokens=32_768, dp_size=8, balance_length=12_000.0)
    cost = [sum(lengths[row] + lengths[row] ** 2 / 12_000 for rows in rank for row in rows) for rank in packed]
    assert max(cost) / np.mean(cost) < 1.02


def test_the_nth_micro_batches_of_all_ranks_cost_about_the_same():
    """Ranks wait for each other there, where experts exchange tokens."""
    lengths = np.clip(np.random.default_rng(2).lognormal(6, 1.2, 1_000), 1, 4096).astype(np.int64)
    packed = pack(lengths, max_tokens=16_384, dp_size=4, balance_length=20_000.0)
    cost = np.array([[sum(lengths[row] + lengths[row] ** 2 / 20_000 for row in rows) for rows in rank] for rank in packed])
    assert (cost.max(axis=0) / cost.min(axis=0)).max() < 1.1


def test_too_few_sequences_are_refused():
    with pytest.raises(ValueError, match="3 sequences cannot fill 2 ranks x 2 micro-batches"):
        pack([1, 2, 3], max_tokens=10, dp_size=2, multiple=2)


def test_small_batches_are_split_until_every_rank_has_as_many():
    assert [len(rank) for rank in pack([5, 5, 5, 5], max_tokens=15, dp_size=2)] == [1, 1]
    assert [len(rank) for rank in pack([5, 5, 5, 5], max_tokens=100, dp_size=4)] == [1, 1, 1, 1]
