"""Token IDs of an episode.

Sampled tokens are kept exactly as sampled. Tokens of the environment are the encoded difference between two renderings of the chat
template. Earlier turns are compared as text, so sampled tokens stay even if encoding their text would yield other tokens. The text of
special tokens in messages is guarded, so a message cannot forge a turn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_grpo.environments.protocol import Message
from megatron_grpo.types import SamplingMask
from megatron_grpo.types import Sequence as TokenSequence

History = Literal["template", "sampled"]  # context of a turn: the template's rendering of the conversation, or the tokens as sampled
MARK = "\U000ffffd"  # placeholder for a text whose position in a rendering is searched
LARGE = 1_000_000  # characters; the length of a longer text is estimated before it is encoded
_GUARDS = range(0xF0000, 0xFFFFD)  # private-use characters, each replacing a text that must not be encoded as a special token


class SpecialTokenGuards:
    """Private-use characters that replace the text of special tokens in the messages of one episode.

    The same text has the same character in all messages of the episode.

    Args:
        special: Pattern that matches the text of special tokens.
    """

    def __init__(self, special: re.Pattern[str]):
        self._special = special
        self._characters: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._characters)

    def over(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return copies of messages with the text of special tokens replaced by guards.

        Args:
            messages: The messages. All their string values are treated, including names, which templates render too.
        """
        return [{key: self.guarded(value) for key, value in message.items()} for message in messages]

    def guarded(self, value: Any) -> Any:
        """Return a copy of a JSON value with the text of special tokens replaced by guards, also in nested values.

        Args:
            value: The value.
        """
        if isinstance(value, str):
            return self._special.sub(self._character, value)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(inner) for key, inner in value.items()}
        return [self.guarded(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def _character(self, hit: re.Match[str]) -> str:
        return self._characters.setdefault(hit[0], chr(_GUARDS[len(self._characters)]))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split a rendering at guards.

        Args:
            text: The rendering.

        Returns:
            (text, whether a guard stood for it) in order, with guards replaced by their texts.
        """
        texts = {character: text for text, character in self._characters.items()}
        parts = re.split("([" + "".join(texts) + "])", text)
        return [(texts.get(piece, piece), piece in texts) for piece in parts if piece]


class ChatTemplate:
    """Chat template of a tokenizer with the options of a run.

    Args:
        tokenizer: The tokenizer.
        tools: JSON schemas that the template shows to the model.
        options: Further arguments of the template, such as `enable_thinking`.
        end_ids: Token IDs that end a turn. Default: the tokenizer's EOS token.
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
        # `all_special_tokens` is not enough: it lists tokens with a role (end, padding), and may lack the one that opens a turn.
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | {*tokenizer.all_special_tokens}
        words = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True) if token)
        # A private-use character in a message is guarded as well, so that it is not taken for a guard.
        self._special = re.compile(f"{words}{'|' * bool(words)}[{chr(_GUARDS[0])}-{MARK}]")

    def guards(self) -> SpecialTokenGuards:
        """Return new guards for an episode."""
        return SpecialTokenGuards(self._special)

    def render(self, messages: Sequence[Message], *, is_open: bool = True, continues: bool = False) -> str:
        """Render messages as text.

        Args:
            messages: The conversation.
            is_open: Whether to append the generation prompt.
            continues: Whether the last message is an unfinished one of the assistant; then there is no generation prompt.
        """
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=self.tools, tokenize=False, add_generation_prompt=is_open and not continues,
            continue_final_message=continues, **self.options,
        )  # fmt: skip

    def prefill(self, messages: Sequence[Message], opening: str) -> str:
        """Return the part of the generation prompt that the template does not render in an earlier turn, such as `<think>`.

        Args:
            messages: The conversation.
            opening: Its rendering with the generation prompt.

        Returns:
            The end of `opening`, or "" if there is no such part.
        """
        with_answer = [*messages, {"role": "assistant", "content": MARK}, {"role": "user", "content": "?"}]
        head, generated, _ = self.render(with_answer).partition(MARK)
        return opening[len(head) :] if generated and opening.startswith(head) else ""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token IDs, including special tokens, without cleaning up spaces.

        Args:
            token_ids: Token IDs.
        """
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_turn(self, previous: Sequence[int], token_ids: Sequence[int]) -> tuple[str, str]:
        """Decode a sampled turn in the context of preceding tokens, since some tokenizers drop the space at the beginning of a text.

        Args:
            previous: Token IDs that precede.
            token_ids: Sampled token IDs.

        Returns:
            The text, and the text of the end-of-turn token; "" for a turn that was truncated.
        """
        is_finished = bool(token_ids) and token_ids[-1] in self.end_ids
        answer = token_ids[:-1] if is_finished else token_ids
        head, text = self.decode(previous), self.decode([*previous, *answer])
        return text[len(head) :] if text.startswith(head) else self.decode(answer), self.decode(token_ids[len(answer) :])

    def is_longer(self, num_characters: int, max_tokens: int) -> bool:
        """Return whether a text has so many characters that it exceeds `max_tokens` tokens for certain, without encoding it.

        Args:
            num_characters: Length of the text in characters.
            max_tokens: The limit.
        """
        return num_characters > max(LARGE, max_tokens * self.longest)

    def encode(self, text: str, guards: SpecialTokenGuards) -> list[int]:
        """Encode a rendering. Guarded texts are encoded as plain text, not as special tokens.

        Args:
            text: The rendering.
            guards: Guards of its messages.
        """
        if not guards:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [
            token
            for piece, is_plain in guards.pieces(text)
            for token in self.tokenizer(piece, add_special_tokens=False, split_special_tokens=is_plain)["input_ids"]
        ]

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest vocabulary entry."""
        return max(len(piece) for piece in self.tokenizer.get_vocab())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedTrajectory:
    """All contexts of an episode, concatenated; T tokens in total.

    Args:
        logprobs: Log-prob of each token, float32 [T]; 0 for tokens that were not sampled.
        versions: (weights version, begin, end) of each sampled span.
    """

    sequence: TokenSequence
    logprobs: np.ndarray
    versions: tuple[tuple[int, int, int], ...]


