"""The estimate of prompt sharing in `plan`: the decision with its reason, and tokens by hand."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.commands.planning.command import Plan, make_plan
from megatron_grpo.commands.planning.report import print_report
from megatron_grpo.commands.planning.summary import wanted_micro_batches
from megatron_grpo.core.batching import pack, prefix_groups, split
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.schedule import schedule_run
from megatron_grpo.run.sharing import LEAST_SAVING, decide
from tests.checked import check

SMALL = ["--num_generations", "4", "--global_batch_size", "8"]


@pytest.fixture
def made(tmp_path):
    def make(lengths: str, *argv: object) -> Plan:
        (tmp_path / "lengths.txt").write_text(lengths)
        return make_plan(schedule_run(check([*SMALL, "--lengths", str(tmp_path / "lengths.txt"), *map(str, argv)])))

    return make


GROUPS = "100 11\n100 21\n100 31\n100 41\n" * 2  # 400 + 100 computed tokens a group, or 100 + 100


def test_sharing_estimate_by_hand(made):
    found = made(GROUPS, "--max_tokens_per_micro_batch", 256).cost["sharing"]
    assert (found["setting"], found["shares"], found["groups"], found["pieces"]) == ("auto", True, 2, 2)
    assert (found["tokens_apart"], found["tokens_shared"]) == (1000, 400)
    assert (found["micro_batches_apart"], found["micro_batches_shared"]) == (4, 2)


def test_sharing_estimate_of_split_groups_counts_prompt_per_piece(made):
    found = made(GROUPS, "--max_tokens_per_micro_batch", 160).cost["sharing"]
    assert (found["pieces"], found["tokens_shared"]) == (4, 600)
    found = made(GROUPS, "--micro_batch_size", 2, "--world_size", 2).cost["sharing"]
    assert (found["pieces"], found["tokens_shared"], found["micro_batches_shared"]) == (4, 600, 4)


def test_sharing_estimate_packs_as_the_run(made):
    shared, apart = (made(GROUPS, "--max_tokens_per_micro_batch", 256, "--share_prefix", one).cost["packing"] for one in ("auto", "false"))
    assert (shared["micro_batches"], apart["micro_batches"]) == (2, 4)
    assert shared["max_tokens_per_micro_batch"] == 204  # a last token of each completion is counted with them, as everywhere in this object


@pytest.mark.parametrize(("lengths", "argv", "why"), [
    (GROUPS, ["--share_prefix", "false"], "share_prefix false"),
    (GROUPS, [], "micro_batch_size 1: one completion per micro-batch"),
    ("2 101\n" * 8, ["--micro_batch_size", 4], "1.5% of the tokens could be saved, less than 1/16"),
    (GROUPS, ["--micro_batch_size", 4, "--tuner_type", "lora", "--lora_dropout", "0.1"], "lora_dropout (0.1)"),
])  # fmt: skip
def test_sharing_estimate_disabled_reports_the_reason(made, capsys, lengths, argv, why):
    plan = made(lengths, *argv)
    found = plan.cost["sharing"]
    assert not found["shares"] and why in found["why"] and found["tokens_shared"] == found["tokens_apart"]
    print_report(plan)
    assert "shared prompts  off" in capsys.readouterr().out


def test_share_prefix_true_shares_where_auto_does_not(made):
    assert made("2 101\n" * 8, "--micro_batch_size", 4, "--share_prefix", "true").cost["sharing"]["tokens_shared"] == 804


def test_sharing_decision_is_in_plan_json_and_native_flags(made):
    plan = made(GROUPS, "--micro_batch_size", 4, "--share_prefix", "true")
    found = json.loads(plan.as_json())
    assert found["cost"]["sharing"]["why"].startswith("share_prefix true") and "--share_prefix true" in found["native_flags"]


TINY = dict(
    architectures=["LlamaForCausalLM"], hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, vocab_size=10, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
BUDGET = "--max_tokens_per_micro_batch"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ["--model", tmp_path]


@pytest.mark.parametrize(("budget", "tokens", "pieces"), [(256, 400, 2), (160, 600, 4)])
def test_sharing_flops_count_computed_tokens(made, model, budget, tokens, pieces):
    """Matrices by computed tokens, attention by own and inherited keys, the head by scored places; a piece pays for its prompt."""
    found = made(GROUPS, *model, BUDGET, budget, "--beta", 0.1, "--steps_per_generation", 2).cost
    sharing = found["sharing"]
    head, matrices = 2 * 8 * 10 * 2 * (11 + 21 + 31 + 41), 2 * 4 * (64 + 32 + 32 + 64 + 128 + 128 + 128)
    own = 2 * sum((10 * n) ** 2 for n in (1, 2, 3, 4))  # of the completions; the last token of each is not computed
    inherited = 2 * sum(2 * 100 * 10 * n for n in (1, 2, 3, 4))
    squares = {"apart": 8 * 100**2 + own + inherited, "shared": pieces * 100**2 + own + inherited}
    for way, computed in (("apart", 1000), ("shared", tokens)):
        forward = matrices * computed + head + 4 * squares[way] * (8 + 8)
        phases = sharing[f"flops_{way}"]
        # A rollout is two optimizer steps here, and half of its rows are stale.
        assert phases == {"old_logprobs": forward, "reference_logprobs": 2 * forward, "training": 6 * forward}
    assert {phase: found["flops_per_rollout"][phase] for phase in phases} == sharing["flops_shared"]
    off = made(GROUPS, *model, BUDGET, budget, "--beta", 0.1, "--steps_per_generation", 2, "--share_prefix", "false").cost
    assert {phase: off["flops_per_rollout"][phase] for phase in phases} == sharing["flops_apart"] == off["sharing"]["flops_shared"]


def test_sharing_estimate_repeats_lengths_file_shorter_than_a_step(made, model):
    once, twice = (made(GROUPS, *model, BUDGET, 256, "--global_batch_size", size).cost["sharing"] for size in (8, 16))
    for name in ("sequences", "tokens_apart", "tokens_shared", "groups", "micro_batches_shared"):
        assert twice[name] == 2 * once[name]


@pytest.mark.parametrize(("rows", "prompts"), [(2, 1), (4, 1), (6, 2), (8, 2), (3, 2)])
def test_sharing_memory_counts_each_prompt_once_per_micro_batch(made, model, rows, prompts):
    size = ["--global_batch_size", 24, "--micro_batch_size", rows, "--max_prompt_length", 100, "--max_completion_length", 10]
    on, off = (made("100 10\n" * 24, *model, *size, "--share_prefix", one).memory for one in ("auto", "false"))
    assert (on["tokens_per_micro_batch"], off["tokens_per_micro_batch"]) == (100 * prompts + 10 * rows, 110 * rows)
    [stage], [apart] = on["stages"], off["stages"]
    assert stage["activations_saved_bytes"] == apart["activations_bytes"] - stage["activations_bytes"] > 0
    assert apart["activations_saved_bytes"] == 0
    budgets = [made("100 10\n" * 24, *model, BUDGET, 300, "--share_prefix", one).memory for one in ("auto", "false")]
    assert budgets[0]["stages"] == budgets[1]["stages"] and budgets[0]["tokens_per_micro_batch"] == 300


def test_sharing_budget_without_gpu_is_smallest_that_fits_a_group(made, model, capsys):
    """100 + 11 + 21 + 31 + 41 = 204."""
    plan = made(GROUPS, *model)
    budget = plan.cost["sharing"]["budget"]
    assert (budget["max_tokens_per_micro_batch"], budget["tokens"], budget["micro_batches_of_rank"]) == (204, 400, 2)
    again = made(GROUPS, *model, BUDGET, 204).cost["sharing"]
    assert (again["tokens_shared"], again["pieces"], again["budget"]) == (400, 2, None)
    assert made(GROUPS, *model, BUDGET, 199).cost["sharing"]["pieces"] > 2
    print_report(plan)
    assert "max_tokens_per_micro_batch 204 is sufficient (the smallest that fits a whole group" in " ".join(capsys.readouterr().out.split())
    cp = ["--world_size", 2, "--context_parallel_size", 2]  # each segment is a multiple of 4
    assert made(GROUPS, *model, *cp).cost["sharing"]["budget"]["max_tokens_per_micro_batch"] == 100 + 12 + 24 + 32 + 44


def test_sharing_budget_with_gpu_is_largest_that_fits(made, model):
    gpu, groups = ["--gpu_memory_gb", 0.0008, "--sleep_level", 1, "--share_prefix", "true"], "100 100\n" * 512
    step = ["--global_batch_size", 512]
    budget = made(groups, *model, *gpu, *step).cost["sharing"]["budget"]["max_tokens_per_micro_batch"]

    def needs(tokens):
        phases = made(groups, *model, *gpu, *step, BUDGET, tokens).memory["stages"][0]["phases"]
        return max(phases["training"], phases["logprobs"])

    assert needs(budget) <= 800_000 < needs(budget + 1)
    tight = made(groups, *model, "--gpu_memory_gb", 0.0003, "--sleep_level", 1, "--share_prefix", "true", *step)
    assert tight.cost["sharing"]["budget"] is None, "a sequence of 200 tokens does not fit alone"
    roomy = made(GROUPS, *model, "--gpu_memory_gb", 80, "--share_prefix", "true").cost["sharing"]["budget"]
    assert roomy["max_tokens_per_micro_batch"] == 400 and "all tokens of a rank" in roomy["why"]


@pytest.mark.parametrize("argv", [["--share_prefix", "false"], ["--tuner_type", "lora", "--lora_dropout", "0.1"]])
def test_sharing_budget_is_omitted_if_it_would_not_enable_sharing(made, argv):
    assert made(GROUPS, *argv).cost["sharing"]["budget"] is None


PP4 = ["--world_size", 4, "--pipeline_model_parallel_size", 4, "--global_batch_size", 64]


def test_sharing_with_larger_pipeline_bubble_warns_with_smaller_budget(made, model):
    plan = made(GROUPS, *model, *PP4, BUDGET, 1000)
    found = plan.cost["sharing"]
    apart, shared = found["micro_batches_of_rank_apart"], found["micro_batches_of_rank_shared"]
    assert (apart, shared) == (9, 4)  # 8000 tokens in whole sequences, and 3200: five groups of 200 in 1000
    assert (found["bubble_apart"], found["bubble_shared"]) == (3 / 12, 3 / 7)
    assert plan.rest()["pipeline"]["bubble_fraction"] == 3 / 7
    [said] = [warning for warning in plan.warnings if "pipeline bubble" in warning.lower()]
    budget = found["budget"]["max_tokens_per_micro_batch"]
    assert "4 micro-batches instead of 9" in said and f"({budget} instead of 1000)" in said and "43% of a training step" in said
    again = made(GROUPS, *model, *PP4, BUDGET, budget)
    assert again.cost["sharing"]["micro_batches_of_rank_shared"] >= 12
    assert not [warning for warning in again.warnings if "pipeline bubble" in warning.lower()]


def test_sharing_with_too_few_rows_for_pipeline_gives_a_warning(made, model):
    few = ["--world_size", 4, "--pipeline_model_parallel_size", 4, "--global_batch_size", 8]
    [said] = [warning for warning in made(GROUPS, *model, *few, BUDGET, 500).warnings if "pipeline bubble" in warning.lower()]
    assert "a larger global_batch_size: it has too few rows for 12 micro-batches per rank" in said


@pytest.mark.parametrize(("pp", "vpp", "wanted"), [(1, None, 1), (2, None, 4), (4, None, 12), (2, 2, 2), (4, 2, 8), (4, 3, 4)])
def test_sharing_wanted_micro_batches_depend_on_pipeline_stages(pp, vpp, wanted):
    argv = ["--world_size", pp, "--pipeline_model_parallel_size", pp, *(["--virtual_pipeline_model_parallel_size", vpp] if vpp else [])]
    assert wanted_micro_batches(check(list(map(str, argv))).sizes) == wanted


def test_the_kernel_of_a_gpu_is_named_where_the_machine_is_a_gpu_or_not_known():
    true = Config().with_values({"share_prefix": "true", "micro_batch_size": 4})
    auto = true.with_values({"share_prefix": "auto"})
    for cfg in (true, auto):
        assert "On this GPU attention with shared prefixes uses flash attention" in str(decide(cfg, None, has_gpu=True))
        assert "On a GPU, of compute capability 8.0 or more, attention with shared prefixes uses flash attention" in str(decide(cfg, None))
        assert "GPU" not in str(decide(cfg, None, has_gpu=False))
    lacks = "flash attention needs a GPU of compute capability 8.0, this one has 7.5"
    assert "attention with shared prefixes uses plain matrix products" in str(decide(true, None, has_gpu=True, gpu_lacks=lacks))
    assert lacks in str(decide(true, None, has_gpu=True, gpu_lacks=lacks))
    off = decide(auto, None, has_gpu=True, gpu_lacks=lacks)
    assert off.min_saving_ratio is None and lacks in off.why
    assert decide(auto, None, has_gpu=True).min_saving_ratio == decide(auto, None, has_gpu=False).min_saving_ratio == LEAST_SAVING


def test_sharing_unsupported_by_flash_attention_is_reported_without_gpu():
    single = Config().with_values({"torch_dtype": "float32", "micro_batch_size": 4})
    said = "flash attention supports bfloat16 and float16, not float32"
    assert decide(single, None).min_saving_ratio == LEAST_SAVING and f"On a GPU it is disabled: {said}" in str(decide(single, None))
    planned = decide(single.with_values({"gpu_memory_gb": 80}), None)
    assert planned.min_saving_ratio is None and said in planned.why


def test_sharing_estimate_computes_few_packings_for_any_size(made, model, monkeypatch):
    packings = []
    partition, pack_once, tried = split.partition, pack.pack, []
    monkeypatch.setattr(split, "partition", lambda lengths, cut: packings.append(len(lengths)) or partition(lengths, cut))
    monkeypatch.setattr(prefix_groups, "pack", lambda *args, **sizes: tried.append(1) or pack_once(*args, **sizes))
    made(GROUPS, *model, "--world_size", 1000, "--global_batch_size", 6000, "--num_generations", 4)
    assert len(packings) <= 4 and max(packings) == 6000  # the file's own, without and with sharing; one for the budget
    assert len(tried) <= 16, "1500 groups for 2000 micro-batches: many are halved at once"
