"""Files that are there whole or not at all. The one place that renames a file into being."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def read_text(path: str | Path, *, errors: str = "strict", at_most: int = 64 * 2**20) -> str:
    """The text of a file or pipe that somebody named, in UTF-8. Raises OSError beyond `at_most` characters: a device has no end."""
    with open(path, encoding="utf-8", errors=errors) as stream:
        text = stream.read(at_most + 1)
    if len(text) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most >> 20} million characters", str(path))
    return text


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


@contextmanager
def directory_whole(path: str | Path, *, marker: str) -> Iterator[Path]:
    """A directory to fill that becomes `path`, on the disk, when the block ends. If the block raises, `path` is what it was before.

    marker: a file that everything of this kind has. FileExistsError where `path` is something else, unless it is an empty directory.
    """
    out = Path(path)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / marker).is_file())):
        raise FileExistsError(f"{out} exists and has no {marker}; it is left alone. Name another directory.")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # as the user's umask has it: safetensors writes files for their owner alone
            sync(file)
        sync(partial)
        old = partial.with_suffix(".old")
        if out.exists():
            os.replace(out, old)  # a directory can only be renamed onto an empty one
        os.replace(partial, out)
        sync(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: str | Path) -> None:
    """What was written to a file, or the names in a directory, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def only_one(lock: Path, *, patience: float) -> Iterator[bool]:
    """Inside, no other process of this machine is; or the wait for it was too long, or locks are unknown here: then it is False.

    patience: seconds.
    """
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield False
        return
    try:
        held = _take(handle, patience)
        yield held
        if held:
            with suppress(OSError):
                lock.unlink()
    finally:
        os.close(handle)


def _take(handle: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)  # the kernel's locks have no time limit
        except OSError:  # this file system has no locks
            return False
    return False
