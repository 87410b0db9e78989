"""Attention in parts, merged by their log-sum-exp: segments on themselves, children on their parent (docs/shared_prompts.md).

A query's softmax over several runs of keys is one softmax over all of them. The same holds for its backward: the probability that a query
gives to a key is exp(score - log-sum-exp over all keys), and the only other sum over keys in a softmax's backward is output * gradient,
also over all keys. So each part needs nothing from the others, no key is copied, and no mask over the stream exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from megatron_grpo.core.policy.packed_batch import AttentionBlock, PackedBatch, Places, packed_stream
from megatron_grpo.core.policy.requirements import flash_obstacle
from megatron_grpo.core.types import Segment


class AttentionKernel(Protocol):
    """Attention of one part.

    Shapes: q, out and their gradients [queries, heads, c]; k, v and their gradients [keys, groups, c]; lse [heads, queries].
    """

    def forward(self, q, k, v, part: AttentionBlock, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), in new tensors.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            part: The runs of queries and keys.
            scale: Multiplies the scores; None for 1 / sqrt(c).
        """
        ...

    def backward(
        self, grad, q, k, v, out, lse, part: AttentionBlock, scale: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v by this part, in new tensors.

        Args:
            grad: Gradient of the output of all parts together.
            q: Queries.
            k: Keys.
            v: Values.
            out: Output of all parts together.
            lse: Log-sum-exp of all parts together.
            part: The runs of queries and keys.
            scale: Multiplies the scores; None for 1 / sqrt(c).
        """
        ...


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedBatch, scale: float | None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention over the packed stream, [t, heads, c]; padding gets 0.

    Args:
        q: Queries of this rank, [t, heads, c].
        k: Keys of all context-parallel ranks, [keys, groups, c].
        v: Values, in the shape of `k`.
        scale: Multiplies the scores; None for 1 / sqrt(c).
        sinks: One more score per head beside those of the keys, whose value is 0 (gpt-oss), [heads]; None without sinks.
    """
    kernel = FLASH_ON_CPU if q.device.type == "cpu" else gpu_kernel(q.dtype, q.shape[-1]).kernel
    if kernel is PLAIN and not packed.full and sinks is None:
        return _by_torch(q, k, v, packed, scale)
    return _Attention.apply(q, k, v, packed, scale, kernel, sinks)


class KernelChoice(NamedTuple):
    """Selected attention kernel. If it is PLAIN, the reason why no faster kernel runs here."""

    kernel: AttentionKernel
    lacks: str | None


@functools.cache
def gpu_kernel(dtype: torch.dtype, channels: int) -> KernelChoice:
    """Return the kernel of this process's GPU. The choice is made once, by the GPU's capability and a trial run.

    Args:
        dtype: Dtype of queries, keys and values.
    """
    obstacle = flash_obstacle(str(dtype).removeprefix("torch."), channels)
    if obstacle is None and torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        present, least = (".".join(map(str, version)) for version in (torch.cuda.get_device_capability(), FLASH_CAPABILITY))
        obstacle = f"flash attention needs a GPU of compute capability {least}, this one has {present}"
    if obstacle is None:
        obstacle = find_kernel_problem(FLASH_ON_GPU, dtype, channels, torch.device("cuda"))
    return KernelChoice(FLASH_ON_GPU, None) if obstacle is None else KernelChoice(PLAIN, obstacle)


def find_kernel_problem(kernel: AttentionKernel, dtype: torch.dtype, channels: int, device: torch.device) -> str | None:
    """Compare a kernel with PLAIN on a small stream of parents and children.

    Args:
        dtype: Dtype of queries, keys and values.

    Returns:
        How the kernel fails, or where it differs from PLAIN by more than rounding, as a phrase; None if it does not.
    """
    ends = (0, 40, 45, 47, 90, 93, 96)
    segments = [Segment(start=a, end=b, length=b - a, parent=p) for a, b, p in zip(ends, ends[1:], (-1, -1, 0, 0, 1, -1))]
    packed = packed_stream(segments, 1, 0, lambda array: torch.from_numpy(array).to(device))
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(96, heads, channels, generator=draw).to(device, dtype) for heads in (4, 2, 2, 4))
    results = []
    with torch.enable_grad():
        for implementation in (PLAIN, kernel):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            try:
                out = _Attention.apply(*inputs, packed, None, implementation)
                results.append((out.detach(), *torch.autograd.grad(out, inputs, grad)))
            except RuntimeError as error:  # torch was built without the kernel, or this GPU cannot run it
                return f"flash attention does not run on this GPU ({str(error).splitlines()[0]})"
    rounding = 4 * torch.finfo(dtype).eps
    for name, right, value in zip(("its output", "the gradient of queries", "of keys", "of values"), *results, strict=True):
        difference = float((right - value).norm() / right.norm())
        if not difference < rounding:
            return (
                f"torch's flash attention gives another result on this GPU: {name} differs by {difference:.1e}, more than rounding "
                f"({rounding:.1e})"
            )
    return None


