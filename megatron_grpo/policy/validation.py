"""Checks before anything loads: models, and models in a layout, that Megatron-Core cannot compute.

Imports no torch, because `plan` uses them too.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.batching.stages import layer_counts
from megatron_grpo.config.config import Config
from megatron_grpo.config.optimizer import FP8_NEEDS
from megatron_grpo.config.read import COMMAND_LINE
from megatron_grpo.config.rules import Rule, broken, settings_of
from megatron_grpo.weights.lora import linear_modules, lora_of
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import yarn_mscale

MOST_FLASH_CHANNELS = 256
RECOMPUTABLE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")


def problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return every conflict between this configuration and this model.

    Divisibility (`weights.layout_validation`) and batch sizes are checked elsewhere.

    Args:
        cfg: The settings of the run.
        shape: The model's dimensions.
    """
    return [*broken(RULES, _settings(cfg, shape)), *sharing_problems(cfg, shape)]


def sharing_problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return the problem if `share_prefix` is true and prompts cannot be shared.

    Args:
        cfg: The settings of the run.
        shape: The model's dimensions.
    """
    return list(broken([SHARING], settings_of(cfg, shape=shape)))


def machine_problems(
    cfg: Config, *, has_gpu: bool, has_transformer_engine: bool, capability: tuple[int, int] | None = None
) -> list[Problem]:
    """Return what this configuration needs and the machine does not have.

    `train` knows the machine; `plan` may be for another one.

    Args:
        cfg: The settings of the run.
        has_gpu: Whether the machine has a GPU.
        has_transformer_engine: Whether Transformer Engine is installed.
        capability: Compute capability of the GPU; None if unknown.
    """
    machine = {"has_gpu": has_gpu, "has_te": has_transformer_engine, "capability": capability}
    return list(broken(MACHINE_RULES, settings_of(cfg, **machine, fused=" and ".join(_fused_recompute(cfg)))))


def sampler_problems(shape: ModelShape) -> list[Problem]:
    """Return what vLLM 0.32 would sample differently from the model: its gpt-oss has constants for what config.json may set.

    Args:
        shape: The model's dimensions.
    """
    return list(broken([SAMPLER], SimpleNamespace(shape=shape)))


def _settings(cfg: Config, shape: ModelShape | None) -> SimpleNamespace:
    selected = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    return settings_of(
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
        cfg: The settings of the run.
        shape: The model's dimensions; None if unknown.
    """
    tuner = cfg.tuner
    if cfg.rollout.bitwise_parity:
        return "parts of attention that are merged have other bits than the whole (bitwise_parity)"
    longest = (cfg.data.max_prompt_length or (shape and shape.max_position_embeddings) or 0) + cfg.rollout.max_completion_length
    if shape and shape.sliding_window and shape.sliding_window < longest:
        return f"{shape.architecture} has layers that see {shape.sliding_window} tokens, where sequences have up to {longest}"
    if tuner.tuner_type == "lora" and tuner.lora_dropout > 0:
        return f"lora_dropout ({tuner.lora_dropout:g}) would draw one mask for all copies of a prompt, which is another estimator"
    return None


def flash_obstacle(dtype: str, channels: int) -> str | None:
    """Return why flash attention on GPUs does not support these heads, as a phrase; None if it does.

    `policy.attention` checks the GPU itself.

    Args:
        dtype: Name of the dtype, such as "bfloat16".
        channels: Channels of one head.
    """
    if dtype not in ("bfloat16", "float16"):
        return f"flash attention takes bfloat16 and float16, not {dtype}"
    if channels > MOST_FLASH_CHANNELS or channels % 8:
        return f"flash attention takes heads of at most {MOST_FLASH_CHANNELS} channels, a multiple of 8; these have {channels}"
    return None


def attention_channels(shape: ModelShape) -> int:
    """Return the channels of one head as the attention kernels take it: the same for queries, keys and values."""
    return max(shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim, shape.mla.v_head_dim) if shape.mla else shape.head_dim


