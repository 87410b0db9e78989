"""One rank of a run that a Python program started: `python -m megatron_grpo.api.rank FOLDER`.

It runs the command with the program's objects, and leaves in FOLDER what the program waits for: metrics as they come, and the exception
that ended the command.
"""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.cleanup import die_with_parent
from megatron_grpo.core.base.files import atomic_write

LAUNCH, OBJECTS, METRICS = "launch.pkl", "objects.pkl", "metrics.jsonl"


def run_command(folder: Path) -> int:
    """Run the command of a launch folder, and return its exit code.

    Args:
        folder: Folder that `api.launch` has written.
    """
    from megatron_grpo import cli
    from megatron_grpo.run import python_objects
    from megatron_grpo.run.terminal import replace_unencodable

    replace_unencodable()
    launch = pickle.loads((folder / LAUNCH).read_bytes())
    sys.path[:], sys.argv = launch["path"], launch["argv"]
    parts = {"listener": _writer(folder / METRICS)} if launch["listens"] else {}
    try:
        with (folder / OBJECTS).open("rb") as stream:
            objects = pickle.Unpickler(stream)
            python_objects.provide({name: objects.load() for name in launch["fingerprints"]}, launch["fingerprints"])
        return cli.run(launch["command"], launch["words"], parts)
    except BaseException as error:  # noqa: BLE001 - reported below, and raised again in the program
        _write_error(folder, error)
        return cli.exit_code(error)


def _writer(path: Path) -> Any:
    """Return a listener that appends metrics to a file, for the callbacks of the program."""

    def listen(step: int, numbers: Mapping[str, Any]) -> bool:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "numbers": dict(numbers)}, default=float) + "\n")
        return False

    return listen


def _write_error(folder: Path, error: BaseException) -> None:
    """Write the exception for the program, whole or not at all. One that cannot be pickled becomes a RuntimeError with its text."""
    from megatron_grpo.run.failures import describe_error

    rank = launcher.read().rank
    text, _ = describe_error(error)
    if text is None:  # unexpected: the traceback of this process is lost otherwise
        error.add_note(f"Traceback of rank {rank}:\n{traceback.format_exc()}")
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - whatever the pickling of a user's exception raises
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        pickled = pickle.dumps(plain)
    with atomic_write(folder / f"error.{rank}.pkl") as stream:
        stream.write(pickled)


def main() -> int:
    """Run one rank under the supervisor, and end it with the program."""
    from megatron_grpo.run.supervisor import supervised

    die_with_parent()
    return supervised(lambda: run_command(Path(sys.argv[1])))


if __name__ == "__main__":
    raise SystemExit(main())
