"""Whether a run has learnt anything: a reward that never differs within a group leaves no gradient, and nothing else of a run shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
