"""A run without a gradient ends with an error message as its last line, and exit code 1."""

from __future__ import annotations

import contextlib
import io

from tests.end_to_end import scripted
from tests.end_to_end.runs import write_inputs
from tests.ranks import run_ranks


def train(rank: int, world_size: int, flags: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return scripted.train(rank, world_size, flags), said.getvalue()


def test_constant_reward_exits_with_code_1_on_all_ranks_and_writes_all_files(tmp_path):
    flags = [*write_inputs(tmp_path), "--max_steps", "3", "--output_dir", str(tmp_path / "out"), "--logprob_diff_warn", "100"]
    (tmp_path / "reward.py").write_text("def even(prompts, **columns):\n    return [float(len(prompt)) for prompt in prompts]\n")
    found = run_ranks(train, 2, flags, timeout=120)
    assert [code for code, _ in found] == [1, 1]
    told = found[0][1]
    assert told.count("WARNING: no group's rewards differed in 2 of 2 steps: the rewards give no gradient.") == 1
    assert told.splitlines()[-1].startswith(
        "megatron-grpo: Nothing was trained: no group's rewards differed in 3 of 3 steps. Look at comple"
    )
    assert "Done" not in told and "Traceback" not in told
    assert (tmp_path / "out/hf/model.safetensors").exists() and (tmp_path / "out/checkpoints/iter_0000003").exists()
