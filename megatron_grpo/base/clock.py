"""Where the seconds of an optimizer step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_grpo.base import activity


class Clock:
    """`with clock("rollout"): ...` adds to `time/rollout`. Blocks of a name add up; a block inside another takes its time from that one.

    `clock.beside("rollout_overlapped", 2.5)` tells of seconds in which something else was done too: they are no part of the sum.

    What is in no block is `time/other`, so the parts of a step sum to `time/step`. Time is this process's wall clock: what a GPU was asked
    to do and has not yet done is not in it, so time around points that wait. A block is also a phase of `activity`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._open: list[str] = []  # the innermost block last
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            with activity.phase(name):
                yield
        finally:
            self._switch()
            self._open.pop()

    def beside(self, name: str, seconds: float) -> None:
        """Adds to `time/<name>`, and to nothing else."""
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def _switch(self) -> None:
        """What has passed since the last change of blocks belongs to the innermost one."""
        now, name = time.perf_counter(), self._open[-1] if self._open else "other"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """{"time/<name>": seconds, ..., "time/step": their sum} since the last call, and begins again at nothing."""
        self._switch()
        taken, beside, self._seconds, self._beside = self._seconds, self._beside, {}, {}
        return {f"time/{name}": seconds for name, seconds in (taken | beside).items()} | {"time/step": sum(taken.values())}
