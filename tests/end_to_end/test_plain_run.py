"""A plain run imports no unused part; the files that it imports, and that a step enters, are within the limits of size.toml."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests import size_ledger
from tests.end_to_end import runs

UNUSED = ("commands.analysis", "commands.compat", "commands.start", "plugins")

# A step: from the first completion of the second rollout to the first of the third, 16 completions later.
RUN = """
import json, sys
from tests.end_to_end import scripted

calls, entered, read_answers = [], set(), scripted.read_answers

def counted(cfg, path):
    answer = read_answers(cfg, path)
    def count(*asked):
        calls.append(asked)
        return answer(*asked)
    return count

def note(frame, event, argument):
    if event == "call" and 16 < len(calls) <= 32:
        entered.add(frame.f_code.co_filename)

scripted.read_answers = counted
sys.setprofile(note)
code = scripted.train(0, 1, sys.argv[1:])
sys.setprofile(None)
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.split(".")[0] == "megatron_grpo"}
files = {name: file for name, file in files.items() if file}
print(json.dumps([code, len(calls), list(files), [name for name, file in files.items() if file in entered]]))
"""


PAGE = Path(__file__).parents[2] / "docs/architecture.md"


def test_plain_run_imports_no_plugin_and_no_other_command(tmp_path):
    flags = [*runs.write_inputs(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "3"]
    flags += ["--logprob_diff_warn", "1"]  # the scripted log-probs are a little off, and a step that is kept is no plain one
    root = Path(__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", RUN, *flags], capture_output=True, text=True, cwd=root, check=True).stdout
    code, completions, files, step_files = json.loads(said.splitlines()[-1])
    assert code == 0 and "megatron_grpo.core.policy.policy" in files
    assert [name for name in files if name.removeprefix("megatron_grpo.").startswith(UNUSED)] == []
    assert completions == 3 * 16 and "megatron_grpo.core.trainer.sample_buffer" in step_files
    entered = {name.replace(".", "/") + ".py" for name in step_files if name.startswith("megatron_grpo.core.")}
    documented = re.findall(r"^\| `(core/[\w/]+\.py)` \| .* \| step \|$", PAGE.read_text(), re.M)
    assert entered - {f"megatron_grpo/{path}" for path in documented} == set()
    limits, most = size_ledger.read(), f"{len(files)} files are imported, and a step enters {len(step_files)}"
    assert len(files) <= limits["plain_run_files"] and len(step_files) <= limits["step_files"], most


OF_A_RANK = """
import json, sys
from tests.end_to_end import scripted

code = scripted.train(0, 1, sys.argv[1:])
print(json.dumps([code, [name for name in sys.modules if name.startswith("megatron_grpo.commands")]]))
"""


def test_rank_0_alone_imports_the_planner(tmp_path):
    flags = [*runs.write_inputs(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--logprob_diff_warn", "1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", OF_A_RANK, *flags], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
                         env=os.environ | launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip
    (code, planner), (other_code, none) = (json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks)
    assert (code, other_code) == (0, 0) and "megatron_grpo.commands.planning.command" in planner and none == []
