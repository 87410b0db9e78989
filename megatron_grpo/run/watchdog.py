"""Watchdog that names ranks that hang or are stopped, and ends the run. Slow ranks are left alone.

Every rank has a thread that periodically writes a pulse to the job's store: its phase, its progress, and that it is alive. Three conditions
raise the alarm, each after `rank_heartbeat_timeout` seconds plus the pause that a phase may make:

silent       The pulse of the next rank stands still (each rank watches one, in a ring): its process is stopped or dead, or code that
             holds the interpreter locks out its threads.
stuck        This rank makes no progress in a phase in which it waits for no other rank.
standstill   No rank makes progress: what all of them wait for is found by asking them.

Slow work that progresses never raises an alarm, and a rank that waits in a collective is not the culprit. The store receives four messages
per period and rank, whatever the number of ranks; all pulses are read only after an alarm, twice, by the rank that raised it first.

The timeout of gloo or NCCL (`distributed_timeout_minutes`) is the fallback. A single process is watched by its parent, `run.supervisor`.

What a report needs is in this module, and so in memory before anything hangs: an import after the alarm could wait for the disk that hangs.

A signal makes a process write the stacks of its threads through a handler in C. The handler needs no interpreter lock, so it also works
where Python code holds that lock forever. The stacks, and a note of what the process was doing, lie in memory that other processes of the
same user can read. No torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.errors import EXIT_CRASH
from megatron_grpo.run.failures import PREFIX, print_error
from megatron_grpo.run.peers import Process, process_stat

LONGEST_PERIOD = 10.0  # seconds between two pulses
PERIODS = 10  # minimum number of periods in a timeout
SECONDS_TO_ANSWER = 15.0  # for live ranks to report after an alarm
SECONDS_TO_LEAVE = 2.0

_NO_VERDICT = f"{PREFIX}a rank hangs, and the rank that reports it has ended."


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Report of a rank about itself.

    Args:
        beat: Number of pulses so far.
        step: Optimizer steps done.
        words: Phase of the run, in words.
        age: Seconds since the rank last made progress.
        pause: Seconds for which its pulse may stand still too, because a user's function may hold the interpreter for as long as it is
            given.
        has_left: Whether the rank has finished.
    """

    beat: int = 0
    step: int = 0
    words: str = ""
    age: float = 0.0
    pause: float = 0.0
    has_left: bool = False


class TimeSinceChange:
    """Seconds since a value changed, as experienced by this process.

    While the process is stopped or the machine sleeps, hardly any time counts.

    Args:
        longest_gap: Maximum seconds that count between two calls of `update`.
        clock: Clock, in seconds.
    """

    def __init__(self, longest_gap: float, clock: Callable[[], float] = time.monotonic):
        self._longest_gap, self._now, self._updated_at = longest_gap, clock, clock()
        self.value: Any = None
        self.seconds = 0.0

    def update(self, value: Any) -> float:
        """Compare `value` with the previous one and return the seconds since it changed."""
        time_now = self._now()
        gap, self._updated_at = min(time_now - self._updated_at, self._longest_gap), time_now
        self.seconds = 0.0 if value != self.value else self.seconds + gap
        self.value = value
        return self.seconds


class HangDetector:
    """Detector of ranks that make no progress; it decides when to raise an alarm.

    `is_moving` and then `reason` are called once per period. `age` is the time since this rank last made progress, in seconds; `is_stuck`
    is True if that is too long for a phase in which it waits for no other rank.

    Args:
        period: Seconds between two pulses.
        clock: Clock, in seconds.
    """

    def __init__(self, timeout: float, period: float, clock: Callable[[], float] = time.monotonic):
        self.timeout, self.age, self.is_stuck = timeout, 0.0, False
        self._mine, self._everyone, self._neighbour = (TimeSinceChange(5 * period, clock) for _ in range(3))

    def is_moving(self, moves: int, phases: Sequence[activity.Phase]) -> bool:
        """Return whether this rank counts as making progress: it advanced since the last call, or its phases may pause for this long.

        Args:
            moves: Counter of this rank's progress.
        """
        pause = sum(phase.pause for phase in phases)
        self.age = self._mine.update(moves)
        self.is_stuck = any(phase.is_alone for phase in phases) and self.age > self.timeout + pause
        return self.age <= pause

    def reason(self, *, moving: int, neighbour: Heartbeat | None) -> str | None:
        """Return "silent", "stuck" or "standstill" if there is an alarm, else None.

        Args:
            moving: Counter that grows while ranks make progress.
            neighbour: Pulse of the rank that this one watches; None without one.
        """
        seconds_of_all = self._everyone.update(moving)
        if neighbour is not None and not neighbour.has_left:
            if self._neighbour.update(neighbour.beat) > self.timeout + neighbour.pause:
                return "silent"
        if self.is_stuck:
            return "stuck"
        return "standstill" if min(seconds_of_all, self.age) > self.timeout else None


