"""Token IDs of an episode.

Sampled tokens are kept exactly as sampled. All other tokens are the encoded difference between two renderings of the chat template.
Earlier turns are compared as text, so sampled tokens stay even if encoding their text would yield other tokens. The text of special
tokens in messages is guarded, so a message cannot forge a turn. `Trajectory` is the episode of an environment, and
`agent_session.AgentSession` that of an agent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.rollout.engine import SampledTurn
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.plugins.environments.protocol import Message
from megatron_grpo.run.data.chat import SpecialTokens, clock_options

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
        """Return copies of messages with the text of special tokens replaced by guards."""
        return [{key: self.guarded(value) for key, value in message.items()} for message in messages]

    def guarded(self, value: Any) -> Any:
        """Return a copy of a JSON value with the text of special tokens replaced by guards, also in nested values."""
        if isinstance(value, str):
            return self._special.sub(self._character, value)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(inner) for key, inner in value.items()}
        return [self.guarded(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def _character(self, hit: re.Match[str]) -> str:
        return self._characters.setdefault(hit[0], chr(_GUARDS[len(self._characters)]))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split a rendering at guards.

        Returns:
            (text, whether a guard stood for it) in order, with guards replaced by their texts.
        """
        texts = {character: text for text, character in self._characters.items()}
        parts = re.split("([" + "".join(texts) + "])", text)
        return [(texts.get(piece, piece), piece in texts) for piece in parts if piece]


class ChatTemplate:
    """Chat template of a tokenizer with the options of a run.

    Args:
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
        self._special_ids = SpecialTokens(tokenizer).ids
        words = "|".join(re.escape(token) for token in sorted(self._special_ids, key=len, reverse=True) if token)
        # A private-use character in a message is guarded as well, so that it is not taken for a guard.
        self._special = re.compile(f"{words}{'|' * bool(words)}[{chr(_GUARDS[0])}-{MARK}]")

    def is_end(self, text: str) -> bool:
        """Return whether a text is a special token that ends a turn."""
        return self._special_ids.get(text) in self.end_ids

    def guards(self) -> SpecialTokenGuards:
        """Return new guards for an episode."""
        return SpecialTokenGuards(self._special)

    def render(self, messages: Sequence[Message], *, is_open: bool = True, continues: bool = False) -> str:
        """Render messages as text.

        Args:
            is_open: Whether to append the generation prompt.
            continues: Whether the last message is an unfinished one of the assistant; then there is no generation prompt.
        """
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=self.tools, tokenize=False, add_generation_prompt=is_open and not continues,
            continue_final_message=continues, **clock_options(self.tokenizer), **self.options,
        )  # fmt: skip

    def prefill(self, messages: Sequence[Message]) -> str:
        """Return the part of the generation prompt that the template does not render in an earlier turn, such as `<think>`.

        Returns:
            The end of its rendering with the generation prompt, or "" if there is no such part.
        """
        opening = self.render(messages)
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
        """Return whether a text has so many characters that it exceeds `max_tokens` tokens for certain, without encoding it."""
        return num_characters > max(LARGE, max_tokens * self.longest)

    def encode(self, text: str, guards: SpecialTokenGuards) -> list[int]:
        """Encode a rendering. Guarded texts are encoded as plain text, not as special tokens."""
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
            sampling_mask: Their sampling mask, if requested.
        """
        begin = len(self.ids)
        self.ids += token_ids
        self.spans.append(SampledSpan(begin, len(self.ids), logprobs, version, sampling_mask))
        return self.spans[-1]


