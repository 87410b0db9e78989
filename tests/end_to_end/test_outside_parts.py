"""A sampler, a reference and a gradient check from outside the package work in a run without changes to the package."""

from __future__ import annotations

import contextlib
import io
import math

import numpy as np
import pytest

from megatron_grpo import cli
from megatron_grpo.run import plug_ins
from tests.end_to_end import outside_parts
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

STEPS = 4


def train(rank: int, world_size: int, flags: list[str]):
    """Return the exit code, the output, and the sampler's weights by version."""
    sampler = outside_parts.Alphabet()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = outside_parts.train(flags, sampler)
    return code, said.getvalue(), sampler.held


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run on two pipeline stages: only one of them uses the reference."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*write_inputs(folder), "--output_dir", str(folder / "out"), "--max_steps", str(STEPS), "--pipeline_model_parallel_size", "2"]
    flags += ["--beta", "0.1", "--kl_estimator", "k1", "--verify_weight_sync", "false", "--export_hf", "false", "--num_generations", "2"]
    found = run_ranks(train, 2, [*flags, "--global_batch_size", "8", "--micro_batch_size", "2"])
    assert [code for code, _, _ in found] == [0, 0]
    return read_jsonl(folder / "out" / "metrics.jsonl"), found


def test_outside_sampler_gives_the_completions(run):
    """Prompts 0 to 3 in the first step have 1 to 4 tokens."""
    steps, _ = run
    assert [step["completions/mean_length"] for step in steps[:2]] == [2.5, 6.5]


def test_outside_reference_gives_the_kl(run):
    """With k1 it is mean(log p) - mean(log p_ref); each row is on-policy, so log p follows from the trainer's perplexity."""
    for step in run[0]:
        assert step["kl"] == pytest.approx(-math.log(step["sampling/perplexity_trainer"]) - outside_parts.LOGPROB, abs=1e-5)


def test_outside_gradient_check_skips_the_step(run):
    _, found = run
    assert "optimizer step 2 is skipped: the gradient was rejected" in found[0][1] and found[0][1].count("was rejected") == 1
    for _, _, held in found:
        assert sorted(held) == [1, 2, 3]
        differs = {(a, b): any(not np.array_equal(held[a][name], held[b][name]) for name in held[a]) for a, b in ((1, 2), (2, 3))}
        assert differs == {(1, 2): False, (2, 3): True}


def train_with_row(rank: int, world_size: int, flags: list[str]) -> int:
    """Return the exit code of a run whose sampler is named only by its table row."""
    plug_ins.ENGINES["colocate"] = plug_ins.PlugIn("tests.end_to_end.outside_parts.build_alphabet")
    return cli.main(["train", *flags])


def test_one_table_row_adds_a_sampler(tmp_path):
    flags = [*write_inputs(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    flags += ["--verify_weight_sync", "false", "--export_hf", "false"]
    assert run_ranks(train_with_row, 1, flags) == [0]
    [step] = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert step["completions/mean_length"] == 2.5
