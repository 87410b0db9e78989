"""Owns what a reward function is given and may return, and what is said when it returns something else.

The signature is TRL's: `f(prompts, completions, **columns) -> list[float | None]`, plus `completion_ids` and `trainer_state` for those that
name them; `async def` works. A function only gets the keyword arguments that its signature accepts.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.base.errors import shown

Score = float | None  # None: this reward does not apply to this completion
# A larger one has no square in a sum of floats, and as an advantage no place in a float32: advantages would be 0, infinite or NaN.
LARGEST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """A row that got no score, and why. Built-in rewards return it in place of a score; `kind` is what warnings are counted by."""

    kind: str
    reason: str  # ends the sentence "reward `name` ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """Completions to be scored. All lists have one entry per completion, groups one after the other.

    completions: a string each for string prompts, one assistant message each for chats. labels: how an error names each row.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    labels: Sequence[str]
    trainer_state: Any = None

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, first: int, end: int) -> RewardBatch:
        """Rows first to end (exclusive)."""
        return RewardBatch(
            prompts=self.prompts[first:end],
            completions=self.completions[first:end],
            completion_ids=self.completion_ids[first:end],
            columns={name: values[first:end] for name, values in self.columns.items()},
            labels=self.labels[first:end],
            trainer_state=self.trainer_state,
        )


@dataclass(kw_only=True)
class Watch:
    """What one function has given in this run so far, for the one thing that no single batch shows: that it is always the same."""

    batches: int = 0
    rows: int = 0
    scored: int = 0  # rows that were not None
    lowest: float = math.inf
    highest: float = -math.inf

    def take(self, scores: Sequence[Score]) -> str | None:
        """Counts one batch, of all ranks; the end of a sentence that begins with the function where it has not told a row from another."""
        given = [score for score in scores if score is not None]
        self.batches, self.rows, self.scored = self.batches + 1, self.rows + len(scores), self.scored + len(given)
        self.lowest, self.highest = min([self.lowest, *given]), max([self.highest, *given])
        if self.batches < ENOUGH_BATCHES or self.rows < ENOUGH_ROWS:
            return None
        if not self.scored:
            said = f"has given None for all {self.rows} completions so far"
            return f"{said}: it takes no part in the run. Does it find the columns it looks for?"
        if self.scored >= ENOUGH_ROWS and self.lowest == self.highest:
            return (
                f"has given {self.lowest:g} for all {self.scored} completions that it judged so far: it teaches nothing while that is so."
            )
        return None


ENOUGH_BATCHES, ENOUGH_ROWS = 2, 8  # before anything is said of a function that is always the same


GIVEN = frozenset({"prompts", "completions", "completion_ids", "trainer_state"})  # what every function may have, besides columns


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function that judges, with the name it has in the metrics and how its failures are treated.

    timeout: seconds for one batch. keeps_deadline: a built-in that ends in time by itself and reports failures row by row, so that it is
    never called again to find the row that failed.
    """

    name: str
    function: Callable[..., Any]
    timeout: float
    on_error: str = "raise"
    keeps_deadline: bool = False
    warned: set[str] = field(default_factory=set)  # kinds of failure already warned about
    watch: Watch = field(default_factory=Watch)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(getattr(self.function, "__call__", None))  # noqa: B004

    def arguments(self, batch: RewardBatch) -> dict[str, Any]:
        """The keyword arguments for one call: those of the signature, or all where it takes `**kwargs`."""
        offered = {
            **batch.columns,
            "prompts": list(batch.prompts),
            "completions": list(batch.completions),
            "completion_ids": [list(token_ids) for token_ids in batch.completion_ids],
            "trainer_state": batch.trainer_state,
        }
        accepted = accepted_names(self.function)
        return offered if accepted is None else {name: value for name, value in offered.items() if name in accepted}

    def needs(self) -> list[Sequence[str]]:
        """Columns of the data that it cannot do without, each with its alternatives: `answer` or `solution`."""
        told: Sequence[Sequence[str]] = getattr(self.function, "needs", ()) or [(name,) for name in required_names(self.function)]
        return [names for names in told if not GIVEN.intersection(names)]

    def close(self) -> None:
        """Ends what the function keeps running, if it does."""
        close = getattr(self.function, "close", None)
        if callable(close):
            close()


def accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Keyword arguments that a function accepts, or None for all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL)


def required_names(function: Callable[..., Any]) -> list[str]:
    """Keyword arguments without a default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in named and parameter.default is inspect.Parameter.empty]


def positional_names(function: Callable[..., Any]) -> list[str]:
    """Arguments that cannot be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]


def text_of(completion: Any) -> str:
    """The text of a completion in either of TRL's shapes; of a chat, what its assistant turns say."""
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion if message.get("role", "assistant") == "assistant")


def as_scores(returned: Any, count: int) -> list[Score | RowFailure] | RowFailure:
    """What a reward function returned, row by row; one RowFailure for all where it is no list of `count` values.

    Numbers of any library and booleans are scores (True is 1, as in TRL). NaN, infinities, numbers beyond LARGEST, strings and the rest are
    failures of their row.
    """
    if hasattr(returned, "tolist"):  # a numpy array or a tensor
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
        return RowFailure(kind="type", reason=f"returned {shown(returned)} where a list of {count} numbers should be")
    if len(returned) != count:
        given = f"{len(returned)} value{'s' if len(returned) != 1 else ''}"
        return RowFailure(kind="count", reason=f"returned {given} for {count} completion{'s' if count != 1 else ''}")
    return [as_score(value) for value in returned]


def as_score(value: Any) -> Score | RowFailure:
    """One returned value as a float, None, or the failure that it is."""
    if value is None or isinstance(value, RowFailure):
        return value
    if hasattr(value, "item") and not isinstance(value, numbers.Real):  # a tensor, or an array of one element
        size = getattr(value, "numel", None)
        value = value.item() if (size() if callable(size) else value.size) == 1 else value
    if not isinstance(value, numbers.Real) and not type(value).__name__ == "bool":  # numpy's bool is registered as no number
        return RowFailure(kind="type", reason=f"returned {shown(value)} where a number or None should be")
    try:
        score = float(value)
    except OverflowError:  # Python's integers have no end
        score = math.inf if value > 0 else -math.inf
    if not math.isfinite(score):
        return RowFailure(kind="not finite", reason=f"returned {score}")
    if abs(score) > LARGEST:
        return RowFailure(kind="too large", reason=f"returned {score:g}, which is beyond {LARGEST:g} and cannot be averaged,")
    return score
