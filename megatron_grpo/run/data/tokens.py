"""Cache of tokenized prompts: tokenized once per machine into a file in the user's cache directory, which every rank maps into memory.

A file name is a digest of everything that determines the contents: the rows, the tokenizer with its chat template, the settings, and
library versions. After any change there is no such file, and the prompts are tokenized again. docs/data.md is the page for users.
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

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.files import atomic_write, process_lock
from megatron_grpo.run.data.chat import PromptEncoder, find_clock

logger = logging.getLogger(__name__)

FEW = 2000  # data sets of up to this many rows are not cached
PATIENCE = 900.0  # seconds that a rank waits for another rank that tokenizes the same data set
UNUSED = 90 * 24 * 3600.0  # seconds since last use after which a file is removed
_MAGIC = b"megatron_grpo tokens 2\n\0"  # 1: string prompts with a second BOS or an EOS at their end
_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # suffixes of files that a tokenizer may be loaded from


class TokenLists(Sequence[tuple[int, ...]]):
    """Token IDs of every row, in one flat array.

    Args:
        ends: End of each row in `tokens`, int64 [rows].
        tokens: Token IDs of all rows, int32 [total tokens].
    """

    def __init__(self, ends: np.ndarray, tokens: np.ndarray):
        self.ends, self.tokens = ends, tokens

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> TokenLists:
        """Create a table from the token IDs of each row.

        Args:
            rows: Token IDs of each row.
        """
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return cls(ends, np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]) if rows else np.zeros(0, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]  # a row by its number; slices are not asked for
        begin = int(self.ends[index - 1]) if index else 0
        return tuple(self.tokens[begin : int(self.ends[index])].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 [rows]."""
        return np.diff(self.ends, prepend=0)


def cached_table(key: str, make: Callable[[], TokenLists]) -> TokenLists:
    """Return a table from the cache, or create it and store it there.

    One process of a machine creates the table while the others wait. If the cache cannot be used, a warning is logged; that only costs
    time.

    Args:
        key: Name of the table in the cache, from `compute_cache_key`.
    """
    folder = cache_directory()
    path = folder / f"{key}.tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _print_line(folder, error)
        return make()
    table = read(path)
    if table is not None:
        return table
    with process_lock(path.with_suffix(".lock"), patience=PATIENCE) as may_write:
        if (table := read(path)) is not None:
            return table
        table = make()
        if may_write:
            try:
                write(path, table)
                _forget_unused(folder)
            except OSError as error:
                _print_line(folder, error)
    return read(path) or table


def cache_directory() -> Path:
    """Return the cache directory: below MEGATRON_GRPO_CACHE if set, otherwise below the user's cache directory."""
    configured = os.environ.get("MEGATRON_GRPO_CACHE")
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(configured) if configured else Path(users) / "megatron-grpo") / "prompts"


def compute_cache_key(fingerprint: str, encode: PromptEncoder) -> str:
    """Return the cache key of a tokenized data set.

    Args:
        encode: Encoder that produces the token IDs.
    """
    tokenizer = encode.tokenizer
    facts = {
        "rows": fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "settings": [encode.system, dict(encode.options), encode.keep_last, *([list(encode.tools)] if encode.tools else [])],
        "form": 2,  # of prompts: counted up where equal rows are encoded differently
        "versions": [version("transformers"), version("tokenizers")],
        # A template that prints the date gives other tokens tomorrow.
        "day": clock.day if (clock := find_clock(tokenizer)) else "",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return a digest of the loaded tokenizer and of the files it may have been loaded from."""
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


def write(path: Path, table: TokenLists) -> None:
    """Write a table to a file atomically, with a checksum that detects later changes.

    Raises:
        OSError: If the file cannot be written.
    """
    body = [np.int64(len(table)).tobytes(), np.ascontiguousarray(table.ends).tobytes(), np.ascontiguousarray(table.tokens).tobytes()]
    digest = hashlib.sha256()
    for part in body:
        digest.update(part)
    with atomic_write(path, writer=f"{socket.gethostname()}-{os.getpid()}") as stream:  # machines may share the directory
        stream.writelines([_MAGIC, digest.digest(), *body])


def read(path: Path) -> TokenLists | None:
    """Map the table of a file into memory. Return None if the file is missing or damaged, or belongs to another user (other than root).

    Args:
        path: File that `write` wrote.
    """
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
        os.utime(path)  # marks the file as in use
    num_rows = int(content[start : start + 8].view(np.int64)[0])
    ends = content[start + 8 : start + 8 + 8 * num_rows].view(np.int64)
    return TokenLists(ends, content[start + 8 + 8 * num_rows :].view(np.int32))


def _forget_unused(folder: Path) -> None:
    oldest = time.time() - UNUSED
    for path in folder.iterdir():
        with suppress(OSError):  # another process may remove the same file
            if path.stat().st_mtime < oldest:
                path.unlink()


def _print_line(folder: Path, error: OSError) -> None:
    if launcher.read().is_logging_rank:
        logger.warning("Cannot use %s (%s): every rank tokenizes the whole data set.", folder, error.strerror or error)
