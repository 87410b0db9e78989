"""Checks of the rows of a data set before training: valid prompts, images, token lengths.

A data set is checked as a whole before a run begins (`data.prompts`), or block by block during the run (`data.streamed`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from megatron_grpo.core.base.cleanup import run_in_thread
from megatron_grpo.core.base.errors import ConfigError, Problem, one_line
from megatron_grpo.core.images import ImageProcessorSpec, require_pillow
from megatron_grpo.core.types import Image
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data.chat import TAG, PromptEncoder, Raw, unread_names
from megatron_grpo.run.data.files import IMAGE_COLUMNS, NAMED_ROWS, TEMPLATE_COLUMNS, ConcatRows, Row, images_of_row, split_count
from megatron_grpo.run.data.tokens import TokenLists

if TYPE_CHECKING:
    from megatron_grpo.run.data.image_dataset import ImageStore

BLIND = "streaming supports text only: the sampler needs the largest number of images per prompt, which requires reading all rows"
SLOWEST = 60.0  # seconds allowed for tokenizing one prompt; the longest take some hundredths of a second
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # columns that hold media by common convention
_OWN_SOURCE = ("image", "image_url", "url", "path", "base64")
Encode = Callable[..., Sequence[int]]  # takes a prompt, and its images if it has any
_FORMS = {"system": (str, "a string"), "tools": (list, "a list of JSON schemas"), "chat_template_kwargs": (dict, "an object")}  # by column
_USES = {  # of columns by name; all others are passed to the rewards
    "prompt": "shown to the model", "messages": "shown to the model, where there is no `prompt`, without a final answer",
    "system": "system message of chats without one", "tools": "shown to the model by the chat template, for chats",
    "chat_template_kwargs": "arguments of the chat template, for chats", "images": "shown to the model", "image": "shown to the model",
    **dict.fromkeys(("completion", "completions", "completion_ids", "trainer_state"), "not passed to rewards, which get this run's own"),
}  # fmt: skip
_IDLE = {  # columns that change prompts or episodes in other systems, and what does so here
    "history": "earlier turns belong into `messages`", "documents": "write them into the prompt", "chat_template": "the model's is used",
    "env_class": "use environment", "agent_name": "use environment or agent", "tools_kwargs": "use environment or tools",
}  # fmt: skip
_PROMPTS = "question problem query instruction input text conversation dialog chat".split()  # columns of prompts elsewhere
_NOT_COLUMNS = frozenset({"prompt", "messages", "completion", "completions", "completion_ids", "trainer_state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset:
    """A data set whose rows have been checked to hold prompts. `keep` maps a prompt's index to its row in the file.

    Args:
        keep: Indices of the rows that are kept, int64 [number of prompts].
        longest_prompt: Tokens, after truncation; None before `check_lengths`.
        tokens: Of every row of the file; None before `check_lengths`.
        digest: The fingerprint, if known.
        image_store: Images of the file's rows; None for a text model or rows without images.
        is_beginning: True if more rows follow, read during the run (streaming).
        named: Number of rows of the file that have a column, by column name.
        filled: Number of rows of the file with a value in a column that is neither null nor empty, by column name.
        nan: Number of rows of the file with NaN in a column, by column name.
        num_strings: Rows of the file with a string as prompt.
        num_unused_messages: Rows of the file with `messages` beside `prompt`.
    """

    rows: ConcatRows
    keep: np.ndarray
    longest_prompt: int | None
    tokens: TokenLists | None = None
    digest: str | None = None
    image_store: ImageStore | None = None
    is_beginning: bool = False
    named: Mapping[str, int] = field(default_factory=dict)
    filled: Mapping[str, int] = field(default_factory=dict)
    nan: Mapping[str, int] = field(default_factory=dict)
    num_strings: int = 0
    num_unused_messages: int = 0

    def __len__(self) -> int:
        return len(self.keep)

    def row(self, index: int) -> Row:
        """Return the row of the prompt at `index`.

        Args:
            index: Index of the prompt, from 0.
        """
        return self.rows[int(self.keep[index])]

    def raw(self, index: int) -> Raw:
        """Return the prompt at `index`: a string or chat messages."""
        return raw_prompt(self.row(index))

    def images(self, index: int) -> tuple[Image, ...]:
        """Return the images of the prompt at `index`. Raises ConfigError if one is no longer usable."""
        return self.image_store.images(int(self.keep[index])) if self.image_store is not None else ()

    def shown(self, index: int) -> list[str]:
        """Return identifiers that distinguish the images of a prompt from others, without opening them."""
        return self.image_store.identity(int(self.keep[index])) if self.image_store is not None else []

    @property
    def max_images(self) -> int:
        """Largest number of images in one prompt."""
        return int(self.image_store.counts[self.keep].max()) if self.image_store is not None and len(self.keep) else 0

    def columns(self, index: int) -> dict[str, Any]:
        """Return the columns that are passed to the rewards, by name."""
        return {name: None if _is_nan(value) else value for name, value in self.row(index).items() if name not in _NOT_COLUMNS}

    def template_columns(self, index: int) -> dict[str, Any]:
        """Return the values of a row that its chat template receives besides those of the settings: `tools`, `chat_template_kwargs`."""
        row = self.row(index)
        own = {name: row[name] for name in TEMPLATE_COLUMNS if isinstance(row.get(name), (list, dict)) and row[name]}
        return {} if isinstance(raw_prompt(row), str) else own

    def prompt_key(self, index: int) -> str:
        """Return a text that is equal for prompts that are equal, with their images."""
        return json.dumps([self.raw(index), self.shown(index)], sort_keys=True, default=str)

    def uses(self) -> dict[str, str]:
        """Return what each column is used for, with the number of rows that have a value, by column name."""
        uses = {name: _USES.get(name, "passed to the reward functions") for name in self.named}
        return {name: f"{self.filled.get(name, 0)} of {len(self.rows)} rows: {use}" for name, use in uses.items()}

    def fingerprint(self) -> str:
        """Return the SHA-256 of all rows in order and of all columns, including rows that were left out for their length."""
        if self.digest is not None:
            return self.digest
        digest = hashlib.sha256()
        for number, row in enumerate(self.rows):
            digest.update(serialize_row(row))
            if self.image_store is not None:
                digest.update(json.dumps(self.image_store.num_bytes(number)).encode())
        return digest.hexdigest()

    def described(self, digits: int) -> str:
        """Return the number of rows and the beginning of their fingerprint, for checkpoints and messages.

        Args:
            digits: Number of digits of the fingerprint.
        """
        first = "first " if self.is_beginning else ""
        return f"{first}{len(self.rows)} rows, {self.fingerprint()[:digits]}"

    def column_names(self) -> tuple[str, ...]:
        """Return the columns that at least one row has and that are passed to the rewards."""
        return tuple(name for name in self.named if name not in _NOT_COLUMNS)

    def nested_names(self) -> list[str]:
        """Return the values inside columns of the first row, with dots between the names, as the setting `columns` takes them."""
        return [f"{name}.{key}" for name, value in self.columns(0).items() if isinstance(value, Mapping) for key in value]

    def without(self, names: Sequence[str]) -> str:
        """Describe the rows that have none of the given columns, like `20 of 40 rows (data.jsonl line 2, ...)`.

        Returns:
            The description; "" if every row has one of the columns, even if its value is null.
        """
        if any(self.named.get(name) == len(self.rows) for name in names):
            return ""
        missing = [int(row) for row in self.keep if not self.rows[int(row)].keys() & set(names)]
        return f"{len(missing)} of {len(self)} rows ({_places(self.rows, missing)})" if missing else ""


def serialize_row(row: Mapping[str, Any]) -> bytes:
    """Serialize all columns of a row to bytes. Equal rows give equal bytes in every process."""
    return json.dumps(row, sort_keys=True, default=_described).encode() + b"\n"


def _described(value: Any) -> str:
    """Represent a value that JSON cannot, in the same way in every process: never by the address of an object."""
    if isinstance(value, (bytes, bytearray)):
        return hashlib.sha256(value).hexdigest()
    if hasattr(value, "tobytes"):  # an array or a decoded image
        return f"{type(value).__name__} {getattr(value, 'size', '')} {hashlib.sha256(value.tobytes()).hexdigest()}"
    text = str(value)
    return type(value).__name__ if f"at {id(value):#x}" in text.lower() else text


def check_rows(
    rows: ConcatRows,
    cfg: DataConfig,
    names: Sequence[str],
    *,
    flag: str = "dataset",
    image_spec: ImageProcessorSpec | None = None,
    is_blind: bool = True,
) -> PromptDataset:
    """Check that every row holds a prompt, and with `streaming` no image. Needs no tokenizer and opens no image.

    Args:
        image_spec: Image processor of the model, if it is a vision-language model.
        is_blind: Whether the model takes text only. False without `image_spec` means that the model is unknown.

    Returns:
        The rows, with an ImageStore if the model takes images and some rows have them.

    Raises:
        ConfigError: With every kind of fault, the number of rows that have it, and the first of these rows by file and line.
    """
    is_blind = is_blind and image_spec is None
    faults: dict[str, list[int]] = {}
    num_showing, strings, unused = 0, 0, 0
    names_found, filled, nan = Counter[str](), Counter[str](), Counter[str]()
    for index in range(len(rows)):
        row = rows[index]
        names_found.update(row.keys())
        nan.update(name for name, value in row.items() if _is_nan(value))
        filled.update(name for name, value in row.items() if _is_filled(value) and not _is_nan(value))
        strings += isinstance(row.get("prompt"), str)
        unused += row.get("prompt") is not None and _is_filled(row.get("messages"))
        fault = _fault(row, is_blind=is_blind) or (None if is_blind else _fault_of_places(row, cfg.limit_images))
        if fault is not None:
            faults.setdefault(fault, []).append(index)
        num_showing += bool(images_of_row(row))
    problems = [_problem(flag, rows, indices, fault) for fault, indices in faults.items()]
    image_store = None
    if image_spec is not None and num_showing:
        from megatron_grpo.run.data.image_dataset import ImageStore

        if missing := require_pillow():
            problems.append(Problem(flags=(flag,), message=missing))
        if cfg.truncation_strategy == "left":
            message = (
                f"truncation_strategy left cannot truncate prompts with images, and {num_showing} of {len(rows)} rows have images. "
                "Use delete or raise."
            )
            nearest = {"truncation_strategy": ["delete", "raise"]}
            problems.append(Problem(flags=("truncation_strategy",), message=message, nearest=nearest))
        name = split_count(names[0])[0]
        if len(names) > 1 and not cfg.data_root:
            message = f"dataset names {len(names)} data sets with images; their image paths need one common directory. Set data_root."
            problems.append(Problem(flags=("data_root", flag), message=message))
        root = cfg.data_root or (name if Path(name).is_dir() else Path(name).parent if Path(name).exists() else ".")
        image_store = ImageStore(rows, image_spec, root=Path(root).absolute(), flag=flag)
    if problems:
        raise ConfigError(problems)
    counts: dict[str, Any] = {"named": names_found, "filled": filled, "nan": nan, "num_strings": strings, "num_unused_messages": unused}
    prompts = PromptDataset(rows=rows, keep=np.arange(len(rows)), longest_prompt=None, image_store=image_store, **counts)
    if is_streamed(cfg, flag):
        check_without_images(prompts, flag, BLIND)
    return prompts


def is_streamed(cfg: DataConfig, flag: str) -> bool:
    """Return whether rows are read during the run. Evaluations use every row, so held-out sets are read before it."""
    return cfg.streaming and flag == "dataset"


def spread_indices(size: int, at_most: int) -> Sequence[int]:
    """Return up to `at_most` evenly spaced indices of `size` items."""
    return range(size) if size <= at_most else [round(i * (size - 1) / max(1, at_most - 1)) for i in range(at_most)]


def check_images(prompts: PromptDataset, *, at_most: int | None = None) -> None:
    """Open and decode the images of the rows.

    Args:
        at_most: If given, check only this many evenly spaced rows.

    Raises:
        ConfigError: If some images cannot be used.
    """
    if prompts.image_store is None:
        return
    rows = np.flatnonzero(prompts.image_store.counts)
    if problems := prompts.image_store.faults(rows[spread_indices(len(rows), at_most or len(rows))].tolist()):
        raise ConfigError(problems)


def raw_prompt(row: Mapping[str, Any]) -> Raw:
    """Return `prompt`, or else `messages` without a final assistant message. A chat begins with the row's `system`, if it has one.

    So a chat data set for supervised training can be used unchanged.
    """
    raw = row.get("prompt")
    if raw is None:
        messages = row["messages"]
        raw = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    system = row.get("system")
    has_own = not isinstance(raw, str) and raw[0]["role"] != "system" and isinstance(system, str) and system
    return [{"role": "system", "content": system}, *raw] if has_own else raw


def check_lengths(
    prompts: PromptDataset,
    encode: Encode,
    cfg: DataConfig,
    *,
    flag: str = "dataset",
    tokens: TokenLists | None = None,
    may_be_none: bool = False,
) -> PromptDataset:
    """Apply max_prompt_length and truncation_strategy.

    Args:
        tokens: Token IDs of every row, if available; otherwise every prompt is encoded once.
        may_be_none: Whether it is acceptable that all prompts are too long.

    Returns:
        The rows that remain, with their token IDs and the longest prompt.

    Raises:
        ConfigError: If a prompt has no tokens, if no prompt remains (unless `may_be_none`), or, with `raise`, if a prompt is too long.
    """
    # Values below one are reported by the checks of the settings.
    limit = cfg.max_prompt_length if (cfg.max_prompt_length or 0) >= 1 else None
    tokens = tokens or tokenised(prompts, encode, flag)
    lengths = tokens.lengths
    empty = np.flatnonzero(lengths == 0)
    too_long = np.flatnonzero(lengths > limit) if limit is not None else np.empty(0, dtype=np.int64)
    problems = []
    if len(empty):
        problems.append(_problem(flag, prompts.rows, prompts.keep[empty], "have a prompt without tokens"))
    if len(too_long) and cfg.truncation_strategy == "raise":
        longest = int(lengths.max())
        message = f"have a prompt longer than max_prompt_length ({limit}) tokens; the longest has {longest}"
        problem = _problem(flag, prompts.rows, prompts.keep[too_long], message)
        advice = f" Use max_prompt_length {longest}, or truncation_strategy delete (leaves {len(prompts) - len(too_long)} rows) or left."
        flags = ("max_prompt_length", "truncation_strategy", flag)
        nearest: dict[str, list[Any]] = {"max_prompt_length": [longest], "truncation_strategy": ["delete", "left"]}
        problems.append(Problem(flags=flags, message=problem.message + advice, nearest=nearest))
    if problems:
        raise ConfigError(problems)
    if cfg.truncation_strategy == "delete" and len(too_long):
        within_limit = np.flatnonzero(lengths <= limit)
        if not len(within_limit) and not may_be_none:
            message = f"truncation_strategy delete leaves no rows: all {len(lengths)} prompts are longer than max_prompt_length ({limit}); \
the shortest has {int(lengths.min())} tokens."
            nearest = {"max_prompt_length": [int(lengths.max())]}
            raise ConfigError([Problem(flags=("max_prompt_length", flag), message=message, nearest=nearest)])
        return replace(prompts, keep=prompts.keep[within_limit], longest_prompt=int(lengths[within_limit].max(initial=0)), tokens=tokens)
    return replace(prompts, longest_prompt=int(lengths.max()), tokens=tokens)


def tokenised(prompts: PromptDataset, encode: Encode, flag: str, *, seconds: float = SLOWEST) -> TokenLists:
    """Tokenize every prompt.

    A chat template is a program from the author of the model. It runs in a thread, so that an endless loop can be left behind there.

    Raises:
        ConfigError: If the chat template rejects prompts, or does not finish a prompt within the time limit.
    """
    token_ids: list[np.ndarray] = []
    refusals: dict[str, list[int]] = {}
    current, last_seen = [0], -1

    def work() -> None:
        for index in range(len(prompts)):
            current[0] = index
            try:
                token_ids.append(np.asarray(encoded(prompts, encode, index), dtype=np.int32))
            except Exception as error:  # noqa: BLE001 - any exception of a template is reported for its row
                reason = f"raise an error in the model's tokenizer or chat template ({type(error).__name__}: {one_line(error)})"
                refusals.setdefault(reason, []).append(index)

    worker = run_in_thread(work, name="chat-template")
    while not worker.done() and last_seen != current[0]:
        last_seen = current[0]
        wait([worker], seconds)
    if not worker.done():
        message = (
            f"The model's chat template or tokenizer did not finish within {seconds:g} s for "
            f"{prompts.rows.place(int(prompts.keep[last_seen]))}. Check both; a chat template is code that is distributed with the model."
        )
        raise ConfigError([Problem(flags=("model", flag), message=message)])
    worker.result()
    if refusals:
        raise ConfigError([_problem(flag, prompts.rows, prompts.keep[indices], fault) for fault, indices in refusals.items()])
    return TokenLists.from_rows(token_ids)


def encoded(prompts: PromptDataset, encode: Encode, index: int) -> Sequence[int]:
    """Return the token IDs of the prompt at `index`.

    Args:
        index: Index of the prompt.
    """
    raw, images = prompts.raw(index), prompts.images(index)
    if row_columns := prompts.template_columns(index):
        encoder = cast(PromptEncoder, encode)
        options = {**encoder.options, **row_columns.get("chat_template_kwargs", {})}
        encode = replace(encoder, tools=row_columns.get("tools", encoder.tools), options=options)
    return encode(raw, images) if images else encode(raw)


def _fault(row: Mapping[str, Any], *, is_blind: bool) -> str | None:
    """Describe what is wrong with a row, as the end of a sentence whose subject is the rows; None for a valid row."""
    prompt, messages = row.get("prompt"), row.get("messages")
    filled = [name for name in _MEDIA if _is_filled(row.get(name)) and (is_blind or name not in IMAGE_COLUMNS)]
    if filled:
        supported = "text" if is_blind else "text and images"
        return (
            f"have values in `{'`, `'.join(filled)}`, which would not be passed to the model: training uses {supported} only; remove "
            "that column"
        )
    if prompt is None and messages is None:
        return f"have neither `prompt` nor `messages`; the first has columns {', '.join(map(repr, row)) or '(none)'}{_advice(row)}"
    if prompt is None and isinstance(messages, str):
        return "have `messages` of type str; expected a list of {role, content}"
    value = messages if prompt is None else prompt
    name = "messages" if prompt is None else "prompt"
    if isinstance(value, str):
        return None if value else "have an empty `prompt`"
    if not isinstance(value, Sequence):
        return f"have a `{name}` of type {type(value).__name__}; expected a string or a list of chat messages"
    if not value or (prompt is None and len(value) == 1 and isinstance(value[0], Mapping) and value[0].get("role") == "assistant"):
        return f"have `{name}` without a message to respond to"
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"have a message in `{name}` without `role` or `content`"
        if fault := _content_fault(message, is_blind=is_blind):
            return f"have a message in `{name}` {fault}"
    if value[0]["role"] == "system" and isinstance(row.get("system"), str) and row["system"] not in ("", value[0]["content"]):
        return "have a `system` that is not the system message of their chat. Remove one of them"
    for column, (form, expected) in _FORMS.items():
        if _is_filled(row.get(column)) and not _is_nan(row[column]) and not isinstance(row[column], form):
            return f"have a `{column}` of type {type(row[column]).__name__}; for chats expected {expected}. Rename it if it is for rewards"
    return None


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _advice(row: Mapping[str, Any]) -> str:
    """Return what to type for rows without a prompt, as the end of a sentence; "" if that is unknown."""
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in ("prompt", "messages") if key in value]
    if names := [*(name for name in _PROMPTS if name in row), *inner]:
        return f". Use --columns {names[0]}=prompt"
    lists = [name for name, value in row.items() if isinstance(value, list) and value and isinstance(value[0], Mapping)]
    return f". If `{lists[0]}` is the list of rows: jq -c '.{lists[0]}[]' in.json > rows.jsonl" if lists else ""


def _is_filled(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _fault_of_places(row: Mapping[str, Any], limit: int | None) -> str | None:
    """Check, for a vision-language model, that the row has one placeholder per image. Expects a row whose prompt is valid."""
    num_images, num_placeholders = len(images_of_row(row)), num_places(raw_prompt(row))
    if num_images != num_placeholders:
        return (
            f"have {num_images} image(s) in `images` and {num_placeholders} placeholder(s) (<image> in a text, or a part of type image); "
            "each image needs one placeholder, in the same order"
        )
    if limit is not None and num_images > limit:
        return f"have {num_images} images, more than limit_images ({limit})"
    return None


def num_places(raw: Any) -> int:
    """Return the number of image placeholders in a prompt: parts of type image, and `<image>` tags in its texts."""
    if isinstance(raw, str):
        return raw.count(TAG)
    return sum(_places_in(message.get("content")) for message in raw)


def _places_in(content: Any) -> int:
    if isinstance(content, str):
        return content.count(TAG)
    if not isinstance(content, (list, tuple)):
        return 0
    return sum(1 if part.get("type") == "image" else str(part.get("text") or "").count(TAG) for part in content)


def _content_fault(message: Mapping[str, Any], *, is_blind: bool) -> str | None:
    """Detect content that a chat template for text would drop, or print in Python's notation."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, Sequence):
        return f"whose `content` is of type {type(content).__name__}; expected a string or a list of text parts"
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    supported_kinds = ("text",) if is_blind else ("text", "image")
    unsupported = sorted({str(kind) for kind in kinds if kind not in supported_kinds})
    if unsupported:
        supported = "text" if is_blind else "text and images"
        return f"with a part of type {', '.join(unsupported)}, which would not be passed to the model: training uses {supported} only"
    if any(part["type"] == "image" and any(part.get(name) is not None for name in _OWN_SOURCE) for part in content):
        return "with a part of type image that contains the image; move it to the column `images`, in the order of the parts"
    if not all(isinstance(part.get("text"), str) for part in content if part["type"] == "text"):
        return "with a text part without `text`"
    return None


