"""What an environment is given and may return, and the sentence that is said where it returns something else."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.base.errors import shown

Message = Mapping[str, Any]  # {"role", "content"}, and what the chat template knows besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model said: all that an environment needs to answer it."""

    number: int  # 0 is the first
    text: str  # without the end-of-turn token; special tokens in it stand as text
    messages: Sequence[Message]  # the conversation so far; this turn is the last of it
    is_last: bool  # max_turns allows no further one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers. No messages end the episode, as `done` does."""

    messages: Sequence[Message] = ()
    reward: float | None = None  # of this turn
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # summed over the episode; logged as environment/<name>


class Environment:
    """One episode, made anew for each. Its methods may be `async`.

    They run beside the sampler, in a thread or on an event loop: at most one of an episode's at a time, `environment_timeout` seconds each.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas that the chat template shows to the model; of the class, so the same for all rows."""
    role = ""
    """Who its answers are from, for the look at the chat template before a run: "user", "tool". Default: "tool" where it has tools."""

    def __init__(self, columns: Mapping[str, Any]):
        """columns: of the row, that with the right answer too."""
        self.columns = columns

    def start(self, prompt: Sequence[Message]) -> Sequence[Message]:
        """The messages that the first turn answers; default: the row's.

        A function of the row alone: GRPO compares answers to one question, so all episodes of a group begin with the same tokens.
        """
        return prompt

    def reply(self, turn: Turn) -> Reply | tuple[Sequence[Message], float | None, bool]:
        """The answer to a turn; a tuple is (messages, reward, done)."""
        raise NotImplementedError  # each environment has its own

    def close(self) -> None:
        """Called once, however the episode ended; but not after a timeout, when a thread may still be inside."""


class InvalidReplyError(ValueError):
    """The environment answered what is no answer. The end of a sentence about it."""


def as_reply(value: Any) -> Reply:
    """What `reply` returned, checked. Raises InvalidReplyError."""
    if isinstance(value, tuple) and len(value) == 3:
        value = Reply(messages=() if value[0] is None else value[0], reward=value[1], done=value[2])
    if not isinstance(value, Reply):
        raise InvalidReplyError(f"reply returned {shown(value)}, where Reply or (messages, reward, done) should be")
    if not (type(value.done) is bool or type(value.done).__name__ == "bool"):  # numpy's too
        raise InvalidReplyError(f"reply returned done = {shown(value.done)}, where True or False should be")
    if not isinstance(value.metrics, Mapping):
        raise InvalidReplyError(f"reply returned metrics = {shown(value.metrics)}, where a dict of numbers should be")
    return Reply(
        messages=as_messages(value.messages, who="reply"),
        reward=None if value.reward is None else _number(value.reward, "the reward"),
        done=bool(value.done),
        metrics={str(name): _number(amount, f"the metric {name}") for name, amount in value.metrics.items()},
    )


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, numbers.Real) and math.isfinite(found := float(value)):
            return found
    except OverflowError:  # Python's integers have no end
        pass
    raise InvalidReplyError(f"reply returned {shown(value)} as {what}, where a finite number should be")


def as_messages(value: Any, *, who: str) -> tuple[Message, ...]:
    """Messages of text, copied. who: the method that returned them. Raises InvalidReplyError."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidReplyError(f"{who} returned {shown(value)}, where a list of messages should be")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidReplyError(f"{who} returned {shown(message)}, where {{'role': str, 'content': str}} should be")
        if isinstance(message.get("content"), (list, tuple)):
            raise InvalidReplyError(f"{who} returned {shown(message)}: its content is a list, and environments answer with text alone")
        if not isinstance(message.get("content"), str):
            raise InvalidReplyError(f"{who} returned {shown(message)}, where {{'role': str, 'content': str}} should be")
    return tuple(_plain(message, who) for message in value)


def _plain(message: Message, who: str) -> Message:
    """A copy of plain values: it travels to the rank that judges, into a template and into files. Raises InvalidReplyError."""
    try:
        text = json.dumps(dict(message), ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidReplyError(f"{who} returned {shown(message)}, which is no text: {error.reason}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidReplyError(
            f"{who} returned {shown(message)}, of which {error}: a message holds text, numbers, lists and dicts"
        ) from error
    return json.loads(text)
