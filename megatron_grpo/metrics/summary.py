"""What the numbers of a run come to: whether sampler and trainer part, whether anything was learnt, where the time went."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_grpo.base import activity, launcher

# What two correct engines differ by stays well below, for any token: summation order in float32, roundings in bfloat16.
USUAL = {"float32": 1e-3, "bfloat16": 1.0}


class DriftWatch:
    """Says something once `sampling/logp_difference/max` exceeds `bound` (nats), and again whenever it has doubled since."""

    def __init__(self, *, bound: float | None, dtype: str, hint: str = ""):
        """hint: a sentence that says what to do about it."""
        self.hint = hint
        self.bound = USUAL[dtype] if bound is None else bound

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        largest = metrics.get("sampling/logp_difference/max", 0.0)
        if not largest > self.bound:
            return None
        text = (
            f"trainer and sampler differ by {largest:.3g} nats on a token (sampling/logp_difference/max; bound {self.bound:.3g}): "
            "their weights or their arithmetic are not the same"
        ) + (f". {self.hint}" if self.hint else "")
        self.bound = 2 * largest
        return text


class Learnt:
    """Counts, over the optimizer steps on record, gradients that moved weights, and steps whose rewards told no completions apart."""

    def __init__(self, *, compares_groups: bool = True):
        """compares_groups: advantages are differences within a group."""
        self._compares_groups = compares_groups
        self.num_steps = self.num_gradients = self.num_refused = self.num_judged = self.num_alike = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """record: of a step, as in metrics.jsonl."""
        self.num_steps += 1
        self.num_gradients += record.get("grad_norm", 0.0) != 0.0
        self.num_refused = record.get("skipped_iterations", 0)
        self.num_judged += "frac_reward_zero_std" in record
        self.num_alike += record.get("frac_reward_zero_std") == 1.0

    def alike(self) -> str:
        """That rewards have never differed, as a clause; empty where they have, or where it does not matter."""
        if not self._compares_groups or not self.num_judged or self.num_alike < self.num_judged:
            return ""
        return f"no group's rewards differed in {self.num_alike} of {self.num_alike} steps"

    def nothing(self, step: int) -> str:
        """That nothing was trained, in words; empty where a gradient of the run moved its weights.

        step: those that it has taken. One step alone shows nothing: rewards may be alike by chance.
        """
        if step < 2 or self.num_steps != step or self.num_gradients > self.num_refused:
            return ""
        refused = f"every gradient of {step} steps was refused (skipped.jsonl)" if self.num_refused else f"no gradient in {step} steps"
        return f"Nothing was trained: {self.alike() or refused}."


_PREFIX, _BESIDE = "time/", "time/rollout_overlapped"
_NO_PARTS = ("time/step", _BESIDE)
BEFORE = "loading and restoring"


class TimeSummary:
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
