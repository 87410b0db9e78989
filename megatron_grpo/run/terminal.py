"""What is printed: a terminal that has gone, or that knows few signs, costs that and nothing else; and what libraries need not say."""

from __future__ import annotations

import codecs
import errno
import io
import logging
import os
import sys
import warnings
from typing import Any


def outlive_terminal() -> None:
    """From now on a write to a terminal that has gone raises nothing. Streams that are no terminal stay as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            is_terminal = stream is not None and stream.isatty()
            handle = stream.fileno() if is_terminal else -1
        except (OSError, ValueError):  # closed, or no file
            continue
        if is_terminal:
            stream.flush()
            raw = io.BufferedWriter(_Terminal(handle, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True))


def speak_plainly() -> None:
    """From now on a sign that standard output does not have, in ASCII say, is printed as `?`, and raises nothing."""
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
    ".*Apex is not installed.*",  # optional parts, which every module of Megatron-Core that could use them misses aloud
    ".*Transformer Engine and Apex are not installed.*",
    ".*full scope is deprecated.*",  # a default of Megatron-Core's own
    ".*attribute of a Tensor that is not a leaf Tensor is being accessed.*",  # its optimizer looks at shards
)


def quiet_libraries() -> None:
    """Filters what they would say to every rank of every run; what else they say passes. Called before they are imported; errors stay."""
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
