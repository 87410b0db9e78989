"""`tools/same_as_before.py`: equal trees are reported as equal, and one changed word, number or file is shown."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tools import same_as_before

TOOL = Path(same_as_before.__file__)
LINES = {"loss": 0.1 + 0.2, "time/step": 3.0, "tokens_per_second": 7.0}


def test_same_as_before_shows_changed_help_line_only(tmp_path):
    shutil.copytree(same_as_before.ROOT / "megatron_grpo", tmp_path / "megatron_grpo", ignore=shutil.ignore_patterns("__pycache__"))

    def ask(*words: object) -> tuple[int, list[str]]:
        ended = subprocess.run([sys.executable, str(TOOL), *map(str, words), "--only", "help"], capture_output=True, text=True, timeout=120)
        assert ended.stderr == ""
        return ended.returncode, ended.stdout.splitlines()

    def compare() -> tuple[int, list[str]]:
        return ask(tmp_path / "kept", tmp_path)

    assert ask(same_as_before.ROOT, "--keep", tmp_path / "kept") == (0, [])
    assert compare() == (0, ["help: 18 of 18 the same"])
    cli = tmp_path / "megatron_grpo" / "cli.json"
    cli.write_text(cli.read_text().replace("Check what is installed", "Check all that is installed"))
    code, lines = compare()
    assert code == 1 and lines[-1] == "help: 15 of 18 the same"
    assert [line for line in lines if line.startswith("help: '")] == ["help: ''", "help: '--help'", "help: 'doctor --help'"]
    assert any(line.startswith("  - ") and "Check what is installed" in line for line in lines)


def make_results(folder: Path) -> dict[str, str]:
    return {key.removeprefix(str(folder)): text for file in sorted(folder.iterdir()) for key, text in same_as_before.iterate_values(file)}


def test_same_as_before_ignores_times_and_compares_last_bit(tmp_path):
    for name, seconds, loss, weight in (("old", 3.0, 0.1 + 0.2, 1.0), ("same", 4.0, 0.1 + 0.2, 1.0), ("other", 3.0, 0.3, 1.0 + 1e-7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(LINES | {"loss": loss, "time/step": seconds}) + "\n")
        save_file({"a.weight": np.array([weight, 2.0], dtype=np.float32)}, tmp_path / name / "model.safetensors")
    old, same, other = (make_results(tmp_path / name) for name in ("old", "same", "other"))
    assert old == same and len(old) == 2
    assert {key for key in old if old[key] != other[key]} == {"/metrics.jsonl", "/model.safetensors a.weight"}


def test_same_as_before_masks_paths_pids_and_times_only():
    tree, folder = Path("/home/a/tree"), Path("/home/b/old_plan")
    text = f"{folder}/out of {tree}/tools, pid 71, after 3.5 s at megatron_grpo/run/lifecycle.py:12 on http://127.0.0.1:41; lr 1e-06 x 32"
    assert (
        same_as_before.mask(text, tree, folder)
        == "HERE/out of TREE/tools, pid ..., after ... at ... on http://127.0.0.1:...; lr 1e-06 x 32"
    )


def test_same_as_before_shows_first_difference():
    old = "one\n" + "x" * 100 + "yes and so on"
    shown = same_as_before.find_first_difference(old, old.replace("yes", "no"))
    assert shown == f"  line 2\n  - ...{'x' * 60}yes and so on\n  + ...{'x' * 60}no and so on"
    assert same_as_before.find_first_difference(None, "x") == "  only new has it"


# ---- small trees, which have what the tool asks for and nothing more -------------------------------------------------------------------

TREE = {
    "megatron_grpo/__init__.py": "",
    "megatron_grpo/cli.py": "import megatron_grpo.loop\n",
    "megatron_grpo/loop.py": "",
    "megatron_grpo/unused.py": "",
    "megatron_grpo/{room}/__init__.py": "",
    "megatron_grpo/{room}/protocol.py": "class Environment: ...\nclass StepOutput: ...\n",
    "tests/__init__.py": "",
    "tests/zygote.py": "MODULES = ()\n",
    "tests/end_to_end/__init__.py": "",
    "tests/end_to_end/scripted.py": "from megatron_grpo import cli\ndef train(rank, size, flags): return 0\n",
}


def write_tree(root: Path, room: str = "here", **changed: str) -> Path:
    for name, text in TREE.items():
        path = root / name.format(room=room)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text))
    return root


def compare(folder: Path, kind: str, old: Path, new: Path, capsys: pytest.CaptureFixture) -> tuple[bool, list[str]]:
    (folder / "inputs").mkdir()
    same_as_before.write_python(folder / "python")
    is_same = same_as_before.compare_kind(kind, {"old": old, "new": new}, folder)
    return is_same, capsys.readouterr().out.splitlines()


def test_same_as_before_ignores_moved_folder_and_names_added_import(tmp_path, capsys):
    old = write_tree(tmp_path / "old_tree")
    new = write_tree(tmp_path / "new_tree", "wing/here", cli="import megatron_grpo.loop, megatron_grpo.unused\n")
    (tmp_path / "a").mkdir()
    is_same, lines = compare(tmp_path / "a", "imports", old, new, capsys)
    assert not is_same
    assert lines == [
        "imports: 'files that a plain run imports'", "  line 1", "  - 3", "  + 4",
        "imports: 'a plain run imports unused'", "  only new has it",
        "imports: 10 of 12 the same",
    ]  # fmt: skip


def test_same_as_before_names_module_that_cannot_be_imported(tmp_path, capsys):
    broken = "from megatron_grpo.here.protocol import Reply\n"
    old, new = write_tree(tmp_path / "old_tree"), write_tree(tmp_path / "new_tree", unused=broken)
    for name in "ab":
        (tmp_path / name).mkdir()
    is_same, lines = compare(tmp_path / "a", "imports", old, new, capsys)
    assert not is_same and lines[0] == "imports: 'unused alone'" and "cannot import name 'Reply'" in lines[3]
    is_same, lines = compare(tmp_path / "b", "imports", new, new, capsys)
    assert not is_same and lines[0] == "imports: 'unused alone' compares nothing, both sides fail:"
    assert lines[-1] == "imports: 11 of 11 the same, and 1 compare nothing"


def test_same_as_before_resolves_imports_of_inputs_in_each_tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, room in (("old", "here"), ("new", "wing/here")):
        same_as_before.write_own_files(write_tree(tmp_path / name, room))
        assert f"from megatron_grpo.{room.replace('/', '.')}.protocol import StepOutput\n" in Path("tool.py").read_text()
    with pytest.raises(SystemExit, match="the class Environment of an input is defined in 0 files"):
        same_as_before.write_own_files(write_tree(tmp_path / "none", protocol="class StepOutput: ...\n"))


def test_same_as_before_ignores_editable_install_of_another_checkout(tmp_path):
    """As pip writes one: a .pth file that appends a finder."""
    other, tree = write_tree(tmp_path / "other"), write_tree(tmp_path / "tree")
    (tree / "megatron_grpo/unused.py").unlink()
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "__editable__.megatron_grpo.pth").write_text("import __editable___finder; __editable___finder.install()\n")
    (packages / "__editable___finder.py").write_text(f"""
