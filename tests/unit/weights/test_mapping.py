"""Hugging Face -> Megatron shards -> Hugging Face, for every family, layout and naming, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.mapping import WeightMap, with_global_numbers
from megatron_grpo.core.weights.names import ShardSplit, hf_shapes
from megatron_grpo.core.weights.shape import ModelShape
from tests.unit.weights.tiny import CHECKPOINTS, make_model_config, write_checkpoint

LAYOUTS = [(1, 1), (2, 1), (4, 2)]  # (TP, expert TP)
CASES = [(name, *layout) for name in CHECKPOINTS for layout in LAYOUTS if "tp1" not in name or layout == (1, 1)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    made = {}

    def get(name: str) -> HfReader:
        if name not in made:
            made[name] = HfReader(write_checkpoint(name, tmp_path_factory.mktemp(name)))
        return made[name]

    return get


def make_shards(weights: WeightMap, name: str, read, tp: int, expert_tp: int) -> list[torch.Tensor]:
    ranks = expert_tp if weights.entry(name).is_expert else tp
    return [weights.load(name, read, tp_rank=rank, tp_size=tp, expert_tp_rank=rank, expert_tp_size=expert_tp) for rank in range(ranks)]


@pytest.mark.parametrize("naming", ["local", "transformer_engine"])
@pytest.mark.parametrize("name,tp,expert_tp", CASES)
def test_weight_map_round_trip_is_exact_and_complete(reader, name, tp, expert_tp, naming):
    if (name, naming) == ("gpt_oss", "transformer_engine"):
        pytest.skip("its layers are local ones only")
    source = reader(name)
    weights = WeightMap.for_shape(ModelShape.from_hf(source.config), padded_vocab_size=64, naming=naming)
    weights.check_complete(source.names)
    exported, read_names = {}, set()

    def read(hf_name):
        read_names.add(hf_name)
        return source(hf_name)

    for parameter in weights.megatron_names():
        for hf_name, tensor in weights.export(parameter, make_shards(weights, parameter, read, tp, expert_tp)):
            assert hf_name not in exported, f"{hf_name} is exported twice"
            exported[hf_name] = tensor
    assert exported.keys() == weights.expected_hf_names() == source.names == read_names
    for hf_name, tensor in exported.items():
        assert torch.equal(tensor, source(hf_name)), hf_name


def test_vocabulary_padding_is_zero_and_never_exported(reader):
    source = reader("qwen3")
    weights = WeightMap.for_shape(ModelShape.from_hf(source.config), padded_vocab_size=64)
    shards = make_shards(weights, "output_layer.weight", source, 4, 1)
    assert [tuple(shard.shape) for shard in shards] == [(16, 32)] * 4
    assert not shards[3][53 - 48 :].any()
    shards[3][53 - 48 :] = 1.0  # the optimizer may have moved them
    ((_, tensor),) = weights.export("output_layer.weight", shards)
    assert torch.equal(tensor, source("lm_head.weight"))


def test_weight_map_shards_by_query_group_and_matching_gate_up_halves(reader):
    source = reader("qwen3")  # 8 heads in 4 groups, heads of 6 channels
    weights = WeightMap.for_shape(ModelShape.from_hf(source.config), padded_vocab_size=64)
    q, k, v = (source(f"model.layers.1.self_attn.{p}_proj.weight") for p in "qkv")
    second = weights.load("decoder.layers.1.self_attention.linear_qkv.weight", source, tp_rank=1, tp_size=2)
    groups_2_and_3 = [q[24:36], k[12:18], v[12:18], q[36:48], k[18:24], v[18:24]]
    assert torch.equal(second, torch.cat(groups_2_and_3))
    gate, up = source("model.layers.1.mlp.gate_proj.weight"), source("model.layers.1.mlp.up_proj.weight")
    second = weights.load("decoder.layers.1.mlp.linear_fc1.weight", source, tp_rank=1, tp_size=2)
    assert torch.equal(second, torch.cat([gate[20:], up[20:]]))


def test_tied_output_layer_is_a_copy_of_the_embedding_and_is_exported_once(reader):
    source = reader("qwen2_tied")
    weights = WeightMap.for_shape(ModelShape.from_hf(source.config), padded_vocab_size=56)
    last_stage = weights.load("output_layer.weight", source)
    assert torch.equal(last_stage, weights.load("embedding.word_embeddings.weight", source))
    assert list(weights.export("output_layer.weight", [last_stage])) == []
    assert weights.entry("output_layer.weight").is_copy and "lm_head.weight" not in weights.expected_hf_names()


def test_weight_map_entries_have_shard_split_and_expert_flag():
    shape = ModelShape.from_hf(make_model_config("deepseek_v3"))
    weights = WeightMap.for_shape(shape, padded_vocab_size=64)
    expert = weights.entry("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight")
    assert (expert.is_expert, expert.cut) == (True, ShardSplit.GATED_COLUMN)
    shared = weights.entry("decoder.layers.1.mlp.shared_experts.linear_fc2.weight")
    assert (shared.is_expert, shared.cut) == (False, ShardSplit.ROW)
    assert weights.entry("decoder.layers.1.mlp.router.expert_bias").is_buffer


def test_weight_map_converts_local_layer_numbers_to_global():
    assert (
        with_global_numbers("decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight", first_layer=6, first_expert=4)
        == "decoder.layers.7.mlp.experts.local_experts.4.linear_fc1.weight"
    )
    assert (
        with_global_numbers("decoder.layers.0.mlp.experts.linear_fc2.weight3", first_expert=4)
        == "decoder.layers.0.mlp.experts.linear_fc2.weight7"
    )
    assert (
        with_global_numbers("decoder.layers.0.mlp.linear_fc2.weight", first_layer=2, first_expert=4)
        == "decoder.layers.2.mlp.linear_fc2.weight"
    )
    assert with_global_numbers("embedding.word_embeddings.weight", first_layer=2) == "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_q.weight",
        "decoder.layers.0.mlp.experts.local_experts.4.linear_fc1.weight",
        "mtp.layers.0.weight",
    ],
)
def test_weight_map_unknown_parameter_raises(name):
    weights = WeightMap.for_shape(ModelShape.from_hf(make_model_config("qwen3_moe")), padded_vocab_size=64)
    with pytest.raises(LookupError, match="is not a parameter of Qwen3MoeForCausalLM"):
        weights.entry(name)


def test_weight_map_reports_missing_and_unknown_tensors_together():
    weights = WeightMap.for_shape(ModelShape.from_hf(make_model_config("llama")), padded_vocab_size=53)
    names = set(weights.expected_hf_names()) - {"lm_head.weight"} | {"model.layers.0.self_attn.q_proj.bias"}
    with pytest.raises(ConfigError) as error:
        weights.check_complete(names)
    missing, unknown = error.value.problems
    assert "lacks 1 tensor: lm_head.weight" in str(missing) and "q_proj.bias" in str(unknown)


def test_old_buffers_prediction_layers_and_a_stored_tied_head_are_ignored():
    names = set(hf_shapes(ModelShape.from_hf(make_model_config("deepseek_v3"))))
    deepseek = WeightMap.for_shape(ModelShape.from_hf(make_model_config("deepseek_v3")), padded_vocab_size=53)
    deepseek.check_complete(names | {"model.layers.2.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"})
    with pytest.raises(ConfigError, match="eh_proj"):
        deepseek.check_complete(names | {"model.layers.1.eh_proj.weight"})
    tied = WeightMap.for_shape(ModelShape.from_hf(make_model_config("llama_tied")), padded_vocab_size=53)
    tied.check_complete(set(tied.expected_hf_names()) | {"lm_head.weight"})


def test_weight_map_load_of_wrong_shape_raises_with_both_shapes(reader):
    source = reader("llama")
    weights = WeightMap.for_shape(ModelShape.from_hf({**source.config, "intermediate_size": 44}), padded_vocab_size=53)
    with pytest.raises(ConfigError, match=r"gate_proj.weight has shape \(40, 32\) in the checkpoint.*\(44, 32\)"):
        weights.load("decoder.layers.0.mlp.linear_fc1.weight", source)


def test_weight_map_load_of_indivisible_size_raises_with_arithmetic(reader):
    weights = WeightMap.for_shape(ModelShape.from_hf(reader("llama").config), padded_vocab_size=53)
    with pytest.raises(ConfigError, match=r"40 = 13 x 3 \+ 1"):
        weights.load("decoder.layers.0.mlp.linear_fc2.weight", reader("llama"), tp_size=3)
    with pytest.raises(ConfigError, match=r"53 = 26 x 2 \+ 1"):
        weights.load("embedding.word_embeddings.weight", reader("llama"), tp_size=2)


@settings(max_examples=60)
@given(
    groups=st.integers(1, 5),
    heads_per_group=st.integers(1, 5),
    half_head=st.integers(1, 3),
    ffn=st.integers(1, 7),
    tp=st.integers(1, 4),
    vocab=st.integers(1, 40),
    tied=st.booleans(),
    biases=st.booleans(),
)
def test_weight_map_of_any_divisible_shape_round_trips(groups, heads_per_group, half_head, ffn, tp, vocab, tied, biases):
    shape = ModelShape.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "hidden_size": 3,
            "head_dim": 2 * half_head,
            "num_attention_heads": groups * heads_per_group * tp,
            "num_key_value_heads": groups * tp,
            "vocab_size": vocab,
            "intermediate_size": ffn * tp,
            "tie_word_embeddings": tied,
            "attention_bias": biases,
            "mlp_bias": biases,
        }
    )
    weights = WeightMap.for_shape(shape, padded_vocab_size=-(-vocab // tp) * tp)
    source = {name: torch.rand(size) for name, size in hf_shapes(shape).items()}
    exported = dict(
        pair for name in weights.megatron_names() for pair in weights.export(name, make_shards(weights, name, source.__getitem__, tp, 1))
    )
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


@pytest.mark.parametrize("naming,expert", [("local", "local_experts.{}.linear_fc1.weight"), ("transformer_engine", "linear_fc1.weight{}")])
def test_expert_ranks_and_stages_together_hold_every_parameter_once(reader, naming, expert):
    source = reader("qwen3_moe")  # 2 layers of 4 experts on 2 stages and 2 expert ranks
    weights = WeightMap.for_shape(ModelShape.from_hf(source.config), padded_vocab_size=64, naming=naming)
    held = []
    for stage in range(2):
        for expert_rank in range(2):
            for local in range(2):
                here = f"decoder.layers.0.mlp.experts.{expert.format(local)}"
                name = with_global_numbers(here, first_layer=stage, first_expert=2 * expert_rank)
                gate = source(f"model.layers.{stage}.mlp.experts.{2 * expert_rank + local}.gate_proj.weight")
                assert torch.equal(weights.load(name, source)[: len(gate)], gate)
                held.append(name)
    assert sorted(held) == sorted(name for name in weights.megatron_names() if weights.entry(name).is_expert and "linear_fc1" in name)


def test_weight_map_check_held_reports_missing_parameters():
    weights = WeightMap.for_shape(ModelShape.from_hf(make_model_config("llama_all_biases")), padded_vocab_size=64)
    names = set(weights.megatron_names())
    weights.check_held(names)
    with pytest.raises(ValueError, match="needs 2 parameters that no Megatron module has: decoder.layers.0.self_attention.linear_proj"):
        weights.check_held({name for name in names if not name.endswith("linear_proj.bias")})
