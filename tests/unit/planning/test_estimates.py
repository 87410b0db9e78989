"""Memory and cost estimates by hand. Exact bytes of real tensors are in tests/distributed/test_plan_memory.py."""

from __future__ import annotations

import json
import shlex
from collections import Counter

import pytest

from megatron_grpo.commands.planning.command import make_plan
from megatron_grpo.commands.planning.cost import count_flops
from megatron_grpo.commands.planning.parameters import TrainableSpec, layers_of_stage
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.lora import LoraSettings
from megatron_grpo.run.metrics.records import write_table
from megatron_grpo.run.schedule import schedule_run
from megatron_grpo.run.sharing import read_lengths
from tests.checked import check

TINY = dict(
    architectures=["LlamaForCausalLM"],
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=10,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
# Of one layer: query 8x8, key and value 4x8 each, output 8x8, gate and up 16x8 each, down 8x16; two norms of 8.
MATRICES = 64 + 32 + 32 + 64 + 128 + 128 + 128


@pytest.fixture
def made(tmp_path):
    def make(*argv, **changes):
        (tmp_path / "config.json").write_text(json.dumps(TINY | changes))
        return make_plan(schedule_run(check(["--model", str(tmp_path), *map(str, argv)])))

    return make


def test_memory_of_weights_gradients_and_optimizer_by_hand(made):
    [stage] = made("--padded_vocab_multiple", 16).memory["stages"]
    parameters = 4 * (MATRICES + 16) + 8 + 2 * 16 * 8
    assert stage["num_parameters"] == parameters
    assert (stage["weights_bytes"], stage["gradients_bytes"], stage["optimizer_bytes"]) == (2 * parameters, 4 * parameters, 12 * parameters)
    [stage] = made("--padded_vocab_multiple", 16, "--torch_dtype", "float32").memory["stages"]
    assert (stage["weights_bytes"], stage["optimizer_bytes"]) == (4 * parameters, 8 * parameters)


def test_reference_model_memory_counts_only_with_beta(made):
    assert made().memory["stages"][0]["reference_bytes"] == 0
    stage = made("--beta", 0.1).memory["stages"][0]
    assert stage["reference_bytes"] == stage["weights_bytes"]


def test_memory_of_distributed_optimizer_is_divided_by_dp_ranks(made):
    one, four = (made("--world_size", n, "--num_generations", 4).memory["stages"][0] for n in (1, 4))
    assert one["optimizer_bytes"] / 4.2 < four["optimizer_bytes"] < one["optimizer_bytes"] / 3.5
    whole = made("--world_size", 4, "--num_generations", 4, "--use_distributed_optimizer", "false").memory["stages"][0]
    assert whole["optimizer_bytes"] == one["optimizer_bytes"]


def test_pipeline_stage_layers_equal_megatron(made):
    uneven = made("--world_size", 2, "--pipeline_model_parallel_size", 2, "--decoder_first_pipeline_num_layers", 1).checked
    assert [layers_of_stage(4, uneven.config, stage) for stage in (0, 1)] == [[0], [1, 2, 3]]
    chunked = made("--world_size", 2, "--pipeline_model_parallel_size", 2, "--virtual_pipeline_model_parallel_size", 2).checked
    assert [layers_of_stage(4, chunked.config, stage) for stage in (0, 1)] == [[0, 2], [1, 3]]


def count_work(found, tokens, *, head_positions):
    checked = found.checked
    return count_flops(
        checked.shape, TrainableSpec.from_config(checked.config, checked.shape), tokens, squares=tokens**2, head_positions=head_positions
    )


def test_flops_estimate_by_hand(made):
    # 3 prompt and 2 completion tokens: 4 layers of matrices and of attention (2 heads of 4 channels), the output layer at 2 positions.
    linears, attention = 2 * 4 * MATRICES * 5 + 2 * 2 * 8 * 10, 4 * 25 * (8 + 8)
    full = count_work(made(), 5, head_positions=2)
    assert full.forward == linears + attention and full.backward == 2 * full.forward
    lora = count_work(made("--tuner_type", "lora", "--lora_rank", 3), 5, head_positions=2)
    # Rows and columns of each linear, times the modules that it fuses: query, key and value, output, gate and up, down.
    adapters = 2 * 5 * 4 * 3 * (3 * (16 + 8) + (8 + 8) + 2 * (32 + 8) + (8 + 16))
    assert lora.forward == linears + attention + adapters
    assert lora.backward == linears + 2 * attention + 2 * adapters, "no weight has a gradient, every matrix hands one on"
    frozen = count_work(made("--freeze_parameters", "lm_head", "model.layers.0.", "model.layers.1."), 5, head_positions=2)
    assert frozen.backward == linears + 2 * attention + 2 * 2 * MATRICES * 5


def test_adapter_estimate_by_hand(made):
    """Rank 3, but 5 on values: all matrices have 5 in memory, and a push and PEFT have what each has."""
    argv = ["--tuner_type", "lora", "--lora_rank", 3, "--rank_pattern", "v_proj=5", "--target_modules", "q_proj", "v_proj", "down_proj"]
    found = made(*argv)
    [stage] = found.memory["stages"]
    held = 4 * 5 * (3 * 8 + 16 + 16 + 8)  # of qkv three A of 8 columns and one B of 16 rows; of down one each
    assert stage["num_trainable_parameters"] == held
    parts = 4 * 16 * 3  # of qkv, which of its three modules each row belongs to
    assert (stage["adapters_bytes"], stage["gradients_bytes"], stage["optimizer_bytes"]) == (2 * held + 2 * parts, 4 * held, 12 * held)
    synced = 4 * (3 * (8 + 8) + 5 * (8 + 4) + 3 * (16 + 8))
    cost = found.cost
    assert (cost["trainable_parameters"], cost["weight_push_bytes"]) == (synced, 2 * synced)
    assert cost["base_push_bytes"] == 2 * cost["parameters"] and cost["checkpoint_bytes"] == held * (2 + 12)
    assert stage["weights_bytes"] == made().memory["stages"][0]["weights_bytes"]


def test_weight_sync_of_merged_adapter_or_sleep_level_2_sends_all_weights(made):
    lora = ["--tuner_type", "lora", "--lora_rank", 1]
    whole = made().cost["weight_push_bytes"]
    alone = made(*lora).cost
    assert alone["weight_push_bytes"] < whole == alone["base_push_bytes"]
    merged = made(*lora, "--vllm_enable_lora", "false").cost
    assert (merged["weight_push_bytes"], merged["base_push_bytes"]) == (whole, 0)
    forgetful = made(*lora, "--sleep_level", 2).cost
    assert (forgetful["weight_push_bytes"], forgetful["base_push_bytes"]) == (alone["weight_push_bytes"] + whole, 0)
    assert (
        made(*lora).memory["sampler"]["adapters_bytes"]
        > 0
        == made(*lora, "--vllm_enable_lora", "false").memory["sampler"]["adapters_bytes"]
    )


def test_memory_with_adapters_needs_no_reference_model(made):
    beta = ["--beta", 0.1]
    assert made("--tuner_type", "lora", *beta).memory["stages"][0]["reference_bytes"] == 0
    plain, phases = made(*beta).cost["flops_per_rollout"], made("--tuner_type", "lora", "--lora_rank", 1, *beta).cost["flops_per_rollout"]
    assert phases["reference_logprobs"] == plain["reference_logprobs"] and phases["training"] < plain["training"]


def test_memory_of_frozen_weights_has_no_gradient_and_optimizer_state(made):
    stage, cost = (made("--freeze_parameters", "model.layers.").memory["stages"][0], made("--freeze_parameters", "model.layers.").cost)
    trained = 8 + 2 * 128 * 8  # the last norm, embedding and head (padded)
    assert (stage["num_trainable_parameters"], stage["gradients_bytes"]) == (trained, 4 * trained)
    assert stage["weights_bytes"] == made().memory["stages"][0]["weights_bytes"]
    assert cost["trainable_parameters"] == 8 + 2 * 10 * 8 and cost["checkpoint_bytes"] == trained * 14
    assert made().cost["checkpoint_bytes"] == 14 * made().memory["stages"][0]["num_parameters"]


def test_plan_warns_about_adapter_settings(made):
    def said(*argv):
        return " ".join(made("--tuner_type", "lora", *argv).warnings)

    assert "lr has its default" in said() and "lr has its default" not in said("--lr", 1e-6)
    assert "lr has its default" not in " ".join(made().warnings)
    merged = ["--vllm_enable_lora", "false"]
    assert "98 % of the first step" in said(*merged) and "98 %" not in said() + said(*merged, "--vllm_dtype", "float32")
    assert "lora_dropout 0.1" in said("--lora_dropout", 0.1)


def test_native_flags_include_rank_pattern(made):
    argv = ["--tuner_type", "lora", "--rank_pattern", "q_proj=16", r"layers\.(0|1)\..*up_proj=2"]
    again = made(*shlex.split(made(*argv).rest()["native_flags"])).checked.config.tuner
    assert again.rank_pattern == {"q_proj": 16, r"layers\.(0|1)\..*up_proj": 2}


def test_memory_phases_follow_the_settings(made):
    def phases(*argv):
        return made(*argv).cost["flops_per_rollout"]

    plain = phases()
    assert plain["old_logprobs"] == plain["reference_logprobs"] == 0
    assert phases("--beta", 0.1)["reference_logprobs"] * 3 == plain["training"]
    assert phases("--steps_per_generation", 2)["old_logprobs"] == phases("--steps_per_generation", 2)["training"] // 6
    assert phases("--num_iterations", 2)["training"] == 2 * plain["training"]
    full = phases("--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", 1)
    assert full["training"] * 3 == plain["training"] * 4


def test_activation_memory_depends_on_recompute_and_stages(made):
    def activations(*argv):
        return [
            stage["activations_bytes"] for stage in made("--world_size", 2, "--pipeline_model_parallel_size", 2, *argv).memory["stages"]
        ]

    first, last = activations()
    assert first == 2 * last, "one-forward-one-backward: the first of two stages holds two micro-batches"
    recomputed = activations("--recompute_granularity", "full", "--recompute_method", "uniform", "--recompute_num_layers", 1)
    assert all(a < b for a, b in zip(recomputed, (first, last)))


def test_plan_warns_of_peak_memory_above_gpu_memory(made):
    found = made("--gpu_memory_gb", 0.00001)
    assert found.memory["fits"] is False and any("does not fit" in warning for warning in found.warnings)
    assert made("--gpu_memory_gb", 80).memory["fits"] is True


def test_expert_memory_is_divided_by_ranks_and_flops_count_active_experts(made):
    moe = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    one = made("--world_size", 2, **moe).memory["stages"][0]["num_parameters"]
    two = made("--world_size", 2, "--expert_model_parallel_size", 2, **moe).memory["stages"][0]["num_parameters"]
    assert one - two == 4 * 2 * 3 * 8 * 16
    cost = made(**moe).cost
    assert cost["parameters"] - cost["active_parameters"] == 4 * 2 * 3 * 8 * 16


def test_lengths_file_gives_packing_efficiency(made, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("# prompt completion\n10 10\n10, 30\n\n5\t5\n20 20\n")
    cost = made("--lengths", file, "--micro_batch_size", 2).cost
    assert cost["packing"] == {
        "sequences": 4,
        "micro_batches": 2,
        "mean_tokens_per_micro_batch": 55.0,
        "min_tokens_per_micro_batch": 50,
        "max_tokens_per_micro_batch": 60,
        "packing_efficiency": 1.0,
        "padded_efficiency": 110 / 160,
        "balance": 1.0,
    }
    packed = made("--lengths", file, "--world_size", 2, "--context_parallel_size", 2).cost["packing"]
    assert packed["packing_efficiency"] == (19 + 39 + 9 + 39) / (20 + 40 + 12 + 40)


def test_lengths_are_read_from_output_dir_of_a_run(tmp_path):
    """Rollout 1 is in a file of its own; ranks wrote the groups of rollout 0 in any order."""
    names = "prompt_number generation num_prompt_tokens num_completion_tokens".split()
    first, second = [(1, 0, 9, 4), (1, 1, 9, 7), (0, 1, 8, 5), (0, 0, 8, 6)], [(2, 0, 3, 1), (2, 1, 3, 2)]
    for number, rows in enumerate((second, first)):
        write_table(tmp_path / "completions" / f"step_{number:05d}.parquet", dict(zip(names, zip(*rows, strict=True), strict=True)))
    assert read_lengths(str(tmp_path)) == [(8, 6), (8, 5), (9, 4), (9, 7), (3, 1), (3, 2)]
    with pytest.raises(ConfigError, match=r"has no completions/\*\.parquet"):
        read_lengths(str(tmp_path / "completions"))


def test_lengths_file_with_invalid_line_is_rejected_with_line(tmp_path):
    (tmp_path / "x").write_text("1 2\nthree 4\n5\n")
    with pytest.raises(ConfigError, match="line 2, 3"):
        read_lengths(str(tmp_path / "x"))


def test_layout_that_does_not_divide_the_model_is_rejected_with_valid_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | dict(num_attention_heads=6, num_key_value_heads=6)))
    with pytest.raises(ConfigError) as error:
        check(
            [
                "--model",
                str(tmp_path),
                "--world_size",
                "12",
                "--tensor_model_parallel_size",
                "4",
                "--global_batch_size",
                "12",
                "--num_generations",
                "4",
            ]
        )
    for problem in error.value.problems:
        assert problem.flags == ("tensor_model_parallel_size",) and problem.nearest == {"tensor_model_parallel_size": [2]}, problem


