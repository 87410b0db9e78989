"""Why an operation differs: whether both sides hold the same weights and settings for it, or compute otherwise with the same ones."""

from __future__ import annotations

from typing import Any

import torch

from megatron_grpo.analysis.vllm_traced import block_of, model_runner
from megatron_grpo.policy.model import PolicyModel
from megatron_grpo.rollout.colocated import ColocatedEngine

_ROWS = 1024  # of the identity at one time
_LINEAR = {"qkv": "linear_qkv", "o proj": "linear_proj", "gate up": "linear_fc1", "down": "linear_fc2", "router": "router"}
_THEIRS = {"qkv": "qkv_proj", "o proj": "o_proj", "gate up": "gate_up_proj", "down": "down_proj", "router": "gate"}
_NORMS = {"norm 1": ("input_layernorm", "input_layernorm"), "norm 2": ("pre_mlp_layernorm", "post_attention_layernorm"),
          "q norm": ("q_layernorm", "q_norm"), "k norm": ("k_layernorm", "k_norm")}  # fmt: skip


@torch.no_grad()
def cause_of(name: str, engine: ColocatedEngine, model: PolicyModel) -> str:
    """The end of a sentence about this rank's shard of an operation; empty where nothing is known."""
    sampler = model_runner(engine).get_model()
    layer, _, kind = name.partition(" ")
    if name == "embedding":
        return _weights(model.embedding.word_embeddings.weight, sampler.model.embed_tokens.weight)
    if name == "logits":
        head = model.output_layer
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else head.weight
        return _weights(weight[: head.num_valid_rows], _read_by_kernel(sampler.lm_head, weight.shape[1])) or _of_logits(sampler)
    if name == "final norm":
        return _norm(model.decoder.final_layernorm, sampler.model.norm)
    if not layer[1:].isdecimal():
        return ""
    ours, theirs = model.decoder.layers[int(layer[1:])], sampler.model.layers[int(layer[1:])]
    if kind in _NORMS:
        mine, its = _NORMS[kind]
        inside = kind in ("q norm", "k norm")
        return _norm(getattr(ours.self_attention if inside else ours, mine), getattr(theirs.self_attn if inside else theirs, its))
    if kind in _LINEAR:
        of_attention = kind in ("qkv", "o proj")
        linear = getattr(ours.self_attention if of_attention else ours.mlp, _LINEAR[kind])
        its = getattr(theirs.self_attn if of_attention else block_of(theirs), _THEIRS[kind])
        weight = linear.merged() if hasattr(linear, "lora_a") else linear.weight
        bias = getattr(linear, "bias", None)
        if kind == "qkv":
            weight, bias = (_in_their_order(x, model) for x in (weight, bias))
        return _weights(weight, _read_by_kernel(its, weight.shape[1])) or _biases(bias, getattr(its, "bias", None)) or SAME
    if kind == "attention":
        return _of_attention(ours.self_attention.core_attention, theirs.self_attn.attn.impl)
    return ""


SAME = "its weights are the same, so what it does with them differs"


def _weights(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Whichever side has padding has it behind."""
    rows = min(len(ours), len(theirs))
    a, b = ours[:rows].double(), theirs[:rows].double()
    difference, size = float((a - b).square().mean().sqrt()), float(b.square().mean().sqrt())
    return f"its weights differ, by {difference / max(size, 1e-30):.2g} of their size" if difference else ""


def _biases(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else f"only the {'trainer' if theirs is None else 'sampler'} has a bias"
    return "its biases differ" if not torch.equal(ours, theirs.to(ours.dtype)) else ""


def _norm(ours: Any, theirs: Any) -> str:
    if found := _weights(ours.weight[None], theirs.weight[None]):
        return found
    mine, its = getattr(ours, "eps", None), getattr(theirs, "variance_epsilon", None)
    return f"its epsilon is {mine:g} in the trainer and {its:g} in the sampler" if None not in (mine, its) and mine != its else SAME


def _of_attention(ours: Any, theirs: Any) -> str:
    window = getattr(theirs, "sliding_window", None)
    if isinstance(window, tuple):
        window = window[0]
    if window is not None and window >= 0 and ours.window is None:
        return f"the sampler's sees the last {window} tokens alone"
    scale = ours.softmax_scale
    if scale is not None and abs(scale - theirs.scale) > 1e-6 * theirs.scale:
        return f"its scale is {scale:g} in the trainer and {theirs.scale:g} in the sampler"
    return ""


def _of_logits(sampler: Any) -> str:
    found = sampler.logits_processor
    if found.soft_cap is not None:
        return f"the sampler caps logits at {found.soft_cap:g}"
    return f"the sampler multiplies logits by {found.scale:g}" if found.scale != 1 else SAME


def _in_their_order(x: torch.Tensor | None, model: PolicyModel) -> torch.Tensor | None:
    """Rows of the fused projection, group by group -> all queries, all keys, all values."""
    if x is None:
        return None
    cfg, tp = model.config, model.pg_collection.tp.size()
    groups, each = cfg.num_query_groups // tp, cfg.num_attention_heads // cfg.num_query_groups
    q, k, v = x.view(groups, each + 2, cfg.kv_channels, *x.shape[1:]).split([each, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in (q, k, v)])


def _read_by_kernel(linear: Any, channels: int) -> torch.Tensor:
    """[rows, channels]: the weight that vLLM's kernel multiplies with, which may be a packed copy of the one that the module shows."""
    like = next(iter(linear.parameters()))
    found = []
    for first in range(0, channels, _ROWS):
        some = torch.eye(channels, dtype=like.dtype, device=like.device)[first : first + _ROWS]
        found.append(linear.quant_method.apply(linear, some, bias=None))
    return torch.cat(found).t()
