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

    T (`num_routed_tokens`) counts the tokens of the global batch that are no padding; set it before a forward that trains. A token that
    stands for several contexts counts in both as often.
    """

    num_routed_tokens: int = 0
    _multiplicity: torch.Tensor | None = None  # of the tokens that are being routed, and of no others: `routing` sets it and takes it away

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """padding_mask: bool [t, bits], for how many contexts each token stands, in binary digits; 0 is padding.

        Megatron-Core hands a padding mask on, recomputed or not, but makes it bool. And a module must remember nothing: other micro-batches
        run between a forward and its recompute.
        """
        if padding_mask is None:
            return super().routing(logits)
        digits = padding_mask.long()
        self._multiplicity = (digits << torch.arange(digits.shape[1], device=digits.device)).sum(dim=1)
        try:
            return super().routing(logits, self._multiplicity == 0)
        finally:
            self._multiplicity = None

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """logits [t, experts]."""
        if not self.config.moe_z_loss_coeff or not torch.is_grad_enabled():
            return logits  # scoring, or the first forward of recomputed layers
        per_token = torch.logsumexp(logits.float() if logits.dtype is torch.bfloat16 else logits, dim=-1).square()
        if self._multiplicity is not None:
            per_token = per_token * self._multiplicity
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
