"""Evaluations in a run and with the command: equal scores in each layout, and no effect on the run. Also a run with a rollout function."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet
import pytest

from tests.end_to_end.runs import read_jsonl, train, write_inputs
from tests.ranks import run_ranks

ASKED = ("--num_generations_eval", "2", "--eval_num_prompts", "6", "--eval_pass_threshold", "0.5")


OWN = """
def rollout(prompts, sampler):
    drawn = sampler(prompts)
    return {"completion_ids": [one.token_ids for one in drawn], "logprobs": [one.logprobs for one in drawn], "seen": [1.0] * len(drawn)}
"""


def evaluate(rank: int, world_size: int, flags: list[str]) -> int:
    from megatron_grpo.cli import main

    return main(["eval", *flags])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run with evaluations, one without, and one with a rollout function."""
    folder = tmp_path_factory.mktemp("run")
    common = [*write_inputs(folder, rows=16), "--max_steps", "2", "--export_hf", "false"]
    sets = ["--eval_datasets", f"all={folder}/data.jsonl", f"again={folder}/data.jsonl", "--eval_steps", "1", *ASKED]
    sets += ["--save_steps", "1", "--save_total_limit", "1", "--metric_for_best_model", "eval/all", "--greater_is_better", "false"]
    (folder / "own.py").write_text(OWN)
    own = [*common, "--rollout_func", f"{folder}/own.py:rollout"]
    for name, flags in (("with", [*common, *sets]), ("without", common), ("own", own)):
        assert run_ranks(train, 1, [*flags, "--output_dir", str(folder / name)], True, timeout=300) == [0]
    return folder


def read_completions(path) -> list[str]:
    return pyarrow.parquet.read_table(path)["completion"].to_pylist()


def test_evaluation_does_not_change_the_run(run):
    """Rollouts and gradients equal those of the run without evaluations bit for bit."""
    with_, without = (read_jsonl(run / name / "metrics.jsonl") for name in ("with", "without"))
    assert [(step["reward"], step["grad_norm"], step["loss"]) for step in with_] == [
        (step["reward"], step["grad_norm"], step["loss"]) for step in without
    ]
    for step in range(2):
        file = f"completions/step_{step:06d}.parquet"
        assert read_completions(run / "with" / file) == read_completions(run / "without" / file)


def test_rollout_function_that_only_samples_equals_the_run_without_it(run):
    """Requests are submitted and finish one by one, with the seeds of single answers; tokens, log-probs and masks are unchanged."""
    own, without = (read_jsonl(run / name / "metrics.jsonl") for name in ("own", "without"))
    for ours, theirs in zip(own, without, strict=True):
        assert ours["reward"] == theirs["reward"] and ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert (
            ours["sampling/sampling_logp_difference/max"] < 1e-4
            and ours["completions/clipped_ratio"] == theirs["completions/clipped_ratio"]
        )
    assert read_completions(run / "own/completions/step_000001.parquet") == read_completions(
        run / "without/completions/step_000001.parquet"
    )


def test_evaluation_is_logged_with_standard_errors_and_paired_change(run):
    told = read_jsonl(run / "with" / "evaluations.jsonl")
    assert [(line["step"], line["name"]) for line in told] == [(step, name) for step in range(3) for name in ("all", "again")]
    first, last = told[0], told[4]
    assert (first["num_prompts"], first["n"], first["temperature"], first["mean@2"]) == (6, 2, 1.0, first["even"])
    table = pyarrow.parquet.read_table(run / "with" / "evaluations" / "all" / "step_000000.parquet").to_pydict()
    scores = np.array(table["rewards/even"]).reshape(6, 2)
    assert first["mean@2"] == pytest.approx(scores.mean()) and first["pass@2"] == (scores >= 0.5).any(axis=1).mean()
    assert last["change"] == pytest.approx(last["mean@2"] - first["mean@2"]) and last["change/since"] == 0
    assert read_completions(run / "with/evaluations/all/step_000000.parquet") != read_completions(
        run / "with/evaluations/again/step_000000.parquet"
    )
    assert (run / "with/plots/reward.png").is_file()


def test_evaluation_best_and_last_checkpoints_are_kept(run):
    told = {
        line["step"]: line["mean@2"] for line in read_jsonl(run / "with" / "evaluations.jsonl") if line["name"] == "all" and line["step"]
    }
    best = json.loads((run / "with/checkpoints/best.json").read_text())
    assert best["metric"] == "eval/all/mean@2" and best["best_metric"] == min(told.values()) == told[best["best_global_step"]]
    assert {path.name for path in run.glob("with/checkpoints/iter_*")} == {f"iter_{best['best_global_step']:07d}", "iter_0000002"}


def test_eval_command_in_another_layout_repeats_scores_of_the_run(run):
    checkpoint = run / "with/checkpoints/iter_0000002"
    flags = ["--resume", str(checkpoint), "--tensor_model_parallel_size", "2", "--output_dir", str(run / "command")]
    assert run_ranks(evaluate, 2, flags, timeout=300) == [0, 0]
    for ours, theirs in zip(read_jsonl(run / "command/evaluations.jsonl"), read_jsonl(run / "with/evaluations.jsonl")[4:], strict=True):
        assert {name: ours[name] for name in theirs if "change" not in name} == {n: v for n, v in theirs.items() if "change" not in n}
    for name in ("all", "again"):
        file = f"evaluations/{name}/step_000002.parquet"
        assert read_completions(run / "command" / file) == read_completions(run / "with" / file)
    assert json.loads((run / "command/evaluations.jsonl").read_text().splitlines()[0])["model"] == str(checkpoint)
