"""A model of an example is made once: what is there, and was made with the same settings, is kept."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def make_once(
    parser: argparse.ArgumentParser, output: Path, facts: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any]], *, asked: str
) -> None:
    """Makes the folder `output`, unless its note says that it was made with this fingerprint.

    facts: of the note, the fingerprint among them. make: writes the model into a folder, and returns what else the note is to say, its
    held_out_accuracy among it. asked: what that is of, in the plural. Ends the program where `output` holds what something else made.
    """
    note = output / "made_by.json"
    if note.is_file() and json.loads(note.read_text())["fingerprint"] == facts["fingerprint"]:
        accuracy = json.loads(note.read_text())["held_out_accuracy"]
        print(f"[model] reusing {output}: made with these settings before, {accuracy:.1%} of the held-out {asked} right")
        return
    if output.exists() and any(output.iterdir()) and not note.is_file():
        parser.error(f"{output} holds something that this program did not make; give another --output")

    # Made beside its place and moved there whole: a model that was cut short is never taken for a finished one.
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    made = make(unfinished)
    (unfinished / note.name).write_text(json.dumps({**facts, **made}, indent=2) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"[model] written to {output}")
