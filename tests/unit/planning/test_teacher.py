"""A teacher model on the training ranks, as `plan` sees it: layout, settings, memory and work."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.planning.command import make_plan
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.models import config_of_teacher
from megatron_grpo.run.schedule import schedule_run
from tests.checked import check
from tests.unit.planning.test_estimates import MATRICES, TINY

DEEP = dict(num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, hidden_size=12, intermediate_size=18)
EXPERTS = dict(
    architectures=["Qwen3MoeForCausalLM"], num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    num_attention_heads=4, num_key_value_heads=2, decoder_sparse_step=1,
)  # fmt: skip
TP, PP, EP = "--tensor_model_parallel_size", "--pipeline_model_parallel_size", "--expert_model_parallel_size"
VPP = "--virtual_pipeline_model_parallel_size"


@pytest.fixture
def plan(tmp_path):
    """Of a student of four layers and this teacher."""

    def make(*argv, **teacher):
        for name, shape in (("student", {}), ("teacher", teacher)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(TINY | dict(num_attention_heads=4, num_key_value_heads=2) | shape))
        sizes = ["--world_size", "8", "--micro_batch_size", "2", "--global_batch_size", "64"]
        return make_plan(
            schedule_run(check(["--model", str(tmp_path / "student"), "--teacher_model", str(tmp_path / "teacher"), *sizes, *argv]))
        )

    return make


@pytest.mark.parametrize(
    ("words", "teacher", "sentence"),
    [
        ([TP, "4"], DEEP, ": must divide the teacher's num_attention_heads (6): 6 = 1 x 4 + 2. Use tensor_model_parallel_size 2"),
        ([PP, "4"], DEEP, "the teacher's 6 layers must be a multiple of pipeline_model_parallel_size (4): 6 = 1 x 4 + 2"),
        ([PP, "2", VPP, "2"], DEEP, "the teacher's 6 layers must be a multiple of pipeline_model_parallel_size (2) x virtual"),
        ([EP, "4"], EXPERTS, "the teacher's 6 experts must be a multiple of expert_model_parallel_size (4): 6 = 1 x 4 + 2"),
        ([EP, "2"], DEEP, "must be 1: neither the model nor the teacher has experts"),
        ([TP, "2"], EXPERTS, "a mixture-of-experts teacher with tensor_model_parallel_size (2) scores with sequence_parallel true only"),
        ([], dict(vocab_size=9), "has 9 token IDs, fewer than the policy (10)"),
        ([], dict(max_position_embeddings=64), "teacher_model: sequences of up to 257 tokens are longer than the model's max_position"),
        ([], dict(architectures=["BertModel"]), "teacher_model: "),
    ],
)
def test_teacher_layout_that_does_not_divide_is_rejected_with_arithmetic(plan, words, teacher, sentence):
    with pytest.raises(ConfigError) as caught:
        plan(*words, **teacher)
    assert any(sentence in problem.message for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("words", "teacher"),
    [
        ([PP, "2"], DEEP),
        ([PP, "2", "--decoder_first_pipeline_num_layers", "1"], DEEP),
        ([PP, "2", VPP, "2", "--pipeline_model_parallel_layout", "Et|tt|t|L"], dict(num_hidden_layers=8)),
        ([EP, "2"], EXPERTS),
        ([TP, "2", "--sequence_parallel", "true", "--recompute_granularity", "full", "--recompute_method", "uniform",
          "--recompute_num_layers", "4"], DEEP),
        (["--tuner_type", "lora", "--lora_dropout", "0.1", "--temperature", "0.7", "--top_k", "20"], DEEP),
    ],
)  # fmt: skip
def test_teacher_with_compatible_settings_is_planned(plan, words, teacher):
    assert plan(*words, **teacher).memory["stages"][0]["teacher_bytes"] > 0


def test_teacher_config_omits_training_settings_and_balances_deeper_model(plan):
    words = [PP, "2", "--decoder_first_pipeline_num_layers", "1", "--recompute_granularity", "selective", "--tuner_type", "lora"]
    for depth, first in ((4, 1), (6, None)):
        checked = plan(*words, num_hidden_layers=depth).checked
        own = config_of_teacher(checked.config, checked.teacher, checked.shape)
        assert own.parallel.decoder_first_pipeline_num_layers == first and own.parallel.pipeline_model_parallel_size == 2
        assert (own.tuner.tuner_type, own.model.recompute_granularity, own.grpo.beta) == ("full", None, 0.0)


def test_teacher_memory_is_its_weights_in_phases_on_device(plan, tmp_path):
    """In bfloat16 on one stage: as many layers of the student's own matrices, without gradients and moments."""
    same = dict(num_hidden_layers=2)
    words = ["--padded_vocab_multiple", "16", "--offload_model", "false", "--offload_optimizer", "false"]
    stays, leaves = (plan(*words, *more, **same).memory["stages"][0] for more in ([], ["--offload_teacher_model", "true"]))
    matrices = MATRICES + (16 - 8) * 8 * 2 + (8 - 4) * 8 * 2  # four heads of 4 in place of two, two of keys in place of one
    assert stays["teacher_bytes"] == leaves["teacher_bytes"] == 2 * (2 * (matrices + 16) + 8 + 2 * 16 * 8)
    gone = {phase: stays["phases"][phase] - leaves["phases"][phase] for phase in stays["phases"]}
    assert gone == dict.fromkeys(gone, stays["teacher_bytes"]) | {"teacher": 0}
    assert "teacher" not in make_plan(schedule_run(check(["--model", str(tmp_path / "student")]))).memory["stages"][0]["phases"]


def test_teacher_flops_are_one_forward_per_row(plan):
    work = plan("--beta", "0.1").cost["flops_per_rollout"]
    assert work["teacher_logprobs"] == work["reference_logprobs"] > 0  # of the very same shape


def test_teacher_with_config_file_only_is_planned(plan, tmp_path, capsys):
    plan()
    both = ["--model", str(tmp_path / "student" / "config.json"), "--teacher_model", str(tmp_path / "teacher" / "config.json")]
    assert main(["plan", "--json", *both]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["stages"][0]["teacher_bytes"] > 0
    assert main(["plan", *both[:2], "--teacher_model", "nowhere"]) == 2
    assert "teacher_model (nowhere) is neither a local directory nor a Hub name" in " ".join(capsys.readouterr().err.split())
