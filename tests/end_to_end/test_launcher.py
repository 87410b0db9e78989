"""Runs under a real torchrun: after each kind of end no process is left, and the reason is printed once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.runs import read_jsonl, write_inputs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED = [str(ROOT / "tests/end_to_end/slow_run.py")]  # half of what a rank with vLLM costs, which is mostly imports
UNCHECKED = ["--verify_weight_sync", "false"]  # a table's log-probs are not the policy's
LONG = 180.0  # seconds; two ranks import everything afresh, on a machine that may be busy


def find_processes(folder: Path) -> list[int]:
    """Return other processes with `folder` in their command line."""
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


@contextmanager
def running(folder: Path, program: Sequence[str], *more: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A run of two ranks that has trained a step: (launcher, output_dir). SCRIPTED waits while `folder` has a file `sampling`."""
    out = folder / "out"
    flags = [*write_inputs(folder), *("--output_dir", str(out)), *("--max_steps", "100000"), *("--log_completions_steps", "0"), *more]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    log = (folder / "log").open("wb")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PACE": str(folder)}
    launcher = subprocess.Popen([*launch, *program, "train", *flags], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() or launcher.poll() is not None, "the first optimizer step")
        assert launcher.poll() is None, (folder / "log").read_text()[-4000:]
        yield launcher, out
    finally:
        for pid in find_processes(folder):
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def test_launcher_killed_leaves_no_process(tmp_path):
    with running(tmp_path, ["-m", "megatron_grpo"]) as (launcher, _):
        assert len(find_processes(tmp_path)) >= 3
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not find_processes(tmp_path), "the end of every rank", 10)


def test_launcher_second_run_in_same_output_dir_is_an_error_and_first_saves_on_sigterm(tmp_path):
    (tmp_path / "sampling").write_text("1")  # it waits for its second rollout, while the second run comes and goes
    with running(tmp_path, SCRIPTED, *UNCHECKED) as (launcher, out):
        before = {name: (out / name).read_bytes() for name in ("config.yaml", "plan.json", "run.lock")}
        flags = [*write_inputs(tmp_path / "second"), "--output_dir", str(out), "--overwrite_output_dir", "true"]
        second = subprocess.run([sys.executable, "-m", "megatron_grpo", "train", *flags], capture_output=True, text=True)
        assert second.returncode == 2, second.stderr[-4000:]
        main_rank = json.loads(before["run.lock"])["pid"]
        assert main_rank in find_processes(tmp_path)
        assert f"is in use by another run: pid {main_rank} on " in second.stderr
        assert {name: (out / name).read_bytes() for name in before} == before
        assert read_jsonl(out / "metrics.jsonl")[0]["step"] == 1
        assert launcher.poll() is None

        (tmp_path / "sampling").unlink()
        wait_for(lambda: len(read_jsonl(out / "metrics.jsonl")) > 1, "the second optimizer step")
        launcher.terminate()
        launcher.wait(60)
        wait_for(lambda: not find_processes(tmp_path), "the end of every rank", 10)
        saved = sorted((out / "checkpoints").glob("iter_*"))
        assert len(saved) == 1
        assert int(saved[0].name.removeprefix("iter_")) == read_jsonl(out / "metrics.jsonl")[-1]["step"]


def test_launcher_lost_rank_ends_all_ranks_and_is_named(tmp_path):
    with running(tmp_path, SCRIPTED, *UNCHECKED) as (launcher, _):
        ranks = [pid for pid in find_processes(tmp_path) if pid != launcher.pid]
        os.kill(ranks[-1], signal.SIGKILL)
        assert launcher.wait(60) != 0
        wait_for(lambda: not find_processes(tmp_path), "the end of every rank", 10)
    ours = (tmp_path / "log").read_text().partition("Traceback (most recent call last)")[0]  # then follows torchrun's own report
    assert re.search(rf"^megatron-grpo: rank [01] died .*without an error message \(process {ranks[-1]} on ", ours, re.MULTILINE)
    assert ours.count("without an error message") == 1
    assert "RuntimeError" not in ours and "reward while training" not in ours


LATE = """
import os, sys, time
if os.environ["RANK"] == os.environ["LATE"]:
    time.sleep(600)  # the other rank ends the job long before
from megatron_grpo.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("late", ["0", "none"])
def test_launcher_configuration_error_is_printed_once_as_root_cause(tmp_path, late):
    (tmp_path / "late.py").write_text(LATE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(tmp_path / "late.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LATE": late}
    ended = subprocess.run([*launch, "--micro_batch_size", "two"], capture_output=True, text=True, env=environment)
    ours, _, report = ended.stderr.partition("Traceback (most recent call last)")
    assert ended.returncode != 0
    assert ours.count("micro_batch_size") == report.count("micro_batch_size") == 1
    assert "micro_batch_size" in report.partition("Root Cause")[2]


def test_launcher_silent_exit_of_a_rank_is_an_error(tmp_path):
    """`os._exit(0)` in a reward file: without the check, torchrun prints nothing and exits with code 0."""
    (tmp_path / "reward.py").write_text("import os\nos._exit(0)\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "megatron_grpo", "train"]
    ended = subprocess.run(
        [*launch, "--reward_funcs", f"{tmp_path}/reward.py:f"], capture_output=True, text=True, timeout=LONG, cwd=tmp_path
    )
    assert ended.returncode == 1
    assert "ended with exit code 0 before its command was complete" in ended.stderr
    assert "ended with exit code 0 before its command was complete" in ended.stderr.partition("Root Cause")[2]
