"""What a run does not use, it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.end_to_end import runs

PLUG_INS = ("analysis", "environments", "servers", "rewards.builtin")
MOST_FILES = 186  # 154 of them run code; 16 are the docstrings of packages

RUN = """
import json, sys
from tests.end_to_end import scripted

code = scripted.train(0, 1, sys.argv[1:])
files = [name for name, module in sys.modules.items() if name.startswith("megatron_grpo") and getattr(module, "__file__", None)]
print(json.dumps([code, files]))
"""


def test_a_plain_run_imports_no_plug_in_room(tmp_path):
    flags = [*runs.write_inputs(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    flags += ["--logprob_diff_warn", "1"]  # the scripted log-probs are a little off, and a step that is kept is no plain one
    root = Path(__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", RUN, *flags], capture_output=True, text=True, cwd=root, check=True).stdout
    code, files = json.loads(said.splitlines()[-1])
    assert code == 0 and "megatron_grpo.policy.policy" in files
    assert [name for name in files if name.removeprefix("megatron_grpo.").startswith(PLUG_INS)] == []
    assert len(files) <= MOST_FILES
