"""The reward protocol: arguments of a reward function, the values it may return, and the errors for other values.

The signature is TRL's: `f(prompts, completions, **columns) -> list[float | None]`. Functions whose signature names `completion_ids` or
`trainer_state` receive those too. `async def` works. A function only receives the keyword arguments that its signature accepts.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.core.base.errors import describe_value
from megatron_grpo.core.settings import EQUAL_REWARDS
from megatron_grpo.run.python_objects import copy_for_user

Score = float | None  # None: the reward does not apply to this completion
# Largest absolute score. Squares of larger ones overflow in a sum of floats, and as advantages they overflow float32: 0, infinity or NaN.
LARGEST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """A row without a score, and the reason. Built-in rewards return it in place of a score.

    Args:
        kind: Category of the failure. Warnings are counted by it.
        reason: End of a sentence that begins "Reward `name`".
    """

    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBatch:
    """Completions to be scored.

    All lists have one entry per completion, groups one after the other.

    Args:
        prompts: A string, or a list of chat messages, per completion.
        completions: A string each for string prompts, a list of one assistant message each for chats.
        completion_ids: Token IDs of each completion. A list may be made when it is read.
        columns: Further columns of the data set, by name.
        labels: Name of each row in error messages.
        trainer_state: State of the trainer, for functions that take it.
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
        """Return rows `first` to `end` (exclusive) as a batch.

        Args:
            first: Index of the first row.
            end: Index behind the last row.
        """
        return RewardBatch(
            prompts=self.prompts[first:end],
            completions=self.completions[first:end],
            completion_ids=self.completion_ids[first:end],
            columns={name: values[first:end] for name, values in self.columns.items()},
            labels=self.labels[first:end],
            trainer_state=self.trainer_state,
        )


@dataclass(kw_only=True)
class RewardStats:
    """Running statistics of one reward function, to detect that its score is constant over the run.

    No single batch can show that.

    Args:
        scored: Rows whose score was not None.
    """

    batches: int = 0
    rows: int = 0
    scored: int = 0
    lowest: float = math.inf
    highest: float = -math.inf

    def take(self, scores: Sequence[Score]) -> str | None:
        """Count one batch and report a function that has not distinguished any completions.

        Args:
            scores: Scores of the batch, of all ranks.

        Returns:
            End of a sentence that begins with the function's name, if at least `ENOUGH_BATCHES` batches and `ENOUGH_ROWS` rows all have
            the same score or none; otherwise None.
        """
        known = [score for score in scores if score is not None]
        self.batches, self.rows, self.scored = self.batches + 1, self.rows + len(scores), self.scored + len(known)
        self.lowest, self.highest = min([self.lowest, *known]), max([self.highest, *known])
        if self.batches < ENOUGH_BATCHES or self.rows < ENOUGH_ROWS:
            return None
        if not self.scored:
            sentence = f"has returned None for all {self.rows} completions so far"
            return f"{sentence}, so it has no effect. Does it find the columns that it needs?"
        if self.scored >= ENOUGH_ROWS and math.isclose(self.lowest, self.highest, rel_tol=EQUAL_REWARDS):
            return f"has returned {self.lowest:g} for all {self.scored} completions that it scored so far, so it has no effect."
        return None


ENOUGH_BATCHES, ENOUGH_ROWS = 2, 8  # least batches and rows before a constant function is reported


# Arguments that every function may take besides the data columns.
GIVEN = frozenset({"prompts", "completions", "completion_ids", "trainer_state"})


