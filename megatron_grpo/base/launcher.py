"""What the environment says about the processes of this job: the one place that reads RANK, WORLD_SIZE and what launchers add to them.

torchrun, and whoever starts ranks as it does, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Everything else here is for
the sentence that a user reads who started one process where many were meant.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_grpo.base.errors import EXIT_CONFIG, EXIT_INTERRUPTED, Problem

# Launchers that start many processes and do not say so in RANK: without RANK each of them would train a whole run of its own.
_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NUMBERS = (*_COUNTS, "NPROC_PER_NODE", "NNODES", "SLURM_NNODES")

# What a scheduler calls a job, which a restart does not change; torchrun without an id of its own says "none". And what counts restarts.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The Slurm job that this process is in. start, end: by the clock (seconds since 1970), None where Slurm does not say."""

    number: str
    start: float | None
    end: float | None

    @property
    def seconds(self) -> float | None:
        """All that it may take."""
        return self.end - self.start if self.start is not None and self.end is not None else None


def slurm_job(env: Mapping[str, str]) -> SlurmJob | None:
    number = env.get("SLURM_JOB_ID")
    return SlurmJob(number=number, start=_time(env, "SLURM_JOB_START_TIME"), end=_time(env, "SLURM_JOB_END_TIME")) if number else None


def _time(env: Mapping[str, str], name: str) -> float | None:
    return float(env[name]) if _is_count(env.get(name, "")) and int(env[name]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """This process as its launcher sees it. A process that nobody launched is rank 0 of 1.

    said: a file that the ranks of one attempt on one machine share, where that is known; they note in it what has been said.
    ended: one that all attempts of one torchrun share; they note in it how they ended.
    error_file: where torchrun looks for the reason of a failure. problems: what is wrong with the environment itself.
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
    said: Path | None = None
    ended: Path | None = None
    error_file: Path | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def speaks(self) -> bool:
        """Whether this rank talks to people where ranks cannot agree on who does: the first one of each machine."""
        return self.rank == 0 or (self.is_launched and self.local_rank == 0)


def read(env: Mapping[str, str] | None = None) -> Launched:
    """The facts; never raises, so that a report of what is wrong with them can be made."""
    env = os.environ if env is None else env
    said, error_file = _shared_file(env), env.get("TORCHELASTIC_ERROR_FILE")
    ended = said.parent.parent / "megatron_grpo.ended" if said is not None and error_file else None  # beside its attempt_0, attempt_1, ...
    alone = Launched(said=said, ended=ended, error_file=Path(error_file) if error_file else None)
    if "RANK" not in env:
        wrong = [f"{name} is {env[name]!r}" for name in _NUMBERS if env.get(name) and not (_is_count(env[name]) and int(env[name]))]
        message = f"The environment says how many processes there are, but {'; '.join(wrong)}. Unset it, or start the job with torchrun."
        return replace(alone, problems=(Problem(flags=(), message=message),)) if wrong else alone
    numbers, wrong = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}, []
    for name in ("RANK", "WORLD_SIZE", *numbers):
        text = env.get(name)
        if text is not None and _is_count(text) and (name != "MASTER_PORT" or int(text) < 2**16):
            numbers[name] = int(text)
        elif text is not None or name not in numbers:
            wrong.append(f"{name} is {text!r}" if text is not None else f"{name} is not set")
    if not wrong and numbers["RANK"] >= numbers["WORLD_SIZE"]:
        wrong.append(f"RANK is {numbers['RANK']} and WORLD_SIZE {numbers['WORLD_SIZE']}: ranks go from 0 to {numbers['WORLD_SIZE'] - 1}")
    if not wrong and numbers["WORLD_SIZE"] > 1:
        wrong += [f"{name} is not set" for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if wrong:
        message = f"RANK is set, as by a launcher, but {'; '.join(wrong)}. Start the job with torchrun."
        return replace(alone, problems=(Problem(flags=(), message=message),))
    return replace(
        alone, rank=numbers["RANK"], world_size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"],
        has_other_machines=numbers["WORLD_SIZE"] > numbers["LOCAL_WORLD_SIZE"], is_launched=True,
        by_torchrun="TORCHELASTIC_RUN_ID" in env, address=env.get("MASTER_ADDR", "127.0.0.1"), port=numbers["MASTER_PORT"],
        launcher_holds_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def _shared_file(env: Mapping[str, str]) -> Path | None:
    """torchrun makes a fresh folder for each attempt on each machine; a Slurm step has a number that no other has."""
    if "TORCHELASTIC_ERROR_FILE" in env:  # .../attempt_0/<local rank>/error.json
        return Path(env["TORCHELASTIC_ERROR_FILE"]).parent.parent / "megatron_grpo.said"
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
        return Path(tempfile.gettempdir()) / f"megatron_grpo.{os.getuid()}.{step}.said"
    return None


def environment_of(rank: int, *, world_size: int, port: int) -> dict[str, str]:
    """What one of the ranks of a job on this machine alone is to find in its environment; port: a free one, for rank 0's store."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def number_asked_for(env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Without RANK: who says that there should be more than one process, and how many. None where nobody does."""
    env = os.environ if env is None else env
    if "RANK" in env:
        return None
    if _count(env, "NPROC_PER_NODE") * _count(env, "NNODES") > 1 and "NPROC_PER_NODE" in env:
        number = _count(env, "NPROC_PER_NODE") * _count(env, "NNODES")
        nodes = f", NNODES {env['NNODES']}" if _count(env, "NNODES") > 1 else ""
        return f"NPROC_PER_NODE ({env['NPROC_PER_NODE']}{nodes})", number
    return next(((f"{name} ({env[name]})", _count(env, name)) for name in _COUNTS if _count(env, name) > 1), None)


def torchrun_line(argv: Sequence[str], world_size: int, env: Mapping[str, str] | None = None) -> str:
    """The command that starts `world_size` ranks of `megatron-grpo train` with the user's own words."""
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


def not_launched_problem(asked: str, world_size: int, argv: Sequence[str]) -> Problem:
    """Refused: one process of a job that was meant to have `world_size`. asked: who says so, with its value."""
    message = (
        f"{asked} means {world_size} processes, and this one was started without a launcher: "
        f"alone it would train 1/{world_size} of each batch. Start all of them with\n    {torchrun_line(argv, world_size)}"
    )
    return Problem(flags=(asked.split(" ")[0],), message=message)


def become_single(port: int) -> None:
    """Writes the environment of a job of one rank: libraries read it. port: of this process's own store."""
    for name, value in environment_of(0, world_size=1, port=port).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def on_device(number: int | None) -> Iterator[None]:
    """Around a library that takes the GPU whose number LOCAL_RANK says. A launcher may show each of its tasks one GPU alone, and count on.

    number: of the GPU; None where there is none.
    """
    before = os.environ.get("LOCAL_RANK")
    if number is not None:
        os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def _count(env: Mapping[str, str], name: str) -> int:
    """1 where it is not a number, which `read` refuses."""
    return int(env[name]) if _is_count(env.get(name, "")) and int(env[name]) else 1


def _is_count(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit()


def job_ids(env: Mapping[str, str]) -> dict[str, str]:
    """The ids that schedulers gave this job; a restarted job has the same."""
    return {name: env[name] for name in _JOBS if env.get(name, "none") not in ("", "none")}


def restart(env: Mapping[str, str]) -> str:
    """The counter that says that this job has been restarted, as `NAME=2`; "" where it has not."""
    return next((f"{name}={env[name]}" for name in _RESTARTS if env.get(name, "0") not in ("", "0")), "")


def forget(environment: MutableMapping[str, str]) -> None:
    """Takes away what torchrun says to a rank: for a process that is none, though a rank or a job started it."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    for name in [name for name in environment if name in names or name.startswith("TORCHELASTIC_")]:
        del environment[name]


# ---- torchrun --max-restarts starts a job again however it ended: where that mends nothing, the new attempt ends at once, without imports

_WHY = {
    EXIT_CONFIG: "what was refused is refused again with the same number of processes",
    EXIT_INTERRUPTED: "the run was asked to stop, and is saved: the same command continues it",
}


def note_end(code: int) -> None:
    """For further attempts on this machine: this one ended with `code`, and another would too. It holds for as many ranks as now if it
    is about settings."""
    launched = read()
    if launched.ended is not None:
        with contextlib.suppress(OSError), launched.ended.open("a") as stream:  # else the attempts take longer
            stream.write(f"{code} {launched.world_size}\n")


def ended_before() -> tuple[int, str] | None:
    """(exit code, why it is that one) where this attempt is to end at once."""
    launched = read()
    try:
        lines = [line.split() for line in launched.ended.read_text().splitlines()] if launched.ended is not None else []
    except OSError:
        return None
    for code, world_size in lines:
        if int(code) == EXIT_INTERRUPTED or int(world_size) == launched.world_size:
            return int(code), f"torchrun started the job again, and this attempt ends at once: {_WHY[int(code)]}."
    return None
