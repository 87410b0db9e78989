"""Makes vLLM on a CPU one function of its inputs, whatever else it computes beside them (`--same_bits`, docs/proof.md).

Written for vLLM 0.32; each patch says what the sampler would do otherwise. They stay for the rest of the process.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_grpo.parallel import collectives


def prepare() -> None:
    """Before an engine is built. Calling it again changes nothing."""
    # With several threads a decode step cuts keys among them, and sums another way than the pass over the prompt.
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    from vllm import _custom_ops as ops
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.layernorm import RMSNorm

    if ops.onednn_mm.__name__ == "two_rows":
        return
    patched: Any = ops
    multiply, multiply_small = ops.onednn_mm, ops.weight_packed_linear_cpu

    def two_rows(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # From 2048 input channels on, and in bfloat16, one row is multiplied by another kernel than two or more.
        return _in_two(x, lambda rows: multiply(handler, rows, bias))

    def two_small_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The same of small bfloat16 weights, which another library multiplies.
        return _in_two(x, lambda rows: multiply_small(rows, *args, **kwargs))

    patched.onednn_mm, patched.weight_packed_linear_cpu = two_rows, two_small_rows
    reduce, norm = CpuCommunicator.all_reduce, RMSNorm.forward_native

    def in_rank_order(self: Any, x: torch.Tensor) -> torch.Tensor:
        # Rank r sums r, r + 1, ...: of three ranks or more each has another sum.
        if self.world_size <= 2:
            return reduce(self, x)
        first, *others = collectives.of_each(x, self.device_group)
        for other in others:
            first += other
        return x.copy_(first)

    def of_rounded_sum(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        # It would norm the sum before it is rounded to bfloat16; the trainer, as transformers, hands on a rounded one.
        if residual is None or x.dtype is torch.float32:
            return norm(self, x, residual)
        total = x + residual
        return norm(self, total), total

    # vLLM has no setting for either, and looks both up in their classes.
    CpuCommunicator.all_reduce, RMSNorm.forward_native = in_rank_order, of_rounded_sum  # type: ignore[method-assign]


def _in_two(x: torch.Tensor, product: Any) -> torch.Tensor:
    if x.numel() != x.shape[-1]:
        return product(x)
    out = product(x.reshape(1, -1).expand(2, -1).contiguous())
    return out[:1].view(*x.shape[:-1], out.shape[-1])
