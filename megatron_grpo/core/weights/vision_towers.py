"""Vision towers of the supported families: their config, their tensor names, and the settings of three-axis positions. No torch.

The tower is transformers' own module, replicated on every rank that has one, so its tensors keep their names. They are listed here in the
order in which that module registers them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_grpo.core.weights.sizes import RopeShape, VisionShape

Config = Mapping[str, Any]
Sizes = Iterator[tuple[str, tuple[int, ...]]]
Require = Callable[[bool, str], None]  # records the message if the condition is false
Part = Literal["llm", "vit", "aligner"]

MEGATRON = "vision.tower."  # of a tower tensor's name in the modules of a rank
_ROPES = ("rope_scaling", "rope_parameters")
_AXIS_FIELDS = ("mrope_section", "mrope_interleaved")
_PART = re.compile(r"(?:model\.)?visual\.(merger\.|deepstack_merger_list\.)?")


def find_part(name: str) -> Part:
    """Return the part of a model that a tensor belongs to, by its Hugging Face name.

    Returns:
        "llm" for the text model, "vit" for the vision tower, "aligner" for the layers that map the tower's channels to the text model's.
    """
    match = _PART.match(name)
    return "llm" if match is None else "aligner" if match[1] else "vit"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """Properties of one family's vision tower.

    Args:
        module: transformers' class, inside transformers.models.
        prefix: Prefix of the tower's tensor names on the Hub.
        text_prefix: Prefix of the text model's tensor names on the Hub. The head is `lm_head` everywhere.
        shape: Function (vision_config, config.json) -> sizes.
        tensors: Function (sizes, channels of the text model) -> names without the prefix, and sizes.
        sections: Default value of mrope_section.
        interleaved_axes: As in `RopeShape`.
    """

    module: str
    prefix: str
    text_prefix: str
    shape: Callable[[Config, Config], VisionShape]
    tensors: Callable[[VisionShape, int], Sizes]
    sections: tuple[int, int, int]
    interleaved_axes: bool = False

    def on_the_hub(self, name: str) -> str:
        """Return a tensor's name on the Hub. transformers 4.52 to 4.57 write the names of their modules in memory instead."""
        for hub_prefix, own_prefix in (
            ("model.visual.", self.prefix),
            ("visual.", self.prefix),
            ("model.language_model.", self.text_prefix),
        ):
            if name.startswith(hub_prefix):
                return own_prefix + name.removeprefix(hub_prefix)
        return name

    def in_memory(self, name: str) -> str:
        """Return the name of a text-model tensor in transformers' module, and therefore in PEFT's files."""
        return "model.language_model." + name.removeprefix(self.text_prefix) if name.startswith(self.text_prefix) else name


def _shape(
    vision: Config, config: Config, *, width: int, ffn: int, num_positions: int = 0, num_deepstack: int = 0, patch: int
) -> VisionShape:
    side = vision.get("patch_size", patch)
    return VisionShape(
        depth=vision["depth"],
        width=width,
        ffn_hidden_size=ffn,
        patch=(vision.get("in_channels", vision.get("in_chans", 3)), vision.get("temporal_patch_size", 2), side, side),
        merge=vision.get("spatial_merge_size", 2),
        image_token=config["image_token_id"],
        num_positions=num_positions,
        num_deepstack=num_deepstack,
    )


def qwen2_vl(vision: Config, config: Config) -> VisionShape:
    """Read the vision_config of Qwen2-VL."""
    width = vision.get("embed_dim", 1280)
    return _shape(vision, config, width=width, ffn=int(width * vision.get("mlp_ratio", 4)), patch=14)


def qwen2_5_vl(vision: Config, config: Config) -> VisionShape:
    """Read the vision_config of Qwen2.5-VL."""
    return _shape(vision, config, width=vision["hidden_size"], ffn=vision["intermediate_size"], patch=14)


