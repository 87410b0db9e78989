"""A closed terminal does not end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import logging, sys
from megatron_grpo.run.terminal import ignore_closed_terminal
{call}
print("up", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("to nobody", flush=True)
    logging.getLogger().warning("to nobody")
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize(("call", "ends"), [("ignore_closed_terminal()", True), ("", False)])
def test_closed_terminal_loses_output_without_ending_the_process(tmp_path, call, ends):
    """Without the call it fails, so the terminal really is gone."""
    ours, theirs = os.openpty()
    program = [sys.executable, "-c", SCRIPT.format(call=call), str(tmp_path / "end")]
    process = subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    assert os.read(ours, 100).strip() == b"up"
    os.close(ours)
    process.communicate(b"\n", timeout=60)
    assert (process.returncode == 0) == ends == (tmp_path / "end").exists()
