"""Advantages of completions, from the rewards of a whole rollout.

Everything is float64 and numpy, so every rank gets bitwise the same values. All functions take the rollout before it is partitioned over
ranks and micro-batches, because a group may straddle both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.core.settings import EQUAL_REWARDS, GrpoConfig

# Added to a std before dividing by it, as TRL and Megatron-SWIFT do.
STD_EPSILON = 1e-4
Rewards = Sequence[Sequence["float | None"]]  # rewards of one group: [G, num_reward_funcs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """Advantages of a rollout's completions, with the rewards that they come from.

    Args:
        advantages: float64 [num_groups, G], 0 where no reward function applied.
        rewards: float64 [num_groups, G], the weighted total reward (before any KL penalty); NaN where no function applied.
        rewards_per_func: float64 [num_groups, G, num_reward_funcs], NaN where a function did not apply.
        is_zero_std: bool [num_groups], whether all rewards of the group are equal up to rounding: no completion is better than another.
    """

    advantages: np.ndarray
    rewards: np.ndarray
    rewards_per_func: np.ndarray
    is_zero_std: np.ndarray

    @classmethod
    def from_parts(cls, parts: Sequence[Advantages]) -> Advantages:
        """Concatenate the advantages of several rollouts.

        Args:
            parts: Advantages of each rollout, in order.
        """
        names = ("advantages", "rewards", "rewards_per_func", "is_zero_std")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def advantages(
    rewards: Sequence[Rewards], cfg: GrpoConfig, reward_weights: Sequence[float], *, kl_penalty: np.ndarray | None = None
) -> Advantages:
    """Compute the advantages of one rollout.

    Args:
        rewards: Rewards of each group, [G, num_reward_funcs], `None` where a function does not apply. All groups must have the same number
            of completions.
        cfg: The GRPO settings; they select the estimator and its scale.
        kl_penalty: float [num_groups, G], `beta * sum over tokens of (old - ref)`, subtracted from the reward before the baseline
            (`--kl_in_reward`). The `gdpo` estimator has no single reward to subtract it from, and `validation.problems` refuses the pair.

    Raises:
        ValueError: `kl_penalty` is given with the `gdpo` estimator.
    """
    per_func = rewards_per_func(rewards, len(reward_weights))
    totals = total_rewards(per_func, reward_weights)
    estimator = name_of_estimator(cfg)
    is_zero_std = _is_zero_std(per_func, totals, estimator, reward_weights)
    scale = largest_addends(per_func, reward_weights)
    if estimator == "gdpo":
        if kl_penalty is not None:
            raise ValueError("gdpo normalizes each reward function separately: there is no single reward to subtract a KL penalty from")
        return Advantages(advantages=_gdpo(per_func, reward_weights), rewards=totals, rewards_per_func=per_func, is_zero_std=is_zero_std)
    totals_with_kl = totals if kl_penalty is None else totals - kl_penalty
    values = ESTIMATORS[estimator](totals_with_kl, cfg.scale_rewards)
    if estimator in NEEDS_GROUP:
        # The mean of equal floats may miss their value by an ulp. A group of equal rewards must give exactly 0.
        values[are_equal(totals_with_kl[:, :, None], scale)[:, 0]] = 0.0
    return Advantages(advantages=np.nan_to_num(values, nan=0.0), rewards=totals, rewards_per_func=per_func, is_zero_std=is_zero_std)


def zero_std_groups(rewards: Sequence[Rewards], cfg: GrpoConfig, reward_weights: Sequence[float]) -> np.ndarray:
    """Return which groups are zero-std groups, bool [num_groups].

    This is `is_zero_std` of the groups' advantages, without computing the advantages. Groups do not interact. The arguments are those of
    `advantages`.

    Args:
        rewards: Rewards of each group.
        reward_weights: Weight of each reward function.
    """
    per_func = rewards_per_func(rewards, len(reward_weights))
    return _is_zero_std(per_func, total_rewards(per_func, reward_weights), name_of_estimator(cfg), reward_weights)


def _is_zero_std(per_func: np.ndarray, totals: np.ndarray, estimator: str, reward_weights: Sequence[float]) -> np.ndarray:
    """Find zero-std groups by the rewards alone, since a KL penalty makes no two completions equal."""
    if estimator == "gdpo":
        counted = per_func[:, :, np.asarray(reward_weights) != 0]  # a function of weight 0 is only logged
        return np.all(are_equal(counted), axis=1)
    return are_equal(totals[:, :, None], largest_addends(per_func, reward_weights))[:, 0]


def name_of_estimator(cfg: GrpoConfig) -> str:
    """Return the name of the advantage estimator that the settings select.

    `gdpo` has three spellings: an estimator here, a `scale_rewards` in Megatron-SWIFT, an aggregation in TRL.
    """
    if cfg.scale_rewards == "gdpo" or cfg.multi_objective_aggregation == "normalize_then_sum":
        return "gdpo"
    return cfg.advantage_estimator


def rewards_per_func(rewards: Sequence[Rewards], num_reward_funcs: int) -> np.ndarray:
    """Convert rewards to an array.

    Args:
        rewards: [num_groups, G, num_reward_funcs], `None` where a function does not apply.
        num_reward_funcs: Number of reward functions.

    Returns:
        float64 [num_groups, G, num_reward_funcs], NaN where a function does not apply.
    """
    group_size = len(rewards[0]) if rewards else 0
    return np.asarray(rewards, dtype=np.float64).reshape(len(rewards), group_size, num_reward_funcs)


def total_rewards(per_func: np.ndarray, reward_weights: Sequence[float]) -> np.ndarray:
    """Sum the weighted rewards of the functions that apply.

    Args:
        per_func: float64 [..., num_reward_funcs], NaN where a function does not apply.

    Returns:
        float64 [...], NaN where no function applies.
    """
    weighted = np.nan_to_num(per_func, nan=0.0) * np.asarray(reward_weights, dtype=np.float64)
    totals = weighted.sum(axis=-1)
    totals[np.isnan(per_func).all(axis=-1)] = np.nan
    return totals


def largest_addends(per_func: np.ndarray, reward_weights: Sequence[float]) -> np.ndarray:
    """Return the largest magnitude of a weighted reward in each group: float64 [num_groups, 1]. The rounding of a sum is a share of it.

    Args:
        per_func: float64 [num_groups, G, num_reward_funcs], NaN where a function does not apply.
    """
    weighted = np.abs(np.nan_to_num(per_func, nan=0.0) * np.asarray(reward_weights, dtype=np.float64))
    return weighted.max(axis=(1, 2), initial=0.0)[:, None]


def are_equal(values: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Return whether all values of a group are equal up to rounding (`EQUAL_REWARDS`), NaN ignored.

    Args:
        values: [num_groups, G, K].
        scale: [num_groups, 1], the largest number that was added; None for the largest of the values.

    Returns:
        bool [num_groups, K], True also where fewer than two values are not NaN.
    """
    lowest = np.where(np.isnan(values), np.inf, values).min(axis=1)
    highest = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    largest = np.abs(np.nan_to_num(values)).max(axis=1) if scale is None else scale
    return highest - lowest <= EQUAL_REWARDS * largest


def mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the mean, NaN ignored, keeping dimensions; NaN where all values are NaN.

    Args:
        values: float64, any shape.
        axis: Axis to average over; None for all.
    """
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis=axis, keepdims=True) / np.maximum(count, 1), np.nan)


def std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the sample standard deviation (n - 1), NaN ignored, keeping dimensions; 0 for fewer than two values.

    Args:
        values: float64, any shape.
        axis: Axis to reduce; None for all.
    """
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    squares = np.nansum((values - mean(values, axis)) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def _grpo(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Compute R - mean(group), divided by a std (arXiv 2402.03300; `none` is Dr.GRPO, arXiv 2503.20783)."""
    centred = rewards - mean(rewards, axis=1)
    return centred / SCALES[scale_rewards](rewards)


def _rloo(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Compute R - mean of the others of its group (arXiv 2402.14740); a completion alone in its group gets 0."""
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    sum_of_others = (np.nansum(rewards, axis=1, keepdims=True) - rewards) / np.maximum(count - 1, 1)
    return np.where(count > 1, rewards - sum_of_others, 0.0)


def _reinforce_plus_plus(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Normalise over the batch, without groups (arXiv 2501.03262)."""
    return (rewards - mean(rewards)) / (std(rewards) + STD_EPSILON)


def _reinforce_plus_plus_baseline(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Subtract the group mean, then divide by the std over the batch (Megatron-SWIFT calls this `reinforce_plus_plus`)."""
    centred = rewards - mean(rewards, axis=1)
    return centred / (std(centred) + STD_EPSILON)


def _gdpo(per_func: np.ndarray, reward_weights: Sequence[float]) -> np.ndarray:
    """Normalise each reward function in its group, sum with weights, then normalise over the batch (arXiv 2601.05242)."""
    normalised = (per_func - mean(per_func, axis=1)) / (std(per_func, axis=1) + STD_EPSILON)
    normalised = np.where(are_equal(per_func)[:, None, :] & ~np.isnan(per_func), 0.0, normalised)
    return np.nan_to_num(_reinforce_plus_plus(total_rewards(normalised, reward_weights), "batch"), nan=0.0)


SCALES: dict[str, Callable[[np.ndarray], np.ndarray | float]] = {
    "group": lambda rewards: std(rewards, axis=1) + STD_EPSILON,
    "batch": lambda rewards: std(rewards) + STD_EPSILON,
    "none": lambda rewards: 1.0,
}
ESTIMATORS: dict[str, Callable[[np.ndarray, str], np.ndarray]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
}
# Estimators whose baseline is the group: they need at least two completions per prompt, and give a zero-std group advantages of 0.
NEEDS_GROUP = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo"})


def reward_metrics(result: Advantages, names: Sequence[str]) -> dict[str, float]:
    """Return `reward`, `reward_std`, `frac_reward_zero_std` and `rewards/<name>/mean|std` over the scored completions.

    A metric over no value (a function that applied to no completion) is left out, not NaN.
    """
    columns = {"reward": result.rewards}
    columns |= {f"rewards/{name}": result.rewards_per_func[:, :, k] for k, name in enumerate(names)}
    metrics: dict[str, float] = {"frac_reward_zero_std": float(result.is_zero_std.mean())}
    for name, values in columns.items():
        if np.isnan(values).all():
            continue
        mean_name, std_name = ("reward", "reward_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
        metrics[mean_name] = float(mean(values).item())
        metrics[std_name] = float(std(values).item())
    return metrics
