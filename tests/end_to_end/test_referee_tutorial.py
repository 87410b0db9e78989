"""The tutorial's programs run the real TRL with the hook of its page: no finding, and with the fault its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.runs import write_inputs
from tests.end_to_end.test_referee import run_referee
from tests.referee_dumps import read_hook

pytest.importorskip("trl", reason="TRL is a test-only dependency: pip install megatron-grpo[dev]")

BOTH = """
import os, runpy, sys
sys.modules["vllm"] = None  # TRL would import it, and does not use it here
for os.environ["FAULT"] in ("", "1"):
    runpy.run_path("train.py", run_name="__main__")
    os.rename("out", "faulty" if os.environ["FAULT"] else "sound")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The clean run and the one with the fault, in one process: importing TRL takes ten times as long as their four steps."""
    folder = tmp_path_factory.mktemp("tutorial")
    write_inputs(folder)
    (folder / "referee_dump.py").write_text(read_hook("trl"))
    (folder / "train.py").write_text(read_hook("tutorial").replace("max_completion_length=16", "max_completion_length=48"))
    done = subprocess.run([sys.executable, "-c", BOTH], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("run", ["sound", "faulty"])
def test_referee_tutorial_prints_the_output_of_its_page(run, folder):
    config = ("--config", folder / "train.py")
    for step in range(4):
        code, told = run_referee(folder / run / "referee", *config, "--step", step, system="trl")
        assert told["rows"] == 8 and told["micro_batches"] == 2 and (told["first"] is None or run == "faulty"), told
        if told["first"]:
            assert code == 3 and told["first"] == "loss" and "length bias" in told["cause"], told
    assert (told["first"] is not None) == (run == "faulty"), told
    code, told = run_referee(folder / run / "completions", *config, system="trl")
    assert code == 0 and [one["quantity"] for one in told["findings"]] == ["advantages"]


def test_referee_tutorial_with_model_checks_temperature(folder):
    argv = ["--config", folder / "train.py", "--step", "0", "--weights", folder / "model"]
    code, told = run_referee(folder / "sound" / "referee", *argv, system="trl")
    assert "log-probs" in [one["quantity"] for one in told["findings"]] and code == 0, told
    argv = [folder / "faulty" / "referee", *argv]  # log-probs come before the loss
    code, told = run_referee(*argv, "--temperature", "1.5", system="trl")  # their log-probs are at 3.0
    assert code == 3 and told["first"] == "log-probs", told
    code, told = run_referee(*argv, "--temperature", "1.7320508", system="trl")
    assert code == 3 and told["cause"] == "temperature applied twice", told
