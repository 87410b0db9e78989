"""Current activity of this process: its phase, progress in it, and whether anything moves; and the time spent per part of a step.

Working code reports its progress, which costs an addition. Observers read it from a separate thread: the live line, and the watchdog.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The blocks of a run's timers, and other long phases, as shown to users.
WORDS = {
    "rollout": "sampling",
    "reward": "scoring rewards",
    "old_logprobs": "scoring for old log-probs",
    "ref_logprobs": "scoring by the reference",
    "teacher": "scoring by the teacher",
    "train": "training",
    "weight_sync": "syncing weights",
    "offload": "offloading weights",
    "eval": "evaluating",
    "checkpoint": "saving",
}


class Phase:
    """Phase of work.

    Args:
        total: Final value of what `advance` counts in it, if known.
        unit: Unit of the count.
        pause: Time without progress that is normal, in seconds.
        is_alone: Whether nothing in it waits for other ranks.
    """

    __slots__ = ("name", "total", "unit", "pause", "is_alone", "done", "began")

    def __init__(self, name: str, *, total: int | None = None, unit: str = "", pause: float = 0.0, is_alone: bool = False):
        self.name, self.total, self.unit, self.pause, self.is_alone = name, total, unit, pause, is_alone
        self.done, self.began = 0, time.monotonic()


# Seconds without progress reports that are normal while other code works for us: starting vLLM, writing and reading files.
LONG = 1500.0
_LONG = ("saving", "restoring", "exporting", "starting vLLM")

_open: tuple[Phase, ...] = ()  # the innermost last; replaced, never changed, so that other threads may read it
moves = 0  # grows with every report of progress
step = 0  # optimizer steps done
num_saved = 0  # checkpoints saved
# Called in the main thread whenever the phase changes: for observers that need the phase even if no thread of this process runs any more.
listeners: list[Callable[[], object]] = []


@contextmanager
def phase(name: str, *, total: int | None = None, unit: str = "", pause: float = 0.0, is_alone: bool = False) -> Iterator[Phase]:
    """Open a phase for the duration of the block. Phases nest. For the main thread.

    Args:
        total: Final value of what `advance` counts in it, if known.
        unit: Unit of the count.
        pause: Time without progress that is normal, in seconds.
        is_alone: Whether nothing in it waits for other ranks.
    """
    global _open
    name = WORDS.get(name, name)
    pause = max(pause, LONG if name in _LONG else 0.0)
    outer_phases, entered = _open, Phase(name, total=total, unit=unit, pause=pause, is_alone=is_alone)
    _open = (*outer_phases, entered)
    _tell()
    try:
        yield entered
    finally:
        _open = outer_phases
        _tell()


def _tell() -> None:
    advance(0)
    for listen in listeners:
        listen()


def advance(count: int = 1) -> None:
    """Report progress. May be called from any thread.

    Args:
        count: Amount to add to the count of the innermost phase.
    """
    global moves
    moves += 1
    if count and (phases := _open):
        phases[-1].done += count


def report_step(number: int) -> None:
    """Report the number of optimizer steps done."""
    global step
    step = number
    advance(0)


def report_saved() -> None:
    """Report that a checkpoint is on disk."""
    global num_saved
    num_saved += 1


def current() -> tuple[Phase, ...]:
    """Return the open phases, the innermost last."""
    return _open


def describe(phases: tuple[Phase, ...]) -> str:
    """Describe the phases, as in `evaluating: sampling 3 of 8 completions`; `between two phases` if none is open."""
    phases_shown: list[Phase] = []
    for entry in phases:
        if phases_shown and phases_shown[-1].name == entry.name:  # the same phase again, with a count
            phases_shown.pop()
        phases_shown.append(entry)
    return ": ".join(map(_with_count, phases_shown)) or "between two phases"


def _with_count(entry: Phase) -> str:
    if entry.total is None:
        return entry.name
    return f"{entry.name} {entry.done:,} of {entry.total:,} {entry.unit}".rstrip()


class Timers:
    """Timers of the parts of a step: `with timers("rollout"): ...` adds to `time/rollout`.

    Blocks of one name add up; time in an inner block is subtracted from the outer block. `timers.beside("rollout_overlapped", 2.5)` adds
    seconds that overlap with other blocks: they are not part of the sum.

    Time outside all blocks is `time/other`, so the parts of a step sum to `time/step`. Time is this process's wall clock: work that was
    launched on a GPU and has not finished yet is not included, so put blocks around points that synchronise. A block is also a phase of
    `activity`.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._open: list[str] = []  # the innermost block last
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block and open a phase for it.

        Args:
            name: The block adds to `time/<name>`.
        """
        self._switch()
        self._open.append(name)
        try:
            with phase(name):
                yield
        finally:
            self._switch()
            self._open.pop()

    def beside(self, name: str, seconds: float) -> None:
        """Add overlapping seconds to `time/<name>`, and to nothing else.

        Args:
            seconds: Time to add, in seconds.
        """
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def _switch(self) -> None:
        """Add the time since the last change of blocks to the innermost one."""
        time_now, name = time.perf_counter(), self._open[-1] if self._open else "other"
        self._seconds[name] = self._seconds.get(name, 0.0) + time_now - self._since
        self._since = time_now

    def take(self) -> dict[str, float]:
        """Return the seconds per block since the last call, and reset them.

        Returns:
            {"time/<name>": seconds, ..., "time/step": their sum}.
        """
        self._switch()
        seconds_of_phases, seconds_beside, self._seconds, self._beside = self._seconds, self._beside, {}, {}
        return {f"time/{name}": seconds for name, seconds in (seconds_of_phases | seconds_beside).items()} | {
            "time/step": sum(seconds_of_phases.values())
        }
