"""The job that this process is part of: what Slurm and torchrun say of it, its time limits, and how its earlier attempts ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import EXIT_CONFIG, EXIT_INTERRUPTED, Problem
from megatron_grpo.core.base.launcher import COUNTS, is_count

if TYPE_CHECKING:  # signal handlers are installed before anything else is imported
    from megatron_grpo.run.config.settings import Config

LONGEST_LEAD = 300.0  # seconds before the end of a Slurm job, or a tenth of its length if that is less
REQUEUE_SECONDS = 60.0  # time limit for slurmctld to answer

# Sent by a program whose callback asks its ranks to stop (`api.launch`); 11 and 12 are for deadlines of rewards and stacks of a hang.
STOP_BY_CALLBACK = signal.SIGRTMIN + 13 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has none, and trains nothing

# Job ids of schedulers, which a restart does not change (torchrun without an id sets "none"), and counters of restarts.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
# torchrun --max-restarts restarts a job however it ended: where a restart cannot help, the new attempt ends at once, without imports.
_WHY = {
    EXIT_CONFIG: "the same configuration would be rejected again with the same number of processes",
    EXIT_INTERRUPTED: "the run was stopped by request and saved: the same command resumes it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """Slurm job of this process.

    Args:
        number: The job id.
        start: Start time, in seconds since 1970; None if Slurm does not give it.
        end: End time, in seconds since 1970; None if Slurm does not give it.
    """

    number: str
    start: float | None
    end: float | None

    @property
    def seconds(self) -> float | None:
        """Time limit of the job, in seconds; None if unknown."""
        return self.end - self.start if self.start is not None and self.end is not None else None


def slurm_job(env: Mapping[str, str]) -> SlurmJob | None:
    """Return the Slurm job of the environment, or None outside Slurm."""
    number = env.get("SLURM_JOB_ID")
    return SlurmJob(number=number, start=_time(env, "SLURM_JOB_START_TIME"), end=_time(env, "SLURM_JOB_END_TIME")) if number else None


def _time(env: Mapping[str, str], name: str) -> float | None:
    return float(env[name]) if is_count(env.get(name, "")) and int(env[name]) else None


def job_ids(env: Mapping[str, str]) -> dict[str, str]:
    """Return the job ids that schedulers set; they are the same after a restart."""
    return {name: env[name] for name in _JOBS if env.get(name, "none") not in ("", "none")}


def restart(env: Mapping[str, str]) -> str:
    """Return the restart counter of this job as `NAME=2`; "" if it has not been restarted."""
    return next((f"{name}={env[name]}" for name in _RESTARTS if env.get(name, "0") not in ("", "0")), "")


def number_asked_for() -> tuple[str, int] | None:
    """Return which variables ask for more than one process, if RANK is not set.

    Returns:
        (text that names the variables and their values, number of processes), or None.
    """
    env = os.environ
    if "RANK" in env:
        return None
    if _count(env, "NPROC_PER_NODE") * _count(env, "NNODES") > 1 and "NPROC_PER_NODE" in env:
        number = _count(env, "NPROC_PER_NODE") * _count(env, "NNODES")
        nodes = f", NNODES {env['NNODES']}" if _count(env, "NNODES") > 1 else ""
        return f"NPROC_PER_NODE ({env['NPROC_PER_NODE']}{nodes})", number
    return next(((f"{name} ({env[name]})", _count(env, name)) for name in COUNTS if _count(env, name) > 1), None)


def not_launched_problem(source: str, world_size: int, argv: Sequence[str]) -> Problem:
    """Return the problem of a single process of a job that was intended to have several.

    Args:
        world_size: The number of processes it asks for.
    """
    message = (
        f"{source} means {world_size} processes, and this one was started without a launcher: alone it would train on 1/{world_size} of "
        f"each batch. Start all processes with\n    {torchrun_line(argv, world_size)}"
    )
    return Problem(flags=(source.split(" ")[0],), message=message)


def torchrun_line(argv: Sequence[str], world_size: int) -> str:
    """Return the command that starts all ranks of `megatron-grpo train`."""
    env = os.environ
    nodes = _count(env, "SLURM_NNODES") if "SLURM_NTASKS" in env else _count(env, "NNODES")
    if world_size % nodes:
        nodes = 1
    command = f"torchrun --nproc_per_node {world_size // nodes}"
    if nodes > 1 and "SLURM_NTASKS" in env:
        first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"
        command = f"srun --ntasks {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc_per_node {world_size // nodes}"
        command += f" --rdzv_backend c10d --rdzv_id $SLURM_JOB_ID --rdzv_endpoint {first}:29500"
    elif nodes > 1:
        command += f" --nnodes {nodes} --node_rank THIS_NODE --master_addr FIRST_NODE --master_port 29500"
    elif "SLURM_NTASKS" in env:
        command = f"srun --ntasks 1 {command}"
    return f"{command} -m megatron_grpo train {shlex.join(argv)}"


def _count(env: Mapping[str, str], name: str) -> int:
    """Return the variable as a positive number; 1 if it is not one, which `read` reports."""
    return int(env[name]) if is_count(env.get(name, "")) and int(env[name]) else 1


def note_end(code: int) -> None:
    """Record for later attempts on this machine that this one ended, and that another would end in the same way.

    A record about settings applies only to attempts with the same number of ranks.
    """
    launched = launcher.read()
    if launched.attempts_file is not None:
        with contextlib.suppress(OSError), launched.attempts_file.open("a") as stream:  # without the record, later attempts take longer
            stream.write(f"{code} {launched.world_size}\n")


def ended_before() -> tuple[int, str] | None:
    """Return (exit code, message) if this attempt must end at once because of an earlier one, else None."""
    launched = launcher.read()
    try:
        lines = [line.split() for line in launched.attempts_file.read_text().splitlines()] if launched.attempts_file is not None else []
    except OSError:
        return None
    for code, world_size in lines:
        if int(code) == EXIT_INTERRUPTED or int(world_size) == launched.world_size:
            return int(code), f"torchrun started the job again, and this attempt ends at once: {_WHY[int(code)]}."
    return None


def num_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, without it of those of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(gpu_memories())
    return len([device for device in visible.split(",") if device.strip() and device.strip() != "-1"])


def gpu_memories() -> list[int]:
    """Return the memory of each GPU that nvidia-smi lists, in bytes. torch would create a CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return [int(mebibytes) * 2**20 for mebibytes in listed]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """Time limit of a run.

    Args:
        at: When it ends, in seconds of time.monotonic.
        why: End of the sentence "stopped by ...".
    """

    at: float
    why: str


