"""Launch environment of this process: the one module that reads RANK, WORLD_SIZE and the variables that launchers add.

torchrun, and launchers that start ranks as it does, set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Everything else here
serves the message for a user who started one process where several were intended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_grpo.core.base.errors import EXIT_CONFIG, EXIT_INTERRUPTED, Problem

# Sent by a program whose callback asks its ranks to stop (`api.launch`); 11 and 12 are for deadlines of rewards and stacks of a hang.
STOP_BY_CALLBACK = signal.SIGRTMIN + 13 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has none, and trains nothing

# Variables of launchers that start many processes without setting RANK: without RANK each process would train a separate run.
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NUMBERS = (*_COUNTS, "NPROC_PER_NODE", "NNODES", "SLURM_NNODES")

# Job ids of schedulers, which a restart does not change (torchrun without an id sets "none"), and counters of restarts.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


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
    return float(env[name]) if _is_count(env.get(name, "")) and int(env[name]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """Rank and rendezvous of this process, as its launcher set them. A process without a launcher is rank 0 of 1.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this machine.
        has_other_machines: Whether the job spans several machines.
        is_launched: Whether a launcher set RANK.
        by_torchrun: Whether that launcher is torchrun.
        address: Address of the rendezvous store.
        port: Port of the rendezvous store.
        launcher_holds_store: Whether torchrun itself runs the store.
        report_file: File shared by the ranks of one attempt on one machine, if known; they record in it which messages were printed.
        attempts_file: File shared by all attempts of one torchrun; they record in it how they ended.
        error_file: File from which torchrun reads the reason of a failure.
        problems: Problems with the environment itself.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    has_other_machines: bool = False
    is_launched: bool = False
    by_torchrun: bool = False
    address: str = "127.0.0.1"
    port: int = 0
    launcher_holds_store: bool = False
    report_file: Path | None = None
    attempts_file: Path | None = None
    error_file: Path | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def is_logging_rank(self) -> bool:
        """Whether this rank prints where ranks cannot agree on one: the first rank of each machine."""
        return self.rank == 0 or (self.is_launched and self.local_rank == 0)


