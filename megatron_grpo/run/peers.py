"""Detection of the end of other ranks: failures that they reported, and deaths without a report."""

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

from megatron_grpo.run.jobs import StopReason

# Messages of gloo, NCCL and the store when the other end has exited.
_LOST = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|gloo|nccl|socket timeout|\brecv\b", re.IGNORECASE)
SHARED_MEMORY = "/dev/shm"
SECONDS_TO_LEARN = 3.0  # from a broken connection until the death of its process is visible
LOOKS_PER_SECOND = 1000.0  # of all ranks together; the store answers a hundred times as many


@dataclass(frozen=True, slots=True)
class Process:
    """The process of a rank.

    Args:
        host: Host name.
        machine: Host and pid namespace: processes with the same value can see each other's pids.
        pid: Process id.
        started: Start time in clock ticks, which tells apart processes that reuse a pid.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def mine(cls) -> Process:
        """Return this process."""
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:  # not Linux
            namespace = ""
        host = socket.gethostname()
        return cls(host, f"{host} {namespace}", os.getpid(), (process_stat(os.getpid()) or [""] * 20)[19])

    def death(self) -> str | None:
        """Return how the process ended, as far as this one can see; None while it lives."""
        fields = process_stat(self.pid)
        if fields is None:
            return None if not Path("/proc/self/stat").exists() else "died"
        if fields[19] != self.started:
            return "died"
        if fields[0] not in ("Z", "X"):
            return None
        number = int(fields[49]) & 0x7F if len(fields) > 49 else 0  # visible to the process's owner until the launcher has reaped it
        name = f", {signal.Signals(number).name}" if number in set(signal.Signals) else ""  # real-time signals have none
        return f"died (signal {number}{name})" if number else "died"


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third one (the state) on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def read_process_age(pid: int) -> float:
    """Return the seconds since a process started; 0 if unknown."""
    fields = process_stat(pid)
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")) if fields else 0.0


class Peers:
    """The ranks of a job, as seen by this one.

    Args:
        store: Key-value store of the job (`collectives.store`).
        processes: Processes of all ranks, in rank order.
    """

    def __init__(self, store: Any, *, rank: int, processes: Sequence[Process]):
        self._store, self._rank, self.processes = store, rank, processes
        self.seconds_between_looks = max(1.0, len(processes) / LOOKS_PER_SECOND)

    def pass_on(self, reason: StopReason) -> None:
        """Notify the other ranks that this one was asked to stop."""
        with suppress(RuntimeError):  # the store is closed, and the others have exited
            self._store.set("stop", f"{int(reason.is_time)}{reason.why}")

    def asked(self) -> StopReason | None:
        """Return why another rank was asked to stop; None if none was."""
        with suppress(RuntimeError):
            if self._store.check(["stop"]):
                text = self._store.get("stop").decode()
                return StopReason(text[1:], is_time=text[0] == "1")
        return None

    def report_failure(self, rank: int | None = None) -> None:
        """Report that a rank has failed and is about to exit.

        Call it before any clean-up: other ranks may wait in a collective that the failed one never joins.

        Args:
            rank: The failed rank; default this one. A rank that kills another reports for it.
        """
        with suppress(RuntimeError):  # the store is closed, and no rank is left to notify
            self._store.set("failed", "1")
            self._store.set(f"failed/{self._rank if rank is None else rank}", "1")

    def report_done(self) -> None:
        """Report that this rank has nothing left to do with the others."""
        self._store.set(f"done/{self._rank}", "1")

    def why_doomed(self) -> str | None:
        """Return why this rank cannot continue.

        Returns:
            A sentence about a rank that died without a report; "" if a rank has reported its own failure; None if all is well.
        """
        deaths = self._deaths()
        return deaths or (None if self._has("failed") is False else "")

    def explain(self, error: BaseException, who_is_silent: Callable[[], Sequence[int]] = tuple) -> str | None:
        """Return the cause of an error that only reflects the end or silence of another rank.

        Args:
            who_is_silent: `Watchdog.who_is_silent`, called if no rank has failed or died.

        Returns:
            A sentence; None if the error is this rank's own.
        """
        if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
            return None
        end = time.monotonic() + SECONDS_TO_LEARN
        while (death := self.why_doomed()) is None and time.monotonic() < end:
            time.sleep(0.05)
        if death:
            return death
        if death == "":
            return f"rank {self._rank} exits: another rank failed and reports the reason."
        if reason := who_is_silent():
            silent = ", ".join(f"rank {rank} (process {self.processes[rank].pid} on {self.processes[rank].host})" for rank in reason)
            return f"{silent} does not respond, and a collective exceeded distributed_timeout_minutes: the process is stopped, or its \
machine is unreachable. The same command resumes from the last checkpoint."
        other_hosts = sorted({process.host for process in self.processes} - {self.processes[self._rank].host})
        if other_hosts:
            error.add_note(f"All ranks of this machine are alive; check {', '.join(other_hosts)}.")
        return None

    def _has(self, key: str) -> bool | None:
        """Return whether the store has a key; None if it is closed, because the job has ended."""
        with suppress(RuntimeError):
            return self._store.check([key])
        return None

    def _deaths(self) -> str:
        """Describe the deaths of other ranks of this machine that had reported nothing; "" if there are none."""
        own_process = self.processes[self._rank]
        deaths = []
        for rank, process in enumerate(self.processes):
            if rank == self._rank or process.machine != own_process.machine or not (death := process.death()):
                continue
            if not self._has(f"done/{rank}") and not self._has(f"failed/{rank}"):
                deaths.append(f"rank {rank} {death} without an error message (process {process.pid} on {process.host})")
        if not deaths:
            return ""
        return f"{'; '.join(deaths)}, and the run cannot continue. {_likely_cause()} The same command resumes from the last checkpoint."


def _likely_cause() -> str:
    """Return a sentence about the likely cause of a death without a report.

    A process that touches shared memory beyond the available space gets SIGBUS, which no program can turn into a message.
    """
    if Path(SHARED_MEMORY).is_dir() and (usage := shutil.disk_usage(SHARED_MEMORY)).free < 2**20:
        return f"Shared memory is full: {SHARED_MEMORY} has {usage.total / 2**20:.0f} MiB; give it more (docker run --shm-size 16g)."
    return "The launcher's report names the signal. The kernel sends signal 9 if memory runs out; dmesg shows it."