@dataclass(frozen=True, slots=True)
class StopReason:
    """Reason why a run is to stop.

    Args:
        why: End of the sentence "stopped by ...".
        is_time: Whether the time of the job is up, so that it may be requeued.
    """

    why: str
    is_time: bool = False


def list_time_limits(cfg: Config, launched_at: float, env: Mapping[str, str] = os.environ) -> list[TimeLimit]:
    """Return the time limits of a run.

    Args:
        launched_at: When the job was launched, in seconds of time.monotonic.
    """
    limits = []
    if cfg.run.stop_after_minutes is not None:
        limits.append(TimeLimit(launched_at + 60 * cfg.run.stop_after_minutes, f"stop_after_minutes ({cfg.run.stop_after_minutes:g})"))
    job = slurm_job(env)
    if job is not None and job.end is not None:
        lead = compute_lead_seconds(cfg, job)
        if lead:
            end = time.monotonic() + job.end - time.time() - lead
            limits.append(TimeLimit(end, f"the end of Slurm's job {job.number}, {lead:.0f} s from it (stop_before_end_seconds)"))
    return limits


def compute_lead_seconds(cfg: Config, job: SlurmJob) -> float:
    """Return how many seconds before the end of the Slurm job the run stops."""
    seconds = cfg.run.stop_before_end_seconds
    if seconds is not None or job.seconds is None:
        return LONGEST_LEAD if seconds is None else seconds
    return min(LONGEST_LEAD, job.seconds / 10)


def problems_with_limits(cfg: Config, env: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return problems with the time limits in this job, before anything is started."""
    job, problems = slurm_job(env), []
    lead, seconds = cfg.run.stop_before_end_seconds, job.seconds if job is not None else None
    if job is not None and lead is not None and seconds is not None and lead >= seconds:
        name = cfg.typed.get("stop_before_end_seconds", "stop_before_end_seconds")
        proposed = int(seconds / 10)
        problems.append(Problem(
            flags=(name,), nearest={name: [proposed]},
            message=f"{name} ({lead:g}) is not less than the {seconds:g} s of Slurm job {job.number}: the run would stop before its first "
                    f"step. Use {proposed}, or request more time (--time)."))  # fmt: skip
    if cfg.run.requeue:
        name = cfg.typed.get("requeue", "requeue")
        if job is None:
            message = f"{name} true requeues a Slurm job, and this is not a Slurm job (SLURM_JOB_ID is not set). Omit it."
            problems.append(Problem(flags=(name,), message=message))
        elif shutil.which("scontrol") is None:
            message = f"{name} true requires scontrol, which was not found. Add it to PATH, or omit {name}."
            problems.append(Problem(flags=(name,), message=message))
    return problems


def requeue(env: Mapping[str, str] = os.environ) -> str:
    """Requeue this Slurm job; Slurm then ends the job's processes.

    Returns:
        The outcome, in words.
    """
    job = slurm_job(env)
    assert job is not None  # checked by `problems_with_limits`
    try:
        result = subprocess.run(["scontrol", "requeue", job.number], capture_output=True, text=True, timeout=REQUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job.number} could not be requeued: {error}"
    if result.returncode:
        reason = " ".join(result.stderr.split()) or f"scontrol requeue ended with {result.returncode}"
        return f"job {job.number} could not be requeued: {reason}"
    return f"job {job.number} is requeued"
