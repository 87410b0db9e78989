"""examples/judge_turns.py on made-up runs: faults are reported."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


judge = load(ROOT / "examples/judge_turns.py")
STEP = {
    "step": 1,
    "time/step": 2.0,
    "sampling/sampling_logp_difference/max": 1e-6,
    "episodes/failed": 0,
    "rewards/correct/mean": 0.5,
    "episodes/turns": 2.0,
}
BEFORE = {"step": 0, "score": "correct", "n": 8, "mean@8": 0.3, "mean@8/stderr": 0.02}
AFTER = {"step": 40, "score": "correct", "n": 8, "mean@8": 0.95, "mean@8/stderr": 0.01, "change": 0.65, "change/stderr": 0.02}


@pytest.mark.parametrize(
    ("steps", "evaluations", "says"),
    [
        ([STEP], [BEFORE, AFTER], None),
        ([], [BEFORE, AFTER], "no result to check"),
        ([STEP], [BEFORE], "no result to check"),
        ([STEP], [BEFORE | {"mean@8": 0.6}, AFTER], "before training is 0.600, more than 0.5"),
        ([STEP], [BEFORE, AFTER | {"mean@8": 0.8}], "after training is 0.800, less than 0.9"),
        ([STEP], [BEFORE, AFTER | {"change": None}], "have different prompts"),
        ([STEP], [BEFORE, AFTER | {"change/stderr": 0.2}], "is not 5 times its standard error"),
        ([STEP | {"episodes/failed": 1}], [BEFORE, AFTER], "some episodes failed"),
        ([STEP | {"sampling/sampling_logp_difference/max": float("nan")}], [BEFORE, AFTER], "differ by up to nan"),
    ],
)
def test_judge_turns_find_faults_by_hand(steps, evaluations, says):
    faults, _ = judge.find_problems(steps, evaluations, 0.5, 0.9)
    assert (faults == []) if says is None else (len(faults) == 1 and says in faults[0])


def test_judge_turns_draw_writes_png(tmp_path):
    judge.draw_plot([STEP, STEP | {"step": 2}], [BEFORE, AFTER], ["episodes/turns", "not there"], tmp_path / "a" / "b.png")
    assert (tmp_path / "a" / "b.png").stat().st_size > 5000


@pytest.mark.parametrize("example", ["calculator", "guessing"])
def test_warm_start_episodes_exclude_held_out_rows(example):
    episodes = load(ROOT / "examples" / example / "episodes.py")
    rows, draw = episodes.make_rows(), random.Random(0)
    assert len(rows["test"]) >= 60 and not {str(row) for row in rows["train"]} & {str(row) for row in rows["test"]}
    for row in rows["train"][:200]:
        messages = episodes.make_episode(draw, row)
        assert messages[: len(row["prompt"])] == row["prompt"] and messages[-1]["role"] == "assistant"
        assert all(one["role"] != other["role"] for one, other in zip(messages, messages[1:]))