class ReadsOpening:
    """A built-in reward that reads what the prompt has begun of the answer.

    Attributes:
        opening: A chat as the model's chat template renders it before an answer; "" if unknown. `load_rewards` sets it.
    """

    opening = ""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward function with its name in the metrics, its timeout and its policy for failures.

    Args:
        name: Name in metrics and messages.
        function: The callable, synchronous or `async def`.
        timeout: Seconds for one batch.
        on_error: "raise" stops the run when a row fails; "none" gives failed rows the score None.
        keeps_deadline: True for built-in rewards, which meet the deadline themselves and report failures row by row. They are not called
            again to find the row that failed.
        warned: Kinds of failure that a warning has reported.
        watch: Running statistics of its scores.
    """

    name: str
    function: Callable[..., Any]
    timeout: float
    on_error: str = "raise"
    keeps_deadline: bool = False
    warned: set[str] = field(default_factory=set)
    watch: RewardStats = field(default_factory=RewardStats)

    @property
    def is_async(self) -> bool:
        """Whether the function, or its `__call__`, is a coroutine function."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(getattr(self.function, "__call__", None))  # noqa: B004

    def arguments(self, batch: RewardBatch) -> dict[str, Any]:
        """Return the keyword arguments for one call: those in the signature, or all if it takes `**kwargs`.

        `completion_ids` is a list of lists if the signature names it: as Python integers, token IDs take ten times the memory. Among
        `**kwargs` it is a sequence that makes the list of a completion when it is read. The user's functions get copies, one per
        completion and call: the rows of a data set serve all completions of a group, all functions and all epochs.
        """
        available = {**batch.columns, "prompts": list(batch.prompts), "completions": list(batch.completions)}
        accepted = accepted_names(self.function)
        arguments = {name: values for name, values in available.items() if accepted is None or name in accepted}
        if not self.keeps_deadline:  # the built-in ones change nothing
            arguments = copy_for_user(arguments)
        if "completion_ids" in inspect.signature(self.function).parameters:
            arguments["completion_ids"] = [list(token_ids) for token_ids in batch.completion_ids]
        elif accepted is None:
            arguments["completion_ids"] = copy_for_user(batch.completion_ids)
        if accepted is None or "trainer_state" in accepted:
            arguments["trainer_state"] = batch.trainer_state
        return arguments

    def needs(self) -> list[Sequence[str]]:
        """Return the data columns that the function requires, each as a list of alternatives such as `answer` or `solution`."""
        columns: Sequence[Sequence[str]] = getattr(self.function, "needs", ()) or [(name,) for name in required_names(self.function)]
        return [names for names in columns if not GIVEN.intersection(names)]

    def close(self) -> None:
        """Stop what the function keeps running, if it has a `close` method."""
        close = getattr(self.function, "close", None)
        if callable(close):
            close()


def accepted_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keyword arguments that a function accepts, or None if it accepts all."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL)


def required_names(function: Callable[..., Any]) -> list[str]:
    """Return the keyword arguments without a default."""
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in named_kinds and parameter.default is inspect.Parameter.empty]


def positional_names(function: Callable[..., Any]) -> list[str]:
    """Return the positional-only arguments, which cannot be passed by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]


def read_text(completion: Any) -> str:
    """Return the text of a completion in either of TRL's formats.

    Args:
        completion: A string, or a list of chat messages with `role` and `content`.

    Returns:
        The string, or the contents of the assistant messages joined by newlines.
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(message["content"] for message in completion if message.get("role", "assistant") == "assistant")


def text_of_prompt(prompt: Any) -> str:
    """Return a prompt as a model reads it that has no chat template: a string unchanged, messages with their roles."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def as_scores(returned: Any, count: int) -> list[Score | RowFailure] | RowFailure:
    """Convert the return value of a reward function to one score or failure per row.

    Numbers of any library and booleans are scores (True is 1, as in TRL). NaN, infinities, numbers beyond `LARGEST`, strings and other
    values are failures of their row.

    Args:
        returned: The return value: a sequence, a NumPy array or a tensor.
        count: Number of completions in the batch.

    Returns:
        A list of `count` entries, or one RowFailure for the whole batch if `returned` is not a sequence of `count` values.
    """
    if hasattr(returned, "tolist"):  # a numpy array or a tensor
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Sequence):
        return RowFailure(kind="type", reason=f"returned {describe_value(returned)}, expected a list of {count} numbers,")
    if len(returned) != count:
        count_text = f"{len(returned)} value{'s' if len(returned) != 1 else ''}"
        return RowFailure(kind="count", reason=f"returned {count_text} for {count} completion{'s' if count != 1 else ''}")
    return [as_score(value) for value in returned]


def as_score(value: Any) -> Score | RowFailure:
    """Convert one returned value to a float, None, or a RowFailure."""
    if value is None or isinstance(value, RowFailure):
        return value
    if hasattr(value, "item") and not isinstance(value, numbers.Real):  # a tensor, or an array of one element
        size = getattr(value, "numel", None)
        value = value.item() if (size() if callable(size) else value.size) == 1 else value
    if not isinstance(value, numbers.Real) and not type(value).__name__ == "bool":  # numpy's bool is registered as no number
        return RowFailure(kind="type", reason=f"returned {describe_value(value)}, expected a number or None,")
    try:
        score = float(value)
    except OverflowError:  # Python's integers have no end
        score = math.inf if value > 0 else -math.inf
    if not math.isfinite(score):
        return RowFailure(kind="not finite", reason=f"returned {score}")
    if abs(score) > LARGEST:
        return RowFailure(kind="too large", reason=f"returned {score:g}, which exceeds {LARGEST:g} and cannot be averaged,")
    return score
