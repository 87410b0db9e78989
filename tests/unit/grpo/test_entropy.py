"""One entropy threshold per global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.grpo.entropy import entropy_threshold


def test_by_hand():
    entropies, masks = [np.array([5.0, 1.0, 9.0]), np.array([2.0, 4.0, 3.0])], [np.array([1, 1, 0], bool), np.ones(3, bool)]
    # 1 2 3 4 5 without the masked 9: the top 0.4 is what reaches the 0.6-quantile, 3.4.
    assert entropy_threshold(entropies, masks, 0.4) == 3.5
    assert entropy_threshold(entropies, masks, 1.0) == -np.inf
    assert entropy_threshold([], [], 0.4) == -np.inf
    assert entropy_threshold([np.ones(2)], [np.zeros(2, bool)], 0.4) == -np.inf


def test_ties_are_kept():
    assert entropy_threshold([np.array([1.0, 2.0, 2.0, 2.0])], [np.ones(4, bool)], 0.25) == 1.5
    assert entropy_threshold([np.full(4, 2.0)], [np.ones(4, bool)], 0.25) == -np.inf


@settings(deadline=None)
@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=40), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.9]))
def test_keeps_what_a_linear_quantile_keeps(values, quantile):
    values = np.array(values)
    limit = np.quantile(values, 1 - quantile)
    kept = values >= entropy_threshold([values], [np.ones(len(values), bool)], quantile)
    on_the_line = np.isclose(values, limit, rtol=1e-12, atol=1e-12)
    assert (kept == (values >= limit))[~on_the_line].all()


def test_rounding_of_entropies_moves_no_token_across():
    """Where the quantile falls on a token: 11 values, the top 0.2."""
    values = np.linspace(0.1, 3.0, 11)
    threshold = entropy_threshold([values], [np.ones(11, bool)], 0.2)
    noise = 1 + np.random.default_rng(0).uniform(-1e-6, 1e-6, 11)
    assert ((values * noise >= threshold) == (values >= np.quantile(values, 0.8))).all()
    assert (values >= threshold).sum() == pytest.approx(3)
