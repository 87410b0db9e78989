"""`--share_prefix` in complete runs: a run without it is resumed with it, and samples and steps are equal."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

SMALL = dict(layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, ffn=8)
SAME = ("loss", "reward", "grad_norm", "kl", "entropy", "staleness/mean", "num_tokens", "learning_rate", "completions/mean_length")


def train(rank, world_size, flags):
    from tests.end_to_end import scripted

    return scripted.train(rank, world_size, flags)


def test_resume_of_unshared_run_with_shared_prefix_is_equal(tmp_path):
    """Resumes in mid-rollout with pending rows, which always have their group's prefix."""
    flags = [*write_inputs(tmp_path, rows=12, **SMALL), *("--global_batch_size", "8"), *("--steps_per_generation", "2")]
    flags += [*("--num_iterations", "2"), *("--beta", "0.02"), *("--max_tokens_per_micro_batch", "64"), *("--save_steps", "3")]
    flags += [*("--max_steps", "6"), *("--save_total_limit", "3"), *("--log_entropy", "true"), *("--export_hf", "false")]
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert run_ranks(train, 1, [*flags, *("--output_dir", str(whole)), *("--share_prefix", "false")], timeout=120) == [0]
    shutil.copytree(whole, other)
    first = str(other / "checkpoints" / "iter_0000003")
    changed = ["--resume", first, "--share_prefix", "true", "--output_dir", str(other)]
    assert run_ranks(train, 2, [*flags, *changed], timeout=120) == [0, 0]
    apart, shared = read_jsonl(whole / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    assert [step["step"] for step in shared] == [1, 2, 3, 4, 5, 6]
    for one, two in zip(apart, shared, strict=True):
        wanted, found = ({name: step[name] for name in SAME if name in step} for step in (one, two))
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert [step["packing/shared"] > 0.1 for step in shared] == [False] * 3 + [True] * 3
