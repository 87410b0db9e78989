"""Layouts that Megatron-Core rejects, reported before it is called."""

from __future__ import annotations

import pytest

from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.policy import machine_problems, problems
from megatron_grpo.run.config.settings import Config
from tests.unit.weights.tiny import make_model_config

PP, VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
DENSE = ModelShape.from_hf({**make_model_config("qwen3"), "num_hidden_layers": 12, "layer_types": None})
EXPERTS = ModelShape.from_hf(make_model_config("qwen3_moe"))


def make_config(**settings) -> Config:
    return Config().with_values(settings)


def list_messages(found) -> list[str]:
    return [problem.message for problem in found]


@pytest.mark.parametrize(("shape", "settings", "words"), [
    (EXPERTS, {"moe_token_dispatcher_type": "allgather", PP: 2}, "alltoall only"),
    (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["core_atn"]}, "Unsupported recompute_modules core_atn"),
    (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "no experts"),
    (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "no latent attention"),
    (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["layernorm"], "transformer_impl": "local"}, "Transformer Engine"),
])  # fmt: skip
def test_layout_rejected_by_megatron_is_reported(shape, settings, words):
    (message,) = list_messages(problems(make_config(**settings), shape))
    assert words in message


@pytest.mark.parametrize("settings", [
    {"moe_token_dispatcher_type": "allgather", PP: 2},  # nothing is dispatched
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5, PP: 2},
])  # fmt: skip
def test_layout_without_experts_is_accepted(settings):
    assert problems(make_config(**settings), DENSE) == []


@pytest.mark.parametrize(("layout", "size", "works"), [
    ({}, 5, [4, 6]),
    ({PP: 2}, 4, [3, 6]),
    ({PP: 2, VPP: 2}, 2, [1, 3]),
    ({PP: 2, FIRST: 4, LAST: 8}, 8, [4]),
    ({PP: 4, FIRST: 2, LAST: 2}, 4, [2]),
])  # fmt: skip
def test_recompute_num_layers_must_divide_layers_of_a_chunk(layout, size, works):
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    (problem,) = problems(make_config(**layout, **full, recompute_num_layers=size), DENSE)
    assert problem.nearest["recompute_num_layers"] == works
    for good in works:
        assert problems(make_config(**layout, **full, recompute_num_layers=good), DENSE) == []


@pytest.mark.parametrize(("settings", "words"), [
    ({"transformer_impl": "transformer_engine"}, "not installed"),
    ({"optimizer_cpu_offload": True}, "no GPU found"),
    ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, "not installed"),
])  # fmt: skip
def test_machine_problems_are_not_reported_by_plan(settings, words):
    cfg = make_config(**settings)
    (message,) = list_messages(machine_problems(cfg, has_gpu=False, has_transformer_engine=False))
    assert words in message
    assert machine_problems(cfg, has_gpu=True, has_transformer_engine=True) == []
    assert problems(cfg, DENSE) == []