def needs_local_layers(shape: ModelShape) -> str | None:
    """Return the model's feature that only local layers compute, also with Transformer Engine installed, as a phrase; or None."""
    reasons = {
        "multi-latent attention": shape.mla,
        "positions with three axes": shape.vision,
        "attention within a window": shape.sliding_window,
        "a rotation of a part of each head": shape.mla is None and shape.rope.dim < shape.head_dim,
        "a norm over all heads": shape.qk_norm_is_whole,
        "a norm behind attention": shape.post_norm,
        "attention with sinks": shape.sinks,
        "a gate that is not SiLU": shape.activation != "silu",
    }
    return next((reason for reason, has in reasons.items() if has), None)


def first_chunk_layers(cfg: Config, num_layers: int) -> int:
    """Return the number of layers of the first stage's first model chunk.

    Args:
        cfg: The settings of the run.
        num_layers: Layers of the model.
    """
    return layer_counts(cfg.parallel, num_layers)[0][0]


# ---- rules that compute something


def _fused_recompute(cfg: Config) -> list[str]:
    """Return the chosen modules that only Transformer Engine's layers can recompute."""
    chosen = cfg.model.recompute_modules if cfg.model.recompute_granularity == "selective" else ()
    return [name for name in chosen if name in ("layernorm", "moe_act")]


def _unshareable(c: SimpleNamespace) -> dict[str, Any] | None:
    reason = sharing_obstacle(c.cfg, c.shape)
    if c.share_prefix != "true" or reason is None:
        return None
    others = {"lora_dropout": ", or lora_dropout 0", "parts of attention": ", or bitwise_parity false"}
    return {"reason": reason, "other": next((words for begin, words in others.items() if reason.startswith(begin)), "")}


def _trains_biased_experts(c: SimpleNamespace) -> bool:
    if not (c.moe and c.moe.has_biases and c.tuner_type == "lora"):
        return False
    try:
        settings = lora_of(c.cfg.tuner, c.shape)
    except ConfigError:  # an error in the adapter's file is reported where the file is read
        return False
    return bool(settings and any(settings.rank_of(module.name) for module in linear_modules(c.shape) if module.is_expert))


