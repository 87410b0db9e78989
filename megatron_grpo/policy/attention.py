"""Attention in parts: every segment on itself, children on their parent, put together by their log-sum-exp (docs/shared_prompts.md).

A query's softmax over several runs of keys is one softmax over all of them. So is its backward: what a query says of a key is
exp(score - log-sum-exp of the whole), and all else that a softmax's backward sums over keys is output * gradient, of the whole as well.
Each part needs nothing of the others then, no key is copied, and no mask over the stream exists.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_grpo.policy.stream import PackedStream, Part

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedStream, scale: float | None) -> torch.Tensor:
    """q [t, heads, c], k and v [keys, groups, c] -> [t, heads, c]. scale: of the scores; None for 1 / sqrt(c). 0 where padding asks."""
    if q.device.type == "cpu":
        return _Attention.apply(q, k, v, packed, scale, FLASH_ON_CPU)
    if packed.inherited:
        return _Attention.apply(q, k, v, packed, scale, PLAIN)
    return _own_alone(q, k, v, packed, scale)


def _own_alone(q, k, v, packed: PackedStream, scale: float | None) -> torch.Tensor:
    """Where nothing is inherited there is nothing to merge, and torch's own kernels and their backward will do."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.zeros_like(q)
    for part in packed.own:
        found = F.scaled_dot_product_attention(
            part.queries.of(q), part.keys.of(k), part.keys.of(v),
            attn_mask=part.mask, is_causal=part.is_causal, scale=scale, enable_gqa=True,
        )  # fmt: skip
        part.queries.put(out, found)
    return out.transpose(0, 1)


class _FlashOnCpu(NamedTuple):
    """torch's flash attention for CPUs: takes any strides and fewer key heads than query heads."""

    def forward(self, q, k, v, part: Part, scale):
        return _flash_forward(q, k, v, 0.0, part.is_causal, attn_mask=_added(part, q), scale=scale)

    def backward(self, grad, q, k, v, out, lse, part: Part, scale):
        return _flash_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, part.is_causal, attn_mask=_added(part, q), scale=scale
        )  # fmt: skip


class _Plain(NamedTuple):
    """Matrix products, on any device. Every score of a part exists at one time."""

    def forward(self, q, k, v, part: Part, scale):
        scores = self._scores(q, k, part, scale)
        lse = scores.logsumexp(dim=-1)
        return ((scores - lse[..., None]).exp() @ _for_heads(v, q).to(scores.dtype)).to(q.dtype), lse

    def backward(self, grad, q, k, v, out, lse, part: Part, scale):
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        said = (self._scores(q, k, part, scale) - lse[..., None]).exp()
        grad, keys, values = (x.to(said.dtype) for x in (grad, _for_heads(k, q), _for_heads(v, q)))
        of_scores = said * (grad @ values.mT - (grad * out).sum(dim=-1, keepdim=True)) * scale
        of_keys, of_values = of_scores.mT @ q.to(said.dtype), said.mT @ grad
        in_groups = [x.unflatten(1, (k.shape[1], -1)).sum(dim=2).to(k.dtype) for x in (of_keys, of_values)]
        return (of_scores @ keys).to(q.dtype), *in_groups

    def _scores(self, q, k, part: Part, scale):
        dtype = torch.promote_types(q.dtype, torch.float32)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = q.to(dtype) @ _for_heads(k, q).to(dtype).mT * scale
        mask = part.mask
        if part.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return scores if mask is None else scores.masked_fill(~mask, -math.inf)


FLASH_ON_CPU, PLAIN = _FlashOnCpu(), _Plain()


def _for_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n, groups, ...] -> [n, heads, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _added(part: Part, q: torch.Tensor) -> torch.Tensor | None:
    """The mask as the kernel takes it: added to the scores."""
    if part.mask is None:
        return None
    return torch.zeros(part.mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~part.mask, -math.inf)


class _Attention(torch.autograd.Function):
    """Kernels do not differentiate the log-sum-exp that they give, so the merge and the parts are one function with one backward."""

    @staticmethod
    def forward(ctx, q, k, v, packed: PackedStream, scale, kernel):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = torch.zeros_like(q)
        lse = q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in packed.own:
            found, found_lse = kernel.forward(part.queries.of(q), part.keys.of(k), part.keys.of(v), part, scale)
            part.queries.put(out, found)
            part.queries.put(lse, found_lse)
        for part in packed.inherited:
            found, found_lse = kernel.forward(part.queries.of(q), part.keys.of(k), part.keys.of(v), part, scale)
            before = part.queries.of(lse)
            both = torch.logaddexp(before, found_lse)
            share = (found_lse - both).exp_().unsqueeze(-1)
            merged = torch.lerp(part.queries.of(out).to(share.dtype), found.to(share.dtype), share)
            part.queries.put(out, merged.to(out.dtype))
            part.queries.put(lse, both)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.scale, ctx.kernel = packed, scale, kernel
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.transpose(0, 1)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part in (*ctx.packed.own, *ctx.packed.inherited):
            queries, keys = part.queries, part.keys
            found = ctx.kernel.backward(
                queries.of_gradient(grad), queries.of(q), keys.of(k), keys.of(v), queries.of(out), queries.of(lse), part, ctx.scale
            )
            for total, places, value in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
                places.put(total, value, add=True)
        return *(x.transpose(0, 1) for x in (dq, dk, dv)), None, None, None
