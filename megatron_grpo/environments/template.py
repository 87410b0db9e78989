"""A chat template as episodes speak through it: messages as text, text as tokens, and nobody who can forge a turn by saying its mark."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from megatron_grpo.environments.protocol import Message

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
