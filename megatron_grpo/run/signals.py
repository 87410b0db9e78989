"""What asks a run to stop: signals, its time limits, another rank that was asked. It saves and leaves; and no rank outlives its launcher.

SIGTERM, SIGINT, SIGUSR1, SIGHUP     the run saves as soon as it can, on all ranks (exit 3: safe to resume)
a time limit, or another rank        the same
again, 2 s later or more             the process dies at once, wherever it is; but SIGUSR1 and SIGHUP only tell that an end is near
SIGTERM because another rank failed  the process dies at once: the step it is in can never finish
the launcher is killed               the kernel kills this process too (`cleanup.die_with_parent`)
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_grpo.base import activity
from megatron_grpo.base.errors import RunInterruptedError
from megatron_grpo.run.failures import note, report
from megatron_grpo.run.limits import Limit, StopReason
from megatron_grpo.run.peers import Peers

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Ctrl-C reaches the whole terminal job, and torchrun then passes it on to its workers: one wish, heard twice. So does `scancel`.
ECHO_SECONDS = 2.0
SECONDS_TO_TELL = 10.0  # that a rank that failed has, to say why, before the others leave by themselves
_NOTICES = (signal.SIGUSR1, signal.SIGHUP)  # a scheduler that will end the job, a terminal that has gone: nobody who is impatient


@contextmanager
def heard_before_the_run() -> Iterator[None]:
    """Around all that a command does: while no `StopSignal` listens, a signal ends this process at once, by a sentence (exit 3)."""
    me, before = os.getpid(), {number: signal.getsignal(number) for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN}

    def end(number: int, frame: Any) -> None:
        if os.getpid() != me:  # a forked child, of a reward function perhaps
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        when = "the run had ended" if activity.step else "nothing was trained yet"
        stopped = RunInterruptedError(f"stopped by {signal.Signals(number).name}; {when}")
        stopped.is_final = number != signal.SIGTERM
        note(f"{stopped}", seconds_later=1)  # torchrun may send it because another rank has failed, which is the reason then
        os._exit(report(stopped))

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignal:
    """Remembers that this run was asked to stop. One a process, made in its main thread, for as long as it trains.

    leave_if_doomed: called when SIGTERM arrives, which a launcher sends in both cases. It ends the process if a rank has failed, and
    returns if the run is to be saved. patience: seconds that what is being sampled may still take. limits: of time. others: are told, and
    asked now and then, in a thread: so a rank hears of a signal to another one in the middle of a rollout, without a collective.
    leaves_unasked: the process also dies where the others say for so long that the run cannot go on. gloo's collectives end with an error
    when a member dies; NCCL's go on waiting, and not every launcher sends SIGTERM.
    """

    def __init__(
        self,
        leave_if_doomed: Callable[[], object] = lambda: None,
        *,
        patience: float = 0.0,
        limits: Sequence[Limit] = (),
        others: Peers | None = None,
        leaves_unasked: bool = False,
    ):
        self._leaves_unasked, self._doomed_since = leaves_unasked and others is not None, float("inf")
        self.received: signal.Signals | None = None
        self.asked: StopReason | None = None
        # Asked here, not only elsewhere; and not by SIGTERM, with which torchrun also ends ranks that it starts again with other machines.
        self.is_final = False
        self._leave_if_doomed, self._patience, self._limits, self._others = leave_if_doomed, patience, limits, others
        self._since, self._patient_until = 0.0, float("inf")
        # Python runs handlers when its main thread next comes by. Inside a collective that never ends it does not, so a thread listens.
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._wakeup_before = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, frame: None)
            for number in STOPPING
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # `nohup`: a closed terminal is to change nothing
        }
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool:
        """Whether any rank was asked to stop. Collective: at the same places on every rank, so that none saves alone."""
        stops = all_reduce_max(0.0 if self.asked is None else 1.0) > 0
        if stops:
            self._lose_patience()
        return stops

    def should_cancel(self) -> bool:
        """Whether this rank knows that the run is to stop, and has waited for what is being sampled as long as it may."""
        if self.asked is None:
            return False
        self._lose_patience()
        return time.monotonic() >= self._patient_until

    def why(self, from_all: Callable[[Any], list[Any]]) -> str:
        """What asked for it, in the same words on every rank. Collective, once they have agreed."""
        self.asked = next(asked for asked in from_all(self.asked) if asked is not None)
        return self.asked.why

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        self._pid = -1
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._tell)  # the thread reads the end of the pipe and leaves

    def _lose_patience(self) -> None:
        """Its seconds are counted from when something is first waited for: an optimizer step that had to end first takes none of them."""
        self._patient_until = min(self._patient_until, time.monotonic() + self._patience)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        while True:
            seconds = self._until_next_look()
            if not poll.poll(None if seconds is None else max(0.0, seconds) * 1000):
                self._look()
                continue
            numbers = os.read(self._heard, 64)
            if not numbers:
                break
            for number in numbers:
                if number in self._before:
                    self._hear(signal.Signals(number))
        os.close(self._heard)

    def _until_next_look(self) -> float | None:
        between = [self._others.seconds_between_looks] if self._others else []
        if self.asked is not None:
            return between[0] if self._leaves_unasked else None
        return min([limit.at - time.monotonic() for limit in self._limits] + between, default=None)

    def _look(self) -> None:
        over = next((limit for limit in self._limits if time.monotonic() >= limit.at), None) if self.asked is None else None
        if over is not None:
            self._take(StopReason(over.why, is_time=True), is_final=True)
        elif self._others is not None:
            self.asked = self.asked or self._others.asked()
        if self._leaves_unasked:
            self._leave_with_others()

    def _leave_with_others(self) -> None:
        assert self._others is not None
        if self._others.why_doomed() is None:
            self._doomed_since = float("inf")
        else:
            self._doomed_since = min(self._doomed_since, time.monotonic())
            if time.monotonic() - self._doomed_since >= SECONDS_TO_TELL:
                self._leave_if_doomed()

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGTERM:
            self._leave_if_doomed()
        if self.received is None or (self.received in _NOTICES and number not in _NOTICES):
            self.received, self._since = number, time.monotonic()
            self._take(StopReason(number.name, is_time=number == signal.SIGUSR1), is_final=number != signal.SIGTERM)
        elif time.monotonic() - self._since >= ECHO_SECONDS and number not in _NOTICES:
            os._exit(128 + number)

    def _take(self, asked: StopReason, *, is_final: bool) -> None:
        is_first, self.is_final = self.asked is None, self.is_final or is_final
        self.asked = self.asked or asked
        if is_first and self._others is not None:
            self._others.pass_on(asked)

    def _in_child(self) -> None:
        """A forked child (a reward function's, say) would tell our pipe of its own signals, and not die of them."""
        if self._pid == os.getppid():
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
