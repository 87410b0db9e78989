"""What a row must be to be trained on, and what prompts are as tokens: every row is looked at before it is handed out.

A data set is looked at whole before a run begins (`data.prompts`); or block by block, as the run goes (`data.streamed`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.base.cleanup import begun
from megatron_grpo.base.errors import ConfigError, Problem, said_by
from megatron_grpo.config.config import DataConfig
from megatron_grpo.data.chat import Raw
from megatron_grpo.data.files import NAMED_ROWS, Rows, plain_name
from megatron_grpo.data.image_dataset import COLUMNS, ImageStore, num_places, shown_by
from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.data.images import require_pillow
from megatron_grpo.data.tokens import TokenTable
from megatron_grpo.types import Image

SLOWEST = 60.0  # seconds for one prompt; the longest take some hundredths
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # columns that mean this wherever rows with them are trained on
_OWN_SOURCE = ("image", "image_url", "url", "path", "base64")
Encode = Callable[..., Sequence[int]]  # of a prompt, and of its pictures where it has some
_NOT_COLUMNS = frozenset({"prompt", "messages", "completion", "completions", "completion_ids", "trainer_state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """A data set whose rows are known to hold prompts. `keep` maps a prompt's row here to its row in the file."""

    rows: Rows
    keep: np.ndarray  # int64 [number of prompts]
    longest_prompt: int | None  # tokens, after truncation; None before `check_lengths`
    tokens: TokenTable | None = None  # of every row of the file; None before `check_lengths`
    digest: str | None = None  # the fingerprint, where it is known
    album: ImageStore | None = None  # of the file's rows, where the model sees and some of them show something
    is_beginning: bool = False  # more rows follow, which are read as the run goes
    named: Mapping[str, int] = field(default_factory=dict)  # how many rows of the file have a column, by its name

    def __len__(self) -> int:
        return len(self.keep)

    def raw(self, index: int) -> Raw:
        return raw_prompt(self.rows[int(self.keep[index])])

    def pictures(self, index: int) -> tuple[Image, ...]:
        """Raises ConfigError where one cannot be used any more."""
        return self.album.pictures(int(self.keep[index])) if self.album is not None else ()

    def shown(self, index: int) -> list[str]:
        """What tells the pictures of a prompt from others, unopened."""
        return self.album.identity(int(self.keep[index])) if self.album is not None else []

    @property
    def most_pictures(self) -> int:
        """Of a prompt."""
        return int(self.album.counts[self.keep].max()) if self.album is not None and len(self.keep) else 0

    def columns(self, index: int) -> dict[str, Any]:
        """Every column that is handed to the rewards."""
        row = self.rows[int(self.keep[index])]
        return {name: value for name, value in row.items() if name not in _NOT_COLUMNS}

    def fingerprint(self) -> str:
        """SHA-256 of all rows in their order, all columns, those too that were left out for their length."""
        if self.digest is not None:
            return self.digest
        digest = hashlib.sha256()
        for number, row in enumerate(self.rows):
            digest.update(bytes_of(row))
            if self.album is not None:
                digest.update(json.dumps(self.album.num_bytes(number)).encode())
        return digest.hexdigest()

    def described(self, digits: int) -> str:
        """For a checkpoint and for people: how many rows there are, and the beginning of their fingerprint."""
        first = "first " if self.is_beginning else ""
        return f"{first}{len(self.rows)} rows, {self.fingerprint()[:digits]}"

    def column_names(self) -> tuple[str, ...]:
        """Columns that some row has, of those that are handed to the rewards."""
        return tuple(name for name in self.named if name not in _NOT_COLUMNS)

    def without(self, names: Sequence[str]) -> str:
        """`20 of 40 rows (data.jsonl line 2, ...)`: those that have none of these columns. Empty where all have one, be it null."""
        if any(self.named.get(name) == len(self.rows) for name in names):
            return ""
        lacking = [int(row) for row in self.keep if not self.rows[int(row)].keys() & set(names)]
        return f"{len(lacking)} of {len(self)} rows ({_places(self.rows, lacking)})" if lacking else ""


