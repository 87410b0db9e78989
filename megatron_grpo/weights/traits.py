"""How the config.json of each architecture is read: what it says in its own way. No tensors, no torch.

Each function receives the parsed config.json and the fields that all families share (`common`), and returns the fields of `ModelShape` that
its family reads in its own way. Common ones may be among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.weights.sizes import MlaShape, MoeShape, yarn_mscale

Config = Mapping[str, Any]


def llama(config: Config, common: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def qwen2(config: Config, common: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(config, common["num_layers"])}


def qwen3(config: Config, common: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True, "windows": _qwen_windows(config, common["num_layers"])}


def mistral(config: Config, common: Config) -> dict[str, Any]:
    return {"windows": (config.get("sliding_window", 4096),) * common["num_layers"]}


def qwen3_moe(config: Config, common: Config) -> dict[str, Any]:
    bias, layers = bool(config.get("attention_bias", False)), common["num_layers"]
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    experts = config.get("num_experts", config.get("num_local_experts")) or 128
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "windows": (config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,) * layers,
        "moe": MoeShape(
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            num_experts=experts,
            topk=config.get("num_experts_per_tok") or 8,
            ffn_hidden_size=config.get("moe_intermediate_size") or 768,
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        ),
    }


def mixtral(config: Config, common: Config) -> dict[str, Any]:
    return {
        "windows": (config.get("sliding_window"),) * common["num_layers"],
        "moe": MoeShape(
            layers=(True,) * common["num_layers"],
            num_experts=config.get("num_local_experts") or 8,
            topk=config.get("num_experts_per_tok") or 2,
            ffn_hidden_size=common["ffn_hidden_size"],
        ),
    }


def deepseek_v3(config: Config, common: Config) -> dict[str, Any]:
    if config.get("attention_bias"):
        raise _wrong("attention_bias is true; biases of multi-latent attention are not computed here. DeepSeek-V3 has none.")
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    is_stretched = (given.get("rope_type", given.get("type")) or "default") != "default"
    stretch = given.get("mscale_all_dim") if is_stretched else None
    sharper = yarn_mscale(float(given.get("factor") or 1), stretch) if stretch else 1.0
    dense = config.get("first_k_dense_replace", 3) or 0
    return {
        "num_query_groups": common["num_attention_heads"],
        "head_dim": nope + rope,
        "qk_norm": True,
        "mla": MlaShape(
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_head_dim=nope,
            qk_pos_emb_head_dim=rope,
            v_head_dim=config["v_head_dim"],
            softmax_scale=sharper * sharper / (nope + rope) ** 0.5,
            interleaved=bool(config.get("rope_interleave", True)),
        ),
        "moe": MoeShape(
            layers=tuple(i >= dense for i in range(common["num_layers"])),
            num_experts=config["n_routed_experts"],
            topk=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            score_function="sigmoid",
            has_expert_bias=True,
            scaling_factor=float(config.get("routed_scaling_factor", 2.5) or 1),
            shared_ffn_hidden_size=config["moe_intermediate_size"] * (config.get("n_shared_experts", 1) or 0) or None,
            num_groups=config.get("n_group", 8),
            group_topk=config.get("topk_group", 4),
        ),
    }


def glm4_moe(config: Config, common: Config) -> dict[str, Any]:
    dense, width = config.get("first_k_dense_replace", 1) or 0, config["moe_intermediate_size"]
    shared = config.get("n_shared_experts", 1) or 0
    return {
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "moe": MoeShape(
            layers=tuple(i >= dense for i in range(common["num_layers"])),
            num_experts=config["n_routed_experts"],
            topk=config["num_experts_per_tok"],
            ffn_hidden_size=width,
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            score_function="sigmoid",
            has_expert_bias=True,
            scaling_factor=float(config.get("routed_scaling_factor", 1.0) or 1),
            shared_ffn_hidden_size=width * shared or None,
            num_groups=config.get("n_group", 1),
            group_topk=config.get("topk_group", 1),
        ),
    }


def gpt_oss(config: Config, common: Config) -> dict[str, Any]:
    bias, layers = bool(config.get("attention_bias", True)), common["num_layers"]
    experts = config.get("num_local_experts", config.get("num_experts"))
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": True,
        "sinks": True,
        "activation": "clamped",
        "clamp": (float(config.get("swiglu_alpha") or 1.702), float(config.get("swiglu_limit") or 7.0)),
        "windows": windows_of(config, layers, config.get("sliding_window", 128), lambda layer: layer % 2 == 0),
        "moe": MoeShape(
            layers=(True,) * layers,
            num_experts=experts or 128,
            topk=config.get("num_experts_per_tok") or 4,
            ffn_hidden_size=common["ffn_hidden_size"],
            has_biases=True,
        ),
    }


# What the config class of transformers assumes.
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def olmo2(config: Config, common: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_is_whole": True}


def olmo3(config: Config, common: Config) -> dict[str, Any]:
    windows = windows_of(config, common["num_layers"], config.get("sliding_window", 4096), lambda layer: (layer + 1) % 4 != 0)
    return {**olmo2(config, common), "windows": windows}


def olmo3_ropes(config: Config) -> tuple[Config, Config]:
    """Layers that see everything may stretch their positions; those with a window never do."""
    if nested := _nested_ropes(config, 5e5, 5e5):
        return nested
    if config.get("rope_theta") not in (None, 5e5):
        raise _wrong(
            f"rope_theta is {config['rope_theta']!r}: versions of transformers read it otherwise for layers with a window, where it is not "
            "500000. Say rope_parameters for full_attention and for sliding_attention."
        )
    scaling = _read_by_kind(config.get("rope_scaling") or {})
    plain = {key: value for key, value in config.items() if key not in ROPES}
    return {**plain, "rope_scaling": scaling}, plain


def gemma3(config: Config, common: Config) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise _wrong(f"{key} is {config[key]!r}, which is not computed here. Gemma 3 has none.")
    bias, pattern = bool(config.get("attention_bias", False)), config.get("sliding_window_pattern") or 6
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "post_norm": True,
        "norms_from_one": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "embedding_scale": common["hidden_size"] ** 0.5,
        "softmax_scale": float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        "windows": windows_of(config, common["num_layers"], config.get("sliding_window", 4096), lambda layer: (layer + 1) % pattern != 0),
    }


def gemma3_ropes(config: Config) -> tuple[Config, Config]:
    if nested := _nested_ropes(config, 1e6, 1e4):
        return nested
    plain = {key: value for key, value in config.items() if key not in ROPES}
    whole = {**plain, "rope_theta": config.get("rope_theta") or 1e6}
    whole["rope_scaling"] = _read_by_kind(config.get("rope_scaling") or {})
    return whole, {**plain, "rope_theta": config.get("rope_local_base_freq") or 1e4}


ROPES = ("rope_scaling", "rope_parameters")
_KINDS = ("full_attention", "sliding_attention")


def _nested_ropes(config: Config, theta: float, local_theta: float) -> tuple[Config, Config] | None:
    """The config as each kind of layer reads it, where it says its rope by kind (transformers 5); None where it does not."""
    given = config.get("rope_parameters") or {}
    if not any(kind in given for kind in _KINDS):
        if given:
            raise _wrong(f"rope_parameters must have {' and '.join(_KINDS)} here, it has {', '.join(given)}.")
        return None
    plain = {key: value for key, value in config.items() if key not in (*ROPES, "rope_theta")}
    return tuple(  # type: ignore[return-value]  # of two
        {**plain, "rope_theta": default, "rope_parameters": _read_by_kind(given.get(kind) or {})}
        for kind, default in zip(_KINDS, (theta, local_theta), strict=True)
    )


def _read_by_kind(rope: Config) -> Config:
    """What a rope is that layers of one kind have, as transformers 5 reads it."""
    if isinstance(rope, Mapping) and rope.get("truncate") is False:
        raise _wrong("truncate is false in a rope of one kind of layers, where transformers does not read it. Leave it out.")
    return rope


def windows_of(config: Config, num_layers: int, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """How many tokens each layer's tokens see, None for all. has_window: of a layer's number, where config.json has no `layer_types`."""
    kinds = config.get("layer_types") or [_KINDS[has_window(layer)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise _wrong(f"layer_types must name {' or '.join(_KINDS)} for each of {num_layers} layers, it is {kinds!r}.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Qwen windows only the layers from max_window_layers on, and only when asked to."""
    if not config.get("use_sliding_window"):
        return ()
    first = config.get("max_window_layers", 28)
    return windows_of(config, num_layers, config.get("sliding_window", 4096), lambda layer: layer >= first)


def _wrong(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("model",), message=f"config.json: {message}")])
