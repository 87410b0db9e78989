"""Checkpoint directories and pending samples as files, without a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.checkpoint.folder import Folder, damage, fingerprints, read_manifest
from megatron_grpo.checkpoint.samples import read_samples, write_samples
from megatron_grpo.types import AnchoredSample, Sample


def write(folder: Folder, step: int, content: bytes = b"weights") -> Path:
    writing = folder.begin(step)
    (writing / "inner").mkdir()
    (writing / "inner" / "file").write_bytes(content)
    folder.commit(step, {"format": 1}, fingerprints(writing, ["inner/file"]))
    return folder.directory(step)


def damage_of(directory: Path) -> list[str]:
    return damage(directory, read_manifest(directory)["files"])


def test_a_checkpoint_just_written_is_undamaged_and_the_one_to_resume_from(tmp_path):
    folder = Folder(tmp_path / "checkpoints")
    for step in (5, 10):
        assert damage_of(write(folder, step)) == []
    assert folder.candidates() == [10, 5]


@pytest.mark.parametrize("place", [0, 3, 6])
def test_every_flipped_bit_is_found(tmp_path, place):
    directory = write(Folder(tmp_path), 1)
    content = bytearray((directory / "inner/file").read_bytes())
    content[place] ^= 128
    (directory / "inner/file").write_bytes(content)
    assert damage_of(directory) == [f"{directory}/inner/file has changed since it was written (its SHA-256 differs)"]


def test_a_pointer_set_back_by_hand_leads_to_the_older_checkpoint(tmp_path):
    folder = Folder(tmp_path)
    for step in (5, 10, 15):
        write(folder, step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert folder.candidates() == [10, 5]


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text("")])
def test_without_a_readable_pointer_the_newest_is_tried_first(tmp_path, harm):
    folder = Folder(tmp_path)
    for step in (5, 10):
        write(folder, step)
    harm(tmp_path / "latest_checkpointed_iteration.txt")
    assert folder.candidates() == [10, 5]


def test_an_existing_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = Folder(tmp_path)
    write(folder, 5, b"old")
    directory = write(folder, 5, b"new")
    assert (directory / "inner/file").read_bytes() == b"new" and damage_of(directory) == []
    folder.retain(None, newest=5)
    folder.sweep()
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000005", "latest_checkpointed_iteration.txt"}


def test_retention_keeps_the_newest_and_leaves_a_given_up_future_alone(tmp_path):
    folder = Folder(tmp_path)
    for step in (2, 4, 6, 8, 10):
        write(folder, step)
    folder.retain(2, newest=6)  # resumed from before 6, and just saved 6 again
    assert folder.steps() == [4, 6, 8, 10]


@pytest.mark.parametrize("moment", ["written", "renamed"])
def test_a_writer_killed_at_any_moment_leaves_a_directory_to_resume_from(tmp_path, moment):
    write(Folder(tmp_path), 5)
    child = os.fork()
    if child == 0:
        if moment == "written":
            Path.rename = lambda *paths: os._exit(9)
        Path.replace = lambda *paths: os._exit(9)
        write(Folder(tmp_path), 10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folder = Folder(tmp_path)
    assert folder.candidates() == [5] and damage_of(folder.directory(5)) == []
    assert damage_of(write(folder, 10)) == []  # and what it left is no obstacle
    folder.sweep()
    assert not list(tmp_path.glob(".*"))


def test_a_manifest_that_cannot_be_read_is_a_sentence(tmp_path):
    assert "is missing" in read_manifest(tmp_path)
    for content in ("", "[]", "{}", "\x00"):
        (tmp_path / "manifest.json").write_text(content)
        assert "cannot be read" in read_manifest(tmp_path)


def sample(kind=Sample, **fields):
    common = dict(
        row=0,
        rollout=1,
        prompt_number=2,
        fresh_at=3,
        version=3,
        token_ids=np.arange(4),
        mask=np.array([False, False, True, True]),
        sampler_logprobs=np.array([0, 0, -0.1, -1e-30], dtype=np.float32),
        advantage=0.1 + 0.2,
        is_dead=False,
        is_truncated=True,
    )
    return kind(**common | fields)


@pytest.mark.parametrize("samples", [
    [],
    [sample()],
    [sample(AnchoredSample, old_logprobs=np.zeros(4, np.float32), anchored_by="cached"), sample(row=7), sample(row=8, advantage=-1.5)],
    [sample(AnchoredSample, old_logprobs=np.full(4, -2, np.float32), anchored_by="rollout", row=1)] * 3,
], ids=["none", "one", "mixed", "anchored"])  # fmt: skip
def test_samples_survive_a_file_bit_for_bit(tmp_path, samples):
    write_samples(tmp_path / "pending.npz", samples)
    back = read_samples(tmp_path / "pending.npz")
    assert [type(one) for one in back] == [type(one) for one in samples]
    for one, other in zip(back, samples):
        for name in one.__dataclass_fields__:
            a, b = getattr(one, name), getattr(other, name)
            same = a.dtype == b.dtype and np.array_equal(a, b) if isinstance(b, np.ndarray) else (type(a), a) == (type(b), b)
            assert same, name


def test_holds_run_and_start_afresh_know_only_what_a_run_writes(tmp_path):
    from megatron_grpo.checkpoint import holds_run, start_afresh

    (tmp_path / "notes.txt").write_text("mine")
    assert not holds_run(tmp_path)
    write(Folder(tmp_path / "checkpoints"), 1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    assert holds_run(tmp_path)
    start_afresh(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
