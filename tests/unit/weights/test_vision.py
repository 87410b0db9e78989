"""Vision-language models as names and numbers: the tower's tensors, M-RoPE, configs of every form."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.lora import LoraSettings, find_module, own_sizes, peft_name
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.names import hf_shapes, num_parameters, tower_entries
from megatron_grpo.core.weights.shape import ModelShape, read_config
from megatron_grpo.core.weights.sizes import RopeShape
from megatron_grpo.core.weights.vision_towers import find_part
from megatron_grpo.run.adapters import from_file
from megatron_grpo.run.hf_writer import write_adapter
from tests import vision_cases as vision
from tests.tiny_models import load_tiny

# Of the Hub's config.json, what decides sizes. Numbers of parameters are those of the Hub's safetensors index.
QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
    "image_token_id": 151655, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
                      "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
}  # fmt: skip
QWEN3_VL_4B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "tie_word_embeddings": True,
    "text_config": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
                    "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
                    "rope_theta": 5000000, "tie_word_embeddings": True,
                    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
    "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304,
                      "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17], "patch_size": 16, "spatial_merge_size": 2},
}  # fmt: skip


def change_config(config, **changes):
    return json.loads(json.dumps(config)) | changes


@pytest.fixture(scope="module", params=vision.FAMILIES)
def checkpoint(request, tmp_path_factory):
    return vision.write_vlm(tmp_path_factory.mktemp(request.param), request.param, tied=request.param == "qwen3_vl")


def test_vision_tower_tensors_equal_transformers_in_order(checkpoint):
    from megatron_grpo.core.policy.vision import build_tower

    shape = ModelShape.from_pretrained(checkpoint)
    tower = build_tower(shape, checkpoint, dtype=torch.float32, device="meta")
    prefix = FAMILIES[shape.architecture].tower.prefix
    ours = [(name.removeprefix(prefix), size) for entry in tower_entries(shape) for name, size in entry.hf]
    assert ours == [(name, tuple(parameter.shape)) for name, parameter in tower.named_parameters()]


def test_vision_model_names_and_sizes_equal_checkpoint(checkpoint):
    shape = ModelShape.from_pretrained(checkpoint)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    reader = HfReader(checkpoint)
    assert hf_shapes(shape) == {name: tuple(reader(name).shape) for name in reader.names}
    assert WeightMap.for_shape(shape, padded_vocab_size=vision.VOCAB).stored_names() == stored.keys()
    assert num_parameters(shape) == sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())


def test_mrope_frequencies_use_axes_of_transformers(checkpoint):
    """By three positions of which each moves one axis: the angle of a frequency changes where it is that axis'."""
    shape, model = ModelShape.from_pretrained(checkpoint), load_tiny(checkpoint)
    rotary = model.model.language_model.rotary_emb
    found = []
    for axis in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.int64)
        positions[axis] = 1
        cos, sin = rotary(torch.zeros(1, 1, 1), positions)
        if cos.dim() == 4:  # by axis, and each layer picks: as Qwen2-VL's do
            sections = [*shape.rope.sections] * 2
            sin = torch.cat([part[i % 3] for i, part in enumerate(sin.split(sections, dim=-1))], dim=-1)
        found.append((sin.flatten()[: shape.rope.dim // 2] != 0).tolist())
    assert [column.index(True) for column in zip(*found, strict=True)] == list(shape.rope.axes)


def test_mrope_axes_in_blocks_and_interleaved():
    blocks = RopeShape(type="default", dim=16, theta=1e4, sections=(2, 3, 3))
    assert blocks.axes == (0, 0, 1, 1, 1, 2, 2, 2)
    turns = RopeShape(type="default", dim=16, theta=1e4, sections=(4, 2, 2), interleaved=True)
    assert turns.axes == (0, 1, 2, 0, 1, 2, 0, 0)
    assert RopeShape(type="default", dim=16, theta=1e4).axes == ()


def test_vision_model_reads_older_names_and_writes_hub_names(tmp_path):
    path = vision.write_vlm(tmp_path, "qwen2_5_vl")
    right = load_file(path / "model.safetensors")

    def older(name):
        return (
            name.replace("visual.", "model.visual.", 1)
            if name.startswith("visual.")
            else name.replace("model.", "model.language_model.", 1)
        )

    save_file({older(name): tensor for name, tensor in right.items()}, path / "model.safetensors", metadata={"format": "pt"})
    read = HfReader(path)
    assert read.names == right.keys()
    assert all(torch.equal(read(name), right[name]) for name in right)


def test_vision_config_is_read_in_hub_and_transformers_form():
    flat = ModelShape.from_hf(QWEN2_5_VL_7B)
    assert (flat.rope.sections, flat.rope.interleaved, flat.rope.theta) == ((16, 24, 24), False, 1e6)
    of_text = {key: value for key, value in QWEN2_5_VL_7B.items() if key not in ("architectures", "vision_config", "image_token_id")}
    outer = {key: QWEN2_5_VL_7B[key] for key in ("architectures", "vision_config", "image_token_id")}
    assert ModelShape.from_hf({**outer, "text_config": of_text}) == flat
    assert ModelShape.from_hf({**QWEN2_5_VL_7B, "text_config": of_text}) == flat, "said twice, alike"
    assert ModelShape.from_hf({**outer, "pad_token_id": 3, "text_config": of_text}).padding_idx is None, "transformers reads the inner one"
    assert ModelShape.from_hf({**outer, "text_config": {**of_text, "pad_token_id": 3}}).padding_idx == 3
    assert num_parameters(flat) == 8_292_166_656
    assert sum(torch.Size(size).numel() for entry in tower_entries(flat) for _, size in entry.hf) == 676_550_144
    deep = ModelShape.from_hf(QWEN3_VL_4B)
    assert deep.vision.num_deepstack == 3 and deep.rope.interleaved and deep.tied_embeddings
    assert num_parameters(deep) == 4_437_815_808


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (change_config(QWEN3_VL_4B, hidden_size=2048), "hidden_size is 2048 at the top level and 2560 in text_config"),
        (change_config(QWEN3_VL_4B, tie_word_embeddings=False), "is False at the top level and True in text_config"),
        (change_config(QWEN3_VL_4B, rope_scaling={"mrope_section": [20, 24, 20]}), r"contradictory values.*\[20, 24, 20\] and \[24, 20"),
        (change_config(QWEN2_5_VL_7B, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 20]}), r"channels of a head \(64\), got 60"),
        (change_config(QWEN2_5_VL_7B, rope_scaling={"type": "mrope", "mrope_section": "all"}), "three integers, got 'all'"),
        (change_config(QWEN2_5_VL_7B, rope_scaling={"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}), "'yarn' with axes"),
        (change_config(QWEN2_5_VL_7B, vision_config=None), "vision_config must be an object, got None"),
        (
            change_config(QWEN2_5_VL_7B, vision_config=change_config(QWEN2_5_VL_7B["vision_config"], out_hidden_size=2048)),
            "outputs 2048 channels",
        ),
        (change_config(QWEN2_5_VL_7B, image_token_id=None), "image_token_id must be a positive integer"),
        (change_config(QWEN2_5_VL_7B, text_config=[1]), r"text_config must be an object, got \[1\]"),
        (change_config(QWEN3_VL_4B, architectures=["Glm4vMoeForConditionalGeneration"]), "its vision tower is not verified"),
        (change_config(QWEN3_VL_4B, architectures=["Qwen3VLMoeForConditionalGeneration"], norm_topk_prob=False), "norm_topk_prob is False"),
    ],
)  # fmt: skip
def test_vision_config_that_is_contradictory_or_incomplete_is_rejected(config, says):
    with pytest.raises(ConfigError, match=says):
        ModelShape.from_hf(config)


def test_vision_model_parts_by_name():
    assert [find_part(name) for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.language_model.norm.weight")] == [
        "llm"
    ] * 3
    assert [find_part(name) for name in ("visual.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight")] == ["vit"] * 2
    aligner = ("visual.merger.ln_q.weight", "model.visual.deepstack_merger_list.0.norm.bias")
    assert [find_part(name) for name in aligner] == ["aligner"] * 2


def test_vision_checkpoint_tied_embeddings_equal_config(checkpoint):
    assert ModelShape.from_pretrained(checkpoint).tied_embeddings == bool(read_config(checkpoint)["tie_word_embeddings"])


@pytest.mark.parametrize("spelling", ["PEFT's", "ours"])
def test_vision_adapter_has_peft_names_and_reads_both(checkpoint, tmp_path, spelling):
    shape = ModelShape.from_pretrained(checkpoint)
    beside_experts = dict(target_modules=("q_proj", "k_proj", "v_proj", "o_proj")) if FAMILIES[shape.architecture].fused_experts else {}
    settings = LoraSettings(rank=3, **beside_experts)
    sizes = own_sizes(settings, shape)
    config = settings.to_peft(dict.fromkeys(map(find_module, sizes)), str(checkpoint), is_multimodal=True)
    right = {name: torch.full(size, float(number)) for number, (name, size) in enumerate(sizes.items())}
    name_of = (lambda name: peft_name(name, shape)) if spelling == "PEFT's" else str
    write_adapter(tmp_path / "out", ((name_of(name), tensor) for name, tensor in right.items()), config, {})
    again = LoraSettings.from_peft(tmp_path / "out")
    read = from_file(tmp_path / "out", again, shape)
    assert own_sizes(again, shape) == sizes
    assert all(torch.equal(read(name), tensor) for name, tensor in right.items())
    model = load_tiny(checkpoint)
    modules = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    targets = {name for name in modules if re.fullmatch(config["target_modules"], name)}
    wanted = {peft_name(find_module(name), shape) for name in sizes}
    in_experts = {name for name in wanted if ".experts." in name}  # transformers has the experts of a layer in one tensor
    assert (not in_experts) == (shape.moe is None or bool(beside_experts))
    assert targets == wanted - in_experts, "no layer of the tower, some of which have the same last words"
