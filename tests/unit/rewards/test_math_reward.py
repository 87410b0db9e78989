"""The reward `math`: answers that it treats as equal, and model output that must not block it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytest.importorskip("math_verify")

from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.rewards.protocol import RewardBatch, RowFailure
from megatron_grpo.run.rewards.scoring import score

HANGS = "\\boxed{9^{9^{9^{9}}}}"  # sympy would evaluate it


def load(**settings):
    return load_rewards(Config().with_values({"reward_funcs": ["math"], **settings}))[0]


@pytest.fixture(scope="module")
def math_reward():
    # Long enough for a machine that is busy; a row that hangs costs the first look and this.
    function = load(math_timeout=8.0).function
    yield function
    function.close()


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("42", 42, 1), ("The sum is 42.", "42", 1), ("so \\boxed{42}", 42, 1), ("41", 42, 0), ("", 42, 0), ("0.5", "1/2", 1),
     ("\\boxed{\\frac{1}{2}}", "0.5", 1), ("$\\frac{2}{4}$", "\\frac{1}{2}", 1), ("\\boxed{(1,2)}", "(1,2)", 1),
     ("\\boxed{(1,3)}", "(1,2)", 0), ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1), ("$x^2+2x+1$", "$(x+1)^2$", 1), ("1000", "1,000", 1),
     ("\\boxed{-3}", "3", 0),
     ("we get 7 and then \\boxed{8}", "7", 0), ("Paris", "paris", 1), ("Lyon", "Paris", 0), ("5+5\n#### 10", "10", 1),
     ("10", "5+5\n#### 10", 1),
     ("<think>\\boxed{1}</think>\\boxed{2}", "2", 1), ("10", None, None), ("7", ["8", "7"], 1)],
)  # fmt: skip
def test_math_reward_equal_expressions_score_one(math_reward, text, answer, expected):
    assert math_reward(completions=[text], answer=[answer]) == [expected]


def test_math_reward_supports_chats_and_solution_column(math_reward):
    completions = [[{"role": "assistant", "content": "My answer is \\boxed{\\frac{1}{3}}"}]] * 2
    assert math_reward(completions=completions, solution=["\\frac{1}{3}", "\\frac{1}{2}"]) == [1, 0]


def test_math_reward_hanging_answer_scores_zero_and_others_are_scored(math_reward):
    started = time.monotonic()
    texts = ["$\\frac{1}{2}$", HANGS, "$\\frac{3}{6}$", "\\boxed{7}"]
    assert math_reward(completions=texts, answer=["0.5"] * 4) == [1, 0, 1, 0]
    assert time.monotonic() - started < 30  # one deadline of a second, and the start of a new child on a busy machine


def test_math_reward_rows_after_batch_timeout_fail_instead_of_scoring_zero():
    function = load(math_timeout=30.0, reward_timeout=1.0)
    batch = RewardBatch(prompts=["p"] * 3, completions=[HANGS, "$\\frac{1}{2}$", "7"], completion_ids=[[1]] * 3,
                        columns={"answer": ["0.5", "0.5", "7"]}, labels=["row 0", "row 1", "row 2"])  # fmt: skip
    scores = function.function(completions=batch.completions, **batch.columns)
    function.close()
    assert scores[0] == 0 and isinstance(scores[1], RowFailure) and scores[2] == 1  # the last needs no child: it is equal as text
    assert scores[1].reason == "reached its reward_timeout of 1 s before this row,"


def test_math_reward_memory_is_limited(math_reward):
    assert math_reward(completions=["\\boxed{10^{10^{10}} + 1}"], answer=["5"]) == [0]


def test_math_reward_reuses_one_child_process(math_reward):
    math_reward(completions=["$\\frac{1}{2}$"], answer=["0.5"])
    first = math_reward.child._process.pid
    math_reward(completions=["$\\frac{1}{4}$"], answer=["0.25"])
    assert math_reward.child._process.pid == first


def test_math_reward_restarts_killed_child_process(math_reward):
    math_reward(completions=["$\\frac{1}{2}$"], answer=["0.5"])
    os.kill(math_reward.child._process.pid, signal.SIGKILL)
    time.sleep(0.2)  # until its end is seen
    assert math_reward(completions=["$\\frac{1}{2}$"], answer=["0.5"]) == [1]


def test_math_reward_is_scored_through_score_batch():
    function = load()
    batch = RewardBatch(prompts=["p"], completions=["0.50"], completion_ids=[[1]], columns={"answer": ["1/2"]}, labels=["row 0"])
    assert score([function], batch).rows == ((1.0,),)
    function.close()


@pytest.mark.parametrize("text", ["$\\frac{1}{2}$", HANGS])
def test_math_reward_child_process_ends_with_its_parent(text):
    program = (
        "import sys, threading, time\n"
        "from megatron_grpo.plugins.rewards.math import MathReward\n"
        "reward = MathReward(needs=(('answer',),), row_seconds=600, batch_seconds=600)\n"
        "reward.child._ensure_started()\n"
        "print(reward.child._process.pid, flush=True)\n"
        f"reward.child.ask({{'text': {text!r}, 'given': '', 'answers': ['1/3']}}, 600)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=5)
    assert not alive


def test_math_reward_process_has_no_secret_variables(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("ORDINARY", "kept")
    function = load().function
    try:
        assert function(completions=["$x$"], answer=["$y$"]) == [0]
        environ = psutil.Process(function.child._process.pid).environ()
        assert environ["ORDINARY"] == "kept" and "sesame" not in environ.values()
    finally:
        function.close()
