"""ModelShape from config.json in both forms, and rejected configs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.names import hf_shapes, num_parameters
from megatron_grpo.core.weights.shape import ModelShape, flat_values
from tests.unit.weights.tiny import CHECKPOINTS, make_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}


def test_model_shape_imports_no_torch():
    code = (
        "import sys, json; from megatron_grpo.core.weights.shape import ModelShape; "
        "from megatron_grpo.core.weights.names import num_parameters;"
        "num_parameters(ModelShape.from_hf(json.loads(sys.argv[1]))); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(LLAMA)], check=True)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_num_parameters_equals_transformers(name):
    import transformers
    from transformers import AutoModelForCausalLM

    kind, fields = CHECKPOINTS[name]
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    shape = ModelShape.from_hf(make_model_config(name))
    biases_of_experts = shape.moe.num_experts * sum(shape.moe.layers) if shape.moe and shape.moe.has_expert_bias else 0  # buffers there
    assert num_parameters(shape) == model.num_parameters() + biases_of_experts


def test_num_parameters_active_only_excludes_unused_experts():
    shape = ModelShape.from_hf(make_model_config("mixtral"))  # 4 experts of 3 x 32 x 40 in each of 2 layers, 2 visited
    assert num_parameters(shape) - num_parameters(shape, active_only=True) == 2 * 2 * 3 * 32 * 40


def test_num_parameters_of_published_models():
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
    }
    shape = ModelShape.from_hf(qwen)  # Qwen3-235B-A22B
    assert (round(num_parameters(shape) / 1e9), round(num_parameters(shape, active_only=True) / 1e9)) == (235, 22)
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
    }
    shape = ModelShape.from_hf(deepseek)  # DeepSeek-V3: 671 B, 37 B active (the embedding, which is looked up, counts as active here)
    assert (round(num_parameters(shape) / 1e9), int(num_parameters(shape, active_only=True) / 1e9)) == (671, 37)


def test_model_shape_is_equal_for_old_and_new_config_form():
    old = {
        **LLAMA,
        "rope_theta": 5e5,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    }
    new = {
        **LLAMA,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    }
    assert ModelShape.from_hf(old) == ModelShape.from_hf(new)
    assert ModelShape.from_hf(old).rope.theta == 5e5
    experts = make_model_config("qwen3_moe")
    count = experts.pop("num_local_experts", None) or experts.pop("num_experts")
    experts.pop("num_experts", None)
    both = [ModelShape.from_hf({**experts, key: count}) for key in ("num_experts", "num_local_experts")]
    assert both[0] == both[1] and both[0].moe.num_experts == 4


@pytest.mark.parametrize("name", ["qwen3_moe_mixed", "deepseek_v3"])
def test_model_shape_expert_layers_equal_transformers(name):
    shape = ModelShape.from_hf(make_model_config(name))
    expected = {"qwen3_moe_mixed": (False, False, False, True), "deepseek_v3": (False, True)}[name]
    assert shape.moe.layers == expected
    for layer, moe in enumerate(expected):
        assert any(hf.startswith(f"model.layers.{layer}.mlp.experts.") for hf in hf_shapes(shape)) == moe


def test_unknown_architecture_is_refused_by_name_with_the_known_ones():
    known = r"FalconForCausalLM is not supported. Supported: DeepseekV3ForCausalLM, Gemma3ForCausalLM,.*adding-a-model"
    with pytest.raises(ConfigError, match=known):
        ModelShape.from_hf({**LLAMA, "architectures": ["FalconForCausalLM"]})
    with pytest.raises(ConfigError, match="without `architectures`"):
        ModelShape.from_hf({"hidden_size": 4})


def test_model_shape_with_unsupported_layers_is_rejected_with_reason():
    name = "Glm4vMoeForConditionalGeneration"
    with pytest.raises(ConfigError, match=rf"{name} is not supported: its vision tower .* GLM-4.5 \(Glm4MoeForCausalLM\)\.$"):
        ModelShape.from_hf({**LLAMA, "architectures": [name]})


# As transformers counts the parameters of the config classes' own defaults.
HYBRIDS = {
    "Qwen3NextForCausalLM": (48, dict(hidden_size=2048, intermediate_size=5632, vocab_size=151936), 79_674_391_296),
    "Qwen3_5ForCausalLM": (32, dict(hidden_size=4096, intermediate_size=12288, vocab_size=248320), 8_953_803_264),
    "Qwen3_5MoeForCausalLM": (40, dict(hidden_size=2048, vocab_size=248320), 34_660_610_688),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_model_shape_has_defaults_of_its_config_class(name):
    layers, sizes, parameters = HYBRIDS[name]
    shape = ModelShape.from_hf({"architectures": [name], "num_hidden_layers": layers, "num_attention_heads": 16, **sizes})
    assert num_parameters(shape) == parameters
    assert (shape.num_attention_layers, shape.rope.dim, shape.head_dim, shape.has_zero_centered_norms) == (layers // 4, 64, 256, True)
    assert [i for i in range(layers) if not shape.is_delta_net_layer(i)] == list(range(3, layers, 4))
    assert shape.moe is None or (shape.moe.norm_topk_prob and shape.moe.has_shared_gate)


# The text model's part of config.json of Qwen3.6 and 3.8, but for sizes, and the vision tower's.
ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
TEXT = dict(attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
            full_attention_interval=4, head_dim=256, hidden_act="silu", initializer_range=0.02, linear_conv_kernel_dim=4,
            linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128, mamba_ssm_dtype="float32",
            max_position_embeddings=262144, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, output_gate_type="swish",
            partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_parameters=ROPE, tie_word_embeddings=False, use_cache=True,
            vocab_size=248320)  # fmt: skip
TOWER = dict(deepstack_visual_indexes=[], depth=27, hidden_act="gelu_pytorch_tanh", hidden_size=1152, in_channels=3, intermediate_size=4304,
             num_heads=16, num_position_embeddings=2304, patch_size=16, spatial_merge_size=2, temporal_patch_size=2)  # fmt: skip
MOE_OF_3_6 = dict(
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512, mlp_only_layers=[]
)
# name -> (architecture, number of layers, sizes, parameters as transformers counts them). The published files of Qwen3.8-27B have
# 55,562,855,904 bytes: two for each of these, and for 424,699,392 of `mtp.*`.
PUBLISHED = {
    "Qwen3.6-35B-A3B": ("Qwen3_5MoeForConditionalGeneration", 40, dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=2,
                        linear_num_value_heads=32, **MOE_OF_3_6), 35_107_181_936),
    "Qwen3.8-27B": ("Qwen3_5ForConditionalGeneration", 64, dict(hidden_size=5120, num_attention_heads=24, num_key_value_heads=4,
                    linear_num_value_heads=48, intermediate_size=17408), 27_356_728_560),
    "Qwen3.8-2.4T-A95B": ("Qwen3_5MoeForCausalLM", 92, dict(hidden_size=8192, num_attention_heads=64, num_key_value_heads=4,
                          linear_num_value_heads=128, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=2048,
                          shared_expert_intermediate_size=2048), 2_419_804_697_984),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_hybrid_model_shapes_of_published_configs(name):
    architecture, layers, sizes, parameters = PUBLISHED[name]
    kinds = [("linear_attention", "full_attention")[(layer + 1) % 4 == 0] for layer in range(layers)]
    text = {**TEXT, **sizes, "num_hidden_layers": layers, "layer_types": kinds}
    config = {"architectures": [architecture], "image_token_id": 248056, "tie_word_embeddings": False, "text_config": text,
              "vision_config": {**TOWER, "out_hidden_size": text["hidden_size"]}}  # fmt: skip
    shape = ModelShape.from_hf(config if architecture.endswith("Generation") else {"architectures": [architecture], **text})
    assert num_parameters(shape) == parameters
    assert (shape.rope.theta, shape.rope.dim, shape.num_attention_layers) == (1e7, 64, layers // 4)


@pytest.mark.parametrize(("changes", "message"), [
    ({"attn_output_gate": False}, r"attn_output_gate is False, which is not supported\. Leave it out, or use true\."),
    ({"output_gate_type": "sigmoid"}, r"output_gate_type is 'sigmoid', which transformers ignores\."),
    ({"layer_types": ["full_attention"] * 3}, r"layer_types must name linear_attention or full_attention for each of 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, r"layer_types must name linear_attention or full_attention for each of 4 layers"),
    ({"layer_types": ["linear_attention"] * 4}, r"none of the 4 layers has full_attention, without which transformers"),
    ({"linear_num_value_heads": 10}, r"linear_num_value_heads \(10\) must be a multiple of linear_num_key_heads \(4\)\."),
])  # fmt: skip
def test_hybrid_model_shape_with_unsupported_config_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf(make_model_config("qwen3_5") | changes)


def test_hybrid_model_shape_reads_layer_types_and_text_rope():
    config = make_model_config("qwen3_5")
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config |= {"layer_types": ["full_attention", "linear_attention", *["full_attention"] * 2], "rope_parameters": rope}
    shape = ModelShape.from_hf(config)
    assert [shape.is_delta_net_layer(i) for i in range(4)] == [False, True, False, False]
    assert (shape.rope.theta, shape.rope.dim, shape.rope.sections) == (1e7, 4, ())


def test_model_shape_reports_all_problems_together():
    config = {**LLAMA, "hidden_act": "gelu", "quantization_config": {"bits": 4}, "vocab_size": None, "num_hidden_layers": 0}
    with pytest.raises(ConfigError) as error:
        ModelShape.from_hf(config)
    assert len(error.value.problems) == 4
    assert all(word in str(error.value) for word in ("gelu", "quantized", "vocab_size", "num_hidden_layers"))


def test_model_shape_missing_family_key_is_rejected_by_name():
    config = make_model_config("deepseek_v3")
    del config["kv_lora_rank"]
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM needs kv_lora_rank"):
        ModelShape.from_hf(config)


@pytest.mark.parametrize(
    "rope,word",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "longrope"}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"type": "default", "mrope_section": [1, 1]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_model_shape_with_unsupported_rope_is_rejected(rope, word):
    with pytest.raises(ConfigError, match=word):
        ModelShape.from_hf({**LLAMA, "rope_scaling": rope})


def test_heads_must_be_a_multiple_of_groups():
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"):
        ModelShape.from_hf({**LLAMA, "num_key_value_heads": 3})


QWEN = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 16}


@pytest.mark.parametrize(
    "config,window",
    [
        (QWEN, None),
        ({**QWEN, "use_sliding_window": True}, None),  # 28 layers come before the first windowed one
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 1}, 16),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ["full_attention"] * 2}, None),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}, 4096),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": None}, None),
    ],
)
def test_model_shape_window_applies_to_windowed_layers_only(config, window):
    shape = ModelShape.from_hf(config)
    assert shape.sliding_window == window and not (config is QWEN and shape.windows)


def test_model_shape_windows_equal_transformers_layers():
    from transformers import AutoConfig

    for name in ("olmo3", "gemma3"):
        silent = {key: value for key, value in make_model_config(name).items() if key not in ("layer_types", "rope_parameters")}
        kinds = AutoConfig.for_model(**silent).layer_types
        windows = tuple(9 if kind == "sliding_attention" else None for kind in kinds)
        assert ModelShape.from_hf(silent).windows == ModelShape.from_hf({**silent, "layer_types": kinds}).windows == windows
        assert {9, None} == set(windows)
    part = ModelShape.from_hf({**QWEN, "use_sliding_window": True, "max_window_layers": 1})
    assert part.windows == (None, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 32}, {"hidden_size", "head_dim", "rope.dim"}),
        ({"rms_norm_eps": 1e-5}, {"norm_epsilon"}),
        ({"rope_theta": 5e5}, {"rope.theta"}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope.type", "rope.factor"}),
        ({"max_position_embeddings": 8192}, set()),
        ({"pad_token_id": 5}, set()),
    ],
)
def test_flat_values_name_each_difference_of_two_shapes(change, named):
    mine, other = (flat_values(ModelShape.from_hf(config)) for config in (LLAMA, LLAMA | change))
    assert {name for name in {**mine, **other} if mine.get(name) != other.get(name)} == named
    assert json.loads(json.dumps(other)) == other


@pytest.mark.parametrize(("pad", "padding_idx"), [({}, None), ({"pad_token_id": 0}, 0), ({"pad_token_id": -1}, LLAMA["vocab_size"] - 1)])
def test_model_shape_padding_idx_equals_transformers(pad, padding_idx):
    assert ModelShape.from_hf(LLAMA | pad).padding_idx == padding_idx
