"""Runs that begin with the weights of another run's checkpoint, or resume without a part of it. Completions are scripted."""

from __future__ import annotations

import json

import pytest
import safetensors.torch

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.end_to_end.scripted import train
from tests.end_to_end.test_compare_losses import compare_losses
from tests.ranks import run_ranks
from tests.step_dump_cases import replayed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`first` trains two steps; `begun` has its weights under TP 2 and a learning rate of 0; `bare` resumes without moments."""
    folder = tmp_path_factory.mktemp("run")
    common = [*write_inputs(folder), "--save_total_limit", "4"]
    checkpoint = str(folder / "first/checkpoints/iter_0000002")
    still = ["--lr", "0", "--debug_dump_steps", "0"]
    cases = {
        "first": (1, ["--max_steps", "2"]),
        "begun": (
            2,
            ["--mcore_model", str(folder / "first"), "--tensor_model_parallel_size", "2", "--beta", "0.1", "--max_steps", "1", *still],
        ),
        "bare": (1, ["--resume", checkpoint, "--no_load_optim", "true", "--no_load_rng", "true", "--max_steps", "3", *still]),
        "bare of 2": (2, ["--resume", checkpoint, "--no_load_optim", "true", "--max_steps", "3", *still]),  # each has a part of the moments
    }
    for name, (ranks, flags) in cases.items():
        if name == "begun":  # of the first run's two steps the earlier one is to be best in this one
            lengths = [line["completions/mean_length"] for line in read_jsonl(folder / "first/metrics.jsonl")]
            by = ["--metric_for_best_model", "completions/mean_length", "--greater_is_better", str(lengths[0] >= lengths[1])]
            best = [*common, "--max_steps", "2", "--save_steps", "1", *by, "--load_best_model_at_end", "true", "--debug_dump_steps", "0"]
            assert run_ranks(train, 1, [*best, "--output_dir", str(folder / "best")], timeout=300) == [0]
        assert run_ranks(train, ranks, [*common, *flags, "--output_dir", str(folder / name)], timeout=300) == [0] * ranks, name
    return folder


def test_resume_restores_adaptive_entropy_coefficient(tmp_path):
    adaptive = ["--use_adaptive_entropy", "true", "--entropy_coef", "0.02", "--entropy_coef_delta", "0.01", "--entropy_target", "9"]
    common = [
        *write_inputs(tmp_path),
        *adaptive,
        "--logprob_diff_warn",
        "0.001",  # what comes from a table is further off: the first step of each run is kept
        "--export_hf",
        "false",
        "--max_steps",
        "3",
        "--save_steps",
        "2",
        "--record_rows",
        "true",
        "--output_dir",
    ]
    assert run_ranks(train, 1, [*common, str(tmp_path / "whole")], timeout=300) == [0]
    half = ["--resume", str(tmp_path / "whole/checkpoints/iter_0000002")]
    assert run_ranks(train, 1, [*common, str(tmp_path / "half"), *half], timeout=300) == [0]
    whole, [last] = read_jsonl(tmp_path / "whole/metrics.jsonl"), read_jsonl(tmp_path / "half/metrics.jsonl")
    assert [(step["entropy_coef/applied"], step["entropy_coef"]) for step in whole] == [
        (0.0, pytest.approx(0.03)), (pytest.approx(0.03), pytest.approx(0.04)), (pytest.approx(0.04), pytest.approx(0.05)),
    ]  # fmt: skip
    for name in ("loss", "grad_norm", "entropy", "entropy_coef", "entropy_coef/applied"):
        assert last[name] == whole[2][name], name
    [step_dump] = (tmp_path / "half/debug_dump").iterdir()
    [(code, told)] = run_ranks(replayed, 1, step_dump, "--json", "true")
    assert code == 0 and told["numbers"] == pytest.approx({name: last[name] for name in ("loss", "grad_norm")}, rel=1e-5)
    asked = [str(tmp_path / "whole"), "--step", "2", "--json", "--variant", "entropy_coef=0"]  # behind the second checkpoint
    [(code, said)] = run_ranks(compare_losses, 1, asked)
    own, without = json.loads(said)["variants"]
    assert code == 0 and {name: own[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: whole[2][name] for name in ("loss", "grad_norm")}, rel=1e-5
    )
    assert own["loss"] - without["loss"] == pytest.approx(-0.04 * whole[2]["entropy"], rel=1e-3)  # what the step had, not entropy_coef


def export(rank: int, world_size: int, flags: list[str]) -> int:
    from megatron_grpo.cli import main

    return main(["export", *flags])


def read_weights(folder):
    return safetensors.torch.load_file(folder / "hf/model.safetensors")


def read_optimizer_steps(directory) -> int:
    def read(rank, world_size):
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_common_state_dict(str(directory))["optimizer_step"]

    return run_ranks(read, 1)[0]


def test_initial_weights_from_checkpoint_in_another_layout_start_at_step_0(runs):
    then, begun, model = (
        read_weights(runs / "first"),
        read_weights(runs / "begun"),
        safetensors.torch.load_file(runs / "model/model.safetensors"),
    )
    assert then.keys() == begun.keys() and all((then[name] == begun[name]).all() for name in then)
    assert any((then[name] != model[name]).any() for name in then)
    [step] = read_jsonl(runs / "begun/metrics.jsonl")
    assert step["step"] == 1 and step["kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the model as the run began
    assert read_optimizer_steps(runs / "begun/checkpoints/iter_0000001") == 1


def test_final_model_is_the_best_checkpoint_if_set(runs):
    best = json.loads((runs / "best/checkpoints/best.json").read_text())
    assert best["best_global_step"] == 1 and (runs / "best/checkpoints/iter_0000002").is_dir()
    found, first = read_weights(runs / "best"), read_weights(runs / "first")
    assert any((found[name] != first[name]).any() for name in first), "that of the last step"
    checkpoint = [*("--resume", str(runs / "best/checkpoints/iter_0000001")), *("--output_dir", str(runs / "of_1"))]
    assert run_ranks(export, 1, checkpoint) == [0]
    then = safetensors.torch.load_file(runs / "of_1/model.safetensors")
    assert then.keys() == found.keys() and all((then[name] == found[name]).all() for name in then)


def test_initial_expert_weights_from_checkpoint_on_other_ranks_are_exact(tmp_path):
    """Saved by one rank, loaded by two with half of the experts each."""
    common = [*write_inputs(tmp_path, family="qwen3_moe", layers=1, ffn=64, experts=4), "--max_steps", "1", "--debug_dump_steps", "0"]
    first, begun = tmp_path / "first", tmp_path / "begun"
    assert run_ranks(train, 1, [*common, "--output_dir", str(first)], timeout=300) == [0]
    flags = [*common, "--mcore_model", str(first), "--expert_model_parallel_size", "2", "--lr", "0", "--output_dir", str(begun)]
    assert run_ranks(train, 2, flags, timeout=300) == [0, 0]
    then, now, model = read_weights(first), read_weights(begun), safetensors.torch.load_file(tmp_path / "model/model.safetensors")
    assert then.keys() == now.keys() and all((then[name] == now[name]).all() for name in then)
    assert all((then[name] != model[name]).any() for name in then if "experts" in name and "down_proj" in name)


@pytest.mark.parametrize("name", ["bare", "bare of 2"])
def test_resume_without_optimizer_state_works(runs, name):
    assert [read_optimizer_steps(runs / one) for one in ("first/checkpoints/iter_0000002", f"{name}/checkpoints/iter_0000003")] == [2, 1]
    bare, then = read_weights(runs / name), read_weights(runs / "first")
    assert all((bare[name] == then[name]).all() for name in then)
    assert [line["step"] for line in read_jsonl(runs / name / "metrics.jsonl")] == [3]
