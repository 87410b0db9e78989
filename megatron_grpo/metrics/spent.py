"""Where the time of a run went: one table at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_grpo.base import activity, launcher

_PREFIX, _BESIDE = "time/", "time/rollout_overlapped"
_NO_PARTS = ("time/step", _BESIDE)
BEFORE = "loading and restoring"


class TimeSpent:
    """Adds up what the clock took, from the start of this process's run; a resumed run tells of itself alone."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.overlapped = 0.0
        self.num_steps = self.num_skipped = 0
        self.resumed_from = 0

    def before(self, seconds: float, *, step: int) -> None:
        """So many seconds went before the first step. step: optimizer steps done then."""
        self._seconds[BEFORE], self.resumed_from = seconds, step

    def add(self, taken: Mapping[str, float]) -> None:
        """taken: of a clock."""
        for name, seconds in taken.items():
            if name not in _NO_PARTS:
                words = activity.WORDS.get(name.removeprefix(_PREFIX), name.removeprefix(_PREFIX))
                self._seconds[words] = self._seconds.get(words, 0.0) + seconds
        self.overlapped += taken.get(_BESIDE, 0.0)

    def step(self, *, is_skipped: bool) -> None:
        self.num_steps += 1
        self.num_skipped += is_skipped

    def rows(self) -> list[tuple[str, str, str]]:
        """(phase, seconds, share), the longest first, and the sum."""
        whole = sum(self._seconds.values())
        if not whole:
            return []
        largest_first = sorted(self._seconds.items(), key=lambda pair: -pair[1])
        rows = [(name, f"{seconds:,.1f}", f"{seconds / whole:.1%}") for name, seconds in largest_first if seconds >= 0.05]
        return [*rows, ("all", f"{whole:,.1f}", "100%")]

    def in_words(self) -> str:
        """Steps, saves, restarts, and what was done meanwhile."""
        told = [f"{self.num_steps:,} optimizer step{'s' * (self.num_steps != 1)} ({self.num_skipped:,} skipped)"]
        told.append(f"{activity.num_saved:,} checkpoint{'s' * (activity.num_saved != 1)} saved")
        if self.resumed_from:
            told.append(f"resumed after step {self.resumed_from:,}")
        if again := launcher.restart(os.environ):
            told.append(f"restarted ({again})")
        if self.overlapped:
            told.append(f"{self.overlapped:,.1f} s of sampling beside other work, not in the table")
        return "; ".join(told)
