"""Complete runs with sampling masks: sampler and trainer agree, and pending rows keep their masks."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.chat_models import DROPS, write_chat
from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.end_to_end.test_compare_losses import compare_losses
from tests.ranks import run_ranks

CUT = [*("--temperature", "0.7"), *("--top_k", "5"), *("--top_p", "0.9")]
SAME = ("loss", "grad_norm", "kl", "entropy", "num_tokens", "sampling/sampling_logp_difference/mean")
WHAT_IF = ("loss", "grad_norm", "kl")
ENVIRONMENT = """
from megatron_grpo.plugins.environments.protocol import Environment, StepOutput

class Counts(Environment):
    def step(self, turn):
        return StepOutput(messages=[{"role": "user", "content": str(len(turn.text))}], reward=len(turn.text) % 3 / 2)
"""


def test_sampling_mask_pending_rows_keep_it_over_a_checkpoint_in_another_layout(tmp_path):
    flags = [
        *write_inputs(tmp_path, rows=12, layers=1, hidden=16, ffn=16, std=0.4),
        *CUT,
        *("--global_batch_size", "8"),
        *("--steps_per_generation", "2"),
    ]
    flags += [*("--num_iterations", "2"), *("--beta", "0.02"), *("--log_entropy", "true"), *("--max_tokens_per_micro_batch", "64")]
    flags += [*("--max_steps", "4"), *("--save_steps", "3"), *("--save_total_limit", "3"), *("--export_hf", "false")]
    flags += ["--record_rows", "true"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert run_ranks(train, 1, [*flags, "--share_prefix", "true", "--output_dir", str(whole)], timeout=180) == [0]
    one = read_jsonl(whole / "metrics.jsonl")
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in one), "of the same words, at the weights that drew"
    assert 1 < one[0]["sampling/mask_size"] < one[0]["sampling/mask_size_max"] <= 5 and "sampling/mask_size" not in one[-1]
    [(code, said)] = run_ranks(compare_losses, 1, [str(whole), "--step", "3", "--json", "--variant", "epsilon=0.1"], timeout=180)
    again = json.loads(said)["variants"][0]
    assert code == 0 and {name: again[name] for name in WHAT_IF} == pytest.approx({name: one[-1][name] for name in WHAT_IF}, rel=1e-4)
    shutil.copytree(whole, other)
    changed = ["--resume", str(other / "checkpoints" / "iter_0000003"), "--share_prefix", "false", "--output_dir", str(other)]
    assert run_ranks(scripted.train, 2, [*flags, *changed, "--tensor_model_parallel_size", "2"], timeout=180) == [0, 0]  # samples nothing
    wanted, found = ({name: steps[-1][name] for name in SAME} for steps in (one, read_jsonl(other / "metrics.jsonl")))
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_sampling_mask_of_episode_turns_trains_an_adapter(tmp_path):
    write_chat(tmp_path / "model", template=DROPS, ends=4.0, layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"q {i}"}]} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    flags = [
        *("--model", str(tmp_path / "model")), *("--dataset", str(tmp_path / "data.jsonl")), *("--reward_funcs", "environment"),
        *("--environment", f"{tmp_path}/mine.py:Counts"), *("--max_turns", "2"), *("--max_completion_length", "90"), *("--lr", "1e-2"),
        *("--torch_dtype", "float32"), *("--num_generations", "4"), *("--global_batch_size", "8"), *("--micro_batch_size", "2"),
        *("--vllm_kv_cache_memory_mb", "32"), *("--max_steps", "2"), *("--export_hf", "false"), *("--tuner_type", "lora"),
        *("--temperature", "0.7"), *("--top_k", "40"), *("--min_p", "0.01"), *("--output_dir", str(tmp_path / "out")),
        *("--teacher_model", str(tmp_path / "model")), *("--streaming", "true"), *("--max_prompt_length", "40"),
    ]  # fmt: skip
    assert run_ranks(train, 1, flags, timeout=180) == [0]
    first, second = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    # The policy as it began is its teacher: of the same contexts, and among the same words, both say the same.
    assert first["teacher_kl"] < 1e-9 < second["teacher_kl"] and first["episodes/rewritten"] > 0
    for step in (first, second):
        assert step["episodes/turns"] > 1 and step["sampling/sampling_logp_difference/max"] < 1e-4 and step["sampling/mask_size_max"] <= 40
        assert step["grad_norm"] > 0
