"""Per-token estimates of KL(policy || reference) from one sample, with d = ref - logp (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_grpo.grpo.ratios import bounded

# (logprobs [C], ref_logprobs [C]) -> kl [C]
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """-d: unbiased, may be negative. As a loss without the ratio its on-policy gradient has zero mean: `check` refuses that."""
    return -bounded(ref_logprobs - logprobs)


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """d*d/2."""
    return 0.5 * bounded(ref_logprobs - logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1: unbiased and never negative."""
    d = bounded(ref_logprobs - logprobs)
    return d.exp() - d - 1.0


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}
