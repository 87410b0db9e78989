"""Whether a run has learnt anything: a reward that never differs within a group leaves no gradient, and nothing else of a run shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Learnt:
    """Counts, over the optimizer steps on record, gradients that moved weights and rollouts in which rewards told completions apart."""

    def __init__(self, *, compares_groups: bool = True):
        """compares_groups: advantages are differences within a group."""
        self._compares_groups = compares_groups
        self.num_steps = self.num_gradients = self.num_refused = self.num_told = self.num_alike = 0
        self._gave: set[str] = set()  # metrics of rewards that were there

    def take(self, record: Mapping[str, Any]) -> None:
        """record: of a step, as in metrics.jsonl."""
        self.num_steps += 1
        self.num_gradients += record.get("grad_norm", 0.0) != 0.0
        self.num_refused = record.get("skipped_iterations", 0)
        if "frac_reward_zero_std" in record:
            self.num_told += 1
            self.num_alike += record["frac_reward_zero_std"] == 1.0
        self._gave |= {name for name in record if name.startswith("reward")}

    def alike(self) -> str | None:
        """That rewards have never differed, as a clause; None where they have, or where it does not matter."""
        if not self._compares_groups or not self.num_told or self.num_alike < self.num_told:
            return None
        gave = "" if "reward" in self._gave else " (they were None throughout)"
        return f"no group's rewards differed in {self.num_told} of {self.num_told} steps{gave}"

    def nothing(self, step: int) -> str | None:
        """That nothing was trained, in words, where no gradient of a run moved a weight. step: optimizer steps that it has taken."""
        if not step or self.num_steps != step or self.num_gradients > self.num_refused:
            return None
        many = f"all {step} steps" if step > 1 else "its one step"
        why = f"the gradients of {many} were refused (see skipped.jsonl)" if self.num_refused else f"{many} had no gradient"
        return f"Nothing was trained: {self.alike() or why}."

    def warnings(self, rewards: Sequence[str]) -> list[str]:
        """At the end of a run. rewards: names of its functions."""
        alike = self.alike()
        found = [f"{alike}: what was trained came from other terms of the loss."] if alike else []
        if self.num_told and not alike:
            silent = [name for name in rewards if f"rewards/{name}/mean" not in self._gave]
            found += [f"reward `{name}` gave None for all completions of {self.num_told} steps: it took no part." for name in silent]
        return found