@dataclass(slots=True, kw_only=True, eq=False)
class SessionTurn:
    """One turn of a session: the tokens that it is sampled after, and what was sampled.

    Args:
        parent: Turn that it follows: earlier tokens stay as they are in the parent's context.
        context: Context that it continues; None: a new one, until the turn is sampled.
        before: Token IDs to sample after; empty once the turn is sampled.
        text: Text behind the parent's, up to the generation prompt; once the turn is sampled, up to the end of the turn.
        prefill: End of the generation prompt that belongs to the answer, such as `<think>`.
        span: The sampled tokens in the context.
        content: Content of the assistant's message, as sampled.
        end: Text of the end-of-turn token.
        is_continued: Whether a later turn continues the context.
        is_read: Whether the answer was delivered, or a later request contains it.
    """

    parent: SessionTurn | None
    context: ContextTokens | None
    before: list[int]
    text: str
    prefill: str = ""
    span: SampledSpan | None = None
    content: str = ""
    end: str = ""
    is_continued: bool = False
    is_read: bool = False

    @property
    def token_ids(self) -> list[int]:
        """Token IDs of the context up to the end of the sampled turn."""
        assert self.context is not None and self.span is not None
        return self.context.ids[: self.span.end]


OneTurn = TypeVar("OneTurn", bound=SessionTurn)


class Session(Generic[OneTurn]):
    """Contexts of one episode, and the turns that were sampled in them.

    A conversation is matched by text: its rendering, in which earlier turns stand as they were sampled, is compared with the text of each
    earlier turn. It continues with tokens: those of the longest match stay as they were sampled, and only the rest is encoded. A
    conversation that does not continue the end of a context begins a new one, in which the matched tokens are not trained again.

    Args:
        history: "sampled" keeps a context where the template renders earlier turns differently than before.

    Attributes:
        guards: Guards of all messages of the episode.
        turns: The turns in the order of sampling.
    """

    def __init__(self, template: ChatTemplate, *, history: History = "template"):
        self.template, self.history, self.guards = template, history, template.guards()
        self.turns: list[OneTurn] = []
        self._contexts: list[ContextTokens] = []

    def match(
        self, messages: Sequence[Message], last: OneTurn | None, index: int, *, template: ChatTemplate | None = None
    ) -> tuple[OneTurn | None, str]:
        """Find the turn that a conversation continues.

        Args:
            last: The last turn in it, if the conversation up to that turn is the one that it was sampled in.
            index: Index of the message of that turn.
            template: The chat template, if its tools are other ones than the session's.

        Returns:
            The turn with the longest text that the rendering begins with, the first one of several; None if there is none. And the rest of
            the rendering. With history "sampled" `last`, whatever the template renders before it.
        """
        template = template or self.template
        full = template.render(messages)
        best, longest = None, 0
        ends: dict[SessionTurn | None, int] = {None: 0}  # turns whose text the rendering begins with, and where it ends there
        for turn in self.turns:
            begin = ends.get(turn.parent)
            if begin is not None and full.startswith(turn.text, begin):
                ends[turn] = begin + len(turn.text)
                if best is None or ends[turn] > longest:
                    best, longest = turn, ends[turn]
        if self.history == "sampled" and last is not None and best is not last:
            tail = tail_after(template, messages, index)
            if tail is not None:
                return last, tail.removeprefix(last.end)
        return best, full[longest:]

    def tokens_after(self, parent: SessionTurn | None, rest: str) -> list[int]:
        """Return the token IDs of a conversation."""
        return [*([] if parent is None else parent.token_ids), *self.template.encode(rest, self.guards)]

    @staticmethod
    def context_after(parent: SessionTurn | None) -> ContextTokens | None:
        """Return the context that a conversation continues; None: it begins a new one."""
        return None if parent is None or parent.is_continued else parent.context

    def add(self, turn: OneTurn, sampled: SampledTurn) -> str:
        """Add a sampled turn to its context.

        Args:
            sampled: Its tokens.

        Returns:
            Its text without the end-of-turn token.
        """
        text, turn.end = self.template.decode_turn(turn.before[-1:], sampled.token_ids)
        if turn.context is None:
            turn.context = ContextTokens([])
            self._contexts.append(turn.context)
        turn.context.ids += turn.before[len(turn.context.ids) :]
        turn.span = turn.context.add_span(sampled.token_ids, sampled.logprobs, sampled.version, sampled.sampling_mask)
        turn.before, turn.text, turn.content = [], turn.text + text + turn.end, turn.prefill + text
        self.turns.append(turn)
        return text

    @property
    def trained_turns(self) -> list[OneTurn]:
        """The turns that are trained."""
        return [turn for turn in self.turns if turn.is_read]

    def finished(self) -> TokenizedTrajectory | None:
        """Return the concatenated contexts with their trained turns, or None if there are none."""
        turns = self.trained_turns
        return join_contexts([(context.ids, [turn.span for turn in turns if turn.context is context and turn.span is not None])
                              for context in self._contexts])  # fmt: skip