def _by_torch(q, k, v, packed: PackedBatch, scale: float | None) -> torch.Tensor:
    """Compute attention with torch's own kernels and their backward: with one part there is nothing to merge."""
    out = torch.zeros_like(q)
    if (part := packed.causal) is not None:
        out[part.queries] = _join_runs([
            F.scaled_dot_product_attention(q_part, k_part, v_part, is_causal=True, scale=scale, enable_gqa=True)
            for q_part, k_part, v_part in _runs(part, (q[part.queries],), (k[part.keys], v[part.keys]))
        ])  # fmt: skip
    return out


class _RunKernel(NamedTuple):
    """Kernel that takes [n, heads, queries, c] and [n, groups, keys, c]."""

    attend: Callable
    differentiate: Callable

    def forward(self, q, k, v, part: AttentionBlock, scale):
        runs = _runs(part, (q,), (k, v))
        out, lse = zip(*(self.attend(*run_tensors, 0.0, part.is_causal, scale=scale) for run_tensors in runs), strict=True)
        return _join_runs(out), torch.cat([x.transpose(0, 1).flatten(1) for x in lse], dim=1)

    def backward(self, grad, q, k, v, out, lse, part: AttentionBlock, scale):
        runs = _runs(part, (grad, q, out, lse.t()), (k, v))
        gradients = (
            self.differentiate(grad_part, q_part, k_part, v_part, out_part, lse_part.contiguous(), 0.0, part.is_causal, scale=scale)
            for grad_part, q_part, out_part, lse_part, k_part, v_part in runs
        )
        return tuple(map(_join_runs, zip(*gradients, strict=True)))


