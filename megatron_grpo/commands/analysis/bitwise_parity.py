"""Replace the trainer's forward arithmetic by the sampler's. The backward stays that of the replaced operations.

`switch_on` replaces functions of `policy`, of `parallel` and of Megatron-Core, for the rest of the process or until `switch_off`.
Operations that are not replaced (embedding, SwiGLU, additions) are bitwise equal on both sides already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers as linears
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_grpo.commands.analysis import vllm_bitwise_parity as kernels
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.vocab import TokenScores
from megatron_grpo.core.policy import kernels as local_kernels
from megatron_grpo.core.policy import layers, model
from megatron_grpo.core.policy.packed_batch import PackedBatch, sequences


class _ReplaceForward(torch.autograd.Function):
    """Return `value` in the forward, and pass the gradient to `original` in the backward."""

    @staticmethod
    def forward(ctx, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, None


def _with_gradient_from(original: Callable[[], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Return `value` with the gradient of an operation.

    Args:
        original: Computes the operation with a gradient; not called if gradients are disabled.
    """
    return _ReplaceForward.apply(original(), value) if torch.is_grad_enabled() else value


def _rms_norm(real, x, weight, epsilon):
    return _with_gradient_from(lambda: real(x, weight, epsilon), kernels.rms_norm(x, weight, epsilon))


def _rotate(real, x, rotation):
    half = x.shape[-1] // 2
    cos, sin = (table[:, 0].to(x.dtype) for table in (rotation.cos[..., :half], rotation.sin[..., half:]))
    return _with_gradient_from(lambda: real(x, rotation), kernels.rotated(x, cos, sin))


def _attention(real, q, k, v, packed: PackedBatch, scale, sinks=None):
    queries, keys, values = (x.detach().contiguous() for x in (q, k, v))
    out, runs = torch.zeros_like(queries), list(sequences(packed))
    if runs:
        rows, visible = zip(*runs, strict=True)
        index, factor = torch.cat(rows), 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        parts = [keys[run] for run in visible], [values[run] for run in visible], [len(run) for run in rows]
        out[index] = kernels.causal_attention(queries[index], *parts, factor)
    return _with_gradient_from(lambda: real(q, k, v, packed, scale, sinks), out)


def _linear_logprobs(real, hidden, weight, targets, *, temperature, num_valid_rows=None, group=None, chunk_size=1024, slope=None, **kwargs):
    """Compute log-probs as vLLM does: gather the logits of all ranks, divide by the temperature, and apply torch's log_softmax."""
    rows = len(weight) if num_valid_rows is None else num_valid_rows
    options = dict(temperature=temperature, num_valid_rows=rows, group=group, chunk_size=chunk_size) | kwargs
    original = real(hidden, weight, targets, **options)  # without a slope, which would be that of other log-probs
    counts = [rows] if group is None else torch.cat(collectives.all_gather_tensors(torch.tensor([rows]), group)).tolist()
    value = torch.empty_like(original.logprobs)
    for start in range(0, len(targets), chunk_size):
        part = slice(start, start + chunk_size)
        logits = kernels.linear(hidden[part], weight[:rows]).float() if rows else hidden.new_empty(len(targets[part]), 0).float()
        if group is not None:
            shards = collectives.all_gather_tensors(F.pad(logits, (0, len(weight) - rows)), group)
            logits = torch.cat([shard[:, :count] for shard, count in zip(shards, counts, strict=True)], dim=1)
        logprobs = logits.div_(temperature).log_softmax(dim=-1)
        value[part] = logprobs.gather(1, targets[part, None])[:, 0]
    return TokenScores(_with_gradient_from(lambda: original.logprobs, value), original.entropy)


def _moe_layer(real, layer, hidden_states, *args, **kwargs):
    value = _expert_layer(layer, hidden_states)
    return _with_gradient_from(lambda: real(layer, hidden_states, *args, **kwargs)[0], value), None


