"""Complete runs with completions constrained by a regular expression or a schema: the trainer's softmax is over the allowed tokens."""

from __future__ import annotations

import json

from tests.chat_models import DROPS, write_chat
from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.end_to_end.test_sampling_mask import ENVIRONMENT
from tests.ranks import run_ranks

REWARD = """
import re

def small(completions, **columns):
    assert all(re.fullmatch("1[0-9]{2,7}", "".join(one.split())) for one in completions), completions
    return [1.0 / len(one) for one in completions]
"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 22]}}, "required": ["a", "b"]}
SEES = """
import json

class Sees(Counts):
    def step(self, turn):
        said = json.loads(turn.text)
        assert isinstance(said["a"], bool) and said["b"] in (1, 22), said
        return super().step(turn)
"""


def test_run_with_regex_trains_on_allowed_tokens(tmp_path):
    flags = write_inputs(tmp_path, rows=8, layers=1, hidden=16, ffn=16, std=0.4)
    (tmp_path / "reward.py").write_text(REWARD)
    flags = [word.replace(":even", ":small") for word in flags]
    flags += [*("--vllm_structured_outputs_regex", "1[0-9]{2,7}"), *("--top_k", "30"), *("--temperature", "0.8"), *("--beta", "0.02")]
    flags += [*("--max_steps", "2"), *("--log_entropy", "true"), *("--lr", "1e-2"), *("--max_completion_length", "9")]
    flags += [*("--eval_dataset", str(tmp_path / "data.jsonl")), *("--eval_num_prompts", "2"), *("--export_hf", "false")]
    flags += ["--teacher_model", str(tmp_path / "model")]  # the policy itself, as it began
    assert run_ranks(train, 1, [*flags, "--output_dir", str(tmp_path / "out")], timeout=180) == [0]
    first, second = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    for step in (first, second):
        assert step["sampling/sampling_logp_difference/max"] < 1e-4 and step["grad_norm"] > 0 and step["completions/clipped_ratio"] == 0
        assert 1 < step["sampling/mask_size"] < step["sampling/mask_size_max"] <= 30
    assert first["entropy"] < 3.5  # log(30): over the words that are left
    assert first["teacher_kl"] < 1e-9 < second["teacher_kl"], "among the words that the regex left"


def test_grammar_constrains_each_turn_of_an_episode(tmp_path):
    write_chat(tmp_path / "model", template=DROPS, ends=10.5, layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"q {i}"}]} for i in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(ENVIRONMENT + SEES)
    bound = {"structured_outputs": {"json": SCHEMA}}
    flags = [
        *("--model", str(tmp_path / "model")), *("--dataset", str(tmp_path / "data.jsonl")), *("--reward_funcs", "environment"),
        *("--environment", f"{tmp_path}/mine.py:Sees"), *("--max_turns", "2"), *("--max_completion_length", "150"), *("--lr", "1e-2"),
        *("--torch_dtype", "float32"), *("--num_generations", "4"), *("--global_batch_size", "8"), *("--micro_batch_size", "2"),
        *("--vllm_kv_cache_memory_mb", "32"), *("--max_steps", "1"), *("--export_hf", "false"),
        *("--top_k", "40"), *("--generation_kwargs", json.dumps(bound)),
        *("--vllm_engine_kwargs", '{"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": true}}'),
        *("--output_dir", str(tmp_path / "out")),
    ]  # fmt: skip
    assert run_ranks(train, 1, flags, timeout=180) == [0]
    [step] = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert step["episodes/turns"] == 2 and step["sampling/sampling_logp_difference/max"] < 1e-4 and step["sampling/mask_size"] < 10
