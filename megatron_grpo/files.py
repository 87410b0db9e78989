"""Files that are there whole or not at all. The one place that renames a file into being."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(path: str | Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A stream that becomes `path` when the block ends, by one rename. If the block raises, `path` is what it was before.

    durable: contents and name are on the disk afterwards, so that they outlive a power cut.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.new")
    try:
        with beside.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(beside, path)
    finally:
        with suppress(OSError):  # it is gone after the rename; and what stopped the writing is what should be heard
            beside.unlink()
    if durable:
        sync(path.parent)


def write_whole(path: str | Path, text: str, *, durable: bool = False) -> None:
    """The text, in UTF-8, as `written_whole` writes."""
    with written_whole(path, durable=durable) as stream:
        stream.write(text.encode())


def sync(path: str | Path) -> None:
    """What was written to a file, or the names in a directory, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
