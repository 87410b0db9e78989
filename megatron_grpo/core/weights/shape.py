"""Sizes and properties of a model, read from its config.json alone.

Imports no torch and no transformers, so that `plan` can use it. Both generations of transformers configs are supported: rope settings in
`rope_scaling` + `rope_theta` (4) or `rope_parameters` (5), and expert counts in `num_experts` or `num_local_experts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.weights.families import FAMILIES, ModelFamily, find_family, text_config, with_class_defaults
from megatron_grpo.core.weights.sizes import Activation, DeltaNetShape, LayerKind, MlaShape, MoeShape, RopeShape, VisionShape, yarn_mscale
from megatron_grpo.core.weights.traits import KINDS
from megatron_grpo.core.weights.vision_towers import read_vision, with_axes, without_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of one decoder-only model: RMSNorm, rotary positions, gated MLP, optionally experts.

    All sizes are of the whole model, in channels, heads or rows; none depends on ranks.

    Args:
        num_query_groups: Number of key/value heads.
        head_dim: Channels of a head (Megatron's kv_channels).
        local_rope: Rotary embedding of sliding-window layers, if it differs.
        qk_norm_is_whole: Whether one norm runs over all query heads, and one over all key heads.
        pre_norm: Whether there are norms before attention and before the MLP.
        post_norm: Whether there are norms after each of them, before the residual addition.
        has_zero_centered_norms: Whether a norm's weight is stored as its offset from 1.
        activation: Activation of the gate.
        clamp: Clamp of a clamped gate: (factor in its sigmoid, clamp limit).
        sinks: Whether there are attention sinks: one extra score per head, with value 0.
        embedding_scale: Factor on the output of the embedding.
        padding_idx: Token whose row of the embedding gets no gradient from the input, as in transformers; None if there is none.
        softmax_scale: Factor on attention scores; None: 1 / sqrt(head_dim).
        windows: Windows by layer: tokens attended to, including the token itself; None is all; () is all everywhere.
        attention_output_gate: Whether linear_qkv has a gate beside each query head; its sigmoid multiplies the head's output.
        vision: Sizes of the vision tower of a vision-language model.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rope: RopeShape
    local_rope: RopeShape | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_is_whole: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    has_zero_centered_norms: bool = False
    activation: Activation = "silu"
    clamp: tuple[float, float] | None = None
    sinks: bool = False
    embedding_scale: float = 1.0
    padding_idx: int | None = None
    softmax_scale: float | None = None
    windows: tuple[int | None, ...] = ()
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    delta_net: DeltaNetShape | None = None
    attention_output_gate: bool = False
    vision: VisionShape | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Return the shape described by a parsed config.json. Raises ConfigError, which lists everything unsupported in it."""
        family, outer_config = find_family(config), config
        if family.tower:
            config = without_axes(text_config(outer_config))
        reader, architecture = _Config(), config["architectures"][0]
        config = with_class_defaults(config, architecture, reader.require)
        reader.rope_numbers(config)
        reader.require(
            not config.get("quantization_config"),
            "the checkpoint is quantized (quantization_config); training needs bfloat16 or float32 weights."
            + (
                " To convert it, load it in transformers with Mxfp4Config(dequantize=True) and call save_pretrained."
                if family.fused_experts == "interleaved"
                else ""
            ),
        )
        reader.stop_if_wrong()
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        groups = config["num_key_value_heads"] or heads
        common = {
            "architecture": architecture,
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "head_dim": config.get("head_dim") or hidden // heads,
            "ffn_hidden_size": config["intermediate_size" if "intermediate_size" in config else "moe_intermediate_size"],
            "vocab_size": config["vocab_size"],
            "max_position_embeddings": config["max_position_embeddings"],
            "norm_epsilon": config["rms_norm_eps"],
            "tied_embeddings": config["tie_word_embeddings"],
        }
        reader.require(common["head_dim"] > 0, f"hidden_size ({hidden}) is less than num_attention_heads ({heads}).")
        reader.require(heads % groups == 0, f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({groups}).")
        reader.stop_if_wrong()
        try:
            merged = {**common, **family.traits(config, common)}
        except KeyError as missing:
            raise config_error("model", f"config.json: {architecture} needs {missing.args[0]}.") from missing
        if moe := merged.get("moe"):
            reader.require(
                moe.topk <= moe.num_experts, f"num_experts_per_tok ({moe.topk}) is more than the experts of a layer ({moe.num_experts})."
            )
        windows = merged.get("windows") or (None,) * common["num_layers"]
        reader.require(0 not in windows, "sliding_window must be at least 1 or null, got 0.")
        kinds = config.get("layer_types") or [KINDS[window is not None] for window in windows]
        reader.require(
            merged.get("delta_net") is not None or kinds == [KINDS[window is not None] for window in windows],
            f"layer_types is {kinds!r}, but transformers reads the windows of {architecture} from other fields. Leave it out.",
        )
        rotated = merged["mla"].qk_pos_emb_head_dim if merged.get("mla") else merged["head_dim"]
        ropes = [rope_from_hf(part, rotated, family, reader) for part in (family.ropes(config) if family.ropes else (config,))]
        reader.stop_if_wrong()
        rope, *other_ropes = (rope_shape for rope_shape in ropes if rope_shape)
        merged["local_rope"] = next((other_rope for other_rope in other_ropes if other_rope != rope), None)
        if family.tower:
            rope = with_axes(rope, outer_config, family.tower, reader.require)
            merged["vision"] = read_vision(outer_config, family.tower, reader.require, hidden=hidden)
        reader.stop_if_wrong()
        return cls(**merged, rope=rope, padding_idx=_padding_idx(config))

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelShape:
        """Return the shape of the checkpoint in `directory`. Reads only config.json."""
        return cls.from_hf(read_config(directory))

    @property
    def query_size(self) -> int:
        """Channels of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of all key heads, and of all value heads."""
        return self.num_query_groups * self.head_dim

    @property
    def sliding_window(self) -> int | None:
        """Smallest sliding window in tokens; None if every layer has full attention."""
        return min((window for window in self.windows if window), default=None)

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None is full attention."""
        return self.windows[layer] if self.windows else None

    def find_rope(self, layer: int) -> RopeShape:
        """Return the rope of a layer: sliding-window layers may have their own."""
        return self.local_rope if self.local_rope and self.window(layer) else self.rope

    def find_softmax_scale(self, layer: int) -> float:
        """Return the softmax scale of a layer.

        `attention_scaling` multiplies cos and sin of both queries and keys, so its square multiplies every score. Multi-latent attention
        has its own scale (`MlaShape.softmax_scale`).
        """
        return self.find_rope(layer).attention_scaling ** 2 * (self.softmax_scale or self.head_dim**-0.5)

    @property
    def num_experts(self) -> int:
        """Number of experts in one MoE layer; 0 for a dense model."""
        return self.moe.num_experts if self.moe else 0

    @property
    def text_prefix(self) -> str:
        """Prefix of the text model's Hugging Face tensor names, except for the head."""
        return FAMILIES[self.architecture].text_prefix

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of a layer's Hugging Face tensor names."""
        return f"{self.text_prefix}layers.{layer}."

    def is_delta_net_layer(self, layer: int) -> bool:
        """Return whether a layer has the gated delta rule instead of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    def find_layer_kind(self, layer: int) -> LayerKind:
        """Return which parts a layer has."""
        return LayerKind(self.moe is not None and self.moe.layers[layer], self.is_delta_net_layer(layer))

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention, which keep keys and values of every token."""
        return self.num_layers - (sum(self.delta_net.layers) if self.delta_net else 0)


# An attention_factor of 0 makes all scores equal, and vLLM divides by the betas.
_POSITIVE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "partial_rotary_factor",
             "beta_fast", "beta_slow", "attention_factor")  # fmt: skip
