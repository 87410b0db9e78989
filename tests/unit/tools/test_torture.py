"""Results of tools/torture.py: accumulation, costs, and a failed chain of kills."""

from __future__ import annotations

import json

import pytest

from tools.torturing.results import BEGIN, END, FaultResult, Results, publish, summarize
from tools.torturing.target import BrokenPromiseError, SharedSetup, Target, sum_cpu_seconds


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.torturing.target.write_inputs", lambda folder, rows: [])
    (tmp_path / "reference" / "out").mkdir(parents=True)
    write(tmp_path / "reference" / "out" / "metrics.jsonl", [{"step": step, "loss": 0.1 * step, "time/step": 1.0} for step in (1, 2, 3)])
    return Target(tmp_path / "victim", SharedSetup(0, warm=False, reference=tmp_path / "reference"))


def write(path, lines, end="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)


def make_line(attempt, rank, time, cpu, what, **more):
    return {"attempt": str(attempt), "rank": rank, "time": time, "cpu": cpu, "what": what, **more}


def test_torture_results_accumulate_with_newest_verdict(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Results(path)
    first.add(FaultResult("kill/a", "p", verdict="BROKEN", why="lost").record)
    first.add(FaultResult("kill/b", "p", seconds=3.0, cpu_seconds=2.0, sampled_twice=6).record)
    assert Results(path).get_kept_names() == {"kill/b"}
    Results(path).add(FaultResult("kill/a", "p", seconds=5.0).record)
    again = Results(path)
    assert again.get_kept_names() == {"kill/a", "kill/b"}
    assert [row.verdict for row in again.get_rows(["kill/b", "never run", "kill/a"])] == ["kept", "kept"]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    publish(page, again, {"kill/a": "p", "kill/b": "today's words"}, seed=0)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| kill | 2 of 2 | 4.0 (5.0) | 2.0 (2.0) |" in text
    assert "| kill | p | 1 of 1 | a |\n| kill | today's words | 1 of 1 | b |" in text
    again.add(FaultResult("kill/b", "p", verdict="BROKEN", why="lost").record)
    publish(page, again, {"kill/a": "p", "kill/b": "p"}, seed=0)
    assert "| kill | p | 1 of 2 | a; b (BROKEN: lost) |" in page.read_text()


def test_torture_failed_chain_is_counted():
    kill = {"whom": "launcher", "seconds": None, "cpu_seconds": None, "sampled_twice": 2, "cold": False, "step": 0}
    chains = [{"kills": [kill, kill], "launches": 3, "seed": 0, "verdict": verdict} for verdict in ("kept", "BROKEN")]
    assert "4 random kills in 2 chains (6 launches, seed 0): 1 chains differed from the undisturbed run." in summarize([], chains)


def test_torture_records_before_kill_must_equal_undisturbed_run(target):
    metrics = target.out / "metrics.jsonl"
    target.check_partial_results()
    write(metrics, [{"step": 1, "loss": 0.1, "time/step": 9.0}, {"step": 2, "loss": 0.2}], end='\n{"step": 3, "lo')
    target.check_partial_results()
    write(metrics, [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2000001}])
    with pytest.raises(BrokenPromiseError, match="line 2: loss 0.2000001, not 0.2"):
        target.check_partial_results()


def test_torture_cost_counts_time_to_retrain_and_repeated_samples(target):
    lines = [
        make_line(1, 0, 10.0, 1.0, "sample", prompts=["rollout: 0", "evaluation of 0: 0"]),
        make_line(1, 0, 11.0, 1.5, "trained", step=1),
        make_line(1, 0, 12.0, 2.0, "sample", prompts=["rollout: 1", "evaluation of 1: 0"]),
        make_line(1, 1, 12.5, 2.0, "fault"),
        make_line(2, 0, 20.0, 0.5, "sample", prompts=["rollout: 1"]),
        make_line(2, 1, 21.0, 0.7, "trained", step=1),
        make_line(2, 0, 21.0, 0.8, "trained", step=1),
        make_line(2, 1, 22.0, 1.0, "trained", step=2),
        make_line(2, 0, 22.0, 1.1, "trained", step=2),
    ]
    for rank in (0, 1):
        write(target.log / f"rank_{rank}.jsonl", [line for line in lines if line["rank"] == rank])
    target.attempt = 2
    cost = target.compute_cost(target.find_fault_time())
    assert (cost.seconds, cost.sampled_twice, cost.trained_twice) == (9.5, 1, 1)
    assert cost.cpu_seconds == pytest.approx(2.1) and sum_cpu_seconds(lines, lines[1]) == 1.5


def test_torture_cost_after_finished_step_counts_from_next_launch(target):
    lines = [
        make_line(1, 0, 10.0, 1.0, "trained", step=1),
        make_line(1, 0, 10.5, 1.1, "fault"),
        make_line(1, 0, 11.0, 1.2, "trained", step=2),
    ]
    write(target.log / "rank_0.jsonl", [*lines, make_line(2, 0, 30.0, 3.0, "trained", step=3)])
    target.attempt = 2
    assert target.compute_cost(target.find_fault_time()).seconds == 19.5
