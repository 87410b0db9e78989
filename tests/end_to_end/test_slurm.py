"""The job files of examples/slurm on two nodes: at its time limit in mid-rollout a job saves, is requeued, and resumes exactly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks
from tests.slurm import SimulatedSlurm, SlurmCluster, free_port, is_installed, wait_for

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
# Instead of vLLM a table answers, and node1 is this machine.
TORCHRUN = """#!/usr/bin/env bash
words=("${{@/#node1:29500/127.0.0.1:{port}}}")
words=("${{words[@]/#-m/}}") words=("${{words[@]/#megatron_grpo/{root}/tests/end_to_end/slow_run.py}}")
kept=(); for word in "${{words[@]}}"; do [ -z "$word" ] || kept+=("$word"); done
exec {python} -m torch.distributed.run "${{kept[@]}}"
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(folder, flags, metrics of an undisturbed run)."""
    folder = tmp_path_factory.mktemp("slurm")
    flags = [*write_inputs(folder, rows=10), *("--max_steps", str(STEPS)), *("--verify_weight_sync", "false"), *("--export_hf", "false")]
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(folder / "whole")], timeout=180) == [0, 0]
    return folder, flags, read_logged_metrics(folder / "whole")


def read_logged_metrics(out: Path) -> list[dict]:
    """Return the logged metrics of a run's steps without times."""
    timed = ("time/", "tokens_per_second")
    return [{name: value for name, value in step.items() if not name.startswith(timed)} for step in read_jsonl(out / "metrics.jsonl")]


# Debian's own daemons take three minutes: where they are installed and this is asked for.
REAL = pytest.mark.skipif(
    not (os.environ.get("MEGATRON_GRPO_TEST_SLURM") and is_installed()), reason="MEGATRON_GRPO_TEST_SLURM=1 and Slurm"
)


@pytest.mark.parametrize("cluster", [SimulatedSlurm, pytest.param(SlurmCluster, marks=REAL)])
@pytest.mark.parametrize("job_file", ["two_nodes.slurm"])
def test_slurm_job_at_time_limit_is_requeued_and_resumes_exactly(inputs, tmp_path, cluster, job_file):
    folder, flags, undisturbed = inputs
    out, pace, log, here = tmp_path / "out", tmp_path / "pace", tmp_path / "log", tmp_path / "bin"
    pace.mkdir(), here.mkdir()
    (pace / "sampling").write_text("2")
    (here / "torchrun").write_text(TORCHRUN.format(python=sys.executable, root=ROOT, port=free_port()))
    (here / "torchrun").chmod(0o755)
    config = tmp_path / "run.yaml"
    config.write_text("".join(f"{name.strip('-')}: {value}\n" for name, value in zip(flags[::2], flags[1::2], strict=True)))
    job_copy = tmp_path / job_file  # this machine has no GPUs
    job_copy.write_text((ROOT / "examples/slurm" / job_file).read_text().replace("#SBATCH --gpus-per-node=8\n", ""))
    environment = {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PACE": str(pace), "OMP_NUM_THREADS": "1"}
    slurm = cluster(tmp_path / "slurm")
    try:
        words = [str(config), *("--output_dir", str(out)), *("--stop_drain_seconds", "0.2")]
        job = slurm.submit(job_copy, words, log, environment)
        wait_for(lambda: list(pace.glob("waits.*")) or slurm.ended(job), "a rollout that waits")
        assert not slurm.ended(job), log.read_text()[-4000:]
        slurm.send(job, signal.SIGUSR1)
        wait_for(lambda: "is requeued" in log.read_text(), "the end of the first part")
        (pace / "sampling").unlink()
        how = wait_for(lambda: slurm.ended(job), "the end of the job")
        assert how == "COMPLETED", log.read_text()[-4000:]
    finally:
        slurm.close()
    said = log.read_text()
    assert "stopped by SIGUSR1, and sampling was cancelled; saved after optimizer step" in said
    assert said.count("Resuming from") == 1
    assert read_logged_metrics(out) == undisturbed
