"""What this process is doing just now: a phase, how far it is, and whether it moves at all; and where the seconds of a step go.

Whoever works says so, which costs an addition. Whoever watches looks from a thread of its own: the live line, and the watchdog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The blocks of a run's clock, and what else takes long, as people read them.
WORDS = {
    "rollout": "sampling",
    "reward": "judging",
    "old_logprobs": "scoring for old log-probs",
    "ref_logprobs": "scoring by the reference",
    "teacher": "asking the teacher",
    "train": "training",
    "weight_sync": "pushing weights",
    "offload": "moving weights",
    "eval": "evaluating",
    "checkpoint": "saving",
}


class Phase:
    """A stretch of work. total: of what `advance` counts in it, where that is known. pause: seconds for which it may stand still and be
    well. is_alone: nothing in it waits for other ranks."""

    __slots__ = ("name", "total", "unit", "pause", "is_alone", "done", "began")

    def __init__(self, name: str, *, total: int | None = None, unit: str = "", pause: float = 0.0, is_alone: bool = False):
        self.name, self.total, self.unit, self.pause, self.is_alone = name, total, unit, pause, is_alone
        self.done, self.began = 0, time.monotonic()


# Seconds for which work may tell nothing that others do for us: starting vLLM, writing and reading files.
LONG = 1500.0
_LONG = ("saving", "restoring", "exporting", "starting vLLM")

_open: tuple[Phase, ...] = ()  # the innermost last; replaced, never changed, so that other threads may look
moves = 0  # grows whenever something has been done
step = 0  # optimizer steps done
num_saved = 0  # checkpoints
# Called in the main thread whenever the phase changes: for who must know it even if no thread of this process runs any more.
listeners: list[Callable[[], object]] = []


@contextmanager
def phase(name: str, *, total: int | None = None, unit: str = "", pause: float = 0.0, is_alone: bool = False) -> Iterator[Phase]:
    """Work that a person may be told of by name; see `Phase`. For the main thread. Phases nest."""
    global _open
    name = WORDS.get(name, name)
    pause = max(pause, LONG if name in _LONG else 0.0)
    before, entered = _open, Phase(name, total=total, unit=unit, pause=pause, is_alone=is_alone)
    _open = (*before, entered)
    _tell()
    try:
        yield entered
    finally:
        _open = before
        _tell()


def _tell() -> None:
    advance(0)
    for listen in listeners:
        listen()


def advance(done: int = 1) -> None:
    """Something has been done: so much of what the innermost phase counts. From any thread."""
    global moves
    moves += 1
    if done and (now := _open):
        now[-1].done += done


def reached(number: int) -> None:
    """So many optimizer steps have been done."""
    global step
    step = number
    advance(0)


def saved() -> None:
    """A checkpoint is on the disk."""
    global num_saved
    num_saved += 1


def current() -> tuple[Phase, ...]:
    """The phases that are open, the innermost last."""
    return _open


def in_words(phases: tuple[Phase, ...]) -> str:
    """`evaluating: sampling 3 of 8 completions`; where no phase is open `between two phases`."""
    told: list[Phase] = []
    for one in phases:
        if told and told[-1].name == one.name:  # the same work, counted
            told.pop()
        told.append(one)
    return ": ".join(map(_with_count, told)) or "between two phases"


def _with_count(one: Phase) -> str:
    if one.total is None:
        return one.name
    return f"{one.name} {one.done:,} of {one.total:,} {one.unit}".rstrip()


class Timers:
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
            with phase(name):
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
