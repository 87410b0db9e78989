"""Checkpoint directories as files: complete or absent, verified byte for byte, and described by a manifest. No torch, no processes.

    checkpoints/latest_checkpointed_iteration.txt    the step written last; for people and Megatron's own tools
    checkpoints/iter_0000010/manifest.json           origin of the checkpoint, and size and SHA-256 of every other file
    checkpoints/iter_0000010/good.json               present if its weights have trained: written by one rename, some steps later
    checkpoints/best.json                            the best checkpoint and its metric (best.py)
    checkpoints/.writing_iter_0000010/               a checkpoint being written, or left by a process that died while writing

A directory is renamed to `iter_*` when everything in it is on disk.

Format 1 of a manifest had neither settings nor contents (they were in grpo/config.yaml, without derived values), nor the version that
wrote it. Format 2 had a file of random states for each rank. Early manifests of format 3 have no SHA-256 of themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_grpo import __version__
from megatron_grpo.core.base import activity
from megatron_grpo.core.base.files import atomic_write_text, parse_json, sync
from megatron_grpo.core.metadata import Progress

MANIFEST = "manifest.json"
GOOD = "good.json"  # not among the files of the manifest: written when the weights have trained, some steps after they were saved
CONFIG = "grpo/config.yaml"
FORMAT = 3
MIB = 2**20
POINTER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name for it
WRITING, TRASH = ".writing_", ".trash_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFingerprint:
    """Settings and contents of a run, stored in its checkpoints and compared when a run continues one.

    Args:
        settings: Every setting by name.
        content: Fingerprints of contents that settings name, such as the rows of the data set.
        sizes: `BatchSizes.stream_sizes`.
        job: Job IDs from the scheduler, by environment variable.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    job: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Description of a checkpoint.

    Args:
        directory: Directory of the checkpoint.
        format: Format of the manifest.
        progress: Counters of the run.
        num_pending: Sampled rows waiting to be trained.
        save_number: 1 for the first save in its folder, and so on.
        origin: Settings and contents of the run that wrote it.
        files: {"bytes": size, "sha256": digest} of every other file, by name.
        is_good: Whether its weights, or weights derived from them, have sampled rows that a step was trained on.
    """

    directory: Path
    format: int
    progress: Progress
    num_pending: int
    save_number: int
    origin: RunFingerprint
    files: Mapping[str, Mapping[str, Any]]
    is_good: bool = False

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""
        return self.progress.step


# Field -> required type. `torch`, `world_size` and `versions` (of pending rows, by rollout) are informational.
_FIELDS = {"format": int, "step": int, "progress": dict, "batch": dict, "world_size": int, "torch": str, "num_pending": int,
           "versions": dict, "files": dict, "written_by": str, "save_number": int, "settings": dict, "content": dict,
           "job": dict}  # fmt: skip
# Digest of all the rest; it may be lacking. A flipped bit in the name of the field, or in `format`, makes it one that is not known.
_OWN = "sha256"


def manifest_content(origin: RunFingerprint, progress: Progress, **extra: Any) -> dict[str, Any]:
    """Return the contents of a new manifest besides step, number and files."""
    return {
        "format": FORMAT,
        "written_by": f"megatron_grpo {__version__}",
        "progress": asdict(progress),
        "batch": dict(origin.sizes),
        "settings": dict(origin.settings),
        "content": dict(origin.content),
        "job": dict(origin.job),
        **extra,
    }


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with a SHA-256 of its contents, which protects the progress and settings in it.

    Args:
        manifest: Contents of the manifest; an earlier checksum is ignored.
    """
    content = json.loads(json.dumps(manifest))  # integer keys become strings, which are sorted differently
    return {**content, _OWN: _digest(content)}