def bytes_of(row: Mapping[str, Any]) -> bytes:
    """Of all columns; equal for equal rows, in every process."""
    return json.dumps(row, sort_keys=True, default=_described).encode() + b"\n"


def _described(value: Any) -> str:
    """What JSON has no word for, in words that are the same in every process: not the address of an object."""
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tobytes"):  # an array, a decoded picture
        return f"{type(value).__name__} {getattr(value, 'size', '')} {hashlib.sha256(value.tobytes()).hexdigest()}"
    text = str(value)
    return type(value).__name__ if f"at {id(value):#x}" in text.lower() else text


def check_rows(
    rows: Rows,
    cfg: DataConfig,
    names: Sequence[str],
    *,
    flag: str = "dataset",
    eyes: ImageProcessorSpec | None = None,
    is_blind: bool = True,
) -> PromptRows:
    """Checks that every row holds a prompt; no tokenizer needed, and no picture opened.

    names: of the data sets that they are of. eyes: of the model, if it sees. is_blind: it does not; without either nobody knows. Raises
    ConfigError with every kind of fault found, each counted, the first rows named by file and line.
    """
    is_blind = is_blind and eyes is None
    faults: dict[str, list[int]] = {}
    num_showing, named = 0, Counter[str]()
    for index in range(len(rows)):
        row = rows[index]
        named.update(row.keys())
        fault = _fault(row, is_blind=is_blind) or (None if is_blind else _fault_of_places(row, cfg.limit_images))
        if fault is not None:
            faults.setdefault(fault, []).append(index)
        num_showing += bool(shown_by(row))
    problems = [_problem(flag, rows, indices, fault) for fault, indices in faults.items()]
    album = None
    if eyes is not None and num_showing:
        if lacking := require_pillow():
            problems.append(Problem(flags=(flag,), message=lacking))
        if cfg.truncation_strategy == "left":
            message = (
                f"truncation_strategy left would cut into pictures, and {num_showing} of {len(rows)} rows show some. Use delete or raise."
            )
            nearest = {"truncation_strategy": ["delete", "raise"]}
            problems.append(Problem(flags=("truncation_strategy",), message=message, nearest=nearest))
        name = plain_name(names[0])
        if len(names) > 1 and not cfg.data_root:
            message = f"{len(names)} data sets show pictures, and paths are inside one directory: name it with data_root."
            problems.append(Problem(flags=("data_root", flag), message=message))
        root = cfg.data_root or (name if Path(name).is_dir() else Path(name).parent if Path(name).exists() else ".")
        album = ImageStore(rows, eyes, root=Path(root).absolute(), flag=flag)
    if problems:
        raise ConfigError(problems)
    return PromptRows(rows=rows, keep=np.arange(len(rows)), longest_prompt=None, album=album, named=named)


def check_pictures(prompts: PromptRows, *, at_most: int | None = None) -> None:
    """Opens the pictures of all rows, or of so many that are evenly spread. Raises ConfigError with those that cannot be used."""
    if prompts.album is None:
        return
    rows = np.flatnonzero(prompts.album.counts)
    if at_most is not None and len(rows) > at_most:
        rows = rows[np.linspace(0, len(rows) - 1, at_most).astype(np.int64)]
    if problems := prompts.album.faults(rows.tolist()):
        raise ConfigError(problems)


