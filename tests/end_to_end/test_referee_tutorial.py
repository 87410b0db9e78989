"""The tutorial's programs run the real TRL with the hook of its page: nothing differs, and with the fault it is named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.end_to_end.runs import write_inputs
from tests.end_to_end.test_referee import referee
from tests.referee_dumps import hook_of

pytest.importorskip("trl", reason="TRL is a test-only dependency: pip install megatron-grpo[dev]")


@pytest.mark.parametrize("fault", ["", "1"])
def test_the_tutorial_says_what_its_page_says(fault, tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "referee_dump.py").write_text(hook_of("trl"))
    (tmp_path / "train.py").write_text(hook_of("tutorial").replace("max_completion_length=16", "max_completion_length=48"))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=os.environ | {"FAULT": fault}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for step in range(4):
        code, told = referee(tmp_path / "out" / "referee", "--config", tmp_path / "train.py", "--step", step, of="trl")
        assert told["rows"] == 8 and told["micro_batches"] == 2 and (told["first"] is None or fault), told
        if fault and told["first"]:
            assert code == 3 and told["first"] == "loss" and "length bias" in told["cause"], told
    if fault:
        assert told["first"] is not None
    argv = [tmp_path / "out" / "referee", "--config", tmp_path / "train.py", "--step", "0", "--weights", tmp_path / "model"]
    code, told = referee(*argv, of="trl")
    assert "log-probs" in [one["quantity"] for one in told["findings"]] and (fault or code == 0), told
    code, told = referee(*argv, "--temperature", "1.5", of="trl")  # their log-probs are at 3.0
    assert code == 3 and told["first"] == "log-probs", told
    code, told = referee(*argv, "--temperature", "1.7320508", of="trl")
    assert code == 3 and told["cause"] == "temperature applied twice", told
    code, told = referee(tmp_path / "out" / "completions", "--config", tmp_path / "train.py", of="trl")
    assert code == 0 and [one["quantity"] for one in told["findings"]] == ["advantages"]
