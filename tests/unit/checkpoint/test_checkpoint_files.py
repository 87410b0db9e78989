"""Checkpoint directories as files, without a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_grpo.core.base import activity
from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.checkpoint.manifest import CheckpointDirectory, RunFingerprint, find_damage, manifest_content, read_manifest
from tests.checkpoint_files import fingerprints


def write(folder: CheckpointDirectory, step: int, content: bytes = b"weights") -> Path:
    writing = folder.begin(step)
    (writing / "inner").mkdir()
    (writing / "inner" / "file").write_bytes(content)
    said = manifest_content(RunFingerprint(), Progress(step=step), world_size=1, torch="2", num_pending=0, versions={})
    folder.commit(step, said, fingerprints(writing, ["inner/file"]))
    return folder.directory(step)


def verify_files(directory: Path) -> list[str]:
    return find_damage(directory, read_manifest(directory).files)


def test_verify_files_counts_mebibytes_in_its_phase(tmp_path):
    directory = write(CheckpointDirectory(tmp_path / "checkpoints"), 2, bytes(2**20 + 1))
    with activity.phase("restoring", total=2, unit="MiB") as phase:
        assert verify_files(directory) == [] and phase.done == 2


def list_steps_to_try(folder: CheckpointDirectory) -> list[int]:
    return [one.step for one in folder.candidates()]


def test_a_checkpoint_just_written_is_undamaged_and_the_one_to_resume_from(tmp_path):
    folder = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (5, 10):
        assert verify_files(write(folder, step)) == []
    assert list_steps_to_try(folder) == [10, 5]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_checkpoint_verification_detects_every_flipped_bit(tmp_path, place):
    directory = write(CheckpointDirectory(tmp_path), 1)
    content = bytearray((directory / "inner/file").read_bytes())
    content[place] ^= 128
    (directory / "inner/file").write_bytes(content)
    assert verify_files(directory) == [f"{directory}/inner/file has changed since it was written (its SHA-256 differs)"]


def test_checkpoints_are_ordered_by_write_time(tmp_path):
    """Step 15 is of a future that was given up by resuming from 5; its directory is there until the run reaches it again."""
    folder = CheckpointDirectory(tmp_path)
    for step in (5, 10, 15, 10):
        write(folder, step)
    assert list_steps_to_try(folder) == [10, 15, 5]


@pytest.mark.parametrize("content, found", [(None, None), ("5\n", 5), ("", "contains ''"), ("latest", "contains 'latest'")])
def test_checkpoint_pointer_is_a_step_or_raises_config_error(tmp_path, content, found):
    if content is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    pointer = CheckpointDirectory(tmp_path).pointer()
    assert found in pointer if isinstance(found, str) else pointer == found


def test_an_existing_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    write(folder, 5, b"old")
    directory = write(folder, 5, b"new")
    assert (directory / "inner/file").read_bytes() == b"new" and verify_files(directory) == []
    folder.retain(None, newest=5)
    folder.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000005", "latest_checkpointed_iteration.txt"}


def test_retention_keeps_newest_and_ignores_steps_beyond_current(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    for step in (2, 4, 6, 8, 10):
        write(folder, step)
    folder.retain(2, newest=6)  # resumed from before 6, and just saved 6 again
    assert folder.steps() == [4, 6, 8, 10]


@pytest.mark.parametrize(
    ("good", "limit", "newest", "left"),
    [
        ([2], 2, 10, [2, 10]),  # the last good one takes the place of the older of the two
        ([2, 8], 2, 10, [8, 10]),
        ([2, 4], 3, 10, [4, 8, 10]),
        ([2], 1, 10, [2, 10]),  # one more than asked for
        ([10], 1, 10, [10]),
        ([2, 8], 2, 6, [2, 6, 8, 10]),  # 8 and 10 are of a future that was given up: what is good of it is no longer in question
        ([], 2, 10, [8, 10]),
    ],
)
def test_retention_never_removes_the_last_good_checkpoint(tmp_path, good, limit, newest, left):
    folder = CheckpointDirectory(tmp_path)
    for step in (2, 4, 6, 8, 10):
        write(folder, step)
    assert all(folder.mark_good(step, trained=step + 1) for step in good)
    folder.retain(limit, newest=newest)
    assert folder.steps() == left
    assert folder.last_good(newest) == (folder.directory(max(step for step in good if step <= newest)) if good else None)


def test_good_mark_is_not_in_manifest_and_is_removed_with_checkpoint(tmp_path):
    folder = CheckpointDirectory(tmp_path)
    assert not folder.mark_good(5, trained=6) and not folder.directory(5).exists(), "it is still being written, say"
    directory = write(folder, 5)
    assert not read_manifest(directory).is_good
    assert folder.mark_good(5, trained=6) and json.loads((directory / "good.json").read_text()) == {"trained": 6}
    assert read_manifest(directory).is_good and verify_files(directory) == []
    assert not read_manifest(write(folder, 5, b"other weights")).is_good, "saved anew, by a run that went back"


def test_good_mark_with_partial_content_is_ignored(tmp_path):
    folder, child = CheckpointDirectory(tmp_path), None
    directory = write(folder, 5)
    child = os.fork()
    if child == 0:
        os.replace = lambda source, target: os._exit(9)
        folder.mark_good(5, trained=6)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not read_manifest(directory).is_good and verify_files(directory) == []


@pytest.mark.parametrize("moment, left", [("manifest.json", [5]), ("iter_0000010", [5]), ("latest_checkpointed_iteration.txt", [10, 5])])
def test_a_writer_killed_at_any_rename_leaves_a_directory_to_resume_from(tmp_path, moment, left):
    """Between the last two the new checkpoint is whole, and the pointer names the one before it."""
    write(CheckpointDirectory(tmp_path), 5)
    child = os.fork()
    if child == 0:

        def stop(rename):
            return lambda source, target: os._exit(9) if Path(target).name == moment else rename(source, target)

        os.replace, Path.rename = stop(os.replace), stop(Path.rename)
        write(CheckpointDirectory(tmp_path), 10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folder = CheckpointDirectory(tmp_path)
    assert list_steps_to_try(folder) == left and all(verify_files(folder.directory(step)) == [] for step in left)
    assert folder.pointer() == 5
    assert verify_files(write(folder, 10)) == []  # and what it left is no obstacle
    folder.sweep()
    assert not [path for path in tmp_path.glob(".*") if path.is_dir()]


def test_unreadable_manifest_raises_config_error(tmp_path):
    assert "is missing" in read_manifest(tmp_path)
    for content in ("", "[]", "{}", "\x00", "3"):
        (tmp_path / "manifest.json").write_text(content)
        assert "cannot be read" in read_manifest(tmp_path)


@pytest.mark.parametrize("change, says", [
    ({"format": 4}, "is of format 4, written by megatron_grpo 0.1.0; megatron_grpo 0.1.0 reads format 3"),
    ({"color": "red"}, "has the field 'color', which is unknown to megatron_grpo 0.1.0"),
    ({"files": {}}, "lists no files"),
    ({"files": {"common.pt": 7}}, "no size or SHA-256 of common.pt"),
    ({"num_pending": "few"}, "`num_pending` is 'few'"),
    ({"progress": {"step": 5, "laps": 1}}, "`progress` must have integers for step, num_rollouts"),
    ({"progress": {"step": 6}}, "`step` is 5, `progress.step` is 6"),
    ({"step": 6, "progress": {"step": 6}}, "is of step 6, which does not match its directory name"),
], ids=["format", "field", "no files", "file", "count", "progress", "two steps", "other folder"])  # fmt: skip
def test_manifest_with_unknown_or_invalid_field_is_rejected(tmp_path, change, says):
    directory = write(CheckpointDirectory(tmp_path), 5)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | change))
    assert says in read_manifest(directory)


def test_manifest_checksum_detects_every_flipped_bit(tmp_path):
    """The progress and the settings that stand in it stand nowhere else: a flip in `num_tokens` went on unseen."""
    folder = CheckpointDirectory(tmp_path)
    writing = folder.begin(5)
    (writing / "file").write_bytes(b"weights")
    said = manifest_content(RunFingerprint(settings={"lr": 1e-3, "beta": None}), Progress(step=5, num_tokens=972), world_size=1, torch="2",
    num_pending=0,
                 versions={9: 3, 10: 4})  # fmt: skip
    folder.commit(5, said, fingerprints(writing, ["file"]))
    path = folder.directory(5) / "manifest.json"
    whole, before = path.read_bytes(), read_manifest(path.parent)
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        found = read_manifest(path.parent)
        assert isinstance(found, str) or found == before, (place, flipped[place // 8 - 20 : place // 8 + 20])  # white space may flip
    manifest = json.loads(whole)
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    assert read_manifest(path.parent) == before


def test_holds_run_and_remove_run_ignore_files_of_the_user(tmp_path):
    from megatron_grpo.run.checkpoint.output_files import holds_run, remove_run

    (tmp_path / "notes.txt").write_text("mine")
    assert not holds_run(tmp_path)
    write(CheckpointDirectory(tmp_path / "checkpoints"), 1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    assert holds_run(tmp_path)
    remove_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
