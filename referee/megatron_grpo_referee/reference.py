"""GRPO and related losses in float64 in one process: the reference that tests and `megatron-grpo referee` compare with.

The module can be read from top to bottom. Nothing is packed, sharded or fused, and nothing is imported from the package. A completion is a
few arrays of its own length, the batch is a list, and sums over completions are Python loops. Arrays are torch tensors, or
`tracked.Tracked` if torch is not imported; only methods of both are called. `s` is any object with the names of the settings (such as the
package's GrpoConfig). The sections are those of docs/algorithms.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Array = Any  # float64 tensor or Tracked
Settings = Any  # an object with the names of GrpoConfig

# ---------------------------------------------------------------------------------------------------------------------------------
# Log-probs and entropy of one position's next token, at the sampling temperature
# ---------------------------------------------------------------------------------------------------------------------------------


def token_logprobs(logits: Any, targets: Any, temperature: float) -> tuple[Any, Any]:
    """Return (log-probs [T], entropy [T]) of torch logits [T, V] and targets [T].

    Args:
        logits: Logits [T, V].
        targets: Token IDs [T].
    """
    log_softmax = (logits.double() / temperature).log_softmax(dim=-1)
    logp = log_softmax.gather(-1, targets.long()[:, None])[:, 0]
    return logp, -(log_softmax.exp() * log_softmax).sum(dim=-1)


# ---------------------------------------------------------------------------------------------------------------------------------
# 1. Token weights
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass
class ReferenceCompletion:
    """One completion: float64 [T] each, over its tokens. Where `mask` is 0 a token is not trained (a tool's answer, say).

    Args:
        mask: Mask of trained tokens, 0 or 1.
        logp: Log-probs of the policy now, with gradient.
        entropy: Entropy, with gradient.
        sampler_logp: The sampler's log-probs; NaN where the sampler gave none.
        old_logp: Old log-probs; None: on-policy.
        group: Completions of one prompt.
        teacher_logp: The teacher's log-probs; None: no teacher has seen it.
        correction: Correction for off-policy data; None: computed from `sampler_logp`.
    """

    mask: Array
    logp: Array
    entropy: Array
    sampler_logp: Array
    ref_logp: Array
    old_logp: Array | None
    advantage: float
    is_truncated: bool = False
    is_zero_std: bool = False
    group: int = 0
    teacher_logp: Array | None = None
    correction: Array | None = None

    @property
    def old(self) -> Array:
        """Old log-probs of the importance ratio."""
        return self.logp.detach() if self.old_logp is None else self.old_logp


Counted = Sequence[tuple[ReferenceCompletion, Array]]


def ones_like(x: Array) -> Array:
    """Return ones of the shape of a mask.

    Args:
        x: Values of the tokens, [T].
    """
    return x.detach() * 0.0 + 1.0


def counted(completions: Sequence[ReferenceCompletion], s: Settings) -> Counted:
    """Return the completions that count for N, with their masks."""
    kept = [c for c in completions if not (s.exclude_zero_std_groups and c.is_zero_std)]
    return [(c, c.mask * 0.0 if s.overlong_filter and c.is_truncated else c.mask) for c in kept]


def token_weights(batch: Counted, s: Settings, max_completion_length: int) -> list[Array]:
    """Return u[i,t] of each counted completion.

    Args:
        max_completion_length: Limit of the completion length in tokens.
    """
    num_completions = len(batch)
    num_tokens = sum(m.sum().item() for _, m in batch)
    weights = []
    for _, m in batch:
        if s.loss_type in ("grpo", "sapo", "real"):
            u = m / (num_completions * m.sum()) if m.sum() > 0 else m
        elif s.loss_type in ("dapo", "bnpo", "cispo", "vespo", "fipo"):
            u = m / num_tokens if num_tokens > 0 else m
        elif s.loss_type == "dr_grpo":
            u = m / (num_completions * max_completion_length)
        elif s.loss_type in ("sequence_sum", "luspo"):
            u = m / num_completions
        weights.append(u)
    return weights


# ---------------------------------------------------------------------------------------------------------------------------------
# 2. The objective of a token
# ---------------------------------------------------------------------------------------------------------------------------------


def masked_mean(x: Array, m: Array) -> Array:
    """Return the mean of x over the tokens of a mask; 0 of an empty one.

    Args:
        x: Values of the tokens, [T].
        m: Mask, 1 or 0 for each token.
    """
    return (x * m).sum() / max(m.sum().item(), 1.0)


def exp20(log_ratio: Array) -> Array:
    """Return exp of a log-ratio that is clamped to +-20."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def ratio(c: ReferenceCompletion, s: Settings) -> Array:
    """Return r[i,t], or r[i] for every t."""
    token = exp20(c.logp - c.old)
    if s.importance_sampling_level == "token":
        return token
    sequence = exp20(masked_mean(c.logp - c.old, c.mask))
    if s.importance_sampling_level == "sequence":
        return sequence * ones_like(c.mask)
    return sequence.detach() * (c.logp - c.logp.detach()).exp()  # sequence_token


def token_advantage(c: ReferenceCompletion, s: Settings) -> Any:
    """Return A[i], or with a teacher A[i,t] = A[i] + coef * (log p_teacher - log p_old), a constant of the gradient."""
    if not s.teacher_model_server or c.teacher_logp is None:
        return c.advantage
    return s.teacher_kl_coef * (c.teacher_logp - c.old) + c.advantage


def objective(c: ReferenceCompletion, r: Array, s: Settings) -> Array:
    """Return l[i,t], the loss of each token.

    Args:
        r: Ratio of each token, [T].
    """
    a = token_advantage(c, s)
    if s.loss_type == "cispo":
        return -r.clamp(max=epsilon_high(s)).detach() * a * c.logp
    if s.loss_type == "sapo":
        advantage = c.mask * 0.0 + a
        positive = (advantage > 0).double()
        tau = positive * s.sapo_temperature_pos + (1.0 - positive) * s.sapo_temperature_neg
        return -(4.0 / tau) * (tau * (r - 1.0)).sigmoid() * a
    if s.loss_type == "vespo":
        k, decay = (s.vespo_k_pos, s.vespo_lambda_pos) if a >= 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
        log_w = 0.0
        corrections, drifts = rollout_importance(c, s).tolist(), (c.logp.detach() - c.old).tolist()
        for trained, correction, drift in zip(c.mask.tolist(), corrections, drifts, strict=True):
            if trained:
                log_w += min(max(drift, -20.0), 20.0) + min(max(math.log(max(correction, 1e-300)), math.log(1e-8)), 20.0)
        w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
        return -math.exp(decay + k * math.log(w) - decay * w) * a * c.logp
    if s.loss_type == "real":
        return 0.0 * c.logp  # `real_loss` is not a sum over tokens
    surrogate = -clipped(r, a, s)
    return fipo_influence(c, r, s) * surrogate if s.loss_type == "fipo" else surrogate


def epsilon_high(s: Settings) -> float:
    """Return `epsilon_high`, or its default: 5 for cispo, else `epsilon`."""
    default = 5.0 if s.loss_type == "cispo" else s.epsilon
    return default if s.epsilon_high is None else s.epsilon_high


def clipped(r: Array, a: Any, s: Settings) -> Array:
    """Return min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A).

    Args:
        r: Ratio of each token, [T].
        a: Advantage of each token, or of all.
    """
    unclipped = r if s.delta is None else r.clamp(max=s.delta)
    return (unclipped * a).minimum(r.clamp(1.0 - s.epsilon, 1.0 + epsilon_high(s)) * a)


def fipo_influence(c: ReferenceCompletion, r: Array, s: Settings) -> Array:
    """Return f[i,t], a constant: exp of the sum over k >= t of 0.5 ** ((k - t) / rate) * (logp - old) at k, clipped.

    Args:
        r: Ratio of each token, [T].
    """
    influence, future = [], 0.0
    drifts, ratios, masks = (c.logp.detach() - c.old).tolist(), r.tolist(), c.mask.tolist()
    for drift, at, trained in reversed(list(zip(drifts, ratios, masks, strict=True))):
        future *= 0.5 ** (1.0 / s.fipo_decay_rate)
        if trained and not (s.delta is not None and at > s.delta):
            future += drift
        f = math.exp(min(max(future, -20.0), 20.0))
        if s.fipo_clip_range:
            f = min(max(f, 1.0 if s.fipo_clip_high_only else 1.0 - s.fipo_clip_range), 1.0 + s.fipo_clip_range)
        if s.fipo_safety_threshold is not None and c.advantage < 0 and at > s.fipo_safety_threshold:
            f = min(max(f, 0.8), 1.0)
        influence.append(f)
    return c.mask.new_tensor(influence[::-1])


def real_loss(batch: Counted, s: Settings) -> Any:
    """Return the mean over groups of log(1 + sum over good e^(-S/tau)) + log(1 + sum over bad e^(S/tau)).

    A group without good or without bad completions contributes 0.
    """
    groups = sorted({c.group for c, _ in batch})
    loss: Any = 0.0
    for group in groups:
        scores = [(c.advantage, masked_mean(c.logp - c.old, m)) for c, m in batch if c.group == group and m.sum() > 0]
        good, bad = [score for a, score in scores if a > 0], [score for a, score in scores if a < 0]
        if good and bad:
            loss = loss + (1.0 + sum((-score / s.real_tau).exp() for score in good)).log()
            loss = loss + (1.0 + sum((score / s.real_tau).exp() for score in bad)).log()
    return loss / max(len(groups), 1)


def kl(c: ReferenceCompletion, r: Array, s: Settings) -> Array:
    """Return the estimate of KL(policy || reference) of each token, times the ratio with `use_bias_correction_kl`.

    `low_var_kl` is k3 bounded by 10, as in verl, slime and Megatron-SWIFT; no setting of the package.

    Args:
        r: Ratio of each token, [T].
    """
    d = (c.ref_logp - c.logp).clamp(-20.0, 20.0)
    k3 = d.exp() - d - 1.0
    estimate = {"k1": -d, "k2": d * d / 2, "k3": k3, "low_var_kl": k3.clamp(max=10.0)}[s.kl_estimator]
    return estimate * r if s.use_bias_correction_kl else estimate


def entropy_kept(batch: Counted, s: Settings) -> list[Array]:
    """Return the top-entropy mask of each counted completion: one quantile over all trained tokens of the global batch.

    Tokens below the quantile by at most 1e-4 of it (or 1e-5 nats) count as ties and are kept too.
    """
    if s.top_entropy_quantile >= 1.0:
        return [ones_like(m) for _, m in batch]
    everything = sorted(h for c, m in batch for h, trained in zip(c.entropy.tolist(), m.tolist(), strict=True) if trained)
    if not everything:
        return [m for _, m in batch]
    place = round((len(everything) - 1) * (1.0 - s.top_entropy_quantile), 9)
    below, above = everything[math.floor(place)], everything[math.ceil(place)]
    threshold = below + (above - below) * (place - math.floor(place))
    lowest = min(h for h in everything if h >= threshold)
    return [(c.entropy.detach() >= lowest - max(1e-4 * lowest, 1e-5)).double() for c, _ in batch]


# ---------------------------------------------------------------------------------------------------------------------------------
# 4. Factors for off-policy data
# ---------------------------------------------------------------------------------------------------------------------------------


def rollout_importance(c: ReferenceCompletion, s: Settings) -> Array:
    """Return the bounded importance weight rho of each token, which corrects for the difference between trainer and sampler."""
    if c.correction is not None:
        return c.correction
    mode = s.rollout_importance_sampling_mode
    if mode == "none":
        return ones_like(c.mask)
    log_rho = (c.old - c.sampler_logp).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        total = masked_mean(log_rho, c.mask) if s.rollout_is_geometric else (log_rho * c.mask).sum()
        log_rho = total * ones_like(c.mask)
    rho = exp20(log_rho)
    lowest, highest = s.rollout_importance_sampling_min or 0.0, s.rollout_importance_sampling_threshold
    if mode.endswith("truncate"):
        return rho.clamp(lowest, highest)
    return rho * (rho <= highest).double() * (rho >= lowest).double()


def off_policy_kept(c: ReferenceCompletion, s: Settings) -> float:
    """Return 0 for a completion of negative advantage that drifted further than the threshold, else 1."""
    if s.off_policy_sequence_mask_delta is None or c.advantage >= 0:
        return 1.0
    before = c.sampler_logp.where(c.sampler_logp == c.sampler_logp, c.old)  # NaN: the sampler gave none
    return 0.0 if masked_mean(before - c.logp.detach(), c.mask) > s.off_policy_sequence_mask_delta else 1.0


# ---------------------------------------------------------------------------------------------------------------------------------
# The loss of a global batch
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formulas:
    """Parts of the loss, of which `referee` replaces one at a time."""

    weights: Callable[..., list[Array]] = token_weights
    objective: Callable[..., Array] = objective
    kl: Callable[..., Array] = kl
    entropy_kept: Callable[..., list[Array]] = entropy_kept


FORMULAS = Formulas()


def grpo_loss(completions: Sequence[ReferenceCompletion], s: Settings, max_completion_length: int, formulas: Formulas = FORMULAS) -> Any:
    """Return sum of u * (c * l + beta * kl), minus entropy_coef * mean entropy. Differentiable in logp and entropy of every completion.

    Args:
        max_completion_length: Limit of the completion length in tokens.
    """
    batch = counted(completions, s)
    num_tokens = sum(m.sum().item() for _, m in batch)
    loss = sum(0.0 * (c.logp.sum() + c.entropy.sum()) for c in completions)
    if s.loss_type == "real":
        loss = loss + real_loss(batch, s)
    weights, kept = formulas.weights(batch, s, max_completion_length), formulas.entropy_kept(batch, s)
    for (c, m), u, high_entropy in zip(batch, weights, kept, strict=True):
        r = ratio(c, s)
        factor = high_entropy * off_policy_kept(c, s)
        if s.loss_type != "vespo":  # vespo has the correction in its weight
            factor = factor * rollout_importance(c, s)
        loss = loss + (u * factor.detach() * formulas.objective(c, r, s)).sum()
        if s.beta and not s.kl_in_reward:
            loss = loss + s.beta * (u * formulas.kl(c, r, s)).sum()
        if s.entropy_coef:
            loss = loss - s.entropy_coef * (m * c.entropy).sum() / max(num_tokens, 1)
    return loss


# ---------------------------------------------------------------------------------------------------------------------------------
# 3. Advantages
# ---------------------------------------------------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    """Return the mean.

    Args:
        values: Numbers; None where a reward does not apply.
    """
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Return the sample standard deviation; of a single value, 0.

    Args:
        values: Numbers; None where a reward does not apply.
    """
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def total(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return one completion's reward: the weighted sum over the functions that apply; None where none does.

    Args:
        row: Rewards of one completion; None where a function does not apply.
    """
    applies = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
    return sum(applies) if applies else None


def with_reward(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None.

    Args:
        values: Numbers; None where a reward does not apply.
    """
    return [v for v in values if v is not None]


def advantages(
    rewards: Sequence[Sequence[Sequence[float | None]]],
    weights: Sequence[float],
    s: Settings,
    kl_penalty: Sequence[Sequence[float]] | None = None,
    *,
    epsilon: float = 1e-4,
    deviation: Callable[[Sequence[float]], float] = std,
) -> list[list[float]]:
    """Return the advantages, [groups][G].

    Args:
        rewards: [groups][G][functions], None where a function does not apply.
        kl_penalty: [groups][G], subtracted from the rewards.
    """
    if s.advantage_estimator == "gdpo" or s.scale_rewards == "gdpo" or s.multi_objective_aggregation == "normalize_then_sum":
        return gdpo(rewards, weights, epsilon, deviation)
    totals = [[total(row, weights) for row in group] for group in rewards]
    if kl_penalty is not None:
        totals = [[None if r is None else r - p for r, p in zip(*pair, strict=True)] for pair in zip(totals, kl_penalty, strict=True)]
    batch = [r for group in totals for r in with_reward(group)]
    centered = [r - mean(with_reward(group)) for group in totals for r in with_reward(group)]
    whole = {"batch": deviation(batch), "centered": deviation(centered)}

    def advantage(r: float, group: Sequence[float]) -> float:
        others = len(group) - 1
        if s.advantage_estimator == "grpo":
            scale = {"group": lambda: deviation(group) + epsilon, "batch": lambda: whole["batch"] + epsilon, "none": lambda: 1.0}
            return (r - mean(group)) / scale[s.scale_rewards]()
        if s.advantage_estimator == "rloo":
            return r - (sum(group) - r) / others if others else 0.0
        if s.advantage_estimator == "reinforce_plus_plus":
            return (r - mean(batch)) / (whole["batch"] + epsilon)
        return (r - mean(group)) / (whole["centered"] + epsilon)  # reinforce_plus_plus_baseline

    return [[0.0 if r is None else advantage(r, with_reward(group)) for r in group] for group in totals]


def gdpo(
    rewards: Sequence[Sequence[Sequence[float | None]]],
    weights: Sequence[float],
    epsilon: float = 1e-4,
    deviation: Callable[[Sequence[float]], float] = std,
) -> list[list[float]]:
    """Return the sum of each function's advantages, normalized within the group and weighted, and then normalized over the batch.

    Args:
        deviation: Function that returns a standard deviation.
    """
    sums: list[float | None] = []
    for group in rewards:
        columns = [with_reward(column) for column in zip(*group, strict=True)]
        for row in group:
            normalized = [None if r is None else (r - mean(of)) / (deviation(of) + epsilon) for r, of in zip(row, columns, strict=True)]
            sums.append(total(normalized, weights))
    batch = with_reward(sums)
    flat = iter([0.0 if x is None else (x - mean(batch)) / (deviation(batch) + epsilon) for x in sums])
    return [[next(flat) for _ in group] for group in rewards]


def kl_penalty(completions: Sequence[ReferenceCompletion], beta: float) -> list[float]:
    """Return the penalty that `kl_in_reward` subtracts from each completion's reward: beta * sum over tokens of (old - ref)."""
    return [beta * float(((c.old - c.ref_logp) * c.mask).sum()) for c in completions]
