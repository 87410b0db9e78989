"""Robust terminal output, and filters for messages of libraries.

A closed terminal or one with few characters must not end a run.
"""

from __future__ import annotations

import codecs
import errno
import io
import logging
import os
import sys
import warnings
from typing import Any


def ignore_closed_terminal() -> None:
    """Make writes to a closed terminal succeed silently. Streams that are not a terminal stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            is_terminal = stream is not None and stream.isatty()
            handle = stream.fileno() if is_terminal else -1
        except (OSError, ValueError):  # closed, or not a file
            continue
        if is_terminal:
            stream.flush()
            raw = io.BufferedWriter(_Terminal(handle, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True))


def replace_unencodable() -> None:
    """Print characters that standard output cannot encode (in ASCII, say) as `?` instead of raising."""
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="replace")


class _Terminal(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


_HARMLESS = (
    ".*Apex is not installed.*",  # optional packages; every module of Megatron-Core that could use them warns
    ".*Transformer Engine and Apex are not installed.*",
    ".*full scope is deprecated.*",  # a default of Megatron-Core
    ".*attribute of a Tensor that is not a leaf Tensor is being accessed.*",  # by Megatron-Core's optimizer, on shards
)


def quiet_libraries() -> None:
    """Filter known harmless warnings that libraries would print on every rank. Errors and other messages pass.

    Call it before the libraries are imported.
    """
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
