"""Owns an episode's tokens: what was drawn stays as it was drawn; what the environment says is the difference that the template makes.

Earlier turns are compared as text, so tokens that would be others if they were encoded again are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.environments.protocol import Message
from megatron_grpo.environments.template import MARK, ChatTemplate, History
from megatron_grpo.types import Kept
from megatron_grpo.types import Sequence as Scored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcribed:
    """All contexts of an episode, end to end. T: their tokens."""

    sequence: Scored
    logprobs: np.ndarray  # float32 [T], 0 where nothing was drawn
    versions: tuple[tuple[int, int, int], ...]  # (weights version, begin, end) of each drawn stretch


class _Context:
    """Tokens that the model was run on, with what it drew of them."""

    def __init__(self, opening: Sequence[int]):
        self.ids = list(opening)
        self.turns: list[tuple[int, int, int]] = []  # (weights version, begin, end)
        self.logprobs: list[float] = []  # of the drawn tokens
        self.kept: list[Kept] = []  # of each turn, where it is told

    def draw(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, kept: Kept | None) -> None:
        begin = len(self.ids)
        self.kept += [] if kept is None else [kept]
        self.ids += token_ids
        self.logprobs += logprobs
        self.turns.append((version, begin, len(self.ids)))

    @property
    def length(self) -> int:
        """Up to its last drawn token: what was heard behind it was never answered. 0 where nothing was drawn."""
        return max((end for _, begin, end in self.turns if end > begin), default=0)


class Transcript:
    """The tokens of one episode. A new context begins where the template rewrites what was said before (`history` template)."""

    def __init__(
        self, template: ChatTemplate, opening: Sequence[Message], token_ids: Sequence[int] | None = None, *, history: History = "template"
    ):
        """token_ids: of the opening, if they are known. history: `sampled` keeps one context, whatever the template shows.

        An opening that ends with the assistant's words leaves them open: the first turn goes on with them.
        """
        self.template, self.history = template, history
        self.guards = template.guards()
        known = token_ids is not None
        self.messages: list[Message] = [dict(message) for message in opening] if known else list(self.guards.over(opening))
        continues = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        self._shown = template.render(self.messages, continues=continues)  # the text that the tokens stand for
        begun = self.messages.pop()["content"] if continues else None
        self._of_turns = template.prefill(self.messages, template.render(self.messages) if continues else self._shown)
        self._prefill = self._of_turns if begun is None else begun  # of the next turn
        self._end, self._said = "", ""  # of the last turn
        self._contexts = [_Context(template.encode(self._shown, self.guards) if token_ids is None else token_ids)]
        self.opening = tuple(self.ids)
        self.num_heard = 0  # tokens, each counted once

    @property
    def ids(self) -> list[int]:
        """Of the context that the next turn is drawn in."""
        return self._contexts[-1].ids

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    @property
    def num_drawn(self) -> int:
        return sum(len(context.logprobs) for context in self._contexts)

    def say(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, kept: Kept | None = None) -> str:
        """A turn of the model, its end-of-turn token included. Returns its text, without that token. kept: told of all turns or of none."""
        before = self.ids[-1:]
        has_ended = bool(token_ids) and token_ids[-1] in self.template.end_ids
        self._end = self.template.decode(token_ids[-1:]) if has_ended else ""
        self._said = self.template.decode_behind(before, token_ids[:-1] if has_ended else token_ids)
        self._contexts[-1].draw(token_ids, logprobs, version, kept)
        self.messages.append({"role": "assistant", "content": self._prefill + self._said})
        return self._said

    def hear(self, messages: Sequence[Message]) -> None:
        """What the environment says, and what the template puts behind it, up to where the model goes on."""
        heard = self.guards.over(messages)
        self.messages += heard
        full = self.template.render(self.messages)
        before = self._shown + self._said + self._end
        if full.startswith(before):
            self._go_on(full[len(before) :])
        else:
            tail = self._tail(heard)
            if self.history == "sampled":
                self._go_on(tail.removeprefix(self._end))
            else:  # so the next turn is trained in the context that it is drawn in, which is that of later use
                self.num_heard += len(self.template.encode(tail, self.guards))
                self._contexts.append(_Context(self.template.encode(full, self.guards)))
        self._shown = full
        self._prefill = self._of_turns

    def _go_on(self, tail: str) -> None:
        token_ids = self.template.encode(tail, self.guards)
        self.num_heard += len(token_ids)
        self.ids.extend(token_ids)

    def _tail(self, heard: Sequence[Message]) -> str:
        """What a rendering has behind the last turn, whatever the template makes of that turn's words."""
        place = len(self.messages) - len(heard) - 1
        marked = [*self.messages[:place], {"role": "assistant", "content": MARK}, *heard]
        return self.template.render(marked).rpartition(MARK)[2]

    def finished(self) -> Transcribed:
        """The contexts in which something was drawn; where there is none, the opening."""
        parts = [(context, context.length) for context in self._contexts if context.length]
        if not parts:
            return untold(self.opening)
        ids, mask, logprobs = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        versions, starts = list[tuple[int, int, int]](), list[int]()
        for context, length in parts:
            first = sum(len(part) for part in ids)
            drawn = np.zeros(length, dtype=bool)
            for version, begin, end in context.turns:
                drawn[begin:end] = True
                if end > begin:
                    versions.append((version, first + begin, first + end))
            values = np.zeros(length, dtype=np.float32)
            values[drawn] = context.logprobs
            starts.append(first)
            ids.append(np.array(context.ids[:length], dtype=np.int64))
            mask.append(drawn)
            logprobs.append(values)
        told = [kept for context, _ in parts for kept in context.kept]
        kept = Kept.joined(told) if told else None
        sequence = Scored(
            token_ids=np.concatenate(ids), mask=np.concatenate(mask), starts=tuple(starts),
            kept_at=None if kept is None else kept.at, kept_ids=None if kept is None else kept.ids,
        )  # fmt: skip
        return Transcribed(sequence=sequence, logprobs=np.concatenate(logprobs), versions=tuple(versions))


def untold(opening: Sequence[int]) -> Transcribed:
    """Of an episode in which nothing was drawn."""
    tokens = np.array(opening, dtype=np.int64)
    sequence = Scored(token_ids=tokens, mask=np.zeros(len(tokens), dtype=bool))
    return Transcribed(sequence=sequence, logprobs=np.zeros(len(tokens), dtype=np.float32), versions=())
