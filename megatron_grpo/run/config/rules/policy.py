"""Checks before anything loads: models, and models in a layout, that Megatron-Core cannot compute.

Imports no torch, because `plan` uses them too.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.policy.requirements import FP8_NEEDS
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.lora import linear_modules, make_lora_settings
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import yarn_mscale
from megatron_grpo.run.config.read import COMMAND_LINE
from megatron_grpo.run.config.rules import Rule, broken_rules, make_namespace
from megatron_grpo.run.config.rules.stages import layer_counts
from megatron_grpo.run.config.settings import Config

# What vLLM 0.32's CPU kernels compute: channels of a head, and multiples of the channels of an expert.
CPU_HEADS, CPU_EXPERTS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512), 32
RECOMPUTABLE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")


def problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return every conflict between this configuration and this model.

    Divisibility (`rules.layout`) and batch sizes are checked elsewhere.
    """
    return [*broken_rules(RULES, _settings(cfg, shape)), *sharing_problems(cfg, shape)]


def sharing_problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return the problem if `share_prefix` is true and prompts cannot be shared."""
    return list(broken_rules([SHARING], make_namespace(cfg, shape=shape)))


def machine_problems(
    cfg: Config, *, has_gpu: bool, has_transformer_engine: bool, capability: tuple[int, int] | None = None
) -> list[Problem]:
    """Return what this configuration needs and the machine does not have.

    `train` knows the machine; `plan` may be for another one.

    Args:
        has_gpu: Whether the machine has a GPU.
        has_transformer_engine: Whether Transformer Engine is installed.
        capability: Compute capability of the GPU; None if unknown.
    """
    machine = {"has_gpu": has_gpu, "has_te": has_transformer_engine, "capability": capability}
    return list(broken_rules(MACHINE_RULES, make_namespace(cfg, **machine, fused=" and ".join(_fused_recompute(cfg)))))


def sampler_problems(shape: ModelShape, *, on_cpu: bool = False, ranks: int = 1) -> list[Problem]:
    """Return what vLLM 0.32 cannot sample, or would sample differently from the model, whatever config.json says.

    Args:
        on_cpu: Whether vLLM is known to run on a CPU.
    """
    lacks = "multi-latent attention" if shape.mla else "the router" if shape.architecture == "MiniMaxM2ForCausalLM" else None
    c = SimpleNamespace(shape=shape, reason=lacks if on_cpu else None, has_sizes=on_cpu and not lacks, ranks=max(ranks, 1))
    return list(broken_rules(SAMPLER_RULES, c))


def _settings(cfg: Config, shape: ModelShape | None) -> SimpleNamespace:
    selected = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    return make_namespace(
        cfg,
        shape=shape,
        moe=shape and shape.moe,
        local=needs_local_layers(shape) if shape else None,
        selected=selected,
        fused=" and ".join(_fused_recompute(cfg)),
    )


# ---- obstacles, as phrases


def sharing_obstacle(cfg: Config, shape: ModelShape | None) -> str | None:
    """Return why prompts cannot be computed once per group, as a phrase; None if they can.

    Args:
        shape: The model's dimensions; None if unknown.
    """
    tuner = cfg.tuner
    if cfg.rollout.bitwise_parity:
        return "merged partial attention is not bitwise equal to full attention (bitwise_parity)"
    longest = (cfg.data.max_prompt_length or (shape and shape.max_position_embeddings) or 0) + cfg.rollout.max_completion_length
    if shape and shape.sliding_window and shape.sliding_window < longest:
        return f"{shape.architecture} has layers with a sliding window of {shape.sliding_window} tokens, and sequences have up to {longest}"
    if tuner.tuner_type == "lora" and tuner.lora_dropout > 0:
        return f"lora_dropout ({tuner.lora_dropout:g}) would use one dropout mask for all copies of a prompt, which changes the estimator"
    return None


def attention_channels(shape: ModelShape) -> int:
    """Return the channels of one head as the attention kernels take it: the same for queries, keys and values."""
    return max(shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim, shape.mla.v_head_dim) if shape.mla else shape.head_dim


def needs_local_layers(shape: ModelShape) -> str | None:
    """Return the model's feature that only local layers compute, also with Transformer Engine installed, as a phrase; or None."""
    reasons = {
        "multi-latent attention": shape.mla,
        "the gated delta rule": shape.delta_net,
        "attention with an output gate": shape.attention_output_gate,
        "M-RoPE (three-axis positions)": shape.vision,
        "sliding-window attention": shape.sliding_window,
        "partial rotary embedding": shape.mla is None and shape.rope.dim < shape.head_dim,
        "a norm over all heads": shape.qk_norm_is_whole,
        "a post-attention norm": shape.post_norm,
        "attention with sinks": shape.sinks,
        "a gate other than SiLU": shape.activation != "silu",
    }
    return next((reason for reason, has in reasons.items() if has), None)