class Watchdog:
    """Watchdog of one rank.

    Create it in the main thread. Collective: `wait_for_all` returns once the first pulse of every rank is in the store.

    Args:
        store: Key-value store of the job (`collectives.store`).
        processes: Processes of all ranks, in rank order.
        output_dir: Output directory of the run; receives the report.
        wait_for_all: Barrier over all ranks.
        leaves: Called with this rank, and with ranks that it kills, before they exit, so that they do not count as died without a report.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        processes: Sequence[Process],
        timeout: float,
        output_dir: Path,
        wait_for_all: Callable[[], object],
        leaves: Callable[[int], object],
    ):
        self.timeout, self.period = timeout, min(LONGEST_PERIOD, timeout / PERIODS)
        self.rank, self.processes, self.output_dir = rank, processes, output_dir
        self._here = [number for number, process in enumerate(processes) if process.machine == processes[rank].machine]
        self._store, self._leaves = store, leaves
        self.leaves_behind: Callable[[str], object] = lambda reason: None  # called when ranks hang; it dumps the current step
        self._detector = HangDetector(timeout, self.period)
        self._main = threading.main_thread().ident or 0
        register()
        write_down(output_dir=str(output_dir))
        self._ended, self._alarm = threading.Event(), threading.Event()
        self._pulse = Heartbeat()
        self._write(f"pulse/{rank}", self._pulse)
        wait_for_all()
        self._neighbour = (rank + 1) % len(processes)
        os.register_at_fork(after_in_child=self._in_child)
        self._pulse_thread = threading.Thread(target=self._send_pulses, name="watchdog pulse", daemon=True)
        self._pulse_thread.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the watch: this rank has nothing left to do with the others."""
        self.hold_if_alarmed()
        self._ended.set()
        self._pulse_thread.join(SECONDS_TO_LEAVE)  # it notifies the others

    def hold_if_alarmed(self) -> None:
        """Block the main thread forever if there is an alarm. Call it before reporting an error.

        After an alarm the error only reflects that other ranks have left.
        """
        if self._alarm.is_set():
            threading.Event().wait()

    def who_is_silent(self) -> list[int]:
        """Return other ranks whose pulse stands still. It takes several periods.

        The main thread calls it when a collective has failed although no rank has reported a failure.
        """
        try:
            old_pulses = self._pulses()
            time.sleep(3 * self.period)
            still = [rank for rank, pulse in enumerate(self._pulses()) if pulse.beat == old_pulses[rank].beat and not pulse.has_left]
            return [rank for rank in still if rank != self.rank]
        except RuntimeError:  # the store is closed
            return []

    def _in_child(self) -> None:
        self._ended.set()  # a forked child (of a reward function) has no threads; if it calls `close`, nothing must be sent

    # ---- two threads: one talks to the store and may hang with it; the other notices if it does

    def _send_pulses(self) -> None:
        try:
            while not self._ended.wait(self.period):
                self._send_pulse()
            if not self._alarm.is_set():
                self._write(f"pulse/{self.rank}", replace(self._pulse, has_left=True))
        except RuntimeError:  # the store is closed, and the job has ended: `run.peers` reports that
            self._ended.set()
        finally:
            write_down(timeout=0.0)

    def _send_pulse(self) -> None:
        phases = activity.current()
        is_moving = self._detector.is_moving(activity.moves, phases)
        self._pulse = Heartbeat(
            beat=self._pulse.beat + 1,
            step=activity.step,
            words=activity.describe(phases),
            age=self._detector.age,
            pause=sum(phase.pause for phase in phases if phase.is_alone),
        )
        # For the parent of this process. In a job with several ranks the others must notice first, because they know more.
        seconds = (self.timeout + self._pulse.pause) * (1.0 if len(self.processes) == 1 else 2.0)
        write_down(beats=self._pulse.beat, timeout=seconds)
        self._write(f"pulse/{self.rank}", self._pulse)
        moving = self._store.add("moving", int(is_moving))
        neighbour = self._read_pulse(self._neighbour) if self._neighbour != self.rank else None
        reason = self._detector.reason(moving=moving, neighbour=neighbour)
        if (reason or self._store.check(["alarm"])) and not self._alarm.is_set() and not self._ended.is_set():
            self._alarm.set()
            threading.Thread(target=self._end, args=[reason], name="watchdog end", daemon=True).start()

    def _watch(self) -> None:
        last_pulse = TimeSinceChange(5 * self.period)
        while not self._ended.wait(self.period) and not self._alarm.is_set():
            if last_pulse.update(self._pulse.beat) > self.timeout:
                self._end_without_store()
        if self._alarm.is_set():  # `_end` exits, unless the store stops answering meanwhile
            time.sleep(2 * self._patience)
            self._leave(_NO_VERDICT, [], [])

    def _write(self, key: str, report: Heartbeat | RankReport) -> None:
        self._store.set(key, json.dumps(asdict(report)))

    def _missing(self, keys: Collection[str], seconds: float, *, expected: Collection[str] = ()) -> set[str]:
        """Wait until the store has all keys, and return those that it lacks at the end of the time limit.

        Args:
            expected: Keys that are not waited for.
        """
        end, missing = time.monotonic() + seconds, set(keys)
        while (missing := {key for key in missing if not self._store.check([key])}) - set(expected) and time.monotonic() < end:
            time.sleep(0.1)
        return missing

    def _read_pulse(self, rank: int) -> Heartbeat:
        return Heartbeat(**json.loads(self._store.get(f"pulse/{rank}")))

    def _pulses(self) -> list[Heartbeat]:
        """Return the pulses of all ranks."""
        return [Heartbeat(**json.loads(text)) for text in self._store.multi_get([f"pulse/{rank}" for rank in range(len(self.processes))])]

    # ---- after an alarm

    def _end(self, reason: str | None) -> None:
        """Report where this rank is, look at the silent ranks of its machine, wait for the verdict, and exit. Every live rank does this."""
        text, silent, own_ranks = _NO_VERDICT, [], []
        try:
            leads = self._store.compare_set("alarm", "", str(self.rank)).decode() == str(self.rank)
            self._write(f"account/{self.rank}", self._my_account())
            self._leave_behind()
            if leads:
                silent = self._without_account(expected=[self._neighbour] if reason == "silent" else [])
                self._store.set("silent", json.dumps(silent))
            elif not self._missing(["silent"], self._patience):
                silent = json.loads(self._store.get("silent"))
            own_ranks = self._inspect_local(silent)
            if leads:
                text = self._verdict(silent)
                self._store.set("verdict", text)
            elif not self._missing(["verdict"], self._patience):
                text = self._store.get("verdict").decode()
            for rank in (self.rank, *own_ranks):
                self._leaves(rank)
        except RuntimeError:  # the store is closed: the process that held it has exited and reported why
            pass
        finally:
            self._leave(text, silent, own_ranks)

    def _leave(self, text: str, silent: Sequence[int], own_ranks: Sequence[int]) -> None:
        try:
            if launcher.read().report_file is not None:
                print_error(text)
            elif self._is_first_here(silent):
                print(text, file=sys.stderr, flush=True)
            for process in (self.processes[rank] for rank in own_ranks):
                if process.death() is None:
                    os.kill(process.pid, signal.SIGKILL)
            if self.rank == 0:  # it may hold the store from which the others read the verdict
                time.sleep(2 * self.period + 1.0)
        finally:
            os._exit(EXIT_CRASH)

    @property
    def _patience(self) -> float:
        return 8 * self.period + 3 * SECONDS_TO_ANSWER

    def _leave_behind(self) -> None:
        try:
            self.leaves_behind(f"a rank hangs (rank_heartbeat_timeout {self.timeout:g} s)")
        except Exception as error:  # noqa: BLE001 - the hanging rank must be named in any case
            print(f"{PREFIX}rank {self.rank} could not save its step: {error}", file=sys.stderr, flush=True)

    def _my_account(self) -> RankReport:
        """Report where this rank is, and write its stacks."""
        text = keep(self.output_dir, f"rank_{self.rank:05d}.txt", own_stacks())
        return RankReport(
            words=activity.describe(activity.current()), step=activity.step, age=self._detector.age, is_stuck=self._detector.is_stuck,
            waits=waiting_collective(self._main), where=innermost(text),
        )  # fmt: skip

    def _without_account(self, expected: Collection[int]) -> list[int]:
        """Return the ranks that have not reported where they are within the time limit.

        Args:
            expected: Ranks known to be silent, which are not waited for.
        """
        keys = {rank: f"account/{rank}" for rank, pulse in enumerate(self._pulses()) if not pulse.has_left}
        seconds = 4 * self.period + SECONDS_TO_ANSWER
        missing = self._missing(keys.values(), seconds, expected=[f"account/{rank}" for rank in expected])
        return [rank for rank, key in keys.items() if key in missing]

    def _is_first_here(self, silent: Collection[int]) -> bool:
        """Return whether this is the first live rank of its machine."""
        return next(rank for rank in self._here if rank not in silent) == self.rank

    def _inspect_local(self, silent: Collection[int]) -> list[int]:
        """Collect stacks and reports of the silent ranks of this machine, if this is its first live rank.

        Returns:
            The ranks that were looked at.
        """
        if not self._is_first_here(silent):
            return []
        own_ranks = [rank for rank in self._here if rank in silent]
        for rank in own_ranks:
            self._write(f"found/{rank}", self._inspect(rank, age=self._read_pulse(rank).age))
        return own_ranks

    def _inspect(self, rank: int, *, age: float) -> RankReport:
        """Report on a silent rank of this machine."""
        process = self.processes[rank]
        return inspect_process(process.pid, rank, self.output_dir, age=age, death=process.death())

    def _verdict(self, silent: Collection[int]) -> str:
        """Return the verdict, from the reports of live ranks and from what was found of silent ones.

        A silent rank may come back to life when it is looked at.
        """
        pulses, silent, accounts = self._pulses(), set(silent), dict[int, RankReport]()
        ranks = [rank for rank, pulse in enumerate(pulses) if rank in silent or not pulse.has_left]
        keys = {rank: f"{'found' if rank in silent else 'account'}/{rank}" for rank in ranks}
        missing = self._missing(keys.values(), SECONDS_TO_ANSWER)
        for rank, key in keys.items():
            if key in missing:
                pulse, state = pulses[rank], "no rank on its machine responds"
                accounts[rank] = RankReport(words=pulse.words, step=pulse.step, age=pulse.age, is_silent=True, state=state)
            else:
                accounts[rank] = RankReport(**json.loads(self._store.get(key)))
        return self._report(accounts)

    def _report(self, accounts: Mapping[int, RankReport]) -> str:
        hosts = {rank: process.host for rank, process in enumerate(self.processes)}
        return write_report(self.output_dir, accounts, hosts, self.timeout)

    def _end_without_store(self) -> None:
        """End the run because the store, which rank 0 or its launcher holds, does not answer. A rank on its machine reports on rank 0."""
        self._alarm.set()
        account, own_ranks = self._my_account(), list[int]()
        text = f"{PREFIX}the job's store on {self.processes[0].host} has not answered for {self.timeout:g} s (rank_heartbeat_timeout), so \
the run ends."
        if self.rank != 0 and 0 in self._here and self._is_first_here([0]) and not launcher.read().launcher_holds_store:
            own_ranks = [0]
            text = self._report({0: self._inspect(0, age=self.timeout), self.rank: account})
        self._leave(text, [0], own_ranks)


