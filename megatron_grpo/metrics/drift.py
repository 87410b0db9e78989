"""Notices when the sampler's log-probs move away from the trainer's: the first sign of a stale weight, before the reward shows it."""

from __future__ import annotations

from collections.abc import Mapping

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
