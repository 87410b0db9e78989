"""An episode's tokens: what was drawn stays as it was drawn; what the environment says is the difference that the chat template makes.

Earlier turns are compared as text, so tokens that would be others if they were encoded again are kept. Nobody can forge a turn by saying
its mark: the text of special tokens is guarded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megatron_grpo.environments.protocol import Message
from megatron_grpo.types import SamplingMask
from megatron_grpo.types import Sequence as Scored

History = Literal["template", "sampled"]  # what a turn is sampled behind: the template's own rendering, or the tokens as they were
MARK = "\U000ffffd"  # stands for words whose place in a rendering is looked for
_GUARDS = range(0xF0000, 0xFFFFD)  # private characters, each in place of a text that must not be read as a special token


class Guards:
    """Private characters for the text of special tokens, in one episode. The same text has the same character in all of its messages."""

    def __init__(self, special: re.Pattern[str]):
        self._special = special
        self._characters: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._characters)

    def over(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with such characters in their contents, and in names: templates show those too."""
        return [
            {key: self._special.sub(self._character, said) if isinstance(said, str) else said for key, said in message.items()}
            for message in messages
        ]

    def _character(self, hit: re.Match[str]) -> str:
        return self._characters.setdefault(hit[0], chr(_GUARDS[len(self._characters)]))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """(text, whether a guard stood for it)."""
        texts = {character: said for said, character in self._characters.items()}
        found = re.split("([" + "".join(texts) + "])", text)
        return [(texts.get(piece, piece), piece in texts) for piece in found if piece]


class ChatTemplate:
    """A tokenizer's chat template, with a run's options filled in.

    tools: JSON schemas that it shows. options: `enable_thinking`, where it is given. end_ids: tokens that end a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        end_ids: Collection[int] = (),
    ):
        self.tokenizer, self.tools, self.options = tokenizer, list(tools) or None, dict(options or {})
        self.end_ids = frozenset(end_ids) or frozenset({tokenizer.eos_token_id})
        # Not `all_special_tokens` alone: it lists those that have a role (end, padding), and may lack the mark that opens a turn.
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {*tokenizer.all_special_tokens}
        words = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True) if token)
        # A private character that somebody says is guarded as well: it is no guard.
        self._special = re.compile(f"{words}{'|' * bool(words)}[{chr(_GUARDS[0])}-{MARK}]")

    def guards(self) -> Guards:
        """For an episode."""
        return Guards(self._special)

    def render(self, messages: Sequence[Message], *, is_open: bool = True, continues: bool = False) -> str:
        """is_open: up to where the model is to speak. continues: the last message is its own, unfinished."""
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=self.tools, tokenize=False, add_generation_prompt=is_open and not continues,
            continue_final_message=continues, **self.options,
        )  # fmt: skip

    def prefill(self, messages: Sequence[Message], opened: str) -> str:
        """What the generation prompt puts into the model's mouth (`<think>`): the end of `opened`, which an earlier turn has not."""
        answered = [*messages, {"role": "assistant", "content": MARK}, {"role": "user", "content": "?"}]
        head, found, _ = self.render(answered).partition(MARK)
        return opened[len(head) :] if found and opened.startswith(head) else ""

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_behind(self, before: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of tokens behind others: some tokenizers drop the space that a text begins with."""
        head, whole = self.decode(before), self.decode([*before, *token_ids])
        return whole[len(head) :] if whole.startswith(head) else self.decode(token_ids)

    def encode(self, text: str, guards: Guards) -> list[int]:
        """The tokens of a rendering, as one text; what is guarded is plain text in it."""
        if not guards:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [
            token
            for piece, is_plain in guards.pieces(text)
            for token in self.tokenizer(piece, add_special_tokens=False, split_special_tokens=is_plain)["input_ids"]
        ]

    @cached_property
    def longest(self) -> int:
        """Characters of the longest piece of the vocabulary."""
        return max(len(piece) for piece in self.tokenizer.get_vocab())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedTrajectory:
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
        self.kept: list[SamplingMask] = []  # of each turn, where it is told

    def draw(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, kept: SamplingMask | None) -> None:
        begin = len(self.ids)
        self.kept += [] if kept is None else [kept]
        self.ids += token_ids
        self.logprobs += logprobs
        self.turns.append((version, begin, len(self.ids)))

    @property
    def length(self) -> int:
        """Up to its last drawn token: what was heard behind it was never answered. 0 where nothing was drawn."""
        return max((end for _, begin, end in self.turns if end > begin), default=0)


class Trajectory:
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

    def say(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, kept: SamplingMask | None = None) -> str:
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

    def finished(self) -> TokenizedTrajectory:
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
        kept = SamplingMask.joined(told) if told else None
        sequence = Scored(
            token_ids=np.concatenate(ids), mask=np.concatenate(mask), starts=tuple(starts),
            kept_at=None if kept is None else kept.at, kept_ids=None if kept is None else kept.ids,
        )  # fmt: skip
        return TokenizedTrajectory(sequence=sequence, logprobs=np.concatenate(logprobs), versions=tuple(versions))


def untold(opening: Sequence[int]) -> TokenizedTrajectory:
    """Of an episode in which nothing was drawn."""
    tokens = np.array(opening, dtype=np.int64)
    sequence = Scored(token_ids=tokens, mask=np.zeros(len(tokens), dtype=bool))
    return TokenizedTrajectory(sequence=sequence, logprobs=np.zeros(len(tokens), dtype=np.float32), versions=())
