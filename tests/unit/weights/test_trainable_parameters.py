"""Trainable parameters selected by name, by hand; and selections that Megatron cannot freeze."""

from __future__ import annotations

import pytest

from megatron_grpo.core.settings import TunerConfig
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.names import hf_shapes
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.trainable_parameters import parameter_trains, trains
from megatron_grpo.run.config.rules.tuner import freezing_problems
from tests.unit.weights.tiny import make_model_config

QKV = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")


def make_tuner(**changes) -> TunerConfig:
    return TunerConfig(**changes)


def make_shape(name: str) -> ModelShape:
    return ModelShape.from_hf(make_model_config(name))


def find_trainable(model: str, **changes) -> set[str]:
    """Of the tensors of the first layer and outside the layers, without `model.layers.0.`."""
    rule = trains(make_tuner(**changes))
    return {name.removeprefix("model.layers.0.") for name in hf_shapes(make_shape(model)) if "layers.1." not in name and rule(name)}


def test_trainable_parameters_default_to_all_and_to_none_with_adapter():
    assert len(find_trainable("llama")) == len(hf_shapes(make_shape("llama"))) - 9
    assert find_trainable("llama", tuner_type="lora") == set()


def test_freeze_parameters_match_prefix_and_regex_matches_anywhere():
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert find_trainable("llama", freeze_parameters=["model.layers."]) == outside
    assert find_trainable("llama", freeze_parameters=["layers"]) == find_trainable("llama")  # inside a name: no prefix
    assert find_trainable("llama", freeze_parameters_regex=r"_proj\.|lm_head") == (outside | norms) - {"lm_head.weight"}


def test_trainable_parameters_override_freeze_parameters():
    assert find_trainable("llama", freeze_parameters=["model", "lm_head"], trainable_parameters=["model.norm"]) == {"model.norm.weight"}
    both = dict(freeze_parameters_regex=".", trainable_parameters=["lm_head"], trainable_parameters_regex=r"mlp\.down")
    assert find_trainable("llama", **both) == {"lm_head.weight", "mlp.down_proj.weight"}
    assert find_trainable("llama", trainable_parameters=["lm_head"]) == find_trainable("llama")  # nothing was frozen


def test_fused_megatron_parameter_is_trainable_with_its_tensors():
    rule = trains(make_tuner(freeze_parameters_regex="self_attn|mlp.experts.2"))
    weights = WeightMap.for_shape(make_shape("qwen3_moe"), padded_vocab_size=53)
    assert weights.hf_names("decoder.layers.0.self_attention.linear_qkv.weight") == QKV

    def of(name: str) -> bool:
        return parameter_trains(weights.hf_names(name), rule)

    assert not of("decoder.layers.0.self_attention.linear_qkv.weight") and of("decoder.layers.0.mlp.router.weight")
    experts = [of(f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight") for e in range(4)]
    assert experts == [True, True, False, True]
    with pytest.raises(ValueError, match="q_proj.weight, .*k_proj.weight, .* are one parameter; a part of it cannot train separately"):
        parameter_trains(QKV, trains(make_tuner(freeze_parameters_regex="q_proj")))


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("llama", dict(freeze_parameters_regex="q_proj"),
         f"{QKV[0]} would be frozen and {QKV[1]}, {QKV[2]} would train, but Megatron stores them as one parameter "
         "(decoder.layers.0.self_attention.linear_qkv.weight), which trains completely or not at all. 1 more are split in this way."),
        ("llama", dict(freeze_parameters=["model"], trainable_parameters_regex=r"layers\.1\.mlp\.up", trainable_parameters=["lm_head"]),
         "model.layers.1.mlp.gate_proj.weight would be frozen and model.layers.1.mlp.up_proj.weight would train"),
        ("llama", dict(freeze_parameters=["model", "lm_head"]), "freeze_parameters freeze every weight of the model. Select"),
        ("deepseek_v3", dict(freeze_parameters=["model", "lm_head"], trainable_parameters_regex="e_score_correction_bias"),
         "freeze every weight of the model"),
        ("llama", dict(freeze_parameters=["decoder.layers.0.self_attention.linear_proj"]),
         "no tensor of this model begins with decoder.layers.0.self_attention.linear_proj. This is a Megatron module name; "
         "the Hugging Face name is model.layers.0.self_attn.o_proj.weight."),
        ("llama", dict(freeze_parameters=["model.layers.7."]),
         "Names begin with model.embed_tokens, model.norm, lm_head.weight, model.layers."),
        ("llama_tied", dict(freeze_parameters=["lm_head"]),
         "The head is tied to the embedding (tie_word_embeddings): use model.embed_tokens.weight"),
        ("llama", dict(freeze_parameters_regex="linear_fc1"), "freeze_parameters_regex (linear_fc1) matches no tensor of this model."),
        ("llama", dict(freeze_parameters=["model"], trainable_parameters_regex="router"),
         "trainable_parameters_regex (router) matches no tensor"),
        ("qwen2", dict(freeze_parameters_regex=r"_proj\.weight"),
         "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.bias would train"),
    ],
)  # fmt: skip
def test_freezing_part_of_a_fused_parameter_is_rejected_with_names(model, changes, says):
    (problem,) = freezing_problems(make_tuner(**changes), make_shape(model))
    assert says in problem.message
    assert set(problem.flags) <= set(changes)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {}),
        ("llama", dict(freeze_parameters=["model.embed_tokens", "model.layers.0."])),
        ("qwen2", dict(freeze_parameters_regex=r"_proj\.bias")),
        ("qwen3_moe", dict(freeze_parameters_regex=r"\.gate\.")),
        ("qwen3_moe", dict(freeze_parameters_regex=r"experts\.[02]\.")),
        ("deepseek_v3", dict(freeze_parameters_regex=r"q_[ab]_|shared_experts")),
        ("llama", dict(tuner_type="lora", freeze_parameters=["nothing of this"])),
    ],
)
def test_freezing_whole_parameters_is_accepted(model, changes):
    assert freezing_problems(make_tuner(**changes), make_shape(model)) == []
