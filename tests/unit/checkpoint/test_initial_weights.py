"""Checkpoints that a run may start from, checked before a model loads."""

from __future__ import annotations

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory, RunFingerprint, manifest_content
from megatron_grpo.run.checkpoint.resume import checkpoint_path, initial_weights_problems, read_initial_weights
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.inputs import ValidatedInputs


def write_checkpoint(path, step=3, **settings):
    folder = CheckpointDirectory(path / "checkpoints")
    writing = folder.begin(step)
    (writing / "weights").write_bytes(b"1234")
    files = {"weights": {"bytes": 4, "sha256": "x"}}
    folder.commit(
        step,
        manifest_content(RunFingerprint(settings=settings), Progress(step=step), world_size=1, torch="", num_pending=0, versions={}),
        files,
    )
    return folder.directory(step)


def test_initial_weights_from_run_or_checkpoints_folder_are_the_newest_checkpoint(tmp_path):
    write_checkpoint(tmp_path, 2)
    newest = write_checkpoint(tmp_path, 3)
    for path in (tmp_path, tmp_path / "checkpoints", newest):
        assert read_initial_weights(path).directory == newest and checkpoint_path(str(path)) == str(newest)
    (newest / "weights").write_bytes(b"12")
    assert read_initial_weights(tmp_path).step == 2
    with pytest.raises(ConfigError, match="has 2 bytes, expected 4"):
        read_initial_weights(newest)


def test_initial_weights_of_another_program_are_rejected(tmp_path):
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(ConfigError, match="is a Megatron-Core checkpoint of another program"):
        read_initial_weights(tmp_path)
    with pytest.raises(ConfigError, match="has no megatron_grpo checkpoint"):
        read_initial_weights(tmp_path / "iter_0000100")
    with pytest.raises(ConfigError, match="does not exist"):
        read_initial_weights(tmp_path / "nowhere")


def test_initial_weights_of_other_kind_are_rejected(tmp_path):
    write_checkpoint(tmp_path, tuner_type="lora", freeze_parameters=["model.embed"])
    cfg = resolve(["--mcore_model", str(tmp_path)])
    assert [problem.flags[1] for problem in initial_weights_problems(cfg, ValidatedInputs())] == ["tuner_type", "freeze_parameters"]


@pytest.mark.parametrize(
    ("words", "begins", "resume"),
    [
        ("--mcore_model x", "x", "auto"),
        ("--mcore_model x --finetune true", "x", "auto"),
        ("--mcore_model x --finetune false", None, "x"),
        ("--resume x --finetune true", "x", "auto"),
        ("--resume x", None, "x"),
        ("--resume x --finetune false --no_load_optim true", None, "x"),
    ],
)
def test_finetune_flag_selects_initial_weights_or_resume(words, begins, resume):
    cfg = resolve(words.split())
    assert (cfg.run.mcore_model, cfg.run.resume) == (begins, resume) and validate(cfg) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--finetune true", "finetune true requires a checkpoint to start from"),
        ("--no_load_optim true", "resumes from a checkpoint without its optimizer, and resume is not a checkpoint"),
        ("--no_load_rng true --mcore_model x", "without its random generators, and resume is not a checkpoint"),
        ("--mcore_model x --tuner_type lora", "is not supported with tuner_type lora"),
    ],
)
def test_initial_weights_settings_without_path_are_rejected(words, said):
    [problem] = validate(resolve(words.split()))
    assert said in problem.message
