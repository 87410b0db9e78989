"""Sampling that has begun before its answers are needed: who works meanwhile, and how ranks wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from megatron_grpo.base.errors import GivenUp
from megatron_grpo.parallel import collectives

Result = TypeVar("Result")

# Ranks with nothing to wait for sit in a collective meanwhile, and a collective that lasts too long ends the run.
SECONDS_BETWEEN_AGREEMENTS = 20.0
SECONDS_BETWEEN_LOOKS = 0.5  # at whether the run gives up what it waits for


class InThread(Generic[Result]):
    """Work that a thread of its own does. Nothing collective may be in it.

    work: is given an event, and should end soon once that is set. The thread does not keep the process alive.
    """

    def __init__(self, work: Callable[[threading.Event], Result], *, name: str):
        self._future: Future[Result] = Future()
        self._gives_up, self._began, self._seconds = threading.Event(), time.perf_counter(), 0.0
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[threading.Event], Result]) -> None:
        try:
            found = work(self._gives_up)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._seconds = time.perf_counter() - self._began
            self._future.set_exception(error)
        else:
            self._seconds = time.perf_counter() - self._began
            self._future.set_result(found)

    @property
    def seconds(self) -> float:
        """What the work took, once it is done."""
        return self._seconds

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done, after waiting for it at most so long. Concerns this rank alone."""
        return bool(wait([self._future], seconds).done)

    def result(self) -> Result:
        """Waits for it. Raises what the work raised."""
        return self._future.result()

    def give_up(self) -> None:
        self._gives_up.set()


def wait_together(is_done: Callable[[float], bool], seconds: float | None = None, *, gives_up: Callable[[], bool] | None = None) -> bool:
    """Until every rank is done, at most so long; says whether they are, the same on every rank. Collective.

    is_done: waits on this rank for at most the seconds that it is given, and says whether there is nothing left to wait for.
    gives_up: asked now and then; where it is true on a rank that is not done, GivenUp is raised on every rank.
    """
    left = seconds
    while True:
        part = SECONDS_BETWEEN_AGREEMENTS if left is None else min(SECONDS_BETWEEN_AGREEMENTS, left)
        worst = collectives.largest(_waited(is_done, part, gives_up))
        if worst == _DONE:
            return True
        if worst == _GIVES_UP:
            raise GivenUp
        if left is not None and (left := left - part) <= 0:  # counted, not measured: the same on every rank
            return False


_DONE, _WAITS, _GIVES_UP = 0.0, 1.0, 2.0


def _waited(is_done: Callable[[float], bool], seconds: float, gives_up: Callable[[], bool] | None) -> float:
    """What became of this rank's wait of at most so long."""
    if gives_up is None:
        return _DONE if is_done(seconds) else _WAITS
    end = time.monotonic() + seconds
    while not is_done(min(SECONDS_BETWEEN_LOOKS, max(0.0, end - time.monotonic()))):
        if gives_up():
            return _GIVES_UP
        if time.monotonic() >= end:
            return _WAITS
    return _DONE