def qwen3_vl(vision: Config, config: Config) -> VisionShape:
    """Read the vision_config of Qwen3-VL."""
    deep = vision.get("deepstack_visual_indexes", (8, 16, 24))
    positions = vision.get("num_position_embeddings", 2304)
    return _shape(
        vision,
        config,
        width=vision["hidden_size"],
        ffn=vision["intermediate_size"],
        num_positions=positions,
        num_deepstack=len(deep),
        patch=16,
    )


def _affine(name: str, *size: int, bias: bool = True) -> Sizes:
    """Yield the tensors of a linear layer (size: out, in) or of a norm (size: channels)."""
    yield f"{name}.weight", size
    if bias:
        yield f"{name}.bias", size[:1]


def _blocks(vision: VisionShape, *mlp: str, norm_bias: bool = True) -> Sizes:
    """Yield the tensors of all layers. `mlp` lists the linear layers of the MLP; the last one is the output projection."""
    width, inner = vision.width, vision.ffn_hidden_size
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        yield from _affine(f"{block}.norm1", width, bias=norm_bias)
        yield from _affine(f"{block}.norm2", width, bias=norm_bias)
        yield from _affine(f"{block}.attn.qkv", 3 * width, width)
        yield from _affine(f"{block}.attn.proj", width, width)
        for name in mlp[:-1]:
            yield from _affine(f"{block}.mlp.{name}", inner, width)
        yield from _affine(f"{block}.mlp.{mlp[-1]}", width, inner)


def _merger(norm: str, first: str, second: str, vision: VisionShape, hidden: int, *, normed: int, norm_bias: bool = True) -> Sizes:
    """Yield the tensors of the layers that merge patches into tokens. `normed` is the channels of the norm."""
    merged = vision.width * vision.merge**2
    yield from _affine(norm, normed, bias=norm_bias)
    yield from _affine(first, merged, merged)
    yield from _affine(second, hidden, merged)


def qwen2_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    """Yield the tensors of Qwen2-VL's tower; `hidden` is the text model's channels."""
    yield "patch_embed.proj.weight", (vision.width, *vision.patch)
    yield from _blocks(vision, "fc1", "fc2")
    yield from _merger("merger.ln_q", "merger.mlp.0", "merger.mlp.2", vision, hidden, normed=vision.width)


def qwen2_5_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    """Yield the tensors of Qwen2.5-VL's tower; `hidden` is the text model's channels."""
    yield "patch_embed.proj.weight", (vision.width, *vision.patch)
    yield from _blocks(vision, "gate_proj", "up_proj", "down_proj", norm_bias=False)
    yield from _merger("merger.ln_q", "merger.mlp.0", "merger.mlp.2", vision, hidden, normed=vision.width, norm_bias=False)


def qwen3_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    """Yield the tensors of Qwen3-VL's tower; `hidden` is the text model's channels."""
    yield from _affine("patch_embed.proj", vision.width, *vision.patch)
    yield "pos_embed.weight", (vision.num_positions, vision.width)
    yield from _blocks(vision, "linear_fc1", "linear_fc2")
    deep = [(f"deepstack_merger_list.{number}", vision.width * vision.merge**2) for number in range(vision.num_deepstack)]
    for name, normed in (("merger", vision.width), *deep):
        yield from _merger(f"{name}.norm", f"{name}.linear_fc1", f"{name}.linear_fc2", vision, hidden, normed=normed)


QWEN2_VL = VisionTower(
    module="qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    prefix="visual.",
    text_prefix="model.",
    shape=qwen2_vl,
    tensors=qwen2_vl_tensors,
    sections=(16, 24, 24),
)
QWEN2_5_VL = VisionTower(
    module="qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    prefix="visual.",
    text_prefix="model.",
    shape=qwen2_5_vl,
    tensors=qwen2_5_vl_tensors,
    sections=(16, 24, 24),
)
QWEN3_VL = VisionTower(
    module="qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    prefix="model.visual.",
    text_prefix="model.language_model.",
    shape=qwen3_vl,
    tensors=qwen3_vl_tensors,
    sections=(24, 20, 20),
    interleaved_axes=True,
)
QWEN3_VL_MOE = replace(QWEN3_VL, module="qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel")
QWEN3_5 = replace(
    QWEN3_VL,
    module="qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel",
    shape=lambda vision, config: qwen3_vl({**vision, "deepstack_visual_indexes": ()}, config),
    sections=(11, 11, 10),
)
QWEN3_5_MOE = replace(QWEN3_5, module="qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel")


