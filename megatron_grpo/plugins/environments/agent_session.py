"""Session of one agent's episode: which turns the messages of a request repeat, and what is trained.

An agent sends whole conversations, in any order and also in parallel. Earlier turns are recognized in its messages, and `Session` finds
the context that the conversation continues.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_grpo.core.base.errors import one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.rollout.engine import SampledTurn
from megatron_grpo.core.rollout.turns import Key
from megatron_grpo.plugins.environments.protocol import Message
from megatron_grpo.plugins.environments.tools import MARKS, ReadCalls
from megatron_grpo.plugins.environments.trajectory import ChatTemplate, History, Session, SessionTurn

_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)


class AgentRefusalError(Exception):
    """Error for a request of an agent that is refused.

    Args:
        retry_after: Seconds after which the client may ask again; None: never.
    """

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one episode.

    Args:
        max_model_len: Tokens of one context.
        max_completion_length: Tokens of all contexts, without the prompt of the first one.
    """

    max_model_len: int
    max_completion_length: int
    max_turns: int
    max_contexts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """Request of an agent, independent of its protocol.

    Args:
        messages: Messages whose contents are strings.
        has_usage: Whether a stream ends with the numbers of tokens.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    is_streamed: bool = False
    has_usage: bool = False
    model: str = "policy"
    stop: Sequence[str] = ()

    @property
    def is_aside(self) -> bool:
        """Whether the answer is not to be trained."""
        return self.model.endswith("-aside")


@dataclass(slots=True, kw_only=True, eq=False)
class AgentTurn(SessionTurn):
    """One request with its answer.

    Args:
        number: Number of the request in its session.
        message: The answer that the agent gets.
    """

    request: AgentRequest
    number: int
    seed: int
    max_tokens: int
    sampled: SampledTurn | None = None
    message: dict[str, Any] = field(default_factory=dict)
    refusal: AgentRefusalError | None = None


class AgentSession(Session[AgentTurn]):
    """Session of an agent. Threads may use it; a request changes nothing until its answer is sampled.

    Args:
        key: Prompt number, and index in the group.
        reader: Returns the parser of tool calls for the tools of a request.
        history: "sampled" keeps a context where the template renders earlier turns differently than before.

    Attributes:
        end_reason: Why no further request is answered: "max_turns", "length", or "done"; "" while the session is open.
        counts: Numbers of contexts, forks, retries and refusals.
    """

    def __init__(
        self, template: ChatTemplate, limits: SessionLimits, *, key: Key, seed: int,
        reader: Callable[[Sequence[Mapping[str, Any]]], ReadCalls], history: History = "template",
    ):  # fmt: skip
        super().__init__(template, history=history)
        self.limits, self.key, self.end_reason = limits, key, ""
        self.seconds_waited = 0.0  # of all requests together, for the sampler
        self.counts: Counter[str] = Counter()
        self._seed, self._reader = seed, reader
        self._lock = threading.RLock()
        self._by_message: dict[str, list[AgentTurn]] = {}
        self._by_call: dict[str, AgentTurn] = {}
        self._seeds: Counter[str] = Counter()  # how often each context was sampled after
        self._num_turns = self._num_tokens = self._num_new = 0  # tokens of all contexts; new contexts of open requests
        self._prefill: str | None = None

    def end(self, reason: str) -> None:
        """Refuse all further requests.

        Args:
            reason: Reason for the end. Of several reasons the first one counts.
        """
        self.end_reason = self.end_reason or reason

    # ---- from a request to tokens

    def prepare(self, request: AgentRequest) -> AgentTurn:
        """Return the turn to sample for a request.

        Raises:
            AgentRefusalError: The episode is over, a limit is reached, which ends it, or the messages cannot be rendered.
        """
        with self._lock:
            if self.end_reason:
                raise episode_over(self.end_reason)
            if self._num_turns >= self.limits.max_turns:
                raise self._ended_by("max_turns", f"max_turns {self.limits.max_turns}")
            parent, rest, known_turns = self._matched(request)
            if self.template.is_longer(len(rest), self.limits.max_model_len):
                raise self._ended_by("length", f"{self.limits.max_model_len} tokens of a context")
            turn = self._turn(request, parent, rest)
            earlier = turn.parent
            while earlier is not None:  # its whole text is in the request
                earlier.is_read, earlier = True, earlier.parent
            for known_turn in known_turns.values():
                known_turn.is_read = True
            return turn

    def count_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens of a request without changing the session.

        Raises:
            AgentRefusalError: The messages cannot be rendered, or are far longer than a context.
        """
        with self._lock:
            parent, rest, _ = self._matched(request)
            if self.template.is_longer(len(rest), self.limits.max_model_len):
                raise AgentRefusalError(400, "invalid_request", f"the messages have more than {self.limits.max_model_len} tokens.")
            return len(self.tokens_after(parent, rest))

    def _matched(self, request: AgentRequest) -> tuple[AgentTurn | None, str, dict[int, AgentTurn]]:
        """Return the turn that a request continues, the rest of its text, and the turns that it repeats, by the index of their message."""
        template = copy.copy(self.template)
        template.tools = self.guards.guarded(request.tools) or None
        messages, known_turns = self._recognized(request.messages)
        index, last = max(known_turns.items(), default=(0, None))
        if last is not None and not (self.history == "sampled" and _begins_alike(request, last.request, index)):
            last = None
        try:
            if self._prefill is None:
                self._prefill = template.prefill(messages)
            return *self.match(messages, last, index, template=template), known_turns
        except Exception as error:  # a template may raise anything
            raise AgentRefusalError(400, "invalid_request", f"the chat template rejects the messages: {one_line(error)}") from error

    def _ended_by(self, reason: str, limit: str) -> AgentRefusalError:
        self.end(reason)
        return AgentRefusalError(401, "episode_over", f"the episode has reached its limit ({limit})")

    def _turn(self, request: AgentRequest, parent: AgentTurn | None, rest: str) -> AgentTurn:
        """Return the turn, after checking the limits, and count it."""
        limits, context, ids = self.limits, self.context_after(parent), self.tokens_after(parent, rest)
        if context is None and len(self._contexts) + self._num_new >= limits.max_contexts:
            raise self._ended_by("length", f"max_agent_contexts {limits.max_contexts}")
        added = len(ids) - len(context.ids) if context is not None else len(ids)
        remaining = self._budget(len(ids)) - self._num_tokens - added
        max_tokens = min(limits.max_model_len - len(ids), remaining)
        if max_tokens < 1:
            raise self._ended_by("length", f"{len(ids)} tokens of {limits.max_model_len} in a context, {remaining} left of the row's")
        digest = hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
        seed = hashlib.blake2b(f"{self._seed} {self.key} {digest} {self._seeds[digest]}".encode(), digest_size=4).digest()
        self._seeds[digest] += 1
        self._num_turns += 1
        self._num_new += context is None
        if parent is not None:
            parent.is_continued = True
        self.counts["forks"] += context is None and parent is not None
        return AgentTurn(
            request=request, number=self._num_turns - 1, before=ids, text=rest, prefill=self._prefill or "", parent=parent,
            seed=int.from_bytes(seed, "big"), max_tokens=min(max_tokens, request.max_tokens or max_tokens), context=context,
        )  # fmt: skip

    def _budget(self, first: int) -> int:
        """Return the limit for the tokens of all contexts. `first` is the length of the first prompt, where none was sampled after yet."""
        return self.limits.max_completion_length + (self._contexts[0].spans[0].begin if self._contexts else first)

    def _recognized(self, messages: Sequence[Message]) -> tuple[list[Message], dict[int, AgentTurn]]:
        """Return the messages with earlier turns of the session as they were sampled, and those turns. All other text is guarded."""
        messages_shown: list[Message] = []
        known_turns: dict[int, AgentTurn] = {}
        previous = None
        for index, message in enumerate(messages):
            turn = self._find_turn(message, index, previous) if message["role"] == "assistant" else None
            if turn is not None:
                known_turns[index] = turn
                messages_shown.append({"role": "assistant", "content": turn.content})
            else:
                messages_shown += self.guards.over([_with_parsed_arguments(message)])
            previous = turn if message["role"] == "assistant" else previous
        return messages_shown, known_turns

    def _find_turn(self, message: Message, index: int, previous: AgentTurn | None) -> AgentTurn | None:
        """Return the turn that an assistant's message repeats. IDs of calls decide first, then the turn before."""
        canonical = _canonical(message)  # a turn whose own request had this message, such as an example of the agent's, is not the one
        candidates = [
            turn for turn in self._by_message.get(canonical, ())
            if index >= len(turn.request.messages) or _canonical(turn.request.messages[index]) != canonical
        ]  # fmt: skip
        called_turns = [turn for call in message.get("tool_calls") or () if (turn := self._by_call.get(str(call.get("id")))) is not None]
        candidates = [turn for turn in candidates if called_turns and turn is called_turns[0]] or candidates
        return next((turn for turn in reversed(candidates) if turn.parent is previous), candidates[-1] if candidates else None)

    # ---- from tokens to an answer

    def commit(self, turn: AgentTurn, sampled: SampledTurn) -> None:
        """Add a sampled turn. Where the row has no room left, the turn is refused instead, and trains nothing.

        Args:
            turn: From `prepare`.
            sampled: Its tokens.
        """
        with self._lock:
            context = turn.context
            self._num_new -= context is None
            added = len(turn.before) + len(sampled.token_ids) - (len(context.ids) if context is not None else 0)
            if self._num_tokens + added > self._budget(len(turn.before)):  # requests in parallel had the same room
                turn.refusal = self._ended_by("length", f"max_completion_length {self.limits.max_completion_length}")
                return
            self.add(turn, sampled)
            self._num_tokens += added
            self._read_answer(turn, sampled)
            self._by_message.setdefault(_canonical(turn.message), []).append(turn)
            self._by_call |= {call["id"]: turn for call in turn.message.get("tool_calls", ())}

    def _read_answer(self, turn: AgentTurn, sampled: SampledTurn) -> None:
        turn.sampled = sampled
        thought = _THOUGHT.match(turn.content)
        answer = turn.content[thought.end() :] if thought else turn.content
        turn.message = {"role": "assistant", "content": answer}
        if thought:
            turn.message["reasoning_content"] = thought[1].strip()
        calls = [] if sampled.is_cut or not turn.request.tools else self._reader(turn.request.tools)(turn.content)
        if calls and not any(call.error for call in calls):  # a call that cannot be parsed stays text, for the agent to answer
            begin = min((position for mark in MARKS if (position := answer.find(mark)) >= 0), default=0)
            number, generation = self.key
            turn.message["content"] = answer[:begin].strip() or None
            turn.message["tool_calls"] = [
                {"id": f"call_{number}_{generation}_{turn.number}_{index}", "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
                for index, call in enumerate(calls)
            ]  # fmt: skip

    # ---- the row

    @property
    def trained_turns(self) -> list[AgentTurn]:
        return [turn for turn in super().trained_turns if not turn.request.is_aside]

    @property
    def num_unread(self) -> int:
        """Number of sampled turns that no agent has read."""
        return sum(not turn.is_read for turn in self.turns)

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Token IDs before the first turn; empty without turns."""
        first = min(self.turns, key=lambda turn: turn.number, default=None)
        return () if first is None or first.span is None or first.context is None else tuple(first.context.ids[: first.span.begin])

    def conversations(self) -> list[list[dict[str, Any]]]:
        """Return the messages of each trained context as its last read turn saw them, with its answer; the latest one last."""
        last = {id(turn.context): turn for turn in self.trained_turns}
        ends = sorted(last.values(), key=lambda turn: turn.number)
        return [
            [{**message, "content": message.get("content") or ""} for message in (*turn.request.messages, turn.message)] for turn in ends
        ]


def episode_over(reason: str) -> AgentRefusalError:
    """Return the refusal of a request after the end of its episode."""
    return AgentRefusalError(401, "episode_over", f"the episode of this key has ended ({reason})")


def _begins_alike(request: AgentRequest, earlier: AgentRequest, index: int) -> bool:
    """Return whether the messages up to an index are those of an earlier request."""
    return request.tools == earlier.tools and [*map(_canonical, request.messages[:index])] == [*map(_canonical, earlier.messages)]


def _canonical(message: Message) -> str:
    """Return a normal form of a message, without surrounding white space, the order of arguments, and IDs."""
    calls = [(call["function"]["name"], _parsed(call["function"].get("arguments"))) for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], (message.get("content") or "").strip(), calls], sort_keys=True, ensure_ascii=False)


def _parsed(arguments: Any) -> Any:
    try:
        return parse_json(arguments or "{}") if isinstance(arguments, str) or arguments is None else arguments
    except ValueError:
        return arguments


def _with_parsed_arguments(message: Message) -> Message:
    """Return the message with the arguments of its calls as objects, as chat templates expect them."""
    if not message.get("tool_calls"):
        return {**message, "content": message.get("content") or ""}
    calls = [
        {**call, "function": {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}
