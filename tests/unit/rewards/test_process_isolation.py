"""Isolation of reward functions: exits, forks and closed output do not affect the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from megatron_grpo.core.base.errors import ConfigError, RewardError
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.rewards.process_isolation import ExitRequestedError, IsolatedCall
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction
from megatron_grpo.run.rewards.scoring import score


def batch(rows=2):
    return RewardBatch(prompts=["p"] * rows, completions=["c"] * rows, completion_ids=[[1]] * rows, columns={},
                       labels=[f"row {row}" for row in range(rows)])  # fmt: skip


def reward(function, on_error="raise"):
    return RewardFunction(name=function.__name__, function=function, timeout=60, on_error=on_error)


def run(program: str) -> subprocess.CompletedProcess:
    """A process that scores: `program` defines `f`, `after()` is called when the scores are there."""
    start = "from tests.unit.rewards.test_process_isolation import *\nimport os, sys, time\n"
    return subprocess.run([sys.executable, "-c", start + textwrap.dedent(program)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip


def exits(completions):
    sys.exit(0)


async def exits_later(completions):
    await asyncio.sleep(0)
    sys.exit(0)


@pytest.mark.parametrize("function", [exits, exits_later])
def test_reward_that_exits_is_a_failure_with_location(function):
    with pytest.raises(
        RewardError, match=rf"`{function.__name__}` tried to end the process with SystemExit: 0 \(test_process_isolation.py line"
    ):
        score([reward(function)], batch())
    assert score([reward(function, "none")], batch()).rows == ((None,), (None,))


def test_reward_raising_keyboard_interrupt_is_a_failure_with_signal_handler():
    def interrupts(completions):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # as `run.signals` does
    try:
        with pytest.raises(RewardError, match="tried to end the process with KeyboardInterrupt"):
            score([reward(interrupts)], batch())
    finally:
        signal.signal(signal.SIGINT, before)


def test_reward_isolation_passes_ctrl_c_without_signal_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), IsolatedCall([]):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["return [0.0] * len(completions)", "raise ValueError('in the child')"])
def test_reward_forked_child_does_not_continue_the_run(how):
    ended = run(f"""
        def f(completions):
            if os.fork() == 0:
                {how}
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
            return [1.0] * len(completions)
        print(score([reward(f)], batch(1)).rows, flush=True)
    """)
    assert ended.stdout.splitlines() == ["((1.0,),)"], ended.stderr
    assert "which a reward function forked" in ended.stderr and "It ends here." in ended.stderr


def test_reward_forked_child_keeps_its_exit_code():
    ended = run("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one about forks beside threads
        def f(completions):
            if os.fork() == 0:
                sys.exit(7)
            return [float(os.waitstatus_to_exitcode(os.wait()[1]))]
        print(score([reward(f)], batch(1)).rows, flush=True)
    """)
    assert (ended.stdout, ended.stderr) == ("((7.0,),)\n", "")


@pytest.mark.parametrize("how", ["sys.stdout.close()", "os.close(1)"])
def test_reward_that_closes_stdout_gets_it_reopened_with_note(how, tmp_path):
    ended = run(f"""
        def f(completions):
            {how}
            return [1.0] * len(completions)
        scores = score([reward(f)], batch(2))
        file = open({str(tmp_path / "a checkpoint")!r}, "w")  # takes the lowest number that is free
        print(scores.notices[0].message, len(scores.notices), flush=True)
    """)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "Reward `f` closed stdout; it was reopened. 1\n"
    assert (tmp_path / "a checkpoint").read_text() == ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("set_default_dtype(torch.float64)", "default dtype to torch.float64; it was reset to torch.float32"),
        ("set_default_device('meta')", "default device to meta; it was reset to cpu"),
        ("set_num_threads(7)", "number of threads to 7; it was reset to 3"),
    ],
    ids=["dtype", "device", "threads"],
)
def test_reward_changes_of_torch_settings_are_reverted_with_note(how, said):
    ended = run(f"""
        import torch
        torch.set_num_threads(3)
        def f(completions):
            torch.{how}
            return [1.0] * len(completions)
        print(score([reward(f)], batch(1)).notices[0].message, torch.zeros(1).dtype, torch.zeros(1).device, torch.get_num_threads())
    """)
    assert ended.stdout == f"Reward `f` changed torch's {said}. torch.float32 cpu 3\n", ended.stderr


def test_reward_file_that_exits_at_import_is_rejected(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"leaves.py cannot be loaded: it tried to end the process with SystemExit: 0\.$"):
        load_rewards(Config().with_values({"reward_funcs": [f"{tmp_path}/leaves.py:f"]}))


def test_reward_class_that_cannot_be_instantiated_is_rejected(tmp_path):
    (tmp_path / "plugin.py").write_text("class P:\n    def __init__(self): {}['key']\n    def __call__(self, completions): return []\n")
    with pytest.raises(ConfigError, match="P is a class that cannot be instantiated without arguments: KeyError: 'key'."):
        load_rewards(Config().with_values({"reward_funcs": [f"{tmp_path}/plugin.py:P"]}))


def test_reward_file_that_changes_directory_does_not_affect_next_file(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "first.py").write_text("import os\nos.chdir('inner')\ndef f(completions): return []\n")
    (tmp_path / "second.py").write_text("def g(completions): return []\n")
    monkeypatch.chdir(tmp_path)
    functions = load_rewards(Config().with_values({"reward_funcs": ["first.py:f", "second.py:g", "length"]}))
    assert [function.name for function in functions] == ["f", "g", "length"]


def test_reward_isolation_passes_ordinary_exceptions():
    with pytest.raises(ZeroDivisionError), IsolatedCall([]):
        raise ZeroDivisionError
    with pytest.raises(ExitRequestedError), IsolatedCall([]):
        raise SystemExit