class SampledSpan(NamedTuple):
    """Tokens of a context that were sampled in one turn.

    Args:
        version: Version of the weights.
    """

    begin: int
    end: int
    logprobs: Sequence[float]
    version: int
    sampling_mask: SamplingMask | None


class ContextTokens:
    """Tokens of one context, with the spans that were sampled in it.

    Args:
        opening: Token IDs before the first turn.
    """

    def __init__(self, opening: Sequence[int]):
        self.ids = list(opening)
        self.spans: list[SampledSpan] = []

    def add_span(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, sampling_mask: SamplingMask | None
    ) -> SampledSpan:
        """Append sampled tokens.

        Args:
            token_ids: Sampled token IDs.
            logprobs: Their log-probs.
            version: Version of the weights that sampled them.
            sampling_mask: Their sampling mask, if requested.
        """
        begin = len(self.ids)
        self.ids += token_ids
        self.spans.append(SampledSpan(begin, len(self.ids), logprobs, version, sampling_mask))
        return self.spans[-1]


class Trajectory:
    """Tokens of one episode.

    With `history="template"` a new context begins whenever the template renders earlier turns differently than before. An opening that
    ends with an assistant message leaves it open: the first turn continues it.

    Args:
        template: The chat template.
        opening: Messages before the first turn.
        token_ids: Token IDs of the opening if they are known; default: they are encoded.
        history: "sampled" keeps one context, whatever the template renders.

    Attributes:
        messages: The conversation so far, with guards.
        opening: Token IDs of the opening.
        num_environment_tokens: Number of tokens from the environment, each counted once.
    """

    def __init__(
        self, template: ChatTemplate, opening: Sequence[Message], token_ids: Sequence[int] | None = None, *, history: History = "template"
    ):
        self.template, self.history = template, history
        self.guards = template.guards()
        has_token_ids = token_ids is not None
        self.messages: list[Message] = [dict(message) for message in opening] if has_token_ids else list(self.guards.over(opening))
        continues = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        self._shown = template.render(self.messages, continues=continues)  # the text that the tokens encode
        begun_text = self.messages.pop()["content"] if continues else None
        self._of_turns = template.prefill(self.messages, template.render(self.messages) if continues else self._shown)
        self._prefill = self._of_turns if begun_text is None else begun_text  # of the next turn
        self._end, self._turn_text = "", ""  # of the last turn
        self._contexts = [ContextTokens(template.encode(self._shown, self.guards) if token_ids is None else token_ids)]
        self.opening = tuple(self.ids)
        self.num_environment_tokens = 0  # tokens, each counted once

    @property
    def ids(self) -> list[int]:
        """Token IDs of the context in which the next turn is sampled."""
        return self._contexts[-1].ids

    @property
    def num_contexts(self) -> int:
        """Number of contexts so far."""
        return len(self._contexts)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in all contexts."""
        return sum(span.end - span.begin for context in self._contexts for span in context.spans)

    def add_turn(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, sampling_mask: SamplingMask | None = None) -> str:
        """Append a turn of the model.

        Args:
            token_ids: Sampled token IDs, including the end-of-turn token.
            logprobs: Their log-probs.
            version: Version of the weights that sampled them.
            sampling_mask: Their sampling mask; given for all turns or for none.

        Returns:
            The text of the turn without the end-of-turn token.
        """
        self._turn_text, self._end = self.template.decode_turn(self.ids[-1:], token_ids)
        self._contexts[-1].add_span(token_ids, logprobs, version, sampling_mask)
        self.messages.append({"role": "assistant", "content": self._prefill + self._turn_text})
        return self._turn_text

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages of the environment, with the template's text around them and the next generation prompt.

        Args:
            messages: The messages, without guards.
        """
        new_messages = self.guards.over(messages)
        self.messages += new_messages
        full = self.template.render(self.messages)
        text_so_far = self._shown + self._turn_text + self._end
        if full.startswith(text_so_far):
            self._go_on(full[len(text_so_far) :])
        else:
            tail = self._tail(new_messages)
            if self.history == "sampled":
                self._go_on(tail.removeprefix(self._end))
            else:  # the next turn is trained in the context that it is sampled in, which is the one at inference time
                self.num_environment_tokens += len(self.template.encode(tail, self.guards))
                self._contexts.append(ContextTokens(self.template.encode(full, self.guards)))
        self._shown = full
        self._prefill = self._of_turns

    def _go_on(self, tail: str) -> None:
        token_ids = self.template.encode(tail, self.guards)
        self.num_environment_tokens += len(token_ids)
        self.ids.extend(token_ids)

    def _tail(self, new_messages: Sequence[Message]) -> str:
        """Return the part of the rendering after the last turn, however the template renders the text of that turn."""
        index = len(self.messages) - len(new_messages) - 1
        marked = [*self.messages[:index], {"role": "assistant", "content": MARK}, *new_messages]
        return self.template.render(marked).rpartition(MARK)[2]

    def finished(self) -> TokenizedTrajectory:
        """Return the concatenated contexts that have sampled tokens, or the opening if there are none."""
        return join_contexts([(context.ids, context.spans) for context in self._contexts]) or without_turns(self.opening)