def test_packing_estimate_with_token_budget_equals_training(made, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("".join(f"10 {n}\n" for n in (90, 10, 30, 50, 20, 40, 90, 70)))
    argv = ["--lengths", file, "--max_tokens_per_micro_batch", 100, "--global_batch_size", 8]
    packing = made(*argv).cost["packing"]
    assert packing["sequences"] == 8 and packing["micro_batches"] == 5 and packing["max_tokens_per_micro_batch"] == 100
    assert made(*argv).memory["tokens_per_micro_batch"] == 100


def test_adapter_module_names_are_matched_once_per_kind(made, monkeypatch):
    """A model of 128 experts in 94 layers has 36,000 of them."""
    asked = Counter()
    is_target = LoraSettings.is_target
    monkeypatch.setattr(LoraSettings, "is_target", lambda self, module: asked.update([module]) or is_target(self, module))
    moe = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    made("--tuner_type", "lora", "--target_regex", r".*(mlp|self_attn)\..*", **moe)
    assert len(asked) == 4 * (4 + 8 * 3) and max(asked.values()) <= 4


def test_adapter_that_cannot_be_synced_separately_is_reported_with_other_problems(made):
    moe = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    argv = ["--tuner_type", "lora", "--target_modules", "up_proj"]
    made(*argv, **moe)
    with pytest.raises(ConfigError) as error:
        made(*argv, "--vllm_enable_lora", "true", "--stop_token_ids", 50, **moe)
    by_flag = {problem.flags[0]: problem for problem in error.value.problems}
    assert by_flag.keys() == {"vllm_enable_lora", "stop_token_ids"}, error.value.problems
    assert "all three matrices of all experts" in by_flag["vllm_enable_lora"].message
    with pytest.raises(ConfigError) as error:
        made(*argv, "--vllm_enable_lora", "true", **moe)
    [problem] = error.value.problems
    assert problem.nearest == {"vllm_enable_lora": [False]}


@pytest.mark.parametrize(("argv", "collectives", "buckets"), [
    ((), 0, 1),  # read where it lives
    (("--world_size", 2, "--tensor_model_parallel_size", 2), 1, 1),
    (("--world_size", 4, "--tensor_model_parallel_size", 2, "--pipeline_model_parallel_size", 2), 6, 2),  # over stages, then TP
    (("--world_size", 2, "--pipeline_model_parallel_size", 2, "--tuner_type", "lora", "--sleep_level", 2), 4, 4),  # the base again
])  # fmt: skip
def test_weight_sync_uses_few_collectives(made, argv, collectives, buckets):
    vocabulary = ["--padded_vocab_multiple", 8, "--num_generations", 8]
    cost = made(*argv, *vocabulary, num_key_value_heads=2).cost
    assert (cost["weight_push_collectives"], cost["weight_push_buckets"]) == (collectives, buckets)
    assert bool(cost["weight_push_received_bytes"]) == bool(collectives)