# ---- the report of a hang ----------------------------------------------------------------------------------------------------------------

FOLDER = "watchdog"  # in output_dir
NAMED = 8  # culprits that are named individually


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """State of a rank after an alarm, reported by the rank itself or by another process of its machine.

    Args:
        words: Phase of the run, in words.
        step: Optimizer steps done.
        age: Seconds since the rank last made progress.
        is_silent: Whether the rank does not respond.
        is_stuck: Whether it makes no progress in a phase in which it waits for no other rank.
        waits: Collective in which it waits; "" if in none.
        state: State of the process, as the end of a sentence.
        where: Innermost frame of the main thread.
    """

    words: str
    step: int
    age: float
    is_silent: bool = False
    is_stuck: bool = False
    waits: str = ""
    state: str = ""
    where: str = ""


def suspect_ranks(accounts: Mapping[int, RankReport]) -> list[int]:
    """Return the ranks that the others wait for; [] if all wait for each other.

    These are, in order of precedence: silent ranks; ranks that are stuck alone; ranks that wait in no collective; ranks that are behind.
    """
    for is_one in (lambda report: report.is_silent, lambda report: report.is_stuck, lambda report: not report.waits):
        if ranks := [rank for rank, account in accounts.items() if is_one(account)]:
            first = min(accounts[rank].step for rank in ranks)
            return [rank for rank in ranks if accounts[rank].is_silent or accounts[rank].step == first]
    first, last = min(report.step for report in accounts.values()), max(report.step for report in accounts.values())
    return [rank for rank, report in accounts.items() if report.step == first] if first < last else []


