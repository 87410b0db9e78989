"""Every field of every family's config class in transformers is read, has no effect, or is rejected."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.families import FAMILIES, FILE, IDLE, REFUSED, list_fields
from megatron_grpo.core.weights.shape import ModelShape
from tests import vision_cases
from tests.unit.weights.tiny import CHECKPOINTS, make_model_config
from tools import config_fields

STRETCHED = {"rope_type": "linear", "factor": 2.0}
# Other values of a kind of JSON, until one of them is another model or none.
OTHERS = {
    "int": (1, 3, 4), "float": (0.03, 0.3), "bool": (True, False), "str": ("gelu",), "NoneType": (), "list[int]": ([0],),
    "list[str]": (["x"],), "dict": (STRETCHED, {"sliding_attention": STRETCHED}, {}),
}  # fmt: skip
STRETCHED_BY_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}


def make_family_config(family: str, folder) -> dict:
    """In which all that the family can have is there: windows too, and no rope that says what the words above it say."""
    if family in vision:
        config = json.loads((vision_cases.write_vlm(folder, vision[family]) / "config.json").read_text())
        inner = {
            key: value for key, value in config.pop("text_config").items() if key not in ("rope_parameters", "layer_types", "architectures")
        }
        sections = {"Qwen2": [2, 3, 3], "Qwen3V": [4, 2, 2], "Qwen3_5": [2, 1, 1]}  # of a hybrid's heads a quarter turns
        given = next(found for prefix, found in sections.items() if family.startswith(prefix))
        return inner | config | WINDOWS | {"rope_scaling": {"mrope_section": given}}
    (name, *_) = [name for name in CHECKPOINTS if make_model_config(name)["architectures"] == [family]]
    left_out = (
        "rope_parameters",
        "layer_types",
        "num_local_experts",
        *(["partial_rotary_factor"] if "rotary_dim" in make_model_config(name) else []),
    )
    config = {key: value for key, value in make_model_config(name).items() if key not in left_out}
    return (
        config
        | WINDOWS
        | {
            key: make_model_config(name)[key]
            for key in ("num_local_experts",)
            if "num_experts" not in config and key in make_model_config(name)
        }
    )


vision = {"Qwen2VLForConditionalGeneration": "qwen2_vl", "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
          "Qwen3VLForConditionalGeneration": "qwen3_vl", "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
          "Qwen3_5ForConditionalGeneration": "qwen3_5",
          "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"}  # fmt: skip


def test_config_field_table_equals_installed_transformers():
    table, made = json.loads(FILE.read_text()), config_fields.make_table()
    differs = [
        f"{family}.{name}: {said.get(name, 'nothing')} in config_fields.json, {theirs.get(name, 'nothing')} in transformers"
        for family in FAMILIES
        for said, theirs in [({**table["every family"], **table["families"].get(family, {}).get("fields", {})},
                              {**made["every family"], **made["families"][family]["fields"]})]
        for name in sorted(said.keys() | theirs.keys())
        if said.get(name) != theirs.get(name)
    ]  # fmt: skip
    assert differs == [], "`python tools/config_fields.py` writes it anew; then say of a new field whether it is idle, refused, or read"
    assert {family: said["aliases"] for family, said in made["families"].items()} == {
        family: said["aliases"] for family, said in table["families"].items()
    }
    assert not IDLE & REFUSED and {*IDLE, *REFUSED} <= {name for family in FAMILIES for name in list_fields(family)}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_field_that_has_effect_changes_shape_or_is_rejected(family, tmp_path):
    config = make_family_config(family, tmp_path)
    right = ModelShape.from_hf(config)
    ignored = []
    for name, (kinds, default) in list_fields(family).items():
        for other in (value for kind in kinds.split("|") for value in OTHERS[kind] if value != config.get(name, default)):
            try:
                if ModelShape.from_hf({**config, name: other}) != right:
                    break
            except ConfigError:
                break
        else:
            ignored += [name] if name not in IDLE and kinds != "NoneType" else []
    assert ignored == [], "read them, or say in config_fields.json that they are idle or refused"


@pytest.mark.parametrize(("name", "said", "words"), [
    ("qwen3", {"attention_dropout": 0.1}, 'attention_dropout is 0.1, which is not supported. Leave it out, or use 0.0'),
    ("mixtral", {"router_jitter_noise": 0.2}, "router_jitter_noise is 0.2"),
    ("llama", {"is_causal": False}, "is_causal is False"),
    ("llama", {"per_layer_config": {"0": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a float, got 0"),  # as transformers refuses it
    ("llama", {"attention_bias": 1}, "attention_bias must be true or false, got 1"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer, got 0"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than the experts of a layer \(4\)"),
    ("qwen3_moe", {"num_local_experts": 4, "num_experts": 2}, "num_(local_)?experts is . but num_"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers must be"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a positive float, got 0.0"),
    ("deepseek_v3", {"topk_group": None}, "topk_group is null"),
    ("deepseek_v3", {"v_head_dim": None}, "v_head_dim is null"),
    ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "transformers reads the windows of Llama"),
    ("mistral", {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "but sliding_window is null"),
    ("gemma3", {"rope_scaling": STRETCHED}, "rope_scaling and rope_parameters are both set"),
    ("olmo3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "which older versions of transformers read"),
    ("llama", {"rope_theta": None, "rope_parameters": None}, "rope_theta must be a positive number, got None"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, "'yarn' needs factor"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor must be a positive number"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a positive number or absent, got inf"),
    ("qwen3", {"rope_parameters": {**STRETCHED_BY_YARN, "attention_factor": 0.0}}, "attention_factor must be a positive number"),
    ("qwen3", {"rope_parameters": {**STRETCHED_BY_YARN, "beta_fast": 0}}, "beta_fast must be a positive number"),
    ("qwen2", {"hidden_size": 1}, r"hidden_size \(1\) is less than num_attention_heads \(8\)"),
])  # fmt: skip
def test_config_field_with_unsupported_value_is_rejected(name, said, words):
    with pytest.raises(ConfigError, match=words):
        ModelShape.from_hf(make_model_config(name) | said)


def test_config_fields_outside_text_config_are_read_as_by_transformers(tmp_path):
    config = json.loads((vision_cases.write_vlm(tmp_path, "qwen3_vl") / "config.json").read_text())
    inner = config["text_config"]
    right = ModelShape.from_hf(config)
    assert ModelShape.from_hf({**config, "rms_norm_eps": inner["rms_norm_eps"], "some_note": 3}) == right
    nulls = {"image_token_id": None, "video_token_id": None, "architectures": ["Other"], "sliding_window": None}  # as 4.52 writes them
    assert ModelShape.from_hf({**config, "sliding_window": 32768, "text_config": {**inner, **nulls}}) == right
    with pytest.raises(ConfigError, match="rms_norm_eps is 0.5 at the top level and 1e-06 in text_config"):
        ModelShape.from_hf({**config, "rms_norm_eps": 0.5})
    for lost, said in (({"rms_norm_eps"}, {"rms_norm_eps": 0.5}), ({"rope_parameters", "rope_theta"}, {"rope_theta": 77.0})):
        silent = {key: value for key, value in inner.items() if key not in lost}
        with pytest.raises(ConfigError, match=f"{next(iter(said))}.* text_config"):
            ModelShape.from_hf({**config, **said, "text_config": silent})
    with pytest.raises(ConfigError, match="attention_dropout is 0.1, which is not supported"):
        ModelShape.from_hf({**config, "text_config": {**inner, "attention_dropout": 0.1}})
