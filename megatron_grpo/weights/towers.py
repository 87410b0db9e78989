"""How each family sees: how the config of its vision tower is read, and what the tower's tensors are called. No tensors, no torch.

The tower is transformers' own module, whole on every rank that has one, so its tensors travel under their own names, one to one. Here they
stand in the order in which that module registers them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_grpo.weights.sizes import VisionShape

Config = Mapping[str, Any]
Sizes = Iterator[tuple[str, tuple[int, ...]]]
Part = Literal["llm", "vit", "aligner"]

MEGATRON = "vision.tower."  # before the name of a tower's tensor, in the modules of a rank
_PART = re.compile(r"(?:model\.)?visual\.(merger\.|deepstack_merger_list\.)?")


def part_of(name: str) -> Part:
    """Whether a tensor, by its Hugging Face name, is of the text model, of the tower, or of what turns the tower's channels into text's."""
    match = _PART.match(name)
    return "llm" if match is None else "aligner" if match[1] else "vit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """What sets the tower of one family apart.

    module: transformers' class, inside transformers.models. prefix, text_prefix: what names of its tensors, and of the text model's, begin
    with on the Hub; the head is `lm_head` everywhere. shape: (vision_config, config.json) -> sizes. tensors: (sizes, channels of the text
    model) -> names and sizes, without the prefix.
    """

    module: str
    prefix: str
    text_prefix: str
    shape: Callable[[Config, Config], VisionShape]
    tensors: Callable[[VisionShape, int], Sizes]
    sections: tuple[int, int, int]  # mrope_section where config.json says none
    interleaved_axes: bool = False  # see `RopeShape`

    def on_the_hub(self, name: str) -> str:
        """The same tensor's name on the Hub. transformers 4.52 to 4.57 write those that their modules have in memory."""
        for theirs, ours in (("model.visual.", self.prefix), ("visual.", self.prefix), ("model.language_model.", self.text_prefix)):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def in_memory(self, name: str) -> str:
        """The name that a tensor of the text model has in transformers' module, and so in PEFT's files."""
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
    width = vision.get("embed_dim", 1280)
    return _shape(vision, config, width=width, ffn=int(width * vision.get("mlp_ratio", 4)), patch=14)


def qwen2_5_vl(vision: Config, config: Config) -> VisionShape:
    return _shape(vision, config, width=vision["hidden_size"], ffn=vision["intermediate_size"], patch=14)


def qwen3_vl(vision: Config, config: Config) -> VisionShape:
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


def _linear(name: str, rows: int, columns: int) -> Sizes:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, width: int) -> Sizes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _attention(name: str, width: int) -> Sizes:
    yield from _linear(f"{name}.attn.qkv", 3 * width, width)
    yield from _linear(f"{name}.attn.proj", width, width)


def qwen2_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    width, merged = vision.width, vision.width * vision.merge**2
    yield "patch_embed.proj.weight", (width, *vision.patch)
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        yield from _norm(f"{block}.norm1", width)
        yield from _norm(f"{block}.norm2", width)
        yield from _attention(block, width)
        yield from _linear(f"{block}.mlp.fc1", vision.ffn_hidden_size, width)
        yield from _linear(f"{block}.mlp.fc2", width, vision.ffn_hidden_size)
    yield from _norm("merger.ln_q", width)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", hidden, merged)


def qwen2_5_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    width, merged = vision.width, vision.width * vision.merge**2
    yield "patch_embed.proj.weight", (width, *vision.patch)
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        yield f"{block}.norm1.weight", (width,)
        yield f"{block}.norm2.weight", (width,)
        yield from _attention(block, width)
        yield from _linear(f"{block}.mlp.gate_proj", vision.ffn_hidden_size, width)
        yield from _linear(f"{block}.mlp.up_proj", vision.ffn_hidden_size, width)
        yield from _linear(f"{block}.mlp.down_proj", width, vision.ffn_hidden_size)
    yield "merger.ln_q.weight", (width,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", hidden, merged)


def qwen3_vl_tensors(vision: VisionShape, hidden: int) -> Sizes:
    width, merged = vision.width, vision.width * vision.merge**2
    yield "patch_embed.proj.weight", (width, *vision.patch)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (vision.num_positions, width)
    for block in (f"blocks.{layer}" for layer in range(vision.depth)):
        yield from _norm(f"{block}.norm1", width)
        yield from _norm(f"{block}.norm2", width)
        yield from _attention(block, width)
        yield from _linear(f"{block}.mlp.linear_fc1", vision.ffn_hidden_size, width)
        yield from _linear(f"{block}.mlp.linear_fc2", width, vision.ffn_hidden_size)
    mergers = [("merger", width), *((f"deepstack_merger_list.{number}", merged) for number in range(vision.num_deepstack))]
    for name, normed in mergers:
        yield from _norm(f"{name}.norm", normed)
        yield from _linear(f"{name}.linear_fc1", merged, merged)
        yield from _linear(f"{name}.linear_fc2", hidden, merged)


QWEN2_VL = Tower(
    module="qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
    prefix="visual.",
    text_prefix="model.",
    shape=qwen2_vl,
    tensors=qwen2_vl_tensors,
    sections=(16, 24, 24),
)
QWEN2_5_VL = Tower(
    module="qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    prefix="visual.",
    text_prefix="model.",
    shape=qwen2_5_vl,
    tensors=qwen2_5_vl_tensors,
    sections=(16, 24, 24),
)
QWEN3_VL = Tower(
    module="qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    prefix="model.visual.",
    text_prefix="model.language_model.",
    shape=qwen3_vl,
    tensors=qwen3_vl_tensors,
    sections=(24, 20, 20),
    interleaved_axes=True,
)
