"""Files that are there whole or not at all. The one place that renames a file into being."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

MARK = "megatron_grpo.json"  # in each folder that a command of this program wrote: which command, and what of the folder is its own
PAINTER = "megatron_grpo"  # what a picture of ours says of who drew it


def read_text(path: str | Path, *, errors: str = "strict", at_most: int = 64 * 2**20) -> str:
    """The text of a file or pipe that somebody named, in UTF-8. Raises OSError beyond `at_most` characters: a device has no end."""
    with open(path, encoding="utf-8", errors=errors) as stream:
        text = stream.read(at_most + 1)
    if len(text) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most >> 20} million characters", str(path))
    return text


def read_object(path: Path) -> dict[str, Any]:
    """A file of named values in JSON; {} where it is not there or cannot be read: who needs it says so."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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


def mark(folder: Path, command: str, **facts: Any) -> None:
    """Says in `folder` that `command` wrote what it holds. files: the names, where others may lie beside them."""
    write_whole(folder / MARK, json.dumps({"command": command, **facts}) + "\n")


def mark_of(folder: Path) -> dict[str, Any]:
    """The content that `mark` wrote; {} where there is no mark, or none that can be read."""
    return read_object(folder / MARK)


def why_not_replaced(folder: Path) -> str | None:
    """The reason not to replace `folder` by a new directory, or None: only one that `directory_whole` wrote is replaced."""
    if not folder.exists() or (folder.is_dir() and ("files" in mark_of(folder) or not any(folder.iterdir()))):
        return None
    what = f"holds {min(os.listdir(folder))}, which no export of this program wrote" if folder.is_dir() else "is a file"
    return f"output_dir: {folder} {what}; it is left alone. Name another directory."


def why_not_drawn(path: Path) -> str | None:
    """The reason not to draw a picture into this file, or None: only one that this program drew is replaced."""
    is_ours = not path.exists() or (path.is_file() and PAINTER.encode() in path.read_bytes())
    return None if is_ours else f"{path} is there, and is no picture that this program drew; it is left alone. Name another file."


@contextmanager
def directory_whole(path: str | Path) -> Iterator[Path]:
    """A directory to fill that becomes `path`, on the disk, when the block ends. If the block raises, `path` is what it was before.

    FileExistsError where `path` holds what did not come of here. What somebody has put beside files of ours stays.
    """
    out = Path(path).resolve()  # a link to another disk stays one
    if wrong := why_not_replaced(Path(path)):
        raise FileExistsError(wrong)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        mark(partial, "export", files=sorted(file.name for file in partial.iterdir()))
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # as the user's umask has it: safetensors writes files for their owner alone
            sync(file)
        sync(partial)
        old = partial.with_suffix(".old")
        if out.exists():
            os.replace(out, old)  # a directory can only be renamed onto an empty one
        os.replace(partial, out)
        for theirs in set(os.listdir(old)) - {MARK, *mark_of(old).get("files", ())} if old.exists() else ():
            if not (out / theirs).exists():
                os.replace(old / theirs, out / theirs)
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
