"""Layers per pipeline chunk, by hand and against Megatron-Core, and layouts that it rejects."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.core.settings import ParallelConfig
from megatron_grpo.run.config.rules.stages import expand_layout, layer_counts, problems
from megatron_grpo.run.config.settings import Config
from tests.ranks import run_ranks

PP, VPP, LAYOUT = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CASES = {  # layers, settings, by hand
    "even": (8, {PP: 2}, [[4, 4]]),
    "interleaved": (8, {PP: 2, VPP: 2}, [[2, 2], [2, 2]]),
    "ends": (8, {PP: 3, FIRST: 1, LAST: 3}, [[1, 4, 3]]),
    "embedding": (7, {PP: 4, EMBEDDING: True}, [[1, 2, 2, 2]]),
    "embedding and loss": (10, {PP: 3, EMBEDDING: True, LOSS: True}, [[3, 4, 3]]),
    "both, interleaved": (10, {PP: 2, VPP: 3, EMBEDDING: True, LOSS: True}, [[1, 2], [2, 2], [2, 1]]),
    "standalone": (2, {PP: 4, EMBEDDING: True, LOSS: True}, [[0, 1, 1, 0]]),
    "laid out": (6, {PP: 3, LAYOUT: "Et|t*3|ttL"}, [[1, 3, 2]]),
    "laid out, interleaved": (8, {PP: 2, VPP: 2, LAYOUT: "Ett,|(t|)*2tt,ttL"}, [[2, 1], [1, 4]]),
}


@pytest.mark.parametrize("name", CASES)
def test_stage_layer_counts_by_hand(name):
    layers, settings, expected = CASES[name]
    assert layer_counts(ParallelConfig(**settings), layers) == expected
    assert sum(map(sum, expected)) == layers and list(problems(Config().with_values(settings), layers)) == []


def test_stage_layer_counts_equal_megatron():
    def body(rank, world_size):
        from functools import partial

        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_block import get_num_layers_to_build

        from megatron_grpo.core.policy.model_config import transformer_config
        from megatron_grpo.core.settings import ModelConfig
        from megatron_grpo.core.weights.shape import ModelShape

        hf = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}  # fmt: skip
        for name, (layers, settings, expected) in CASES.items():
            layout = ParallelConfig(**settings)
            config = transformer_config(ModelShape.from_hf(hf | {"num_hidden_layers": layers}), ModelConfig(), layout, use_te=False)
            vpp = settings.get(VPP)
            parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
            laid_out = config.pipeline_model_parallel_layout
            counted = laid_out.get_num_layers_to_build if laid_out else partial(get_num_layers_to_build, config)
            stages = range(settings[PP])
            theirs = [[counted(vp_stage=chunk if vpp else None, pp_rank=stage) for stage in stages] for chunk in range(vpp or 1)]
            parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
            assert theirs == expected, name

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("layers", "settings", "sentence"),
    [
        (8, {PP: 2, EMBEDDING: True, FIRST: 3}, "both set the layers of the first and last stage"),
        (8, {PP: 2, LAYOUT: "Et*4|t*4L", LOSS: True}, "cannot be combined with account_for_loss_in_pipeline_split"),
        (8, {PP: 2, LAYOUT: "Et*4|t*3L"}, "it has 7 layers (t), and the model has 8"),
        (None, {PP: 2, LAYOUT: "Et*4|Lt*3"}, "end with one loss"),
        (8, {PP: 2, LAYOUT: "Et|t*6|tL|m"}, "multi-token prediction (m) is not supported"),
        (8, {PP: 2, LAYOUT: "Et*2|t*2|t*2|t*2L"}, "Use virtual_pipeline_model_parallel_size 2."),
        (8, {PP: 4, LAYOUT: "Et*4||t*2|t*2L"}, "is empty"),
        (8, {PP: 2, LAYOUT: "E(t*99)*99|L"}, "more than 4096 layers"),
        (8, {PP: 2, "microbatch_group_size_per_vp_stage": 4}, "applies to the interleaved schedule only"),
        (8, {PP: 2, VPP: 2, "microbatch_group_size_per_vp_stage": 3}, "Use 2 or 4."),
    ],
)
def test_stage_layout_rejected_by_megatron_gives_one_problem(layers, settings, sentence):
    [problem] = problems(Config().with_values(settings), layers)
    assert sentence in problem.message, problem.message


def test_stage_layout_expands_as_in_megatron():
    assert expand_layout("Et*2|(t|)*2L") == ["Ett", "t", "t", "L"] and expand_layout("Et,t|tL") == ["Ett", "tL"]


def test_stage_layout_settings_without_pipeline_are_rejected_with_valid_sizes(tmp_path):
    from megatron_grpo.core.base.errors import ConfigError
    from tests.checked import check

    model = tmp_path / "config.json"
    model.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
                                 "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "vocab_size": 64,
                                 "max_position_embeddings": 4096}))  # fmt: skip
    asked = ["--model", str(model), f"--{LOSS}", "--world_size", "6", "--num_generations", "4", "--global_batch_size", "48"]
    with pytest.raises(ConfigError, match=f"{LOSS} needs {PP} above 1"):
        check(asked)
    with pytest.raises(ConfigError) as found:
        check([*asked, f"--{PP}", "2"])
    assert found.value.problems[0].nearest == {PP: [3]} and "9 = 4 x 2 + 1" in found.value.problems[0].message
    assert check([*asked, f"--{PP}", "3"])
