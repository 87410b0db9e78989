"""Checkpoint directories as files: complete or absent, and checked byte for byte. No torch, no processes.

    checkpoints/latest_checkpointed_iteration.txt    the step written last; for people and Megatron's own tools
    checkpoints/iter_0000010/manifest.json           what it is of, and size and SHA-256 of every other file (manifest.py)
    checkpoints/iter_0000010/good.json               its weights have trained: written by one rename, some steps later
    checkpoints/best.json                            which one is best, and by what (best.py)
    checkpoints/.writing_iter_0000010/               one that is being written, or whose writer died

A directory gets its name `iter_*` by one rename, when everything in it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.base.files import sync, write_whole
from megatron_grpo.checkpoint.manifest import GOOD, MANIFEST, Manifest, read_manifest, signed

POINTER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name for it
WRITING, TRASH = ".writing_", ".trash_"


class Folder:
    """The `checkpoints/` of one run. What writes is for one rank only."""

    def __init__(self, path: Path):
        self.path = path

    def directory(self, step: int) -> Path:
        return self.path / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """Steps that have a directory, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in (re.fullmatch(r"iter_(\d{7,})", name) for name in names) if match)

    def newest(self) -> Path | None:
        """The directory of the highest step, whole or not; None where there is none."""
        steps = self.steps()
        return self.directory(steps[-1]) if steps else None

    def candidates(self) -> list[Manifest | str]:
        """The checkpoint written last, then the ones before it; first of all a sentence for each that cannot be read.

        "Last" goes by the number of the save. Steps would lead back into a future that was given up; the pointer is one save behind if a
        run is killed between the two renames of `commit`.
        """
        found = [read_manifest(self.directory(step)) for step in self.steps()]
        whole = sorted((one for one in found if isinstance(one, Manifest)), key=lambda one: (one.save_number, one.step), reverse=True)
        return [*(one for one in found if isinstance(one, str)), *whole]

    def pointer(self) -> int | str | None:
        """The step that the pointer names; a sentence where it cannot be read; None without one."""
        path = self.path / POINTER
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return f"{path} is a folder, where a file with a step should be"
        except (OSError, UnicodeDecodeError) as error:
            return f"{path} cannot be read ({error})"
        return int(text) if text.strip().isdecimal() else f"{path} holds {text[:20]!r}, where a step should be"

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
        before = [one.save_number for one in self.candidates() if isinstance(one, Manifest)]
        manifest = {**facts, "step": step, "save_number": max(before, default=0) + 1, "files": dict(sorted(files.items()))}
        write_whole(writing / MANIFEST, json.dumps(signed(manifest), indent=1) + "\n", durable=True)
        for directory in {(writing / name).parent for name in files} | {writing}:
            sync(directory)
        if target.exists():  # a damaged one, or one of a future that was given up by resuming from before it
            target.rename(self.path / f"{TRASH}{target.name}")
        writing.rename(target)
        sync(self.path)
        write_whole(self.path / POINTER, f"{step}\n", durable=True)

    def mark_good(self, step: int, *, trained: int) -> bool:
        """Says of the checkpoint of `step` that its weights train: they had, after `trained` steps. False if it is not there (yet)."""
        directory = self.directory(step)
        if not (directory / MANIFEST).exists():
            return False
        write_whole(directory / GOOD, json.dumps({"trained": trained}) + "\n", durable=True)
        return True

    def last_good(self, step: int) -> Path | None:
        """The checkpoint up to `step` that is good and was written last."""
        whole = (one for one in self.candidates() if isinstance(one, Manifest))
        return next((one.directory for one in whole if one.is_good and one.step <= step), None)

    def retain(self, limit: int | None, newest: int, *, best: int | None = None) -> None:
        """Keeps `limit` checkpoints up to step `newest`, with the last good one among them, and the one of step `best`: beside `newest`,
        if `limit` is too small for them.

        Later ones, of a future that was given up, are overwritten when reached.
        """
        if not limit:
            return
        steps = self.steps()
        never = {self.last_good(newest), self.directory(newest)} | ({self.directory(best)} if best in steps else set())
        others = [step for step in steps if step <= newest and self.directory(step) not in never]
        kept = limit - len(never - {None})
        for step in others[: max(0, len(others) - max(0, kept))]:
            trash = self.path / f"{TRASH}{self.directory(step).name}"
            self.directory(step).rename(trash)  # so that half a deletion is never taken for a checkpoint
            shutil.rmtree(trash, ignore_errors=True)
        self.sweep()

    def being_written(self, step: int) -> Path:
        return self.path / f"{WRITING}{self.directory(step).name}"


def damage(directory: Path, files: Mapping[str, Mapping[str, Any]], *, read_bytes: bool = True) -> list[str]:
    """What is wrong with the given files of a checkpoint, a sentence each; empty when every byte is as it was written.

    read_bytes: false looks at the sizes alone, which costs nothing.
    """
    found = []
    for name, written in files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != written["bytes"]:
                found.append(f"{path} has {size} bytes, {written['bytes']} were written")
            elif read_bytes and _sha256(path) != written["sha256"]:
                found.append(f"{path} has changed since it was written (its SHA-256 differs)")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as error:
            found.append(f"{path} cannot be read ({error.strerror})")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
