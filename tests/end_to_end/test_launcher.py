"""Under a real torchrun: however a run ends, no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.runs import records, write_inputs

LONG = 180.0  # seconds; two ranks import everything afresh, on a machine that may be busy


def processes_of(folder: Path) -> list[int]:
    """Processes that have `folder` in their command line, other than this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it ended while we looked
            pass
    return found


def wait_for(condition, what: str, seconds: float = LONG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about in {seconds:.0f} s"
        time.sleep(0.1)


@pytest.fixture
def launched(tmp_path):
    """A run of two ranks that has trained a step: (launcher, output_dir)."""
    out = tmp_path / "out"
    flags = [*write_inputs(tmp_path), *("--output_dir", str(out)), *("--max_steps", "100000"), *("--log_completions_steps", "0")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "megatron_grpo", "train", *flags]
    log = (tmp_path / "log").open("wb")
    launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() or launcher.poll() is not None, "the first optimizer step")
        assert launcher.poll() is None, (tmp_path / "log").read_text()[-4000:]
        yield launcher, out
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def test_killing_the_launcher_leaves_no_process(launched, tmp_path):
    launcher, _ = launched
    assert len(processes_of(tmp_path)) >= 3
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not processes_of(tmp_path), "the end of every rank", 10)


def test_a_terminated_run_saves_and_leaves(launched, tmp_path):
    launcher, out = launched
    launcher.terminate()
    launcher.wait(60)
    wait_for(lambda: not processes_of(tmp_path), "the end of every rank", 10)
    saved = sorted((out / "checkpoints").glob("iter_*"))
    assert len(saved) == 1
    assert int(saved[0].name.removeprefix("iter_")) == records(out / "metrics.jsonl")[-1]["step"]


def test_a_rank_that_dies_takes_the_others_with_it(launched, tmp_path):
    launcher, _ = launched
    ranks = [pid for pid in processes_of(tmp_path) if pid != launcher.pid]
    os.kill(ranks[-1], signal.SIGKILL)
    assert launcher.wait(60) != 0
    wait_for(lambda: not processes_of(tmp_path), "the end of every rank", 10)


def test_a_rank_that_leaves_in_silence_does_not_pass_for_done(tmp_path):
    """`os._exit(0)` in a reward function's file: without the guard, torchrun says nothing and exits with 0."""
    (tmp_path / "reward.py").write_text("import os\nos._exit(0)\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "megatron_grpo", "train"]
    ended = subprocess.run(
        [*launch, "--reward_funcs", f"{tmp_path}/reward.py:f"], capture_output=True, text=True, timeout=LONG, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "left with exit code 0 before its command had ended" in ended.stderr
