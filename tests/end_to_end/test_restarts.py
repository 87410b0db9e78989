"""torchrun restarts a job: with all machines, with fewer, or without success; no process outlives a launcher that exits early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.end_to_end.test_launcher import find_processes
from tests.ranks import run_ranks
from tests.slurm import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
SLOW_RUN = str(ROOT / "tests/end_to_end/slow_run.py")
STEPS = 6


@pytest.fixture
def machines(tmp_path):
    """Return a function that starts torchrun on one more machine of a job; all share `tmp_path`, and the first has the store."""
    port, started = free_port(), []

    def start(*flags: str, machines: str) -> subprocess.Popen:
        conf = f"last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5,is_host={int(not started)}"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", machines, "--nproc_per_node", "1", "--max-restarts", "3"]
        launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "job", "--rdzv_conf", conf]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PACE": str(tmp_path)}
        log = (tmp_path / f"log.{len(started)}").open("wb")
        started.append(
            subprocess.Popen([*launch, SLOW_RUN, "train", *flags], stdout=log, stderr=log, env=environment, start_new_session=True)
        )
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.wait()
    for pid in find_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_restart_continues_after_lost_rank_and_on_fewer_machines(machines, tmp_path):
    """The launcher of the lost rank counts a restart; if the other one sees the loss first, it counts none. They share a store."""
    out = tmp_path / "out"
    flags = [*write_inputs(tmp_path), *("--max_steps", str(STEPS)), *("--verify_weight_sync", "false"), *("--export_hf", "false")]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(tmp_path / "whole")], timeout=180) == [0, 0]
    flags += [*("--output_dir", str(out)), *("--save_steps", "1")]

    def saved() -> tuple[int, int]:
        """Return step and ranks of the newest checkpoint."""
        found = sorted((out / "checkpoints").glob("iter_*/manifest.json"))
        facts = json.loads(found[-1].read_text()) if found else {"step": 0, "world_size": 0}
        return facts["step"], facts["world_size"]

    def ranks_that_saved(step: int) -> int:
        wait_for(lambda: saved()[0] == step, f"the checkpoint of step {step}")
        return saved()[1]

    def hold_after(step: int) -> None:
        (tmp_path / "sampling").write_text(str(step))

    hold_after(1)
    first, second = (machines(*flags, machines="1:2") for _ in range(2))
    assert ranks_that_saved(1) == 2
    [rank] = [pid for pid in list_children(second.pid) if pid in find_processes(tmp_path)]
    os.kill(rank, signal.SIGKILL)
    hold_after(3)
    assert ranks_that_saved(3) == 2
    second.kill()  # its rank goes with it
    (tmp_path / "sampling").unlink()
    assert first.wait(300) == 0, (tmp_path / "log.0").read_text()[-4000:]
    assert saved() == (STEPS, 1)
    expected, found = read_jsonl(tmp_path / "whole/metrics.jsonl"), read_jsonl(out / "metrics.jsonl")
    assert [step["step"] for step in found] == list(range(1, STEPS + 1))
    for name in ("loss", "reward", "grad_norm", "num_tokens", "learning_rate"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in expected], rel=1e-3, abs=1e-6)


def list_children(pid: int) -> list[int]:
    return [int(child) for children in Path(f"/proc/{pid}/task").glob("*/children") for child in children.read_text().split()]


def test_restart_of_invalid_job_fails_before_imports(tmp_path):
    """Invalid sizes are reported once, by the first attempt; further attempts end before they import anything."""
    flags = [*write_inputs(tmp_path), *("--output_dir", str(tmp_path / "out")), *("--global_batch_size", "12")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*launch, "-m", "megatron_grpo", "train", *flags], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    before = ended.stderr.partition("Traceback")[0]
    assert before.count("global_batch_size (12)") == 1 and "Use " in before
    assert ended.stderr.count("the same configuration would be rejected again with the same number of processes") >= 3


LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
worker = subprocess.Popen([sys.executable, "-m", "megatron_grpo", "train", *sys.argv[2:]], env=environment, start_new_session=True)
open(sys.argv[1], "w").write("up")
worker.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_rank_exits_if_launcher_dies_during_imports(tmp_path):
    """At any time, also before the first line of the command runs."""
    flags = [*write_inputs(tmp_path), *("--output_dir", str(tmp_path / "out"))]
    for number, delay in enumerate((0.0, 0.01, 0.02, 0.04, 0.08, 0.2, 1.0)):
        up = tmp_path / f"up.{number}"
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(up), *flags], env={**os.environ, "PYTHONPATH": str(ROOT)})
        wait_for(up.exists, "the worker")
        time.sleep(delay)
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not find_processes(tmp_path), "the end of every rank", seconds=60)
    assert not (tmp_path / "out").exists()  # none of them came so far
