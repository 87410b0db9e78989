"""Memory that offload frees, holds and copies, by hand; when `auto` enables it; and suggested settings.

Real tensors are in tests/distributed/test_plan_memory.py.
"""

from __future__ import annotations

import json

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.planning.command import make_plan
from megatron_grpo.commands.planning.memory import UNCOUNTED, OffloadPlan, decide
from megatron_grpo.commands.planning.parameters import StaticMemory
from megatron_grpo.commands.planning.report import describe_offload
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.schedule import schedule_run
from tests.checked import check

QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False, num_attention_heads=32,
    head_dim=128, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_key_value_heads=8,
)  # fmt: skip
QWEN3_30B = QWEN3_8B | dict(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_key_value_heads=4,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip
EIGHT = ["--world_size", "8", "--num_generations", "8", "--global_batch_size", "64"]
BOTH = ["--offload_model", "true", "--offload_optimizer", "true"]


@pytest.fixture
def memory(tmp_path):
    def of(*argv, model=QWEN3_8B):
        (tmp_path / "config.json").write_text(json.dumps(model))
        return make_plan(schedule_run(check(["--model", str(tmp_path / "config.json"), *EIGHT, *map(str, argv)]))).memory

    return of


def test_offload_freed_and_copied_bytes_by_hand():
    sizes = dict(weights_bytes=20, adapters_bytes=3, gradients_bytes=40, optimizer_bytes=60, reference_bytes=7)
    held = StaticMemory(num_parameters=10, num_trainable_parameters=10, **sizes)
    both, model, optimizer, none = (OffloadPlan(model=m, optimizer=o) for m, o in ((1, 1), (1, 0), (0, 1), (0, 0)))
    assert [one.freed(held) for one in (both, model, optimizer, none)] == [held.total(), 70, 60, 0]
    assert [one.freed(held, during_sync=True) for one in (both, model, optimizer, none)] == [107, 47, 60, 0], "the weights are pushed"
    assert [one.copied(held) for one in (both, model, optimizer, none)] == [90, 30, 60, 0], "gradients come back as zeros"


def test_offload_of_moe_frees_56_gb_in_about_one_second(memory):
    """5.2 G parameters a rank, 3.6 of them experts: 2 + 4 + 12 / d bytes each, d 8 for what is no expert."""
    found = memory(*BOTH, "--expert_model_parallel_size", 8, "--sleep_level", 1, "--vllm_tensor_parallel_size", 8, model=QWEN3_30B)
    [stage], offload = found["stages"], found["offload"]
    assert stage["freed_bytes"] == offload["freed_bytes"] == pytest.approx(76.8e9, rel=0.01)
    assert offload["seconds_per_rollout"] / 2 == pytest.approx(56.1e9 / 50e9, rel=0.01)
    assert offload["host_bytes"] == pytest.approx(56.1e9 + found["sampler"]["weights_bytes"], rel=0.01), "vLLM's weights sleep there too"
    phases, sampler = stage["phases"], found["sampler"]
    assert phases["rollout"] == sampler["weights_bytes"] + sampler["kv_cache_bytes"], "the sampler has the GPU to itself"
    assert phases["weight_push"] == pytest.approx(stage["weights_bytes"] + sampler["weights_bytes"] + 2 * 2**29 * 9 / 8, rel=0.06)
    apart = memory("--offload_model", "false", "--offload_optimizer", "false", "--expert_model_parallel_size", 8, "--sleep_level", 1,
                   "--vllm_tensor_parallel_size", 8, model=QWEN3_30B)  # fmt: skip
    assert apart["offload"]["freed_bytes"] == apart["offload"]["seconds_per_rollout"] == 0
    assert apart["offload"]["most_freed_bytes"] == offload["freed_bytes"]
    [before] = apart["stages"]
    assert before["phases"]["rollout"] - phases["rollout"] == offload["freed_bytes"]
    assert before["phases"]["training"] == phases["training"], "training has everything"


def test_async_save_host_memory_is_rank_share_of_checkpoint(memory):
    """As `benchmarks/saving.py grids` counts it, by the code that saves: 64 GPUs, TP 4."""
    grid = ("--world_size", 64, "--tensor_model_parallel_size", 4)
    assert memory(*grid, "--async_save", "true")["staged_bytes"] == pytest.approx(1.79e9, rel=0.01)
    assert memory(*grid)["staged_bytes"] == 0
    halves = memory(*grid, "--async_save", "true", "--pipeline_model_parallel_size", 2)["staged_bytes"]
    assert halves == pytest.approx(1.79e9, rel=0.01), "half the weights a rank, dealt out among half the ranks"


@pytest.mark.parametrize(
    ("model", "optimizer", "gpu", "chosen"),
    [
        ("auto", "auto", 100, (False, False)),
        ("auto", "auto", 90, (False, True)),  # the optimizer first: no push needs it
        ("auto", "auto", 60, (True, True)),
        ("auto", "false", 75, (True, False)),
        ("false", "auto", 30, (False, True)),  # nothing fits: what is nearest
        ("true", "false", 100, (True, False)),
        ("auto", "true", 100, (False, True)),
        ("auto", "auto", None, (False, False)),
    ],
)
def test_offload_auto_is_enabled_if_run_does_not_fit_with_margin(model, optimizer, gpu, chosen):
    peaks = {(False, False): 94, (False, True): 84, (True, False): 69, (True, True): 54}

    def peak(way):
        return round(peaks[way.model, way.optimizer] * 1e9 - 0.5 * 1e9)

    assert UNCOUNTED == 6e9
    found = decide(Config().with_values({"offload_model": model, "offload_optimizer": optimizer}), peak, gpu and gpu * 10**9)
    assert (found.model, found.optimizer) == chosen
    if gpu is None:
        assert "set gpu_memory_gb" in found.why
    elif "auto" in (model, optimizer):
        assert f"of {gpu} GB" in found.why and "plus 6 GB that is not counted" in found.why
        assert ("does not fit even with" in found.why) == (gpu == 30)


def test_offload_disabled_is_reported_with_bytes_it_would_free(memory):
    found = describe_offload(memory()["offload"])
    assert found.startswith("offload_model and offload_optimizer off (auto depends") and "enabled, they would free" in found
    assert describe_offload(memory("--offload_optimizer", "true", "--offload_model", "false")["offload"]).startswith(
        "offload_optimizer on (as"
    )


def test_offload_suggested_settings_fit(memory):
    tight = ["--gpu_memory_gb", 80, "--vllm_gpu_memory_utilization", 0.6, "--tensor_model_parallel_size", 2]
    found = memory(*tight)
    assert found["fits"] is False and found["offload"]["why"].endswith("does not fit even with offloading")
    assert [way["settings"] for way in found["would_fit"]][0] == {"sleep_level": 1}
    for way in found["would_fit"]:
        argv = [str(word).lower() for name, value in way["settings"].items() for word in (f"--{name}", value)]
        changed = memory(*tight, *argv)
        assert changed["fits"] and (changed["peak_bytes"], changed["peak_phase"]) == (way["peak_bytes"], way["peak_phase"])
    off = memory(*tight, "--sleep_level", 1, "--offload_model", "false", "--offload_optimizer", "false")
    assert {"offload_optimizer": "true"} in [way["settings"] for way in off["would_fit"]]
    assert memory("--gpu_memory_gb", 1)["would_fit"] == []


def test_kv_cache_smaller_than_one_sequence_does_not_fit(memory):
    found = memory("--gpu_memory_gb", 80, "--vllm_gpu_memory_utilization", 0.2, "--tensor_model_parallel_size", 4, "--sleep_level", 1)
    assert found["peak_bytes"] < 80e9 and found["fits"] is False and found["sampler"]["kv_cache_tokens"] == 0
    assert found["would_fit"][0]["settings"] == {"vllm_gpu_memory_utilization": 0.3}


def test_sleep_level_with_adapters_defaults_to_1_and_warns_at_2(memory, tmp_path):
    def plan(*argv):
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
        return make_plan(schedule_run(check(["--model", str(tmp_path / "config.json"), *EIGHT, "--tuner_type", "lora", *map(str, argv)])))

    assert plan().checked.config.rollout.sleep_level == 1
    assert plan("--sleep_level", 0).checked.config.rollout.sleep_level == 0
    said = "each weight sync sends the whole model before the adapter"
    assert said in " ".join(plan("--sleep_level", 2).warnings) and said not in " ".join(plan().warnings)


def test_offload_with_rollout_servers_is_disabled(memory):
    server = ["--vllm_mode", "server", "--vllm_server_host", "127.0.0.1"]
    found = memory("--gpu_memory_gb", 80, "--tensor_model_parallel_size", 4, *server, *BOTH)
    assert found["fits"] and found["offload"]["freed_bytes"] == 0 and not (found["offload"]["model"] or found["offload"]["optimizer"])
    tight = memory("--gpu_memory_gb", 39, "--tensor_model_parallel_size", 2, *server)
    assert not tight["fits"] and tight["would_fit"]
    names = {name for way in tight["would_fit"] for name in way["settings"]}
    assert not names & {"sleep_level", "offload_model", "offload_optimizer", "vllm_gpu_memory_utilization"}


def test_plan_text_shows_offload_and_settings_that_fit(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    words = ["--gpu_memory_gb", "80", "--vllm_gpu_memory_utilization", "0.7", "--tensor_model_parallel_size", "2"]
    assert main(["plan", "--model", str(tmp_path / "config.json"), *EIGHT, *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "These settings would fit: sleep_level 1; peak" in out and "s per rollout at 50 GB/s" in out
