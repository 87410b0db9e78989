"""`megatron-grpo train --async_save`, killed while it writes: the checkpoint before is complete, and the run resumes bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end import scripted
from tests.end_to_end.runs import read_jsonl, write_inputs
from tests.ranks import RanksFailed, run_ranks

STEPS = 7
TINY = dict(layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, ffn=8)
# Rollouts of 24 rows against steps of 16, two passes: rows wait, with their log-probs, behind most steps.
UNEVEN = "--allow_unaligned_generation true --generation_batch_size 24 --num_iterations 2 --micro_batch_size 2 --beta 0.02"
SAVES = "--save_steps 1 --save_total_limit 2 --log_completions_steps 0 --export_hf false"
# Where in a save a rank is killed, and which: (rank, function, its how-manieth call in this process).
INSTANTS = [
    (1, "a tensor", 40), (0, "a tensor", 3), (0, "telling", 2), (1, "telling", 2), (0, "the description", 2), (0, "the manifest", 1),
    (0, "the pointer", 2),
]  # fmt: skip


def kill_in_phase(rank, world_size, flags, who, where, count):
    import os
    import signal

    from megatron_grpo.run.checkpoint import distributed, manifest

    places = {"a tensor": (distributed.HashedFile, "write"), "telling": (distributed.ShardedWriter, "gather_files"),
              "the description": (distributed, "write_file"), "the manifest": (manifest.CheckpointDirectory, "commit"),
              "the pointer": (manifest, "atomic_write_text")}  # fmt: skip
    owner, name = places[where]
    whole, calls = getattr(owner, name), []

    def until(*args, **named):
        calls.append(where != "the description" or args[0].name == ".metadata")
        if rank == who and sum(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **named)

    setattr(owner, name, until)
    return scripted.train(rank, world_size, flags)


def fingerprints(out: Path, step: int) -> dict[str, str]:
    """Return fingerprints of all that determines the next training; not of random generators, which libraries use at their start."""
    files = json.loads((out / "checkpoints" / f"iter_{step:07d}" / "manifest.json").read_text())["files"]
    return {
        name: entry["sha256"]
        for name, entry in files.items()
        if name.endswith((".distcp", "00.npz", "01.npz", "progress.json", "prompts.json"))
    }


def test_async_save_killed_in_each_phase_resumes_exactly(tmp_path):
    flags = [*write_inputs(tmp_path, rows=10, **TINY), *UNEVEN.split(), *SAVES.split(), "--max_steps", str(STEPS)]
    whole, beside = tmp_path / "whole", tmp_path / "beside"
    assert run_ranks(scripted.train, 2, [*flags, "--output_dir", str(whole)], timeout=300) == [0, 0]
    flags += ["--async_save", "true", "--output_dir", str(beside)]
    for instant in INSTANTS:
        with pytest.raises(RanksFailed, match=f"rank {instant[0]}: the process was ended by SIGKILL"):
            run_ranks(kill_in_phase, 2, flags, *instant, timeout=300)
        assert bool(list((beside / "checkpoints").glob(".writing_*"))) == (instant[1] != "the pointer"), "killed, but not in a save"
    assert run_ranks(scripted.train, 2, flags, timeout=300) == [0, 0]
    assert not list((beside / "checkpoints").glob(".*"))
    names = ("step", "loss", "reward", "grad_norm", "num_tokens", "kl")
    expected, found = ([{name: row.get(name) for name in names} for row in read_jsonl(out / "metrics.jsonl")] for out in (whole, beside))
    assert found == expected and len(found) == STEPS
    assert fingerprints(beside, STEPS) == fingerprints(whole, STEPS) and "__1_0.distcp" in fingerprints(whole, STEPS)


def test_async_save_full_disk_is_an_error_and_keeps_last_checkpoint(tmp_path):
    flags = [*write_inputs(tmp_path, rows=10, **TINY), *SAVES.split(), "--async_save", "true", "--max_steps", "5"]

    def fills_up(rank, world_size):
        import contextlib
        import io

        from megatron_grpo.run.checkpoint import distributed

        write, saves = distributed.write_pieces, []

        def full(path, pieces):
            saves.append(path)
            if rank == 1 and len(saves) == 3:
                raise OSError(28, "No space left on device", str(path))
            return write(path, pieces)

        distributed.write_pieces = full
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = scripted.train(rank, world_size, [*flags, "--output_dir", str(tmp_path / "out")])
        return code, told.getvalue()

    results = run_ranks(fills_up, 2, timeout=300)
    assert [code for code, _ in results] == [1, 1], results
    said = "".join(text for _, text in results)
    assert "The checkpoint of step 3 failed and was removed; the last complete checkpoint is of step 2." in said, said
    assert "rank 1: OSError" in said and "No space left on device" in said
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("*iter*")) == [
        "iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
