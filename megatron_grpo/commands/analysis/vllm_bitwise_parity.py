"""vLLM's arithmetic on a CPU, for `--bitwise_parity` (docs/proof.md). Written for vLLM 0.32.

`prepare` makes vLLM a deterministic function of its inputs, independent of the rest of a batch. A comment at each patch says what the
sampler would do otherwise; patches stay for the rest of the process. The functions below are vLLM's operations on tensors, without
gradients. Each calls the same kernel as the sampler's layers, with weights packed for the call: two programs that add the same numbers in
another order are two functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_grpo.core.parallel import collectives

BLOCK = 32  # tokens per block of the temporary cache; the kernel's result does not depend on it


def prepare() -> None:
    """Patch vLLM before an engine is built. A second call has no effect."""
    # With several threads, a decode step splits keys among them, and sums in another order than prefill does.
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    from vllm import _custom_ops as ops
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.layernorm import RMSNorm

    if ops.onednn_mm.__name__ == "two_rows":
        return
    patched: Any = ops
    multiply, multiply_small = ops.onednn_mm, ops.weight_packed_linear_cpu

    def two_rows(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # From 2048 input channels on, and in bfloat16, a single row uses another kernel than two or more rows.
        return _in_two(x, lambda rows: multiply(handler, rows, bias))

    def two_small_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The same holds for small bfloat16 weights, which use another library.
        return _in_two(x, lambda rows: multiply_small(rows, *args, **kwargs))

    patched.onednn_mm, patched.weight_packed_linear_cpu = two_rows, two_small_rows
    reduce, norm = CpuCommunicator.all_reduce, RMSNorm.forward_native

    def in_rank_order(self: Any, x: torch.Tensor) -> torch.Tensor:
        # Rank r sums r, r + 1, ...: with three or more ranks, the sums differ between ranks.
        if self.world_size <= 2:
            return reduce(self, x)
        first, *other_parts = collectives.all_gather_tensors(x, self.device_group)
        for other in other_parts:
            first += other
        return x.copy_(first)

    def norm_rounded_sum(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        # vLLM norms the sum before rounding it to bfloat16; the trainer, like transformers, norms the rounded sum.
        if residual is None or x.dtype is torch.float32:
            return norm(self, x, residual)
        total = x + residual
        return norm(self, total), total

    # vLLM has no setting for these two, and looks them up in their classes.
    CpuCommunicator.all_reduce, RMSNorm.forward_native = in_rank_order, norm_rounded_sum  # type: ignore[method-assign]


def _in_two(x: torch.Tensor, product: Any) -> torch.Tensor:
    if x.numel() != x.shape[-1]:
        return product(x)
    out = product(x.reshape(1, -1).expand(2, -1).contiguous())
    return out[:1].view(*x.shape[:-1], out.shape[-1])


# ---- operations ----------------------------------------------------------------------------------------------------------------------


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T.

    Args:
        x: Input, [..., K].
        weight: Weight, [N, K].
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    rows, weight = x.detach().reshape(-1, x.shape[-1]).contiguous(), weight.detach().contiguous()
    count = len(rows)
    if count == 1:  # a single row uses another kernel, which `prepare` avoids in the sampler too
        rows = rows.expand(2, -1).contiguous()
    if not count:
        out = rows.new_empty(0, len(weight))
    elif check_cpu_sgl_kernel(weight.shape[0], weight.shape[1], x.dtype):
        out = ops.weight_packed_linear_cpu(rows, torch.ops._C.convert_weight_packed(weight), len(weight), None)
    else:
        out = ops.onednn_mm(ops.create_onednn_mm(weight.t(), 4), rows, None)
    return out[:count].view(*x.shape[:-1], len(weight))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMS norm of x.

    Args:
        x: Input, [..., H].
        weight: Weight, [H].
    """
    from vllm import ir

    return ir.ops.rms_norm.impls["native"].impl_fn(x.detach(), weight.detach(), epsilon)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings.

    Args:
        x: Queries or keys, [t, heads, channels].
        cos: Cosines, [t, channels / 2], of x's dtype.
        sin: Sines, [t, channels / 2], of x's dtype.
    """
    from vllm import _custom_ops as ops

    t, heads, channels = x.shape
    flat = x.detach().reshape(t, heads * channels).clone()
    ops.rotary_embedding(torch.arange(t), flat, None, channels, torch.cat([cos, sin], dim=1), True)
    return flat.view(t, heads, channels)


def causal_attention(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], lengths: Sequence[int], scale: float):
    """Compute causal attention for queries at the ends of their sequences, with one call of the paged kernel over a temporary cache.

    Args:
        q: Queries of all sequences, [t, heads, c].
        keys: Keys of each sequence, [length, groups, c].
        values: Values of each sequence, [length, groups, c].
        lengths: Number of queries of each sequence; they are its last tokens.

    Returns:
        Attention output, [t, heads, c].
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, channels, groups = q.shape[1], q.shape[2], keys[0].shape[1]
    isa = _get_attn_isa(q.dtype, BLOCK, channels)
    sizes = [len(key) for key in keys]
    blocks = [-(-size // BLOCK) for size in sizes]
    first = [sum(blocks[:i]) for i in range(len(blocks))]
    key_cache, value_cache = q.new_zeros(sum(blocks), groups, 2 * BLOCK, channels).chunk(2, dim=2)
    slots = torch.cat([start * BLOCK + torch.arange(size) for start, size in zip(first, sizes, strict=True)])
    ops.cpu_attn_reshape_and_cache(torch.cat(list(keys)), torch.cat(list(values)), key_cache, value_cache, slots, isa)
    table = torch.zeros(len(sizes), max(blocks), dtype=torch.int32)
    for row, start, count in zip(table, first, blocks, strict=True):
        row[:count] = start + torch.arange(count)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_lens, out = torch.tensor(sizes, dtype=torch.int32), torch.empty_like(q)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(sizes), num_heads=heads, num_kv_heads=groups, head_dim=channels, seq_lens=seq_lens, dtype=q.dtype,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=False,
    )  # fmt: skip
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=key_cache, value_cache=value_cache, output=out, query_start_loc=starts, seq_lens=seq_lens, scale=scale,
        causal=True, alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0.0, scheduler_metadata=plan, s_aux=None,
    )  # fmt: skip
    return out


def experts(
    x: torch.Tensor, router: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, k: int, norm_topk: bool
) -> torch.Tensor:
    """Compute the MoE layer.

    Args:
        x: Input, [t, H].
        router: Router weight, [E, H].
        gate: Gate projections, [E, c, H].
        up: Up projections, [E, c, H].
        down: Down projections, [E, H, c].
        k: Experts per token.
        norm_topk: Whether routing weights are a softmax over the k chosen experts only.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, X86CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router.cpu_router import _softmax_topk

    x = x.detach().contiguous()
    weights, ids = _softmax_topk(linear(x, router), k, norm_topk)
    takes_amx = x.dtype is torch.bfloat16 and X86CPUUnquantizedExperts._supports_current_device()
    kind = X86CPUUnquantizedExperts if takes_amx else CPUUnquantizedExperts
    num_padding = -gate.shape[1] % kind._intermediate_alignment()  # zero channels that pad to the kernel's alignment
    inner = torch.cat([F.pad(part.detach(), (0, 0, 0, num_padding)) for part in (gate, up)], dim=1)
    inner, outer = (ops.cpu_prepack_moe_weight(part, kind.isa) for part in (inner, F.pad(down.detach(), (0, num_padding))))
    out = torch.empty_like(x)
    ops.cpu_fused_moe(out, x, inner, outer, None, None, weights, ids, "silu", kind.isa)
    return out
