"""Differentiable collectives, for values that every rank of a group uses and each rank has a part of the gradient of."""

from __future__ import annotations

import torch
import torch.distributed as dist


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # A copy: collectives take dense tensors only, and the gradient may be shared with other nodes of the graph.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `x` unchanged; sum its gradient over the ranks of `group`.

    Replaces Megatron-Core's copy_to_tensor_model_parallel_region, which in 0.16 loses the sum where the gradient is not contiguous: it
    reduces a contiguous copy and returns the original (`tensor_parallel/mappings.py`, `_reduce`; fixed in 0.19).

    Args:
        x: Tensor, the same on every rank of `group`.
    """
    return _CopyToRanks.apply(x, group) if group.size() > 1 else x


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


def sum_over_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of `x` over the ranks of `group`; sum its gradient as well.

    Each rank continues with the sum for a part of the computation, so the gradients of the parts add up. Collective over `group`.

    Args:
        x: Tensor of one shape on every rank.
    """
    return copy_to_ranks(_SumOverRanks.apply(x, group), group) if group.size() > 1 else x


class _AllGather(torch.autograd.Function):
    """[t, ...] on each rank -> [cp, t, ...] on all. The backward sums the ranks' gradients of this rank's part."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(out, x.contiguous(), group=group)
        return torch.stack(out)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather `x` [t, ...] of every rank as [cp, t, ...]; sum the ranks' gradients of this rank's part. Collective over `group`.

    Args:
        x: Tensor of one shape on every rank.
    """
    return _AllGather.apply(x, group)