def _join_runs(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the results of the calls, [n, heads, length, c] each, to [queries or keys, heads, c]."""
    return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in runs])


class _Varlen(NamedTuple):
    """Kernel that takes all runs of a part at once, with their bounds: FlashAttention 2, as in every CUDA build of torch.

    It is deterministic under torch.use_deterministic_algorithms(True). It hangs on a run without tokens; parts have no such runs.
    """

    attend: Callable
    differentiate: Callable

    def forward(self, q, k, v, part: AttentionBlock, scale):
        bounds = part.cu_queries, part.cu_keys, part.most_queries, part.most_keys
        out, lse, *_ = self.attend(q, k, v, *bounds, 0.0, part.is_causal, False, scale=scale)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, part: AttentionBlock, scale):
        bounds = part.cu_queries, part.cu_keys, part.most_queries, part.most_keys
        state = lse.new_empty(2, dtype=torch.int64)  # random state for dropout, which is not used
        return self.differentiate(grad, q, k, v, out, lse, *bounds, 0.0, part.is_causal, state, state, scale=scale)


def _runs(part: AttentionBlock, query_tensors, key_tensors):
    """Yield views of tensors [queries or keys, heads, ...] for each call: [n, heads, length, ...]."""
    cut = [x.transpose(0, 1).unsqueeze(0).split([run.num * run.num_queries for run in part.runs], dim=2) for x in query_tensors]
    cut += [x.transpose(0, 1).unsqueeze(0).split([run.num * run.num_keys for run in part.runs], dim=2) for x in key_tensors]
    for run, *views in zip(part.runs, *cut, strict=True):
        yield views if run.num == 1 else [x.squeeze(0).unflatten(1, (run.num, -1)).transpose(0, 1) for x in views]


def _plain_attention(q, k, v, dropout, is_causal, *, scale):
    """Compute attention with matrix products, on any device. All scores of a run are in memory at once."""
    scores = _scores(q, k, is_causal, scale)
    lse = scores.logsumexp(dim=-1)
    return ((scores - lse[..., None]).exp() @ _for_heads(v, q).to(scores.dtype)).to(q.dtype), lse


def _plain_backward(grad, q, k, v, out, lse, dropout, is_causal, *, scale):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    probs = (_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    grad, keys, values = (x.to(probs.dtype) for x in (grad, _for_heads(k, q), _for_heads(v, q)))
    grad_scores = probs * (grad @ values.mT - (grad * out).sum(dim=-1, keepdim=True)) * scale
    key_tensors, grad_values = grad_scores.mT @ q.to(probs.dtype), probs.mT @ grad
    in_groups = [x.unflatten(1, (k.shape[1], -1)).sum(dim=2).to(k.dtype) for x in (key_tensors, grad_values)]
    return (grad_scores @ keys).to(q.dtype), *in_groups


def _scores(q, k, is_causal: bool, scale):
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q.to(dtype) @ _for_heads(k, q).to(dtype).mT * scale
    return scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf) if is_causal else scores


def _for_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat groups for their heads: [n, groups, ...] -> [n, heads, ...]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


PLAIN = _RunKernel(_plain_attention, _plain_backward)
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# torch's kernel for CPUs computes all scores of a causal run of up to 512 tokens, and masks half of them. A run of at least this many
# tokens is computed as two causal halves and the attention of the second half to the first.
LONG_RUN = 192


def _in_halves(q, k, v, dropout, is_causal, *, scale):
    if not is_causal or q.shape[2] < LONG_RUN:
        return _on_cpu(q, k, v, dropout, is_causal, scale=scale)
    (q1, q2), (k1, k2), (v1, v2) = map(_halves, (q, k, v))
    (first, first_lse), (second, second_lse) = (_in_halves(*half, dropout, True, scale=scale) for half in ((q1, k1, v1), (q2, k2, v2)))
    across_out, across_lse = _on_cpu(q2, k1, v1, dropout, False, scale=scale)
    lse = torch.logaddexp(second_lse, across_lse)
    share = (across_lse - lse).exp_().unsqueeze(-1)
    second = torch.lerp(second.to(share.dtype), across_out.to(share.dtype), share).to(q.dtype)
    return _join_halves(first, second), torch.cat([first_lse, lse], dim=2)


def _in_halves_backward(grad, q, k, v, out, lse, dropout, is_causal, *, scale):
    if not is_causal or q.shape[2] < LONG_RUN:
        return _on_cpu_backward(grad, q, k, v, out, lse.contiguous(), dropout, is_causal, scale=scale)
    (grad1, grad2), (q1, q2), (k1, k2), (v1, v2), (out1, out2), (lse1, lse2) = map(_halves, (grad, q, k, v, out, lse))
    first = _in_halves_backward(grad1, q1, k1, v1, out1, lse1, dropout, True, scale=scale)
    second = _in_halves_backward(grad2, q2, k2, v2, out2, lse2, dropout, True, scale=scale)
    across = _on_cpu_backward(grad2, q2, k1, v1, out2, lse2.contiguous(), dropout, False, scale=scale)
    for total, addend in zip((second[0], *first[1:]), across, strict=True):
        total += addend
    return tuple(map(_join_halves, first, second))


def _halves(x):
    middle = x.shape[2] // 64 * 32  # a multiple of the kernel's blocks of queries
    return x[:, :, :middle], x[:, :, middle:]


def _join_halves(first, second):
    """Concatenate halves [n, heads, length, c]; in memory the tokens come first, as in the kernel's results."""
    return torch.cat([first.transpose(1, 2), second.transpose(1, 2)], dim=1).transpose(1, 2)


FLASH_ON_CPU = _RunKernel(_in_halves, _in_halves_backward)
FLASH_ON_GPU = _Varlen(torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
FLASH_CAPABILITY = (8, 0)


class _Attention(torch.autograd.Function):
    """Attention over all parts, as one function with one backward: kernels do not differentiate the log-sum-exp that they return."""

    @staticmethod
    def forward(ctx, q, k, v, packed: PackedBatch, scale, kernel: AttentionKernel, sinks=None):
        if packed.causal is None:
            out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1::-1])
        else:
            part_out = _part_forward(kernel, q, k, v, packed.causal, scale)
            out, lse = (_scatter_rows(x, packed.causal.queries, len(q), dim) for dim, x in enumerate(part_out))
        for part in packed.full:
            part_out, found_lse = _part_forward(kernel, q, k, v, part, scale)
            causal_lse = lse[:, part.queries]
            total_lse = torch.logaddexp(causal_lse, found_lse)
            share = (found_lse - total_lse).exp_().t().unsqueeze(-1)
            out[part.queries] = torch.lerp(out[part.queries].to(share.dtype), part_out.to(share.dtype), share).to(out.dtype)
            lse[:, part.queries] = total_lse
        if sinks is not None:
            total_lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = (out * (lse - total_lse).exp().t().unsqueeze(-1)).to(out.dtype)
            lse = total_lse
        ctx.save_for_backward(q, k, v, out, lse, *([] if sinks is None else [sinks]))
        ctx.packed, ctx.scale, ctx.kernel = packed, scale, kernel
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        packed, totals = ctx.packed, []
        for part in (*filter(None, [packed.causal]), *packed.full):
            query_index, key_index = part.queries, part.keys
            gradients = ctx.kernel.backward(
                grad[query_index],
                q[query_index],
                k[key_index],
                v[key_index],
                out[query_index],
                lse[:, query_index].contiguous(),
                part,
                ctx.scale,
            )
            if not totals:  # each index occurs once in the causal part
                totals = [
                    _scatter_rows(x, index, len(like), 0)
                    for x, index, like in zip(gradients, (query_index, key_index, key_index), (q, k, v), strict=True)
                ]
            else:
                for total, index, value in zip(totals, (query_index, key_index, key_index), gradients, strict=True):
                    _add(total, index, value)
        grad_sinks = None
        if sinks:  # the value of a sink is 0, so the gradient of its probability is 0
            rows = (grad * out).sum(dim=-1, dtype=lse.dtype).t()
            grad_sinks = -((sinks[0].to(lse.dtype)[:, None] - lse).exp() * rows).sum(dim=1).to(sinks[0].dtype)
        return *(totals or map(torch.zeros_like, (q, k, v))), None, None, None, grad_sinks


def _part_forward(kernel: AttentionKernel, q, k, v, part: AttentionBlock, scale):
    return kernel.forward(q[part.queries], k[part.keys], v[part.keys], part, scale)


def _scatter_rows(x: torch.Tensor, index: Places, size: int, dim: int) -> torch.Tensor:
    """Return a tensor of `size` rows in `dim` with x at `index` and 0 elsewhere; x itself if `index` are all rows."""
    if isinstance(index, slice) and x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size
    full = x.new_zeros(shape)
    full[(slice(None),) * dim + (index,)] = x
    return full


def _add(total: torch.Tensor, index: Places, values: torch.Tensor) -> None:
    if isinstance(index, slice):
        total[index] += values
    else:
        total.index_put_((index,), values, accumulate=True)  # keys may occur several times; sorted on a GPU, so the sum is repeatable
