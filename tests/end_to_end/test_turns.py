"""A run of episodes whose template drops history, killed and stopped in mid-rollout: equal to the undisturbed run."""

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

STEPS = 5
EXACT = ("loss", "reward", "grad_norm", "num_tokens", "episodes/turns", "episodes/rewritten", "episodes/drawn_tokens")
MINE = """
import time
from pathlib import Path
from megatron_grpo.plugins.environments.protocol import Environment, StepOutput
HERE = Path(__file__).parent

class Counts(Environment):
    def step(self, turn):
        while turn.number and (HERE / "hold").exists():
            (HERE / "open").touch()
            time.sleep(0.01)
        message = {"role": "user", "content": f"{self.columns['answer']} {len(turn.text)}"}
        return StepOutput(messages=[message], reward=len(turn.text) % 3 / 2)

def short(completions, turn_rewards, num_turns, finish_reason, messages):
    assert all(len(rewards) == turns for rewards, turns in zip(turn_rewards, num_turns)) and all(finish_reason)
    return [1.0 / (1 + len(said[0]["content"])) for said in completions]
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    write_chat(folder / "model", template=DROPS, ends=10.5, layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"q {i}"}], "answer": i} for i in range(9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(MINE)
    return [
        *("--model", str(folder / "model")), *("--dataset", str(folder / "data.jsonl")), *("--environment", f"{folder}/mine.py:Counts"),
        *("--reward_funcs", "environment", f"{folder}/mine.py:short"), *("--max_turns", "3"), *("--max_completion_length", "250"),
        *("--torch_dtype", "float32"), *("--num_generations", "4"), *("--global_batch_size", "8"), *("--generation_batch_size", "12"),
        *("--allow_unaligned_generation", "true"), *("--micro_batch_size", "2"), *("--lr", "1e-3"), *("--vllm_kv_cache_memory_mb", "32"),
        *("--max_steps", str(STEPS)), *("--save_steps", "1"), *("--stop_drain_seconds", "0"), *("--rank_heartbeat_timeout", "0"),
        *("--export_hf", "false"),
    ]  # fmt: skip


def end_in_mid_rollout(rank: int, world_size: int, flags: list[str], steps: int, number: int) -> int:
    """Run `train`, and send a signal after some recorded steps, when turns of the next rollout are sampled."""
    here = Path(flags[flags.index("--dataset") + 1]).parent

    def end():
        (here / "hold").touch()
        while not (here / "open").exists():
            time.sleep(0.002)
        os.kill(os.getpid(), number)

    call_after_steps(flags, steps, end)
    return train(rank, world_size, flags)


def test_episode_run_killed_and_stopped_in_mid_rollout_resumes_exactly(flags, tmp_path):
    here = Path(flags[flags.index("--dataset") + 1]).parent
    assert run_ranks(train, 1, [*flags, "--output_dir", str(tmp_path / "whole")], timeout=180) == [0]
    flags = [*flags, "--output_dir", str(tmp_path / "out")]
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(end_in_mid_rollout, 1, flags, 1, signal.SIGKILL, timeout=180)
    for name in ("hold", "open"):
        (here / name).unlink()
    assert run_ranks(end_in_mid_rollout, 1, flags, 3, signal.SIGTERM, timeout=180) == [3], "open episodes are dropped"
    for name in ("hold", "open"):
        (here / name).unlink()
    assert len(read_jsonl(tmp_path / "out" / "metrics.jsonl")) < STEPS
    assert run_ranks(train, 1, flags, timeout=180) == [0]

    whole, found = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "out"))
    assert [line["step"] for line in found] == [line["step"] for line in whole] == list(range(1, STEPS + 1))
    for one, other in zip(whole, found, strict=True):
        kept = [name for name in EXACT if name in one]
        assert [other[name] for name in kept] == pytest.approx([one[name] for name in kept], rel=1e-6, abs=1e-9)
    assert max(line.get("episodes/rewritten", 0.0) for line in whole) > 0.5, "rows of several contexts wait in the checkpoints"
    differences = [line["sampling/sampling_logp_difference/max"] for line in whole if line["packing/computed_rows"]]
    assert differences and max(differences) < 1e-4
    assert {"rewards/environment/mean", "rewards/short/mean", "episodes/ended/max_turns"} <= set(whole[0])
