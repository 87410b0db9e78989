"""Says, before the optimizer acts, whether a gradient may be used; and keeps count of those that may not."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_grpo.types import RowKey

WINDOW = 128  # norms whose median a gradient is held against
FEWEST = 16  # with fewer of them there is no median yet
SHOWN = 8  # rows and ranks that are named one by one

# Row -> {"rollout", "row", "prompt_number", "dataset_row"}
Places = Mapping[RowKey, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What is known of a gradient that has been summed over all ranks and not been clipped. The same on every rank."""

    step: int  # optimizer steps done before it
    norm: float  # over all parameters; infinite if any number of it, or the loss, is not finite on any rank


class GradientCheck(Protocol):
    """One whose answers depend on earlier gradients has `state()` (JSON, the same on every rank) and `restore(state)` besides: a checkpoint
    holds what it remembers."""

    def allows(self, gradient: Gradient) -> bool:
        """Whether the optimizer may act on it; else the step is skipped. May raise instead: the run ends, its weights unharmed.

        Asked once in every step that has something to train, on every rank; all ranks must answer alike.
        """


class GradNormSpikeCheck:
    """Refuses a gradient that is not finite; and one that is far too large, where a bound is given.

    above: the largest norm. factor: the largest multiple of the median of the last WINDOW norms, once there are FEWEST. Refused norms count
    among them, so that the median follows if all have grown. Norms of 0 do not: groups that teach nothing say nothing of those that do.
    """

    def __init__(self, *, above: float | None = None, factor: float | None = None):
        self.above, self.factor = above, factor
        self.refusal: str | None = None  # why the last gradient was not allowed
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def allows(self, gradient: Gradient) -> bool:
        self.refusal = self._refusal(gradient.norm)
        if math.isfinite(gradient.norm) and gradient.norm > 0:
            self._norms.append(gradient.norm)
        return self.refusal is None

    def _refusal(self, norm: float) -> str | None:
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
        return {"norms": list(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._norms = deque(state["norms"], maxlen=WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipCounter:
    """Optimizer steps of the run that its guard refused."""

    total: int = 0
    in_a_row: int = 0  # up to now

    def after(self, *, refused: bool) -> SkipCounter:
        return SkipCounter(total=self.total + refused, in_a_row=self.in_a_row + 1 if refused else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMicroBatch:
    """A micro-batch that makes such a gradient when it is run alone.

    rows: those with a number that is not finite, `what` says which; or all of the micro-batch, where all numbers of its rows are finite and
    `what` is empty: it went wrong inside the model.
    """

    micro_batch: int  # its place among those of its data-parallel share
    ranks: tuple[int, ...]  # whose own part of its gradient it is, before anything is summed over ranks
    norm: float  # the largest of those parts
    rows: tuple[RowKey, ...]
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """Why a step was skipped, and who made its gradient.

    ranks: whose own gradient was not finite, before anything was summed. weights: (rank, parameter) that are not finite themselves; then no
    culprit is looked for. culprits: by micro-batch. more: micro-batches that were heard of besides.
    """

    why: str
    skips: SkipCounter
    ranks: tuple[int, ...] = ()
    weights: tuple[tuple[int, str], ...] = ()
    culprits: tuple[BadMicroBatch, ...] = ()
    more: int = 0

    @property
    def rows(self) -> tuple[RowKey, ...]:
        """That it names."""
        return tuple(row for culprit in self.culprits for row in culprit.rows)

    def lines(self, places: Places) -> list[str]:
        """In words."""
        if self.weights:
            named = "; ".join(f"rank {rank}: {name}" for rank, name in self.weights[:SHOWN])
            return [f"the weights themselves are not finite ({named}), so no step can go well any more"]
        found = [_in_words(culprit, places) for culprit in self.culprits]
        if self.more:
            found.append(f"and {self.more} more micro-batches at least")
        if self.ranks and not found:
            found.append(
                f"it went wrong on {_several('rank', self.ranks)}, and not again when each micro-batch was run alone: "
                "if that goes on, look at the machine"
            )
        return found

    def record(self, places: Places) -> dict[str, Any]:
        """As JSON."""
        culprits = [
            {"micro_batch": one.micro_batch, "ranks": list(one.ranks), "what": one.what, "rows": [dict(places[row]) for row in one.rows]}
            for one in self.culprits
        ]
        skips = {"in_a_row": self.skips.in_a_row, "skipped_iterations": self.skips.total}
        return {"why": self.why, **skips, "ranks": list(self.ranks), "weights": [list(one) for one in self.weights], "culprits": culprits,
                "more": self.more}  # fmt: skip


def _in_words(culprit: BadMicroBatch, places: Places) -> str:
    named = "row {row} of rollout {rollout} (prompt {prompt_number}, row {dataset_row} of the data set)"
    rows = ", ".join(named.format(**places[row]) for row in culprit.rows[:SHOWN]) + (", ..." if len(culprit.rows) > SHOWN else "")
    norm = f", norm {culprit.norm:.4g} alone" if math.isfinite(culprit.norm) else ""
    what = f": {culprit.what} not finite" if culprit.what else ""
    return f"{_several('rank', culprit.ranks)}, micro-batch {culprit.micro_batch}{norm}: {rows}{what}"


def _several(noun: str, numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}"
