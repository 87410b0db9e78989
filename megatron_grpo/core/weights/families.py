"""Supported model architectures: how each config.json is read, and how the Hugging Face tensors are named. No tensors, no torch.

config_fields.json lists the fields of each family's configuration class in transformers. `tools/config_fields.py` writes that file, and a
test compares it with the installed transformers. docs/adding-a-model.md adds a family step by step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error
from megatron_grpo.core.weights import traits
from megatron_grpo.core.weights.vision_towers import QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_5_MOE, QWEN3_VL, QWEN3_VL_MOE, VisionTower

Config = Mapping[str, Any]

FILE = Path(__file__).with_name("config_fields.json")
_TABLE = json.loads(FILE.read_text(encoding="utf-8"))
IDLE = frozenset(_TABLE["idle"])  # fields that change nothing computed here
REFUSED = frozenset(_TABLE["refused"])  # fields that are refused unless they have the config class's default
# Sizes that config.json must contain: the config class's defaults belong to another model.
_NEEDED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "n_routed_experts"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_MAY_BE_ZERO = (
    *("first_k_dense_replace", "n_shared_experts", "max_window_layers", "sliding_window", "rms_norm_eps", "swiglu_alpha", "swiglu_limit"),
)
_WORDS = {
    "int|float": "a number", "int": "an integer", "float": "a float", "bool": "true or false", "str": "a string",
    "dict": "an object", "list[int]": "a list of integers", "list[str]": "a list of strings", "NoneType": "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """Properties that distinguish one architecture from the others.

    Args:
        traits: Function (config.json, common fields) -> the `ModelShape` fields that this family reads in its own way.
        rope: Rope settings that the config class assumes where config.json has none. Its other defaults are in config_fields.json.
        moe_block: Name of the MoE block in the Hugging Face tensor names of a layer.
        router: Name of the router inside that block.
        shared_expert: Name of the shared experts inside that block.
        expert_bias: Name of the bias on the selection of experts inside that block.
        expert_names: Names of an expert's gate, up and down projections.
        turns_a_part: Whether it supports a partial_rotary_factor below 1.
        tower: Vision tower, for vision-language models.
    """

    traits: Callable[[Config, Config], dict[str, Any]]
    rope: Mapping[str, Any] = field(default_factory=dict)
    moe_block: str = "mlp"
    router: str = "gate"
    shared_expert: str = "shared_experts"
    expert_bias: str = "gate.e_score_correction_bias"
    # Files and vLLM store the experts of a layer in one transposed tensor, with gate and up channels alternating or gate before up.
    fused_experts: Literal["interleaved", "concatenated"] | None = None
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # Multi-token prediction layers after the last layer, for speculative decoding. GRPO neither trains nor exports them.
    has_prediction_layers: bool = False
    # config.json -> (rope config of full-attention layers, rope config of sliding-window layers). None: all layers have the same rope.
    turns_a_part: bool = False
    ropes: Callable[[Config], tuple[Config, ...]] | None = None
    tower: VisionTower | None = None

    @property
    def text_prefix(self) -> str:
        """Prefix of the text model's tensor names, except for the head."""
        return self.tower.text_prefix if self.tower else "model."


