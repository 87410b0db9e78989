"""Gradient sums over tensor-parallel ranks, for contiguous and transposed gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_grpo.core.parallel.autograd import copy_to_ranks
from tests.ranks import run_ranks


def compute_gradient(rank: int, world: int) -> tuple[list, list, bool]:
    """Return the gradient of x under a weight of rank + 1, contiguous and transposed."""
    found, weight = [], torch.arange(6.0).reshape(2, 3) * (rank + 1)
    for use in (lambda y: (y * weight).sum(), lambda y: (y.t() * weight.t().contiguous()).sum()):
        x = torch.ones(2, 3, requires_grad=True)
        use(copy_to_ranks(x, dist.group.WORLD)).backward()
        found.append(x.grad.tolist())
    return found[0], found[1], torch.equal(weight, torch.arange(6.0).reshape(2, 3) * (rank + 1))


def test_gradient_sum_over_ranks_with_transposed_tensor_is_exact():
    summed = [[0.0, 3.0, 6.0], [9.0, 12.0, 15.0]]  # (1 + 2) times 0..5
    assert run_ranks(compute_gradient, 2) == [(summed, summed, True)] * 2


def test_gradient_sum_on_one_rank_is_the_identity():
    assert run_ranks(compute_gradient, 1) == [([[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]], True)]
