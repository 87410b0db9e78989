"""Objectives (the loss l[i,t] of one trained token before its weight) and the ratios between policies that they take.

A new objective is a function here and a row in `loss.OBJECTIVES`.

Ratios compare two policies on the same tokens: importance ratios, KL estimators, a teacher's log-ratio, and corrections. Corrections are
importance weights for the mismatch between the engine that samples and the trainer that scores, and the mask for sequences that drifted
too far. Sums over whole sequences of a packed micro-batch, whose trained positions may be on several context-parallel ranks, come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

# Sums a tensor, such as one number per sequence [S], over the ranks that hold parts of the same sequences; differentiable. Every such rank
# gets the total, so its backward must sum the gradients over the same ranks.
SumOverContext = Callable[[torch.Tensor], torch.Tensor]


def no_sum_over_context(per_sequence: torch.Tensor) -> torch.Tensor:
    """Return the input: the SumOverContext of a rank that holds every sequence whole.

    Args:
        per_sequence: Sums over the tokens of each sequence.
    """
    return per_sequence


class SequenceIndex:
    """Mapping of the C trained positions to their S sequences.

    Each quantity costs at most one reduction, in an order that depends on the configuration alone, so context-parallel ranks agree on it.

    Args:
        index: int64 [C], 0..S-1: sequence of each position.
    """

    def __init__(self, index: torch.Tensor, num_sequences: int, sum_over_context: SumOverContext):
        self.index = index
        self.num_sequences = num_sequences
        self.over_context = sum_over_context  # sums partial results, each over one context-parallel rank's positions

    def sum(self, per_token: torch.Tensor) -> torch.Tensor:
        """Sum values per sequence, over all context-parallel ranks.

        Args:
            per_token: [C].

        Returns:
            [S].
        """
        return self.over_context(per_token.new_zeros(self.num_sequences).index_add(0, self.index, per_token))

    def mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """Average values per sequence, over its trained positions on all context-parallel ranks.

        Args:
            per_token: [C].

        Returns:
            [S].
        """
        return self.sum(per_token) / self.lengths

    def scatter(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Broadcast values per sequence to its positions.

        Args:
            per_sequence: [S].

        Returns:
            [C].
        """
        return per_sequence[self.index]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Trained positions of each sequence, float64 [S]; at least 1, so that a sequence without any has mean 0."""
        return self.sum(torch.ones_like(self.index, dtype=torch.float64)).clamp(min=1.0)

    @cached_property
    def one_over_length(self) -> torch.Tensor:
        """1 / length of the position's sequence, [C]. Summed over positions it counts each sequence once."""
        return self.scatter(1.0 / self.lengths)


# ---- the importance ratio, and the KL

# (logprobs [C], old_logprobs [C] (a constant), sequences) -> r [C], per token or per sequence.
Ratio = Callable[[torch.Tensor, torch.Tensor, SequenceIndex], torch.Tensor]