def raw_prompt(row: Mapping[str, Any]) -> Raw:
    """`prompt`, or else `messages` without the answer they end with (a chat data set for supervised training can be used as it is)."""
    if row.get("prompt") is not None:
        return row["prompt"]
    messages = row["messages"]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def check_lengths(
    prompts: PromptRows,
    encode: Encode,
    cfg: DataConfig,
    *,
    flag: str = "dataset",
    tokens: TokenTable | None = None,
    may_be_none: bool = False,
) -> PromptRows:
    """Encodes every prompt once, and applies max_prompt_length and truncation_strategy. Returns the rows that remain.

    tokens: of every row, where they have been made. may_be_none: that all are too long is no fault. Raises ConfigError for prompts that
    encode to nothing, and, with `raise`, for those that are too long.
    """
    limit = cfg.max_prompt_length if (cfg.max_prompt_length or 0) >= 1 else None  # less than one is for the settings to say
    tokens = tokens or tokenised(prompts, encode, flag)
    lengths = tokens.lengths
    empty = np.flatnonzero(lengths == 0)
    too_long = np.flatnonzero(lengths > limit) if limit is not None else np.empty(0, dtype=np.int64)
    problems = []
    if len(empty):
        problems.append(_problem(flag, prompts.rows, prompts.keep[empty], "have a prompt of no tokens"))
    if len(too_long) and cfg.truncation_strategy == "raise":
        longest = int(lengths.max())
        message = f"have a prompt of more than max_prompt_length ({limit}) tokens; the longest has {longest}"
        problem = _problem(flag, prompts.rows, prompts.keep[too_long], message)
        advice = f" Use max_prompt_length {longest}, or truncation_strategy delete (leaves {len(prompts) - len(too_long)} rows) or left."
        flags = ("max_prompt_length", "truncation_strategy", flag)
        nearest: dict[str, list[Any]] = {"max_prompt_length": [longest], "truncation_strategy": ["delete", "left"]}
        problems.append(Problem(flags=flags, message=problem.message + advice, nearest=nearest))
    if problems:
        raise ConfigError(problems)
    if cfg.truncation_strategy == "delete" and len(too_long):
        kept = np.flatnonzero(lengths <= limit)
        if not len(kept) and not may_be_none:
            message = f"truncation_strategy delete leaves nothing: all {len(lengths)} prompts are longer than max_prompt_length ({limit}); \
the shortest has {int(lengths.min())} tokens."
            nearest = {"max_prompt_length": [int(lengths.max())]}
            raise ConfigError([Problem(flags=("max_prompt_length", flag), message=message, nearest=nearest)])
        return replace(prompts, keep=prompts.keep[kept], longest_prompt=int(lengths[kept].max(initial=0)), tokens=tokens)
    return replace(prompts, longest_prompt=int(lengths.max()), tokens=tokens)


def tokenised(prompts: PromptRows, encode: Encode, flag: str, *, seconds: float = SLOWEST) -> TokenTable:
    """Tokens of each prompt. Raises ConfigError for prompts that the chat template refuses, and for one without an end.

    A template is a program of whoever made the model. It runs in a thread, so that one that loops for ever is left behind there.
    """
    found: list[np.ndarray] = []
    refused: dict[str, list[int]] = {}
    at, seen = [0], -1

    def work() -> None:
        for index in range(len(prompts)):
            at[0] = index
            try:
                found.append(np.asarray(encoded(prompts, encode, index), dtype=np.int32))
            except Exception as error:  # noqa: BLE001 - what a template raises is about the row that it was given
                why = f"are refused by the model's tokenizer or chat template ({type(error).__name__}: {said_by(error)})"
                refused.setdefault(why, []).append(index)

    worker = begun(work, name="chat-template")
    while not worker.done() and seen != at[0]:
        seen = at[0]
        wait([worker], seconds)
    if not worker.done():
        message = (
            f"The model's chat template, or its tokenizer, has not come to an end after {seconds:g} s with "
            f"{prompts.rows.place(int(prompts.keep[seen]))}. Look at both: the template is a program that came with the model."
        )
        raise ConfigError([Problem(flags=("model", flag), message=message)])
    worker.result()
    if refused:
        raise ConfigError([_problem(flag, prompts.rows, prompts.keep[indices], fault) for fault, indices in refused.items()])
    return TokenTable.of(found)


def encoded(prompts: PromptRows, encode: Encode, index: int) -> Sequence[int]:
    raw, pictures = prompts.raw(index), prompts.pictures(index)
    return encode(raw, pictures) if pictures else encode(raw)


