"""Convert data set prompts (strings or chat messages) to prompt tokens, and completion text to the format that rewards receive.

Both follow TRL: a string is tokenized unchanged, with the special tokens that the tokenizer adds at its beginning; messages go through the
model's chat template. A reward receives a string for a string prompt, and `[{"role": "assistant", "content": ...}]` for messages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, first_line, one_line, problem_with
from megatron_grpo.core.base.files import process_lock, read_object
from megatron_grpo.run.config import remote_code

if TYPE_CHECKING:
    from megatron_grpo.core.images import ImageProcessorSpec
    from megatron_grpo.core.types import Image
    from megatron_grpo.run.config.settings import DataConfig

logger = logging.getLogger(__name__)

TAG = "<image>"  # Megatron-SWIFT's image placeholder in a text
Raw = str | Sequence[Mapping[str, Any]]
PATIENCE = 120.0  # seconds that a rank waits for another rank that loads a tokenizer with custom code


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "model", warns: bool = True) -> Any:
    """Load the tokenizer of a Hugging Face checkpoint.

    Args:
        path: Directory or Hub name.
        trust_remote_code: Whether code in the directory may run. The code is named in a warning before it runs; there is no interactive
            question.
        flag: Setting that names the checkpoint, for error messages.
        warns: Whether to log that warning; False if the caller has already done so.

    Raises:
        ConfigError: If there is no tokenizer that can be loaded, or custom code is needed and not trusted.
    """
    if problem := remote_code.find_code_problem(Path(path), is_trusted=trust_remote_code, flag=flag):
        raise ConfigError([problem])
    if trust_remote_code and warns:
        _warn_once(path)
    from transformers import AutoTokenizer  # takes a second to import, which `plan` must not spend

    try:
        with _copied_alone() if trust_remote_code else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = one_line(error, first_line)
        if type(error).__name__.startswith("StrictDataclass"):  # transformers also reads config.json, whose fields are inconsistent
            reason = one_line(error).strip().splitlines()[-1].strip()
            raise config_error(flag, f"{flag} {path!r}: transformers cannot load its config.json: {reason}") from error
        reason = reason if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {reason}"
        raise config_error(flag, f"{flag} {path!r} has no tokenizer that can be loaded: {reason}") from error
    # transformers returns an empty tokenizer if its files are missing.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise config_error(flag, f"{flag} {path!r} has no tokenizer: its files (tokenizer.json, ...) are missing.")
    return tokenizer


@cache
def _warn_once(path: str) -> None:
    warning = remote_code.make_code_warning(Path(path))
    if warning and launcher.read().is_logging_rank:
        logger.warning("%s", warning)


@contextmanager
def _copied_alone() -> Iterator[None]:
    """Let one rank at a time load custom code.

    transformers copies the code to its cache and runs the copy; ranks doing so at the same time would read half-written files.
    """
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with process_lock(folder / ".megatron_grpo.lock", patience=PATIENCE):
        yield


class TemplateClock:
    """The function `strftime_now` of chat templates, at midnight of one day.

    All ranks, epochs and continuations of a run render the same prompts, whenever they do.

    Args:
        day: The day, like 2026-11-28.
    """

    def __init__(self, day: str):
        self.day = day

    def __call__(self, form: str) -> str:
        return datetime.fromisoformat(self.day).strftime(form)


def find_clock(tokenizer: Any) -> TemplateClock | None:
    """Return the clock that a tokenizer's chat template reads: at first that of today. None if the template prints no time.

    Args:
        tokenizer: Tokenizer of the model, or None.
    """
    if "strftime_now" not in str(getattr(tokenizer, "chat_template", "")):
        return None
    if not hasattr(tokenizer, "template_clock"):
        tokenizer.template_clock = TemplateClock(date.today().isoformat())
    clock: TemplateClock = tokenizer.template_clock
    return clock


def clock_options(tokenizer: Any) -> dict[str, Any]:
    """Return the options of a chat template that make it read the tokenizer's clock; none if it prints no time."""
    clock = find_clock(tokenizer)
    return {} if clock is None else {"strftime_now": clock}


