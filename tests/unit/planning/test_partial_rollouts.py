"""The forecast of partial rollouts: by hand, and against a loop that steps token by token."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.cli import main
from megatron_grpo.plugins.partial_rollouts import plan as partial_rollouts
from megatron_grpo.plugins.partial_rollouts.plan import FIRST, NUM_ROLLOUTS, RECOMPUTED, STEP, sampling_times


def simulate_token_by_token(rollouts, slots, depth):
    """One token a step for those that are open, first come, first served."""
    left, found = [list(one) for one in rollouts], []
    for r in range(len(left)):
        spent, admitted = 0.0, []
        while any(left[r]):
            waiting = [(k, i) for k in range(r, min(r + depth + 1, len(left))) for i, n in enumerate(left[k]) if n]
            for k, i in waiting:
                if (k, i) not in admitted and sum(left[a][b] > 0 for a, b in admitted) < slots:
                    admitted.append((k, i))
                    spent += RECOMPUTED * (rollouts[k][i] - left[k][i])
            running = [(k, i) for k, i in admitted if left[k][i]]
            for k, i in running:
                left[k][i] -= 1
            spent += STEP + len(running)
        found.append(spent)
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=7, max_size=9), st.integers(1, 6), st.integers(0, 3))
def test_partial_rollout_forecast_equals_token_by_token_simulation(rollouts, slots, depth):
    assert sampling_times(rollouts, slots, depth) == pytest.approx(simulate_token_by_token(rollouts, slots, depth))


def test_partial_rollout_forecast_by_hand():
    """One slot of two is free for six of ten tokens of each rollout: the next one's short completion fits into it."""
    rollouts = [[10, 4]] * 8
    assert sampling_times(rollouts, 2, 0) == [10 * STEP + 14] * 8
    assert sampling_times(rollouts, 1, 0) == [14 * STEP + 14] * 8
    assert sampling_times(rollouts, 2, 0, step=3.0) == [44.0] * 8
    # Of the next rollout's 10 tokens, 6 are sampled beside the first rollout, and are computed again in the step after it.
    assert sampling_times(rollouts, 2, 1, step=3.0, recomputed=0.5)[:2] == [10 * 3 + 20, 4 * 3 + 8 + 0.5 * 6]


def test_plan_shows_the_forecast_where_completions_are_interrupted(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    lines = [f"20 {int(length)}" for length in np.minimum(rng.lognormal(5, 1, 64), 2000)]
    (tmp_path / "lengths.txt").write_text("\n".join(lines))
    monkeypatch.setattr(partial_rollouts, "NUM_ROLLOUTS", 8)
    sizes = "--world_size 2 --micro_batch_size 2 --global_batch_size 32 --num_generations 4 --vllm_max_num_seqs 8 --old_logprobs rollout"
    words = [*sizes.split(), "--lengths", str(tmp_path / "lengths.txt")]
    assert main(["plan", "--json", *words, "--async_rollout_depth", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["cost"]["partial_rollouts"]
    speedups = found["speedup_of_sampling"]
    assert found["groups_of_engine"] == 4 and speedups.keys() == {"1", "2", "3"}
    assert all(1 < one["min"] <= one["mean"] <= one["max"] < 3 for one in speedups.values())
    assert speedups["1"]["mean"] < speedups["2"]["mean"]
    assert main(["plan", *words, "--async_rollout_depth", "1"]) == 0
    assert "speedup of sampling by async_rollout_depth, 4 groups per engine: 1: " in capsys.readouterr().out
    servers = "--async_rollout_depth 2 --vllm_mode server --vllm_server_host h"
    assert main(["plan", "--json", *[word for word in words if word not in ("--vllm_max_num_seqs", "8")], *servers.split()]) == 0
    with_servers = json.loads(capsys.readouterr().out)["cost"]["partial_rollouts"]
    assert with_servers["groups_of_engine"] == 8 and with_servers["speedup_of_sampling"].keys() == {"2", "3"}
    assert with_servers["assumptions"][1].startswith("relative to depth 1")
    assert main(["plan", "--json", *words]) == 0
    assert "partial_rollouts" not in json.loads(capsys.readouterr().out)["cost"]
    assert NUM_ROLLOUTS > FIRST + 3
