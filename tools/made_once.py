"""Make the model of an example unless the same settings have made it before."""

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
    """Make the folder `output`, unless its made_by.json has the same fingerprint.

    Args:
        parser: Parser that reports errors; it ends the program if `output` contains other files.
        output: Folder of the model.
        facts: Facts written to made_by.json, with the fingerprint.
        make: Function that writes the model into a folder and returns further facts, with `held_out_accuracy`.
        asked: Plural noun of what the accuracy counts, such as "questions".
    """
    note = output / "made_by.json"
    if note.is_file() and json.loads(note.read_text())["fingerprint"] == facts["fingerprint"]:
        accuracy = json.loads(note.read_text())["held_out_accuracy"]
        print(f"[model] reusing {output}: made with these settings before, {accuracy:.1%} of the held-out {asked} right")
        return
    if output.exists() and any(output.iterdir()) and not note.is_file():
        parser.error(f"{output} contains files that this program did not make; use another --output")

    # Written next to `output` and renamed when complete, so that an interrupted call leaves no incomplete model.
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    made = make(unfinished)
    (unfinished / note.name).write_text(json.dumps({**facts, **made}, indent=2) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"[model] written to {output}")
