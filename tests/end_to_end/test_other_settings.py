"""Ranks of one job with different settings: an error on all ranks with the setting names, before a model loads or a group is made."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tests.end_to_end.runs import write_inputs
from tests.ranks import run_ranks

SMALL = dict(layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16)
# What rank 1 is given besides; and what is told. Some of them trained on, some hung, and some ended with a traceback.
OTHERS = {
    "lr": ["--lr", "1e-2"],
    "seed": ["--seed", "7"],
    "max_steps": ["--max_steps", "9"],
    "tensor_model_parallel_size": ["--tensor_model_parallel_size", "2"],
    "pipeline_model_parallel_size": ["--pipeline_model_parallel_size", "2"],
    "micro_batch_size": ["--micro_batch_size", "2"],
    "tuner_type": ["--tuner_type", "lora"],
    "output_dir": ["--output_dir", "elsewhere"],
    "eval_dataset": ["--eval_dataset", "data.jsonl"],
}


def run_commands(rank, world_size, flags, others):
    """Return (exit code, output) of consecutive `megatron-grpo train` commands."""
    from megatron_grpo.core.parallel import state
    from tests.end_to_end import scripted

    def no_groups(*args, **kwargs):
        raise AssertionError("groups were made")

    state.ParallelState = no_groups
    found = []
    for other in others:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = scripted.train(rank, world_size, [*flags, *(other if rank else [])])
        found.append((code, said.getvalue()))
    return found


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return [*write_inputs(folder, rows=12, **SMALL), "--output_dir", str(folder / "out"), "--max_steps", "2"]


def test_ranks_with_different_settings_fail_on_all_ranks_with_setting_names(flags, monkeypatch):
    monkeypatch.chdir(Path(flags[1]).parent)

    def files():
        return sorted({*Path().iterdir()} - {Path("__pycache__")})  # Python's, of the reward that each rank imports

    before = files()
    ranks = run_ranks(run_commands, 2, flags, list(OTHERS.values()), timeout=120)
    for place, name in enumerate(OTHERS):
        codes, told = [rank[place][0] for rank in ranks], "".join(rank[place][1] for rank in ranks)
        assert codes == [2, 2] and told.count("differs between ranks") == 1, (name, told)
        assert f"1. {name} differs between ranks: rank 0 has " in told and "Traceback" not in told, (name, told)
    assert files() == before
