"""Signals that end a run: asked politely it finishes its optimizer step, saves and leaves; and no rank outlives its launcher.

SIGTERM, SIGINT, SIGUSR1             a flag, read once an optimizer step; all ranks stop after the same one (exit 3: safe to resume)
again, 2 s later or more             the process dies at once, wherever it is
SIGTERM because another rank failed  the process dies at once: the step it is in can never finish
the launcher is killed               the kernel kills this process too (`cleanup.die_with_parent`)
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C reaches the whole terminal job, and torchrun then passes it on to its workers: one wish, heard twice. So does `scancel`.
ECHO_SECONDS = 2.0


class StopSignal:
    """Remembers that somebody asked this process to stop. One a process, made in its main thread, for as long as it trains.

    leave_if_doomed: called when SIGTERM arrives, which a launcher sends in both cases. It ends the process if a rank has failed, and
    returns if the run is to be saved.
    """

    def __init__(self, leave_if_doomed: Callable[[], object] = lambda: None):
        self.received: signal.Signals | None = None
        self._leave_if_doomed = leave_if_doomed
        self._since = 0.0
        # Python runs handlers when its main thread next comes by. Inside a collective that never ends it does not, so a thread listens.
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._wakeup_before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda number, frame: None) for number in STOPPING}
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool:
        """Whether any rank was asked to stop. Collective: once an optimizer step on every rank, so that none saves alone."""
        return all_reduce_max(0.0 if self.received is None else 1.0) > 0

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        self._pid = -1
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._tell)  # the thread reads the end of the pipe and leaves

    def _listen(self) -> None:
        while numbers := os.read(self._heard, 64):
            for number in numbers:
                if number in STOPPING:
                    self._hear(signal.Signals(number))
        os.close(self._heard)

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self._leave_if_doomed()
        if self.received is None:
            self._since, self.received = time.monotonic(), number
        elif time.monotonic() - self._since >= ECHO_SECONDS:
            os._exit(128 + number)

    def _in_child(self) -> None:
        """A forked child (a reward function's, say) would tell our pipe of its own signals, and not die of them."""
        if self._pid == os.getppid():
            signal.set_wakeup_fd(-1)
            for number in STOPPING:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
