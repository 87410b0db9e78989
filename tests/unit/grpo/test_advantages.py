"""Advantages: by hand, against the reference, and exact zeros."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.grpo.advantages import ESTIMATORS, advantages, name_of_estimator, reward_metrics, zero_std_groups
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.settings import Config
from megatron_grpo_referee import reference

COMBINATIONS = [
    cfg
    for estimator in (*ESTIMATORS, "gdpo")
    for scale in ("group", "batch", "none", "gdpo")
    if not validation.problems(Config(grpo=(cfg := GrpoConfig(advantage_estimator=estimator, scale_rewards=scale))))
]


def compute_advantages(rewards, weights=(1.0,), kl_penalty=None, **config):
    """rewards: [groups][G] for one function, or [groups][G][functions]."""
    rows = [[row if isinstance(row, (list, tuple)) else [row] for row in group] for group in rewards]
    return advantages((rows), GrpoConfig(**config), weights, kl_penalty=kl_penalty)


def test_grpo_by_hand():
    # mean 0.5, sample std sqrt(4 * 0.25 / 3) = 0.57735
    assert compute_advantages([[1, 0, 1, 0]]).advantages[0] == pytest.approx(np.array([1, -1, 1, -1]) * 0.5 / (0.5773502692 + 1e-4))


def test_scale_batch_and_none_by_hand():
    rewards = [[1, 0], [3, 0]]
    assert compute_advantages(rewards, scale_rewards="none").advantages.tolist() == [[0.5, -0.5], [1.5, -1.5]]
    # batch: mean 1, squares 0 + 1 + 4 + 1 over 3
    assert compute_advantages(rewards, scale_rewards="batch").advantages.ravel() == pytest.approx(
        np.array([0.5, -0.5, 1.5, -1.5]) / (2**0.5 + 1e-4)
    )


def test_rloo_by_hand():
    assert compute_advantages([[1, 0, 0, 1]], advantage_estimator="rloo").advantages[0] == pytest.approx(
        [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3]
    )


def test_reinforce_plus_plus_by_hand():
    rewards = [[1, 0], [3, 0]]
    assert compute_advantages(rewards, advantage_estimator="reinforce_plus_plus").advantages.ravel() == pytest.approx(
        np.array([0, -1, 2, -1]) / (2**0.5 + 1e-4)
    )
    # baseline: (0.5, -0.5, 1.5, -1.5), whose sample std is sqrt(5 / 3)
    assert compute_advantages(rewards, advantage_estimator="reinforce_plus_plus_baseline").advantages.ravel() == pytest.approx(
        np.array([0.5, -0.5, 1.5, -1.5]) / ((5 / 3) ** 0.5 + 1e-4)
    )


def test_reinforce_plus_plus_needs_no_group():
    assert compute_advantages([[1], [0]], advantage_estimator="reinforce_plus_plus").advantages.ravel() == pytest.approx(
        np.array([0.5, -0.5]) / (0.5**0.5 + 1e-4)
    )


def test_gdpo_advantages_normalize_each_reward_before_summing():
    """Equal totals: grpo sees nothing to choose, gdpo normalizes each function first (here 10 x accuracy against format, weights 1)."""
    rewards = [[[10.0, 0.0], [9.0, 1.0], [10.0, 0.0], [9.0, 1.0]], [[10.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]
    assert compute_advantages(rewards, (1.0, 1.0)).is_zero_std.tolist() == [True, False]
    result = compute_advantages(rewards, (1.0, 0.5), advantage_estimator="gdpo")
    assert result.is_zero_std.tolist() == [False, False]
    assert result.advantages[0][0] == pytest.approx(-result.advantages[0][1]) and result.advantages[0][0] > 0


values = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1, 0.3]), st.floats(-5, 5, width=16))


@st.composite
def rollouts(draw):
    num_groups, size, num_funcs = draw(st.integers(1, 4)), draw(st.integers(2, 5)), draw(st.integers(1, 3))
    row = st.lists(values, min_size=num_funcs, max_size=num_funcs)
    group = st.one_of(st.lists(row, min_size=size, max_size=size), row.map(lambda r: [r] * size))
    rewards = draw(st.lists(group, min_size=num_groups, max_size=num_groups))
    weights = draw(st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=num_funcs, max_size=num_funcs))
    penalty = draw(st.lists(st.lists(st.floats(-1, 1, width=16), min_size=size, max_size=size), min_size=num_groups, max_size=num_groups))
    return rewards, weights, penalty


@settings(max_examples=150)
@given(rollouts())
def test_every_estimator_equals_the_reference(rollout):
    rewards, weights, penalty = rollout
    # Nothing judged: the reference has no mean to take.
    if all(r is None for group in rewards for row in group for r in row):
        return
    for cfg in COMBINATIONS:
        for kl_penalty in (None, penalty):
            if kl_penalty is not None and "gdpo" in (cfg.advantage_estimator, cfg.scale_rewards):
                continue
            found = advantages((rewards), cfg, weights, kl_penalty=None if kl_penalty is None else np.array(kl_penalty))
            wanted = reference.advantages(rewards, weights, cfg, kl_penalty)
            np.testing.assert_allclose(found.advantages, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("cfg", [c for c in COMBINATIONS if c.advantage_estimator != "reinforce_plus_plus"], ids=str)
def test_zero_std_group_advantages_are_exactly_zero(cfg):
    """0.1 has no exact binary form: the mean of seven of them is not 0.1."""
    rewards = np.full((2, 7, 1), 0.1)
    rewards[1, :4] = 1.0
    found = advantages((rewards.tolist()), cfg, [1.0])
    assert found.is_zero_std.tolist() == [True, False]
    if "gdpo" not in (cfg.advantage_estimator, cfg.scale_rewards):
        assert (found.advantages[0] == 0.0).all()
    assert np.abs(found.advantages[0]).max() < 1e-12


def test_zero_std_means_equal_up_to_rounding():
    assert compute_advantages([[0.5, 0.5 + 1e-7], [0.3, 0.3], [None, 0.3], [None, None]]).is_zero_std.tolist() == [False, True, True, True]
    assert compute_advantages([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], [1e-30, 2e-30], [1e20, 1e20 + 1e15]]).is_zero_std.tolist() == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("cfg", COMBINATIONS, ids=lambda cfg: f"{cfg.advantage_estimator}-{cfg.scale_rewards}")
def test_rewards_equal_up_to_rounding_give_zero_advantages(cfg):
    """Also where the sum is far smaller than what was added."""
    alike = [[[0.1, 0.2, -0.3], [-0.3, 0.1, 0.2], [0.2, -0.3, 0.1]], [[1e8, 0.1, -1e8], [0.1, 1e8, -1e8], [1e8, -1e8, 0.1]]]
    found = advantages(alike, cfg, [1.0] * 3)
    if name_of_estimator(cfg) != "gdpo":
        assert len(set(found.rewards[0])) > 1 and len(set(found.rewards[1])) > 1, "the rounding differs"
        assert found.is_zero_std.tolist() == [True, True] == zero_std_groups(alike, cfg, [1.0] * 3).tolist()
        assert cfg.advantage_estimator == "reinforce_plus_plus" or (found.advantages == 0.0).all()
    single = [[[0.1 + 0.2 + 0.3], [0.3 + 0.2 + 0.1]]]
    assert advantages(single, cfg, [1.0]).is_zero_std.tolist() == [True]


@pytest.mark.parametrize("cfg", COMBINATIONS, ids=lambda cfg: f"{cfg.advantage_estimator}-{cfg.scale_rewards}")
@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_zero_std_groups_of_a_batch_equal_those_of_single_groups(cfg, seed):
    # 0.1 + 0.2 is not 0.3: a sum taken in another order would tell equal completions apart, or take different ones for equal.
    rng, weights = np.random.default_rng(seed), [0.0, 1.0, 0.7]
    groups = [[[None if rng.random() < 0.2 else float(rng.choice([0.1, 0.2, 0.3])) for _ in weights] for _ in range(2)] for _ in range(17)]
    alone = [bool(advantages([group], cfg, weights).is_zero_std[0]) for group in groups]
    assert zero_std_groups(groups, cfg, weights).tolist() == alone == advantages(groups, cfg, weights).is_zero_std.tolist()
    assert seed or (any(alone) and not all(alone))


def test_advantage_is_largest_for_the_best_completion():
    for cfg in COMBINATIONS:
        found = advantages(([[[0.0], [1.0], [0.2]], [[0.5], [0.1], [0.1]]]), cfg, [1.0]).advantages
        assert found[0].argmax() == 1 and found[1].argmax() == 0


def test_advantage_of_unscored_completion_is_zero_and_excluded_from_baseline():
    with_none = compute_advantages([[[1.0, None], [0.0, None], [None, None]]], (1.0, 1.0))
    assert with_none.advantages[0][2] == 0.0 and np.isnan(with_none.rewards[0][2])
    assert with_none.advantages[0][:2] == pytest.approx(compute_advantages([[1.0, 0.0]]).advantages[0])


def test_advantages_of_unscored_rollout_are_all_zero():
    for cfg in COMBINATIONS:
        found = advantages(([[[None], [None]]] * 2), cfg, [1.0])
        assert (found.advantages == 0).all() and found.is_zero_std.all()
        assert reward_metrics(found, ["f"]) == {"frac_reward_zero_std": 1.0}


def test_kl_penalty_is_subtracted_before_the_baseline():
    penalty = np.array([[0.5, 0.0]])
    assert compute_advantages([[1, 1]], kl_penalty=penalty, scale_rewards="none").advantages.tolist() == [[-0.25, 0.25]]
    result = compute_advantages([[1, 1]], kl_penalty=penalty)
    # Rewards alone are reported, and say whether a group is zero-std.
    assert result.rewards.tolist() == [[1, 1]] and result.is_zero_std.tolist() == [True]


def test_reward_metrics_by_hand():
    result = compute_advantages([[[1.0, 0.0], [0.0, None]], [[1.0, 1.0], [1.0, 1.0]]], (1.0, 0.5))
    assert reward_metrics(result, ["accuracy", "format"]) == pytest.approx(
        {
            "reward": (1.0 + 0.0 + 1.5 + 1.5) / 4,
            "reward_std": 0.7071067811865476,
            "frac_reward_zero_std": 0.5,
            "rewards/accuracy/mean": 0.75,
            "rewards/accuracy/std": 0.5,
            "rewards/format/mean": 2 / 3,
            "rewards/format/std": 0.5773502691896258,
        }
    )


@pytest.mark.parametrize("estimator", ["grpo", "gdpo"])
def test_reward_of_weight_zero_does_not_affect_zero_std_groups(estimator):
    watched = [[[1.0, 0.1], [1.0, 0.9]], [[1.0, 0.5], [0.0, 0.5]]]
    assert compute_advantages(watched, (1.0, 0.0), advantage_estimator=estimator).is_zero_std.tolist() == [True, False]


def test_gdpo_advantages_are_nonzero_if_one_of_two_rewards_differs():
    found = compute_advantages([[[1.0, 0.1], [1.0, 0.9]], [[1.0, 0.5], [1.0, 0.5]]], (1.0, 1.0), advantage_estimator="gdpo")
    assert found.is_zero_std.tolist() == [False, True] and found.advantages[0, 0] < 0 < found.advantages[0, 1]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_advantages_of_largest_valid_rewards_are_finite(estimator):
    """The protocol refuses more than LARGEST and the settings weights of more than LARGEST_WEIGHT: their squares still add up."""
    from megatron_grpo.run.config.rules.settings import LARGEST_WEIGHT
    from megatron_grpo.run.rewards.protocol import LARGEST

    rewards = np.array([[[LARGEST], [-LARGEST]], [[LARGEST], [1.0]]])
    weights = [LARGEST_WEIGHT]
    with np.errstate(over="raise", invalid="raise"):
        found = advantages(rewards.tolist(), GrpoConfig(advantage_estimator=estimator), weights)
    assert np.isfinite(found.advantages).all() and found.advantages[0, 0] > found.advantages[0, 1]
    assert np.isfinite(found.advantages.astype(np.float32)).all()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_without_a_reward_function_all_advantages_are_zero(estimator):
    """As where a teacher alone teaches: groups are zero-std, and there is no reward to be told."""
    found = advantages([[(), ()], [(), ()], [(), ()]], GrpoConfig(advantage_estimator=estimator), [])
    assert found.advantages.shape == (3, 2) and not found.advantages.any() and found.is_zero_std.all()
    assert reward_metrics(found, []) == {"frac_reward_zero_std": 1.0}