# ---- rules that compute something


def _fused_recompute(cfg: Config) -> list[str]:
    """Return the chosen modules that only Transformer Engine's layers can recompute."""
    chosen = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    return [name for name in chosen if name in ("layernorm", "moe_act")]


def _unshareable(c: SimpleNamespace) -> dict[str, Any] | None:
    reason = sharing_obstacle(c.cfg, c.shape)
    if c.share_prefix != "true" or reason is None:
        return None
    alternatives = {"lora_dropout": ", or lora_dropout 0", "merged partial attention": ", or bitwise_parity false"}
    return {"reason": reason, "other": next((words for begin, words in alternatives.items() if reason.startswith(begin)), "")}


def _adapts_fused_experts(c: SimpleNamespace) -> bool:
    if not (FAMILIES[c.shape.architecture].fused_experts and c.tuner_type == "lora"):
        return False
    try:
        settings = make_lora_settings(c.cfg.tuner, c.shape)
    except ConfigError:  # an error in the adapter's file is reported where the file is read
        return False
    return bool(settings and any(settings.find_lora_rank(module.name) for module in linear_modules(c.shape) if module.is_expert))


def _late_tower(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the tower adds features to more layers (DeepStack) than the first model chunk has."""
    if not c.shape.vision or not c.shape.vision.num_deepstack:
        return None
    first_layers, chunks = layer_counts(c.cfg.parallel, c.shape.num_layers)[0][0], c.virtual_pipeline_model_parallel_size or 1
    if first_layers >= c.shape.vision.num_deepstack:
        return None
    chunk_note = {"more": " virtual_pipeline_model_parallel_size", "told": f", {chunks} chunks per stage"} if chunks > 1 else {}
    return {"here": first_layers, "least": c.shape.vision.num_deepstack * chunks, "more": "", "told": "", **chunk_note}


def _useless_exchange(c: SimpleNamespace) -> dict[str, Any] | None:
    if c.cp_comm_type is None:
        return None
    if c.context_parallel_size == 1:
        return {"why": "context_parallel_size is 1"}
    is_local = c.transformer_impl == "local" or c.shape.mla is not None or c.shape.vision is not None
    return {"why": "local layers support a single exchange of keys (all-gather)"} if is_local else None


def _without_experts(c: SimpleNamespace) -> dict[str, Any] | None:
    unused = [name for name in ("moe_permute_fusion", "moe_shared_expert_overlap", "moe_enable_deepep") if getattr(c, name)]
    return {"first": unused[0], "all": " and ".join(unused)} if unused and not c.moe else None


def _no_overlap(c: SimpleNamespace) -> dict[str, Any] | None:
    if not (c.moe and c.moe_shared_expert_overlap):
        return None
    if c.tuner_type == "lora":
        return {"why": "tuner_type lora adds adapters to shared experts"}
    return {"why": "allgather has nothing to overlap with"} if c.moe_token_dispatcher_type == "allgather" else None


def _short_units(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the layers of a model chunk are no multiple of `recompute_num_layers`.

    Megatron-Core divides the layers into units of this size, and fails if the last unit is smaller.
    """
    size = c.recompute_num_layers
    if not (c.recompute_granularity == "full" and c.recompute_method == "uniform" and size):
        return None
    counts = {count for row in layer_counts(c.cfg.parallel, c.shape.num_layers) for count in row} - {0}
    indivisible = sorted(n for n in counts if n % size)
    if not indivisible:
        return None
    working = [n for n in range(max(counts), 0, -1) if all(count % n == 0 for count in counts)]
    nearest = [n for n in working if n < size][:1] + [n for n in working if n > size][-1:]
    arithmetic = (
        f"{indivisible[0]} = {indivisible[0] // size} x {size} + {indivisible[0] % size}. Use "
        f"{' or '.join(str(n) for n in reversed(working))}"
    )
    return {"told": arithmetic, "near": nearest}


def _odd_sides(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if FP8's scaling does not support the sides of some matrices."""
    if not c.fp8_format:
        return None
    shape, tp, multiple = c.shape, c.tensor_model_parallel_size, FP8_NEEDS[c.fp8_recipe][1]
    heads = (shape.num_attention_heads + 2 * max(shape.num_query_groups, tp)) * shape.head_dim
    ffn = shape.moe.ffn_hidden_size // c.expert_tensor_parallel_size if shape.moe else shape.ffn_hidden_size // tp
    sizes = {"hidden_size": shape.hidden_size, "query, key and value rows per rank": heads // tp,
             "intermediate_size per rank": ffn, "attention output per rank": shape.num_attention_heads * shape.head_dim // tp}  # fmt: skip
    indivisible = [f"{name} ({size})" for name, size in sizes.items() if size % multiple]
    return {"multiple": multiple, "wrong": ", ".join(indivisible)} if indivisible else None


def _old_gpu(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the GPU cannot compute FP8 with this scaling."""
    if not c.fp8_format or not c.capability or c.capability >= (least := FP8_NEEDS[c.fp8_recipe][0]):
        return None
    present, required = (".".join(map(str, version)) for version in (c.capability, least))
    supported = [name for name, (at_least, _) in FP8_NEEDS.items() if at_least <= c.capability]
    return {
        "here": present,
        "needed": required,
        "others": supported,
        "do": f"Use {' or '.join(supported)}" if supported else "Leave fp8_format out",
    }


def _not_as_vllm(c: SimpleNamespace) -> dict[str, Any] | None:
    shape = c.shape
    if not shape.sinks:
        return None
    rope, yarn = shape.rope, yarn_mscale(shape.rope.factor)
    conditions = {
        "rms_norm_eps 1e-5": shape.norm_epsilon == 1e-5,
        "swiglu_alpha 1.702 and swiglu_limit 7": shape.clamp == (1.702, 7.0),
        "attention_bias true": shape.qkv_bias,
        "tie_word_embeddings false": not shape.tied_embeddings,
        "a sliding window in every other layer, from the first": all(bool(window) != bool(i % 2) for i, window in enumerate(shape.windows)),
        "YaRN without attention_factor": rope.type == "yarn" and rope.attention_scaling == yarn,
    }
    violated = [words for words, holds in conditions.items() if not holds]
    return {"wrong": "; ".join(violated)} if violated else None


def _indivisible_experts(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if vLLM's CPU kernels do not compute experts of this width on each rank of an engine."""
    if not (c.has_sizes and c.shape.moe):
        return None
    sizes = {"hidden_size": c.shape.hidden_size, "the width of an expert on each rank": c.shape.moe.ffn_hidden_size / c.ranks}
    wrong = [f"{name} ({size:g})" for name, size in sizes.items() if size % CPU_EXPERTS]
    return {"wrong": " and ".join(wrong), "are": "are" if len(wrong) > 1 else "is"} if wrong else None


# fmt: off
RULES = (
    Rule("stop_token_ids", lambda c: (beyond := [token for token in c.stop_token_ids if token >= c.shape.vocab_size])
         and {"beyond": ", ".join(map(str, beyond)), "are": "are" if len(beyond) > 1 else "is"},
         "stop_token_ids: {beyond} {are} not in the model's vocabulary of {shape.vocab_size} tokens."),
    # experts: routing in Megatron-Core
    Rule("model", lambda c: c.moe and c.moe.score_function == "softmax" and c.moe.topk == 1 and c.moe.norm_topk_prob,
         "model: with norm_topk_prob and num_experts_per_tok 1, the expert's weight is always 1, so the router cannot be trained. "
         "Use a model with norm_topk_prob false or more experts per token."),
    Rule("model", lambda c: c.moe and c.moe.score_function == "sigmoid" and c.moe.norm_topk_prob != (c.moe.topk > 1)
         and {"norm": str(c.moe.norm_topk_prob).lower()},
         "model: Megatron-Core's sigmoid router normalizes the weights of the selected experts if num_experts_per_tok is above 1, "
         "and only then; this model has norm_topk_prob {norm} with num_experts_per_tok {moe.topk}. Use a model with the same "
         "normalization."),
    Rule("model", lambda c: c.moe and c.moe.is_group_limited and c.moe.group_topk
         and (best := c.moe.topk // c.moe.group_topk) != 2 and {"best": best},
         "model: Megatron-Core scores a group of experts by its best num_experts_per_tok / topk_group ({moe.topk} / {moe.group_topk} "
         "= {best}) experts, the model by its best 2. Use a model in which the quotient is 2, or topk_group is n_group "
         "({moe.num_groups})."),
    Rule("context_parallel_size", lambda c: c.shape.delta_net and c.shape.delta_net.num_key_heads % c.tensor_model_parallel_size == 0
         and c.shape.delta_net.num_key_heads // c.tensor_model_parallel_size % c.context_parallel_size,
         "context_parallel_size ({context_parallel_size}): the gated delta rule distributes key heads over ranks, and "
         "linear_num_key_heads ({shape.delta_net.num_key_heads}) is not a multiple of TP {tensor_model_parallel_size} x CP "
         "{context_parallel_size}. Use fewer ranks."),
    # features that only local layers compute
    Rule("transformer_impl", lambda c: c.local and c.transformer_impl == "transformer_engine",
         "transformer_impl transformer_engine: {local}, which {shape.architecture} has, is supported by local layers only. Use auto or "
         "local.", {"transformer_impl": ["auto", "local"]}),
    Rule("recompute_modules", lambda c: c.shape.mla and "mla_up_proj" in c.selected,
         "recompute_modules: multi-latent attention cannot recompute mla_up_proj. Leave it out."),
    Rule("recompute_modules", lambda c: c.local and c.transformer_impl == "auto" and c.fused,
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, and {local} is supported by local layers only. "
         "Leave it out."),
    Rule("expert_tensor_parallel_size", lambda c: c.moe and c.moe.has_biases and (c.expert_tensor_parallel_size or 1) > 1,
         "expert_tensor_parallel_size: {expert_tensor_parallel_size} would add the biases of {shape.architecture}'s experts "
         "{expert_tensor_parallel_size} times (Megatron-Core rejects it). Use 1, and expert_model_parallel_size for more ranks.",
         {"expert_tensor_parallel_size": [1]}),
    Rule("target_modules", _adapts_fused_experts,
         "target_modules: {shape.architecture} stores the experts of a layer in one tensor, for which PEFT's and vLLM's adapter "
         "names differ from those of this package. Use q_proj k_proj v_proj o_proj, or tuner_type full."),
    # a vision tower
    Rule("recompute_granularity", lambda c: c.shape.vision and c.shape.vision.num_deepstack and c.recompute_granularity == "full",
         "recompute_granularity full: the features that the vision tower of {shape.architecture} adds to its first "
         "{shape.vision.num_deepstack} layers (DeepStack) are no longer available when a layer is recomputed. Use selective, or none.",
         {"recompute_granularity": ["selective", "none"]}),
    Rule("pipeline_model_parallel_size{more}", _late_tower,
         "the first model chunk has {here} of {shape.num_layers} layers (pipeline_model_parallel_size "
         "{pipeline_model_parallel_size}{told}), and {shape.architecture} adds vision features to the first "
         "{shape.vision.num_deepstack} (DeepStack). Use fewer stages or chunks, or decoder_first_pipeline_num_layers {least} or more.",
         lambda c: {"decoder_first_pipeline_num_layers": [c.least]}),
    # optimizer, dispatcher, kernels and context-parallel communication, if this model's layers use them
    Rule("optimizer_cpu_offload use_distributed_optimizer", lambda c: c.optimizer_cpu_offload and not c.use_distributed_optimizer,
         "optimizer_cpu_offload needs use_distributed_optimizer true; otherwise Megatron-Core does not keep the float32 weights on "
         "the CPU.",
         {"use_distributed_optimizer": [True], "optimizer_cpu_offload": [False]}),
    Rule("use_distributed_optimizer", lambda c: c.shape.delta_net and c.torch_dtype == "bfloat16" and c.tuner_type == "full"
         and not c.use_distributed_optimizer,
         "use_distributed_optimizer false: {shape.architecture} has float32 weights beside bfloat16 ones, which Megatron-Core saves "
         "with the distributed optimizer only. Use true, or torch_dtype float32.",
         {"use_distributed_optimizer": [True], "torch_dtype": ["float32"]}),
    Rule("moe_token_dispatcher_type pipeline_model_parallel_size",
         lambda c: c.moe and c.moe_token_dispatcher_type == "allgather" and c.pipeline_model_parallel_size > 1,
         "moe_token_dispatcher_type allgather is not supported with pipeline_model_parallel_size ({pipeline_model_parallel_size}): "
         "packed micro-batches differ in length, which Megatron-Core's pipeline supports with alltoall only. Use alltoall.",
         {"moe_token_dispatcher_type": ["alltoall"]}),
    (
        Rule("cp_comm_type", _useless_exchange, "cp_comm_type: {cp_comm_type}: {why}. Leave it out.", {"cp_comm_type": ["none"]}),
        Rule("cp_comm_type", lambda c: c.cp_comm_type == "a2a"
             and c.shape.num_query_groups % (c.context_parallel_size * c.tensor_model_parallel_size),
             "cp_comm_type: a2a distributes heads over ranks, and {shape.num_query_groups} key heads are not a multiple of TP "
             "{tensor_model_parallel_size} x CP {context_parallel_size}. Use p2p or allgather.", {"cp_comm_type": ["p2p", "allgather"]}),
    ),
    Rule("{first}", _without_experts, "{first}: {shape.architecture} has no experts. Leave {all} out.", lambda c: {c.first: [False]}),
    (
        Rule("moe_shared_expert_overlap", lambda c: c.moe and c.moe_shared_expert_overlap and not c.moe.shared_ffn_hidden_size,
             "moe_shared_expert_overlap: {shape.architecture} has no shared experts. Leave it out.",
             {"moe_shared_expert_overlap": [False]}),
        Rule("moe_shared_expert_overlap", _no_overlap, "moe_shared_expert_overlap: {why}. Leave it out.",
             {"moe_shared_expert_overlap": [False]}),
    ),
    Rule("moe_enable_deepep moe_token_dispatcher_type", lambda c: c.moe_enable_deepep != (c.moe_token_dispatcher_type == "flex"),
         "moe_enable_deepep true and moe_token_dispatcher_type flex require each other: DeepEP runs in the flex dispatcher. Use "
         "both, or neither.", lambda c: {"moe_token_dispatcher_type": ["flex" if c.moe_enable_deepep else "alltoall"]}),
    # recomputation
    Rule("recompute_modules", lambda c: (unknown := [name for name in c.selected if name not in RECOMPUTABLE])
         and {"unknown": ", ".join(unknown)}, f"Unsupported recompute_modules {{unknown}}. Supported: {', '.join(RECOMPUTABLE)}."),
    Rule("recompute_modules", lambda c: not c.moe and (gone := [module for module in ("moe", "moe_act", "shared_experts") if module in
    c.selected])
         and {"missing": ", ".join(gone)}, "recompute_modules: the model has no experts, so there is no {missing}. Leave it out."),
    Rule("recompute_modules", lambda c: "mla_up_proj" in c.selected and not c.shape.mla,
         "recompute_modules: the model has no latent attention, so there is no mla_up_proj. Leave it out."),
    Rule("recompute_modules", lambda c: "mlp" in c.selected and c.shape.mlp_bias,
         "recompute_modules: Megatron-Core's backward hangs if an MLP with biases (mlp_bias) is recomputed separately. Leave mlp "
         "out, or use recompute_granularity full."),
    Rule("recompute_modules", lambda c: c.fused and c.transformer_impl == "local",
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, and transformer_impl is local. Leave it out, or use "
         "transformer_impl transformer_engine."),
    Rule("recompute_num_layers", _short_units,
         "recompute_num_layers ({recompute_num_layers}) must divide the layers of each model chunk under recompute_method uniform: {told}, "
         "or recompute_method block.", lambda c: {"recompute_num_layers": c.near}),
    Rule("router_replay_mode", lambda c: c.router_replay_mode == "R3" and c.shape.delta_net,
         "router_replay_mode R3: vLLM returns routed experts with prefix caching only, which it does not support for {shape.architecture}. "
         "Use R2 or disabled.", {"router_replay_mode": ["R2", "disabled"]}),
    Rule("router_replay_mode", lambda c: c.router_replay_mode != "disabled" and not c.moe,
         "router_replay_mode {router_replay_mode} needs a MoE model: {shape.architecture} has no experts. Use disabled.",
         {"router_replay_mode": ["disabled"]}),
    # FP8. A configuration file that a run has written contains every setting
    Rule("fp8_recipe", lambda c: not c.fp8_format and c.cfg.sources.get("fp8_recipe") == COMMAND_LINE,
         "fp8_recipe: {fp8_recipe} selects how FP8 is scaled, but fp8_format is not set. Add --fp8_format hybrid."),
    Rule("fp8_format", lambda c: c.fp8_format and (c.local or c.transformer_impl == "local")
         and {"why": f"{c.local} is supported by local layers only" if c.local else "transformer_impl is local"},
         "fp8_format: {fp8_format} needs Transformer Engine's layers, and {why}. Leave it out.", {"fp8_format": [None]}),
    Rule("fp8_format", lambda c: c.fp8_format and c.torch_dtype != "bfloat16",
         "fp8_format: {fp8_format} needs torch_dtype bfloat16, not {torch_dtype}.", {"fp8_format": [None]}),
    Rule("fp8_format", _odd_sides,
         "fp8_format: fp8_recipe {fp8_recipe} needs matrix dimensions that are multiples of {multiple}, but {wrong} is not. Leave "
         "fp8_format out.", {"fp8_format": [None]}),
)

SHARING = Rule("share_prefix", _unshareable, "share_prefix: true is not supported: {reason}. Use auto or false{other}.",
               {"share_prefix": ["auto", "false"]})

SAMPLER_RULES = (
    Rule("model", _not_as_vllm, "model: vLLM 0.32 assumes these values for every {shape.architecture}: {wrong}. This checkpoint has "
         "others. Use a checkpoint with these values."),
    Rule("model", lambda c: c.shape.architecture == "Qwen3NextForCausalLM" and c.shape.tied_embeddings,
         "model: vLLM 0.32 does not tie the embeddings of Qwen3NextForCausalLM and would sample from memory that was never written. Use a "
         "checkpoint with tie_word_embeddings false."),
    Rule("model", lambda c: c.reason,
         "model: vLLM 0.32 has no correct CPU kernel for {reason} of {shape.architecture}. Use a GPU, or vllm_mode server "
         "with servers on GPUs."),
    Rule("model", lambda c: c.has_sizes and c.shape.head_dim not in CPU_HEADS
         and {"supported": ", ".join(map(str, CPU_HEADS))},
         "model: vLLM 0.32 has no CPU kernel for heads of {shape.head_dim} channels. It has kernels for {supported}. Use a GPU, vllm_mode "
         "server with servers on GPUs, or a model with such heads."),
    Rule("model", _indivisible_experts,
         f"model: vLLM 0.32's CPU kernels compute experts in multiples of {CPU_EXPERTS} channels, and {{wrong}} {{are}} not one. Use a "
         "GPU, vllm_mode server with servers on GPUs, fewer ranks per engine, or a model with such sizes."),
    Rule("model", lambda c: c.shape.architecture.startswith("Qwen") and len(set(c.shape.windows)) > 1,
         "model: vLLM 0.32 does not sample {shape.architecture} with a sliding window ({shape.sliding_window}) in some of its layers. If "
         "no sequence is longer than the window, set use_sliding_window false in config.json, which changes nothing then; else use another "
         "model."),
    Rule("model", lambda c: c.shape.architecture.startswith("Qwen2") and c.shape.head_dim * c.shape.num_attention_heads
         != c.shape.hidden_size,
         "model: vLLM 0.32 takes hidden_size / num_attention_heads ({shape.hidden_size} / {shape.num_attention_heads}) for the channels of "
         "a head of every {shape.architecture}, and this one has head_dim {shape.head_dim}. Use a model with equal values."),
    Rule("model", lambda c: c.shape.delta_net and c.shape.delta_net.conv_kernel_dim < 2,
         "model: vLLM 0.32 does not run {shape.architecture} with linear_conv_kernel_dim {shape.delta_net.conv_kernel_dim}. Use a model "
         "with 2 or more."),
)

MACHINE_RULES = (
    Rule("bitwise_parity", lambda c: c.has_gpu and c.bitwise_parity,
         "bitwise_parity true: GPU kernels are not supported; see docs/proof.md. Use false.", {"bitwise_parity": [False]}),
    Rule("transformer_impl", lambda c: c.transformer_impl == "transformer_engine" and not c.has_te,
         "transformer_impl: transformer_engine is not installed. Install the extra `te`, or use auto or local.",
         {"transformer_impl": ["auto", "local"]}),
    Rule("optimizer_cpu_offload", lambda c: c.optimizer_cpu_offload and not c.has_gpu,
         "optimizer_cpu_offload: no GPU found; the optimizer is already on the CPU. Leave it out.",
         {"optimizer_cpu_offload": [False]}),
    (
        Rule("fp8_format", lambda c: c.fp8_format and not c.has_gpu,
             "fp8_format: {fp8_format} needs Transformer Engine and a GPU; no GPU found. Leave it out.",
             {"fp8_format": [None]}),
        Rule("fp8_format", lambda c: c.fp8_format and not c.has_te,
             "fp8_format: {fp8_format} needs Transformer Engine and a GPU; Transformer Engine is not installed (the extra `te`). "
             "Leave it out.", {"fp8_format": [None]}),
        Rule("fp8_recipe", _old_gpu, "fp8_recipe: {fp8_recipe} needs a GPU of compute capability {needed}, this one has {here}. {do}.",
             lambda c: {"fp8_recipe": c.others} if c.others else {}),
    ),
    Rule("moe_permute_fusion", lambda c: c.moe_permute_fusion and not c.has_te,
         "moe_permute_fusion: needs Transformer Engine, which is not installed (the extra `te`). Leave it out.",
         {"moe_permute_fusion": [False]}),
    Rule("cp_comm_type", lambda c: c.cp_comm_type and c.transformer_impl == "auto" and not c.has_te,
         "cp_comm_type: needs Transformer Engine, which is not installed (the extra `te`). Leave it out.", {"cp_comm_type": ["none"]}),
    Rule("moe_shared_expert_overlap", lambda c: c.moe_shared_expert_overlap and not c.has_gpu,
         "moe_shared_expert_overlap: needs CUDA streams; no GPU found. Leave it out.",
         {"moe_shared_expert_overlap": [False]}),
    Rule("moe_enable_deepep", lambda c: c.moe_enable_deepep and not (c.has_gpu and find_spec("deep_ep"))
         and {"lacks": "DeepEP (the package deep_ep) is not installed" if c.has_gpu else "no GPU found"},
         "moe_enable_deepep: {lacks}. Use false and moe_token_dispatcher_type alltoall.", {"moe_enable_deepep": [False]}),
    Rule("recompute_modules", lambda c: c.fused and c.transformer_impl == "auto" and not c.has_te,
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, which is not installed (the extra `te`). Leave "
         "it out."),
)
# fmt: on
