"""Machines without torch and the training stack, such as a Mac: `plan` works, and other commands print one message."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_grpo.cli import COMMANDS, main

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]


def list_requirements(system: str) -> set[str]:
    """What pip installs there with `pip install megatron-grpo`, besides the package itself."""
    body = ast.parse((ROOT / "setup.py").read_text()).body
    [listed] = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REQUIRED"]
    asked = map(Requirement, ast.literal_eval(listed))
    return {one.name for one in asked if one.marker is None or one.marker.evaluate({"sys_platform": system})}


def link_distributions(site: Path, names: set[str]) -> None:
    """Makes distributions that are installed here, and those that they need, importable from a folder."""
    seen: set[str] = set()
    while names:
        seen.add(name := names.pop())
        package = metadata.distribution(name)
        needs = [one for one in map(Requirement, package.requires or []) if one.marker is None or one.marker.evaluate({"extra": ""})]
        names |= {one.name for one in needs} - seen
        for top in {file.parts[0] for file in package.files or []} - {".."}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python that has what pip installs on a Mac; but psutil, which only parquet files ask for, lacks too."""
    site = tmp_path_factory.mktemp("site")
    link_distributions(site, list_requirements("darwin") - {"psutil"})

    def run(*words: str) -> tuple[int, str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
        command = [sys.executable, "-S", "-m", "megatron_grpo", *words]  # -S: what is installed here is not there
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=site)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(MODEL))
    row = {"prompt": [{"role": "user", "content": "4 5"}], "answer": "x"}
    (folder / "data.jsonl").write_text(8 * (json.dumps(row) + "\n"))
    (folder / "tool.py").write_text('def add(a: int) -> int:\n    """Adds.\n\n    Args:\n        a: a number\n    """\n    return a\n')
    flags = ["--model", str(folder), "--dataset", str(folder / "data.jsonl"), "--reward_funcs", "accuracy"]
    return [*flags, "--max_completion_length", "16", "--global_batch_size", "16"], folder


def test_requirements_include_training_stack_on_linux_only():
    assert list_requirements("darwin") == {"numpy", "pyyaml", "rich", "psutil"}
    assert {"torch", "megatron-core", "transformers"} <= list_requirements("linux")


def test_plan_runs_without_training_stack(bare, flags):
    code, told = bare("plan", "--world_size", "1", *flags[0])
    assert code == 0 and "optimizer step" in told, told
    code, told = bare("plan", "--world_size", "1", *flags[0], "--tools", f"{flags[1]}/tool.py:add")
    assert code == 0 and "transformers, which describes them to the model, is not installed" in " ".join(told.split()), told


@pytest.mark.parametrize("command", ["train", "eval", "dry-run"])
def test_command_without_package_names_it(bare, flags, command):
    code, told = bare(command, *flags[0])
    assert code == 2 and "Traceback" not in told
    assert told.startswith("megatron-grpo: this command needs ") and ", which is not installed. On GPUs: pip install" in told


def test_referee_without_extra_prints_remedy_and_keeps_help(bare):
    code, told = bare("referee", "dump", "--of", "trl")
    remedy = "pip install 'megatron-grpo[referee]'; in a clone: bash tools/install.sh referee."
    assert (code, told) == (2, f"megatron-grpo: this command needs megatron_grpo_referee, which is not installed. {remedy}\n")
    code, told = bare("referee", "--help")
    assert code == 0 and "--of names the system" in told


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("plan", "init", "completion")])
def test_commands_with_ranks_are_rejected_outside_linux(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main([command]) == 2
    assert f"{command} requires Linux; this is darwin, where only `plan`, `init` and `completion` run" in capsys.readouterr().err
