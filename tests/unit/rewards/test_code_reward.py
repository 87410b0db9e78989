"""The reward `code`: scoring of programs, and limits of the sandbox."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_grpo.plugins.rewards.code import find_program, read_tests
from megatron_grpo.plugins.rewards.sandbox import run_program, why_unsafe
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.rewards.protocol import RowFailure

ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def load_code_reward(**settings):
    return load_rewards(Config().with_values({"reward_funcs": ["code"], "code_timeout": 2.0, **settings}))[0].function


def run_attempt(program, seconds=5.0, landlock="must"):
    """What a program that prints gets done."""
    return run_program(program, as_main=True, seconds=seconds, memory_mb=512, landlock=landlock)


def test_code_sandbox_is_available_on_this_machine():
    assert why_unsafe() is None


def test_code_score_is_fraction_of_passed_tests():
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(1) == 1", "assert add('a', 'b') == 'ab'"]
    assert load_code_reward()(completions=[f"Here it is:\n{ADD}\nDone.", "no idea", ADD], tests=[tests, tests, None]) == [0.5, 0, None]
    assert load_code_reward(code_all_or_nothing=True)(completions=[ADD, ADD], tests=[tests, tests[:1]]) == [0, 1]


def test_code_stdin_programs_are_scored_by_output():
    program = "```python\nn = int(input())\nprint(n * 2, ' ')\n\n```"
    tests = [{"input": "2\n", "output": "4"}, {"input": "3", "output": "6\n"}, {"input": "x", "output": ""}, {"input": "1", "output": "3"}]
    assert load_code_reward()(completions=[program], test_cases=[tests]) == [0.5]


@pytest.mark.parametrize(
    ("tests", "read"),
    [("assert 1", (["assert 1"], [])), (["a", "b"], (["a", "b"], [])), (None, ([], [])), ("", ([], [])),
     ([{"input": 1, "output": 2}], ([], [("1", "2")])), ({"inputs": ["1"], "outputs": ["2"]}, ([], [("1", "2")])),
     (json.dumps({"inputs": ["1"], "outputs": ["2"]}), ([], [("1", "2")])), ('["assert 1"]', (["assert 1"], []))],
)  # fmt: skip
def test_code_tests_in_common_forms_are_read(tests, read):
    assert read_tests(tests) == read


def test_code_unreadable_tests_fail_only_their_row():
    scores = load_code_reward()(completions=[ADD] * 3, tests=["[broken", [3], ["assert add(1, 1) == 2"]])
    assert [isinstance(value, RowFailure) for value in scores] == [True, True, False]
    assert scores[2] == 1


def test_find_program_returns_last_block_even_if_truncated():
    assert find_program("```python\na\n```\nbetter:\n```py\nb\nc\n```") == "b\nc"
    assert find_program("```\nx = 1\n") == "x = 1\n"
    assert find_program("<think>```python\na\n```</think>print(1)") == "print(1)"


def test_a_main_guard_does_not_run_before_tests_of_functions():
    text = "```python\ndef f(): return 1\nif __name__ == '__main__':\n    print(f(int(input())))\n```"
    assert load_code_reward()(completions=[text], tests=[["assert f() == 1"]]) == [1]


def test_code_endless_program_fails_only_unfinished_tests():
    text = "```python\ndef f(n):\n    while n: pass\n    return 0\n```"
    started = time.monotonic()
    assert load_code_reward(code_timeout=0.5)(
        completions=[text, ADD], tests=[["assert f(0) == 0", "assert f(1) == 0"], ["assert add(1, 1) == 2"]]
    ) == [
        0.5,
        1,
    ]
    assert time.monotonic() - started < 30  # on a busy machine too


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "print('1\\n' * 9)", "exit()"])
def test_code_program_that_exits_early_or_prints_verdicts_fails(end):
    assert load_code_reward()(completions=[f"```python\n{end}\n```"], tests=[["assert f() == 1"]]) == [0]


@pytest.mark.parametrize(
    "program",
    ["import time; time.sleep(60)", "while True: pass", "9 ** 9 ** 9",
     "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
     "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass"],
)  # fmt: skip
def test_code_program_time_is_limited(program):
    started = time.monotonic()
    outcome = run_attempt(program, seconds=0.5)
    assert outcome.timed_out and not outcome.clean
    assert time.monotonic() - started < 30  # of 60 or more, on a busy machine too


def test_code_program_memory_is_limited():
    assert "MemoryError" in run_attempt("x = bytearray(2 << 30)").errors


def test_code_program_output_and_files_are_limited():
    outcome = run_attempt("while True: print('x' * 100000)")
    assert not outcome.clean and len(outcome.output) <= 16 << 20
    assert "File too large" in run_attempt("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))").errors
    assert "Too many open files" in run_attempt("fs = [open('/dev/null') for _ in range(1000)]").errors


@pytest.mark.parametrize(
    "action",
    ["import urllib.request as u; u.urlopen('http://127.0.0.1')", "import os; os.execv('/bin/true', ['true'])",
     "import subprocess; subprocess.run(['true'])", "import multiprocessing as m; m.Process(target=print).start()"],
)  # fmt: skip
def test_code_forbidden_action_raises_in_the_program(action):
    outcome = run_attempt(action + "\nprint('done')")
    assert outcome.output == "" and "Error" in outcome.errors


def test_code_program_cannot_read_files_of_the_run(tmp_path):
    (tmp_path / "answers.jsonl").write_text("42")
    for path in (tmp_path / "answers.jsonl", "/etc/passwd", f"/proc/{os.getpid()}/environ", Path(__file__)):
        assert "PermissionError" in run_attempt(f"open({str(path)!r}).read(); print('done')").errors


def test_code_program_does_not_see_environment_variables_of_the_run(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sesame")
    assert "sesame" not in run_attempt("import os; print(dict(os.environ))").output


def test_code_program_may_use_its_directory_threads_and_numpy():
    assert run_attempt("open('a', 'w').write('x'); print(open('a').read())").output == "x\n"
    threads = "import threading\nt = threading.Thread(target=print, args=('x',)); t.start(); t.join()"
    assert run_attempt(threads).output == "x\n"
    assert run_attempt("import numpy; print(int(numpy.ones((9, 9)).sum()))", seconds=20).output == "81\n"
    assert run_attempt("import asyncio\nasync def f(): return 1\nprint(asyncio.run(f()))").output == "1\n"


def test_code_program_leaves_no_files_and_processes(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    load_code_reward(code_timeout=0.3)(
        completions=["```python\nopen('a', 'w')\nwhile True: pass\n```"] * 3, tests=[["assert f() == 1"]] * 3
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert list(tmp_path.iterdir()) == []


def test_rows_behind_the_timeout_of_the_batch_fail_by_name():
    loop = "```python\nwhile True: pass\n```"
    scores = load_code_reward(code_timeout=30.0, reward_timeout=0.5, code_num_workers=1)(
        completions=[loop, ADD], tests=[["assert f() == 1"], ["assert add(1, 1) == 2"]]
    )
    assert scores[0] == 0 and isinstance(scores[1], RowFailure)


LEAVES = """
import os, signal, sys
from megatron_grpo.plugins.rewards import sandbox
with sandbox._directory() as folder:
    os.mkdir(os.path.join(folder, "more"))
    os.chmod(folder, 0)
    print(os.path.dirname(folder), flush=True)
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def test_code_cleanup_removes_directories_of_dead_processes_only(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}

    def start(what):
        return subprocess.Popen([sys.executable, "-c", LEAVES, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    lives, died = start("lives"), start("dies")
    living, dead = (Path(one.stdout.readline().strip()) for one in (lives, died))
    died.wait()
    named = tmp_path / f"megatron_grpo_code_{died.pid}.held"  # of a process that this one cannot see: its lock is what tells
    named.mkdir()
    handle = os.open(named, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    theirs = tmp_path / "megatron_grpo_code.txt"
    theirs.write_text("mine")
    assert dead.is_dir()
    last, _ = start("lives").communicate("", timeout=30)
    os.close(handle)
    assert not dead.exists() and living.is_dir() and named.is_dir() and theirs.is_file() and not Path(last.strip()).exists()
    lives.communicate("", timeout=30)
    assert not living.exists()
