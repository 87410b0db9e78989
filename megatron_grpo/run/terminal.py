"""What a terminal cannot do costs what is printed, and nothing else: one that has gone, and one that knows few signs."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
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
