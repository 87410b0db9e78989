"""The supervisor: a process that exits before its command is complete does not count as successful."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 120  # for a process that starts, on a machine that may be busy


def start(body: str) -> subprocess.Popen:
    """A program whose supervised command is `body`; it reads its own signals from the terminal's group, as a shell's job does."""
    program = "import os, signal, sys, time\nfrom megatron_grpo.run.supervisor import supervised\n"
    program += "def command():\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "raise SystemExit(supervised(command))\n"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                            start_new_session=True)  # fmt: skip


def read_end(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_supervisor_exits_with_exit_code_of_command(code):
    assert read_end(start(f"print('done')\nreturn {code}")) == (code, "done\n", "")


def test_supervisor_waits_for_threads_then_calls_atexit():
    body = """import atexit, threading
from concurrent.futures import ThreadPoolExecutor
def say(word): time.sleep(0.3); sys.stdout.write(word + ' ')
atexit.register(say, 'atexit')
ThreadPoolExecutor(1).submit(say, 'pool')
threading.Thread(target=say, args=['thread']).start()
return 3"""
    code, out, said = read_end(start(body))
    assert (code, said) == (3, "")
    assert sorted(out.split()[:2]) == ["pool", "thread"] and out.split()[2:] == ["atexit"]


def test_supervisor_exits_with_error_if_final_output_fails():
    assert read_end(start("sys.stdout = open('/dev/full', 'w')\nprint('lost')\nreturn 0"))[0] == 120
    assert read_end(start("sys.stdout = open('/dev/full', 'w')\nprint('lost')\nreturn 3"))[0] == 3


def test_supervisor_does_not_run_module_teardown():
    body = "class Slow:\n    def __del__(self): print('destroyed')\nsys.modules['json'].kept = Slow()\nreturn 0"
    assert read_end(start(f"import json\n{body}")) == (0, "", "")


@pytest.mark.parametrize("how", ["os._exit(0)", "sys.exit(0)", "os.execv('/bin/true', ['true'])"])
def test_supervisor_early_exit_with_0_gives_exit_code_1(how):
    code, _, said = read_end(start(f"{how}\nreturn 0"))
    assert code == 1
    assert said.startswith("megatron-grpo: the process ended with exit code 0 before its command was complete, so it exits with 1.")


def test_supervisor_does_not_wait_for_leftover_process():
    code, _, said = read_end(start("if os.fork() == 0:\n    os.close(1), os.close(2), time.sleep(3), os._exit(0)\nos._exit(0)"))
    assert code == 1 and "before its command was complete" in said


def test_supervisor_passes_on_exit_codes_and_signals():
    assert read_end(start("os._exit(7)"))[0] == 7
    assert read_end(start("os.kill(os.getpid(), signal.SIGKILL)"))[0] == -signal.SIGKILL
    assert read_end(start("os.kill(os.getpid(), signal.SIGABRT)"))[0] == -signal.SIGABRT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_supervisor_forwards_a_signal_once(number):
    process = start(
        "heard = []\n"
        f"signal.signal({int(number)}, lambda number, frame: heard.append(number))\n"
        "print('ready', flush=True)\n"
        "while not heard: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print(heard)\n"
        "return 3"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert read_end(process) == (3, f"[{int(number)}]\n", "")


def test_supervisor_children_end_with_the_program():
    process = start("print(os.getpid(), flush=True)\ntime.sleep(1000)")
    child = int(process.stdout.readline())
    assert child != process.pid
    process.kill()
    process.wait(SECONDS)
    for _ in range(SECONDS * 10):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child was still there")


@pytest.mark.parametrize(
    ("how", "state"),
    [
        # It runs on for a moment while it says where it is.
        ("os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)", "it is stopped (SIGSTOP or SIGTSTP)"),
        (
            "import ctypes\nctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
            "it waits and lets no other thread run",
        ),
    ],
    ids=["stopped", "in C"],
)
def test_supervisor_ends_silent_command_with_its_stack(tmp_path, how, state):
    """Alone it has no other rank that could notice."""
    lines = [
        "from megatron_grpo.core.base import activity",
        "from megatron_grpo.run import watchdog",
        "watchdog.register()",
        "activity.report_step(7)",
        f"watchdog.write_down(timeout=2.0, beats=1, output_dir={str(tmp_path)!r})",
        "with activity.phase('reward', total=3, unit='scores'):",
        *(f"    {line}" for line in how.splitlines()),
        "return 0",
    ]
    code, _, said = read_end(start("\n".join(lines)))
    assert code == 1
    assert re.search(
        r"^megatron-grpo: rank 0 on \S+ hangs in optimizer step 8, scoring rewards 0 of 3 scores, at <string> line \d+, command: ", said
    )
    assert f": {state}.\n" in said and "There is no checkpoint yet" in said
    assert (tmp_path / "watchdog/report.txt").read_text() == said.removesuffix("\n")
    assert "in command" in (tmp_path / "watchdog/rank_00000.txt").read_text()


def test_supervisor_without_watchdog_ignores_silence():
    lines = [
        "from megatron_grpo.run.watchdog import register, write_down",
        "register()",
        "write_down(timeout=1.0)",
        "write_down(timeout=0.0)",
    ]
    program = "\n".join([*lines, "time.sleep(4)", "return 0"])
    assert read_end(start(program))[0] == 0
