"""Owns the way from what a row holds (a string, or chat messages) to prompt tokens, and from a completion's text to what rewards see.

Both follow TRL: a string is tokenised as it stands, with the special tokens the tokenizer itself adds; messages go through the model's own
chat template. A reward gets a string back for a string, and `[{"role": "assistant", "content": ...}]` for messages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base import launcher
from megatron_grpo.base.errors import ConfigError, Problem, config_error, first_line, said_by
from megatron_grpo.base.files import only_one
from megatron_grpo.config import remote_code
from megatron_grpo.data.image_dataset import TAG, expanded, with_parts

if TYPE_CHECKING:
    from megatron_grpo.config.config import DataConfig
    from megatron_grpo.data.image_processing import ImageProcessorSpec
    from megatron_grpo.types import Image

logger = logging.getLogger(__name__)

Raw = str | Sequence[Mapping[str, Any]]
PATIENCE = 120.0  # seconds that a rank waits for another one that loads a tokenizer with code of its own


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "model", warns: bool = True) -> Any:
    """The tokenizer of a Hugging Face checkpoint (directory or Hub name). Raises ConfigError where there is none.

    trust_remote_code: code in the directory may run, and is named before it does. Nobody is ever asked. flag: the setting that names the
    checkpoint. warns: the caller has not named the code already.
    """
    if problem := remote_code.problem_of(Path(path), is_trusted=trust_remote_code, flag=flag):
        raise ConfigError([problem])
    if trust_remote_code and warns:
        _warn_once(path)
    from transformers import AutoTokenizer  # a second of imports that `plan` must not pay

    try:
        with _copied_alone() if trust_remote_code else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = said_by(error, first_line)
        if type(error).__name__.startswith("StrictDataclass"):  # transformers reads config.json too, and its fields do not go together
            reason = said_by(error).strip().splitlines()[-1].strip()
            raise config_error(flag, f"{flag} {path!r}: transformers refuses its config.json: {reason}") from error
        reason = reason if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {reason}"
        raise config_error(flag, f"{flag} {path!r} has no tokenizer that can be loaded: {reason}") from error
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():  # transformers makes an empty one where its files are missing
        raise config_error(flag, f"{flag} {path!r} has no tokenizer: its files (tokenizer.json, ...) are missing.")
    return tokenizer


@cache
def _warn_once(path: str) -> None:
    warning = remote_code.warning_of(Path(path))
    if warning and launcher.read().speaks:
        logger.warning("%s", warning)


@contextmanager
def _copied_alone() -> Iterator[None]:
    """transformers copies a model's code into its cache and runs the copy: ranks that did so together would read halves of files."""
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    folder = Path(HF_MODULES_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / ".megatron_grpo.lock", patience=PATIENCE):
        yield


def vocabulary_of(tokenizer: Any) -> str:
    """A fingerprint of which token id is which word: two models with the same one read the same ids alike, whatever their files."""
    words = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def unread_options(tokenizer: Any, options: Mapping[str, Any]) -> list[Problem]:
    """Of `chat_template_kwargs`, those that the template never names: they would do nothing, and nobody would hear of it."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = " ".join(template.values()) if isinstance(template, dict) else template
    unread = [name for name in options if not re.search(rf"\b{re.escape(name)}\b", text)]
    return [
        Problem(flags=("chat_template_kwargs",), message=f"chat_template_kwargs: nothing in the model's chat template is called {name}.")
        for name in unread
    ]


def opening_of(
    raw: Sequence[Mapping[str, Any]], *, system: str | None = None, eyes: ImageProcessorSpec | None = None
) -> list[Mapping[str, Any]]:
    """Chat messages as the template is to get them. `system` is put before those that have no system message of their own."""
    content_of = with_parts if eyes else text_of_parts
    messages: list[Mapping[str, Any]] = [dict(message) | {"content": content_of(message["content"])} for message in raw]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def text_of_parts(content: Any) -> Any:
    """Content given in parts, which are all text (`data.prompts` has looked), as one string: joined by newlines, as vLLM does.

    Most chat templates of text models drop a list without a word.
    """
    return "\n".join(part["text"] for part in content) if isinstance(content, (list, tuple)) else content


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Token ids of prompts, ready to be continued by the model; what `PromptStream` calls.

    system: see `opening_of`; a string prompt has no place for it. options: handed to the chat template. keep_last: left truncation, to
    so many tokens. tools: JSON schemas that it shows. eyes: of a model that sees; a picture then becomes so many tokens as it has.
    """

    tokenizer: Any
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_last: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    eyes: ImageProcessorSpec | None = None

    @classmethod
    def of(
        cls, cfg: DataConfig, tokenizer: Any, eyes: ImageProcessorSpec | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> PromptEncoder:
        """As a run's settings ask for. tools: None and none are the same to a template."""
        keep_last = cfg.max_prompt_length if cfg.truncation_strategy == "left" else None
        return cls(tokenizer, cfg.system, cfg.template_options, keep_last, tools or (), eyes)

    def __call__(self, raw: Raw, pictures: Sequence[Image] = ()) -> tuple[int, ...]:
        token_ids = self.short(raw)
        if self.eyes is not None:
            token_ids = tuple(expanded(token_ids, pictures, self.eyes.image_token))
        return token_ids if self.keep_last is None else token_ids[-self.keep_last :]

    def short(self, raw: Raw) -> tuple[int, ...]:
        """Of a string, or of chat messages, nothing cut off, and a picture is one token. Messages that end with an assistant turn are left
        open, so that the model continues that turn (TRL's prefill)."""
        if isinstance(raw, str):
            if self.eyes is None:
                return tuple(self.tokenizer(raw)["input_ids"])
            begin, end = self.eyes.around
            tokens = self.tokenizer.convert_ids_to_tokens([begin, self.eyes.image_token, end])
            return tuple(self.tokenizer(raw.replace(TAG, "".join(tokens)))["input_ids"])
        messages = opening_of(raw, system=self.system, eyes=self.eyes)
        prefill = messages[-1]["role"] == "assistant"
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tools=list(self.tools) or None,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            **self.options,
        )
        return tuple(encoded["input_ids"])


def as_completion(raw: Raw, text: str) -> str | list[dict[str, str]]:
    """A completion in the shape that TRL's reward functions get: a string for a string prompt, one assistant message for a chat."""
    return text if isinstance(raw, str) else [{"role": "assistant", "content": text}]