def verdict(accounts: Mapping[int, RankReport], hosts: Mapping[int, str], timeout: float) -> str:
    """Return the message that names the culprits and what the other ranks do.

    Args:
        hosts: Host name of each rank.
    """
    suspects = suspect_ranks(accounts)
    lines = [_describe_suspect(rank, hosts[rank], accounts[rank]) for rank in suspects[:NAMED]]
    if len(suspects) > NAMED:
        lines.append(f"So do {len(suspects) - NAMED} more ranks: {', '.join(map(str, suspects[NAMED : NAMED + 32]))}.")
    waiting_reports = [accounts[rank] for rank in accounts.keys() - set(suspects)]
    other_states = Counter(f"{report.words}, in {report.waits}" if report.waits else report.words for report in waiting_reports)
    doing = "; ".join(f"{count} {words}" for words, count in other_states.most_common(NAMED))
    if not suspects:
        lines.append("all ranks wait for each other, and none of them is behind: they are in different collectives, or the network fails "
                     f"({doing}).")  # fmt: skip
    elif other_states:
        lines.append(f"The others wait for {'it' if len(suspects) == 1 else 'them'} ({doing}).")
    return "\n  ".join([*lines, f"That has lasted for rank_heartbeat_timeout ({timeout:g} s), so the run ends."])


