"""What one trained token adds to the loss, before its weight: l[i,t] of the ratio r, the log-prob and the advantage A.

A new objective is a function here and a row in `loss.OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class PerToken(NamedTuple):
    """loss [C]; is_low, is_high bool [C]: the bound below or above was what decided it (for the clip metrics)."""

    loss: torch.Tensor
    is_low: torch.Tensor
    is_high: torch.Tensor


# (ratio [C], logprobs [C], advantages [C]) -> PerToken
Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PerToken]


def clipped(epsilon: float, epsilon_high: float) -> Objective:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO's surrogate; DAPO raises epsilon_high (arXiv 2503.14476)."""
    return two_sided(epsilon, epsilon_high, float("inf"))


def two_sided(epsilon: float, epsilon_high: float, delta: float) -> Objective:
    """As `clipped`, with min(r, delta) for r in the unclipped term: bounds what A < 0 can do (INTELLECT-2, arXiv 2505.07291)."""
    lowest, highest = 1.0 - epsilon, 1.0 + epsilon_high

    def objective(ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> PerToken:
        surrogate = torch.min(ratio.clamp(max=delta) * advantages, ratio.clamp(lowest, highest) * advantages)
        return PerToken(-surrogate, (ratio < lowest) & (advantages < 0), (ratio > highest) & (advantages > 0))

    return objective


def cispo(epsilon_high: float) -> Objective:
    """-stopgrad(min(r, epsilon_high)) A logp: no token loses its gradient, only its weight is bounded (MiniMax-M1, arXiv 2506.13585).

    Here epsilon_high bounds r itself, not its distance from 1.
    """

    def objective(ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> PerToken:
        weight = ratio.detach().clamp(max=epsilon_high)
        is_high = (ratio > epsilon_high) & (advantages > 0)
        return PerToken(-weight * advantages * logprobs, torch.zeros_like(is_high), is_high)

    return objective


def sapo(temperature_pos: float, temperature_neg: float) -> Objective:
    """-(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip (arXiv 2511.20347). Its slope at r = 1 is A, as PPO's."""

    def objective(ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> PerToken:
        tau = torch.where(advantages > 0, ratio.new_tensor(temperature_pos), ratio.new_tensor(temperature_neg))
        never = torch.zeros_like(advantages, dtype=torch.bool)
        return PerToken(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages, never, never)

    return objective
