"""Faults that damage the files of an interrupted run before it is resumed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.end_to_end.runs import read_jsonl
from tools.torturing.promises import FALLS_BACK, UNMOVED
from tools.torturing.target import STEPS, BrokenPromiseError, Fault, Target


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    """Truncate a file to half its size."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def make_empty(path: Path) -> None:
    """Truncate a file to 0 bytes."""
    path.write_bytes(b"")


def delete(path: Path) -> None:
    """Delete a file."""
    path.unlink()


RECORDS_OF_STEPS = ("metrics.jsonl", "schedule.jsonl")
DAMAGES = {"a bit flipped": flip_bit, "cut": cut_in_half, "empty": make_empty, "gone": delete}


def get_newest_checkpoint(target: Target) -> Path:
    """Return the newest checkpoint of the half-finished run."""
    return target.out / "checkpoints" / "iter_0000007"


def find_largest_file(directory: Path, pattern: str) -> Path:
    """Return the largest file of a directory that matches a pattern."""
    return max(directory.glob(pattern), key=lambda path: path.stat().st_size)


def damage_checkpoint(pattern: str, harm: Callable[[Path], None]) -> Callable[[Target], None]:
    """Return a fault that damages a file of the newest checkpoint; the run must resume from the previous one.

    Args:
        pattern: Glob pattern of the file; the largest match is damaged.
        harm: Function that damages it.
    """

    def inject(target: Target) -> None:
        target.copy_half_done()
        harm(find_largest_file(get_newest_checkpoint(target), pattern))
        target.resume(says=["iter_0000007", "WARNING", r"Resuming from \S+iter_0000006"])

    return inject


def damage_all_checkpoints(target: Target) -> None:
    """Damage all checkpoints; the run must refuse to resume and keep their files."""
    target.copy_half_done()
    for directory in (target.out / "checkpoints").glob("iter_*"):
        flip_bit(find_largest_file(directory, "*.distcp"))
    target.run().require(None, "No usable checkpoint to resume from")
    if target.list_checkpoints() != [6, 7]:
        raise BrokenPromiseError("the damaged checkpoints were touched")


def damage_record(name: str, harm: Callable[[Path], None]) -> Callable[[Target], None]:
    """Return a fault that damages a file of records or settings; the run must end normally, or with an error that names the file."""

    def inject(target: Target) -> None:
        target.copy_half_done()
        harm(target.out / name)
        ended = target.run()
        if ended.code == 0:
            if name in RECORDS_OF_STEPS:
                ended.require(0, rf"{name} has no line of \d of the 7 optimizer steps")
            last = read_jsonl(target.out / "metrics.jsonl")[-1]
            if last["step"] != STEPS:
                raise BrokenPromiseError(f"the last line of metrics.jsonl is of step {last['step']}")
        else:
            ended.require(None, name.partition("/")[0])

    return inject


def change_pointer(text: str | None) -> Callable[[Target], None]:
    """Return a fault that writes `text` into the pointer to the newest checkpoint; None deletes the pointer."""

    def inject(target: Target) -> None:
        target.copy_half_done()
        path = target.out / "checkpoints" / "latest_checkpointed_iteration.txt"
        path.unlink() if text is None else path.write_text(text)
        ended = target.run()
        if ended.code:
            ended.require(None, "latest_checkpointed_iteration")
            path.unlink()
            target.run().require(0)
        target.check_results()

    return inject


def add_leftovers(target: Target) -> None:
    """Add directories as interrupted saves leave them; the run must ignore them."""
    target.copy_half_done()
    for name in ("iter_0000009", ".iter_0000008.new", "iter_0000008.tmp"):
        (target.out / "checkpoints" / name).mkdir()
        (target.out / "checkpoints" / name / "__0_0.distcp").write_bytes(b"x" * 1000)
    target.resume()


def add_lock(target: Target) -> None:
    """Add the lock file of a process that no longer exists; the run must take it over."""
    target.copy_half_done()
    (target.out / "run.lock").write_text(json.dumps({"pid": 999999, "host": socket.gethostname()}))
    target.resume()


def move_output_dir(target: Target) -> None:
    """Move output_dir; the run must resume at the new path."""
    target.copy_half_done()
    target.out = target.out.rename(target.folder / "elsewhere")
    target.resume()


def list_damages() -> Iterator[Fault]:
    """Yield the faults that damage files."""
    for name, pattern in {"manifest": "manifest.json", "shard": "*.distcp", "metadata": ".metadata", "common": "common.pt",
                          "progress": "grpo/progress.json", "prompts": "grpo/prompts.json"}.items():  # fmt: skip
        for how, harm in DAMAGES.items():
            yield Fault(f"damage/{name} {how}", FALLS_BACK, damage_checkpoint(pattern, harm))
    yield Fault("damage/every checkpoint", "refused; no file changes", damage_all_checkpoints)
    for how, text in {"gone": None, "garbage": "yes\n", "empty": "", "ahead": "99\n", "behind": "6\n"}.items():
        yield Fault(f"damage/pointer {how}", "resumes from the newest checkpoint, or an error", change_pointer(text))
    for name in ("metrics.jsonl", "schedule.jsonl", "evaluations.jsonl", "config.yaml", "plan.json"):
        for how in ("cut", "gone"):
            promise = "the run ends without error" + (" and logs which steps it lacks" if name in RECORDS_OF_STEPS else "")
            yield Fault(f"damage/{name} {how}", promise, damage_record(name, DAMAGES[how]))
    yield Fault("damage/leftovers of saves", UNMOVED, add_leftovers)
    yield Fault("damage/lock of a dead run", UNMOVED, add_lock)
    yield Fault("damage/output_dir moved", UNMOVED, move_output_dir)
