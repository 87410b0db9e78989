"""Detached factors `c` of a token's loss: they need current log-probs, and never change a denominator.

Importance weights for the mismatch between the engine that sampled and the trainer that scores, the mask for sequences that drifted too
far, and the mask for tokens of low entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_grpo.grpo.ratios import bounded
from megatron_grpo.grpo.sequences import Sequences


class Importance(NamedTuple):
    """factors [C], and how often each counts in a mean [C]: 1 per token, or 1/length where all tokens of a sequence share theirs."""

    factors: torch.Tensor
    units: torch.Tensor


# (log rho [C] with 0 where the sampler gave no log-prob, sequences) -> Importance
RolloutCorrection = Callable[[torch.Tensor, Sequences], Importance]


def log_rho(old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """old - sampler, and 0 (a ratio of 1) where the sampler has no log-prob."""
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
    """0 for sequences of negative advantage whose mean `sampler - logp` exceeds delta, else 1 (DeepSeek-V3.2, arXiv 2512.02556).

    Where the sampler gave no log-prob the old one stands in.
    """
    before = torch.where(sampler_logprobs.isnan(), old_logprobs, sampler_logprobs)
    drifted = sequences.spread(sequences.mean(before - logprobs) > delta)
    return (~(drifted & (advantages < 0))).to(logprobs.dtype)


def rollout_correction(mode: str, *, lowest: float, highest: float, geometric: bool) -> RolloutCorrection:
    """`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, resolved once.

    Truncated: min(rho, C). Masked: rho where it is inside its bounds, else 0. A sequence's rho, for all its tokens, is the product over
    them (TRL), or with `geometric` their geometric mean (Megatron-SWIFT).
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
        return Importance(sequences.spread(limit(bounded(total).exp())), sequences.one_over_length)

    return of_tokens if level == "token" else of_sequences
