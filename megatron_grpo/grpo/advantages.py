"""Rewards of a whole rollout -> one advantage per completion. Float64 and numpy, so that every rank gets the same bits.

Everything here sees the rollout before it is cut over ranks and micro-batches: a group may straddle both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.config.config import GrpoConfig

# Added to a std before dividing by it, as TRL and Megatron-SWIFT do.
STD_EPSILON = 1e-4
Rewards = Sequence[Sequence["float | None"]]  # of one group: [G][num_reward_funcs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advantages:
    """What a rollout's rewards say about its completions.

    advantages: float64 [num_groups, G], 0 where no reward function applied.
    rewards: float64 [num_groups, G], the weighted total that was judged (before any KL penalty); NaN where no function applied.
    rewards_per_func: float64 [num_groups, G, num_reward_funcs], NaN where a function did not apply.
    is_dead: bool [num_groups], every reward of the group is exactly equal: nothing in it is better than anything else.
    """

    advantages: np.ndarray
    rewards: np.ndarray
    rewards_per_func: np.ndarray
    is_dead: np.ndarray

    @classmethod
    def of_all(cls, parts: Sequence[Advantages]) -> Advantages:
        """Those of several rollouts as one."""
        names = ("advantages", "rewards", "rewards_per_func", "is_dead")
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def advantages(
    rewards: Sequence[Rewards], cfg: GrpoConfig, reward_weights: Sequence[float], *, kl_penalty: np.ndarray | None = None
) -> Advantages:
    """Advantages of one rollout.

    rewards: of each group, [G][num_reward_funcs], `None` where a function does not apply.
    kl_penalty: float [num_groups, G], `beta * sum over tokens of (old - ref)`, subtracted from the reward before the baseline
    (`--kl_in_reward`; the `gdpo` estimator has no single reward to subtract it from and `refused.problems` refuses the pair).
    All groups must have the same number of completions.
    """
    per_func = rewards_per_func(rewards, len(reward_weights))
    totals = total_rewards(per_func, reward_weights)
    estimator = name_of_estimator(cfg)
    is_dead = _is_dead(per_func, totals, estimator, reward_weights)
    if estimator == "gdpo":
        if kl_penalty is not None:
            raise ValueError("gdpo normalises each reward function on its own: there is no single reward to subtract a KL penalty from")
        return Advantages(advantages=_gdpo(per_func, reward_weights), rewards=totals, rewards_per_func=per_func, is_dead=is_dead)
    judged = totals if kl_penalty is None else totals - kl_penalty
    values = ESTIMATORS[estimator](judged, cfg.scale_rewards)
    if estimator in NEEDS_GROUP:
        # The mean of equal floats may miss their value by an ulp. A group of equal rewards must give exactly 0.
        values[are_equal(judged[:, :, None])[:, 0]] = 0.0
    return Advantages(advantages=np.nan_to_num(values, nan=0.0), rewards=totals, rewards_per_func=per_func, is_dead=is_dead)


def zero_std_groups(rewards: Sequence[Rewards], cfg: GrpoConfig, reward_weights: Sequence[float]) -> np.ndarray:
    """bool [num_groups]: `is_dead` of these groups' advantages, without them; each group is judged alone. Arguments as of `advantages`."""
    per_func = rewards_per_func(rewards, len(reward_weights))
    return _is_dead(per_func, total_rewards(per_func, reward_weights), name_of_estimator(cfg), reward_weights)


def _is_dead(per_func: np.ndarray, totals: np.ndarray, estimator: str, reward_weights: Sequence[float]) -> np.ndarray:
    """By the rewards alone, since a KL penalty makes no two completions equal."""
    if estimator == "gdpo":
        counted = per_func[:, :, np.asarray(reward_weights) != 0]  # a function of weight 0 is only watched
        return np.all(are_equal(counted), axis=1)
    return are_equal(totals[:, :, None])[:, 0]