import sys
from importlib.machinery import PathFinder

MAPPING = {{"megatron_grpo": {str(other / "megatron_grpo")!r}}}

class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, [MAPPING["megatron_grpo"]]) if name.startswith("megatron_grpo.") else None

def install():
    sys.meta_path.append(Finder)
""")
    same_as_before.write_python(tmp_path / "python", [str(packages)])
    imports = "import site; site.addsitedir({!r}); import megatron_grpo.loop, megatron_grpo.unused"
    found = {}
    for name, python, folder in (("as it is", sys.executable, packages), ("guarded", tmp_path / "python/bin/python", other)):
        command = [python, "-c", imports.format(str(folder))]
        found[name] = subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True)
    assert found["as it is"].returncode == 0, found["as it is"].stderr
    assert found["guarded"].stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'megatron_grpo.unused'"


def test_same_as_before_separates_broken_inputs_from_rejections():
    stale = "exit code 2\n\n1. tool.py: ImportError: cannot import name 'Reply' from 'megatron_grpo.here.protocol' (TREE/a.py)"
    foreign = "exit code 2\n\n1. reward.py cannot be imported: No module named 'nowhere'."
    for kind in ("plan", "sentences"):
        assert same_as_before.find_error(kind, stale).startswith("1. tool.py: ImportError")
    assert same_as_before.find_error("plan", foreign) and not same_as_before.find_error("sentences", foreign)
    assert not same_as_before.find_error("plan", "exit code 2\n\n1. micro_batch_size (3) does not divide 8.")
    assert same_as_before.find_error("runs", "exit code 0\nexit code 1\nRunError") == "exit code 1"
    assert not same_as_before.find_error("runs", "exit code 0\nexit code 0\n") and not same_as_before.find_error("runs", "loss: 0.1")
