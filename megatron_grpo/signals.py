"""Signals that end a run: asked politely it finishes its optimizer step, saves and leaves; and no rank outlives its launcher.

    SIGTERM, SIGINT, SIGUSR1    a flag, read once an optimizer step; all ranks agree to stop at the same step (exit code 3: safe to resume)
    the same again, 2 s later or more    the default: the process dies at once
    the launcher is killed      the kernel kills this process too (`die_with_parent`)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C reaches the whole terminal job, and torchrun then passes it on to its workers: one wish, heard twice. So does `scancel`.
ECHO_SECONDS = 2.0


class StopSignal:
    """Remembers that somebody asked this process to stop. One a process, made in its main thread, for as long as it trains."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._before = {number: signal.signal(number, self._handle) for number in STOPPING}

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool:
        """Whether any rank was asked to stop. Collective: once an optimizer step on every rank, so that none saves alone."""
        return all_reduce_max(0.0 if self.received is None else 1.0) > 0

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since >= ECHO_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent dies (Linux; elsewhere this does nothing).

    For processes that a launcher started, such as torchrun's workers: a launcher killed with SIGKILL cannot end them itself. Not for a process
    that somebody started from a shell: it would die with the shell.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