_HYBRID: dict[str, Any] = {"has_prediction_layers": True, "turns_a_part": True}
FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": ModelFamily(traits=traits.llama),
    "MistralForCausalLM": ModelFamily(traits=traits.mistral),
    "Qwen2ForCausalLM": ModelFamily(traits=traits.qwen2),
    "Qwen3ForCausalLM": ModelFamily(traits=traits.qwen3),
    "Qwen2MoeForCausalLM": ModelFamily(traits=traits.qwen2_moe, shared_expert="shared_expert"),
    "Qwen3MoeForCausalLM": ModelFamily(traits=traits.qwen3_moe),
    "MixtralForCausalLM": ModelFamily(traits=traits.mixtral, moe_block="block_sparse_moe", expert_names=("w1", "w3", "w2")),
    "DeepseekV3ForCausalLM": ModelFamily(traits=traits.deepseek_v3, has_prediction_layers=True),
    "Glm4MoeForCausalLM": ModelFamily(traits=traits.glm4_moe, has_prediction_layers=True, turns_a_part=True),
    "Glm4MoeLiteForCausalLM": ModelFamily(traits=traits.glm4_moe_lite, has_prediction_layers=True),
    "MiniMaxM2ForCausalLM": ModelFamily(
        traits=traits.minimax_m2,
        ropes=traits.minimax_ropes,
        turns_a_part=True,
        moe_block="block_sparse_moe",
        expert_names=("w1", "w3", "w2"),
        expert_bias="e_score_correction_bias",
    ),  # fmt: skip
    "GptOssForCausalLM": ModelFamily(traits=traits.gpt_oss, rope=traits.GPT_OSS_ROPE, router="router", fused_experts="interleaved"),
    "Olmo2ForCausalLM": ModelFamily(traits=traits.olmo2),
    "Olmo3ForCausalLM": ModelFamily(traits=traits.olmo3, ropes=traits.olmo3_ropes),
    "Gemma3ForCausalLM": ModelFamily(traits=traits.gemma3, ropes=traits.gemma3_ropes),
    "Qwen3NextForCausalLM": ModelFamily(traits=traits.qwen3_next, **_HYBRID, shared_expert="shared_expert"),
    "Qwen3_5ForCausalLM": ModelFamily(traits=traits.qwen3_5, **_HYBRID, ropes=traits.text_ropes),
    "Qwen3_5MoeForCausalLM": ModelFamily(traits=traits.qwen3_5_moe, **_HYBRID, ropes=traits.text_ropes, shared_expert="shared_expert"),
    "Qwen2VLForConditionalGeneration": ModelFamily(traits=traits.qwen2, tower=QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": ModelFamily(traits=traits.qwen2, tower=QWEN2_5_VL),
    "Qwen3VLForConditionalGeneration": ModelFamily(traits=traits.qwen3, tower=QWEN3_VL),
    "Qwen3VLMoeForConditionalGeneration": ModelFamily(traits=traits.qwen3_vl_moe, tower=QWEN3_VL_MOE, fused_experts="concatenated"),
    "Qwen3_5ForConditionalGeneration": ModelFamily(traits=traits.qwen3_5, **_HYBRID, tower=QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": ModelFamily(
        traits=traits.qwen3_5_moe, **_HYBRID, shared_expert="shared_expert", tower=QWEN3_5_MOE
    ),
}
_SPARSE = "its sparse attention (lightning indexer) is not implemented"
_SIZES = "Megatron-Core has neither its per-layer embeddings nor its optional layers"
_SEES = "its vision tower is not verified against transformers' gradients"
_HEARS = "images are the only supported modality besides text"
# Unsupported models: (regular expression of their Hub names, architectures, reason).
_NOT_YET = (
    (r"Qwen/Qwen2\.5-Omni-", "Qwen2_5OmniModel", _HEARS),
    (r"Qwen/Qwen3-Omni-", "Qwen3OmniMoeForConditionalGeneration", _HEARS),
    (r"nvidia/(NVIDIA-)?Nemotron-(H|Nano|3)-", "NemotronHForCausalLM", "its Mamba-2 layers are not implemented"),
    (r"deepseek-ai/DeepSeek-V3\.2", "DeepseekV32ForCausalLM", (
        f"{_SPARSE}; use DeepSeek-V3, which has full attention (DeepseekV3ForCausalLM)"
    )),
    (r"zai-org/GLM-5", "GlmMoeDsaForCausalLM", _SPARSE),
    ("", "Glm4vMoeForConditionalGeneration", f"{_SEES}; use the text model of GLM-4.5 (Glm4MoeForCausalLM)"),
    (r"google/gemma-2-", "Gemma2ForCausalLM",
     "its softcapping of attention scores and logits is not implemented; use Gemma 3, which has none (Gemma3ForCausalLM)"),
    (r"google/gemma-3-(4|12|27)b", "Gemma3ForConditionalGeneration",
     f"{_SEES}; use the text models of Gemma 3 (Gemma3ForCausalLM)"),
    (r"Qwen/Qwen3\.8-Flash-Next", "Qwen4ExpForConditionalGeneration Qwen4ExpForCausalLM", (
        "its hyper-connections, n-gram embeddings and sparse attention are not implemented; use Qwen3.8-27B "
        "(Qwen3_5ForConditionalGeneration)"
    )),
    (r"google/gemma-3n-", "Gemma3nForConditionalGeneration Gemma3nForCausalLM", _SIZES),
)  # fmt: skip
NOT_YET = {name: reason for _, names, reason in _NOT_YET for name in names.split()}
NOT_YET_BY_NAME = {pattern: names.split()[0] for pattern, names, _ in _NOT_YET if pattern}  # usable before config.json is read


