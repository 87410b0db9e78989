"""Estimates of an evaluation against enumeration, simulation and similar wrong formulas."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megatron_grpo.run.config.evaluation import ks
from megatron_grpo.run.metrics import evaluations as estimates


def test_pass_at_k_equals_enumeration_of_subsets():
    for n in range(1, 8):
        for right in range(n + 1):
            outcomes = [1] * right + [0] * (n - right)
            for k in range(1, n + 1):
                subsets = [max(subset) for subset in itertools.combinations(outcomes, k)]
                [found] = estimates.pass_at_k(np.array([right]), np.array([n]), k)
                assert found == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_of_many_completions_equals_integer_arithmetic():
    exact = [1 - math.comb(256 - c, 64) / math.comb(256, 64) for c in range(257)]
    assert np.abs(estimates.pass_at_k(np.arange(257), np.full(257, 256), 64) - exact).max() < 1e-14


def test_pass_at_k_of_fewer_than_k_completions_is_nan():
    found = estimates.pass_at_k(np.array([1, 1, 0]), np.array([1, 4, 2]), 2)
    assert math.isnan(found[0]) and found[1:].tolist() == [0.5, 0.0]


def test_pass_at_k_is_unbiased_where_naive_formula_is_not():
    """Chances of Beta(0.5, 1.5), k 4 of n 8: the truth is known. `1 - (1 - c/n)^k` misses it by eight per cent, `any of n` by a quarter."""
    draw, n, k = np.random.default_rng(0), 8, 4
    right = draw.binomial(n, draw.beta(0.5, 1.5, size=200_000))
    truth = 1 - np.prod([(1.5 + i) / (2.0 + i) for i in range(k)])
    assert estimates.pass_at_k(right, np.full(len(right), n), k).mean() == pytest.approx(truth, abs=0.003)
    assert (1 - (1 - right / n) ** k).mean() < truth - 0.03 and (right > 0).mean() > truth + 0.1


P, N = 100, 8


def simulate_runs(draw: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    """float64 [runs, P, N] of right and wrong, by the chance of each prompt."""
    return (draw.random((*rates.shape, N)) < rates[..., None]).astype(np.float64)


def test_stderr_over_prompts_equals_spread_over_other_prompts():
    scores = simulate_runs(draw := np.random.default_rng(1), draw.beta(0.5, 1.5, size=(1500, P)))
    found = [estimates.mean_over_prompts(estimates.prompt_means(one)) for one in scores]
    true = np.std([mean for mean, _ in found])
    assert np.mean([error for _, error in found]) == pytest.approx(true, rel=0.06)
    as_if_independent = np.mean([np.sqrt(one.mean() * (1 - one.mean()) / one.size) for one in scores])
    assert as_if_independent < 0.65 * true


def test_sampling_error_equals_spread_over_seeds():
    draw = np.random.default_rng(2)
    scores = simulate_runs(draw, np.broadcast_to(draw.beta(0.5, 1.5, size=P), (1500, P)))
    true = np.std([estimates.mean_over_prompts(estimates.prompt_means(one))[0] for one in scores])
    assert np.mean([estimates.sampling_error(one) for one in scores]) == pytest.approx(true, rel=0.06)
    assert estimates.mean_over_prompts(estimates.prompt_means(scores[0]))[1] > 1.5 * true, "the two errors are two questions"


def test_sampling_error_is_unbiased_with_unscored_completions():
    draw = np.random.default_rng(3)
    scores = simulate_runs(draw, np.broadcast_to(draw.beta(0.5, 1.5, size=P), (1500, P)))
    is_lost = draw.random((P, N)) < 0.6
    scores[:, is_lost] = np.nan
    true = np.std([estimates.mean_over_prompts(estimates.prompt_means(one))[0] for one in scores])
    assert np.mean([estimates.sampling_error(one) for one in scores]) == pytest.approx(true, rel=0.1)


def test_paired_change_has_smaller_error_than_unpaired():
    draw = np.random.default_rng(4)
    rates = draw.beta(0.5, 1.5, size=(1500, P))
    before, after = simulate_runs(draw, rates).mean(axis=2), simulate_runs(draw, np.clip(rates + 0.05, 0, 1)).mean(axis=2)
    found = [estimates.mean_over_prompts(other - one) for one, other in zip(before, after)]
    true = np.std([mean for mean, _ in found])
    assert np.mean([error for _, error in found]) == pytest.approx(true, rel=0.06)
    assert math.hypot(estimates.mean_over_prompts(before[0])[1], estimates.mean_over_prompts(after[0])[1]) > 1.3 * true


def test_prompt_means_exclude_unscored_completions():
    scores = np.array([[1.0, 0.0], [np.nan, 1.0], [np.nan, np.nan]])
    means = estimates.prompt_means(scores)
    assert means[:2].tolist() == [0.5, 1.0] and math.isnan(means[2])
    assert estimates.mean_over_prompts(means)[0] == 0.75
    # of the two: 0.5 / 2, and for the one score the same variance: 0.5 / 1
    assert estimates.sampling_error(scores) == pytest.approx(math.sqrt(0.25 + 0.5) / 2)
    assert all(map(math.isnan, estimates.mean_over_prompts(np.array([np.nan]))))
    assert math.isnan(estimates.sampling_error(scores[1:])) and math.isnan(estimates.mean_over_prompts(means[:1])[1])


def test_pass_at_k_values_reported_by_number_of_completions():
    assert [ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