# exp(20) is 5e8: far outside every clip range, and still harmless in float32. Outside it the gradient is 0.
LOG_RATIO_BOUND = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to +-`LOG_RATIO_BOUND`.

    Args:
        log_ratio: float32 of any shape, in nats.
    """
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: SequenceIndex) -> torch.Tensor:
    """Return PPO's ratio r[i,t] = exp(logp - old), [C] (arXiv 1707.06347, equation 6).

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        old_logprobs: Old log-probs, [C]; constants.
    """
    return bounded(logprobs - old_logprobs).exp()


def sequence_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: SequenceIndex) -> torch.Tensor:
    """Return r[i] = exp(mean over t of (logp - old)), shared by the sequence's tokens, [C].

    Source: GSPO, arXiv 2507.18071, equation 7.

    The gradient of every token goes through the mean, hence through the sum over context-parallel ranks.

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        old_logprobs: Old log-probs, [C]; constants.
    """
    return sequences.scatter(bounded(sequences.mean(logprobs - old_logprobs)).exp())


def sequence_token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: SequenceIndex) -> torch.Tensor:
    """Return the sequence's ratio with the gradient of each token's log-prob, [C].

    Source: GSPO-token, arXiv 2507.18071, equation 14.

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        old_logprobs: Old log-probs, [C]; constants.
    """
    with torch.no_grad():
        value = sequence_ratio(logprobs, old_logprobs, sequences)
    return value * (logprobs - logprobs.detach()).exp()


RATIOS: dict[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio, "sequence_token": sequence_token_ratio}

# Estimates KL(policy || reference) from one sample: (logprobs [C], ref_logprobs [C]) -> kl [C]. Their d is ref - logp, as in
# Schulman 2020, http://joschu.net/blog/kl-approx.html.
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return -d with d = ref - logp, [C]: unbiased, may be negative (Schulman 2020, k1).

    As a loss without the ratio its on-policy gradient has zero mean: `validation.problems` refuses that.

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        ref_logprobs: [C], log-probs of the reference.
    """
    return -bounded(ref_logprobs - logprobs)


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return d*d/2 with d = ref - logp, [C] (Schulman 2020, k2).

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        ref_logprobs: [C], log-probs of the reference.
    """
    return 0.5 * bounded(ref_logprobs - logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = ref - logp, [C]: unbiased and never negative.

    Source: Schulman 2020, k3; GRPO, arXiv 2402.03300, equation 4.

    Args:
        logprobs: Log-prob of each token, [C]; current log-probs.
        ref_logprobs: [C], log-probs of the reference.
    """
    d = bounded(ref_logprobs - logprobs)
    return d.exp() - d - 1.0


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def teacher_log_ratio(teacher_logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p_teacher - log p_old [C], a constant of the gradient; 0 where no teacher scored the row (NaN).

    Its mean over tokens sampled from the old policy is -KL(old || teacher), so as a reward of each token it pulls the policy towards the
    teacher ("On-Policy Distillation", Thinking Machines Lab 2025; Megatron-SWIFT's `teacher_kl_coef`). A token is rewarded for itself
    alone: its effect on later tokens does not count.

    Args:
        teacher_logprobs: The teacher's log-probs, [C]; NaN where no teacher scored the row.
        old_logprobs: Old log-probs, [C].
    """
    return (teacher_logprobs - old_logprobs).nan_to_num(nan=0.0)


# ---- corrections: detached factors `c` of a token's loss. They need current log-probs, and never change a denominator


class ImportanceWeights(NamedTuple):
    """Importance weights of the rollout correction.

    Args:
        factors: [C].
        units: [C], weight of each factor in a mean: 1 per token, or 1/length where all tokens of a sequence share a factor.
    """

    factors: torch.Tensor
    units: torch.Tensor


# (log rho [C] with 0 where the sampler gave no log-prob, sequences) -> ImportanceWeights
RolloutCorrection = Callable[[torch.Tensor, SequenceIndex], ImportanceWeights]


def log_rho(old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """Return old - sampler log-prob [C], and 0 (a ratio of 1) where the sampler has no log-prob.

    Args:
        old_logprobs: Old log-probs, [C].
        sampler_logprobs: The sampler's log-probs, [C]; NaN where the sampler gave none.
    """
    return (old_logprobs - sampler_logprobs).nan_to_num(nan=0.0)


def off_policy_mask(
    delta: float,
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: SequenceIndex,
) -> torch.Tensor:
    """Mask sequences of negative advantage that drifted from the sampler (DeepSeek-V3.2, arXiv 2512.02556).

    Where the sampler gave no log-prob the old one is used instead.

    Args:
        delta: Largest allowed mean of `sampler - logp` over a sequence, in nats.
        logprobs: Log-prob of each token, [C]; current log-probs, constants.
        old_logprobs: Old log-probs, [C].
        sampler_logprobs: The sampler's log-probs, [C]; NaN where the sampler gave none.
        advantages: Advantage of each position, [C].

    Returns:
        [C], 0 for the tokens of masked sequences, else 1.
    """
    behavior_logprobs = torch.where(sampler_logprobs.isnan(), old_logprobs, sampler_logprobs)
    drifted = sequences.scatter(sequences.mean(behavior_logprobs - logprobs) > delta)
    return (~(drifted & (advantages < 0))).to(logprobs.dtype)


def rollout_correction(mode: str, *, lowest: float, highest: float, geometric: bool) -> RolloutCorrection:
    """Return the correction function of a mode.

    Truncate: min(rho, C), and at least `lowest`. Mask: rho where it is inside its bounds, else 0. A sequence's rho, for all its tokens, is
    the product over them (TRL), or with `geometric` their geometric mean (Megatron-SWIFT).

    Args:
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`.
        highest: Upper bound C of rho.
        geometric: Whether a sequence's rho is the geometric mean.
    """
    level, _, bound = mode.partition("_")
    limit: Callable[[torch.Tensor], torch.Tensor] = {
        "truncate": lambda rho: rho.clamp(lowest, highest),
        "mask": lambda rho: torch.where((rho >= lowest) & (rho <= highest), rho, 0.0),
    }[bound]

    def weight_tokens(log_rho: torch.Tensor, sequences: SequenceIndex) -> ImportanceWeights:
        return ImportanceWeights(limit(bounded(log_rho).exp()), torch.ones_like(log_rho))

    def weight_sequences(log_rho: torch.Tensor, sequences: SequenceIndex) -> ImportanceWeights:
        total = sequences.mean(log_rho) if geometric else sequences.sum(log_rho)
        return ImportanceWeights(sequences.scatter(limit(bounded(total).exp())), sequences.one_over_length)

    return weight_tokens if level == "token" else weight_sequences


class ClassificationTerms(NamedTuple):
    """Classification terms of a token's sequence for `real`, see `classification`.

    Args:
        value: The sequence's share of the loss, float64 [C].
        slope: Its derivative by the sequence's score, float64 [C].
    """

    value: torch.Tensor
    slope: torch.Tensor


class ObjectiveInputs(NamedTuple):
    """Inputs of an objective, for C trained positions.

    Args:
        ratio: R, at the level of `importance_sampling_level`.
        old_logprobs: Constants.
        token_index: Token index in its row, from 0, untrained tokens counted; int64.
        longest: Greater than any `token_index` in this micro-batch.
        correction: Factors of the rollout correction; None without one.
    """

    ratio: torch.Tensor
    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequences: SequenceIndex
    token_index: torch.Tensor | None = None
    longest: int = 0
    correction: torch.Tensor | None = None
    labels: ClassificationTerms | None = None


class PerTokenLoss(NamedTuple):
    """Loss of each trained position, and its clip decision.

    Args:
        loss: [C].
        is_low: bool [C], whether the lower bound determined the loss (for the clip metrics).
        is_high: bool [C], whether the upper bound determined the loss.
        metrics: Further metrics by name, [C] each; the metric is the mean.
    """

    loss: torch.Tensor
    is_low: torch.Tensor
    is_high: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = {}


Objective = Callable[[ObjectiveInputs], PerTokenLoss]


def clipped_surrogate(epsilon: float, epsilon_high: float) -> Objective:
    """Return PPO's surrogate -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) (arXiv 1707.06347, equation 7).

    Args:
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1; DAPO raises it (arXiv 2503.14476, equation 10).
    """
    return two_sided(epsilon, epsilon_high, float("inf"))


def two_sided(epsilon: float, epsilon_high: float, delta: float) -> Objective:
    """Return the surrogate of `clipped_surrogate`, with min(r, delta) for r in the unclipped term.

    It bounds the contribution of A < 0 (INTELLECT-2, arXiv 2505.07291).

    Args:
        epsilon: Clip range below 1.
        epsilon_high: Clip range above 1.
        delta: Upper bound of r in the unclipped term.
    """
    lowest, highest = 1.0 - epsilon, 1.0 + epsilon_high

    def objective(tokens: ObjectiveInputs) -> PerTokenLoss:
        ratio, advantages = tokens.ratio, tokens.advantages
        surrogate = torch.min(ratio.clamp(max=delta) * advantages, ratio.clamp(lowest, highest) * advantages)
        return PerTokenLoss(-surrogate, (ratio < lowest) & (advantages < 0), (ratio > highest) & (advantages > 0))

    return objective


def cispo(epsilon_high: float) -> Objective:
    """Return the objective -stopgrad(min(r, epsilon_high)) A logp (MiniMax-M1, arXiv 2506.13585).

    No token loses its gradient, only its weight is bounded.

    Args:
        epsilon_high: Upper bound of r itself, not of its distance from 1.
    """

    def objective(tokens: ObjectiveInputs) -> PerTokenLoss:
        weight = tokens.ratio.detach().clamp(max=epsilon_high)
        is_high = (tokens.ratio > epsilon_high) & (tokens.advantages > 0)
        return PerTokenLoss(-weight * tokens.advantages * tokens.logprobs, torch.zeros_like(is_high), is_high)

    return objective


def sapo(temperature_pos: float, temperature_neg: float) -> Objective:
    """Return the objective -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip (arXiv 2511.20347).

    Its slope at r = 1 is A, as PPO's.

    Args:
        temperature_pos: tau where A > 0.
    """

    def objective(tokens: ObjectiveInputs) -> PerTokenLoss:
        tau = torch.where(tokens.advantages > 0, tokens.ratio.new_tensor(temperature_pos), tokens.ratio.new_tensor(temperature_neg))
        return _unclipped(tokens, -(4.0 / tau) * torch.sigmoid(tau * (tokens.ratio - 1.0)) * tokens.advantages)

    return objective


# A sequence's weight is clamped to [this, exp(20)]: the bounds of TRL and of the paper's code.
SMALLEST_WEIGHT = 1e-8


def vespo(positive: tuple[float, float], negative: tuple[float, float]) -> Objective:
    """Return the objective -stopgrad(phi(w)) A logp with phi(w) = w^k exp(lambda (1 - w)) (arXiv 2602.10693).

    phi is 1 at w = 1. w is the product of the sequence's token ratios, and of the factors of the rollout correction if there is one: it
    belongs inside phi, not beside it.

    Args:
        positive: (k, lambda) where A is at least 0.
        negative: (k, lambda) where A is below 0.
    """

    def objective(tokens: ObjectiveInputs) -> PerTokenLoss:
        with torch.no_grad():
            log_ratio = bounded(tokens.logprobs - tokens.old_logprobs)
            if tokens.correction is not None:
                log_ratio = log_ratio + tokens.correction.log().clamp(math.log(SMALLEST_WEIGHT), 20.0)
            log_w = tokens.sequences.scatter(tokens.sequences.sum(log_ratio).clamp(math.log(SMALLEST_WEIGHT), 20.0))
            k, slope = (torch.where(tokens.advantages >= 0, log_w.new_tensor(a), log_w.new_tensor(b)) for a, b in zip(positive, negative))
            phi = (slope + k * log_w - slope * log_w.exp()).exp()
        return _unclipped(tokens, -phi * tokens.advantages * tokens.logprobs, {"vespo/phi_seq_mean": phi})

    return objective


def fipo(
    surrogate: Objective, *, half_life: float, clip_range: float, high_only: bool, safety: float | None, delta: float | None
) -> Objective:
    """Return the clipped surrogate times an influence weight, a constant of the gradient (arXiv 2603.19835).

        f[t] = clip(exp(sum over k >= t of 2^(-(k - t) / half_life) (logp - old)[k]), low, 1 + clip_range)

    Args:
        half_life: Half-life of the discount, in tokens.
        clip_range: Clip range of the weight; 0 clips nothing.
        high_only: Whether low is 1 instead of 1 - clip_range.
        safety: Ratio above which, where A < 0, f is at least 0.8 and at most 1; None for no bound.
        delta: Ratio above which a token adds nothing to the sum; None for no limit.
    """

    def objective(tokens: ObjectiveInputs) -> PerTokenLoss:
        with torch.no_grad():
            shift = tokens.logprobs - tokens.old_logprobs
            if delta is not None:
                shift = torch.where(tokens.ratio > delta, 0.0, shift)
            future = _discounted_future(tokens, shift, 2.0 ** (-1.0 / half_life))
            influence = bounded(future).exp()
            if clip_range:
                influence = influence.clamp(1.0 if high_only else 1.0 - clip_range, 1.0 + clip_range)
            is_unsafe = torch.zeros_like(tokens.ratio, dtype=torch.bool)
            if safety is not None:
                is_unsafe = (tokens.advantages < 0) & (tokens.ratio > safety)
                influence = torch.where(is_unsafe, influence.clamp(0.8, 1.0), influence)
        metrics = {"fipo/future_kl_mean": future, "fipo/influence_weight_mean": influence, "fipo/safety_keep_ratio": (~is_unsafe).double()}
        plain = surrogate(tokens)
        return plain._replace(loss=influence * plain.loss, metrics=metrics)

    return objective


def real(tokens: ObjectiveInputs) -> PerTokenLoss:
    """Return the loss of a classifier whose labels are a group's rollouts (arXiv 2602.05630).

    The logit is the sequence's mean of logp - old. The sums inside the logarithms go over a group, which micro-batches and ranks divide, so
    `classification` computes them beforehand. This function uses the sequence's share of the value and the tangent there, so the gradient
    is that of the paper's loss.

    Args:
        tokens: The trained positions; `labels` is required.
    """
    assert tokens.labels is not None, "loss_type real needs the output of `classify`"
    return _unclipped(tokens, tokens.labels.value + tokens.labels.slope * (tokens.logprobs - tokens.logprobs.detach()))


def _unclipped(tokens: ObjectiveInputs, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor] | None = None) -> PerTokenLoss:
    no_clip = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return PerTokenLoss(loss, no_clip, no_clip, metrics or {})


def _discounted_future(tokens: ObjectiveInputs, values: torch.Tensor, discount: float) -> torch.Tensor:
    """Sum each token's and its sequence's later values, each times discount^(distance in tokens), [C].

    It takes log2(longest) doublings: after n of them an entry holds the sum of the 2^n values from it on.
    """
    assert tokens.token_index is not None, "loss_type fipo needs token positions"
    sequences = tokens.sequences
    flat = sequences.index * tokens.longest + tokens.token_index
    table = sequences.over_context(values.new_zeros(sequences.num_sequences * tokens.longest).index_add(0, flat, values))
    table, reach = table.view(sequences.num_sequences, tokens.longest), 1
    while reach < tokens.longest:
        table = table + discount**reach * torch.nn.functional.pad(table[:, reach:], (0, reach))
        reach *= 2
    return table.reshape(-1)[flat]


def classification(
    scores: Sequence[float], advantages: Sequence[float], groups: Sequence[Hashable], trains: Sequence[bool], *, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute each rollout's share of its group's `real` loss and the slope there, for a whole global batch.

    The loss of a group is log(1 + sum over A > 0 of exp(-s / tau)) + log(1 + sum over A < 0 of exp(s / tau)), where s is the mean over a
    rollout's trained tokens of logp - old; groups without a rollout on either side have none (arXiv 2602.05630, with its anchor logits of
    0). The loss of a step is the mean over its groups. The arguments are plain numbers, so the rows may be on any rank. A rollout with A =
    0, either because no reward applied or because it is exactly average, is on neither side.

    Args:
        scores: s of each row.
        advantages: A of each row.
        groups: Any identifier of each row's group. All rows of a group must be given.
        trains: Whether any token of each row is trained. If not, the row takes no part in its group's sums.

    Returns:
        (values, slopes), float64 [rows]. The mean of `values` over all rows is the loss, that of `slopes` its derivative by each score.
    """
    s, a, does = np.asarray(scores, dtype=np.float64) / tau, np.asarray(advantages), np.asarray(trains, dtype=bool)
    values, slopes = np.zeros(len(s)), np.zeros(len(s))
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    share = len(s) / max(len(rows), 1)  # turns a mean over rows into a mean over groups
    for members in rows.values():
        group_rows = np.array(members)
        sides = [(group_rows[(a[group_rows] > 0) & does[group_rows]], -1.0), (group_rows[(a[group_rows] < 0) & does[group_rows]], 1.0)]
        if not all(len(side) for side, _ in sides):
            continue
        for side, sign in sides:
            highest = max(0.0, (sign * s[side]).max())  # the anchor's logit is 0
            parts = np.exp(sign * s[side] - highest)
            total = np.exp(-highest) + parts.sum()
            values[side] = share * (highest + np.log(total)) / len(side)
            slopes[side] = share * sign / tau * parts / total
    return values, slopes
