"""Checkpoint directories as files: complete or absent, and checked byte for byte. No torch, no processes.

    checkpoints/latest_checkpointed_iteration.txt    the step to resume from; written last
    checkpoints/iter_0000010/manifest.json           size and SHA-256 of every other file
    checkpoints/.writing_iter_0000010/               one that is being written, or whose writer died

A directory gets its name `iter_*` by one rename, when everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

POINTER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name for it
MANIFEST = "manifest.json"
WRITING, TRASH = ".writing_", ".trash_"


class Folder:
    """The `checkpoints/` of one run. Every method but `fingerprints` and `damage` is for one rank only."""

    def __init__(self, path: Path):
        self.path = path

    def directory(self, step: int) -> Path:
        return self.path / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """Steps that have a directory, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in (re.fullmatch(r"iter_(\d{7,})", name) for name in names) if match)

    def candidates(self) -> list[int]:
        """Steps to try on resume, best first: what the pointer names, then older ones; without a readable pointer, all."""
        steps = self.steps()[::-1]
        try:
            latest = int((self.path / POINTER).read_text())
        except (FileNotFoundError, ValueError):
            return steps
        return [step for step in steps if step <= latest]

    def begin(self, step: int) -> Path:
        """An empty directory to write into; what dead writers left is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        writing = self.being_written(step)
        writing.mkdir()
        return writing

    def sweep(self) -> None:
        for entry in [*self.path.glob(f"{WRITING}*"), *self.path.glob(f"{TRASH}*")]:
            shutil.rmtree(entry, ignore_errors=True)

    def abandon(self, step: int) -> None:
        shutil.rmtree(self.being_written(step), ignore_errors=True)

    def commit(self, step: int, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
        """Manifest, then the directory's name, then the pointer, each on the disk before the next."""
        writing, target = self.being_written(step), self.directory(step)
        write_durably(writing / MANIFEST, json.dumps({**facts, "step": step, "files": dict(sorted(files.items()))}, indent=1) + "\n")
        for directory in {(writing / name).parent for name in files} | {writing}:
            _sync_directory(directory)
        if target.exists():  # a damaged one, or one of a future that was given up by resuming from before it
            target.rename(self.path / f"{TRASH}{target.name}")
        writing.rename(target)
        _sync_directory(self.path)
        new_pointer = self.path / f"{WRITING}{POINTER}"
        write_durably(new_pointer, f"{step}\n")
        new_pointer.replace(self.path / POINTER)
        _sync_directory(self.path)

    def retain(self, limit: int | None, newest: int) -> None:
        """Keeps `limit` checkpoints up to step `newest`. Later ones, of a future that was given up, are overwritten when reached."""
        if not limit:
            return
        for step in [step for step in self.steps() if step <= newest][:-limit]:
            trash = self.path / f"{TRASH}{self.directory(step).name}"
            self.directory(step).rename(trash)  # so that half a deletion is never taken for a checkpoint
            shutil.rmtree(trash, ignore_errors=True)
        self.sweep()

    def being_written(self, step: int) -> Path:
        return self.path / f"{WRITING}{self.directory(step).name}"


def fingerprints(root: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files under `root`."""
    return {name: {"bytes": (root / name).stat().st_size, "sha256": _sha256(root / name)} for name in names}


def read_manifest(directory: Path) -> dict[str, Any] | str:
    """The manifest, or a sentence that says why it cannot be read."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        manifest["files"].items()
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{path} cannot be read ({error})"
    return manifest


def damage(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with the given files of a checkpoint, a sentence each; empty when every byte is as it was written."""
    found = []
    for name, written in files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != written["bytes"]:
                found.append(f"{path} has {size} bytes, {written['bytes']} were written")
            elif _sha256(path) != written["sha256"]:
                found.append(f"{path} has changed since it was written (its SHA-256 differs)")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as error:
            found.append(f"{path} cannot be read ({error.strerror})")
    return found


def write_durably(path: Path, text: str) -> None:
    """The text is on the disk when this returns."""
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
