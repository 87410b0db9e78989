"""Requests to stop a run: signals, time limits, and requests to other ranks.

The run saves and exits, and no rank outlives its launcher.

SIGTERM, SIGINT, SIGUSR1, SIGHUP     The run saves as soon as it can, on all ranks (exit code 3: safe to resume).
STOP_BY_CALLBACK                     The same: a callback of the program that started the ranks asks for it.
A time limit, or another rank        The same.
A second signal, 2 s later or more   The process dies at once, wherever it is. SIGUSR1 and SIGHUP only announce the end and never do this.
SIGTERM because another rank failed  The process dies at once: the step in progress can never finish.
The launcher is killed               The kernel kills this process too (`cleanup.die_with_parent`).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import RunInterruptedError
from megatron_grpo.run.failures import report, write_error_file
from megatron_grpo.run.jobs import STOP_BY_CALLBACK, StopReason, TimeLimit
from megatron_grpo.run.peers import Peers

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, STOP_BY_CALLBACK)
# Ctrl-C reaches the whole terminal job, and torchrun then forwards it to its workers: one request arrives twice. `scancel` does the same.
ECHO_SECONDS = 2.0
SECONDS_TO_REPORT = 10.0  # for a failed rank to report its reason, before the others exit by themselves
_NOTICES = (signal.SIGUSR1, signal.SIGHUP)  # a scheduler that will end the job, a closed terminal: repeated, they do not mean "at once"


@contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals with a function inside the block."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


@contextmanager
def signals_before_run() -> Iterator[None]:
    """Handle signals that arrive while no `StopSignal` is active: print one sentence and exit at once (exit code 3)."""
    pid = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != pid:  # a forked child, for example of a reward function
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        when = "the run had ended" if activity.step else "no step had been trained"
        stopped = RunInterruptedError(f"stopped by {_sender(number)}; {when}")
        stopped.is_final = number != signal.SIGTERM
        # torchrun may send it because another rank has failed: that rank's reason must come first.
        write_error_file(f"{stopped}", seconds_later=1)
        os._exit(report(stopped))

    with handle_signals([number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN], end):
        yield


def _sender(number: int) -> str:
    return "a callback" if number == STOP_BY_CALLBACK else signal.Signals(number).name


class StopSignal:
    """Record of requests to stop this run. Make one per process, in its main thread, for as long as it trains.

    Args:
        leave_if_doomed: Called when SIGTERM arrives. A launcher sends it both to stop a run and after a rank has failed: the function exits
            the process if a rank has failed, and returns if the run is to be saved.
        patience: Seconds that a sampling request in progress may still take.
        peers: The other ranks. They are notified of a request here, and polled for their own in a thread, so that a rank learns of a
            signal to another one in the middle of a rollout, without a collective.
        leaves_unasked: Whether this process also exits after the others have reported for `SECONDS_TO_REPORT` that the run cannot go on.
            gloo's collectives raise an error when a member dies; NCCL's keep waiting, and not every launcher sends SIGTERM.
    """

    def __init__(
        self,
        leave_if_doomed: Callable[[], object] = lambda: None,
        *,
        patience: float = 0.0,
        limits: Sequence[TimeLimit] = (),
        peers: Peers | None = None,
        leaves_unasked: bool = False,
    ):
        self._leaves_unasked, self._doomed_since = leaves_unasked and peers is not None, float("inf")
        self.received: int | None = None
        self.asked: StopReason | None = None
        # True if this rank itself was asked to stop, and not by SIGTERM: torchrun also sends SIGTERM to ranks that it restarts when the
        # set of machines changes.
        self.is_final = False
        self._leave_if_doomed, self._patience, self._limits, self._others = leave_if_doomed, patience, limits, peers
        self._since, self._patient_until = 0.0, float("inf")
        # Python runs signal handlers in the main thread, which never gets to them inside a collective that hangs. So a thread listens.
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, frame: None)
            for number in STOPPING
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # `nohup`: a closed terminal must not stop the run
        }
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def is_requested(self, all_reduce_max: Callable[[float], float]) -> bool:
        """Return whether any rank was asked to stop. Collective: called at the same points on every rank, so that none saves alone.

        Args:
            all_reduce_max: Returns the maximum of a number over all ranks.
        """
        stops = all_reduce_max(0.0 if self.asked is None else 1.0) > 0
        if stops:
            self._lose_patience()
        return stops

    def should_cancel(self) -> bool:
        """Return whether this rank knows that the run is to stop, and its patience with sampling is used up."""
        if self.asked is None:
            return False
        self._lose_patience()
        return time.monotonic() >= self._patient_until

    def why(self, all_gather: Callable[[Any], list[Any]]) -> str:
        """Return the reason for the stop, the same on every rank. Collective; call it once `is_requested` has returned True.

        Args:
            all_gather: Gathers an object from all ranks.
        """
        self.asked = next(reason for reason in all_gather(self.asked) if reason is not None)
        return self.asked.why

    def request(self, reason: str) -> None:
        """Request a stop from inside the program. One rank alone may call it."""
        self._take(StopReason(reason), is_final=True)

    def restore(self) -> None:
        """Restore the signal handlers that were installed before."""
        self._pid = -1
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._wakeup_writer)  # the thread reads end-of-file and exits

    def _lose_patience(self) -> None:
        """Start the countdown of `patience`, once.

        It begins when something is first waited for: an optimizer step that had to end first does not count.
        """
        self._patient_until = min(self._patient_until, time.monotonic() + self._patience)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup_reader, select.POLLIN)
        while True:
            seconds = self._until_next_look()
            if not poll.poll(None if seconds is None else max(0.0, seconds) * 1000):
                self._poll()
                continue
            numbers = os.read(self._wakeup_reader, 64)
            if not numbers:
                break
            for number in numbers:
                if number in self._before:
                    self._receive(number)
        os.close(self._wakeup_reader)

    def _until_next_look(self) -> float | None:
        intervals = [self._others.seconds_between_looks] if self._others else []
        if self.asked is not None:
            return intervals[0] if self._leaves_unasked else None
        return min([limit.at - time.monotonic() for limit in self._limits] + intervals, default=None)

    def _poll(self) -> None:
        reached = next((limit for limit in self._limits if time.monotonic() >= limit.at), None) if self.asked is None else None
        if reached is not None:
            self._take(StopReason(reached.why, is_time=True), is_final=True)
        elif self._others is not None:
            self.asked = self.asked or self._others.asked()
        if self._leaves_unasked:
            self._leave_with_others()

    def _leave_with_others(self) -> None:
        assert self._others is not None
        is_doomed = self._others.why_doomed() is not None
        self._doomed_since = min(self._doomed_since, time.monotonic()) if is_doomed else float("inf")
        if time.monotonic() - self._doomed_since >= SECONDS_TO_REPORT:
            self._leave_if_doomed()

    def _receive(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._leave_if_doomed()
        if self.received is None or (self.received in _NOTICES and number not in _NOTICES):
            self.received, self._since = number, time.monotonic()
            self._take(StopReason(_sender(number), is_time=number == signal.SIGUSR1), is_final=number != signal.SIGTERM)
        elif time.monotonic() - self._since >= ECHO_SECONDS and number not in _NOTICES:
            os._exit(128 + number)

    def _take(self, reason: StopReason, *, is_final: bool) -> None:
        is_first, self.is_final = self.asked is None, self.is_final or is_final
        self.asked = self.asked or reason
        if is_first and self._others is not None:
            self._others.pass_on(reason)

    def _in_child(self) -> None:
        """Restore default handlers in a forked child, for example of a reward function.

        Otherwise the child would write its own signals into our pipe, and would not die of them.
        """
        if self._pid == os.getppid():
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
