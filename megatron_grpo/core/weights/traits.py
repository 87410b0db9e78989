"""Architecture-specific parts of config.json, one function per family. No tensors, no torch.

Each function takes config.json, with the defaults of the family's transformers class filled in (config_fields.json), and the fields that
all families share (`common`). It returns the `ModelShape` fields that its family reads in its own way. These may override common ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.weights.sizes import DeltaNetShape, MlaShape, MoeShape, yarn_mscale

Config = Mapping[str, Any]


def _biases(config: Config) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "attention_out_bias"), config["attention_bias"])


def llama(config: Config, common: Config) -> dict[str, Any]:
    """Read the biases of Llama's attention and MLP."""
    return {**_biases(config), "mlp_bias": config["mlp_bias"]}


def qwen2(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen2: query, key and value always have biases, and layers from max_window_layers on may have a sliding window."""
    return {"qkv_bias": True, "windows": _qwen_windows(config, common["num_layers"])}


def qwen3(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen3: like Qwen2 with a norm of each query and key head, and biases only if attention_bias is set."""
    return {**_biases(config), "qk_norm": True, "windows": _qwen_windows(config, common["num_layers"])}


def mistral(config: Config, common: Config) -> dict[str, Any]:
    """Read Mistral's sliding windows.

    A config with `layer_types` is what transformers calls Ministral: some layers have the window, and the others attend to all tokens.
    """
    return {"windows": list_windows(config, common["num_layers"], lambda layer: config["sliding_window"] is not None)}


def qwen3_moe(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen3-MoE: experts in every decoder_sparse_step-th layer except those in mlp_only_layers."""
    layers = common["num_layers"]
    step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
    return {
        **_biases(config),
        "qk_norm": True,
        "windows": (config["sliding_window"] if config["use_sliding_window"] else None,) * layers,
        "moe": MoeShape(
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            num_experts=config["num_experts"],
            topk=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            norm_topk_prob=config["norm_topk_prob"],
        ),
    }


def qwen2_moe(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen2-MoE: optional biases, the experts of Qwen3-MoE with a gated shared expert, and windows in every second layer."""

    def has_window(layer: int) -> bool:
        return config["use_sliding_window"] and layer % 2 == 0 and layer < config["max_window_layers"]

    window = config["sliding_window"] if config["use_sliding_window"] else None
    return {
        "qkv_bias": config["qkv_bias"],
        "windows": list_windows({**config, "sliding_window": window}, common["num_layers"], has_window),
        "moe": _with_shared_expert(qwen3_moe({**config, "attention_bias": False}, common)["moe"], config),
    }


def qwen3_vl_moe(config: Config, common: Config) -> dict[str, Any]:
    """Read the text model of Qwen3-VL with experts: Qwen3-MoE without windows.

    Raises:
        ConfigError: norm_topk_prob is false, which transformers ignores and vLLM reads; or transposed experts have the size of others.
    """
    hidden, width = common["hidden_size"], config["moe_intermediate_size"]
    if hidden in (width, 2 * width):  # transformers reads both by their sizes
        raise _model_error(
            f"hidden_size {hidden} with moe_intermediate_size {width}: the files do not determine whether experts are transposed."
        )
    if config.get("norm_topk_prob", True) is not True:
        raise _model_error(f"norm_topk_prob is {config['norm_topk_prob']!r}, which transformers ignores. Use true.")
    return qwen3_moe({**config, "use_sliding_window": False, "norm_topk_prob": True}, common)


def qwen3_next(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen3-Next: gated delta rule and gated attention, and the experts of Qwen3-MoE with a gated shared expert."""
    experts = {**config, "use_sliding_window": False}
    return {**_hybrid(config, common, is_grouped=True), "moe": _with_shared_expert(qwen3_moe(experts, common)["moe"], config)}


def qwen3_5(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen3.5: gated delta rule and gated attention, without experts."""
    return _hybrid(config, common, is_grouped=False)


def qwen3_5_moe(config: Config, common: Config) -> dict[str, Any]:
    """Read Qwen3.5-MoE: Qwen3.5 with experts in every layer and a gated shared expert."""
    experts = {**config, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True}
    return {**_hybrid(config, common, is_grouped=False), "moe": _with_shared_expert(qwen3_moe(experts, common)["moe"], config)}


def _with_shared_expert(moe: MoeShape, config: Config) -> MoeShape:
    return replace(moe, shared_ffn_hidden_size=config["shared_expert_intermediate_size"], has_shared_gate=True)


def _hybrid(config: Config, common: Config, *, is_grouped: bool) -> dict[str, Any]:
    """Return what all hybrids share. Every `full_attention_interval`-th layer has attention unless `layer_types` is given."""
    layers, kinds = common["num_layers"], config["layer_types"]
    if kinds is None:
        kinds = [HYBRID_KINDS[(layer + 1) % config["full_attention_interval"] == 0] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(HYBRID_KINDS):
        raise _model_error(f"layer_types must name {' or '.join(HYBRID_KINDS)} for each of {layers} layers, got {kinds!r}.")
    if HYBRID_KINDS[1] not in kinds:
        raise _model_error(f"none of the {layers} layers has full_attention, without which transformers does not run a hybrid.")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        raise _model_error(f"linear_num_value_heads ({values}) must be a multiple of linear_num_key_heads ({keys}).")
    if config["output_gate_type"] not in (None, "silu", "swish"):
        raise _model_error(f'output_gate_type is {config["output_gate_type"]!r}, which transformers ignores. Leave it out, or use "silu".')
    return {
        **_biases(config),
        "qk_norm": True,
        "has_zero_centered_norms": True,
        "attention_output_gate": True,
        "delta_net": DeltaNetShape(
            layers=tuple(kind == HYBRID_KINDS[0] for kind in kinds),
            num_key_heads=keys,
            num_value_heads=values,
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=config["linear_value_head_dim"],
            conv_kernel_dim=config["linear_conv_kernel_dim"],
            is_grouped=is_grouped,
        ),
    }


HYBRID_KINDS = ("linear_attention", "full_attention")


def text_ropes(config: Config) -> tuple[Config]:
    """Return the rope config of text alone: its three position axes are equal, so `mrope_*` changes nothing."""
    rope = {key: value for key, value in (config["rope_parameters"] or {}).items() if not key.startswith("mrope_")}
    return ({**config, "rope_parameters": rope},)


def mixtral(config: Config, common: Config) -> dict[str, Any]:
    """Read Mixtral: experts in every layer, and one sliding window for all layers."""
    return {"windows": (config["sliding_window"],) * common["num_layers"], "moe": _local_experts(config, common)}


def _local_experts(config: Config, common: Config, *, has_biases: bool = False) -> MoeShape:
    """Return experts in every layer, each as wide as the `intermediate_size` of config.json."""
    return MoeShape(
        layers=(True,) * common["num_layers"],
        num_experts=config["num_local_experts"],
        topk=config["num_experts_per_tok"],
        ffn_hidden_size=common["ffn_hidden_size"],
        has_biases=has_biases,
    )


def deepseek_v3(config: Config, common: Config) -> dict[str, Any]:
    """Read DeepSeek-V3: multi-latent attention and group-limited sigmoid routing.

    Raises:
        ConfigError: Attention has biases, or a head size or expert group is one that transformers cannot compute.
    """
    if config["attention_bias"]:
        raise _model_error("attention_bias is true, which is not supported with multi-latent attention. DeepSeek-V3 has none.")
    heads, nope, rope = common["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    if common["num_query_groups"] != heads or config["head_dim"] not in (None, rope):
        raise _model_error(f"num_key_value_heads must be num_attention_heads ({heads}), and head_dim, if set, qk_rope_head_dim ({rope}).")
    rope_config = config.get("rope_scaling") or config["rope_parameters"] or {}
    is_stretched = (rope_config.get("rope_type", rope_config.get("type")) or "default") != "default"
    mscale = rope_config.get("mscale_all_dim") if is_stretched else None
    sharper = yarn_mscale(float(rope_config.get("factor") or 1), mscale) if mscale else 1.0
    return {
        "head_dim": nope + rope,
        "qk_norm": True,
        "mla": MlaShape(
            q_lora_rank=config["q_lora_rank"],
            kv_lora_rank=config["kv_lora_rank"],
            qk_head_dim=nope,
            qk_pos_emb_head_dim=rope,
            v_head_dim=config["v_head_dim"],
            softmax_scale=sharper * sharper / (nope + rope) ** 0.5,
            interleaved=bool(config["rope_interleave"]),
        ),
        "moe": _grouped_experts(config, common),
    }


def _grouped_experts(config: Config, common: Config) -> MoeShape:
    """Return experts that a sigmoid router selects within the best groups.

    The first `first_k_dense_replace` layers are dense, and shared experts process every token.
    """
    for key in ("n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace", "v_head_dim"):
        if config.get(key, 0) is None:
            raise _model_error(f"{key} is null, which transformers does not support.")
    width, experts, groups = config["moe_intermediate_size"], config["n_routed_experts"], config["n_group"]
    if experts % groups or experts // groups < 2 or config["topk_group"] > groups:
        raise _model_error(
            f"{experts} experts (n_routed_experts) must be {groups} groups (n_group) of 2 or more, and topk_group {groups} at most."
        )
    return MoeShape(
        layers=tuple(i >= config["first_k_dense_replace"] for i in range(common["num_layers"])), num_experts=experts,
        topk=config["num_experts_per_tok"], ffn_hidden_size=width, norm_topk_prob=bool(config["norm_topk_prob"]),
        score_function="sigmoid", has_expert_bias=True, scaling_factor=config["routed_scaling_factor"],
        shared_ffn_hidden_size=width * config["n_shared_experts"] or None, num_groups=groups, group_topk=config["topk_group"],
    )  # fmt: skip


def glm4_moe(config: Config, common: Config) -> dict[str, Any]:
    """Read GLM-4.5: optional biases and query-key norms, and the routing of DeepSeek-V3."""
    return {"qkv_bias": config["attention_bias"], "qk_norm": config["use_qk_norm"], "moe": _grouped_experts(config, common)}


def glm4_moe_lite(config: Config, common: Config) -> dict[str, Any]:
    """Read GLM-4.7-Flash: the attention and the routing of DeepSeek-V3. `mlp_layer_types` names the layers with experts."""
    layers, kinds, first = common["num_layers"], config["mlp_layer_types"], config.get("first_k_dense_replace")
    if kinds is None:
        kinds = ["dense", *["sparse"] * (layers - 1)]
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise _model_error(f"mlp_layer_types must name dense or sparse for each of {layers} layers, got {kinds!r}.")
    if first is not None and kinds != ["dense"] * first + ["sparse"] * (layers - first):  # vLLM reads it, transformers does not
        raise _model_error(f"first_k_dense_replace is {first!r}, but mlp_layer_types is {kinds!r}. Set both, so that they agree.")
    shape = deepseek_v3({**config, "first_k_dense_replace": 0}, common)
    return {**shape, "moe": replace(shape["moe"], layers=tuple(kind == "sparse" for kind in kinds))}


def minimax_m2(config: Config, common: Config) -> dict[str, Any]:
    """Read MiniMax-M2: one query-key norm over all heads, and experts that a sigmoid router selects with a bias."""
    for key, value in {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}.items():
        if config.get(key, value) != value:
            raise _model_error(f"{key} is {config[key]!r}, which transformers ignores. Leave it out, or use {value!r}.")
    moe = replace(_local_experts(config, common), score_function="sigmoid", has_expert_bias=True)
    return {"qk_norm": True, "qk_norm_is_whole": True, "moe": moe}


def minimax_ropes(config: Config) -> tuple[Config]:
    """Return the rope config of MiniMax-M2, whose files have the rotated channels of a head in `rotary_dim`."""
    part, channels = config["partial_rotary_factor"], config["rotary_dim"]
    return ({**config, "partial_rotary_factor": channels / config["head_dim"] if part is None and channels else part},)


def gpt_oss(config: Config, common: Config) -> dict[str, Any]:
    """Read gpt-oss: attention sinks, clamped gates, biases everywhere, and windows in every second layer unless `layer_types` is given."""
    return {
        **_biases(config),
        "mlp_bias": True,
        "sinks": True,
        "activation": "clamped",
        "clamp": (config["swiglu_alpha"], config["swiglu_limit"]),
        "windows": list_windows(config, common["num_layers"], lambda layer: layer % 2 == 0),
        "moe": _local_experts(config, common, has_biases=True),
    }


# Default rope of gpt-oss's config class in transformers.
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def olmo2(config: Config, common: Config) -> dict[str, Any]:
    """Read OLMo 2: norms after attention and MLP instead of before, and one query-key norm over all heads."""
    return {**_biases(config), "pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_is_whole": True}


def olmo3(config: Config, common: Config) -> dict[str, Any]:
    """Read OLMo 3: OLMo 2 with sliding windows in three of four layers unless `layer_types` is given."""
    windows = list_windows(config, common["num_layers"], lambda layer: (layer + 1) % 4 != 0)
    return {**olmo2(config, common), "windows": windows}


def olmo3_ropes(config: Config) -> tuple[Config, Config]:
    """Return the rope configs of full-attention and sliding-window layers.

    Only full-attention layers may scale their positions; sliding-window layers never do.

    Raises:
        ConfigError: Versions of transformers read this rope_theta differently.
    """
    if not config["rope_parameters"] and config["rope_theta"] != 5e5:
        raise _model_error(
            f"rope_theta is {config['rope_theta']!r}: transformers versions read a value other than 500000 differently for "
            "sliding-window layers. Set rope_parameters for full_attention and for sliding_attention."
        )
    return _ropes_by_kind(config, 5e5)


def gemma3(config: Config, common: Config) -> dict[str, Any]:
    """Read Gemma 3: norms before and after each block (stored as offsets from 1), scaled embeddings, and its own softmax scale."""
    pattern = config["sliding_window_pattern"]
    return {
        **_biases(config),
        "post_norm": True,
        "has_zero_centered_norms": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "embedding_scale": common["hidden_size"] ** 0.5,
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "windows": list_windows(config, common["num_layers"], lambda layer: (layer + 1) % pattern != 0),
    }


def gemma3_ropes(config: Config) -> tuple[Config, Config]:
    """Return the rope configs of full-attention and sliding-window layers, the latter with rope_local_base_freq."""
    return _ropes_by_kind(config, config["rope_local_base_freq"])


KINDS = ("full_attention", "sliding_attention")


def _ropes_by_kind(config: Config, local_theta: float) -> tuple[Config, Config]:
    """Return the config as each kind of layer reads it. The top-level rope_theta and rope_scaling belong to full-attention layers."""
    nested, scaling = config["rope_parameters"] or {}, config.get("rope_scaling") or {}
    if nested and not any(kind in nested for kind in KINDS):
        raise _model_error(f"rope_parameters must have {' and '.join(KINDS)}, got {', '.join(nested)}.")
    if nested and scaling:
        raise _model_error("rope_scaling and rope_parameters are both set. Set both in rope_parameters.full_attention.")
    if "type" in scaling:
        raise _model_error("rope_scaling has `type`, which older versions of transformers read and transformers 5 does not. Use rope_type.")
    ropes = []
    for kind, theta, stretched in zip(KINDS, (config["rope_theta"], local_theta), (scaling, {}), strict=True):
        rope = {**(nested.get(kind) or {}), **stretched}
        if rope.get("truncate") is False:
            raise _model_error("truncate is false in the rope_parameters of one layer type, where transformers ignores it. Leave it out.")
        ropes.append({**config, "rope_theta": theta, "rope_scaling": None, "rope_parameters": rope})
    return ropes[0], ropes[1]


def list_windows(config: Config, num_layers: int, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens; None is full attention.

    Args:
        config: config.json with defaults filled in.
        num_layers: Number of decoder layers.
        has_window: Whether layer i has a window. Used where config.json has no `layer_types`.

    Raises:
        ConfigError: `layer_types` is malformed, or a layer needs a window and `sliding_window` is null.
    """
    kinds, window = config.get("layer_types"), config["sliding_window"]
    if kinds is None:
        kinds = [KINDS[has_window(layer)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        raise _model_error(f"layer_types must name {' or '.join(KINDS)} for each of {num_layers} layers, got {kinds!r}.")
    if "sliding_attention" in kinds and window is None:
        raise _model_error("some layers have sliding_attention, but sliding_window is null, which transformers does not support.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Return Qwen's windows: only layers from max_window_layers on have one, and only with use_sliding_window. Qwen3-VL has none."""
    if "use_sliding_window" not in config:
        return ()
    window, first = config["sliding_window"] if config["use_sliding_window"] else None, config["max_window_layers"]
    if window is not None and first is None:
        raise _model_error("max_window_layers is null, which transformers does not support.")
    windows = list_windows({**config, "sliding_window": window}, num_layers, lambda layer: window is not None and layer >= first)
    return windows if config["use_sliding_window"] else ()


def _model_error(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("model",), message=f"config.json: {message}")])
