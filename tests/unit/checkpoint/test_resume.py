"""The checkpoint that a run resumes from, and settings that may have changed, decided from files without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.checkpoint.fingerprints import DAY, FLAGS, list_settings
from megatron_grpo.run.checkpoint.manifest import POINTER, CheckpointDirectory, RunFingerprint, manifest_content
from megatron_grpo.run.checkpoint.resume import find_checkpoints, plan_resume
from megatron_grpo.run.checkpoint.resume_compatibility import _REFERENCE_SETTINGS, _WHY, changes_since
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
from megatron_grpo.run.config.rules.batch_sizes import with_derived_sizes as with_sizes
from megatron_grpo.run.config.table import table
from tests.checkpoint_files import fingerprints
from tests.tiny_models import write_tiny

CONTENTS = {"model": "qwen3 1a", "vocabulary": "2b", "data set": "40 rows, 3c", "reward r.py:f": "4d"}
SIZES = ["--global_batch_size", "8", "--num_generations", "4", "--steps_per_generation", "2"]


def make_config(out: Path, *flags: str):
    cfg = resolve(["--output_dir", str(out), "--max_steps", "9", *SIZES, *flags])
    sizes = checked_sizes(cfg)
    return with_sizes(cfg, sizes), TrainingSchedule.from_length(sizes, max_steps=cfg.run.max_steps)


def save_checkpoint(out: Path, step: int, *flags: str, buffer: int = 0, num_rollouts: int | None = None, **origin) -> Path:
    """A checkpoint with one small file, as a run with these flags would describe it."""
    cfg, schedule = make_config(out, *flags)
    folder = CheckpointDirectory(out / "checkpoints")
    writing = folder.begin(step)
    (writing / "common.pt").write_bytes(b"weights")
    progress = Progress(step=step, num_rollouts=-(-step // 2) if num_rollouts is None else num_rollouts)
    known = {"settings": list_settings(cfg), "content": CONTENTS, "sizes": schedule.sizes.stream_sizes} | origin
    said = manifest_content(RunFingerprint(**known), progress, world_size=1, torch="2", num_pending=buffer, versions={})
    folder.commit(step, said, fingerprints(writing, ["common.pt"]))
    return folder.directory(step)


def make_resume_plan(out: Path, *flags: str, content=CONTENTS, environ=None):
    return plan_resume(*make_config(out, *flags), content, environ=environ or {})


def catch_error(call, *args, **more) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args, **more)
    return str(error.value)


def find_step(resume) -> int | None:
    return resume.candidates[0].manifest.step if resume.candidates else None


# -- what may change -----------------------------------------------------------------------------------------------------------------------


def test_resume_settings_that_are_rejected_have_a_reason():
    refused = {setting.name for setting in table().values() if setting.on_resume == "refused"}
    assert refused | set(_REFERENCE_SETTINGS) | set(FLAGS) == set(_WHY)  # none forgotten, none that may change


def test_resume_without_changes_reports_none(tmp_path):
    save_checkpoint(tmp_path, 4)
    resume = make_resume_plan(tmp_path)
    assert resume.candidates[0].changes == () and resume.notes == ()
    assert resume.lines(resume.candidates[0]) == [
        f"Resuming from {tmp_path}/checkpoints/iter_0000004: 4 of 9 optimizer steps done.",
        "It is not confirmed good yet: no step has been trained from it, as usual for the newest checkpoint.",
    ]


def test_resume_continues_newest_checkpoint_and_reports_last_good_one(tmp_path):
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step)
    CheckpointDirectory(tmp_path / "checkpoints").mark_good(2, trained=3)
    resume = make_resume_plan(tmp_path)
    assert find_step(resume) == 6
    assert f"The last confirmed one is {tmp_path}/checkpoints/iter_0000002 (use it with --resume)." in resume.lines(resume.candidates[0])[1]
    CheckpointDirectory(tmp_path / "checkpoints").mark_good(6, trained=7)
    resume = make_resume_plan(tmp_path)
    assert resume.lines(resume.candidates[0])[1] == "It is confirmed good: its weights have been used for sampling and training."


REFUSED = {"dataset_drop_last": ("false", "true"),
           "seed": ("42", "43"), "dataset_shuffle": ("true", "false"), "torch_dtype": ("bfloat16", "float32"),
           "use_distributed_optimizer": ("true", "false")}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_resume_with_changed_fixed_setting_is_rejected_with_both_values(tmp_path, name):
    was, now = REFUSED[name]
    save_checkpoint(tmp_path, 4)
    assert f"{name} is {now}, but was {was} for {tmp_path}/checkpoints/iter_0000004" in catch_error(
        make_resume_plan, tmp_path, f"--{name}", now
    )


MOVING = ["--beta", "0.1", "--sync_ref_model", "true"]


@pytest.mark.parametrize("flags, verdict", [(MOVING[2:], None), (MOVING[:2], None), (MOVING, "sync_ref_model is true")])
def test_resume_with_reference_model_in_one_of_run_and_checkpoint_only_is_rejected(tmp_path, flags, verdict):
    save_checkpoint(tmp_path, 4)
    if verdict:
        assert verdict in catch_error(make_resume_plan, tmp_path, *flags)
    else:
        assert len(make_resume_plan(tmp_path, *flags).candidates[0].changes) == 1


def test_resume_with_changed_optimizer_offload_is_accepted(tmp_path):
    save_checkpoint(tmp_path, 4)
    for flags in (["--offload_optimizer", "true", "--offload_model", "true"], ["--optimizer_cpu_offload", "true"]):
        assert make_resume_plan(tmp_path, *flags).candidates[0].changes == ()


@pytest.mark.parametrize("name, says", [("model", "another"), ("vocabulary", "another"), ("data set", "41 rows, 9f")])
def test_another_model_vocabulary_or_data_set_is_refused(tmp_path, name, says):
    save_checkpoint(tmp_path, 4)
    told = catch_error(make_resume_plan, tmp_path, content={**CONTENTS, name: says})
    assert f"The {name} ({says}) is not the one of {tmp_path}/checkpoints/iter_0000004 ({CONTENTS[name]})" in told


def test_resume_with_changed_free_setting_is_reported(tmp_path):
    save_checkpoint(tmp_path, 4)
    flags = ["--lr", "1e-4", "--loss_type", "dapo", "--temperature", "0.7", "--max_completion_length", "9", "--save_steps", "7"]
    resume = make_resume_plan(tmp_path, *flags, content={**CONTENTS, "reward r.py:f": "5e"})
    assert resume.lines(resume.candidates[0])[2:] == [
        "Changed since that checkpoint:",
        "  max_completion_length  256 -> 9",
        "  temperature  1.0 -> 0.7",
        "  loss_type  grpo -> dapo",
        "  lr  1e-06 -> 0.0001",
        "  reward r.py:f  4d -> 5e",
    ]


def test_resume_with_changed_sizes_is_rejected_while_samples_are_pending(tmp_path):
    save_checkpoint(tmp_path / "between", 4)
    save_checkpoint(tmp_path / "within", 5, buffer=8)
    changes = ["--global_batch_size", "4", "--temperature", "0.5"]
    assert {"global_batch_size", "temperature"} <= {
        change.name for change in make_resume_plan(tmp_path / "between", *changes).candidates[0].changes
    }
    told = catch_error(make_resume_plan, tmp_path / "within", *changes)
    assert "temperature was 1.0 and is 0.5" in told and "8 of its samples are not trained yet" in told
    assert "temperature was 1.0" in catch_error(make_resume_plan, tmp_path / "within", "--temperature", "0.5")
    assert find_step(make_resume_plan(tmp_path / "within")) == 5


LOOKS = {"--beta": "0.1", "--entropy_coef": "0.1", "--compute_zero_advantage_rows": "true", "--top_entropy_quantile": "0.5"}


@pytest.mark.parametrize("flag", LOOKS)
def test_resume_with_changed_zero_gradient_settings_is_accepted_between_rollouts_only(tmp_path, flag):
    """Such rows have no old log-probs. What looked at them before has left out nothing."""
    save_checkpoint(tmp_path / "between", 4)
    save_checkpoint(tmp_path / "within", 5, buffer=8)
    save_checkpoint(tmp_path / "looked", 5, flag, LOOKS[flag], buffer=8)
    assert find_step(make_resume_plan(tmp_path / "between", flag, LOOKS[flag])) == 4
    told = catch_error(make_resume_plan, tmp_path / "within", flag, LOOKS[flag])
    assert f"{flag[2:]} was" in told and "8 of its samples are not trained yet" in told
    assert find_step(make_resume_plan(tmp_path / "looked")) == 5
    assert find_step(make_resume_plan(tmp_path / "within", "--loss_type", "dapo")) == 5


def test_resume_with_other_layout_is_reported_and_other_micro_batch_size_is_not(tmp_path):
    save_checkpoint(tmp_path, 4)
    layout = "--world_size 4 --tensor_model_parallel_size 2 --micro_batch_size 2 --max_tokens_per_micro_batch 900".split()
    resume = make_resume_plan(tmp_path, *layout)
    assert resume.lines(resume.candidates[0])[3:] == [
        "  world_size  1 -> 4",
        "  tensor_model_parallel_size  1 -> 2",
    ]


def test_resume_of_complete_run_reports_that_it_is_complete(tmp_path):
    save_checkpoint(tmp_path, 9)
    resume = make_resume_plan(tmp_path)
    assert "The run is complete (9 optimizer steps)." in resume.lines(resume.candidates[0])[-1]


def test_resume_with_changed_content_is_rejected_or_reported():
    before, now = RunFingerprint(content=dict(a="1", model="1", gone="1")), RunFingerprint(content=dict(a="2", model="2", new="1"))
    assert {change.name: change.verdict for change in changes_since(before, now)} == {"a": "said", "model": "refused"}
    assert {setting.on_resume for setting in table().values()} == {"refused", "between", "said", "free"}


# -- which checkpoint ----------------------------------------------------------------------------------------------------------------------


def test_resume_prefers_newer_checkpoint_over_older_pointer_with_note(tmp_path):
    for step in (2, 4):
        save_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / POINTER).write_text("2\n")
    resume = make_resume_plan(tmp_path)
    assert find_step(resume) == 4 and "names step 2" in resume.notes[0] and "iter_0000004 is used instead" in resume.notes[0]


def test_resume_with_pointer_to_missing_step_uses_newest_complete_checkpoint(tmp_path):
    save_checkpoint(tmp_path, 4)
    for step in ("9", "1"):
        (tmp_path / "checkpoints" / POINTER).write_text(step)
        resume = make_resume_plan(tmp_path)
        assert find_step(resume) == 4 and f"names step {step}" in resume.notes[0]


def test_resume_with_pointer_but_no_checkpoint_is_rejected(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / POINTER).write_text("4")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    (tmp_path / "run.lock").touch()
    assert "names step 4, but its checkpoint is missing" in catch_error(make_resume_plan, tmp_path)


def test_resume_with_pointer_folder_or_output_dir_file_raises_config_error(tmp_path):
    save_checkpoint(tmp_path / "out", 4)
    (tmp_path / "out" / "checkpoints" / POINTER).unlink()
    (tmp_path / "out" / "checkpoints" / POINTER).mkdir()
    assert "is a directory, expected a file" in catch_error(make_resume_plan, tmp_path / "out")
    (tmp_path / "file").write_text("")
    assert "is a file. Use a directory" in catch_error(make_resume_plan, tmp_path / "file")
    assert "is a file, expected a directory" in catch_error(make_resume_plan, tmp_path / "new", "--resume", str(tmp_path / "file"))


@pytest.mark.parametrize("harm, says", [
    (lambda path: (path / "common.pt").write_bytes(b"we"), "has 2 bytes, expected 7"),
    (lambda path: (path / "common.pt").unlink(), "is missing"),
    (lambda path: (path / "manifest.json").write_text("{}"), "cannot be read"),
], ids=["cut", "missing", "manifest"])  # fmt: skip
def test_resume_detects_damaged_checkpoint_before_start(tmp_path, harm, says):
    for step in (2, 4):
        save_checkpoint(tmp_path, step)
    harm(tmp_path / "checkpoints" / "iter_0000004")
    resume = make_resume_plan(tmp_path)
    assert find_step(resume) == 2 and any("is skipped" in note and says in note for note in resume.notes)
    assert says in catch_error(make_resume_plan, tmp_path / "new", "--resume", str(tmp_path / "checkpoints" / "iter_0000004"))
    harm(tmp_path / "checkpoints" / "iter_0000002")
    assert "No usable checkpoint" in catch_error(make_resume_plan, tmp_path)


def test_resume_from_another_run_into_used_output_dir_is_rejected(tmp_path):
    save_checkpoint(tmp_path / "theirs", 4)
    save_checkpoint(tmp_path / "mine", 2)
    other = ["--resume", str(tmp_path / "theirs")]
    assert find_step(make_resume_plan(tmp_path / "new", *other)) == 4
    told = catch_error(make_resume_plan, tmp_path / "mine", *other)
    assert "iter_0000002" in told and "is a checkpoint of another run" in told
    assert find_step(make_resume_plan(tmp_path / "theirs", "--resume", str(tmp_path / "theirs" / "checkpoints" / "iter_0000004"))) == 4


def test_resume_never_and_overwrite_output_dir_have_documented_effect(tmp_path):
    save_checkpoint(tmp_path, 4)
    assert "contains an earlier run, but resume is never" in catch_error(make_resume_plan, tmp_path, "--resume", "never")
    for resume in ("never", "auto"):
        found = make_resume_plan(tmp_path, "--resume", resume, "--overwrite_output_dir", "true")
        assert found.wipes and not found.candidates
    assert "starts a new run, but resume" in catch_error(
        make_resume_plan, tmp_path, "--resume", str(tmp_path), "--overwrite_output_dir", "true"
    )


# -- restarts ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--overwrite_output_dir", "true"], ["--resume", "never"]], ids=["overwrite", "never"])
@pytest.mark.parametrize("environ", [
    {"TORCHELASTIC_RESTART_COUNT": "1"},
    {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_ID": "77"},
    {"SLURM_JOB_ID": "77"},
    {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"},
], ids=["elastic", "requeued", "this job", "this launch"])  # fmt: skip
def test_resume_after_restart_removes_nothing(tmp_path, flags, environ):
    save_checkpoint(tmp_path, 4, job={"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "abc"})
    resume = make_resume_plan(tmp_path, *flags, environ=environ)
    assert not resume.wipes and find_step(resume) == 4
    assert "is ignored" in resume.notes[0] and "continues its own run" in resume.notes[0]


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "78"}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}])
def test_overwrite_output_dir_applies_to_first_start_of_another_job(tmp_path, environ):
    save_checkpoint(tmp_path, 4, job={"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "none"})
    assert make_resume_plan(tmp_path, "--overwrite_output_dir", "true", environ=environ).wipes


def test_resume_after_restart_before_first_checkpoint_ignores_replaced_run(tmp_path):
    save_checkpoint(tmp_path, 4, job={"SLURM_JOB_ID": "77"})
    environ = {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}
    told = catch_error(make_resume_plan, tmp_path, "--overwrite_output_dir", "true", environ=environ)
    assert "was written by another job (SLURM_JOB_ID=77, not 78)" in told


def test_resume_after_restart_uses_own_checkpoints_and_not_resume_path(tmp_path):
    save_checkpoint(tmp_path / "theirs", 4)
    save_checkpoint(tmp_path / "mine", 6)
    resume = make_resume_plan(tmp_path / "mine", "--resume", str(tmp_path / "theirs"), environ={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert find_step(resume) == 6 and "is ignored" in resume.notes[0]


def test_a_checkpoint_records_the_job_that_wrote_it(tmp_path):
    environ = {"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "none", "HOME": "/"}
    assert make_resume_plan(tmp_path, environ=environ).origin.job == {"SLURM_JOB_ID": "77"}


def test_resume_plan_imports_no_torch(tmp_path):
    code = "import sys, megatron_grpo.run.checkpoint.resume, megatron_grpo.run.checkpoint.fingerprints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_find_checkpoints_without_settings_returns_resume_step(tmp_path):
    save_checkpoint(tmp_path, 4)
    assert find_step(find_checkpoints(tmp_path, environ={})) == 4


def test_resume_keeps_the_template_date_of_the_run(tmp_path):
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from megatron_grpo.run.data.chat import PromptEncoder
    from megatron_grpo.run.inputs import ValidatedInputs, tokenizer

    model = write_tiny(tmp_path / "model", layers=1)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d.%m.%Y %H') }}{{ messages[0].content }}")

    def rendered(out: Path, *flags: str) -> str:
        inputs = ValidatedInputs(model_path=model)
        tokenizer(make_config(out, "--model", str(model), *flags)[0], inputs)
        short = PromptEncoder(inputs.tokenizer)([{"role": "user", "content": "?"}])
        expected = inputs.tokenizer(ChatTemplate(inputs.tokenizer).render([{"role": "user", "content": "?"}]), add_special_tokens=False)
        assert list(short) == expected["input_ids"], "single answers and episodes print the same"
        return ChatTemplate(inputs.tokenizer).render([{"role": "user", "content": "?"}])

    save_checkpoint(tmp_path / "old", 2, content={**CONTENTS, DAY: "2026-01-02"})
    save_checkpoint(tmp_path / "older", 2)
    today = f"{date.today():%d.%m.%Y} 00?"
    assert rendered(tmp_path / "old") == "02.01.2026 00?"
    for out, flags in (("new", []), ("older", []), ("old", ["--resume", "never", "--overwrite_output_dir"])):
        assert rendered(tmp_path / out, *flags) == today, out


def test_resume_on_another_template_date_is_reported(tmp_path):
    save_checkpoint(tmp_path, 2, content={**CONTENTS, DAY: "2026-01-02"})
    [difference] = make_resume_plan(tmp_path, content={**CONTENTS, DAY: "2026-01-03"}).candidates[0].changes
    assert str(difference) == "day that the chat template prints  2026-01-02 -> 2026-01-03"