def tail_after(template: ChatTemplate, messages: Sequence[Message], index: int) -> str | None:
    """Return what a template renders behind a message of the assistant, however it renders the content of that message.

    Args:
        index: Index of that message.

    Returns:
        The text; None if the template does not render the message.
    """
    marked = [*messages[:index], {"role": "assistant", "content": MARK}, *messages[index + 1 :]]
    _, mark, tail = template.render(marked).rpartition(MARK)
    return tail if mark else None


class Trajectory(Session[SessionTurn]):
    """Session of an episode whose turns follow one another, each after messages of the environment.

    An opening that ends with an assistant message leaves it open: the first turn continues it.

    Args:
        opening: Messages before the first turn.
        token_ids: Token IDs of the opening if they are known; default: they are encoded.
        history: "sampled" keeps one context, whatever the template renders.

    Attributes:
        messages: The conversation so far, with guards.
        opening_ids: Token IDs of the opening.
        num_environment_tokens: Number of tokens from the environment, each counted once.
    """

    def __init__(
        self, template: ChatTemplate, opening: Sequence[Message], token_ids: Sequence[int] | None = None, *, history: History = "template"
    ):
        super().__init__(template, history=history)
        has_token_ids = token_ids is not None
        self.messages: list[Message] = [dict(message) for message in opening] if has_token_ids else list(self.guards.over(opening))
        continues = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        shown = template.render(self.messages, continues=continues)
        begun_text = self.messages.pop()["content"] if continues else None
        self._prefill = template.prefill(self.messages)
        self.opening_ids = tuple(template.encode(shown, self.guards) if token_ids is None else token_ids)
        self.num_environment_tokens = 0
        context = ContextTokens(self.opening_ids)
        self._contexts.append(context)
        # The opening is a turn in which nothing was sampled.
        root = SessionTurn(parent=None, context=context, before=[], text=shown, span=context.add_span((), (), 0, None))
        self.turns.append(root)
        self._turn = self._turn_after(root, "", self._prefill if begun_text is None else begun_text)

    @property
    def ids(self) -> list[int]:
        """Token IDs so far of the context in which the last turn was sampled, or in which the next one is."""
        return self._turn.before if self._turn.span is None else self._turn.token_ids

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in all contexts."""
        return sum(span.end - span.begin for context in self._contexts for span in context.spans)

    def add_turn(self, sampled: SampledTurn) -> str:
        """Append a turn of the model.

        Returns:
            The text of the turn without the end-of-turn token.
        """
        self._turn.is_read = True
        text = self.add(self._turn, sampled)
        self.messages.append({"role": "assistant", "content": self._turn.content})
        return text

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages of the environment, with the template's text around them and the next generation prompt.

        Args:
            messages: The messages, without guards.
        """
        last, index = self._turn, len(self.messages) - 1
        self.messages += self.guards.over(messages)
        parent, rest = self.match(self.messages, last, index)
        self._turn = self._turn_after(parent, rest, self._prefill)
        if parent is last:
            self.num_environment_tokens += len(self.ids) - len(last.token_ids)
        else:  # the next turn is trained in the context that it is sampled in, which is the one at inference time
            tail = tail_after(self.template, self.messages, index)
            self.num_environment_tokens += len(self.template.encode(rest if tail is None else tail, self.guards))

    def _turn_after(self, parent: SessionTurn | None, rest: str, prefill: str) -> SessionTurn:
        context = self.context_after(parent)
        if parent is not None:
            parent.is_continued = True
        return SessionTurn(parent=parent, context=context, before=self.tokens_after(parent, rest), text=rest, prefill=prefill)

    def finished(self) -> TokenizedTrajectory:
        """Return the concatenated contexts that have sampled tokens, or the opening if there are none."""
        return super().finished() or without_turns(self.opening_ids)


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
