"""A rank that hangs, or is stopped, is named, and the run ends; one that is slow is left alone.

Every rank has a thread that writes a pulse into the job's store now and then: its phase, how far it is, that it lives. Three things raise
the alarm, each after `rank_heartbeat_timeout` seconds, and after the pause that a phase may make:

silent       the pulse of the next rank (each rank watches one, in a ring) stands still: its process is stopped, dead, or its threads are
             locked out by code that holds the interpreter
stuck        this rank makes no progress, in a phase in which it waits for nobody
standstill   nobody makes progress: what all ranks wait for is found by asking them

So slow work that moves is never an alarm, and a rank that waits in a collective is not the culprit. Four messages a period to the store,
whatever the number of ranks; all pulses are read only after an alarm, twice, by the rank that was first to raise it.

The gloo or NCCL timeout (`distributed_timeout_minutes`) is the net below. One process alone is watched by its parent, `run.supervisor`.
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

from megatron_grpo.base import activity, launcher
from megatron_grpo.base.errors import EXIT_CRASH
from megatron_grpo.run import hung
from megatron_grpo.run.failures import PREFIX, tell
from megatron_grpo.run.hung import RankReport, keep
from megatron_grpo.run.peers import Process

LONGEST_PERIOD = 10.0  # seconds between two pulses
PERIODS = 10  # in a timeout, at least
SECONDS_TO_ANSWER = 15.0  # for the ranks that live, once there is an alarm
SECONDS_TO_LEAVE = 2.0

_NO_VERDICT = f"{PREFIX}a rank hangs, and the one that was to say which has gone."

# Where a thread of a rank that waits for others is: innermost frames, by module.
_WAITING = ("torch.distributed.", "megatron.core.pipeline_parallel.p2p_communication", "megatron.core.distributed.")
_DEPTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a rank says of itself. age: seconds since it last made progress. pause: seconds for which its pulse may stand still too, because
    a user's function may hold the interpreter as long as it is given."""

    beat: int = 0
    step: int = 0
    words: str = ""
    age: float = 0.0
    pause: float = 0.0
    has_left: bool = False


class Age:
    """Seconds since something changed, as this process has lived them: while it is stopped itself, or the machine sleeps, none pass."""

    def __init__(self, longest_gap: float, now: Callable[[], float] = time.monotonic):
        self._longest_gap, self._now = longest_gap, now
        self._last: Any = None
        self._looked = now()
        self.seconds = 0.0

    def look(self, value: Any) -> float:
        now = self._now()
        gap, self._looked = min(now - self._looked, self._longest_gap), now
        self.seconds = 0.0 if value != self._last else self.seconds + gap
        self._last = value
        return self.seconds


class Alarms:
    """When there is one, as arithmetic. A call of `reason` is a period; it returns a sentence's beginning, or None."""

    def __init__(self, timeout: float, period: float, now: Callable[[], float] = time.monotonic):
        self.timeout = timeout
        self.mine, self.everyone, self.neighbour = (Age(5 * period, now) for _ in range(3))

    def is_moving(self, moves: int, pause: float) -> bool:
        """Whether this rank vouches for the job: it has moved since the last look, or its phase may stand still as long as it does."""
        seconds = self.mine.look(moves)
        return seconds == 0.0 or seconds <= pause

    def reason(self, *, moving: int, is_alone: bool, pause: float, neighbour: Pulse | None) -> str | None:
        """moving: counts the ranks that vouch. neighbour: the pulse of the rank that this one watches, None where there is none."""
        everyone = self.everyone.look(moving)
        if neighbour is not None and not neighbour.has_left:
            if self.neighbour.look(neighbour.beat) > self.timeout + neighbour.pause:
                return "silent"
        if is_alone and self.mine.seconds > self.timeout + pause:
            return "stuck"
        if everyone > self.timeout and self.mine.seconds > self.timeout:
            return "standstill"
        return None


def waits_in(thread: int) -> str:
    """The collective in which a thread of this process waits for other ranks, "" if in none."""
    frame, depth, found = sys._current_frames().get(thread), 0, ""
    while frame is not None and depth < _DEPTH:
        if frame.f_globals.get("__name__", "").startswith(_WAITING):
            found = frame.f_code.co_name  # the outermost of them: what was called, not how it is done
        frame, depth = frame.f_back, depth + 1
    return found