def _late_tower(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the tower adds features to more layers (DeepStack) than the first model chunk has."""
    if not c.shape.vision or not c.shape.vision.num_deepstack:
        return None
    here, chunks = first_chunk_layers(c.cfg, c.shape.num_layers), c.virtual_pipeline_model_parallel_size or 1
    if here >= c.shape.vision.num_deepstack:
        return None
    several = {"more": " virtual_pipeline_model_parallel_size", "told": f", {chunks} chunks a stage"} if chunks > 1 else {}
    return {"here": here, "least": c.shape.vision.num_deepstack * chunks, "more": "", "told": "", **several}


def _useless_exchange(c: SimpleNamespace) -> dict[str, Any] | None:
    if c.cp_comm_type is None:
        return None
    if c.context_parallel_size == 1:
        return {"why": "context_parallel_size is 1, and nothing is exchanged"}
    is_local = c.transformer_impl == "local" or c.shape.mla is not None or c.shape.vision is not None
    return {"why": "local layers exchange keys in one way, all at once"} if is_local else None


def _without_experts(c: SimpleNamespace) -> dict[str, Any] | None:
    asked = [name for name in ("moe_permute_fusion", "moe_shared_expert_overlap", "moe_enable_deepep") if getattr(c, name)]
    return {"first": asked[0], "all": " and ".join(asked)} if asked and not c.moe else None


def _no_overlap(c: SimpleNamespace) -> dict[str, Any] | None:
    if not (c.moe and c.moe_shared_expert_overlap):
        return None
    if c.tuner_type == "lora":
        return {"why": "tuner_type lora puts adapters beside them"}
    return {"why": "allgather does nothing meanwhile"} if c.moe_token_dispatcher_type == "allgather" else None


def _short_units(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the layers of a model chunk are no multiple of `recompute_num_layers`.

    Megatron-Core divides the layers into units of this size, and fails if the last unit is smaller.
    """
    size = c.recompute_num_layers
    if not (c.recompute_granularity == "full" and c.recompute_method == "uniform" and size):
        return None
    counts = {count for row in layer_counts(c.cfg.parallel, c.shape.num_layers) for count in row} - {0}
    wrong = sorted(n for n in counts if n % size)
    if not wrong:
        return None
    works = [n for n in range(max(counts), 0, -1) if all(count % n == 0 for count in counts)]
    near = [n for n in works if n < size][:1] + [n for n in works if n > size][-1:]
    told = f"{wrong[0]} = {wrong[0] // size} x {size} + {wrong[0] % size}. Use {' or '.join(str(n) for n in reversed(works))}"
    return {"told": told, "near": near}


def _odd_sides(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if FP8's scaling does not support the sides of some matrices."""
    if not c.fp8_format:
        return None
    shape, tp, multiple = c.shape, c.tensor_model_parallel_size, FP8_NEEDS[c.fp8_recipe][1]
    heads = (shape.num_attention_heads + 2 * max(shape.num_query_groups, tp)) * shape.head_dim
    ffn = shape.moe.ffn_hidden_size // c.expert_tensor_parallel_size if shape.moe else shape.ffn_hidden_size // tp
    sizes = {"hidden_size": shape.hidden_size, "queries, keys and values of a rank": heads // tp,
             "intermediate_size of a rank": ffn, "heads of a rank": shape.num_attention_heads * shape.head_dim // tp}  # fmt: skip
    wrong = [f"{name} ({size})" for name, size in sizes.items() if size % multiple]
    return {"multiple": multiple, "wrong": ", ".join(wrong)} if wrong else None


def _old_gpu(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message's values if the GPU cannot compute FP8 with this scaling."""
    if not c.fp8_format or not c.capability or c.capability >= (least := FP8_NEEDS[c.fp8_recipe][0]):
        return None
    here, needed = (".".join(map(str, version)) for version in (c.capability, least))
    others = [name for name, (at_least, _) in FP8_NEEDS.items() if at_least <= c.capability]
    return {"here": here, "needed": needed, "others": others, "do": f"Use {' or '.join(others)}" if others else "Leave fp8_format out"}


def _not_as_vllm(c: SimpleNamespace) -> dict[str, Any] | None:
    shape = c.shape
    if not shape.sinks:
        return None
    rope, yarn = shape.rope, yarn_mscale(shape.rope.factor)
    others = {
        "rms_norm_eps is 1e-5": shape.norm_epsilon == 1e-5,
        "swiglu_alpha is 1.702 and swiglu_limit 7": shape.clamp == (1.702, 7.0),
        "attention_bias is true": shape.qkv_bias,
        "tie_word_embeddings is false": not shape.tied_embeddings,
        "every other layer has a window, from the first": all(bool(window) != bool(i % 2) for i, window in enumerate(shape.windows)),
        "the rope is stretched by yarn, without an attention_factor": rope.type == "yarn" and rope.attention_scaling == yarn,
    }
    wrong = [words for words, holds in others.items() if not holds]
    return {"wrong": "; ".join(wrong)} if wrong else None


# fmt: off
RULES = (
    Rule("stop_token_ids", lambda c: (beyond := [token for token in c.stop_token_ids if token >= c.shape.vocab_size])
         and {"beyond": ", ".join(map(str, beyond)), "are": "are" if len(beyond) > 1 else "is"},
         "stop_token_ids: {beyond} {are} not in the model's vocabulary of {shape.vocab_size} tokens."),
    # experts: routing in Megatron-Core
    Rule("model", lambda c: c.moe and c.moe.score_function == "softmax" and c.moe.topk == 1 and c.moe.norm_topk_prob,
         "model: one expert a token (num_experts_per_tok 1) with norm_topk_prob weighs that expert 1 whatever the router says, so it "
         "cannot be trained. Use a model with norm_topk_prob false, or with more experts a token."),
    Rule("model", lambda c: c.moe and c.moe.score_function == "sigmoid" and c.moe.norm_topk_prob != (c.moe.topk > 1)
         and {"norm": str(c.moe.norm_topk_prob).lower()},
         "model: Megatron-Core's sigmoid router makes the chosen experts' weights sum to 1 where there are several, not where there is "
         "one; this model has norm_topk_prob {norm} with num_experts_per_tok {moe.topk}."),
    Rule("model", lambda c: c.moe and c.moe.is_group_limited and c.moe.group_topk
         and (best := c.moe.topk // c.moe.group_topk) != 2 and {"best": best},
         "model: Megatron-Core rates a group of experts by its best num_experts_per_tok / topk_group ({moe.topk} / {moe.group_topk} = "
         "{best}) experts, the model by its best 2; they choose alike where the quotient is 2, or where topk_group is n_group "
         "({moe.num_groups})."),
    # features that only local layers compute
    Rule("transformer_impl", lambda c: c.local and c.transformer_impl == "transformer_engine",
         "transformer_impl transformer_engine: {local}, which {shape.architecture} has, is computed by local layers only. Use auto or "
         "local.", {"transformer_impl": ["auto", "local"]}),
    Rule("recompute_modules", lambda c: c.shape.mla and "mla_up_proj" in c.selected,
         "recompute_modules: mla_up_proj is not one that multi-latent attention can recompute here. Leave it out."),
    Rule("recompute_modules", lambda c: c.local and c.transformer_impl == "auto" and c.fused,
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, and {local} is computed by local layers only. Leave "
         "it out."),
    Rule("expert_tensor_parallel_size", lambda c: c.moe and c.moe.has_biases and (c.expert_tensor_parallel_size or 1) > 1,
         "expert_tensor_parallel_size: {expert_tensor_parallel_size} would add the biases of {shape.architecture}'s experts "
         "{expert_tensor_parallel_size} times (Megatron-Core refuses it). Use 1, and expert_model_parallel_size for more ranks.",
         {"expert_tensor_parallel_size": [1]}),
    Rule("target_modules", _trains_biased_experts,
         "target_modules: {shape.architecture} keeps the experts of a layer in one tensor, for which PEFT's files and vLLM's adapters have "
         "other names than the adapters here. Use q_proj k_proj v_proj o_proj, or tuner_type full."),
    # a vision tower
    Rule("recompute_granularity", lambda c: c.shape.vision and c.shape.vision.num_deepstack and c.recompute_granularity == "full",
         "recompute_granularity full: what the tower of {shape.architecture} adds to its first {shape.vision.num_deepstack} layers "
         "(DeepStack) is not there any more when a layer is computed again. Use selective, or none.",
         {"recompute_granularity": ["selective", "none"]}),
    Rule("pipeline_model_parallel_size{more}", _late_tower,
         "the first model chunk has {here} of {shape.num_layers} layers (pipeline_model_parallel_size {pipeline_model_parallel_size}"
         "{told}), and {shape.architecture} adds what its tower sees to the first {shape.vision.num_deepstack} (DeepStack). Use fewer "
         "stages or chunks, or decoder_first_pipeline_num_layers {least} or more.",
         lambda c: {"decoder_first_pipeline_num_layers": [c.least]}),
    # optimizer, dispatcher, kernels and context-parallel communication, if this model's layers use them
    Rule("optimizer_cpu_offload use_distributed_optimizer", lambda c: c.optimizer_cpu_offload and not c.use_distributed_optimizer,
         "optimizer_cpu_offload needs use_distributed_optimizer true: with it alone Megatron-Core keeps float32 weights there.",
         {"use_distributed_optimizer": [True], "optimizer_cpu_offload": [False]}),
    Rule("moe_token_dispatcher_type pipeline_model_parallel_size",
         lambda c: c.moe and c.moe_token_dispatcher_type == "allgather" and c.pipeline_model_parallel_size > 1,
         "moe_token_dispatcher_type allgather does not go with pipeline_model_parallel_size ({pipeline_model_parallel_size}): packed "
         "micro-batches differ in length, which Megatron-Core's pipeline allows with alltoall only.",
         {"moe_token_dispatcher_type": ["alltoall"]}),
    (
        Rule("cp_comm_type", _useless_exchange, "cp_comm_type: {cp_comm_type}: {why}. Leave it out.", {"cp_comm_type": ["none"]}),
        Rule("cp_comm_type", lambda c: c.cp_comm_type == "a2a"
             and c.shape.num_query_groups % (c.context_parallel_size * c.tensor_model_parallel_size),
             "cp_comm_type: a2a deals heads over ranks, and {shape.num_query_groups} key heads cannot be dealt to TP "
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
         "moe_enable_deepep true and moe_token_dispatcher_type flex go together: flex is the dispatcher that DeepEP works in. Use both, or "
         "neither.", lambda c: {"moe_token_dispatcher_type": ["flex" if c.moe_enable_deepep else "alltoall"]}),
    # recomputation
    Rule("recompute_modules", lambda c: (unknown := [name for name in c.selected if name not in RECOMPUTABLE])
         and {"unknown": ", ".join(unknown)}, f"recompute_modules: {{unknown}} is none of {', '.join(RECOMPUTABLE)}."),
    Rule("recompute_modules", lambda c: not c.moe and (gone := [one for one in ("moe", "moe_act", "shared_experts") if one in c.selected])
         and {"missing": ", ".join(gone)}, "recompute_modules: the model has no experts, so there is no {missing}. Leave it out."),
    Rule("recompute_modules", lambda c: "mla_up_proj" in c.selected and not c.shape.mla,
         "recompute_modules: the model has no latent attention, so there is no mla_up_proj. Leave it out."),
    Rule("recompute_modules", lambda c: "mlp" in c.selected and c.shape.mlp_bias,
         "recompute_modules: Megatron-Core's backward does not end where an MLP with biases (mlp_bias) is recomputed by itself. Leave mlp "
         "out, or use recompute_granularity full."),
    Rule("recompute_modules", lambda c: c.fused and c.transformer_impl == "local",
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, and transformer_impl is local. Leave it out, or use "
         "transformer_impl transformer_engine."),
    Rule("recompute_num_layers", _short_units,
         "recompute_num_layers ({recompute_num_layers}) must divide the layers of each model chunk under recompute_method uniform: {told}, "
         "or recompute_method block.", lambda c: {"recompute_num_layers": c.near}),
    Rule("router_replay_mode", lambda c: c.router_replay_mode != "disabled" and not c.moe,
         "router_replay_mode {router_replay_mode} needs a MoE model: {shape.architecture} has no experts to choose. Use disabled.",
         {"router_replay_mode": ["disabled"]}),
    # FP8. A configuration file that a run has written contains every setting
    Rule("fp8_recipe", lambda c: not c.fp8_format and c.cfg.sources.get("fp8_recipe") == COMMAND_LINE,
         "fp8_recipe: {fp8_recipe} says how FP8 is scaled, and fp8_format is not set. Add --fp8_format hybrid."),
    Rule("fp8_format", lambda c: c.fp8_format and (c.local or c.transformer_impl == "local")
         and {"why": f"{c.local} has local layers only" if c.local else "transformer_impl is local"},
         "fp8_format: {fp8_format} needs Transformer Engine's layers, and {why}. Leave it out.", {"fp8_format": [None]}),
    Rule("fp8_format", lambda c: c.fp8_format and c.torch_dtype != "bfloat16",
         "fp8_format: {fp8_format} needs torch_dtype bfloat16, not {torch_dtype}.", {"fp8_format": [None]}),
    Rule("fp8_format", _odd_sides,
         "fp8_format: fp8_recipe {fp8_recipe} takes matrices whose sides are multiples of {multiple}, and {wrong} is not. Leave fp8_format "
         "out.", {"fp8_format": [None]}),
)

SHARING = Rule("share_prefix", _unshareable, "share_prefix: true cannot be: {reason}. Use auto or false{other}.",
               {"share_prefix": ["auto", "false"]})

SAMPLER = Rule("model", _not_as_vllm, "model: vLLM 0.32 samples every {shape.architecture} as if it had these: {wrong}. This one has not. "
               "Use a checkpoint that has.")

MACHINE_RULES = (
    Rule("bitwise_parity", lambda c: c.has_gpu and c.bitwise_parity,
         "bitwise_parity true: the kernels of a GPU are not reached; see docs/proof.md. Use false.", {"bitwise_parity": [False]}),
    Rule("transformer_impl", lambda c: c.transformer_impl == "transformer_engine" and not c.has_te,
         "transformer_impl: transformer_engine is not installed here. Install the extra `te`, or use auto or local.",
         {"transformer_impl": ["auto", "local"]}),
    Rule("optimizer_cpu_offload", lambda c: c.optimizer_cpu_offload and not c.has_gpu,
         "optimizer_cpu_offload: there is no GPU here: the optimizer is on the host already. Leave it out.",
         {"optimizer_cpu_offload": [False]}),
    (
        Rule("fp8_format", lambda c: c.fp8_format and not c.has_gpu,
             "fp8_format: {fp8_format} computes with Transformer Engine on a GPU, and there is no GPU here. Leave it out.",
             {"fp8_format": [None]}),
        Rule("fp8_format", lambda c: c.fp8_format and not c.has_te,
             "fp8_format: {fp8_format} computes with Transformer Engine on a GPU, and Transformer Engine is not installed here (the extra "
             "`te`). Leave it out.", {"fp8_format": [None]}),
        Rule("fp8_recipe", _old_gpu, "fp8_recipe: {fp8_recipe} needs a GPU of compute capability {needed}, this one has {here}. {do}.",
             lambda c: {"fp8_recipe": c.others} if c.others else {}),
    ),
    Rule("moe_permute_fusion", lambda c: c.moe_permute_fusion and not c.has_te,
         "moe_permute_fusion: it is Transformer Engine's, which is not installed here. Leave it out.", {"moe_permute_fusion": [False]}),
    Rule("cp_comm_type", lambda c: c.cp_comm_type and c.transformer_impl == "auto" and not c.has_te,
         "cp_comm_type: it is for Transformer Engine's attention, which is not installed here. Leave it out.", {"cp_comm_type": ["none"]}),
    Rule("moe_shared_expert_overlap", lambda c: c.moe_shared_expert_overlap and not c.has_gpu,
         "moe_shared_expert_overlap: it needs CUDA streams, and there is no GPU here. Leave it out.",
         {"moe_shared_expert_overlap": [False]}),
    Rule("moe_enable_deepep", lambda c: c.moe_enable_deepep and not (c.has_gpu and find_spec("deep_ep"))
         and {"lacks": "DeepEP (the package deep_ep) is not installed here" if c.has_gpu else "there is no GPU here"},
         "moe_enable_deepep: {lacks}. Use false and moe_token_dispatcher_type alltoall.", {"moe_enable_deepep": [False]}),
    Rule("recompute_modules", lambda c: c.fused and c.transformer_impl == "auto" and not c.has_te,
         "recompute_modules: {fused} can be recomputed with Transformer Engine only, which is not installed here. Leave it out."),
)
# fmt: on
