"""What sets one architecture apart: how its config.json is read, and what its Hugging Face tensors are called. No tensors, no torch.

docs/adding-a-model.md adds a family step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.weights.sizes import MlaShape, MoeShape, yarn_mscale
from megatron_grpo.weights.towers import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, Tower

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one architecture apart.

    traits: (config.json, common fields) -> the fields of `ModelShape` that this family reads in its own way.
    defaults: what its config class assumes where config.json is silent.
    tower: of a model that sees.
    """

    traits: Callable[[Config, Config], dict[str, Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    moe_block: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # Layers after the last one predict further tokens for speculative decoding. GRPO neither trains nor exports them.
    has_prediction_layers: bool = False
    tower: Tower | None = None

    @property
    def text_prefix(self) -> str:
        """What the names of the text model's tensors begin with, those of the head aside."""
        return self.tower.text_prefix if self.tower else "model."


def _llama(config: Config, common: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _qwen2(config: Config, common: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_window(config, common["num_layers"])}


def _qwen3(config: Config, common: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True, "sliding_window": _qwen_window(config, common["num_layers"])}


def _mistral(config: Config, common: Config) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window", 4096)}


def _qwen3_moe(config: Config, common: Config) -> dict[str, Any]:
    bias, layers = bool(config.get("attention_bias", False)), common["num_layers"]
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    experts = config.get("num_experts", config.get("num_local_experts")) or 128
    return {
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_window": config.get("sliding_window", 4096) if config.get("use_sliding_window") else None,
        "moe": MoeShape(
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
            num_experts=experts,
            topk=config.get("num_experts_per_tok") or 8,
            ffn_hidden_size=config.get("moe_intermediate_size") or 768,
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        ),
    }


def _mixtral(config: Config, common: Config) -> dict[str, Any]:
    return {
        "sliding_window": config.get("sliding_window"),
        "moe": MoeShape(
            layers=(True,) * common["num_layers"],
            num_experts=config.get("num_local_experts") or 8,
            topk=config.get("num_experts_per_tok") or 2,
            ffn_hidden_size=common["ffn_hidden_size"],
        ),
    }


def _deepseek_v3(config: Config, common: Config) -> dict[str, Any]:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nope, rope, stretch = config["qk_nope_head_dim"], config["qk_rope_head_dim"], given.get("mscale_all_dim")
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


def _qwen_window(config: Config, num_layers: int) -> int | None:
    """Qwen windows only the layers from max_window_layers on, and only when asked to."""
    if not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    windowed = "sliding_attention" in kinds if kinds else config.get("max_window_layers", 28) < num_layers
    return config.get("sliding_window", 4096) if windowed else None


_QWEN2_VL = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(traits=_llama),
    "MistralForCausalLM": Family(traits=_mistral, defaults={"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(traits=_qwen2),
    "Qwen3ForCausalLM": Family(traits=_qwen3, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(traits=_qwen3_moe, defaults={"num_key_value_heads": 4}),
    "MixtralForCausalLM": Family(
        traits=_mixtral,
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        moe_block="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    ),
    "DeepseekV3ForCausalLM": Family(traits=_deepseek_v3, has_prediction_layers=True),
    "Qwen2VLForConditionalGeneration": Family(traits=_qwen2, defaults=_QWEN2_VL, tower=QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": Family(traits=_qwen2, defaults=_QWEN2_VL, tower=QWEN2_5_VL),
    "Qwen3VLForConditionalGeneration": Family(
        traits=_qwen3,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5, "mrope_section": (24, 20, 20)},
        tower=QWEN3_VL,
    ),
}
# Known elsewhere and not here, with the reason.
NOT_YET = {
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL with experts has not been shown to give transformers' gradients here; Qwen3-VL without "
    "experts has (Qwen3VLForConditionalGeneration)",
}


# Of a model that sees, config.json may say what belongs to its text model at its top, in `text_config`, or in both places. Every other word
# is of the library that wrote it.
_SAID_TWICE = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "attention_bias", "tie_word_embeddings", "rope_theta"),
    *("use_sliding_window", "sliding_window", "max_window_layers"),
)


def text_config(config: Config) -> Config:
    """What a config.json says of the text model. Raises ConfigError where it says two things."""
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise ConfigError([Problem(flags=("model",), message=f"config.json: text_config must hold named values, it is {inner!r}.")])
    twice = [key for key in _SAID_TWICE if config.get(key) is not None and inner.get(key) is not None]
    problems = [
        Problem(
            flags=("model",), message=f"config.json: {key} is {config[key]!r}, and {inner[key]!r} in its text_config. Keep one of them."
        )
        for key in twice
        if config[key] != inner[key]
    ]
    if problems:
        raise ConfigError(problems)
    # `architectures` says which family it is; the text part may name its own.
    return {**config, **{key: value for key, value in inner.items() if value is not None}, "architectures": config.get("architectures")}


def family_of(config: Config) -> Family:
    """The family of a parsed config.json; an unknown one is refused by name."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        message = f"config.json: architectures must be a list of names, it is {names!r}."
        raise ConfigError([Problem(flags=("model",), message=message)])
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    if why := NOT_YET.get(names[0] if names else ""):
        raise ConfigError([Problem(flags=("model",), message=f"model: the architecture {names[0]} is not supported: {why}.")])
    what = f"the architecture {names[0]}" if names else "a config.json without `architectures`"
    raise ConfigError(
        [
            Problem(
                flags=("model",),
                message=f"model: {what} is not supported. Known: {', '.join(sorted(FAMILIES))}. "
                "docs/adding-a-model.md shows how to add one.",
            )
        ]
    )
