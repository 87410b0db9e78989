"""Report on a process that hangs, for the watchdog of the ranks or for the parent of a single process. No torch.

A signal makes the process write the stacks of its threads through a handler in C. The handler needs no interpreter lock, so it also works
where Python code holds that lock forever. The stacks, and a note of what the process was doing, lie in memory that other processes of the
same user can read.
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
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import activity

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

    Args:
        accounts: Report of each rank.
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
        accounts: Report of each rank.
        hosts: Host name of each rank.
        timeout: `rank_heartbeat_timeout`, seconds.
    """
    suspects = suspect_ranks(accounts)
    lines = [_of_suspect(rank, hosts[rank], accounts[rank]) for rank in suspects[:NAMED]]
    if len(suspects) > NAMED:
        lines.append(f"So do {len(suspects) - NAMED} more ranks: {', '.join(map(str, suspects[NAMED : NAMED + 32]))}.")
    other_states = Counter(_of_other(accounts[rank]) for rank in accounts.keys() - set(suspects))
    doing = "; ".join(f"{count} {words}" for words, count in other_states.most_common(NAMED))
    if not suspects:
        lines.append("all ranks wait for each other, and none of them is behind: they are in different collectives, or the network fails "
                     f"({doing}).")  # fmt: skip
    elif other_states:
        lines.append(f"The others wait for {'it' if len(suspects) == 1 else 'them'} ({doing}).")
    return "\n  ".join([*lines, f"That has lasted for rank_heartbeat_timeout ({timeout:g} s), so the run ends."])


def _of_suspect(rank: int, host: str, report: RankReport) -> str:
    doing = f", {report.words}" if report.words else ""
    location = f", at {report.where}" if report.where else ""
    state_text = report.state or f"it has made no progress for {report.age:.0f} s"
    return f"rank {rank} on {host} hangs in optimizer step {report.step + 1}{doing}{location}: {state_text}."


def _of_other(report: RankReport) -> str:
    return f"{report.words}, in {report.waits}" if report.waits else report.words


def stacks_hint(output_dir: Path) -> str:
    """Return the message that names the stack files and the newest checkpoint.

    Args:
        output_dir: Directory of the run.
    """
    from megatron_grpo.run.checkpoint.manifest import (
        Folder,  # imported late, because the supervisor imports this module and must stay small
    )

    steps = Folder(output_dir / "checkpoints").steps()
    saved = f"The newest checkpoint is that of optimizer step {steps[-1]}; the same command resumes from it." if steps else (
        "There is no checkpoint yet: the same command begins again.")  # fmt: skip
    return f"  Stacks of all ranks: {output_dir / FOLDER}/rank_*.txt. {saved}"


def keep(output_dir: Path, name: str, text: str) -> str:
    """Write a file of the report and return its text. Disk errors are ignored, so that the run still ends with its message.

    Args:
        output_dir: Output directory of the run.
        name: Name of the file.
        text: Its content.
    """
    with suppress(OSError):
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        (output_dir / FOLDER / name).write_text(text)
    return text


def inspect_process(pid: int, rank: int, output_dir: Path, *, age: float, death: str | None = None) -> RankReport:
    """Report on a silent process of this machine and write its stacks to the rank's file.

    Args:
        pid: The process.
        rank: Its rank.
        output_dir: Output directory of the run.
        age: Seconds since it last made progress.
        death: How the process died, if it did.
    """
    state = f"it {death}" if death else state_of(pid)
    note, text = note_of(pid), "" if death else stacks_of_process(pid)
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


def note_of(pid: int) -> dict[str, Any]:
    """Return the note of a process; {} if it has none.

    Args:
        pid: Process id on this machine.
    """
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


def state_of(pid: int) -> str:
    """Return the kernel's state of a process, as the end of a sentence.

    Args:
        pid: Process id on this machine.
    """
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return STATES["X"]
    return STATES.get(letter, f"its state is {letter}")


def stacks_of_process(pid: int) -> str:
    """Return the stacks of another process that has called `register`; "" if it cannot write them.

    A stopped process is continued for this and stopped again; otherwise it would keep running.

    Args:
        pid: Process id on this machine.
    """
    try:
        if (path := _place(pid, _NAME)) is None:
            return ""
        old_size, was_stopped = path.stat().st_size, state_of(pid) == STATES["T"]
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
    """Return the frame of the main thread from a `faulthandler` dump, as `reward.py line 3, f`; "" if it cannot be parsed.

    Args:
        text: Dump of all threads.
    """
    threads = [part for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.M) if "Thread" in part or "thread" in part]
    for part in reversed(threads):  # the main thread is the oldest, and comes last
        if match := re.search(r'File "([^"]+)", line (\d+) in (.+)', part):
            return f"{Path(match[1]).name} line {match[2]}, {match[3]}"
    return ""