def _problem(flag: str, rows: ConcatRows, indices: Sequence[int] | np.ndarray, fault: str) -> Problem:
    return Problem(flags=(flag,), message=f"{len(indices)} of {len(rows)} rows {fault}: {_places(rows, indices)}.")


def _places(rows: ConcatRows, indices: Sequence[int] | np.ndarray) -> str:
    return ", ".join(rows.place(int(index)) for index in indices[:NAMED_ROWS]) + (", ..." if len(indices) > NAMED_ROWS else "")


def check_for_episodes(rows: PromptDataset, flag: str) -> None:
    """Check that all prompts are chats without images, as environments and tools require.

    Raises:
        ConfigError: If a prompt is a string or has images.
    """
    check_without_images(rows, flag, "multi-turn episodes support text only: later turns would not include the images")
    fault = 'have a string prompt, but environments and tools need chat messages; write [{"role": "user", "content": ...}]'
    _refuse(rows, flag, fault, lambda index: isinstance(rows.raw(index), str))
    fault = f"have {' or '.join(f'`{name}`' for name in TEMPLATE_COLUMNS)}, but episodes are rendered with those of the settings"
    _refuse(rows, flag, fault, rows.template_columns)


def _refuse(rows: PromptDataset, flag: str, fault: str, has_fault: Callable[[int], object]) -> None:
    """Raise ConfigError with the prompts that have a fault, if there are any."""
    if indices := [index for index in range(len(rows)) if has_fault(index)]:
        raise ConfigError([_problem(flag, rows.rows, rows.keep[indices], fault)])


