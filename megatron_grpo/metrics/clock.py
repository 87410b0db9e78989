"""Where the seconds of an optimizer step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """`with clock("rollout"): ...` adds to `time/rollout`. Blocks of the same name add up; a block inside another counts in both.

    It measures this process's wall clock: what a GPU was asked to do and has not yet done is not in it, so time around points that wait.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """{"time/<name>": seconds} since the last call, and begins again at nothing."""
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}": seconds for name, seconds in taken.items()}
