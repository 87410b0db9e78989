"""Ratios between two policies on the same tokens: importance ratios, KL estimators, a teacher's log-ratio, and corrections.

Corrections are importance weights for the mismatch between the engine that samples and the trainer that scores, and the mask for sequences
that drifted too far. Sums over whole sequences of a packed micro-batch, whose trained positions may be on several context-parallel ranks,
come first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

# Sums a tensor, such as one number per sequence [S], over the ranks that hold parts of the same sequences; differentiable. Every such rank
# gets the total, so its backward must sum the gradients over the same ranks.
SumOverContext = Callable[[torch.Tensor], torch.Tensor]


def whole_sequences(per_sequence: torch.Tensor) -> torch.Tensor:
    """Return the input: the SumOverContext of a rank that holds every sequence whole."""
    return per_sequence


class Sequences:
    """Mapping of the C trained positions to their S sequences.

    Each quantity costs at most one reduction, in an order that depends on the configuration alone, so context-parallel ranks agree on it.

    Args:
        index: int64 [C], 0..S-1: sequence of each position.
        num_sequences: S.
        sum_over_context: Sums partial results over context-parallel ranks.
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
Ratio = Callable[[torch.Tensor, torch.Tensor, Sequences], torch.Tensor]

# exp(20) is 5e8: far outside every clip range, and still harmless in float32. Outside it the gradient is 0.
LOG_RATIO_BOUND = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to +-`LOG_RATIO_BOUND`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return PPO's ratio r[i,t] = exp(logp - old), [C].

    Args:
        logprobs: [C], current log-probs.
        old_logprobs: [C], constants.
        sequences: Sequences of the positions (unused).
    """
    return bounded(logprobs - old_logprobs).exp()


def sequence_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return r[i] = exp(mean over t of (logp - old)), shared by the sequence's tokens, [C] (GSPO, arXiv 2507.18071).

    The gradient of every token goes through the mean, hence through the sum over context-parallel ranks.

    Args:
        logprobs: [C], current log-probs.
        old_logprobs: [C], constants.
        sequences: Sequences of the positions.
    """
    return sequences.scatter(bounded(sequences.mean(logprobs - old_logprobs)).exp())


def sequence_token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Return the sequence's ratio with the gradient of each token's log-prob, [C] (GSPO-token, arXiv 2507.18071).

    Args:
        logprobs: [C], current log-probs.
        old_logprobs: [C], constants.
        sequences: Sequences of the positions.
    """
    with torch.no_grad():
        value = sequence_ratio(logprobs, old_logprobs, sequences)
    return value * (logprobs - logprobs.detach()).exp()


RATIOS: dict[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio, "sequence_token": sequence_token_ratio}

# Estimates KL(policy || reference) from one sample: (logprobs [C], ref_logprobs [C]) -> kl [C]. Their d is ref - logp, as in
# http://joschu.net/blog/kl-approx.html.
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return -d with d = ref - logp, [C]: unbiased, may be negative.

    As a loss without the ratio its on-policy gradient has zero mean: `validation.problems` refuses that.

    Args:
        logprobs: [C], current log-probs.
        ref_logprobs: [C], log-probs of the reference.
    """
    return -bounded(ref_logprobs - logprobs)


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return d*d/2 with d = ref - logp, [C].

    Args:
        logprobs: [C], current log-probs.
        ref_logprobs: [C], log-probs of the reference.
    """
    return 0.5 * bounded(ref_logprobs - logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = ref - logp, [C]: unbiased and never negative.

    Args:
        logprobs: [C], current log-probs.
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
        teacher_logprobs: [C], NaN where no teacher scored the row.
        old_logprobs: [C].
    """
    return (teacher_logprobs - old_logprobs).nan_to_num(nan=0.0)


# ---- corrections: detached factors `c` of a token's loss. They need current log-probs, and never change a denominator


class Importance(NamedTuple):
    """Importance weights of the rollout correction.

    Args:
        factors: [C].
        units: [C], weight of each factor in a mean: 1 per token, or 1/length where all tokens of a sequence share a factor.
    """

    factors: torch.Tensor
    units: torch.Tensor


# (log rho [C] with 0 where the sampler gave no log-prob, sequences) -> Importance
RolloutCorrection = Callable[[torch.Tensor, Sequences], Importance]


def log_rho(old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """Return old - sampler log-prob [C], and 0 (a ratio of 1) where the sampler has no log-prob.

    Args:
        old_logprobs: [C].
        sampler_logprobs: [C], NaN where the sampler gave none.
    """
    return (old_logprobs - sampler_logprobs).nan_to_num(nan=0.0)


def off_policy_mask(
    delta: float,
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Mask sequences of negative advantage that drifted from the sampler (DeepSeek-V3.2, arXiv 2512.02556).

    Where the sampler gave no log-prob the old one is used instead.

    Args:
        delta: Largest allowed mean of `sampler - logp` over a sequence, in nats.
        logprobs: [C], current log-probs, constants.
        old_logprobs: [C].
        sampler_logprobs: [C], NaN where the sampler gave none.
        advantages: [C].
        sequences: Sequences of the positions.

    Returns:
        [C], 0 for the tokens of masked sequences, else 1.
    """
    before = torch.where(sampler_logprobs.isnan(), old_logprobs, sampler_logprobs)
    drifted = sequences.scatter(sequences.mean(before - logprobs) > delta)
    return (~(drifted & (advantages < 0))).to(logprobs.dtype)


def rollout_correction(mode: str, *, lowest: float, highest: float, geometric: bool) -> RolloutCorrection:
    """Return the correction function of a mode.

    Truncate: min(rho, C), and at least `lowest`. Mask: rho where it is inside its bounds, else 0. A sequence's rho, for all its tokens, is
    the product over them (TRL), or with `geometric` their geometric mean (Megatron-SWIFT).

    Args:
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`.
        lowest: Lower bound of rho.
        highest: Upper bound C of rho.
        geometric: Whether a sequence's rho is the geometric mean.
    """
    level, _, bound = mode.partition("_")
    limit: Callable[[torch.Tensor], torch.Tensor] = {
        "truncate": lambda rho: rho.clamp(lowest, highest),
        "mask": lambda rho: torch.where((rho >= lowest) & (rho <= highest), rho, 0.0),
    }[bound]

    def of_tokens(log_rho: torch.Tensor, sequences: Sequences) -> Importance:
        return Importance(limit(bounded(log_rho).exp()), torch.ones_like(log_rho))

    def of_sequences(log_rho: torch.Tensor, sequences: Sequences) -> Importance:
        total = sequences.mean(log_rho) if geometric else sequences.sum(log_rho)
        return Importance(sequences.scatter(limit(bounded(total).exp())), sequences.one_over_length)

    return of_tokens if level == "token" else of_sequences
