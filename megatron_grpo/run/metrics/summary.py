"""Summaries of a run: drift between sampler and trainer, whether anything was trained, and the time per phase."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.run import jobs

# Upper bounds, in nats on any token, of the differences between two correct engines: float32 summation order, bfloat16 rounding.
USUAL = {"float32": 1e-3, "bfloat16": 1.0}


class LogpDifferenceMonitor:
    """Monitor that warns when a metric of log-prob differences exceeds `bound` (nats), and again whenever the value has doubled."""

    def __init__(self, *, bound: float | None, dtype: str, hint: str = "", metric: str = "sampling/sampling_logp_difference/max"):
        """Create a monitor.

        Args:
            bound: Limit in nats. None: the usual limit of the dtype.
            dtype: "float32" or "bfloat16".
        """
        self.hint, self.metric = hint, metric
        self.bound = USUAL[dtype] if bound is None else bound

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return the warning for a step's metrics; None if the difference is within the bound."""
        largest = metrics.get(self.metric, 0.0)
        if not largest > self.bound:
            return None
        text = (
            f"trainer and sampler differ by {largest:.3g} nats on a token ({self.metric}; bound {self.bound:.3g}): "
            "their weights or their arithmetic differ"
        ) + (f". {self.hint}" if self.hint else "")
        self.bound = 2 * largest
        return text


class GradientSummary:
    """Counts, over the recorded optimizer steps, the nonzero gradients and the steps in which all groups had zero reward std."""

    def __init__(self, *, compares_groups: bool = True):
        """Create a counter.

        Args:
            compares_groups: Whether advantages are differences within a group.
        """
        self._compares_groups = compares_groups
        self.num_steps = self.num_gradients = self.num_refused = self.num_scored = self.num_alike = 0

    def take(self, record: Mapping[str, Any]) -> None:
        """Add an optimizer step."""
        self.num_steps += 1
        self.num_gradients += record.get("grad_norm", 0.0) != 0.0
        self.num_refused = record.get("skipped_iterations", 0)
        self.num_scored += "frac_reward_zero_std" in record
        self.num_alike += record.get("frac_reward_zero_std") == 1.0

    def alike(self) -> str:
        """Return a clause saying that rewards have never differed within a group; empty if they have, or if it does not matter."""
        if not self._compares_groups or not self.num_scored or self.num_alike < self.num_scored:
            return ""
        return f"no group's rewards differed in {self.num_alike} of {self.num_alike} steps"

    def nothing(self, step: int) -> str:
        """Return a sentence saying that nothing was trained; empty if a gradient of the run changed its weights.

        One step alone shows nothing, because its rewards may be equal by chance.
        """
        if step < 2 or self.num_steps != step or self.num_gradients > self.num_refused:
            return ""
        reason = f"every gradient of {step} steps was refused (skipped.jsonl)" if self.num_refused else f"no gradient in {step} steps"
        return f"Nothing was trained: {self.alike() or reason}."


_PREFIX, _BESIDE = "time/", "time/rollout_overlapped"
_NO_PARTS = ("time/step", _BESIDE)
BEFORE = "loading and restoring"


class TimeSummary:
    """Sum of the seconds per phase since this process started. A resumed run counts only its own time."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.overlapped = 0.0
        self.num_steps = self.num_skipped = 0
        self.resumed_from = 0

    def before(self, seconds: float, *, step: int) -> None:
        """Record the time before the first step.

        Args:
            seconds: Seconds of loading and restoring.
        """
        self._seconds[BEFORE], self.resumed_from = seconds, step

    def add(self, times: Mapping[str, float]) -> None:
        """Add elapsed seconds per phase, as returned by `Timers.take()`.

        Args:
            times: Seconds by phase.
        """
        for name, seconds in times.items():
            if name not in _NO_PARTS:
                words = activity.WORDS.get(name.removeprefix(_PREFIX), name.removeprefix(_PREFIX))
                self._seconds[words] = self._seconds.get(words, 0.0) + seconds
        self.overlapped += times.get(_BESIDE, 0.0)

    def step(self, *, is_skipped: bool) -> None:
        """Count an optimizer step.

        Args:
            is_skipped: Whether the gradient check refused the step.
        """
        self.num_steps += 1
        self.num_skipped += is_skipped

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (phase, seconds, share), the longest first, and the sum as the last row."""
        total = sum(self._seconds.values())
        if not total:
            return []
        largest_first = sorted(self._seconds.items(), key=lambda pair: -pair[1])
        rows = [(name, f"{seconds:,.1f}", f"{seconds / total:.1%}") for name, seconds in largest_first if seconds >= 0.05]
        return [*rows, ("all", f"{total:,.1f}", "100%")]

    def describe(self) -> str:
        """Return a sentence with the numbers of steps, checkpoints and restarts, this rank's CPU time, and the overlapped sampling time."""
        texts = [f"{self.num_steps:,} optimizer step{'s' * (self.num_steps != 1)} ({self.num_skipped:,} skipped)"]
        texts.append(f"{activity.num_saved:,} checkpoint{'s' * (activity.num_saved != 1)} saved")
        texts.append(f"{sum(os.times()[:4]):,.0f} s of CPU time on rank 0, from its start")  # with its child processes that have ended
        if self.resumed_from:
            texts.append(f"resumed after step {self.resumed_from:,}")
        if reason := jobs.restart(os.environ):
            texts.append(f"restarted ({reason})")
        if self.overlapped:
            texts.append(f"{self.overlapped:,.1f} s of sampling at the same time as other work, not in the table")
        return "; ".join(texts)
