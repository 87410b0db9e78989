"""Interface between an environment and the trainer: `Environment`, `Turn`, `StepOutput`, and the checks of what an environment returns."""

from __future__ import annotations

import json
import math
import numbers
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.core.base.errors import describe_value, one_line

_RESERVED = ("prompts", "completions", "trainer_state")  # other arguments of reward functions

Message = Mapping[str, Any]  # {"role", "content"}, and further keys that the chat template reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn, as an environment receives it.

    Args:
        number: Index of the turn in the episode, from 0.
        text: Text without the end-of-turn token; other special tokens appear as text.
        messages: The conversation so far; its last message is this turn.
        is_last: Whether this is the last turn: max_turns allows no further turn.
    """

    number: int
    text: str
    messages: Sequence[Message]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Answer of an environment to one turn.

    An output without messages ends the episode, as `done` does.

    Args:
        messages: Messages that the model reads next.
        reward: Reward of this turn; None: no reward.
        done: Whether the episode ends.
        metrics: Metrics, summed over the episode and logged as environment/<name>.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment:
    """Base class of environments; one object plays one episode.

    A new object is constructed for each episode. Its methods may be `async`. They run concurrently with sampling, in a thread or on an
    event loop: at most one call per episode at a time, each limited to `environment_timeout` seconds.

    Args:
        columns: The columns of the data-set row, including the one with the reference answer.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas that the chat template shows to the model. A class attribute, so all rows have the same tools."""
    role = ""
    """Role of the messages that it returns ("user", "tool"), for the check of the chat template before a run. Default: "tool" if the class
    has tools, else "user"."""

    def __init__(self, columns: Mapping[str, Any]):
        self.columns = columns

    def start(self, prompt: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that the first turn answers.

        The result must depend on the row alone: GRPO compares completions of one prompt, so all episodes of a group begin with the same
        tokens. The default returns `prompt`.

        Args:
            prompt: The messages of the row.
        """
        return prompt

    def step(self, turn: Turn) -> StepOutput | tuple[Sequence[Message], float | None, bool]:
        """Answer one turn of the model.

        Args:
            turn: The turn to answer.

        Returns:
            A `StepOutput`, or the tuple (messages, reward, done).
        """
        raise NotImplementedError  # every environment implements it

    def close(self) -> None:
        """Release resources at the end of the episode.

        Called once, whatever ended the episode, except after a timeout: a thread may then still execute one of the methods.
        """


class InvalidReplyError(ValueError):
    """Error raised if the environment returned an invalid value. The message completes a sentence about the environment."""


def as_step_output(value: Any) -> StepOutput:
    """Validate the return value of `Environment.step`.

    Args:
        value: A `StepOutput` or the tuple (messages, reward, done).

    Returns:
        A `StepOutput` with copied messages and with numbers converted to Python floats.

    Raises:
        InvalidReplyError: The value has another form, or a number is not finite.
    """
    if isinstance(value, tuple) and len(value) == 3:
        value = StepOutput(messages=() if value[0] is None else value[0], reward=value[1], done=value[2])
    if not isinstance(value, StepOutput):
        raise InvalidReplyError(f"step returned {describe_value(value)}; expected StepOutput or (messages, reward, done)")
    if not (type(value.done) is bool or type(value.done).__name__ == "bool"):  # numpy's too
        raise InvalidReplyError(f"step returned done = {describe_value(value.done)}; expected True or False")
    if not isinstance(value.metrics, Mapping):
        raise InvalidReplyError(f"step returned metrics = {describe_value(value.metrics)}; expected a dict of numbers")
    return StepOutput(
        messages=as_messages(value.messages, source="step"),
        reward=None if value.reward is None else _number(value.reward, "the reward"),
        done=bool(value.done),
        metrics={str(name): _number(amount, f"the metric {name}") for name, amount in value.metrics.items()},
    )


def as_finite_number(value: Any) -> float | None:
    """Return a finite real number as a float; None for anything else."""
    try:
        return float(value) if isinstance(value, numbers.Real) and math.isfinite(float(value)) else None
    except OverflowError:  # a Python int may exceed the range of float
        return None


def _number(value: Any, noun: str) -> float:
    if (number := as_finite_number(value)) is None:
        raise InvalidReplyError(f"step returned {describe_value(value)} as {noun}; expected a finite number")
    return number


def find_invalid_columns(columns: Mapping[Any, Any]) -> str | None:
    """Return the fault of further columns for reward functions; None if they can be used. The text completes "returned ...".

    Args:
        columns: Name -> value. Values are sent to the rank that computes rewards.
    """
    if non_strings := [name for name in columns if not isinstance(name, str)]:
        return f"a dict with the key {non_strings[0]!r}; expected strings"
    if reserved := [name for name in _RESERVED if name in columns]:
        return f"{', '.join(reserved)}, a reserved argument name of reward functions"
    for name, value in columns.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: BLE001 - pickling runs code of the value
            return f"{name}, which cannot be sent to the rank that computes rewards: {one_line(error)}"
    return None


def as_messages(value: Any, *, source: str) -> tuple[Message, ...]:
    """Validate and copy messages with text content.

    Raises:
        InvalidReplyError: The value is not a list of messages, or a content is not a string.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidReplyError(f"{source} returned {describe_value(value)}; expected a list of messages")
    for message in value:
        has_role = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if has_role and isinstance(message.get("content"), (list, tuple)):
            raise InvalidReplyError(
                f"{source} returned {describe_value(message)}: its content is a list, but environments support text only"
            )
        if not has_role or not isinstance(message.get("content"), str):
            raise InvalidReplyError(f"{source} returned {describe_value(message)}; expected {{'role': str, 'content': str}}")
    return tuple(_copy_json(message, source) for message in value)


def _copy_json(message: Message, source: str) -> Message:
    """Return a copy of JSON values, since a message is sent to the scoring rank, rendered by the template and written to files.

    Raises:
        InvalidReplyError: The message is not JSON, or its text cannot be encoded as UTF-8.
    """
    try:
        text = json.dumps(dict(message), ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidReplyError(f"{source} returned {describe_value(message)}, which is not valid text: {error.reason}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidReplyError(
            f"{source} returned {describe_value(message)}: {error}; a message may contain text, numbers, lists and dicts"
        ) from error
    return json.loads(text)
