"""Time limits of a run (`--stop_after_minutes`, the end of a Slurm job), and requeueing of a Slurm job."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run import jobs

if TYPE_CHECKING:  # signal handlers are installed before anything else is imported
    from megatron_grpo.run.config.settings import Config

LONGEST_LEAD = 300.0  # seconds before the end of a Slurm job, or a tenth of its length if that is less
REQUEUE_SECONDS = 60.0  # time limit for slurmctld to answer


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
    job = jobs.slurm_job(env)
    if job is not None and job.end is not None:
        lead = compute_lead_seconds(cfg, job)
        if lead:
            end = time.monotonic() + job.end - time.time() - lead
            limits.append(TimeLimit(end, f"the end of Slurm's job {job.number}, {lead:.0f} s from it (stop_before_end_seconds)"))
    return limits


def compute_lead_seconds(cfg: Config, job: jobs.SlurmJob) -> float:
    """Return how many seconds before the end of the Slurm job the run stops."""
    seconds = cfg.run.stop_before_end_seconds
    if seconds is not None or job.seconds is None:
        return LONGEST_LEAD if seconds is None else seconds
    return min(LONGEST_LEAD, job.seconds / 10)


def problems_with_limits(cfg: Config, env: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return problems with the time limits in this job, before anything is started."""
    job, problems = jobs.slurm_job(env), []
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
    job = jobs.slurm_job(env)
    assert job is not None  # checked by `problems_with_limits`
    try:
        result = subprocess.run(["scontrol", "requeue", job.number], capture_output=True, text=True, timeout=REQUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"job {job.number} could not be requeued: {error}"
    if result.returncode:
        reason = " ".join(result.stderr.split()) or f"scontrol requeue ended with {result.returncode}"
        return f"job {job.number} could not be requeued: {reason}"
    return f"job {job.number} is requeued"