def check_without_images(rows: PromptDataset, flag: str, reason: str) -> None:
    """Check that no row has images.

    Raises:
        ConfigError: If a row has images.
    """
    if rows.image_store is not None:
        raise ConfigError([_problem(flag, rows.rows, np.flatnonzero(rows.image_store.counts), f"have images, but {reason}")])


def check_template(rows: PromptDataset, tokenizer: Any, flag: str) -> None:
    """Check that the tokenizer has a chat template if any prompt is a chat, and that it reads what rows have for it.

    Raises:
        ConfigError: If the chat template is missing, or has no variable of such a name.
    """
    if not getattr(tokenizer, "chat_template", None):
        fault = "are chats, but the model's tokenizer has no chat template (a base model?); use string prompts or a chat model"
        _refuse(rows, flag, fault, lambda index: not isinstance(rows.raw(index), str))
        return
    unread: dict[str, list[int]] = {}
    for index in range(len(rows)) if any(rows.filled.get(name) for name in TEMPLATE_COLUMNS) else ():
        columns = rows.template_columns(index)
        for name in unread_names(tokenizer, [*columns.get("chat_template_kwargs", {}), *(["tools"] if "tools" in columns else [])]):
            unread.setdefault(f"have `{name}`, of which the model's chat template has no variable", []).append(int(rows.keep[index]))
    if unread:
        raise ConfigError([_problem(flag, rows.rows, indices, fault) for fault, indices in unread.items()])


