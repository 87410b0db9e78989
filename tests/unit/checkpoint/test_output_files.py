"""Files of a run in output_dir: which are replaced or removed, and which are never changed."""

from __future__ import annotations

import json
import os

import pytest

from megatron_grpo.core.base.errors import ConfigError, RunError
from megatron_grpo.core.base.files import MARK, read_mark, write_mark
from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory
from megatron_grpo.run.checkpoint.output_files import (
    WRITTEN_BY_A_RUN,
    check_output_dir,
    claim,
    holds_run,
    overwrite_obstacle,
    remove_run,
    restart_obstacle,
)
from megatron_grpo.run.checkpoint.resume import find_checkpoints

FOREIGN = ("config.yaml", "plan.json", "metrics.jsonl", "evaluations.jsonl", "hf/config.json", "hf_merged/notes", "plots/kl.png",
           "completions/step_000001.parquet", "checkpoints/iter_0000100/mp_rank_00", "evaluations/a/prompts.jsonl")  # fmt: skip
HOW = ({}, {"resume": "never"}, {"overwrites": True}, {"resume": "never", "overwrites": True})


def write_file(path, text="mine"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def find_error(out, **how) -> str:
    with pytest.raises(ConfigError) as error:
        find_checkpoints(out, environ={}, **how)
    return str(error.value)


def write_run_files(out) -> None:
    claim(out)
    for name in FOREIGN:
        write_file(out / name, "ours")
    for export in ("hf", "hf_merged"):
        write_mark(out / export, "export", files=os.listdir(out / export))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_output_dir_with_foreign_file_is_rejected_without_writing(tmp_path, name, how):
    write_file(tmp_path / name)
    said = find_error(tmp_path, **how)
    assert f"{tmp_path}/{name.partition('/')[0]}" in said and "was not written by `train`" in said
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_output_dir_of_run_with_or_without_marks_is_accepted(tmp_path):
    write_run_files(tmp_path / "new")
    write_file(tmp_path / "old" / "metrics.jsonl")
    write_file(tmp_path / "old" / "run.lock", "")
    for name in ("new", "old"):
        assert find_checkpoints(tmp_path / name, overwrites=True, environ={}).wipes
    for name in ("notes.txt", "plots/mine.png", "checkpoints/readme"):  # beside what a run writes
        write_file(tmp_path / "beside" / name)
    assert find_checkpoints(tmp_path / "beside", overwrites=True, environ={}).wipes


def test_output_dir_of_evaluation_is_rejected_for_training_and_vice_versa(tmp_path):
    write_file(tmp_path / "evaluations.jsonl")
    write_mark(tmp_path, "eval")
    assert "was not written by `train`" in find_error(tmp_path)
    ours = ("evaluations.jsonl", "evaluations")
    assert overwrite_obstacle(tmp_path, "eval", ours) is None
    claim(tmp_path)
    assert "was not written by `eval`" in (overwrite_obstacle(tmp_path, "eval", ours) or "")


@pytest.mark.parametrize("name", WRITTEN_BY_A_RUN)
def test_output_dir_with_dangling_link_or_file_for_folder_is_rejected(tmp_path, name):
    claim(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    assert f"{tmp_path}/{name} is a link to {tmp_path}/gone, which does not exist" in find_error(tmp_path, overwrites=True)
    (tmp_path / name).unlink()
    write_file(tmp_path / name) if WRITTEN_BY_A_RUN[name] else (tmp_path / name).mkdir()
    assert f"{tmp_path}/{name} is a f" in find_error(tmp_path, overwrites=True)


def test_overwrite_output_dir_removes_only_files_of_a_run(tmp_path):
    write_run_files(tmp_path / "out")
    theirs = ("notes.txt", "checkpoints/best_of_all/weights", "plots/mine.png", "hf/model.gguf", "completions/labeled.csv")
    for name in theirs:
        write_file(tmp_path / "out" / name)
    remove_run(tmp_path / "out")
    kept = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert kept == {MARK, f"hf/{MARK}", *theirs} and not holds_run(tmp_path / "out")
    assert find_checkpoints(tmp_path / "out", environ={}).notes == (), "the next run can write its model beside hf/model.gguf"


def test_overwrite_output_dir_empties_a_symlinked_folder(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "scratch")
    assert find_checkpoints(tmp_path / "out", environ={}).candidates == ()
    claim(tmp_path / "out")
    write_file(tmp_path / "out" / "checkpoints" / "iter_0000001" / "common.pt")
    remove_run(tmp_path / "out")
    assert (tmp_path / "out" / "checkpoints").is_symlink() and not list((tmp_path / "scratch").iterdir())


def test_output_dir_with_foreign_hf_folder_is_rejected_before_training(tmp_path):
    claim(tmp_path)
    write_file(tmp_path / "hf" / "config.json")
    assert "which is not from an export of this program" in find_error(tmp_path)


def test_output_dir_exports_without_marks_are_marked(tmp_path):
    write_file(tmp_path / "run.lock", "")
    write_file(tmp_path / "hf" / "config.json")
    find_checkpoints(tmp_path, environ={})
    claim(tmp_path)
    assert read_mark(tmp_path / "hf")["files"] == ["config.json"]


@pytest.mark.parametrize("lost", ["absent", "empty"])
def test_output_dir_with_records_but_no_checkpoints_is_rejected(tmp_path, lost):
    """Scratch is not mounted, and the job is started again."""
    write_run_files(tmp_path)
    write_mark(tmp_path, "train", saved=40)
    assert restart_obstacle(tmp_path) is None and CheckpointDirectory(tmp_path / "checkpoints").steps() == [100]
    os.rename(tmp_path / "checkpoints", tmp_path / "elsewhere")
    if lost == "empty":
        (tmp_path / "checkpoints").mkdir()
    for how in ({}, {"resume": "never"}):
        assert "records of a run that saved step 40" in find_error(tmp_path, **how)
    restart = {"TORCHELASTIC_RESTART_COUNT": "1"}
    with pytest.raises(ConfigError, match="saved step 40"):
        find_checkpoints(tmp_path, overwrites=True, environ=restart)
    assert find_checkpoints(tmp_path, overwrites=True, environ={}).wipes, "who says so loses them"


def test_output_dir_of_run_killed_before_first_checkpoint_is_reused(tmp_path):
    claim(tmp_path)
    write_file(tmp_path / "metrics.jsonl", json.dumps({"step": 1}) + "\n")
    assert "the run starts again and replaces them" in find_checkpoints(tmp_path, environ={}).notes[0]


def test_output_dir_removed_and_recreated_is_detected(tmp_path):
    claim(tmp_path / "out")
    check_output_dir(tmp_path / "out")
    (tmp_path / "out" / MARK).unlink()
    with pytest.raises(RunError, match="was removed or emptied while the run wrote to it"):
        check_output_dir(tmp_path / "out")


def test_output_files_list_contains_every_plot():
    from megatron_grpo.run.metrics.plots import PLOTS

    assert {f"{plot.file}.png" for plot in PLOTS} <= set(WRITTEN_BY_A_RUN["plots"])
