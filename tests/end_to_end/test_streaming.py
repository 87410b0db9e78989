"""Runs that stream their data set: the same prompts on all ranks, exact resume, and an error at an invalid row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.runs import read_jsonl, stop_after_steps, write_inputs
from tests.end_to_end.test_compare_losses import compare_losses
from tests.end_to_end.test_resume_compatibility import SMALL, run_and_capture
from tests.ranks import run_ranks
from tests.step_dump_cases import replayed

STEPS = 6
EXACT = ("loss", "reward", "grad_norm", "num_tokens")
# Four prompts a step out of 22 rows, five of which are read together: blocks and epochs end inside of steps.
STREAMED = ["--streaming", "true", "--shuffle_buffer_size", "5", "--max_prompt_length", "20"]


def train_until_signal(rank: int, world_size: int, flags: list[str], steps: int) -> tuple[int, str]:
    """Run `heard`, and send rank 0 a signal after `steps` recorded optimizer steps."""
    if rank == 0:
        stop_after_steps(flags, steps)
    return run_and_capture(rank, world_size, flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming")
    flags = [*write_inputs(folder, rows=22, **SMALL), "--max_steps", str(STEPS), "--log_completions_steps", "0"]
    return folder, [*flags, "--lr_decay_style", "constant"]


@pytest.fixture(scope="module")
def whole(inputs):
    """The uninterrupted run. Only it dumps a step, records rows and is evaluated, with a data set that is not streamed."""
    folder, flags = inputs
    (folder / "held.jsonl").write_text("".join((folder / "data.jsonl").read_text().splitlines(keepends=True)[:7]))
    more = ["--logprob_diff_warn", "0.001", "--save_steps", str(STEPS - 1), "--record_rows", "true"]
    more += ["--eval_dataset", str(folder / "held.jsonl"), "--eval_steps", "4"]
    [(code, told), _] = run_ranks(run_and_capture, 2, [*flags, *STREAMED, *more, "--output_dir", str(folder / "whole")])
    assert code == 0, told
    return folder / "whole"


def read_steps(out: Path) -> list[dict]:
    return [{name: step[name] for name in EXACT} for step in read_jsonl(out / "metrics.jsonl")]


def get_weights(out: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    [file] = (out / "hf").rglob("*.safetensors")
    return load_file(file)


def assert_same_run(out: Path, whole: Path):
    assert read_steps(out) == read_steps(whole) and len(read_steps(out)) == STEPS
    expected = get_weights(whole)
    assert all(np.array_equal(found, expected[name]) for name, found in get_weights(out).items())


def test_streaming_with_one_block_equals_run_without_streaming(inputs, tmp_path):
    _, flags = inputs
    streamed = ["--streaming", "true", "--max_prompt_length", "20"]
    for name, more in (("with", streamed), ("without", ["--max_prompt_length", "20"])):
        [(code, told)] = run_ranks(run_and_capture, 1, [*flags, *more, "--output_dir", str(tmp_path / name)])
        assert code == 0, told
    assert_same_run(tmp_path / "with", tmp_path / "without")


def test_streaming_stopped_run_resumes_exactly_and_on_other_world_size_with_same_rows(inputs, whole, tmp_path):
    _, flags = inputs
    flags = [*flags, *STREAMED, "--output_dir"]
    results = run_ranks(train_until_signal, 2, [*flags, str(tmp_path / "out")], 2)
    assert [code for code, _ in results] == [3, 3], results
    before = len(read_jsonl(tmp_path / "out" / "metrics.jsonl"))
    assert 2 <= before < STEPS
    shutil.copytree(tmp_path / "out", tmp_path / "one")
    assert [code for code, _ in run_ranks(run_and_capture, 2, [*flags, str(tmp_path / "out")])] == [0, 0]
    assert_same_run(tmp_path / "out", whole)

    [(code, told)] = run_ranks(run_and_capture, 1, [*flags, str(tmp_path / "one")])
    assert code == 0, told
    for one, other in zip(read_steps(tmp_path / "one"), read_steps(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert [step["num_tokens"] for step in read_steps(tmp_path / "one")] == [step["num_tokens"] for step in read_steps(whole)]


def test_streaming_step_dump_and_recorded_rows_replay_without_dataset(inputs, whole):
    folder, _ = inputs
    data = folder / "data.jsonl"
    data.rename(folder / "gone")
    steps = read_jsonl(whole / "metrics.jsonl")
    [step_dump] = (whole / "debug_dump").iterdir()
    [(code, replay)] = run_ranks(replayed, 1, step_dump, "--json", "true")
    assert code == 0 and replay["numbers"]["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=1e-4), replay
    [(code, told)] = run_ranks(compare_losses, 1, [str(whole), "--json", "--variant", "loss_type=vespo"])
    own = json.loads(told)["variants"][0]
    assert code == 0 and own["grad_norm"] == pytest.approx(steps[-1]["grad_norm"], rel=1e-4)
    (folder / "gone").rename(data)
    told = read_jsonl(whole / "evaluations.jsonl")
    assert [(one["step"], one["num_prompts"]) for one in told] == [(step, 7) for step in (0, 4, STEPS)]


def test_streaming_bad_row_saves_and_ends_the_run_and_resume_is_exact(inputs, whole, tmp_path):
    folder, flags = inputs
    good = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    data = tmp_path / "data.jsonl"
    flags = [*(str(data) if flag == str(folder / "data.jsonl") else flag for flag in flags), *STREAMED]
    flags += ["--output_dir", str(tmp_path / "out")]
    data.write_text("".join([*good[:12], "{oops\n", *good[13:]]))
    results = run_ranks(run_and_capture, 2, flags)
    assert [code for code, _ in results] == [1, 1]
    told = "".join(text for _, text in results)
    assert told.count("dataset, rows 10 to 14, which streaming reads together: 1 line(s) are not JSON objects: data.jsonl line 13: ") == 1
    assert f"run the same command again; saved after optimizer step 2 in {tmp_path / 'out'}" in told
    assert [step["step"] for step in read_jsonl(tmp_path / "out" / "metrics.jsonl")] == [1, 2], "ten good rows are two steps of four"

    data.write_text("".join(good))
    assert [code for code, _ in run_ranks(run_and_capture, 2, flags)] == [0, 0]
    assert_same_run(tmp_path / "out", whole)


def test_streaming_incompatible_settings_are_errors_before_loading(inputs, whole, tmp_path):
    from tests.end_to_end.test_resume_compatibility import run_refused

    folder, flags = inputs
    [(code, told)] = run_ranks(run_refused, 1, [*flags, "--streaming", "true", "--output_dir", str(tmp_path / "a")])
    assert code == 2 and "streaming requires max_prompt_length: rows are read during the run, and the sampler is created before" in told
    shutil.copytree(whole, tmp_path / "b")
    flags = [*flags, "--max_prompt_length", "20", "--output_dir", str(tmp_path / "b")]
    [(code, told)] = run_ranks(run_refused, 1, flags)
    assert code == 2 and "streaming" in told and "the remaining prompts would have another order" in told
    data = json.dumps({"prompt": "9 9 9", "answer": "y"}) + "\n"
    (tmp_path / "d.jsonl").write_text(data * 22)
    flags[flags.index("--dataset") + 1] = str(tmp_path / "d.jsonl")
    [(code, told)] = run_ranks(run_refused, 1, [*flags, *STREAMED])
    assert code == 2 and "The data set (first 5 rows, " in told
