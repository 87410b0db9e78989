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
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.errors import EXIT_CRASH
from megatron_grpo.run import hang_report
from megatron_grpo.run.failures import PREFIX, print_error
from megatron_grpo.run.hang_report import RankReport, keep
from megatron_grpo.run.peers import Process

LONGEST_PERIOD = 10.0  # seconds between two pulses
PERIODS = 10  # minimum number of periods in a timeout
SECONDS_TO_ANSWER = 15.0  # for live ranks to report after an alarm
SECONDS_TO_LEAVE = 2.0

_NO_VERDICT = f"{PREFIX}a rank hangs, and the rank that reports it has ended."

# Modules of the innermost frames of a thread that waits for other ranks.
_WAITING = ("torch.distributed.", "megatron.core.pipeline_parallel.p2p_communication", "megatron.core.distributed.")
_DEPTH = 12


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
        self._longest_gap, self._now = longest_gap, clock
        self._last: Any = None
        self._updated_at = clock()
        self.seconds = 0.0

    def update(self, value: Any) -> float:
        """Compare `value` with the previous one and return the seconds since it changed.

        Args:
            value: Any value that can be compared.
        """
        time_now = self._now()
        gap, self._updated_at = min(time_now - self._updated_at, self._longest_gap), time_now
        self.seconds = 0.0 if value != self._last else self.seconds + gap
        self._last = value
        return self.seconds


class HangDetector:
    """Detector of ranks that make no progress; it decides when to raise an alarm.

    `reason` is called once per period.

    Args:
        timeout: `rank_heartbeat_timeout`, seconds.
        period: Seconds between two pulses.
        clock: Clock, in seconds.
    """

    def __init__(self, timeout: float, period: float, clock: Callable[[], float] = time.monotonic):
        self.timeout = timeout
        self.mine, self.everyone, self.neighbour = (TimeSinceChange(5 * period, clock) for _ in range(3))

    def is_moving(self, moves: int, pause: float) -> bool:
        """Return whether this rank counts as making progress: it advanced since the last call, or its phase may pause for this long.

        Args:
            moves: Counter of this rank's progress.
            pause: Seconds for which the current phases may stand still.
        """
        seconds = self.mine.update(moves)
        return seconds == 0.0 or seconds <= pause

    def reason(self, *, moving: int, is_alone: bool, pause: float, neighbour: Heartbeat | None) -> str | None:
        """Return "silent", "stuck" or "standstill" if there is an alarm, else None.

        Args:
            moving: Counter that grows while ranks make progress.
            is_alone: Whether this rank is in a phase in which it waits for no other rank.
            pause: Seconds for which the current phases may stand still.
            neighbour: Pulse of the rank that this one watches; None without one.
        """
        seconds_of_all = self.everyone.update(moving)
        if neighbour is not None and not neighbour.has_left:
            if self.neighbour.update(neighbour.beat) > self.timeout + neighbour.pause:
                return "silent"
        if is_alone and self.mine.seconds > self.timeout + pause:
            return "stuck"
        if seconds_of_all > self.timeout and self.mine.seconds > self.timeout:
            return "standstill"
        return None


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