def _describe_suspect(rank: int, host: str, report: RankReport) -> str:
    doing = f", {report.words}" if report.words else ""
    location = f", at {report.where}" if report.where else ""
    state_text = report.state or f"it has made no progress for {report.age:.0f} s"
    return f"rank {rank} on {host} hangs in optimizer step {report.step + 1}{doing}{location}: {state_text}."


def write_report(output_dir: Path, accounts: Mapping[int, RankReport], hosts: Mapping[int, str], timeout: float) -> str:
    """Write the report of a hang, and return it: the verdict, where the stacks are, and the newest checkpoint.

    Args:
        hosts: Host name of each rank.
    """
    # Every rank has imported it; the supervisor, which imports this module, must stay small.
    from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory

    steps = CheckpointDirectory(output_dir / "checkpoints").steps()
    saved = f"The newest checkpoint is that of optimizer step {steps[-1]}; the same command resumes from it." if steps else (
        "There is no checkpoint yet: the same command begins again.")  # fmt: skip
    stacks = f"  Stacks of all ranks: {output_dir / FOLDER}/rank_*.txt. {saved}"
    return keep(output_dir, "report.txt", f"{PREFIX}{verdict(accounts, hosts, timeout)}\n{stacks}")


def keep(output_dir: Path, name: str, text: str) -> str:
    """Write a file of the report and return its text. Disk errors are ignored, so that the run still ends with its message."""
    with suppress(OSError):
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        (output_dir / FOLDER / name).write_text(text)
    return text


def inspect_process(pid: int, rank: int, output_dir: Path, *, age: float, death: str | None = None) -> RankReport:
    """Report on a silent process of this machine and write its stacks to the rank's file.

    Args:
        age: Seconds since it last made progress.
        death: How the process died, if it did.
    """
    state = f"it {death}" if death else read_process_state(pid)
    note, text = read_note(pid), "" if death else stacks_of_process(pid)
    keep(output_dir, f"rank_{rank:05d}.txt", text or f"{state}; it did not report its position\n")
    return RankReport(words=note.get("words", ""), step=note.get("step", 0), age=age, is_silent=True, state=state, where=innermost(text))


# ---- stacks of this process, and of one that no longer responds -------------------------------------------------------------------------

SIGNAL = signal.SIGRTMIN + 12  # 11 is used for the deadline of reward functions
_NAME, _NOTE = "megatron_grpo.stacks", "megatron_grpo.note"
SECONDS = 10.0  # for a process to write its stacks