def read(env: Mapping[str, str] | None = None) -> LaunchInfo:
    """Read the launch environment. Never raises: problems are returned in the result, so that they can be reported.

    Args:
        env: Environment variables; None reads those of this process.
    """
    env = os.environ if env is None else env
    report_file, error_file = _shared_file(env), env.get("TORCHELASTIC_ERROR_FILE")
    end_message = (
        report_file.parent.parent / "megatron_grpo.ended" if report_file is not None and error_file else None
    )  # beside its attempt_0, attempt_1, ...
    single = LaunchInfo(report_file=report_file, attempts_file=end_message, error_file=Path(error_file) if error_file else None)
    if "RANK" not in env:
        invalid = [f"{name} is {env[name]!r}" for name in _NUMBERS if env.get(name) and not (_is_count(env[name]) and int(env[name]))]
        message = f"The environment sets the number of processes, but {'; '.join(invalid)}. Unset it, or start the job with torchrun."
        return replace(single, problems=(Problem(flags=(), message=message),)) if invalid else single
    numbers, invalid = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}, []
    for name in ("RANK", "WORLD_SIZE", *numbers):
        text = env.get(name)
        if text is not None and _is_count(text) and (name != "MASTER_PORT" or int(text) < 2**16):
            numbers[name] = int(text)
        elif text is not None or name not in numbers:
            invalid.append(f"{name} is {text!r}" if text is not None else f"{name} is not set")
    if not invalid and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        invalid.append(f"RANK is {numbers['RANK']} and WORLD_SIZE {numbers['WORLD_SIZE']}: ranks go from 0 to {numbers['WORLD_SIZE'] - 1}")
    if not invalid and numbers["WORLD_SIZE"] > 1:
        invalid += [f"{name} is not set" for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if invalid:
        message = f"RANK is set, as by a launcher, but {'; '.join(invalid)}. Start the job with torchrun."
        return replace(single, problems=(Problem(flags=(), message=message),))
    return replace(
        single, rank=numbers["RANK"], world_size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"],
        has_other_machines=numbers["WORLD_SIZE"] > numbers["LOCAL_WORLD_SIZE"], is_launched=True,
        by_torchrun="TORCHELASTIC_RUN_ID" in env, address=env.get("MASTER_ADDR", "127.0.0.1"), port=numbers["MASTER_PORT"],
        launcher_holds_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def _shared_file(env: Mapping[str, str]) -> Path | None:
    """Return a file path that the ranks of one attempt on one machine share, or None.

    torchrun creates a new folder for each attempt on each machine; a Slurm step has a unique number.
    """
    if "TORCHELASTIC_ERROR_FILE" in env:  # .../attempt_0/<local rank>/error.json
        return Path(env["TORCHELASTIC_ERROR_FILE"]).parent.parent / "megatron_grpo.said"
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
        return Path(tempfile.gettempdir()) / f"megatron_grpo.{os.getuid()}.{step}.said"
    return None


def make_environment(rank: int, *, world_size: int, port: int, error_file: Path | None = None) -> dict[str, str]:
    """Return the environment variables of one rank of a job on this machine alone.

    Args:
        port: A free port, for the store of rank 0.
        error_file: File for the error of this rank, as torchrun has one. Ranks that fail alike then print the message once.
    """
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    error_variables = {} if error_file is None else {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **error_variables}


def number_asked_for(env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return which variables ask for more than one process, if RANK is not set.

    Args:
        env: Environment variables; None reads those of this process.

    Returns:
        (text that names the variables and their values, number of processes), or None.
    """
    env = os.environ if env is None else env
    if "RANK" in env:
        return None
    if _count(env, "NPROC_PER_NODE") * _count(env, "NNODES") > 1 and "NPROC_PER_NODE" in env:
        number = _count(env, "NPROC_PER_NODE") * _count(env, "NNODES")
        nodes = f", NNODES {env['NNODES']}" if _count(env, "NNODES") > 1 else ""
        return f"NPROC_PER_NODE ({env['NPROC_PER_NODE']}{nodes})", number
    return next(((f"{name} ({env[name]})", _count(env, name)) for name in _COUNTS if _count(env, name) > 1), None)


def torchrun_line(argv: Sequence[str], world_size: int, env: Mapping[str, str] | None = None) -> str:
    """Return the command that starts all ranks of `megatron-grpo train`.

    Args:
        env: Environment variables; None reads those of this process.
    """
    env = os.environ if env is None else env
    nodes = _count(env, "SLURM_NNODES") if "SLURM_NTASKS" in env else _count(env, "NNODES")
    if world_size % nodes:
        nodes = 1
    launcher = f"torchrun --nproc_per_node {world_size // nodes}"
    if nodes > 1 and "SLURM_NTASKS" in env:
        first = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"
        launcher = f"srun --ntasks {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc_per_node {world_size // nodes}"
        launcher += f" --rdzv_backend c10d --rdzv_id $SLURM_JOB_ID --rdzv_endpoint {first}:29500"
    elif nodes > 1:
        launcher += f" --nnodes {nodes} --node_rank THIS_NODE --master_addr FIRST_NODE --master_port 29500"
    elif "SLURM_NTASKS" in env:
        launcher = f"srun --ntasks 1 {launcher}"
    return f"{launcher} -m megatron_grpo train {shlex.join(argv)}"


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


def become_single(port: int) -> None:
    """Set the environment variables of a job of one rank, because libraries read them. Variables that are set are kept."""
    for name, value in make_environment(0, world_size=1, port=port).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def on_device(number: int | None) -> Iterator[None]:
    """Set LOCAL_RANK to a GPU number inside the block, for a library that selects its GPU by LOCAL_RANK.

    A launcher may make one GPU visible to each of its tasks and still number the tasks.

    Args:
        number: Number of the GPU; None without one.
    """
    old_rank = os.environ.get("LOCAL_RANK")
    if number is not None:
        os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)
        if old_rank is not None:
            os.environ["LOCAL_RANK"] = old_rank


def _count(env: Mapping[str, str], name: str) -> int:
    """Return the variable as a positive number; 1 if it is not one, which `read` reports."""
    return int(env[name]) if _is_count(env.get(name, "")) and int(env[name]) else 1


def _is_count(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit()


def job_ids(env: Mapping[str, str]) -> dict[str, str]:
    """Return the job ids that schedulers set; they are the same after a restart."""
    return {name: env[name] for name in _JOBS if env.get(name, "none") not in ("", "none")}


def restart(env: Mapping[str, str]) -> str:
    """Return the restart counter of this job as `NAME=2`; "" if it has not been restarted."""
    return next((f"{name}={env[name]}" for name in _RESTARTS if env.get(name, "0") not in ("", "0")), "")


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove the variables of a torchrun rank, for a process that is not a rank although a rank or a job started it.

    Args:
        environment: Environment variables; changed in place.
    """
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    for name in [name for name in environment if name in names or name.startswith("TORCHELASTIC_")]:
        del environment[name]


# ---- torchrun --max-restarts restarts a job however it ended: where a restart cannot help, the new attempt ends at once, without imports

_WHY = {
    EXIT_CONFIG: "the same configuration would be rejected again with the same number of processes",
    EXIT_INTERRUPTED: "the run was stopped by request and saved: the same command resumes it",
}


def note_end(code: int) -> None:
    """Record for later attempts on this machine that this one ended, and that another would end in the same way.

    A record about settings applies only to attempts with the same number of ranks.
    """
    launched = read()
    if launched.attempts_file is not None:
        with contextlib.suppress(OSError), launched.attempts_file.open("a") as stream:  # without the record, later attempts take longer
            stream.write(f"{code} {launched.world_size}\n")


def ended_before() -> tuple[int, str] | None:
    """Return (exit code, message) if this attempt must end at once because of an earlier one, else None."""
    launched = read()
    try:
        lines = [line.split() for line in launched.attempts_file.read_text().splitlines()] if launched.attempts_file is not None else []
    except OSError:
        return None
    for code, world_size in lines:
        if int(code) == EXIT_INTERRUPTED or int(world_size) == launched.world_size:
            return int(code), f"torchrun started the job again, and this attempt ends at once: {_WHY[int(code)]}."
    return None


def gpu_memories() -> list[int]:
    """Return the memory of each GPU that nvidia-smi lists, in bytes. torch would create a CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
        return [int(mebibytes) * 2**20 for mebibytes in listed]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def num_gpus() -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, without it of those of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(gpu_memories())
    return len([device for device in visible.split(",") if device.strip() and device.strip() != "-1"])
