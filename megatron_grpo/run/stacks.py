"""Where the threads of a process are: its own, and those of one that can no longer speak for itself. No torch.

A signal makes the process write, by a handler in C: it needs no interpreter lock, so it also works where Python code holds that lock for
ever. What it writes lands in memory that other processes of the same user can read.
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
from contextlib import suppress
from pathlib import Path

from megatron_grpo.base import activity

SIGNAL = signal.SIGRTMIN + 12  # 11 is the deadline's of a reward function
_NAME, _PHASE = "megatron_grpo.stacks", "megatron_grpo.phase"
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


def register() -> None:
    """From now on SIGNAL makes this process write its stacks, and its phase can be read. Linux; elsewhere nobody can ask for them."""
    if sys.platform != "linux" or _place(os.getpid(), _NAME) is not None:
        return
    faulthandler.register(SIGNAL, file=os.memfd_create(_NAME), all_threads=True)
    note = os.memfd_create(_PHASE)

    def write_down() -> None:
        text = json.dumps({"step": activity.step, "words": activity.in_words(activity.current())}).encode()
        os.pwrite(note, text + b"\n", 0)  # what is left of a longer one comes after the end of the line

    write_down()
    activity.listeners.append(write_down)


def phase_of(pid: int) -> tuple[int, str]:
    """(optimizer steps done, phase) of a process as it last changed; (0, "") where it does not say."""
    try:
        place = _place(pid, _PHASE)
        note = json.loads(place.read_bytes().split(b"\n")[0]) if place is not None else {}
    except (OSError, ValueError):  # it has gone, or was stopped as it wrote
        note = {}
    return note.get("step", 0), note.get("words", "")


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
