"""Names of the files that a run writes to output_dir, checks whether existing files belong to a run, and their removal. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from megatron_grpo.base.errors import RunError
from megatron_grpo.base.files import MARK, mark, mark_of, why_not_replaced
from megatron_grpo.checkpoint.manifest import POINTER, Folder

RUN, LOCK = "train", "run.lock"
# Names in output_dir -> patterns of the entries written into a directory; () for a file.
WRITTEN_BY_A_RUN = {
    **dict.fromkeys(("config.yaml", "plan.json", "metrics.jsonl", "evaluations.jsonl", "skipped.jsonl", "schedule.jsonl"), ()),
    **dict.fromkeys(("untold.json", "events.jsonl", "now.json"), ()),
    "checkpoints": ("iter_*", ".*_iter_*", POINTER, "best.json"),
    "completions": ("step_*", ".step_*"),
    "evaluations": ("*/prompts.jsonl", "*/step_*.parquet"),
    "debug_dump": ("step_*", ".step_*"),
    "capsules": ("step_*", ".step_*"),  # the name of debug_dump in earlier versions
    "plots": tuple(f"{name}.png" for name in ("reward", "length", "kl", "entropy", "step_time", "compare_losses", "whatif")),
    "hf": ("*",),
    "hf_merged": ("*",),
    "tensorboard": ("events.*",),
    "watchdog": ("*.txt",),
}  # fmt: skip
_NAMES, _EXPORTS = tuple(WRITTEN_BY_A_RUN), ("hf", "hf_merged")


def holds_run(output_dir: str | Path) -> bool:
    """Return whether `output_dir` holds the records of an earlier run."""
    return next(_written(Path(output_dir), _NAMES[2:]), None) is not None


def remove_run(output_dir: str | Path) -> None:
    """Remove what an earlier run wrote to `output_dir`, and nothing else. For one rank, before anything is built."""
    for path in list(_written(Path(output_dir))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in (Path(output_dir) / name for name, patterns in WRITTEN_BY_A_RUN.items() if patterns):
        if [one.name for one in folder.glob("*")] == [MARK]:
            (folder / MARK).unlink()
        for emptied in [*folder.glob("*/"), folder]:
            with suppress(OSError):  # not empty, a link, or missing
                emptied.rmdir()


def _written(out: Path, names: Collection[str] = _NAMES) -> Iterator[Path]:
    """Yield the existing paths that a run writes; of an export, those that its mark lists."""
    for name in names:
        path, patterns = out / name, WRITTEN_BY_A_RUN[name]
        if not patterns and path.is_file() and path.stat().st_size:
            yield path
        listed = mark_of(path).get("files") if name in _EXPORTS else None
        for found in [found for pattern in patterns for found in path.glob(pattern)]:
            if listed is None or found.name in listed:
                yield found


def overwrite_obstacle(out: Path, command: str = RUN, names: Collection[str] = _NAMES) -> str | None:
    """Return the reason why a command must not write files of these names; None if it may.

    Existing files are only replaced in a directory where the same command wrote before.

    Args:
        out: The output directory.
        command: The command that is about to write.
        names: Names of the files and directories it writes.
    """
    for name in names:
        path, is_folder = out / name, bool(WRITTEN_BY_A_RUN[name])
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {os.readlink(path)}, which does not exist. Restore (mount) it, or use another output_dir."
        if path.exists() and path.is_dir() != is_folder:
            kind, other = ("a file", "a folder") if is_folder else ("a folder", "a file")
            return f"{path} is {kind}, expected {other}. Move it, or use another output_dir."
    found = mark_of(out).get("command")
    if found == command:
        return next(filter(None, (why_not_replaced(out / name) for name in _EXPORTS if name in names)), None)
    if found is None and ((out / LOCK).is_file() or any(out.glob("checkpoints/iter_*/manifest.json"))):
        return None  # of a version that wrote no mark
    if theirs := next(_written(out, names), None):
        return f"{theirs} was not written by `{command}`, which would replace it. Move it, or use another output_dir."
    return None


def claim(out: Path) -> None:
    """Mark `out` as the directory of a training run, with the step it saved last.

    For one rank, before the run writes anything else there.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not mark_of(out):
        for export in (out / name for name in _EXPORTS if (out / name).is_dir()):  # of a version that wrote no mark
            mark(export, "export", files=os.listdir(export))
    mark(out, RUN, saved=max(Folder(out / "checkpoints").steps(), default=None))


def restart_obstacle(out: Path) -> str | None:
    """Return the reason why the records in `out` must not be replaced, or None.

    The reason is that their run saved checkpoints, and none of them exists any more.
    """
    saved = mark_of(out).get("saved")
    if not saved or Folder(out / "checkpoints").steps():
        return None
    return (
        f"{out} contains the records of a run that saved step {saved}, but {out / 'checkpoints'} has no checkpoint. Restore (mount) "
        "them, or start again with --resume never --overwrite_output_dir, which removes the records."
    )


def check_output_dir(out: Path) -> None:
    """Check that `out` has not been removed or emptied since `claim`. Raises RunError."""
    if not (out / MARK).exists():
        raise RunError(
            f"output_dir ({out}) was removed or emptied while the run wrote to it ({MARK} is missing), with all its earlier contents. "
            "Start the run again from a checkpoint in another place, or from the beginning."
        )