def find_notes(rows: PromptDataset, cfg: DataConfig, flag: str) -> Iterator[str]:
    """Yield sentences about columns and settings that do not change prompts as someone may expect, and about rows that are left out."""
    num_rows = len(rows.rows)
    for name, count in rows.nan.items():
        yield f"{flag}: NaN in `{name}` is read as null ({count} of {num_rows} rows)."
    if rows.num_unused_messages:
        yield f"{flag}: `messages` is not used in {rows.num_unused_messages} of {num_rows} rows, which have a `prompt`."
    strings = f"{rows.num_strings} of {num_rows} prompts are strings, and the chat template renders chats alone"
    advice = {**(dict.fromkeys(_FORMS, strings) if rows.num_strings else {}), **_IDLE}
    yield from (f"{flag}: `{name}` does not change the prompt: {text}." for name, text in advice.items() if rows.filled.get(name))
    raws = (rows.raw(index) for index in range(len(rows)))
    if cfg.system is not None and all(isinstance(raw, str) or raw[0]["role"] == "system" for raw in raws):
        yield f"system has no effect on {flag}: all prompts are strings, or begin with a system message."
    settings = {"enable_thinking": cfg.enable_thinking, "chat_template_kwargs": cfg.chat_template_kwargs or None}
    for name, value in settings.items():
        if value is not None and rows.num_strings == num_rows:
            yield f"{name} has no effect on {flag}: all prompts are strings, which the chat template does not render."
    if len(rows) < num_rows:
        yield f"{flag}: {num_rows - len(rows)} of {num_rows} prompts are longer than max_prompt_length and are left out."


def find_shared(rows: PromptDataset, held_out: PromptDataset, flag: str) -> Iterator[str]:
    """Yield a sentence if prompts of a held-out set are in the training set too."""
    keys = [hash(held_out.prompt_key(index)) for index in range(len(held_out))]
    shared = set(keys).intersection(hash(rows.prompt_key(index)) for index in range(len(rows)))
    if count := sum(key in shared for key in keys):
        among = "the first rows of the training set" if rows.is_beginning else "the training set"
        yield f"{flag}: {count} of {len(keys)} held-out prompts are in {among} too. Use another split or file to measure what is new."
