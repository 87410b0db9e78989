"""Checkpoint directories as files: complete or absent, checked byte for byte, and what a manifest says of them. No torch, no processes.

    checkpoints/latest_checkpointed_iteration.txt    the step written last; for people and Megatron's own tools
    checkpoints/iter_0000010/manifest.json           what it is of, and size and SHA-256 of every other file
    checkpoints/iter_0000010/good.json               its weights have trained: written by one rename, some steps later
    checkpoints/best.json                            which one is best, and by what (best.py)
    checkpoints/.writing_iter_0000010/               one that is being written, or whose writer died

A directory gets its name `iter_*` by one rename, when everything in it is on the disk.

Format 1 of a manifest knew neither settings nor contents (they lay in grpo/config.yaml, without the values that follow from others), nor
who wrote it. Format 2 had a file of random generators for each rank. Early ones of format 3 have no SHA-256 of themselves.
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
from megatron_grpo.base.files import sync, write_whole
from megatron_grpo.types import Progress

MANIFEST = "manifest.json"
GOOD = "good.json"  # beside it, and not among its files: written when the weights have trained, some steps after they were saved
CONFIG = "grpo/config.yaml"
FORMAT = 3
POINTER = "latest_checkpointed_iteration.txt"  # Megatron-LM's name for it
WRITING, TRASH = ".writing_", ".trash_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrigin:
    """What a run is made of: its checkpoints say so, and a run that continues one is compared with it.

    settings: every setting by name; a checkpoint of format 1 lacks those that followed from others. content: fingerprints of what the
    settings only name, such as the rows of the data set. sizes: `BatchSizes.stream_sizes`. job: ids that a scheduler gave it, by variable.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    job: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without what it holds. save_number: 1 for the first save of its folder, and so on; 0 in format 1.

    is_good: its weights, or those that came of them, have sampled, and a step was trained on it.
    """

    directory: Path
    format: int
    progress: Progress
    num_pending: int
    save_number: int
    origin: RunOrigin
    files: Mapping[str, Mapping[str, Any]]
    is_good: bool = False

    @property
    def step(self) -> int:
        return self.progress.step


# Field -> the type it must have. `torch`, `world_size` and `versions` (of what is pending, by rollout) are for people.
_COMMON = {"format": int, "step": int, "progress": dict, "batch": dict, "world_size": int, "torch": str, "num_pending": int,
           "versions": dict, "files": dict}  # fmt: skip
_SINCE_2 = _COMMON | {"written_by": str, "save_number": int, "settings": dict, "content": dict, "job": dict}
_FIELDS = {1: _COMMON, 2: _SINCE_2, 3: _SINCE_2}
_OWN = (
    "sha256"  # of all the rest; it may be lacking. A flipped bit in the name of the field, or in `format`, makes it one that is not known
)


def facts(origin: RunOrigin, progress: Progress, **more: Any) -> dict[str, Any]:
    """What a new manifest says besides its step, number and files."""
    return {
        "format": FORMAT,
        "written_by": f"megatron_grpo {__version__}",
        "progress": asdict(progress),
        "batch": dict(origin.sizes),
        "settings": dict(origin.settings),
        "content": dict(origin.content),
        "job": dict(origin.job),
        **more,
    }


def signed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With the SHA-256 of all that it says: nothing else holds the progress and the settings that stand in it."""
    read = json.loads(json.dumps(manifest))  # numbers as keys become words, and stand elsewhere
    return {**read, _OWN: _digest(read)}


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != _OWN}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest | str:
    """The manifest of a checkpoint, or a sentence that says why it cannot be used."""
    path = directory / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, OSError) as error:
        return f"{path} cannot be read ({error})"
    wrong = _fault(found)
    if wrong is None and directory.name.startswith("iter_") and directory.name != f"iter_{found['step']:07d}":
        wrong = f"is of step {found['step']}, which is not what its folder says"
    if wrong is None and found.get(_OWN, own := _digest(found)) != own:
        wrong = "has changed since it was written (the SHA-256 in it differs)"
    if wrong is not None:
        return f"{path} {wrong}"
    settings = found["settings"] if found["format"] > 1 else _settings_of_format_1(directory / CONFIG)
    if isinstance(settings, str):
        return settings
    return Manifest(
        directory=directory,
        format=found["format"],
        progress=Progress(**found["progress"]),
        num_pending=found["num_pending"],
        save_number=found.get("save_number", 0),
        origin=RunOrigin(settings=settings, content=found.get("content", {}), sizes=found["batch"], job=found.get("job", {})),
        files=found["files"],
        is_good=(directory / GOOD).is_file(),
    )


def _fault(found: Any) -> str | None:
    """What is wrong with a manifest, as the end of a sentence whose subject is the file."""
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        return "cannot be read (it is no object with a `format`)"
    if found["format"] not in _FIELDS:
        writer = found.get("written_by", "another version")
        return f"is of format {found['format']}, written by {writer}; megatron_grpo {__version__} reads formats 1 to {FORMAT}"
    known = _FIELDS[found["format"]]
    unknown = sorted(found.keys() - known.keys() - ({_OWN} if found["format"] >= 3 else set()))
    if unknown:
        return f"has the field {unknown[0]!r}, which megatron_grpo {__version__} does not know in format {found['format']}"
    bad = [name for name, kind in known.items() if not isinstance(found.get(name), kind)]
    if bad:
        return f"cannot be read (`{bad[0]}` is {'missing' if bad[0] not in found else repr(found[bad[0]])[:40]})"
    counts = [found["step"], found["num_pending"], *found["progress"].values()]
    names = [one.name for one in fields(Progress)]
    if not found["progress"].keys() <= set(names) or not all(type(count) is int for count in counts):
        return f"cannot be read (`progress` holds {', '.join(names)}, all whole numbers, and nothing else)"
    if found["progress"].get("step") != found["step"]:
        return f"cannot be read (`step` is {found['step']}, `progress` says {found['progress'].get('step')})"
    if not found["files"]:
        return "lists no files"
    for name, entry in found["files"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("sha256"), str):
            return f"cannot be read (it lacks size or SHA-256 of {name})"
    return None


def _settings_of_format_1(path: Path) -> dict[str, Any] | str:
    """Settings from the copy of config.yaml; none where there is no copy."""
    import yaml

    try:
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {name: value for section in sections.values() for name, value in section.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        return f"{path} cannot be read ({' '.join(str(error).split())})"


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

    def whole(self) -> list[Manifest]:
        """Those of `candidates` that can be read."""
        return [one for one in self.candidates() if isinstance(one, Manifest)]

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
        before = [one.save_number for one in self.whole()]
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
        return next((one.directory for one in self.whole() if one.is_good and one.step <= step), None)

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