def fingerprint_vocabulary(tokenizer: Any) -> str:
    """Return a fingerprint of the mapping from token IDs to tokens.

    Two models with equal fingerprints interpret the same token IDs alike, whatever their files.
    """
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def unread_names(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Return the variables that the chat template never names, so that they would have no effect."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = " ".join(template.values()) if isinstance(template, dict) else template
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


def read_end_ids(model_path: Path, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> frozenset[int]:
    """Return the token IDs at which vLLM ends a completion or a turn.

    Args:
        model_path: Directory of the model, with `generation_config.json` or `config.json`.
        tokenizer: Its tokenizer, whose EOS token is one of them.
        stop_token_ids: Further token IDs from the settings.
    """
    end_ids = {*stop_token_ids}
    for name in ("generation_config.json", "config.json"):
        if (model_path / name).is_file():
            model_ids = read_object(model_path / name).get("eos_token_id")  # what is no JSON is reported by those who read all of it
            end_ids |= {model_ids} if isinstance(model_ids, int) else {*(model_ids or ())}
            break
    if tokenizer.eos_token_id is not None:
        end_ids.add(tokenizer.eos_token_id)
    return frozenset(end_ids)


_OPENED = re.compile(r"<([A-Za-z_][\w-]*)>\s*\Z")
READ_TAGS = ("think", "answer")  # tags that built-in rewards read, besides `format_tags`


def find_opened_tag(prompt: str) -> str | None:
    """Return the name of the tag with which a prompt ends, as `think` of a template that opens `<think>`; None if there is none."""
    match = _OPENED.search(prompt)
    return match[1] if match else None


def end_of_prompt(prompt: Any, opening: str) -> str:
    """Return the text that a completion of this prompt continues, or its end.

    Args:
        prompt: A string, or chat messages; the last one may be an answer that the model continues.
        opening: A chat as the chat template renders it before an answer.
    """
    if isinstance(prompt, str):
        return prompt
    return str(text_of_parts(prompt[-1]["content"])) if prompt and prompt[-1]["role"] == "assistant" else opening


class SpecialTokens:
    """The special tokens of a tokenizer, and what they mean where text meets tokens: in prompts, stop strings and completions.

    Attributes:
        ids: Token ID of each special token, by its text.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # `all_special_tokens` is not enough: it lists tokens with a role (end, padding), and may lack the one that opens a turn.
        added = getattr(tokenizer, "added_tokens_decoder", {})  # which a tokenizer with code of its own may lack
        with_role = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
        self.ids: dict[str, int] = with_role | {str(token): number for number, token in added.items() if token.special}

    def split_stop(self, stop: Sequence[str]) -> tuple[list[str], list[int]]:
        """Return (stop strings that text may contain, token IDs of the others).

        Sampled text is searched without special tokens, so a stop string that is one never occurs in it.
        """
        return [text for text in stop if text not in self.ids], [self.ids[text] for text in stop if text in self.ids]

    def stop_problems(self, stop: Sequence[str]) -> Iterator[Problem]:
        """Yield a problem for each stop string that never occurs, because a special token is a part of it."""
        for text in self.split_stop(stop)[0]:
            if token := next((token for token in sorted(self.ids, key=len, reverse=True) if token and token in text), None):
                yield problem_with(
                    ("stop", "generation_kwargs"),
                    f"stop {text!r} contains the special token {token!r}, and completions are searched for stop strings without special "
                    f"tokens, so it would never stop. Use --stop {token!r} alone, or --generation_kwargs skip_special_tokens=false.",
                )

    def hides_tags(self, tags: Sequence[str]) -> bool:
        """Return whether one of these tags, or of `READ_TAGS`, is a special token, which the text of a completion would not contain."""
        return any(mark in self.ids for tag in (*READ_TAGS, *tags) for mark in (f"<{tag}>", f"</{tag}>"))

    def render_opening(self, options: Mapping[str, Any]) -> str:
        """Return a short chat as the chat template renders it before an answer; "" without a template, or if it refuses the chat."""
        return self._render([{"role": "user", "content": _QUESTION}], options, add_generation_prompt=True)

    def find_unended(self, options: Mapping[str, Any], end_ids: Collection[int]) -> str | None:
        """Return a note if the chat template ends an answer with a special token at which sampling does not stop; None if not.

        Args:
            end_ids: Token IDs at which sampling stops.
        """
        chat = [{"role": role, "content": text} for role, text in (("user", _QUESTION), ("assistant", _REPLY), ("user", _QUESTION))]
        token = None
        for messages in (chat[:2], chat):  # the last answer may end with another token, or with none
            ending = self._render(messages, options).partition(_REPLY)[2].lstrip()
            begins = (token for token in sorted(self.ids, key=len, reverse=True) if token and ending.startswith(token))
            token = token or next(begins, None)
        if token is None or self.ids[token] in end_ids:
            return None
        return (
            f"The chat template ends an answer with {token!r} (token {self.ids[token]}), but sampling does not stop at it (a base model?): "
            f"completions would continue behind it, up to max_completion_length. Use --stop_token_ids {self.ids[token]}."
        )

    def _render(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any], **more: Any) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            return ""
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **more, **options)
        except Exception:  # noqa: BLE001 - a template may raise anything; the prompts of the data set show whether it is right
            return ""


_QUESTION, _REPLY = "What is it?", "It is the seventh."


def encode_text(tokenizer: Any, text: str, *, is_open: bool = True) -> list[int]:
    """Encode a text with the special tokens that the tokenizer adds, except those at the beginning that the text has already.

    Args:
        text: The text. A chat that was rendered before begins with the BOS token.
        is_open: Whether the model is to continue the text; then nothing is added at its end, such as an EOS token (`add_eos_token`).
    """
    token_ids = list(tokenizer(text)["input_ids"])
    begin, end = _added(tokenizer)
    if end and is_open:
        token_ids = token_ids[: len(token_ids) - len(end)]
    is_doubled = bool(begin) and token_ids[: 2 * len(begin)] == [*begin, *begin]
    return token_ids[len(begin) :] if is_doubled else token_ids


def decode_completion(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = True, end_ids: Collection[int] = ()) -> str:
    """Decode a completion as vLLM does.

    Args:
        token_ids: Token IDs of the completion.
        skip_special_tokens: Whether special tokens are left out (`generation_kwargs`).
        end_ids: Token IDs that end a completion. Where special tokens stay, the last token is left out if it is one of these.
    """
    is_ended = not skip_special_tokens and bool(token_ids) and token_ids[-1] in end_ids
    text_ids = list(token_ids[:-1] if is_ended else token_ids)
    return tokenizer.decode(text_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=4)
def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token IDs that a tokenizer adds before and behind a text."""
    with_added, alone = (list(tokenizer("a", **options)["input_ids"]) for options in ({}, {"add_special_tokens": False}))
    count = len(with_added) - len(alone)
    begin = next((k for k in range(count + 1) if with_added[k : k + len(alone)] == alone), count)
    return with_added[:begin], with_added[begin + len(alone) :]


def template_messages(
    raw: Sequence[Mapping[str, Any]], *, system: str | None = None, image_spec: ImageProcessorSpec | None = None
) -> list[Mapping[str, Any]]:
    """Return chat messages in the form that the chat template expects.

    Args:
        system: System message to prepend if the messages do not begin with one.
        image_spec: Image processor of the model; None converts content given in parts to plain text.
    """
    read_content = with_parts if image_spec else text_of_parts
    messages: list[Mapping[str, Any]] = [dict(message) | {"content": read_content(message["content"])} for message in raw]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def text_of_parts(content: Any) -> Any:
    """Join content given as text parts to one string with newlines, as vLLM does.

    Most chat templates of text models silently drop a list. `data.checks` has verified that all parts are text.

    Args:
        content: Content of a chat message: a string or a list of text parts.
    """
    return "\n".join(part["text"] for part in content) if isinstance(content, (list, tuple)) else content


def with_parts(content: Any) -> Any:
    """Convert message content to the parts that chat templates of vision-language models expect.

    Each `<image>` tag in a text becomes a part of type image. A string without tags is returned unchanged.
    """
    if not isinstance(content, (str, list, tuple)) or (isinstance(content, str) and TAG not in content):
        return content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [TAG if part.get("type") == "image" else part["text"] for part in parts]
    pieces = [piece for text in texts for piece in re.split(f"({re.escape(TAG)})", text) if piece]
    return [{"type": "image"} if piece == TAG else {"type": "text", "text": piece} for piece in pieces]


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Callable that converts a prompt to token IDs, ready for the model to continue. Used by `PromptStream`.

    Args:
        tokenizer: Tokenizer of the model.
        system: System message, see `template_messages`; has no effect on string prompts.
        options: Extra arguments of the chat template.
        keep_last: Left truncation to this many tokens, or None.
        tools: JSON schemas that the chat template shows.
        image_spec: Image processor of a vision-language model. Each image then takes as many tokens as its size requires.
    """

    tokenizer: Any
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_last: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    image_spec: ImageProcessorSpec | None = None

    @classmethod
    def from_config(
        cls, cfg: DataConfig, tokenizer: Any, image_spec: ImageProcessorSpec | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> PromptEncoder:
        """Create the encoder that the settings of a run describe.

        Args:
            image_spec: Image processor of the model, or None.
            tools: JSON schemas; None is equivalent to an empty list.
        """
        keep_last = cfg.max_prompt_length if cfg.truncation_strategy == "left" else None
        return cls(tokenizer, cfg.system, cfg.template_options, keep_last, tools or (), image_spec)

    def __call__(self, raw: Raw, images: Sequence[Image] = ()) -> tuple[int, ...]:
        token_ids = self.short(raw)
        if self.image_spec is not None:
            from megatron_grpo.run.data.image_dataset import expand_image_tokens  # only for models that take images

            token_ids = tuple(expand_image_tokens(token_ids, images, self.image_spec.image_token))
        return token_ids if self.keep_last is None else token_ids[-self.keep_last :]

    def short(self, raw: Raw) -> tuple[int, ...]:
        """Return the token IDs of a prompt without truncation and with one token per image.

        Messages that end with an assistant turn are left open, so that the model continues that turn (TRL's prefill).
        """
        if isinstance(raw, str):
            if self.image_spec is None:
                return tuple(encode_text(self.tokenizer, raw))
            begin, end = self.image_spec.around
            tokens = self.tokenizer.convert_ids_to_tokens([begin, self.image_spec.image_token, end])
            return tuple(encode_text(self.tokenizer, raw.replace(TAG, "".join(tokens))))
        messages = template_messages(raw, system=self.system, image_spec=self.image_spec)
        prefill = messages[-1]["role"] == "assistant"
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tools=list(self.tools) or None,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **clock_options(self.tokenizer),
            **self.options,
        )
        return tuple(encoded["input_ids"])


def as_completion(raw: Raw, text: str) -> str | list[dict[str, str]]:
    """Return a completion in the format that TRL's reward functions receive.

    Args:
        raw: Prompt of the completion: a string, or chat messages.

    Returns:
        The text for a string prompt, a list of one assistant message for a chat.
    """
    return text if isinstance(raw, str) else [{"role": "assistant", "content": text}]
