"""`tools/same_as_before.py`: two trees alike are said to be, and one other word, number or file of a run is named with its place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tools import same_as_before

TOOL = Path(same_as_before.__file__)
LINES = {"loss": 0.1 + 0.2, "time/step": 3.0, "tokens_per_second": 7.0}


def test_a_word_of_the_help_that_was_changed_is_shown_and_nothing_else(tmp_path):
    shutil.copytree(same_as_before.ROOT / "megatron_grpo", tmp_path / "megatron_grpo", ignore=shutil.ignore_patterns("__pycache__"))

    def ask(*words: object) -> tuple[int, list[str]]:
        ended = subprocess.run([sys.executable, str(TOOL), *map(str, words), "--only", "help"], capture_output=True, text=True, timeout=120)
        assert ended.stderr == ""
        return ended.returncode, ended.stdout.splitlines()

    def compare() -> tuple[int, list[str]]:
        return ask(tmp_path / "kept", tmp_path)

    assert ask(same_as_before.ROOT, "--keep", tmp_path / "kept") == (0, [])
    assert compare() == (0, ["help: 13 of 13 the same"])
    cli = tmp_path / "megatron_grpo" / "cli.py"
    cli.write_text(cli.read_text().replace("Check what is installed", "Check all that is installed"))
    code, lines = compare()
    assert code == 1 and lines[-1] == "help: 10 of 13 the same"
    assert [line for line in lines if line.startswith("help: '")] == ["help: ''", "help: '--help'", "help: 'doctor --help'"]
    assert any(line.startswith("  - ") and "Check what is installed" in line for line in lines)


def results(folder: Path) -> dict[str, str]:
    return {key.removeprefix(str(folder)): text for file in sorted(folder.iterdir()) for key, text in same_as_before.written(file)}


def test_the_clock_of_a_run_is_passed_over_and_its_last_bit_is_not(tmp_path):
    for name, seconds, loss, weight in (("old", 3.0, 0.1 + 0.2, 1.0), ("same", 4.0, 0.1 + 0.2, 1.0), ("other", 3.0, 0.3, 1.0 + 1e-7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(LINES | {"loss": loss, "time/step": seconds}) + "\n")
        save_file({"a.weight": np.array([weight, 2.0], dtype=np.float32)}, tmp_path / name / "model.safetensors")
    old, same, other = (results(tmp_path / name) for name in ("old", "same", "other"))
    assert old == same and len(old) == 2
    assert {key for key in old if old[key] != other[key]} == {"/metrics.jsonl", "/model.safetensors a.weight"}


def test_places_and_numbers_of_this_hour_are_masked_and_other_numbers_are_not():
    tree, folder = Path("/home/a/tree"), Path("/home/b/old_plan")
    text = f"{folder}/out of {tree}/tools, pid 71, after 3.5 s at megatron_grpo/run/lifecycle.py:12 on http://127.0.0.1:41; lr 1e-06 x 32"
    assert (
        same_as_before.masked(text, tree, folder)
        == "HERE/out of TREE/tools, pid ..., after ... at ... on http://127.0.0.1:...; lr 1e-06 x 32"
    )


def test_the_first_place_that_differs_is_shown():
    old = "one\n" + "x" * 100 + "yes and so on"
    shown = same_as_before.first_difference(old, old.replace("yes", "no"))
    assert shown == f"  line 2\n  - ...{'x' * 60}yes and so on\n  + ...{'x' * 60}no and so on"
    assert same_as_before.first_difference(None, "x") == "  only new has it"
