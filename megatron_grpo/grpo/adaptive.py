"""A coefficient of the entropy bonus that follows the entropy (`--use_adaptive_entropy`): Skywork-OR1, arXiv 2505.22312, as in TRL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.config import GrpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropy:
    """The coefficient after some optimizer steps. It rises by `delta` after a step whose entropy was at the target or below, else it
    falls; and it is applied only after such a step. entropy: of the last step, in nats; infinite before the first."""

    coef: float
    lowest: float
    highest: float
    delta: float
    target: float
    entropy: float = math.inf

    @classmethod
    def of(cls, cfg: GrpoConfig) -> AdaptiveEntropy | None:
        """None where the coefficient is constant."""
        if not cfg.use_adaptive_entropy:
            return None
        return cls(coef=cfg.entropy_coef, lowest=cfg.entropy_coef_min, highest=cfg.entropy_coef_max, delta=cfg.entropy_coef_delta,
                   target=cfg.entropy_target)  # fmt: skip

    @property
    def applied(self) -> float:
        """What the next step's bonus is multiplied by: the same in all of its micro-batches."""
        return self.coef if self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> AdaptiveEntropy:
        """entropy: mean over all tokens that an optimizer step trained, in nats."""
        is_low = entropy <= self.target
        coef = min(self.coef + self.delta, self.highest) if is_low else max(self.coef - self.delta, self.lowest)
        return replace(self, coef=coef, entropy=entropy)

    def state(self) -> dict[str, Any]:
        """As JSON: what a checkpoint holds of it. The rest is settings."""
        return {"coef": self.coef, "entropy": self.entropy if math.isfinite(self.entropy) else None}

    def restored(self, state: Mapping[str, Any]) -> AdaptiveEntropy:
        return replace(self, coef=state["coef"], entropy=math.inf if state["entropy"] is None else state["entropy"])
