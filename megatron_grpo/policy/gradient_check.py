"""Gradient checks: decide before the optimizer acts whether a gradient may be used, and count the refused ones."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_grpo.types import RowKey

WINDOW = 128  # gradient norms in the running median
FEWEST = 16  # norms that the median needs
SHOWN = 8  # rows and ranks that a message lists

# Row -> {"rollout", "row", "prompt_number", "dataset_row"}
Places = Mapping[RowKey, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A gradient summed over all ranks, before clipping. The same on every rank."""

    step: int  # optimizer steps done before it
    norm: float  # over all parameters; infinite if any element of it, or the loss, is not finite on any rank


class GradientCheck(Protocol):
    """Check that decides whether the optimizer may use a gradient.

    A check whose answers depend on earlier gradients also has `state()` (JSON, the same on every rank) and `restore(state)`, and a
    checkpoint holds that state.
    """

    def allows(self, gradient: Gradient) -> bool:
        """Return whether the optimizer may use the gradient; if not, the step is skipped.

        Called once in every step that has something to train, on every rank; all ranks must return the same. It may raise instead: this
        stops the run before the optimizer updates any weight.
        """


class GradNormSpikeCheck:
    """Gradient check that refuses a gradient that is not finite or whose norm is above a bound.

    The median is that of the last `WINDOW` norms and needs `FEWEST` of them. Refused norms are among them, so that the median follows if
    all norms have grown. Norms of 0 are not: a step whose groups all have zero std says nothing about the other steps.

    Args:
        above: Largest norm that is accepted; None for no bound.
        factor: Largest accepted multiple of the running median; None for no bound.
    """

    def __init__(self, *, above: float | None = None, factor: float | None = None):
        self.above, self.factor = above, factor
        self.reason: str | None = None  # why the last gradient was refused
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def allows(self, gradient: Gradient) -> bool:
        self.reason = self._reason_of(gradient.norm)
        if math.isfinite(gradient.norm) and gradient.norm > 0:
            self._norms.append(gradient.norm)
        return self.reason is None

    def _reason_of(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return "its gradient is not finite"
        if self.above is not None and norm > self.above:
            return f"its gradient norm {norm:.4g} is above {self.above:g} (skip_grad_norm_above)"
        if self.factor is not None and len(self._norms) >= FEWEST:
            median = statistics.median(self._norms)
            if norm > self.factor * median:
                return f"its gradient norm {norm:.4g} is above {self.factor:g} (skip_grad_norm_factor) x {median:.4g}, the running median"
        return None

    def state(self) -> dict[str, Any]:
        """Return the norms of the running median, as JSON."""
        return {"norms": list(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the running median from `state()`."""
        self._norms = deque(state["norms"], maxlen=WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipCounter:
    """Counts of the optimizer steps that the gradient check refused in this run."""

    total: int = 0
    in_a_row: int = 0  # the last step included

    def after(self, *, refused: bool) -> SkipCounter:
        """Return the counts after one more step.

        Args:
            refused: Whether the gradient of that step was refused.
        """
        return SkipCounter(total=self.total + refused, in_a_row=self.in_a_row + 1 if refused else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMicroBatch:
    """A micro-batch that produces a refused gradient when it is run alone.

    Attributes:
        micro_batch: Its index among the micro-batches of its data-parallel rank.
        ranks: Ranks whose own part of its gradient is wrong, before any sum over ranks.
        norm: The largest norm of those parts.
        rows: The rows with a value that is not finite. If all values of its rows are finite, all rows of the micro-batch: then the error
            arose inside the model.
        what: Which value of the rows is not finite; empty if all are finite.
    """

    micro_batch: int
    ranks: tuple[int, ...]
    norm: float
    rows: tuple[RowKey, ...]
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """Reason why a step was skipped, and what produced its gradient.

    Attributes:
        why: The reason, as a phrase.
        skips: Counts of skipped steps, this one included.
        ranks: Ranks whose own gradient was not finite, before any sum over ranks.
        weights: (rank, parameter) of parameters that are not finite themselves. If there are any, no search for micro-batches takes place.
        culprits: The micro-batches that produce such a gradient alone.
        more: Number of further micro-batches that ranks reported.
    """

    why: str
    skips: SkipCounter
    ranks: tuple[int, ...] = ()
    weights: tuple[tuple[int, str], ...] = ()
    culprits: tuple[BadMicroBatch, ...] = ()
    more: int = 0

    @property
    def rows(self) -> tuple[RowKey, ...]:
        """All rows of `culprits`."""
        return tuple(row for culprit in self.culprits for row in culprit.rows)

    def lines(self, places: Places) -> list[str]:
        """Return the description as lines of text.

        Args:
            places: Rollout, row, prompt number and data set row of each row.
        """
        if self.weights:
            named = "; ".join(f"rank {rank}: {name}" for rank, name in self.weights[:SHOWN])
            return [f"the weights are not finite ({named}), so no further step can succeed"]
        found = [_describe(culprit, places) for culprit in self.culprits]
        if self.more:
            found.append(f"and at least {self.more} more micro-batches")
        if self.ranks and not found:
            found.append(
                f"the gradient was not finite on {_several('rank', self.ranks)}, but finite when each micro-batch was run separately; "
                "if this repeats, check the hardware"
            )
        return found

    def record(self, places: Places) -> dict[str, Any]:
        """Return the description as JSON.

        Args:
            places: Rollout, row, prompt number and data set row of each row.
        """
        culprits = [
            {"micro_batch": one.micro_batch, "ranks": list(one.ranks), "what": one.what, "rows": [dict(places[row]) for row in one.rows]}
            for one in self.culprits
        ]
        skips = {"in_a_row": self.skips.in_a_row, "skipped_iterations": self.skips.total}
        return {"why": self.why, **skips, "ranks": list(self.ranks), "weights": [list(one) for one in self.weights], "culprits": culprits,
                "more": self.more}  # fmt: skip


def _describe(culprit: BadMicroBatch, places: Places) -> str:
    named = "row {row} of rollout {rollout} (prompt {prompt_number}, row {dataset_row} of the data set)"
    rows = ", ".join(named.format(**places[row]) for row in culprit.rows[:SHOWN]) + (", ..." if len(culprit.rows) > SHOWN else "")
    norm = f", norm {culprit.norm:.4g} alone" if math.isfinite(culprit.norm) else ""
    what = f": {culprit.what} not finite" if culprit.what else ""
    return f"{_several('rank', culprit.ranks)}, micro-batch {culprit.micro_batch}{norm}: {rows}{what}"


def _several(noun: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"