class Watchdog:
    """The watch of one rank. Made in its main thread, collectively: `wait_for_all` returns once every rank's first pulse is there.

    store: `collectives.store`. processes: of all ranks. timeout: `rank_heartbeat_timeout`, seconds.
    leaves: called for this rank, and for those that it ends, before they leave: they have not died without a word.
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
        self.leaves_behind: Callable[[str], object] | None = None  # told that ranks hang, it writes down what this rank was at
        self._alarms = Alarms(timeout, self.period)
        self._main = threading.main_thread().ident or 0
        hung.register()
        hung.write_down(output_dir=str(output_dir))
        self._ended, self._alarm = threading.Event(), threading.Event()
        self._pulse = Pulse()
        self._write(f"pulse/{rank}", self._pulse)
        wait_for_all()
        self._neighbour = (rank + 1) % len(processes)
        self._round = Age(5 * self.period)
        self._rounds = 0
        self._found: tuple[int, Pulse | None, bool] = (0, None, False)  # moving, the neighbour's pulse, whether there is an alarm
        os.register_at_fork(after_in_child=self._in_child)
        self._speaker = threading.Thread(target=self._speak, name="watchdog pulse", daemon=True)
        self._speaker.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """This rank has nothing left to do with the others."""
        self.hold_if_alarmed()
        self._ended.set()
        self._speaker.join(SECONDS_TO_LEAVE)  # says so to the others

    def hold_if_alarmed(self) -> None:
        """For the main thread, before it tells of an error. After an alarm it does not return: what it met is that others leave."""
        if self._alarm.is_set():
            threading.Event().wait()

    def who_is_silent(self) -> list[int]:
        """Other ranks whose pulse stands still, for the main thread where a collective has failed and nobody has. Takes some periods."""
        try:
            before = self._pulses()
            time.sleep(3 * self.period)
            still = [rank for rank, pulse in enumerate(self._pulses()) if pulse.beat == before[rank].beat and not pulse.has_left]
            return [rank for rank in still if rank != self.rank]
        except RuntimeError:  # the store has gone
            return []

    def _in_child(self) -> None:
        self._ended.set()  # a forked child (a reward function's) has no threads; should it come to close this, nothing is to be said

    # ---- two threads: one speaks with the store and may hang with it; one counts

    def _speak(self) -> None:
        try:
            while not self._ended.wait(self.period):
                self._speak_once()
            if not self._alarm.is_set():
                self._write(f"pulse/{self.rank}", replace(self._pulse, has_left=True))
        except RuntimeError:  # the store has gone, and with it the job: `run.peers` tells of that
            self._store_is_gone = True
        finally:
            hung.write_down(timeout=0.0)

    def _speak_once(self) -> None:
        phases = activity.current()
        vouches = self._alarms.is_moving(activity.moves, sum(one.pause for one in phases))
        self._pulse = Pulse(
            beat=self._pulse.beat + 1,
            step=activity.step,
            words=activity.in_words(phases),
            age=self._alarms.mine.seconds,
            pause=sum(one.pause for one in phases if one.is_alone),
        )
        # For this process's parent. In a job of many the others notice first, and know more.
        seconds = (self.timeout + self._pulse.pause) * (1.0 if len(self.processes) == 1 else 2.0)
        hung.write_down(beats=self._pulse.beat, timeout=seconds)
        self._write(f"pulse/{self.rank}", self._pulse)
        moving = self._store.add("moving", int(vouches))
        neighbour = self._pulse_of(self._neighbour) if self._neighbour != self.rank else None
        self._found = (moving, neighbour, self._has("alarm"))
        self._rounds += 1

    def _watch(self) -> None:
        seen = 0
        while not self._ended.wait(self.period):
            if self._store_is_gone:
                return
            if self._round.look(self._rounds) > self.timeout:
                self._end_without_store()
            if self._rounds == seen:
                continue
            seen = self._rounds
            phases, (moving, neighbour, has_alarm) = activity.current(), self._found
            reason = self._alarms.reason(
                moving=moving, is_alone=any(one.is_alone for one in phases), pause=sum(one.pause for one in phases), neighbour=neighbour
            )
            if (has_alarm or reason) and not self._ended.is_set():
                self._alarm.set()
                threading.Thread(target=self._give_up, name="watchdog end", daemon=True).start()
                self._end(reason or "")
                return

    def _write(self, key: str, found: Pulse | RankReport) -> None:
        self._store.set(key, json.dumps(asdict(found)))

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _has_in_time(self, key: str) -> bool:
        end = time.monotonic() + self._patience
        while not (found := self._has(key)) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _pulse_of(self, rank: int) -> Pulse:
        return Pulse(**json.loads(self._store.get(f"pulse/{rank}")))

    def _pulses(self) -> list[Pulse]:
        """Of all ranks."""
        return [Pulse(**json.loads(text)) for text in self._store.multi_get([f"pulse/{rank}" for rank in range(len(self.processes))])]

    # ---- after an alarm

    def _end(self, reason: str) -> None:
        """What every rank that lives does: it says where it is, looks after silent ones of its machine, hears the verdict, and leaves."""
        text, silent, mine = _NO_VERDICT, [], []
        try:
            leads = self._store.compare_set("alarm", "", str(self.rank)).decode() == str(self.rank)
            self._write(f"account/{self.rank}", self._my_account())
            self._leave_behind()
            if leads:
                silent = self._without_account(expected=[self._neighbour] if reason == "silent" else [])
                self._store.set("silent", json.dumps(silent))
            elif self._has_in_time("silent"):
                silent = json.loads(self._store.get("silent"))
            mine = self._look_after(silent)
            if leads:
                text = self._verdict(silent)
                self._store.set("verdict", text)
            elif self._has_in_time("verdict"):
                text = self._store.get("verdict").decode()
            for rank in (self.rank, *mine):
                self._leaves(rank)
        except RuntimeError:  # the store has gone: whoever held it has left, and has said why
            pass
        finally:
            self._leave(text, silent, mine)

    def _give_up(self) -> None:
        """The store may stop answering in the midst of it."""
        time.sleep(2 * self._patience)
        self._leave(_NO_VERDICT, [], [])

    def _leave(self, text: str, silent: Sequence[int], mine: Sequence[int]) -> None:
        try:
            if launcher.read().said is not None:
                tell(text)
            elif self._is_first_here(silent):
                print(text, file=sys.stderr, flush=True)
            self._kill(mine)
            if self.rank == 0:  # which may hold the store that the others read the verdict from
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
        except Exception as error:  # noqa: BLE001 - whatever it is, who hangs must be named all the same
            print(f"{PREFIX}rank {self.rank} could keep nothing of its step: {error}", file=sys.stderr, flush=True)

    def _my_account(self) -> RankReport:
        phases = activity.current()
        stuck = any(one.is_alone for one in phases) and self._alarms.mine.seconds > self.timeout + sum(one.pause for one in phases)
        text = keep(self.output_dir, f"rank_{self.rank:05d}.txt", hung.mine())
        return RankReport(
            words=activity.in_words(phases), step=activity.step, age=self._alarms.mine.seconds, is_stuck=stuck,
            waits=waits_in(self._main), where=hung.innermost(text),
        )  # fmt: skip

    def _without_account(self, expected: Collection[int]) -> list[int]:
        """Ranks that do not say where they are, when they have had time to. expected: they are known to be silent, and not waited for."""
        missing = [rank for rank, pulse in enumerate(self._pulses()) if not pulse.has_left]
        end = time.monotonic() + 4 * self.period + SECONDS_TO_ANSWER
        while (missing := [rank for rank in missing if not self._has(f"account/{rank}")]) and time.monotonic() < end:
            if set(missing) <= set(expected):
                break
            time.sleep(0.1)
        return missing

    def _here(self) -> list[int]:
        """Ranks of this machine."""
        return [rank for rank, process in enumerate(self.processes) if process.machine == self.processes[self.rank].machine]

    def _is_first_here(self, silent: Collection[int]) -> bool:
        """Of the ranks of this machine that live."""
        return next(rank for rank in self._here() if rank not in silent) == self.rank

    def _look_after(self, silent: Collection[int]) -> list[int]:
        """Stacks and accounts of the silent ranks of this machine, by the first of its ranks that lives. Returns those it cared for."""
        if not self._is_first_here(silent):
            return []
        mine = [rank for rank in self._here() if rank in silent]
        for rank in mine:
            self._write(f"found/{rank}", self._look_at(rank, age=self._pulse_of(rank).age))
        return mine

    def _look_at(self, rank: int, *, age: float) -> RankReport:
        """Of a silent rank of this machine."""
        process = self.processes[rank]
        return hung.look_from_outside(process.pid, rank, self.output_dir, age=age, death=process.death())

    def _verdict(self, silent: Collection[int]) -> str:
        """Of what ranks say of themselves, and of what is found of the silent ones; those may come back to life when they are looked at."""
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
            pulse, state = pulses[rank], "nobody on its machine answers"
            accounts[rank] = RankReport(words=pulse.words, step=pulse.step, age=pulse.age, is_silent=True, state=state)
        return self._told(accounts)

    def _told(self, accounts: Mapping[int, RankReport]) -> str:
        hosts = {rank: process.host for rank, process in enumerate(self.processes)}
        text = f"{PREFIX}{hung.verdict(accounts, hosts, self.timeout)}\n{hung.where_to_look(self.output_dir)}"
        return keep(self.output_dir, "report.txt", text)

    def _kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self.processes[rank].death() is None:
                os.kill(self.processes[rank].pid, signal.SIGKILL)

    def _end_without_store(self) -> None:
        """The store, which rank 0 or its launcher holds, does not answer: whoever can look at rank 0 says how it is."""
        self._alarm.set()
        keep(self.output_dir, f"rank_{self.rank:05d}.txt", hung.mine())
        host, mine = self.processes[0].host, []
        text = f"{PREFIX}the job's store on {host} has not answered for {self.timeout:g} s (rank_heartbeat_timeout), so the run ends."
        if self.rank != 0 and 0 in self._here() and self._is_first_here([0]) and not launcher.read().launcher_holds_store:
            mine, first = [0], self._look_at(0, age=self.timeout)
            text = self._told(
                {0: first, self.rank: RankReport(words=self._pulse.words, step=activity.step, age=0.0, waits=waits_in(self._main))}
            )
        self._leave(text, [0], mine)