def name_of_estimator(cfg: GrpoConfig) -> str:
    """`gdpo` has three spellings: an estimator here, a `scale_rewards` in Megatron-SWIFT, an aggregation in TRL."""
    if cfg.scale_rewards == "gdpo" or cfg.multi_objective_aggregation == "normalize_then_sum":
        return "gdpo"
    return cfg.advantage_estimator


def rewards_per_func(rewards: Sequence[Rewards], num_reward_funcs: int) -> np.ndarray:
    """[num_groups][G][num_reward_funcs] with `None` -> float64 array with NaN."""
    group_size = len(rewards[0]) if rewards else 0
    return np.asarray(rewards, dtype=np.float64).reshape(len(rewards), group_size, num_reward_funcs)


def total_rewards(per_func: np.ndarray, reward_weights: Sequence[float]) -> np.ndarray:
    """Weighted sum over the functions that apply; NaN where none does."""
    weighted = np.nan_to_num(per_func, nan=0.0) * np.asarray(reward_weights, dtype=np.float64)
    totals = weighted.sum(axis=-1)
    totals[np.isnan(per_func).all(axis=-1)] = np.nan
    return totals


def are_equal(values: np.ndarray) -> np.ndarray:
    """[num_groups, G, K] -> bool [num_groups, K]: all that are not NaN are exactly equal (also when there are fewer than two)."""
    lowest = np.where(np.isnan(values), np.inf, values).min(axis=1)
    highest = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    return lowest >= highest


def mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Mean of what is not NaN, keeping dimensions; NaN where nothing is left."""
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    return np.where(count > 0, np.nansum(values, axis=axis, keepdims=True) / np.maximum(count, 1), np.nan)


def std(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Sample standard deviation (n - 1) of what is not NaN, keeping dimensions; 0 where fewer than two are left."""
    count = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    squares = np.nansum((values - mean(values, axis)) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def _grpo(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """R - mean(group), divided by a std (arXiv 2402.03300; `none` is Dr.GRPO, arXiv 2503.20783)."""
    centred = rewards - mean(rewards, axis=1)
    return centred / SCALES[scale_rewards](rewards)


def _rloo(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """R - mean of the others of its group (arXiv 2402.14740); a completion that is alone in its group gets 0."""
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    others = (np.nansum(rewards, axis=1, keepdims=True) - rewards) / np.maximum(count - 1, 1)
    return np.where(count > 1, rewards - others, 0.0)


def _reinforce_plus_plus(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Normalised over the batch, no group needed (arXiv 2501.03262)."""
    return (rewards - mean(rewards)) / (std(rewards) + STD_EPSILON)


def _reinforce_plus_plus_baseline(rewards: np.ndarray, scale_rewards: str) -> np.ndarray:
    """Group mean as baseline, std over the batch of what remains (Megatron-SWIFT calls this `reinforce_plus_plus`)."""
    centred = rewards - mean(rewards, axis=1)
    return centred / (std(centred) + STD_EPSILON)


def _gdpo(per_func: np.ndarray, reward_weights: Sequence[float]) -> np.ndarray:
    """Each reward function normalised in its group, then weighted and summed, then normalised over the batch (arXiv 2601.05242)."""
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
# Estimators whose baseline is the group: they need at least two completions per prompt, and a dead group gives them 0.
NEEDS_GROUP = frozenset({"grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo"})


def reward_metrics(result: Advantages, names: Sequence[str]) -> dict[str, float]:
    """`reward`, `reward_std`, `frac_reward_zero_std` and `rewards/<name>/mean|std`, over the completions that were judged.

    A figure over nothing (a function that applied to no completion) is left out, not NaN.
    """
    columns = {"reward": result.rewards}
    columns |= {f"rewards/{name}": result.rewards_per_func[:, :, k] for k, name in enumerate(names)}
    metrics: dict[str, float] = {"frac_reward_zero_std": float(result.is_dead.mean())}
    for name, values in columns.items():
        if np.isnan(values).all():
            continue
        mean_name, std_name = ("reward", "reward_std") if name == "reward" else (f"{name}/mean", f"{name}/std")
        metrics[mean_name] = float(mean(values).item())
        metrics[std_name] = float(std(values).item())
    return metrics
