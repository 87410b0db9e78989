"""What is found, and said, of a process that hangs: by the watchdog of the ranks, or by the parent of one that is alone. No torch.

A signal makes the process write where its threads are, by a handler in C: it needs no interpreter lock, so it also works where Python code
holds that lock for ever. What it writes, and the note of what it was doing, lie in memory that other processes of the same user can read.
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

from megatron_grpo.base import activity

FOLDER = "watchdog"  # in output_dir
NAMED = 8  # culprits that are told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What is found of a rank after an alarm, by itself or by a neighbour. waits: in which collective, "" if in none."""

    words: str
    step: int
    age: float
    is_silent: bool = False
    is_stuck: bool = False
    waits: str = ""
    state: str = ""
    where: str = ""


def culprits(accounts: Mapping[int, RankReport]) -> list[int]:
    """Whom the others wait for: who is silent; or stuck alone; or waits in no collective; or is behind; [] if all wait for each other."""
    for is_one in (lambda one: one.is_silent, lambda one: one.is_stuck, lambda one: not one.waits):
        if found := [rank for rank, account in accounts.items() if is_one(account)]:
            first = min(accounts[rank].step for rank in found)
            return [rank for rank in found if accounts[rank].is_silent or accounts[rank].step == first]
    first, last = min(one.step for one in accounts.values()), max(one.step for one in accounts.values())
    return [rank for rank, one in accounts.items() if one.step == first] if first < last else []


def verdict(accounts: Mapping[int, RankReport], hosts: Mapping[int, str], timeout: float) -> str:
    """The sentences that name the culprits, and say what the others do."""
    named = culprits(accounts)
    lines = [_of_culprit(rank, hosts[rank], accounts[rank]) for rank in named[:NAMED]]
    if len(named) > NAMED:
        lines.append(f"So do {len(named) - NAMED} more ranks: {', '.join(map(str, named[NAMED : NAMED + 32]))}.")
    others = Counter(_of_other(accounts[rank]) for rank in accounts.keys() - set(named))
    doing = "; ".join(f"{count} {words}" for words, count in others.most_common(NAMED))
    if not named:
        lines.append("all ranks wait for each other, and none of them is behind: they are in different collectives, or the network fails "
                     f"({doing}).")  # fmt: skip
    elif others:
        lines.append(f"The others wait for {'it' if len(named) == 1 else 'them'} ({doing}).")
    return "\n  ".join([*lines, f"That has lasted for rank_heartbeat_timeout ({timeout:g} s), so the run ends."])


def _of_culprit(rank: int, host: str, one: RankReport) -> str:
    doing = f", {one.words}" if one.words else ""
    place = f", at {one.where}" if one.where else ""
    how = one.state or f"it has made no progress for {one.age:.0f} s"
    return f"rank {rank} on {host} hangs in optimizer step {one.step + 1}{doing}{place}: {how}."


def _of_other(one: RankReport) -> str:
    return f"{one.words}, in {one.waits}" if one.waits else one.words


def where_to_look(output_dir: Path) -> str:
    from megatron_grpo.checkpoint.manifest import Folder  # only now: a supervisor, which imports this, stays small

    steps = Folder(output_dir / "checkpoints").steps()
    saved = f"The newest checkpoint is that of optimizer step {steps[-1]}; the same command resumes from it." if steps else (
        "There is no checkpoint yet: the same command begins again.")  # fmt: skip
    return f"  Stacks of all ranks: {output_dir / FOLDER}/rank_*.txt. {saved}"


