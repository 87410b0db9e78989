"""Says, before the optimizer acts, whether a gradient may be used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What is known of a gradient that has been summed over all ranks and not been clipped. The same on every rank."""

    step: int  # optimizer steps done before it
    norm: float  # over all parameters


class Guard(Protocol):
    def allows(self, gradient: Gradient) -> bool:
        """Whether the optimizer may act on it; else the step is skipped. May raise instead: the run ends, its weights unharmed."""


class FiniteGuard:
    """Ends the run at a gradient that is not finite."""

    def allows(self, gradient: Gradient) -> bool:
        if not math.isfinite(gradient.norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {gradient.step + 1} is {gradient.norm}. The optimizer has not used it: "
                f"the weights are those after step {gradient.step}. "
                "Resume from the last checkpoint, with a smaller lr or clip_grad if it happens again."
            )
        return True
