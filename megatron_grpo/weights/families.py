"""What sets one architecture apart: how its config.json is read, and what its Hugging Face tensors are called. No tensors, no torch.

docs/adding-a-model.md adds a family step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.weights import traits
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
    router: str = "gate"
    # Files, and samplers, have the experts of a layer in one tensor: transposed, a gate's channels and those that it gates side by side.
    are_experts_interleaved: bool = False
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # Layers after the last one predict further tokens for speculative decoding. GRPO neither trains nor exports them.
    has_prediction_layers: bool = False
    # config.json -> as layers that see everything read it for their rope, and as layers with a window do; None: all of them alike.
    ropes: Callable[[Config], tuple[Config, Config]] | None = None
    tower: Tower | None = None

    @property
    def text_prefix(self) -> str:
        """What the names of the text model's tensors begin with, those of the head aside."""
        return self.tower.text_prefix if self.tower else "model."


_QWEN2_VL = {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(traits=traits.llama),
    "MistralForCausalLM": Family(traits=traits.mistral, defaults={"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(traits=traits.qwen2),
    "Qwen3ForCausalLM": Family(traits=traits.qwen3, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(traits=traits.qwen3_moe, defaults={"num_key_value_heads": 4}),
    "MixtralForCausalLM": Family(
        traits=traits.mixtral,
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        moe_block="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
    ),
    "DeepseekV3ForCausalLM": Family(traits=traits.deepseek_v3, has_prediction_layers=True),
    "Glm4MoeForCausalLM": Family(
        traits=traits.glm4_moe,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        has_prediction_layers=True,
    ),
    "GptOssForCausalLM": Family(
        traits=traits.gpt_oss,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_theta": 15e4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": traits.GPT_OSS_ROPE,
        },
        router="router",
        are_experts_interleaved=True,
    ),
    "Olmo2ForCausalLM": Family(traits=traits.olmo2, defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(traits=traits.olmo3, defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5}, ropes=traits.olmo3_ropes),
    "Gemma3ForCausalLM": Family(
        traits=traits.gemma3,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "rope_theta": 1e6, "hidden_act": "gelu_pytorch_tanh"},
        ropes=traits.gemma3_ropes,
    ),
    "Qwen2VLForConditionalGeneration": Family(traits=traits.qwen2, defaults=_QWEN2_VL, tower=QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": Family(traits=traits.qwen2, defaults=_QWEN2_VL, tower=QWEN2_5_VL),
    "Qwen3VLForConditionalGeneration": Family(
        traits=traits.qwen3,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5, "mrope_section": (24, 20, 20)},
        tower=QWEN3_VL,
    ),
}
_GATED_DELTA = "no layer for its linear attention (the gated delta rule) is built here yet"
_MAMBA = (
    "its Mamba-2 layers need kernels of a GPU in Megatron-Core (mamba-ssm), so nothing of them can be compared with transformers on a CPU"
)
_SPARSE = "its sparse attention (a lightning indexer that chooses keys) is not in the attention over packed streams here"
_SIZES = "its embeddings of each layer, and its layers that may be left out, are not in Megatron-Core"
_SEES = "its tower has not been shown to give transformers' gradients here"
# Known elsewhere and not here, with the reason.
NOT_YET = {
    "Qwen3NextForCausalLM": _GATED_DELTA,
    "Qwen3_5ForCausalLM": _GATED_DELTA,
    "Qwen3_5MoeForCausalLM": _GATED_DELTA,
    "Qwen3_5ForConditionalGeneration": _GATED_DELTA,
    "Qwen3_5MoeForConditionalGeneration": _GATED_DELTA,
    "NemotronHForCausalLM": _MAMBA,
    "DeepseekV32ForCausalLM": f"{_SPARSE}; DeepSeek-V3 has full attention (DeepseekV3ForCausalLM)",
    "GlmMoeDsaForCausalLM": _SPARSE,
    "Glm4MoeLiteForCausalLM": "it has not been shown to give transformers' gradients here; GLM-4.5 has (Glm4MoeForCausalLM)",
    "Glm4vMoeForConditionalGeneration": f"{_SEES}; the text model of GLM-4.5 can be trained (Glm4MoeForCausalLM)",
    "Gemma2ForCausalLM": "it caps its scores and logits by a tanh, which attention here does not; Gemma 3 has no caps (Gemma3ForCausalLM)",
    "Gemma3ForConditionalGeneration": f"{_SEES}; the text models of Gemma 3 can be trained (Gemma3ForCausalLM)",
    "Gemma3nForCausalLM": _SIZES,
    "Gemma3nForConditionalGeneration": _SIZES,
    **dict.fromkeys(("Qwen2_5OmniModel", "Qwen3OmniMoeForConditionalGeneration"), "of what models see and hear pictures alone are there"),
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL with experts has not been shown to give transformers' gradients here; Qwen3-VL without "
    "experts has (Qwen3VLForConditionalGeneration)",
}
# Of those, what their makers call them on the Hub (regular expressions): known before config.json is.
NOT_YET_BY_NAME = {
    r"Qwen/Qwen3-Next-": "Qwen3NextForCausalLM",
    r"Qwen/Qwen3\.[56]-": "Qwen3_5ForConditionalGeneration",
    r"Qwen/Qwen2\.5-Omni-": "Qwen2_5OmniModel",
    r"Qwen/Qwen3-Omni-": "Qwen3OmniMoeForConditionalGeneration",
    r"Qwen/Qwen3-VL-\d+B-A\d+B": "Qwen3VLMoeForConditionalGeneration",
    r"nvidia/(NVIDIA-)?Nemotron-(H|Nano|3)-": "NemotronHForCausalLM",
    r"deepseek-ai/DeepSeek-V3\.2": "DeepseekV32ForCausalLM",
    r"zai-org/GLM-5": "GlmMoeDsaForCausalLM",
    r"zai-org/GLM-4\.7-Flash": "Glm4MoeLiteForCausalLM",
    r"google/gemma-2-": "Gemma2ForCausalLM",
    r"google/gemma-3-(4|12|27)b": "Gemma3ForConditionalGeneration",
    r"google/gemma-3n-": "Gemma3nForConditionalGeneration",
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