def keep(output_dir: Path, name: str, text: str) -> str:
    """Writes a file of the report, and returns the text. Without a disk the run still ends with its sentence."""
    with suppress(OSError):
        (output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        (output_dir / FOLDER / name).write_text(text)
    return text


def look_from_outside(pid: int, rank: int, output_dir: Path, *, age: float, death: str | None = None) -> RankReport:
    """Of a silent process of this machine; its stacks go into its file. death: how it died, where it did."""
    state = f"it {death}" if death else state_of(pid)
    note, text = note_of(pid), "" if death else collect(pid)
    keep(output_dir, f"rank_{rank:05d}.txt", text or f"{state}; it could not say where it is\n")
    return RankReport(words=note.get("words", ""), step=note.get("step", 0), age=age, is_silent=True, state=state, where=innermost(text))


# ---- where the threads of a process are: this one's, and those of one that can no longer speak for itself -------------------------------

SIGNAL = signal.SIGRTMIN + 12  # 11 is the deadline's of a reward function
_NAME, _NOTE = "megatron_grpo.stacks", "megatron_grpo.note"
SECONDS = 10.0  # for a process to write where it is

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
    """From now on SIGNAL makes this process write its stacks, and its note can be read. Linux; elsewhere nobody can ask for them."""
    global _note_file
    if sys.platform != "linux" or _place(os.getpid(), _NAME) is not None:
        return
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME), all_threads=True)
    _note_file = os.memfd_create(_NOTE)
    write_down()
    activity.listeners.append(write_down)


def write_down(**facts: Any) -> None:
    """For whoever looks at this process from outside: its step, its phase, and these facts until they are written anew.

    beats, timeout: it lives, and should be taken for hung after so many seconds in which `beats` stands still (0: never).
    """
    if _note_file is not None:
        _note.update(facts, step=activity.step, words=activity.in_words(activity.current()))
        os.pwrite(_note_file, json.dumps(_note).encode() + b"\n", 0)  # what is left of a longer one comes after the end of the line


def note_of(pid: int) -> dict[str, Any]:
    """What a process last wrote down; {} where it does not say."""
    try:
        place = _place(pid, _NOTE)
        return json.loads(place.read_bytes().split(b"\n")[0]) if place is not None else {}
    except (OSError, ValueError):  # it has gone, or is about to write
        return {}


def _place(pid: int, name: str) -> Path | None:
    """A file in memory that a process has registered."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(entry).startswith(f"/memfd:{name}"):
                return entry
    return None


def mine() -> str:
    """Of all threads of this process."""
    with tempfile.TemporaryFile("w+") as stream:
        faulthandler.dump_traceback(file=stream, all_threads=True)
        stream.seek(0)
        return stream.read()


def state_of(pid: int) -> str:
    """What the kernel says of a process, as the end of a sentence."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return STATES["X"]
    return STATES.get(letter, f"its state is {letter}")


def collect(pid: int) -> str:
    """Of another process, which has called `register`: what it writes when asked; "" where it cannot.

    One that is stopped runs for it, and is stopped again: it would go on as if nothing had been.
    """
    try:
        if (place := _place(pid, _NAME)) is None:
            return ""
        before, was_stopped = place.stat().st_size, state_of(pid) == STATES["T"]
        # To its main thread, which then writes before it does anything else.
        if ctypes.CDLL(None).tgkill(pid, pid, SIGNAL) != 0:
            return ""
        os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and (place.stat().st_size == before or _grows(place)):
            time.sleep(0.002)  # it writes into memory, and nothing says when it is done
        if was_stopped:
            os.kill(pid, signal.SIGSTOP)
        return place.read_bytes()[before:].decode(errors="replace")
    except OSError:  # it has gone
        return ""


def _grows(place: Path) -> bool:
    before = place.stat().st_size
    time.sleep(0.02)  # threads are written one after the other
    return place.stat().st_size > before


def innermost(text: str) -> str:
    """Where the main thread is, of what `faulthandler` wrote: `reward.py line 3, f`; "" where that cannot be told."""
    threads = [part for part in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.M) if "Thread" in part or "thread" in part]
    for part in reversed(threads):  # the main thread is the oldest, and comes last
        if found := re.search(r'File "([^"]+)", line (\d+) in (.+)', part):
            return f"{Path(found[1]).name} line {found[2]}, {found[3]}"
    return ""