_ROPE_FLOATS = (*_POSITIVE, "mscale", "mscale_all_dim")


def _padding_idx(config: Mapping[str, Any]) -> int | None:
    """Return the padding token; a negative number counts from the end of the vocabulary."""
    pad = config.get("pad_token_id")
    return pad + config["vocab_size"] if pad is not None and pad < 0 else pad


def flat_values(shape: ModelShape) -> dict[str, Any]:
    """Return everything that decides what a model computes as JSON values by dotted name (`rope.theta`); not `padding_idx`.

    `max_position_embeddings` is set to 0 so that it does not matter in comparisons.
    """
    form = json.loads(json.dumps(asdict(replace(shape, max_position_embeddings=0))))
    del form["padding_idx"]  # it decides a gradient
    inner = {name: value for name, value in form.items() if isinstance(value, dict)}
    inner_fields = {f"{name}.{key}": value for name, parts in inner.items() for key, value in parts.items()}
    return {name: value for name, value in form.items() if name not in inner} | inner_fields


class _Config:
    """Collects the problems of a config.json, so that all are reported at once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            self.problems.append(Problem(flags=("model",), message=f"config.json: {message}"))

    def rope_numbers(self, config: Mapping[str, Any]) -> None:
        self._numbers("", {key: value for key, value in config.items() if key == "original_max_position_embeddings"})
        for name in ("rope_scaling", "rope_parameters"):
            value = config.get(name)
            self.require(value is None or isinstance(value, Mapping), f"{name} must be an object, got {value!r}.")
            if isinstance(value, Mapping):
                self._numbers(f"{name}.", value)

    def _numbers(self, prefix: str, section: Mapping[str, Any]) -> None:
        for key in _ROPE_FLOATS:
            value = section.get(key)
            is_number = False
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                is_number = (0 < value if key in _POSITIVE else 0 <= value) and value < math.inf
            is_absent = key not in section or (value is None and key != "rope_theta")
            number = "a positive number" if key in _POSITIVE else "a number"
            self.require(is_absent or is_number, f"{prefix}{key} must be {number} or absent, got {value!r}.")

    def stop_if_wrong(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint directory.

    Raises:
        ConfigError: The file is missing, is not JSON, or is not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        fault = "has no config.json" if path.parent.is_dir() else "is not a directory"
        raise config_error(
            "model",
            f"model: {path.parent} {fault}. A Hugging Face checkpoint directory holds config.json, tokenizer files and *.safetensors.",
        )
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise config_error("model", f"model: {path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise config_error("model", f"model: {path} is not a model configuration.")
    return config


def rope_from_hf(config: Mapping[str, Any], channels: int, family: ModelFamily, reader: _Config) -> RopeShape | None:
    """Return the rope settings of either generation of config, or `None` with the problem in `reader` if they are not supported.

    Args:
        config: config.json with defaults filled in.
    """
    reader.rope_numbers(config)
    if reader.problems:
        return None
    rope = config.get("rope_scaling") or config["rope_parameters"]
    rope = family.rope if rope is None else rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    dim = _rotated_channels(rope.get("partial_rotary_factor", config["partial_rotary_factor"]), kind, channels, family, reader)
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    reader.require(not nested, f"rope settings that differ by layer type ({', '.join(nested)}) are not supported.")
    supported = ("default", "linear", "llama3", "yarn")
    # dynamic and longrope change their frequencies with the length of the batch, so log-probs would depend on the packing.
    reader.require(kind in supported, f"rope type {kind!r} is not supported. Supported: {', '.join(supported)}.")
    reader.require("mrope_section" not in rope, "multi-axis rope (mrope_section) is not supported.")
    required = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"], "yarn": ["factor"]}.get(kind, [])
    missing = [key for key in required if rope.get(key) is None]
    reader.require(not missing, f"rope type {kind!r} needs {', '.join(missing)}.")
    if reader.problems:
        return None
    original = {"original_max_position_embeddings": config["max_position_embeddings"], **rope, **config}["original_max_position_embeddings"]
    reader.require(original is not None or kind not in ("llama3", "yarn"), f"rope type {kind!r} needs original_max_position_embeddings.")
    if reader.problems:
        return None
    plain: dict[str, Any] = {"type": kind, "dim": dim, "theta": theta}
    if kind == "default":
        return RopeShape(**plain)
    if kind == "linear":
        return RopeShape(**plain, factor=float(rope["factor"]))
    stretched: dict[str, Any] = {**plain, "factor": float(rope["factor"]), "original_max_position_embeddings": original}
    if kind == "llama3":
        return RopeShape(**stretched, low_freq_factor=float(rope["low_freq_factor"]), high_freq_factor=float(rope["high_freq_factor"]))
    return RopeShape(
        **stretched,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_scaling=_yarn_attention_scaling(rope, stretched["factor"]),
    )


def _rotated_channels(partial: float | None, kind: str, channels: int, family: ModelFamily, reader: _Config) -> int:
    partial = 1.0 if partial is None else partial
    is_known = partial == 1.0 or family.turns_a_part
    reader.require(is_known, f"partial_rotary_factor is {partial}; partial rotary embeddings are not supported for this model.")
    reader.require(partial <= 1.0, f"partial_rotary_factor must be at most 1, got {partial}.")
    dim = int(channels * partial)
    is_plain = dim == channels or kind in ("default", "linear")
    reader.require(is_plain, f"rope type {kind!r} with partial_rotary_factor {partial} is not supported.")
    reader.require(dim % 2 == 0, f"a head has {dim} rotated channels; rotary positions need an even number.")
    return dim


def _yarn_attention_scaling(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, rope["mscale"]) / yarn_mscale(factor, rope["mscale_all_dim"])
    return yarn_mscale(factor)
