"""Layouts that fit a model: the arithmetic in messages, and agreement with the shards that can be made."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.names import hf_shapes
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.layout import layout_problems, length_problems
from tests.unit.weights.tiny import CHECKPOINTS, make_model_config


def test_layout_problem_shows_arithmetic_and_nearest_sizes():
    shape = ModelShape.from_hf(make_model_config("qwen3"))  # 8 heads, 4 groups, ffn 40
    heads, ffn, groups = layout_problems(shape, tp=3)
    assert str(heads) == ("tensor_model_parallel_size (3): must divide the model's num_attention_heads (8): 8 = 2 x 3 + 2. Use 2 or 4.")
    assert "40 = 13 x 3 + 1" in str(ffn) and "num_key_value_heads (4) or be a multiple" in str(groups)
    assert heads.flags == ("tensor_model_parallel_size",) and heads.nearest == {"tensor_model_parallel_size": [2, 4]}


def test_layout_of_experts_uses_expert_parallel_sizes():
    shape = ModelShape.from_hf(make_model_config("qwen3_moe"))  # 4 experts of width 16, all layers: the dense width never matters
    assert layout_problems(shape, tp=4, ep=4, etp=4) == []
    experts, width = layout_problems(shape, ep=3, etp=3)
    assert "4 = 1 x 3 + 1" in str(experts) and "16 = 5 x 3 + 1" in str(width)
    dense = layout_problems(ModelShape.from_hf(make_model_config("llama")), ep=2, etp=2)
    assert [problem.nearest for problem in dense] == [{"expert_model_parallel_size": [1]}, {"expert_tensor_parallel_size": [1]}]


@pytest.mark.parametrize("tp", range(1, 17))
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_layout_problems_agree_with_weight_sharding(name, tp):
    shape = ModelShape.from_hf(make_model_config(name))
    weights = WeightMap.for_shape(shape, padded_vocab_size=-(-shape.vocab_size // tp) * tp)
    tensors = {hf_name: torch.empty(size, device="meta") for hf_name, size in hf_shapes(shape).items()}
    fits = not layout_problems(shape, tp=tp)
    try:
        for parameter in weights.megatron_names():
            weights.load(parameter, tensors.__getitem__, tp_size=tp)
    except ConfigError:
        assert not fits


def test_length_above_window_is_accepted_and_above_max_positions_rejected():
    shape = ModelShape.from_hf({**make_model_config("mistral"), "sliding_window": 32})
    assert length_problems(shape, 64) == []
    (problem,) = length_problems(shape, 65)
    assert "max_position_embeddings (64)" in str(problem)


def test_length_above_yarn_rope_is_rejected():
    yarn = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 17, "rope_theta": 1e4}
    shape = ModelShape.from_hf({**make_model_config("qwen3"), "rope_parameters": yarn})
    assert length_problems(shape, 42) == []
    (problem,) = length_problems(shape, 43)
    assert "YaRN rope (42 =" in str(problem)


def test_layout_with_full_width_norm_needs_a_group_per_rank():
    shape = ModelShape.from_hf({**make_model_config("olmo2"), "num_key_value_heads": 2})
    (problem,) = layout_problems(shape, tp=4)
    assert "num_key_value_heads (2), because its key norm covers all heads. Use 2" in str(problem)
