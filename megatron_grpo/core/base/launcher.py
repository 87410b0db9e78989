"""Launch environment of this process: RANK, WORLD_SIZE and what else torchrun sets. `run/jobs.py` reads what a scheduler adds."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_grpo.core.base.errors import Problem

# Variables of launchers that start many processes without setting RANK: without RANK each process would train a separate run.
COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NUMBERS = (*COUNTS, "NPROC_PER_NODE", "NNODES", "SLURM_NNODES")


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
    # Beside its attempt_0, attempt_1, ...
    attempts_file = report_file.parent.parent / "megatron_grpo.ended" if report_file is not None and error_file else None
    single = LaunchInfo(report_file=report_file, attempts_file=attempts_file, error_file=Path(error_file) if error_file else None)
    if "RANK" not in env:
        invalid = [f"{name} is {env[name]!r}" for name in _NUMBERS if env.get(name) and not (is_count(env[name]) and int(env[name]))]
        message = f"The environment sets the number of processes, but {'; '.join(invalid)}. Unset it, or start the job with torchrun."
        return replace(single, problems=(Problem(flags=(), message=message),)) if invalid else single
    numbers, invalid = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}, []
    for name in ("RANK", "WORLD_SIZE", *numbers):
        text = env.get(name)
        if text is not None and is_count(text) and (name != "MASTER_PORT" or int(text) < 2**16):
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


def is_count(text: str) -> bool:
    """Return whether a variable is a number of processes: ASCII digits alone."""
    return text.strip().isascii() and text.strip().isdigit()


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove the variables of a torchrun rank, for a process that is not a rank although a rank or a job started it.

    Args:
        environment: Environment variables; changed in place.
    """
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    for name in [name for name in environment if name in names or name.startswith("TORCHELASTIC_")]:
        del environment[name]
