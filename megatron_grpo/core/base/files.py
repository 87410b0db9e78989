"""File writes that are complete or do not happen. The one module that renames a file into place."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from megatron_grpo.core.base.errors import one_line

MARK = "megatron_grpo.json"  # in each folder that a command of this program wrote: the command, and the files it wrote
PAINTER = "megatron_grpo"  # name of this program in the metadata of a plot that it wrote
MOST_LEVELS = 100  # of lists and mappings inside each other, in JSON or YAML of others: Python's own limit depends on who reads them
MOST_VALUES = 100_000  # in YAML of others, with each alias counted as what it stands for
_TOO_DEEP = f"it has more than {MOST_LEVELS} levels of lists and mappings inside each other"
_TOO_MANY = f"it has more than {MOST_VALUES:,} values, with each alias counted as what it stands for"


def read_text(path: str | Path, *, errors: str = "strict", at_most: int = 64 * 2**20) -> str:
    """Return the UTF-8 text of a file or pipe that the user named.

    Args:
        errors: As in `open`.
        at_most: Largest length, in characters: a device has no end.

    Raises:
        OSError: The file cannot be read or is longer than `at_most`.
    """
    with open(path, encoding="utf-8", errors=errors) as stream:
        text = stream.read(at_most + 1)
    if len(text) > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most >> 20} million characters", str(path))
    return text


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON that others wrote.

    Args:
        text: The JSON text; bytes are UTF-8.

    Raises:
        ValueError: It is not JSON (`json.JSONDecodeError`, which knows the place), or has more than `MOST_LEVELS` levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    brackets = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if brackets > MOST_LEVELS:  # rare: rows and messages have a few
        _check_levels(value)
    return value


def _check_levels(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MOST_LEVELS + 1):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, (dict, list))]
    if level:
        raise ValueError(_TOO_DEEP)


def parse_yaml(text: str) -> tuple[Any, Any]:
    """Return (value, node) of YAML that others wrote; (None, None) if it is empty.

    Raises:
        ValueError: It is not YAML, or has more than `MOST_LEVELS` levels or `MOST_VALUES` values.
    """
    try:
        reader = _yaml_loader()(text)
        node = reader.get_single_node()
        value = None if node is None else reader.construct_document(node)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except Exception as error:  # PyYAML's constructors raise anything: `!!bool x` a KeyError, 2026-13-01 a ValueError
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or one_line(error)
        raise ValueError(f"{problem}, line {mark.line + 1}" if mark else problem) from error
    _check_levels(value)
    return value, node


@cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        size = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Compose a node, and count its values. An alias of what contains it has no end."""
            before, event = self.size, self.peek_event()
            node = super().compose_node(parent, index)
            self.size += getattr(node, "size", MOST_VALUES) if isinstance(event, yaml.AliasEvent) else 1
            node.size = getattr(node, "size", self.size - before)
            if self.size > MOST_VALUES:
                raise yaml.MarkedYAMLError(problem=_TOO_MANY, problem_mark=event.start_mark)
            return node

    return Loader


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing or invalid. The caller reports that if it matters."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def atomic_write(path: str | Path, *, durable: bool = False, writer: str = "new") -> Iterator[BinaryIO]:
    """Open a stream that becomes `path` when the block ends, by one rename. If the block raises, `path` is unchanged.

    Args:
        durable: Sync contents and name to disk, so that they survive a power cut.
        writer: Name of this process, if several may write the file at the same time.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{writer}")
    try:
        with temporary.open("wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # it is missing after the rename; and the error that stopped the writing is the one to raise
            temporary.unlink()
    if durable:
        sync(path.parent)


def atomic_write_text(path: str | Path, text: str, *, durable: bool = False) -> None:
    """Write a UTF-8 text file as `atomic_write` does."""
    with atomic_write(path, durable=durable) as stream:
        stream.write(text.encode())


def write_mark(folder: Path, command: str, **facts: Any) -> None:
    """Write into `folder` which command created it.

    Args:
        facts: Further facts; `files` names the files that the command wrote, if others may be beside them.
    """
    atomic_write_text(folder / MARK, json.dumps({"command": command, **facts}) + "\n")


def read_mark(folder: Path) -> dict[str, Any]:
    """Return the content that `write_mark` wrote; {} if it is missing or cannot be read."""
    return read_object(folder / MARK)


def export_obstacle(folder: Path) -> str | None:
    """Return the reason not to replace `folder` by a new directory, or None.

    Only an empty directory, or one that `atomic_directory` wrote, is replaced.

    Args:
        folder: The directory; it may not exist.
    """
    if not folder.exists() or (folder.is_dir() and ("files" in read_mark(folder) or not any(folder.iterdir()))):
        return None
    obstacle = f"holds {min(os.listdir(folder))}, which is not from an export of this program" if folder.is_dir() else "is a file"
    return f"output_dir: {folder} {obstacle}; it is not overwritten. Use another directory."


def plot_obstacle(path: Path) -> str | None:
    """Return the reason not to write a plot to this file, or None. Only a plot that this program wrote is replaced.

    Args:
        path: The image file; it may not exist.
    """
    is_ours = not path.exists() or (path.is_file() and PAINTER.encode() in path.read_bytes())
    return None if is_ours else f"{path} exists and was not drawn by this program; it is not overwritten. Use another file."


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Create a directory to fill that becomes `path`, on disk, when the block ends. If the block raises, `path` is unchanged.

    Files that the user has put beside ours are kept.

    Raises:
        FileExistsError: `path` is a file or holds files that this program did not write.
    """
    out = Path(path).resolve()  # a link to another disk is kept
    if obstacle := export_obstacle(Path(path)):
        raise FileExistsError(obstacle)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        write_mark(partial, "export", files=sorted(file.name for file in partial.iterdir()))
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # by the user's umask: safetensors writes files that only their owner can read
            sync(file)
        sync(partial)
        old = partial.with_suffix(".old")
        if out.exists():
            os.replace(out, old)  # a directory can only be renamed onto an empty one
        os.replace(partial, out)
        for foreign in set(os.listdir(old)) - {MARK, *read_mark(old).get("files", ())} if old.exists() else ():
            if not (out / foreign).exists():
                os.replace(old / foreign, out / foreign)
        sync(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: str | Path) -> None:
    """Sync a file's contents, or the names in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def process_lock(lock: Path, *, patience: float) -> Iterator[bool]:
    """Hold a lock between the processes of this machine.

    Yields True if this process holds the lock, and False if waiting for it took too long or the file system has no locks.

    Args:
        lock: The lock file; removed at the end.
        patience: Largest time to wait, in seconds.
    """
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield False
        return
    try:
        is_locked = _take(handle, patience)
        yield is_locked
        if is_locked:
            with suppress(OSError):
                lock.unlink()
    finally:
        os.close(handle)


def _take(handle: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)  # the kernel's locks have no time limit
        except OSError:  # this file system has no locks
            return False
    return False