# Fields of a whole vision-language model. The text_config may repeat them as null.
_WHOLE_MODEL_FIELDS = (
    *("architectures", "text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
_ROPES = ("rope_theta", "rope_scaling", "rope_parameters")


def text_config(config: Config) -> Config:
    """Return the text model's part of a config.json.

    The fields are at the top level or in `text_config`. If `text_config` exists, transformers ignores the top level.

    Raises:
        ConfigError: The top level and `text_config` contradict each other.
    """
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise config_error("model", f"config.json: text_config must be an object, got {inner!r}.")
    outer = {key: value for key, value in config.items() if value is not None and key not in IDLE and key not in _WHOLE_MODEL_FIELDS}
    problems = []
    for key, (_, default) in list_fields(config["architectures"][0]).items():
        inner_value = inner.get(key, outer.get(key) if key in ("tie_word_embeddings", *_ROPES) else default)
        if key in outer and outer[key] != inner_value and (key not in inner or inner_value is not None):
            problems.append(f"{key} is {outer[key]!r} at the top level and {inner_value!r} in text_config. Keep one of them.")
    if not any(key in inner for key in _ROPES) and (outer_ropes := [key for key in _ROPES if key in outer]):
        problems.append(f"{' and '.join(outer_ropes)} must be in text_config too, where transformers reads it.")
    if problems:
        raise ConfigError([Problem(flags=("model",), message=f"config.json: {problem}") for problem in problems])
    # The outer `architectures` decides the family; text_config may name another class.
    return {
        **config,
        **dict.fromkeys((*_ROPES[1:], "pad_token_id")),
        **{key: value for key, value in inner.items() if key not in _WHOLE_MODEL_FIELDS},
    }


def find_family(config: Config) -> ModelFamily:
    """Return the family of a parsed config.json.

    Raises:
        ConfigError: `architectures` is missing, malformed or not supported.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        message = f"config.json: architectures must be a list of strings, got {names!r}."
        raise config_error("model", message)
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    if reason := NOT_YET.get(names[0] if names else ""):
        raise config_error("model", f"model: the architecture {names[0]} is not supported: {reason}.")
    subject = f"the architecture {names[0]}" if names else "a config.json without `architectures`"
    raise config_error(
        "model", f"model: {subject} is not supported. Supported: {', '.join(sorted(FAMILIES))}. To add one, see docs/adding-a-model.md."
    )


def list_fields(architecture: str) -> dict[str, tuple[str, Any]]:
    """Return the configuration fields of an architecture: {field: (accepted JSON types, default)}.

    An architecture that is not in config_fields.json has only the fields common to every family.

    Args:
        architecture: Name in `architectures` of config.json.
    """
    return {**_TABLE["every family"], **_TABLE["families"].get(architecture, {}).get("fields", {})}


def with_class_defaults(config: Config, architecture: str, require: Callable[[bool, str], None]) -> dict[str, Any]:
    """Return config.json under the field names of its config class, with the class's defaults filled in.

    Args:
        architecture: Key of `FAMILIES`.
        require: Called with (condition, message) for each value that the class does not accept or that is not computed here.
    """
    result = dict(config)
    for alias, name in _TABLE["families"].get(architecture, {}).get("aliases", {}).items():
        if alias in config and name not in IDLE:
            require(
                config[alias] == config.get(name, config[alias]),
                f"{alias} is {config[alias]!r} but {name} is {config.get(name)!r}. Keep one of them.",
            )
            result[name] = config[alias]
    for name, (kinds, default) in list_fields(architecture).items():
        require(name in result or name not in _NEEDED, f"{architecture} needs {name}.")
        value = result.setdefault(name, default)
        is_positive = name not in IDLE and name not in REFUSED and name not in _MAY_BE_ZERO
        words = _WORDS.get(kinds) or " or ".join(_WORDS[kind] for kind in kinds.split("|"))
        is_taken = any(_has_json_type(value, kind) for kind in kinds.split("|")) and (
            not is_positive or type(value) not in (int, float) or value > 0
        )
        words = re.sub("^an? ", "a positive ", words) if is_positive else words
        require(is_taken, f"{name} must be {words}, got {value!r}.")
        is_computed = name not in REFUSED or value in (default, None) or not is_taken
        require(is_computed, f"{name} is {value!r}, which is not supported. Leave it out, or use {json.dumps(default)}.")
    return result


def _has_json_type(value: Any, kind: str) -> bool:
    """Return whether `value` has the JSON type `kind`, as strictly as transformers: true is not a number, and 1 is not a float."""
    if kind.startswith("list"):
        return isinstance(value, list) and all(type(item).__name__ in kind for item in value)
    return type(value).__name__ == kind
