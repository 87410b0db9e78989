"""What a rank knows of the other ranks' end: who reported a failure, and who died without a word."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.run.limits import StopReason

# What gloo, NCCL and the store say when the other end has gone.
_LOST = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|socket timeout|\brecv\b", re.IGNORECASE)
SHARED_MEMORY = "/dev/shm"
SECONDS_TO_LEARN = 3.0  # from a broken connection until the death behind it shows
LOOKS_PER_SECOND = 1000.0  # of all ranks together: the store answers a hundred times as many


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process. machine: what two processes share that can see each other's ids. started: in ticks, so that an id used again is
    another process."""

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def mine(cls) -> Process:
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:  # no Linux
            namespace = ""
        host = socket.gethostname()
        return cls(host, f"{host} {namespace}", os.getpid(), (_stat(os.getpid()) or [""] * 20)[19])

    def death(self) -> str | None:
        """How the process ended, as far as this one can see: None while it lives."""
        fields = _stat(self.pid)
        if fields is None:
            return None if not Path("/proc/self/stat").exists() else "died"
        if fields[19] != self.started:
            return "died"
        if fields[0] not in ("Z", "X"):
            return None
        number = int(fields[49]) & 0x7F if len(fields) > 49 else 0  # shown to its owner until the launcher has taken it
        return f"died (signal {number}, {signal.Signals(number).name})" if number else "died"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third one, the state, on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


class Peers:
    """The ranks of a job, as this one sees them. store: `collectives.store`. processes: of all ranks, in their order."""

    def __init__(self, store: Any, *, rank: int, processes: Sequence[Process]):
        self._store, self._rank, self.processes = store, rank, processes
        self.seconds_between_looks = max(1.0, len(processes) / LOOKS_PER_SECOND)

    def pass_on(self, asked: StopReason) -> None:
        """This rank was asked to stop."""
        with suppress(RuntimeError):  # the store has gone, and the others with it
            self._store.set("stop", f"{int(asked.is_time)}{asked.why}")

    def asked(self) -> StopReason | None:
        """What asked another rank to stop."""
        with suppress(RuntimeError):
            if self._store.check(["stop"]):
                told = self._store.get("stop").decode()
                return StopReason(told[1:], is_time=told[0] == "1")
        return None

    def report_failure(self, rank: int | None = None) -> None:
        """This rank has failed and is about to leave: said before any clean-up, for others may wait in a collective that it never joins.

        rank: of another one, which this one ends.
        """
        try:
            self._store.set("failed", "1")
            self._store.set(f"failed/{self._rank if rank is None else rank}", "1")
        except RuntimeError:  # the store has gone, and nobody is left to tell
            pass

    def report_done(self) -> None:
        """This rank has nothing left to do with the others."""
        self._store.set(f"done/{self._rank}", "1")

    def why_doomed(self) -> str | None:
        """Why this rank cannot go on: a sentence about a dead peer, "" about one that has reported for itself, None while all is well."""
        try:
            reported = self._store.check(["failed"])
        except RuntimeError:  # the store has gone, and with it the job
            return self._deaths(has_spoken=lambda rank: False) or ""
        deaths = self._deaths(has_spoken=lambda rank: any(self._store.check([f"{end}/{rank}"]) for end in ("done", "failed")))
        return deaths or ("" if reported else None)

    def explain(self, error: BaseException, who_is_silent: Callable[[], Sequence[int]] = tuple) -> str | None:
        """What an error says that only tells of another rank's end, or silence: a sentence; None if it is this rank's own.

        who_is_silent: `Watchdog.who_is_silent`, asked where nobody has failed or died.
        """
        if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
            return None
        end = time.monotonic() + SECONDS_TO_LEARN
        while (why := self.why_doomed()) is None and time.monotonic() < end:
            time.sleep(0.05)
        if why:
            return why
        if why == "":
            return f"rank {self._rank} leaves: another rank has failed and says why."
        if found := who_is_silent():
            silent = ", ".join(f"rank {rank} (process {self.processes[rank].pid} on {self.processes[rank].host})" for rank in found)
            return f"{silent} does not answer, and a collective waited longer than it may (distributed_timeout_minutes): it is stopped, or \
its machine is out of reach. The same command resumes from the last checkpoint."
        others = sorted({process.host for process in self.processes} - {self.processes[self._rank].host})
        if others:
            error.add_note(f"All ranks of this machine live; look at {', '.join(others)}.")
        return None

    def _deaths(self, has_spoken: Any) -> str:
        mine = self.processes[self._rank]
        found = []
        for rank, process in enumerate(self.processes):
            if rank != self._rank and process.machine == mine.machine and (how := process.death()) and not has_spoken(rank):
                found.append(f"rank {rank} {how} without a word (process {process.pid} on {process.host})")
        if not found:
            return ""
        return f"{'; '.join(found)}, and the run cannot go on. {_likely_cause()} The same command resumes from the last checkpoint."


def _likely_cause() -> str:
    """Whoever touches shared memory that is not there gets SIGBUS, which no program can turn into a sentence of its own."""
    if Path(SHARED_MEMORY).is_dir() and (usage := shutil.disk_usage(SHARED_MEMORY)).free < 2**20:
        return f"Shared memory is full: {SHARED_MEMORY} has {usage.total / 2**20:.0f} MiB; give it more (docker run --shm-size 16g)."
    return "The launcher's report names the signal; 9 that nobody sent is the kernel's, short of memory (dmesg says so)."
