"""Patches of vLLM for hybrid models: no prefix cache, and on a CPU the gated delta rule in torch.

vLLM's CPU kernels of the rule support bfloat16 and few head sizes only. With the rule in torch an engine samples in float32, so that its
log-probs can be compared with the trainer's. Written for vLLM 0.32.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


def patch_hybrids(*, on_gpu: bool) -> None:
    """Patch how vLLM configures hybrid models. Idempotent.

    Their prefix cache needs chunked prefill, which a CPU's generators do not support, and is not verified on a GPU.
    """
    import vllm.model_executor.models.config as config

    hybrid: Any = config.HybridAttentionMambaModelConfig
    verify = hybrid.verify_and_update_config
    if verify.__name__ == "without_prefix_cache":
        return

    def without_prefix_cache(vllm_config: Any) -> None:
        vllm_config.cache_config.enable_prefix_caching = False
        if not on_gpu:
            patch_delta_net()
        verify(vllm_config)

    hybrid.verify_and_update_config = staticmethod(without_prefix_cache)


def patch_delta_net() -> None:
    """Patch the rule for streams that are not bfloat16, which keeps vLLM's kernels. Call before an engine loads a hybrid. Idempotent."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as gdn

    kernels = gdn.cpu_gdn_attention_core
    if kernels.__name__ == "in_any_dtype":
        return

    def in_any_dtype(mixed_qkv, b, a, core_attn_out, layer_name):
        if mixed_qkv.dtype == torch.bfloat16:
            return kernels(mixed_qkv, b, a, core_attn_out, layer_name)
        context = gdn.get_forward_context()
        layer = context.no_compile_layers[gdn._resolve_layer_name(layer_name)]
        if context.attn_metadata is not None and (metadata := context.attn_metadata[layer.prefix]).num_actual_tokens:
            with _in_torch(gdn.ops):
                gdn._cpu_gdn_attention_nonspec(layer, metadata, mixed_qkv, b, a, core_attn_out)
        return None

    # torch registers the operator by its annotations.
    tensors = dict.fromkeys(("mixed_qkv", "b", "a", "core_attn_out"), torch.Tensor)
    in_any_dtype.__annotations__ = {**tensors, "layer_name": gdn.LayerNameType, "return": None}
    gdn.cpu_gdn_attention_core = in_any_dtype


@contextmanager
def _in_torch(ops: Any):
    """Replace vLLM's kernels inside the block; its convolution is in torch where the CPU has no bfloat16 instructions."""
    kernels, has_bfloat16 = {name: getattr(ops, name) for name in _REPLACED}, torch.cpu._is_avx512_bf16_supported
    torch.cpu._is_avx512_bf16_supported = lambda: False
    try:
        for name, function in _REPLACED.items():
            setattr(ops, name, function)
        yield
    finally:
        torch.cpu._is_avx512_bf16_supported = has_bfloat16
        for name, function in kernels.items():
            setattr(ops, name, function)


def _gating(A_log, a, b, dt_bias):
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def _decode(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **unused: Any):
    decay, strength = _gating(A_log, a, b, dt_bias)
    return gated_delta_rule(q, k, v, decay, strength, initial_state_source, initial_state_indices, cu_seqlens).unsqueeze(1)


def _prefill(query, key, value, g, beta, initial_state, initial_state_indices, cu_seqlens, **unused: Any):
    return gated_delta_rule(query, key, value, g, beta, initial_state, initial_state_indices, cu_seqlens).unsqueeze(0), None


def gated_delta_rule(q, k, v, decay, strength, states, slots, bounds) -> torch.Tensor:
    """Compute the rule token by token, for all sequences at once. Updates `states`.

    Args:
        q: Queries, [..., T, key heads, k].
        k: Keys, in the shape of `q`.
        v: Values, [..., T, heads, v].
        decay: Logarithm of the factor on the state, [..., T, heads].
        strength: Write strength, in the shape of `decay`.
        states: States of all slots, [slots, heads, k, v].
        slots: Slot of each sequence.
        bounds: Bounds of the sequences among the T tokens, [sequences + 1].

    Returns:
        Outputs, float32 [T, heads, v].
    """
    q, k, v = (x.reshape(-1, *x.shape[-2:]).float() for x in (q, k, v))
    heads, lengths = v.shape[1], bounds.diff()
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    fade, strength = decay.reshape(-1, heads, 1, 1).exp(), strength.reshape(-1, heads, 1)
    q, out = q * q.shape[-1] ** -0.5, torch.empty_like(v)
    order = lengths.argsort(descending=True)
    first, slots = bounds[:-1][order].long(), slots[order].long()
    state = states[slots].float()
    for t in range(int(lengths.max())):
        index = first[: int((lengths > t).sum())] + t
        active = state[: len(index)] * fade[index]
        moved = (v[index] - (active * k[index, :, :, None]).sum(2)) * strength[index]
        active += k[index, :, :, None] * moved[:, :, None]
        out[index] = (active * q[index, :, :, None]).sum(2)
        state[: len(index)] = active
    states[slots] = state.to(states.dtype)
    return out


_REPLACED = {
    "fused_gdn_gating_cpu": _gating,
    "fused_sigmoid_gating_delta_rule_update_cpu": _decode,
    "chunk_gated_delta_rule_cpu": _prefill,
}