def _expert_layer(module: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the MoE layer with the sampler's kernel, [t, 1, H] -> [t, 1, H].

    The weights of all experts are gathered, and each rank computes the slices that the sampler's rank computes.
    """
    group, cuts_tokens = module.attn_tp_group, module.config.sequence_parallel
    x = hidden.detach().flatten(0, 1)
    if cuts_tokens:
        x = torch.cat(collectives.all_gather_tensors(x, group))
    inner, down_weights = (
        [getattr(e, name).weight.detach() for e in module.experts.local_experts] for name in ("linear_fc1", "linear_fc2")
    )
    gate, up_weights = torch.stack(inner).chunk(2, dim=1)
    slices = module.experts.local_experts[0].linear_fc1.tp_group
    outputs = []
    for part, cut in ((gate, 1), (up_weights, 1), (torch.stack(down_weights), 2)):
        gathered = torch.cat(collectives.all_gather_tensors(part, slices), dim=cut)
        gathered = torch.cat(collectives.all_gather_tensors(gathered, module.ep_group))
        outputs.append(gathered.chunk(group.size(), dim=cut)[group.rank()])
    norm_topk = not module.config.moe_router_pre_softmax
    out = kernels.experts(x, module.router.weight, *outputs, k=module.config.moe_router_topk, norm_topk=norm_topk)
    out = in_rank_order(out, group)
    return (out.chunk(group.size())[group.rank()] if cuts_tokens else out).view_as(hidden)


def in_rank_order(x: torch.Tensor, group: collectives.Group) -> torch.Tensor:
    """Return the sum over the group, from its first rank to its last: one order, so the result is equal on all ranks."""
    first, *other_parts = collectives.all_gather_tensors(x, group)
    total = first.clone()
    for part in other_parts:
        total += part
    return total


def _reduce_scatter(real, x, group=None, input_split_sizes=None, *args):
    if input_split_sizes is not None:  # tokens returning from experts: `_expert_layer` computes their value
        return real(x, group, input_split_sizes, *args)
    group = mappings.get_tensor_model_parallel_group_if_none(group)
    return in_rank_order(x, group).chunk(group.size())[group.rank()].contiguous()


class _Torch(ModuleType):
    """`torch` with the sampler's matrix product, for the module of the parallel linear layers.

    Their backward calls tensor methods instead, and is unaffected.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def matmul(x: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
        return kernels.linear(x, transposed.t())


# (owner, attribute, replacement). A replacement is a module, or a function whose first argument is the original.
_PLACES: tuple[tuple[Any, str, Any], ...] = (
    (local_kernels, "rms_norm", _rms_norm),
    (layers, "rotate", _rotate),
    (layers, "attention", _attention),
    (linears, "torch", _Torch("torch")),
    (model, "linear_logprobs", _linear_logprobs),
    (MoELayer, "forward", _moe_layer),
    # Two summands have the same sum in either order. With three or more ranks, each one in vLLM begins with its own
    # (analysis.vllm_bitwise_parity).
    (mappings, "_reduce", lambda real, x, group: in_rank_order(x, group)),
    (mappings, "_reduce_scatter_along_first_dim", _reduce_scatter),
)
_kept: list[tuple[Any, str, Any]] = []


def _with_original(real: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: replacement(real, *args, **kwargs)


def switch_on() -> None:
    """Give the forward passes of this process the sampler's arithmetic. vLLM must be importable. A second call has no effect."""
    if not _kept:
        # Request AMX tiles from the kernel: without an engine in the process nothing else does, and the instructions are illegal.
        torch.cpu._init_amx()
        for module, name, replacement in _PLACES:
            real = getattr(module, name)
            _kept.append((module, name, real))
            setattr(module, name, replacement if isinstance(replacement, ModuleType) else _with_original(real, replacement))


def switch_off() -> None:
    """Restore the trainer's arithmetic."""
    while _kept:
        setattr(*_kept.pop())
