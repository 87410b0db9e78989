"""Owns what a user's code may not do to the process it runs in: end it, go on in a fork of it, close its output.

`os._exit`, or a crash in C, cannot be held from inside; `run.supervisor` sees from outside that a process left too early.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from megatron_grpo.base.errors import raised, said_by

_OUTPUTS = {1: "stdout", 2: "stderr"}


class AskedToEnd(Exception):
    """The code raised SystemExit, or a KeyboardInterrupt of its own: it would have ended the run, with exit code 0 perhaps."""


class contained:  # in lower case, for it reads as `with contained(...)`
    """User's code runs inside: `with contained(told): f()`. Raises AskedToEnd for what would have ended this process.

    A child that the code forked does not come out of the block: there would be two of this run. Where the code closed stdout or stderr,
    it is opened again: what is written there next would end the run, or land in whatever file was opened in its place. Where it changed
    what torch makes of numbers in the whole process, that is changed back. told: gets what was closed or changed, as the end of a sentence
    about the code.
    """

    def __init__(self, told: list[str]):
        self.told = told

    def __enter__(self) -> contained:
        self._process = os.getpid()
        self._pressed = False
        # A run has handlers of its own (`run.signals`). Where Python's is in place, Ctrl-C raises here: it is told from the code's own.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._listens = is_default and threading.current_thread() is threading.main_thread()
        if self._listens:
            signal.signal(signal.SIGINT, self._hear)
        self._copies = {fd: copy for fd in _OUTPUTS if (copy := _copy_of(fd)) is not None}
        self._torch = _torch_settings()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            _end_child(error)
        if self._listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, copy in self._copies.items():
            if _open_again(fd, copy):
                self.told.append(f"closed {_OUTPUTS[fd]}; it was opened again")
            os.close(copy)
        for name, (now, _) in _torch_settings().items():
            if name in self._torch and now != self._torch[name][0]:
                before, change_to = self._torch[name]
                change_to(before)
                self.told.append(f"changed torch's {name} to {now}; it is {before} again")
        if isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and not self._pressed):
            said = said_by(error)
            raise AskedToEnd(f"{type(error).__name__}{': ' * bool(said)}{said}") from error

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt


def _torch_settings() -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """What of torch's holds for the whole process: name -> (value, how it is set). Nothing where nobody has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "default device": (str(torch.get_default_device()), torch.set_default_device),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
    }


def _copy_of(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # closed before, or no descriptors are left
        return None


def _open_again(fd: int, copy: int) -> bool:
    """Whether it was closed: as a descriptor, or as Python's stream on it."""
    name, was_closed = _OUTPUTS[fd], False
    try:
        os.fstat(fd)
    except OSError:
        os.dup2(copy, fd)
        was_closed = True
    stream = getattr(sys, name)
    if stream is not None and stream.closed:
        setattr(sys, name, open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False))
        was_closed = True
    return was_closed


def _end_child(error: BaseException | None) -> None:
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else 0 if error.code is None else 1)
    how = "returned" if error is None else raised(error)
    what = f"megatron-grpo: process {os.getpid()}, which a reward function forked, {how} instead of leaving with os._exit. It ends here.\n"
    try:
        os.write(2, what.encode())
    finally:
        os._exit(1)
