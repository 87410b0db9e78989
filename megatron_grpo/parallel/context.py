"""Context parallelism on the packed stream: which tokens a rank holds, and how keys and values of all ranks come together.

Every segment is cut into 2*cp equal chunks; rank r holds chunk r and its mirror 2*cp-1-r, so that causal work is even ("zigzag", the
order that Megatron-Core and Transformer Engine expect). Segments are padded to a multiple of 2*cp before they get here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.types import Segment


def held_positions(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """Offsets, within a sequence of `length` tokens, that `cp_rank` holds; int64 [length / cp_size], ascending."""
    if length % (2 * cp_size) and cp_size > 1:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into 2 x {cp_size} equal chunks")
    if cp_size == 1:
        return np.arange(length)
    chunk = length // (2 * cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return np.concatenate([np.arange(cp_rank * chunk, (cp_rank + 1) * chunk), np.arange(mirror * chunk, (mirror + 1) * chunk)])


def held_tokens(segments: Sequence[Segment], cp_size: int, cp_rank: int) -> np.ndarray:
    """Places in the whole stream that `cp_rank` holds, in the order it holds them; int64 [T / cp_size]."""
    return np.concatenate([s.start + held_positions(s.end - s.start, cp_size, cp_rank) for s in segments])


def gathered_places(segment: Segment, total: int, cp_size: int) -> np.ndarray:
    """Where the tokens of a segment, in their order, lie in what all ranks hold of a stream of `total` tokens, rank after rank; int64."""
    length = segment.end - segment.start
    held = np.concatenate([held_positions(length, cp_size, rank) for rank in range(cp_size)])
    mine = segment.start // cp_size + np.arange(length // cp_size)
    return np.concatenate([rank * (total // cp_size) + mine for rank in range(cp_size)])[np.argsort(held)]


class _AllGather(torch.autograd.Function):
    """[t, ...] on each rank -> [cp, t, ...] on all. The backward sums what every rank says of this rank's part."""

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
    return _AllGather.apply(x, group)


class _AllReduce(torch.autograd.Function):
    """Sum over ranks, where every rank then uses the sum in a loss whose gradients are summed over the same ranks."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        # Each rank's loss holds only its own tokens, so the gradient of the sum is the sum of what the ranks say of it.
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over_context(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Differentiable all-reduce over the context-parallel group; `x` itself where the group has one rank."""
    return _AllReduce.apply(x, group) if group.size() > 1 else x