def without_axes(config: Config) -> Config:
    """Return the configuration with the rope of a text model: `mrope` is the default type with axes."""
    changed = {}
    for name in _ROPES:
        if isinstance(rope := config.get(name), Mapping):
            plain = {key: value for key, value in rope.items() if key not in _AXIS_FIELDS}
            changed[name] = {key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in plain.items()}
    return {**config, **changed}


def with_axes(rope: RopeShape, config: Config, tower: VisionTower, require: Require) -> RopeShape:
    """Return the rope with its three position axes.

    Args:
        rope: Rope read from `without_axes`.
        tower: Tower of the family, with its default axes.
        require: Called with (condition, message) for each requirement.
    """
    require(rope.type == "default", f"rope type {rope.type!r} with axes (mrope_section) is not supported; only 'mrope' and 'default' are.")
    sections_value = _unique_value(config, "mrope_section", require) or tower.sections
    if not (isinstance(sections_value, (list, tuple)) and len(sections_value) == 3 and all(map(_is_count, sections_value))):
        require(False, f"mrope_section must be three integers, got {sections_value!r}.")
        return rope
    sections = tuple(sections_value)
    require(
        sum(sections) == rope.dim // 2,
        f"mrope_section ({sections}) must add up to half of the rotated channels of a head ({rope.dim // 2}), got {sum(sections)}.",
    )
    interleaved = tower.interleaved_axes
    sections_value = _unique_value(config, "mrope_interleaved", require)
    require(
        sections_value in (None, interleaved),
        f"mrope_interleaved is {sections_value}; {config['architectures'][0]} needs {str(interleaved).lower()}.",
    )
    return replace(rope, sections=sections, interleaved=interleaved)


def read_vision(config: Config, tower: VisionTower, require: Require, *, hidden: int) -> VisionShape | None:
    """Return the sizes of the vision tower; None if they cannot be read, with the problem passed to `require`.

    Args:
        require: Called with (condition, message) for each requirement.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        require(False, f"vision_config must be an object, got {vision!r}.")
        return None
    try:
        shape = tower.shape(vision, config)
    except KeyError as missing:
        require(False, f"{config['architectures'][0]} needs {missing.args[0]} (in config.json or its vision_config).")
        return None
    numbers = {"depth": shape.depth, "channels": shape.width, "spatial_merge_size": shape.merge, "image_token_id": shape.image_token}
    for name, value in {**numbers, "patch_size": shape.patch[-1]}.items():
        require(_is_count(value), f"vision_config: {name} must be a positive integer, got {value!r}.")
    # In Qwen2-VL's vision_config, embed_dim is the tower's width and hidden_size the text model's.
    out = vision.get("out_hidden_size", vision.get("hidden_size") if "embed_dim" in vision else hidden)
    require(out == hidden, f"the vision tower outputs {out} channels, but the text model needs {hidden}.")
    return shape


def _ropes(config: Config) -> Iterator[Config]:
    for level in (config, config.get("text_config") or {}):
        for name in _ROPES:
            if isinstance(rope := level.get(name), Mapping):
                yield rope


def _unique_value(config: Config, key: str, require: Require) -> Any:
    """Return the value of a key in any of config.json's rope settings; None if there is none. All occurrences must agree."""
    values = [rope[key] for rope in _ropes(config) if rope.get(key) is not None]
    require(all(value == values[0] for value in values), f"{key} has contradictory values: {' and '.join(map(repr, values))}.")
    return values[0] if values else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
