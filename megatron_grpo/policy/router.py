"""The router's z-loss, whose gradient depends on the global batch alone.

Megatron-Core means it over the tokens of one micro-batch on one rank, and trusts later divisions to make that right; which ones happen
differs between its versions and layouts. Here it is what every other loss is: a sum over tokens with a weight fixed in advance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter


class PolicyRouter(TopKRouter):
    """Megatron's router with another z-loss: coeff / T * sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, section 3.3).

    T (`num_routed_tokens`) counts the tokens of the global batch that are no padding; set it before a forward that trains.
    """

    num_routed_tokens: int = 0

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """logits [t, experts]; padding_mask bool [t], true for padding."""
        if not self.config.moe_z_loss_coeff or not torch.is_grad_enabled():
            return logits  # scoring, or the first forward of recomputed layers
        per_token = torch.logsumexp(logits.float() if logits.dtype is torch.bfloat16 else logits, dim=-1).square()
        if padding_mask is not None:
            per_token = per_token.masked_fill(padding_mask, 0.0)
        # 0 where no sequence of the global batch has a token to compute: then all here is padding.
        return _WithLoss.apply(logits, self.config.moe_z_loss_coeff / max(self.num_routed_tokens, 1) * per_token.sum())

    def _apply_expert_bias(self, routing_map, padding_mask=None) -> None:
        """Does nothing: the bias is part of the policy that samples, so it is not balanced here (see `model`)."""


class _WithLoss(torch.autograd.Function):
    """Passes `x` on, and lets `loss` be minimised as well. Losses are not scaled: float32 and bfloat16 need no loss scale."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor):
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, ctx.like


def replace_routers(model: torch.nn.Module) -> None:
    for router in routers([model]):
        router.__class__ = PolicyRouter  # re-classed in place: parameters, hooks and sharding stay


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[TopKRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))
