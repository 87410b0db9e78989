"""`megatron-grpo train` started again: its messages, what it rejects before a model loads, and that it overwrites nothing until then."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import run_ranks

SMALL = dict(layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, ffn=8)


def run_and_capture(rank, world_size, flags):
    """Return the exit code and the output; building a model for an invalid configuration is a failure."""
    import contextlib
    import io

    from tests.end_to_end import scripted

    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = scripted.train(rank, world_size, flags)
    return code, told.getvalue()


def run_refused(rank, world_size, flags):
    from megatron_grpo.run.assemble import run as build

    def no_model(*args, **kwargs):
        raise AssertionError("a model was built")

    build.build_policy = no_model
    return run_and_capture(rank, world_size, flags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps, two rollouts of two steps each, with checkpoints after 2, 3 (in mid-rollout) and 4."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*write_inputs(folder, rows=12, **SMALL), *("--num_generations", "2"), *("--global_batch_size", "8")]
    flags += ["--steps_per_generation", "2", "--save_steps", "1", "--save_total_limit", "3", "--export_hf", "false"]
    flags += ["--log_completions_steps", "0"]
    [(code, told)] = run_ranks(run_and_capture, 1, [*flags, "--max_steps", "4", "--output_dir", str(folder / "out")])
    assert code == 0, told
    return folder, flags


@pytest.fixture
def run(finished, tmp_path):
    """A copy of that run, and its flags."""
    folder, flags = finished
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run" / "out", [
        *(flag.replace(str(folder), str(tmp_path / "run")) for flag in flags),
        *("--output_dir", str(tmp_path / "run" / "out")),
    ]


def read_all_files(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_resume_finished_run_logs_that_nothing_is_left(run):
    out, flags = run
    before = (out / "metrics.jsonl").read_text()
    [(code, told)] = run_ranks(run_and_capture, 1, [*flags, "--max_steps", "4"])
    assert code == 0 and (out / "metrics.jsonl").read_text() == before
    assert f"Resuming from {out}/checkpoints/iter_0000004: 4 of 4 optimizer steps done." in told
    assert told.count("The run is complete (4 optimizer steps).") == 1


def test_resume_prints_changes_once_and_continues(run):
    out, flags = run
    results = run_ranks(
        run_and_capture, 2, [*flags, "--max_steps", "5", "--lr", "5e-4", "--epsilon", "0.1", "--padded_vocab_multiple", "96"]
    )
    assert [code for code, _ in results] == [0, 0], results
    told = "".join(text for _, text in results)
    for line in ("Changed since that checkpoint:", "  lr  0.001 -> 0.0005", "  epsilon  0.2 -> 0.1", "  max_steps  4 -> 5"):
        assert told.count(line + "\n") == 1
    assert [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def replace_model(folder, out):
    from tests.tiny_models import write_tiny

    write_tiny(folder / "model", "qwen3", tied=True, std=0.1, seed=7, **SMALL)


def replace_tokenizer(folder, out):
    path = folder / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace('"11":11', '"x":11').replace('"11": 11', '"x": 11'))


def replace_column(folder, out):
    lines = (folder / "data.jsonl").read_text().splitlines()
    lines[5] = json.dumps(json.loads(lines[5]) | {"answer": "y"})
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def flip_byte(folder, out):
    for path in out.glob("checkpoints/iter_*/common.pt"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")


def change_nothing(folder, out):
    pass


@pytest.mark.parametrize("harm, flags, says", [
    (replace_model, [], "The model ("),
    (replace_tokenizer, [], "The vocabulary ("),
    (replace_column, [], "The data set (12 rows, "),
    (flip_byte, [], "No usable checkpoint to resume from"),
    (change_nothing, ["--seed", "7"], "seed is 7, but was 42"),
    (change_nothing, ["--resume", "{out}/checkpoints/iter_0000003", "--temperature", "0.5"], "temperature was 1.0 and is 0.5"),
    (change_nothing, ["--resume", "{out}/../elsewhere"], "has no checkpoint"),
], ids=["model", "vocabulary", "data", "bytes", "seed", "temperature within a rollout", "path"])  # fmt: skip
def test_resume_incompatible_run_is_an_error_before_loading_and_changes_no_file(run, harm, flags, says):
    out, given = run
    harm(out.parent, out)
    before = read_all_files(out)
    [(code, told)] = run_ranks(run_refused, 1, [*given, "--max_steps", "6", "--lr", "0.5", *(flag.format(out=out) for flag in flags)])
    assert code == 2 and says in told and "Traceback" not in told, told
    assert read_all_files(out) == before


def run_refused_in_own_directory(rank, world_size, flags):
    """Run `refused` where each rank has its own directory at the same relative path."""
    os.chdir(Path(f"machine{rank}"))
    return run_refused(rank, world_size, flags)


def test_resume_different_files_between_machines_are_an_error_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = write_inputs(tmp_path / "machine0", **SMALL)
    shutil.copytree(tmp_path / "machine0", tmp_path / "machine0" / "teacher")
    shutil.copytree(tmp_path / "machine0", tmp_path / "machine1")
    flags = [flag.replace(f"{tmp_path}/machine0", ".") for flag in flags] + ["--teacher_model", "./teacher/model", "--max_steps", "1"]
    flags += ["--output_dir", str(tmp_path / "out")]
    replace_model(tmp_path / "machine1" / "teacher", None)
    replace_column(tmp_path / "machine1", None)
    with (tmp_path / "machine1" / "reward.py").open("a") as reward:
        reward.write("# another one\n")
    results = run_ranks(run_refused_in_own_directory, 2, flags)
    told = "".join(text for _, text in results)
    assert [code for code, _ in results] == [2, 2] and "Traceback" not in told, told
    for name in ("teacher", "data set", "reward reward.py:even"):
        assert told.count(f"The {name} differs between ranks: rank 0 has ") == 1, told
    assert "The model " not in told
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_restart_overwrites_no_file(run):
    out, flags = run
    [(code, told)] = run_ranks(
        run_and_capture, 1, [*flags, "--max_steps", "5", "--overwrite_output_dir", "true"], env={"TORCHELASTIC_RESTART_COUNT": "1"}
    )
    assert code == 0 and "overwrite_output_dir is ignored: this is a restart (TORCHELASTIC_RESTART_COUNT=1)" in told
    assert "Resuming from" in told and [record["step"] for record in read_jsonl(out / "metrics.jsonl")] == [1, 2, 3, 4, 5]
