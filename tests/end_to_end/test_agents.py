"""A run of two ranks with agent programs over HTTP, dynamic sampling and evaluations, killed in mid-rollout."""

# ruff: noqa: E501 - answers, requests and programs stand on one line each

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.chat_models import DROPS, write_chat
from tests.end_to_end.runs import call_after_steps, read_jsonl, train
from tests.ranks import RanksFailed, run_ranks

STEPS = 2
EXACT = ("loss", "reward", "grad_norm", "num_tokens", "episodes/turns", "episodes/rewritten", "episodes/drawn_tokens", "agent/contexts")
PROGRAM = """
import json, os, sys, time, urllib.request  # a client library would take ten times as long to import as the episode takes
from pathlib import Path

def ask(messages, **options):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", headers={"content-type": "application/json"})
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request, json.dumps({"model": "policy", "messages": messages, **options}).encode()) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

here, row = Path(__file__).parent, json.loads(Path(os.environ["AGENT_ROW"]).read_text())
assert row == {"prompt": [{"role": "user", "content": row["prompt"][0]["content"]}], "hint": row["hint"]}, "the answer stays with the run"
chat = list(row["prompt"])
for turn in range(2):
    said = ask(chat, temperature=0.3, max_tokens=60)
    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": row["hint"]}]
    while turn and (here / "hold").exists():
        (here / "open").touch()
        time.sleep(0.01)  # until the test has killed the run
ask([{"role": "system", "content": "s"}, *row["prompt"]], max_tokens=60)
Path("length").write_text(str(len(said)))
"""
VERDICT = """
def passed(row, folder, output, messages):
    assert row["answer"] == 1 and messages[-1]["role"] == "assistant"
    return {"reward": int((folder / "length").read_text()) % 7 / 6, "size": len(messages)}

def short(completions, contexts, size, agent_output, finish_reason):
    assert all(one == "done" for one in finish_reason) and all(count >= 2 for count in size)
    return [1.0 / (1 + len(said[-1]["content"])) for said in completions]
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    write_chat(folder / "model", template=DROPS, ends=9.0, layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"q {i}"}], "answer": 1, "hint": f"h{i}"} for i in range(9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "program.py").write_text(PROGRAM)
    (folder / "verdict.py").write_text(VERDICT)
    return [
        *("--model", str(folder / "model")), *("--dataset", str(folder / "data.jsonl")), *("--agent_command", f"python {folder}/program.py"),
        *("--agent_verdict", f"{folder}/verdict.py:passed"), *("--agent_columns", "hint"), *("--max_agents", "4"),
        *("--reward_funcs", "environment", f"{folder}/verdict.py:short"), *("--max_turns", "3"), *("--max_completion_length", "500"),
        *("--vllm_max_model_len", "700"), *("--max_failed_episodes", "0"), *("--torch_dtype", "float32"), *("--num_generations", "2"),
        *("--global_batch_size", "4"), *("--micro_batch_size", "2"), *("--lr", "1e-3"), *("--vllm_kv_cache_memory_mb", "32"),
        *("--max_steps", str(STEPS)), *("--save_steps", "1"), *("--stop_drain_seconds", "0"), *("--rank_heartbeat_timeout", "0"),
        *("--export_hf", "false"), *("--dynamic_sample", "true"), *("--eval_dataset", str(folder / "data.jsonl")), *("--eval_steps", "1"),
        *("--eval_num_prompts", "2"), *("--num_generations_eval", "2"),
    ]  # fmt: skip


def kill_in_mid_rollout(rank: int, world_size: int, flags: list[str]) -> int:
    """Run `train`, and send a signal in the rollout after the first step."""
    here = Path(flags[flags.index("--dataset") + 1]).parent

    def end():
        (here / "hold").touch()
        while not (here / "open").exists():
            time.sleep(0.002)  # until the agent is between two turns
        os.kill(os.getpid(), signal.SIGKILL)

    call_after_steps(flags, 1, end)
    return train(rank, world_size, flags)


def programs(here: Path) -> list[str]:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode() for line in lines if str(here / "program.py").encode() in line]


def test_agent_run_killed_in_mid_rollout_resumes_exactly(flags, tmp_path):
    here = Path(flags[flags.index("--dataset") + 1]).parent
    assert run_ranks(train, 2, [*flags, "--output_dir", str(tmp_path / "whole")], timeout=240) == [0, 0]
    flags = [*flags, "--output_dir", str(tmp_path / "out")]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(kill_in_mid_rollout, 2, flags, timeout=240)
    (here / "hold").unlink()
    until = time.monotonic() + 5
    while programs(here) and time.monotonic() < until:
        time.sleep(0.05)  # the kernel kills the programs after their run
    assert not programs(here), "the programs of a killed run are killed"
    assert run_ranks(train, 2, flags, timeout=240) == [0, 0]

    whole, found = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "out"))
    assert [line["step"] for line in found] == [line["step"] for line in whole] == [1, 2]
    for one, other in zip(whole, found, strict=True):
        kept = [name for name in EXACT if name in one]
        assert len(kept) == len(EXACT) and [other[name] for name in kept] == pytest.approx([one[name] for name in kept], rel=1e-6, abs=1e-9)
    assert any("sampling/sampling_logp_difference/max" in one for one in whole)
    for one in whole:
        assert one["agent/contexts"] >= 2 and one["episodes/turns"] == 3 and one["agent/unread"] == 0
        assert one.get("sampling/sampling_logp_difference/max", 0.0) < 1e-4  # none where all rewards are equal

    scores = [
        [(one["step"], one["mean@2"], one["mean@2/stderr"]) for one in read_jsonl(tmp_path / name / "evaluations.jsonl")]
        for name in ("whole", "out")
    ]
    assert scores[0] == scores[1] and [step for step, *_ in scores[0]] == [0, 1, 2]