def join_contexts(contexts: Sequence[tuple[Sequence[int], Sequence[SampledSpan]]]) -> TokenizedTrajectory | None:
    """Concatenate contexts. Each ends with its last sampled token, since what follows was never answered.

    Args:
        contexts: Token IDs of each context, and the spans of it that are trained, in order.

    Returns:
        The trajectory, or None if there are no sampled tokens. Contexts without sampled tokens are left out.
    """
    ids, mask, logprobs = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    versions, starts, masks = list[tuple[int, int, int]](), list[int](), list[SamplingMask]()
    first = 0
    for tokens, all_spans in contexts:
        spans = [span for span in all_spans if span.end > span.begin]
        if not spans:
            continue
        length = spans[-1].end
        sampled, values = np.zeros(length, dtype=bool), np.zeros(length, dtype=np.float32)
        for span in spans:
            sampled[span.begin : span.end] = True
            values[span.begin : span.end] = span.logprobs
            versions.append((span.version, first + span.begin, first + span.end))
            masks += [] if span.sampling_mask is None else [span.sampling_mask]
        starts.append(first)
        ids.append(np.array(tokens[:length], dtype=np.int64))
        mask.append(sampled)
        logprobs.append(values)
        first += length
    if not ids:
        return None
    sampling_mask = SamplingMask.joined(masks) if masks else None
    sequence = TokenSequence(
        token_ids=np.concatenate(ids), mask=np.concatenate(mask), starts=tuple(starts),
        mask_offsets=None if sampling_mask is None else sampling_mask.at, mask_ids=None if sampling_mask is None else sampling_mask.ids,
    )  # fmt: skip
    return TokenizedTrajectory(sequence=sequence, logprobs=np.concatenate(logprobs), versions=tuple(versions))


def without_turns(opening: Sequence[int]) -> TokenizedTrajectory:
    """Return the trajectory of an episode without sampled tokens.

    Args:
        opening: Token IDs of its opening.
    """
    tokens = np.array(opening, dtype=np.int64)
    sequence = TokenSequence(token_ids=tokens, mask=np.zeros(len(tokens), dtype=bool))
    return TokenizedTrajectory(sequence=sequence, logprobs=np.zeros(len(tokens), dtype=np.float32), versions=())