class Watchdog:
    """Watchdog of one rank.

    Create it in the main thread. Collective: `wait_for_all` returns once the first pulse of every rank is in the store.

    Args:
        store: Key-value store of the job (`collectives.store`).
        rank: This rank.
        processes: Processes of all ranks, in rank order.
        timeout: `rank_heartbeat_timeout`, seconds.
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
        self._store, self._store_is_gone, self._leaves = store, False, leaves
        self.leaves_behind: Callable[[str], object] | None = None  # called when ranks hang; it dumps the current step
        self._alarms = HangDetector(timeout, self.period)
        self._main = threading.main_thread().ident or 0
        hang_report.register()
        hang_report.write_down(output_dir=str(output_dir))
        self._ended, self._alarm = threading.Event(), threading.Event()
        self._pulse = Heartbeat()
        self._write(f"pulse/{rank}", self._pulse)
        wait_for_all()
        self._neighbour = (rank + 1) % len(processes)
        self._round = TimeSinceChange(5 * self.period)
        self._rounds = 0
        self._found: tuple[int, Heartbeat | None, bool] = (0, None, False)  # (moving, the neighbour's pulse, whether there is an alarm)
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

    # ---- two threads: one talks to the store and may hang with it; the other counts

    def _send_pulses(self) -> None:
        try:
            while not self._ended.wait(self.period):
                self._send_pulse()
            if not self._alarm.is_set():
                self._write(f"pulse/{self.rank}", replace(self._pulse, has_left=True))
        except RuntimeError:  # the store is closed, and the job has ended: `run.peers` reports that
            self._store_is_gone = True
        finally:
            hang_report.write_down(timeout=0.0)

    def _send_pulse(self) -> None:
        phases = activity.current()
        vouches = self._alarms.is_moving(activity.moves, sum(phase.pause for phase in phases))
        self._pulse = Heartbeat(
            beat=self._pulse.beat + 1,
            step=activity.step,
            words=activity.describe(phases),
            age=self._alarms.mine.seconds,
            pause=sum(phase.pause for phase in phases if phase.is_alone),
        )
        # For the parent of this process. In a job with several ranks the others must notice first, because they know more.
        seconds = (self.timeout + self._pulse.pause) * (1.0 if len(self.processes) == 1 else 2.0)
        hang_report.write_down(beats=self._pulse.beat, timeout=seconds)
        self._write(f"pulse/{self.rank}", self._pulse)
        moving = self._store.add("moving", int(vouches))
        neighbour = self._pulse_of(self._neighbour) if self._neighbour != self.rank else None
        self._found = (moving, neighbour, self._has("alarm"))
        self._rounds += 1

    def _watch(self) -> None:
        last_round = 0
        while not self._ended.wait(self.period):
            if self._store_is_gone:
                return
            if self._round.update(self._rounds) > self.timeout:
                self._end_without_store()
            if self._rounds == last_round:
                continue
            last_round = self._rounds
            phases, (moving, neighbour, has_alarm) = activity.current(), self._found
            reason = self._alarms.reason(
                moving=moving, is_alone=any(p.is_alone for p in phases), pause=sum(p.pause for p in phases), neighbour=neighbour
            )
            if (has_alarm or reason) and not self._ended.is_set():
                self._alarm.set()
                threading.Thread(target=self._give_up, name="watchdog end", daemon=True).start()
                self._end(reason or "")
                return

    def _write(self, key: str, report: Heartbeat | RankReport) -> None:
        self._store.set(key, json.dumps(asdict(report)))

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _has_in_time(self, key: str) -> bool:
        end = time.monotonic() + self._patience
        while not (value := self._has(key)) and time.monotonic() < end:
            time.sleep(0.1)
        return value

    def _pulse_of(self, rank: int) -> Heartbeat:
        return Heartbeat(**json.loads(self._store.get(f"pulse/{rank}")))

    def _pulses(self) -> list[Heartbeat]:
        """Return the pulses of all ranks."""
        return [Heartbeat(**json.loads(text)) for text in self._store.multi_get([f"pulse/{rank}" for rank in range(len(self.processes))])]

    # ---- after an alarm

    def _end(self, reason: str) -> None:
        """Report where this rank is, look at the silent ranks of its machine, wait for the verdict, and exit. Every live rank does this."""
        text, silent, own_ranks = _NO_VERDICT, [], []
        try:
            leads = self._store.compare_set("alarm", "", str(self.rank)).decode() == str(self.rank)
            self._write(f"account/{self.rank}", self._my_account())
            self._leave_behind()
            if leads:
                silent = self._without_account(expected=[self._neighbour] if reason == "silent" else [])
                self._store.set("silent", json.dumps(silent))
            elif self._has_in_time("silent"):
                silent = json.loads(self._store.get("silent"))
            own_ranks = self._inspect_local(silent)
            if leads:
                text = self._verdict(silent)
                self._store.set("verdict", text)
            elif self._has_in_time("verdict"):
                text = self._store.get("verdict").decode()
            for rank in (self.rank, *own_ranks):
                self._leaves(rank)
        except RuntimeError:  # the store is closed: the process that held it has exited and reported why
            pass
        finally:
            self._leave(text, silent, own_ranks)

    def _give_up(self) -> None:
        """Exit after a time limit, because the store may stop answering during `_end`."""
        time.sleep(2 * self._patience)
        self._leave(_NO_VERDICT, [], [])

    def _leave(self, text: str, silent: Sequence[int], own_ranks: Sequence[int]) -> None:
        try:
            if launcher.read().report_file is not None:
                print_error(text)
            elif self._is_first_here(silent):
                print(text, file=sys.stderr, flush=True)
            self._kill(own_ranks)
            if self.rank == 0:  # it may hold the store from which the others read the verdict
                time.sleep(2 * self.period + 1.0)
        finally:
            os._exit(EXIT_CRASH)

    @property
    def _patience(self) -> float:
        return 8 * self.period + 3 * SECONDS_TO_ANSWER

    def _leave_behind(self) -> None:
        if self.leaves_behind is None:
            return
        try:
            self.leaves_behind(f"a rank hangs (rank_heartbeat_timeout {self.timeout:g} s)")
        except Exception as error:  # noqa: BLE001 - the hanging rank must be named in any case
            print(f"{PREFIX}rank {self.rank} could not save its step: {error}", file=sys.stderr, flush=True)

    def _my_account(self) -> RankReport:
        phases = activity.current()
        stuck = any(phase.is_alone for phase in phases) and self._alarms.mine.seconds > self.timeout + sum(phase.pause for phase in phases)
        text = keep(self.output_dir, f"rank_{self.rank:05d}.txt", hang_report.own_stacks())
        return RankReport(
            words=activity.describe(phases), step=activity.step, age=self._alarms.mine.seconds, is_stuck=stuck,
            waits=waiting_collective(self._main), where=hang_report.innermost(text),
        )  # fmt: skip

    def _without_account(self, expected: Collection[int]) -> list[int]:
        """Return the ranks that have not reported where they are within the time limit.

        Args:
            expected: Ranks known to be silent, which are not waited for.
        """
        missing = [rank for rank, pulse in enumerate(self._pulses()) if not pulse.has_left]
        end = time.monotonic() + 4 * self.period + SECONDS_TO_ANSWER
        while (missing := [rank for rank in missing if not self._has(f"account/{rank}")]) and time.monotonic() < end:
            if set(missing) <= set(expected):
                break
            time.sleep(0.1)
        return missing

    def _here(self) -> list[int]:
        """Return the ranks of this machine."""
        return [rank for rank, process in enumerate(self.processes) if process.machine == self.processes[self.rank].machine]

    def _is_first_here(self, silent: Collection[int]) -> bool:
        """Return whether this is the first live rank of its machine."""
        return next(rank for rank in self._here() if rank not in silent) == self.rank

    def _inspect_local(self, silent: Collection[int]) -> list[int]:
        """Collect stacks and reports of the silent ranks of this machine, if this is its first live rank.

        Returns:
            The ranks that were looked at.
        """
        if not self._is_first_here(silent):
            return []
        own_ranks = [rank for rank in self._here() if rank in silent]
        for rank in own_ranks:
            self._write(f"found/{rank}", self._inspect(rank, age=self._pulse_of(rank).age))
        return own_ranks

    def _inspect(self, rank: int, *, age: float) -> RankReport:
        """Report on a silent rank of this machine."""
        process = self.processes[rank]
        return hang_report.inspect_process(process.pid, rank, self.output_dir, age=age, death=process.death())

    def _verdict(self, silent: Collection[int]) -> str:
        """Return the verdict, from the reports of live ranks and from what was found of silent ones.

        A silent rank may come back to life when it is looked at.
        """
        pulses, silent = self._pulses(), set(silent)
        missing = [rank for rank, pulse in enumerate(pulses) if rank in silent or not pulse.has_left]
        accounts: dict[int, RankReport] = {}
        end = time.monotonic() + SECONDS_TO_ANSWER
        while missing and time.monotonic() < end:
            keys = {rank: f"{'found' if rank in silent else 'account'}/{rank}" for rank in missing}
            accounts |= {rank: RankReport(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._has(key)}
            missing = [rank for rank in missing if rank not in accounts]
            time.sleep(0.1 if missing else 0.0)
        for rank in missing:
            pulse, state = pulses[rank], "no rank on its machine responds"
            accounts[rank] = RankReport(words=pulse.words, step=pulse.step, age=pulse.age, is_silent=True, state=state)
        return self._verdict_text(accounts)

    def _verdict_text(self, accounts: Mapping[int, RankReport]) -> str:
        hosts = {rank: process.host for rank, process in enumerate(self.processes)}
        text = f"{PREFIX}{hang_report.verdict(accounts, hosts, self.timeout)}\n{hang_report.stacks_hint(self.output_dir)}"
        return keep(self.output_dir, "report.txt", text)

    def _kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self.processes[rank].death() is None:
                os.kill(self.processes[rank].pid, signal.SIGKILL)

    def _end_without_store(self) -> None:
        """End the run because the store, which rank 0 or its launcher holds, does not answer. A rank on its machine reports on rank 0."""
        self._alarm.set()
        keep(self.output_dir, f"rank_{self.rank:05d}.txt", hang_report.own_stacks())
        host, own_ranks = self.processes[0].host, []
        text = f"{PREFIX}the job's store on {host} has not answered for {self.timeout:g} s (rank_heartbeat_timeout), so the run ends."
        if self.rank != 0 and 0 in self._here() and self._is_first_here([0]) and not launcher.read().launcher_holds_store:
            own_ranks, first = [0], self._inspect(0, age=self.timeout)
            text = self._verdict_text(
                {
                    0: first,
                    self.rank: RankReport(words=self._pulse.words, step=activity.step, age=0.0, waits=waiting_collective(self._main)),
                }
            )
        self._leave(text, [0], own_ranks)
