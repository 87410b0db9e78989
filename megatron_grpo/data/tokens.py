"""Prompts as tokens, made once on a machine: a file in the user's cache, which every rank maps into its memory.

A file is named by all that decides what is in it: the rows, the tokenizer with its chat template, the settings, and the versions of the
libraries. So whatever changes finds no file, and is tokenised anew. docs/data.md is the page for users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.base import launcher
from megatron_grpo.base.files import only_one
from megatron_grpo.data.chat import PromptEncoder

logger = logging.getLogger(__name__)

FEW = 2000  # rows up to which a file is not worth it
PATIENCE = 900.0  # seconds that a rank waits for another one that tokenises the same
UNUSED = 90 * 24 * 3600.0  # seconds after which a file that nobody has opened is removed
_MAGIC = b"megatron_grpo tokens 1\n\0"
_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # of a model's folder: what a tokenizer may be read from


class TokenTable(Sequence[tuple[int, ...]]):
    """The token ids of every row. ends: int64 [rows], where each row ends in `tokens`, int32."""

    def __init__(self, ends: np.ndarray, tokens: np.ndarray):
        self.ends, self.tokens = ends, tokens

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> TokenTable:
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(ends, np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]) if rows else np.zeros(0, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]  # a row by its number; slices are not asked for
        begin = int(self.ends[index - 1]) if index else 0
        return tuple(self.tokens[begin : int(self.ends[index])].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        return np.diff(self.ends, prepend=0)


def shared(key: str, make: Callable[[], TokenTable]) -> TokenTable:
    """What `make` gives; or what it gave another rank, or an earlier run, under the same key.

    One process of a machine makes it, and the others wait. A cache that cannot be used is said, and costs only time.
    """
    folder = cache_directory()
    path = folder / f"{key}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _say(folder, error)
        return make()
    found = read(path)
    if found is not None:
        return found
    with only_one(path.with_suffix(".lock"), patience=PATIENCE) as may_write:
        found = read(path)
        if found is not None:
            return found
        made = make()
        if not may_write:
            return made
        try:
            write(path, made)
            _forget_unused(folder)
        except OSError as error:
            _say(folder, error)
            return made
    return read(path) or made


def cache_directory() -> Path:
    """MEGATRON_GRPO_CACHE, or the user's cache directory."""
    own = os.environ.get("MEGATRON_GRPO_CACHE")
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(own) if own else Path(users) / "megatron-grpo") / "prompts"


def key_of(fingerprint: str, encode: PromptEncoder) -> str:
    """The name of a data set's tokens. fingerprint: of its rows."""
    tokenizer = encode.tokenizer
    facts = {
        "rows": fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "settings": [encode.system, dict(encode.options), encode.keep_last, *([list(encode.tools)] if encode.tools else [])],
        "versions": [version("transformers"), version("tokenizers")],
        # A template that writes the date writes another one tomorrow.
        "day": time.strftime("%Y-%m-%d") if "strftime_now" in str(getattr(tokenizer, "chat_template", "")) else "",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of the tokenizer as it was loaded, and of the files that it may have been loaded from."""
    digest = hashlib.sha256()

    def add(parts: Iterable[bytes]) -> None:
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)

    fast = getattr(tokenizer, "backend_tokenizer", None)
    as_loaded = [
        f"{type(tokenizer).__module__}.{type(tokenizer).__name__}",
        getattr(tokenizer, "chat_template", None),
        getattr(tokenizer, "special_tokens_map", None),
    ]
    add([repr(as_loaded).encode(), (fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)).encode()])
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in _FILES and not path.name.endswith(".index.json"))
        add(part for path in files if path.is_file() for part in (path.name.encode(), path.read_bytes()))
    return digest.hexdigest()


def write(path: Path, table: TokenTable) -> None:
    """The file is there whole or not at all; its checksum tells when it is not what was written."""
    body = [np.int64(len(table)).tobytes(), np.ascontiguousarray(table.ends).tobytes(), np.ascontiguousarray(table.tokens).tobytes()]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    beside = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")  # a folder may be shared between machines
    try:
        with beside.open("wb") as stream:
            stream.writelines([_MAGIC, digest.digest(), *body])
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink()


def read(path: Path) -> TokenTable | None:
    """The table of a file, mapped into memory; None where there is none, it is damaged, or somebody else put it there."""
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_uid not in (os.getuid(), 0):
                return None
            content = np.memmap(stream, dtype=np.uint8, mode="r")
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    start = len(_MAGIC) + 32
    if len(content) < start + 8 or bytes(content[: len(_MAGIC)]) != _MAGIC:
        return None
    if hashlib.sha256(content[start:].data).digest() != bytes(content[len(_MAGIC) : start]):
        return None
    with suppress(OSError):
        os.utime(path)  # it is in use
    num_rows = int(content[start : start + 8].view(np.int64)[0])
    ends = content[start + 8 : start + 8 + 8 * num_rows].view(np.int64)
    return TokenTable(ends, content[start + 8 + 8 * num_rows :].view(np.int32))


def _forget_unused(folder: Path) -> None:
    oldest = time.time() - UNUSED
    for path in folder.iterdir():
        with suppress(OSError):  # another process does the same
            if path.stat().st_mtime < oldest:
                path.unlink()


def _say(folder: Path, error: OSError) -> None:
    if launcher.read().speaks:
        logger.warning("%s cannot be used (%s): every rank tokenises the data set by itself.", folder, error.strerror or error)