def _digest(manifest: Mapping[str, Any]) -> str:
    signed_part = {name: value for name, value in manifest.items() if name != _OWN}
    return hashlib.sha256(json.dumps(signed_part, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest | str:
    """Read the manifest of a checkpoint.

    Returns:
        The manifest, or a sentence that says why it cannot be used.
    """
    path = directory / MANIFEST
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, OSError) as error:
        return f"{path} cannot be read ({error})"
    fault = _fault(content)
    if fault is None and directory.name.startswith("iter_") and directory.name != f"iter_{content['step']:07d}":
        fault = f"is of step {content['step']}, which does not match its directory name"
    if fault is None and content.get(_OWN, digest := _digest(content)) != digest:
        fault = "has changed since it was written (the SHA-256 in it differs)"
    if fault is not None:
        return f"{path} {fault}"
    return Manifest(
        directory=directory,
        format=content["format"],
        progress=Progress(**content["progress"]),
        num_pending=content["num_pending"],
        save_number=content["save_number"],
        origin=RunFingerprint(settings=content["settings"], content=content["content"], sizes=content["batch"], job=content["job"]),
        files=content["files"],
        is_good=(directory / GOOD).is_file(),
    )


def _fault(content: Any) -> str | None:
    """Describe what is wrong with a manifest, as the end of a sentence whose subject is the file; None if it is valid."""
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        return "cannot be read (not an object with a `format`)"
    if content["format"] != FORMAT:
        writer = content.get("written_by", "another version")
        return f"is of format {content['format']}, written by {writer}; megatron_grpo {__version__} reads format {FORMAT}"
    unknown = sorted(content.keys() - _FIELDS.keys() - {_OWN})
    if unknown:
        return f"has the field {unknown[0]!r}, which is unknown to megatron_grpo {__version__} in format {content['format']}"
    invalid = [name for name, kind in _FIELDS.items() if not isinstance(content.get(name), kind)]
    if invalid:
        return f"cannot be read (`{invalid[0]}` is {'missing' if invalid[0] not in content else repr(content[invalid[0]])[:40]})"
    counts = [content["step"], content["num_pending"], *content["progress"].values()]
    names = [field.name for field in fields(Progress)]
    if not content["progress"].keys() <= set(names) or not all(type(count) is int for count in counts):
        return f"cannot be read (`progress` must have integers for {', '.join(names)} and no other fields)"
    if content["progress"].get("step") != content["step"]:
        return f"cannot be read (`step` is {content['step']}, `progress.step` is {content['progress'].get('step')})"
    if not content["files"]:
        return "lists no files"
    for name, entry in content["files"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("sha256"), str):
            return f"cannot be read (no size or SHA-256 of {name})"
    return None


class CheckpointDirectory:
    """The `checkpoints/` directory of a run. Methods that write are for a single rank.

    Args:
        path: The directory; it is created when a checkpoint is written.
    """

    def __init__(self, path: Path):
        self.path = path

    def directory(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.path / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """Return the steps that have a directory, ascending."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(int(match[1]) for match in (re.fullmatch(r"iter_(\d{7,})", name) for name in names) if match)

    def newest(self) -> Path | None:
        """Return the directory of the highest step, complete or not; None if there is none."""
        steps = self.steps()
        return self.directory(steps[-1]) if steps else None

    def candidates(self) -> list[Manifest | str]:
        """Return the checkpoints from the last written to the first, preceded by a sentence for each unreadable one.

        The order is that of the save number. Steps would lead back to checkpoints that were abandoned by resuming from an earlier step;
        the pointer is one save behind if a run is killed between the two renames of `commit`.
        """
        manifests = [read_manifest(self.directory(step)) for step in self.steps()]
        complete = sorted(
            (manifest for manifest in manifests if isinstance(manifest, Manifest)),
            key=lambda manifest: (manifest.save_number, manifest.step),
            reverse=True,
        )
        return [*(manifest for manifest in manifests if isinstance(manifest, str)), *complete]

    def complete_checkpoints(self) -> list[Manifest]:
        """Return the readable ones of `candidates`."""
        return [manifest for manifest in self.candidates() if isinstance(manifest, Manifest)]

    def pointer(self) -> int | str | None:
        """Return the step in the pointer file; a sentence if it cannot be read; None if it does not exist."""
        path = self.path / POINTER
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return f"{path} is a directory, expected a file with a step number"
        except (OSError, UnicodeDecodeError) as error:
            return f"{path} cannot be read ({error})"
        return int(text) if text.strip().isdecimal() else f"{path} contains {text[:20]!r}, expected a step number"

    def begin(self, step: int) -> Path:
        """Create an empty directory to write a checkpoint into, and remove what dead processes left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        writing = self.being_written(step)
        writing.mkdir()
        return writing

    def sweep(self) -> None:
        """Remove directories of unfinished writes and deletions."""
        for entry in [*self.path.glob(f"{WRITING}*"), *self.path.glob(f"{TRASH}*")]:
            shutil.rmtree(entry, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove the directory of an unfinished checkpoint."""
        shutil.rmtree(self.being_written(step), ignore_errors=True)

    def commit(self, step: int, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the manifest, rename the directory, then write the pointer, with each on disk before the next.

        Args:
            facts: Contents of the manifest, from the function `manifest_content`.
            files: {"bytes": size, "sha256": digest} of every file written, by name.
        """
        writing, target = self.being_written(step), self.directory(step)
        save_numbers = [manifest.save_number for manifest in self.complete_checkpoints()]
        manifest = {**facts, "step": step, "save_number": max(save_numbers, default=0) + 1, "files": dict(sorted(files.items()))}
        atomic_write_text(writing / MANIFEST, json.dumps(with_digest(manifest), indent=1) + "\n", durable=True)
        for directory in {(writing / name).parent for name in files} | {writing}:
            sync(directory)
        if target.exists():  # a damaged checkpoint, or one that was abandoned by resuming from an earlier step
            target.rename(self.path / f"{TRASH}{target.name}")
        writing.rename(target)
        sync(self.path)
        atomic_write_text(self.path / POINTER, f"{step}\n", durable=True)

    def mark_good(self, step: int, *, trained: int) -> bool:
        """Record that the weights of a checkpoint have trained.

        Returns:
            False if the checkpoint does not exist (yet).
        """
        directory = self.directory(step)
        if not (directory / MANIFEST).exists():
            return False
        atomic_write_text(directory / GOOD, json.dumps({"trained": trained}) + "\n", durable=True)
        return True

    def last_good(self, step: int) -> Path | None:
        """Return the directory of the good checkpoint up to `step` that was written last; None if there is none."""
        return next((manifest.directory for manifest in self.complete_checkpoints() if manifest.is_good and manifest.step <= step), None)

    def retain(self, limit: int | None, newest: int, *, best: int | None = None) -> None:
        """Delete old checkpoints, so that at most `limit` remain up to step `newest`.

        The last good checkpoint, the best one and `newest` are always kept, even if `limit` is too small for them. Later steps, abandoned
        by resuming from an earlier step, are kept until they are overwritten.

        Args:
            limit: Number of checkpoints to keep; None or 0 keeps all.
            best: Step of the best checkpoint, if known.
        """
        if not limit:
            return
        steps = self.steps()
        protected = {self.last_good(newest), self.directory(newest)} | ({self.directory(best)} if best in steps else set())
        removable = [step for step in steps if step <= newest and self.directory(step) not in protected]
        num_kept = limit - len(protected - {None})
        for step in removable[: max(0, len(removable) - max(0, num_kept))]:
            trash = self.path / f"{TRASH}{self.directory(step).name}"
            self.directory(step).rename(trash)  # so that a partly deleted directory is never taken for a checkpoint
            shutil.rmtree(trash, ignore_errors=True)
        self.sweep()

    def being_written(self, step: int) -> Path:
        """Return the directory into which a step's checkpoint is written before it is renamed."""
        return self.path / f"{WRITING}{self.directory(step).name}"


def find_damage(directory: Path, files: Mapping[str, Mapping[str, Any]], *, read_bytes: bool = True) -> list[str]:
    """Compare files of a checkpoint with their recorded sizes and digests.

    Args:
        files: {"bytes": size, "sha256": digest} by name.
        read_bytes: False compares only the sizes, without reading the files.

    Returns:
        A sentence per damaged file.
    """
    faults = []
    for name, written in files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != written["bytes"]:
                faults.append(f"{path} has {size} bytes, expected {written['bytes']}")
            elif read_bytes and _sha256(path) != written["sha256"]:
                faults.append(f"{path} has changed since it was written (its SHA-256 differs)")
        except FileNotFoundError:
            faults.append(f"{path} is missing")
        except OSError as error:
            faults.append(f"{path} cannot be read ({error.strerror})")
    return faults


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(MIB):
            digest.update(chunk)
            activity.advance()
    return digest.hexdigest()