STATES = {
    "T": "it is stopped (SIGSTOP or SIGTSTP)",
    "t": "a debugger holds it",
    "R": "it computes and lets no other thread run",
    "D": "it waits in the kernel, for a disk or a file system",
    "S": "it waits and lets no other thread run",
    "Z": "it has died",
    "X": "it has died",
}


_note: dict[str, Any] = {"step": 0, "words": "", "beats": 0, "timeout": 0.0, "output_dir": "output"}
_note_file: int | None = None


def register() -> None:
    """Make this process write its stacks on SIGNAL, and make its note readable. Linux only; elsewhere this does nothing."""
    global _note_file
    if sys.platform != "linux" or _place(os.getpid(), _NAME) is not None:
        return
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME), all_threads=True)
    _note_file = os.memfd_create(_NOTE)
    write_down()
    activity.listeners.append(write_down)


def write_down(**facts: Any) -> None:
    """Update the note that other processes read: the current step and phase, and `facts`, which stay until they are overwritten.

    Args:
        **facts: `beats` and `timeout`: the process counts as hung once `beats` has not changed for `timeout` seconds (0: never).
            `output_dir`: where a report is written.
    """
    if _note_file is not None:
        _note.update(facts, step=activity.step, words=activity.describe(activity.current()))
        os.pwrite(_note_file, json.dumps(_note).encode() + b"\n", 0)  # the rest of a longer previous note stays behind the end of the line


def read_note(pid: int) -> dict[str, Any]:
    """Return the note of a process; {} if it has none."""
    try:
        path = _place(pid, _NOTE)
        return json.loads(path.read_bytes().split(b"\n")[0]) if path is not None else {}
    except (OSError, ValueError):  # it has exited, or is just writing
        return {}


def _place(pid: int, name: str) -> Path | None:
    """Return the path of an in-memory file that a process has registered."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                return entry
    return None


def own_stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as stream:
        faulthandler.dump_traceback(file=stream, all_threads=True)
        stream.seek(0)
        return stream.read()


def read_process_state(pid: int) -> str:
    """Return the kernel's state of a process, as the end of a sentence."""
    letter = (process_stat(pid) or ["X"])[0]
    return STATES.get(letter, f"its state is {letter}")


def stacks_of_process(pid: int) -> str:
    """Return the stacks of another process that has called `register`; "" if it cannot write them.

    A stopped process is continued for this and stopped again; otherwise it would keep running.
    """
    try:
        if (path := _place(pid, _NAME)) is None:
            return ""
        old_size, was_stopped = path.stat().st_size, read_process_state(pid) == STATES["T"]
        # Sent to its main thread, which then writes before it does anything else.
        if ctypes.CDLL(None).tgkill(pid, pid, SIGNAL) != 0:
            return ""
        os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and (path.stat().st_size == old_size or _grows(path)):
            time.sleep(0.002)  # it writes to memory and does not signal the end
        if was_stopped:
            os.kill(pid, signal.SIGSTOP)
        return path.read_bytes()[old_size:].decode(errors="replace")
    except OSError:  # it has exited
        return ""


def _grows(path: Path) -> bool:
    old_size = path.stat().st_size
    time.sleep(0.02)  # threads are written one after the other
    return path.stat().st_size > old_size


def innermost(text: str) -> str:
    """Return the frame of the main thread from a `faulthandler` dump, as `reward.py line 3, f`; "" if it cannot be parsed."""
    _, *threads = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.M)
    for part in reversed(threads):  # the main thread is the oldest, and comes last
        if match := re.search(r'File "([^"]+)", line (\d+) in (.+)', part):
            return f"{Path(match[1]).name} line {match[2]}, {match[3]}"
    return ""


# Modules of the innermost frames of a thread that waits for other ranks.
_WAITING = ("torch.distributed.", "megatron.core.pipeline_parallel.p2p_communication", "megatron.core.distributed.")
_DEPTH = 12


def waiting_collective(thread: int) -> str:
    """Return the collective in which a thread of this process waits for other ranks; "" if in none.

    Args:
        thread: Identifier of the thread (`threading.Thread.ident`).
    """
    frame, depth, name = sys._current_frames().get(thread), 0, ""
    while frame is not None and depth < _DEPTH:
        if frame.f_globals.get("__name__", "").startswith(_WAITING):
            name = frame.f_code.co_name  # the outermost frame: the collective that was called
        frame, depth = frame.f_back, depth + 1
    return name
