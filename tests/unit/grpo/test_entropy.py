"""The entropy threshold of a global batch."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.grpo.entropy import TIE_NATS, TIE_RELATIVE, entropy_threshold

QUANTILES = st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9])


def find_kept_tokens(values, quantile: float, seen_by_the_loss=None) -> np.ndarray:
    """Which tokens train: the loss compares the entropies of its own pass."""
    values = np.asarray(values, dtype=np.float64)
    threshold = entropy_threshold([values], [np.ones(len(values), bool)], quantile)
    return (values if seen_by_the_loss is None else seen_by_the_loss) >= threshold


def test_entropy_threshold_by_hand():
    entropies, masks = [np.array([5.0, 1.0, 9.0]), np.array([2.0, 4.0, 3.0])], [np.array([1, 1, 0], bool), np.ones(3, bool)]
    # 1 2 3 4 5 without the masked 9: the top 0.4 is what reaches the 0.6-quantile, 3.4. The lowest of them is 4.
    assert entropy_threshold(entropies, masks, 0.4) == 4 - 0.0004
    assert entropy_threshold(entropies, masks, 1.0) == -np.inf
    assert entropy_threshold([], [], 0.4) == -np.inf
    assert entropy_threshold([np.ones(2)], [np.zeros(2, bool)], 0.4) == -np.inf


@given(st.lists(st.floats(-3, 30, width=32), min_size=1, max_size=40), QUANTILES, st.integers(1, 4), st.randoms())
def test_entropy_threshold_from_summed_rank_counts_equals_global_one(values, quantile, num_ranks, random):
    """The same float, whoever holds which value; and nothing but 256 counts travels at a time."""
    shares = [[] for _ in range(num_ranks)]
    for value in values:
        random.choice(shares).append(value)
    barrier, parts, found = threading.Barrier(num_ranks), [None] * num_ranks, [None] * num_ranks

    def work(rank):
        def over_ranks(counts):
            assert counts.dtype == np.int64 and counts.size <= 256
            parts[rank] = counts
            barrier.wait(60)
            total = sum(parts)
            barrier.wait(60)
            return total

        mine = np.array(shares[rank])
        found[rank] = entropy_threshold([mine], [np.ones(len(mine), bool)], quantile, over_ranks=over_ranks)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    place = math.ceil((len(values) - 1) * (1 - quantile) - 1e-9)
    lowest = float(np.sort(np.array(values))[place])
    assert found == [lowest - max(TIE_RELATIVE * lowest, TIE_NATS)] * num_ranks


def test_entropy_threshold_includes_ties():
    assert find_kept_tokens([1.0, 2.0, 2.0, 2.0], 0.25).tolist() == [False, True, True, True]
    assert find_kept_tokens(np.full(4, 2.0), 0.25).all()
    assert find_kept_tokens([0.0, 0.0, 1e-6, 0.0], 0.25).all(), "entropies near 0 differ by the rounding of their formula"


def test_entropy_threshold_treats_values_equal_up_to_rounding_alike():
    """Four first tokens in one context, the third largest entropy of twelve: two of the four would be dropped."""
    others = [3.0, 2.9, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    first_tokens = 2.0 + np.array([2e-6, -3e-6, 1e-6, -1e-6])
    assert find_kept_tokens([*others, *first_tokens], 0.3).tolist() == [True, True] + [False] * 6 + [True] * 4


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 6)), min_size=1, max_size=20), QUANTILES, st.integers(0, 2**32 - 1))
def test_entropy_threshold_selects_same_tokens_for_any_partition(contexts, quantile, seed):
    """Contexts at least 0.25 % apart, each with up to six tokens; noise of 1e-5 of an entropy, drawn anew in every pass of either cut."""
    rng = np.random.default_rng(seed)
    exact = np.repeat([0.01 * 1.0025**level for level, _ in contexts], [count for _, count in contexts])

    def noisy():
        return exact * (1 + rng.uniform(-1e-5, 1e-5, len(exact)))

    right = find_kept_tokens(exact, quantile)
    assert right.any()
    for _ in range(2):
        assert (find_kept_tokens(noisy(), quantile, seen_by_the_loss=noisy()) == right).all()


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40), QUANTILES)
def test_entropy_threshold_equals_linear_quantile_with_ties(values, quantile):
    values = np.array(values)
    limit = np.quantile(values, 1 - quantile)
    found, on_the_line = find_kept_tokens(values, quantile), np.isclose(values, limit, rtol=1e-12, atol=1e-12)
    assert found[(values >= limit) & ~on_the_line].all()
    lowest = values[(values >= limit) | on_the_line].min()
    assert values[found].min() >= lowest - max(TIE_RELATIVE * lowest, TIE_NATS)


def test_entropy_threshold_ties_are_not_transitive():
    """A million tokens lie closer to each other than any tolerance: still the top fifth trains."""
    entropies = np.random.default_rng(0).uniform(0, 3, 1_000_000)
    assert find_kept_tokens(entropies, 0.2).mean() == pytest.approx(0.2, abs=1e-3)