def _fault(row: Mapping[str, Any], *, is_blind: bool) -> str | None:
    """What is wrong with a row, as the end of a sentence whose subject is the rows; None for a good one."""
    prompt, messages = row.get("prompt"), row.get("messages")
    seen = [name for name in _MEDIA if _is_filled(row.get(name)) and (is_blind or name not in COLUMNS)]
    if seen:
        what = "text" if is_blind else "text and pictures"
        return (
            f"have something in `{'`, `'.join(seen)}`, which the model would not see: training is on {what} alone, so leave that column out"
        )
    if prompt is None and messages is None:
        return f"have neither `prompt` nor `messages`; the first has the columns {', '.join(map(repr, row)) or '(none)'}"
    if prompt is None and isinstance(messages, str):
        return "have `messages` that are a string, where a list of {role, content} should be"
    value = messages if prompt is None else prompt
    name = "messages" if prompt is None else "prompt"
    if isinstance(value, str):
        return None if value else "have an empty `prompt`"
    if not isinstance(value, Sequence):
        return f"have a `{name}` of type {type(value).__name__}, where a string or a list of chat messages should be"
    if not value or (prompt is None and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "assistant"):
        return f"have `{name}` with nothing to answer"
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"have a message in `{name}` without `role` or `content`"
        if fault := _content_fault(message, is_blind=is_blind):
            return f"have a message in `{name}` {fault}"
    return None


def _is_filled(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _fault_of_places(row: Mapping[str, Any], limit: int | None) -> str | None:
    """Where a model sees: of a row whose prompt is one."""
    num_pictures, found = len(shown_by(row)), num_places(raw_prompt(row))
    if num_pictures != found:
        return (
            f"have {num_pictures} picture(s) in `images` and {found} place(s) for them (<image> in a text, or a part of type image): "
            "each picture has one place, in their order"
        )
    if limit is not None and num_pictures > limit:
        return f"have {num_pictures} pictures, more than limit_images ({limit})"
    return None


def _content_fault(message: Mapping[str, Any], *, is_blind: bool) -> str | None:
    """What a chat template for text would leave out, or print as Python prints it."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, Sequence):
        return f"whose `content` is of type {type(content).__name__}, where a string or a list of text parts should be"
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    known = ("text",) if is_blind else ("text", "image")
    strange = sorted({str(kind) for kind in kinds if kind not in known})
    if strange:
        what = "text" if is_blind else "text and pictures"
        return f"with a part of type {', '.join(strange)}, which the model would not see: training is on {what} alone"
    if any(part["type"] == "image" and any(part.get(name) is not None for name in _OWN_SOURCE) for part in content):
        return "with a part of type image that names its picture itself: put it into the column `images`, in the order of the parts"
    if not all(isinstance(part.get("text"), str) for part in content if part["type"] == "text"):
        return "with a text part without `text`"
    return None


def _problem(flag: str, rows: Rows, indices: Sequence[int] | np.ndarray, fault: str) -> Problem:
    return Problem(flags=(flag,), message=f"{len(indices)} of {len(rows)} rows {fault}: {_places(rows, indices)}.")


def _places(rows: Rows, indices: Sequence[int] | np.ndarray) -> str:
    return ", ".join(rows.place(int(index)) for index in indices[:NAMED_ROWS]) + (", ..." if len(indices) > NAMED_ROWS else "")


def check_for_episodes(rows: PromptRows, flag: str) -> None:
    """Environments and tools answer in chats, of text alone. Raises ConfigError."""
    check_without_pictures(rows, flag, "episodes of several turns are of text alone: a later turn would not see them")
    strings = [index for index in range(len(rows)) if isinstance(rows.raw(index), str)]
    if strings:
        fault = 'have a string as prompt, and environments and tools answer in chats; write it as [{"role": "user", "content": ...}]'
        raise ConfigError([_problem(flag, rows.rows, strings, fault)])


def check_without_pictures(rows: PromptRows, flag: str, why: str) -> None:
    """Raises ConfigError."""
    if rows.album is not None:
        raise ConfigError([_problem(flag, rows.rows, np.flatnonzero(rows.album.counts), f"show pictures, and {why}")])


def check_template(rows: PromptRows, tokenizer: Any, flag: str) -> None:
    """Chats are written by the model's own chat template. Raises ConfigError where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        chats = [index for index in range(len(rows)) if not isinstance(rows.raw(index), str)]
        if chats:
            fault = "are chats, and the model's tokenizer has no chat template (a base model?); give it string prompts, or a chat model"
            raise ConfigError([_problem(flag, rows.rows, chats, fault)])
