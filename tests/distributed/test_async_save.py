"""Asynchronous checkpoints on gloo ranks: each has the state at its save, and is written completely or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.core.metadata import Progress
from tests.distributed.test_checkpoint import (
    PendingRows,
    Prompts,
    SmallPolicy,
    make_checkpoint_manager,
    make_pending_samples,
    make_run,
    read_tensors,
    save_after,
)
from tests.ranks import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2, bf16": (2, {"bf16": True}),
    "dp2, whole optimizer": (2, {"distributed": False}),
    "tp2 dp2": (4, {"tp": 2}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2}),
    "experts, ep2 dp2": (4, {"experts": 4, "ep": 2}),
}


def delay_writes(event):
    """Delay writing a rank's files until the event is set."""
    from megatron_grpo.run.checkpoint import distributed

    write = distributed.write_pieces

    def waits(path, pieces):
        assert event.wait(60)
        return write(path, pieces)

    distributed.write_pieces = waits


def save_and_go_on(rank, world_size, folder, layout):
    """Save after two steps, then take two more and overwrite all storages before the first byte is written."""
    import threading

    import torch

    from megatron_grpo.core.parallel import collectives

    policy, keeper, go_on = SmallPolicy(world_size, **layout), make_checkpoint_manager(folder, async_save=True), threading.Event()
    delay_writes(go_on)
    policy.step()
    policy.step()
    progress = Progress(step=2, num_rollouts=2, num_prompts=8, num_tokens=200)
    assert keeper.save(progress, PendingRows(make_pending_samples()), policy, Prompts(8))
    for _ in range(2):
        policy.step()
        keeper.advance()
        assert not make_run(folder, 2).exists()
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for entry in part.optimizer.state.values():
            for value in entry.values():
                if torch.is_tensor(value) and value.dim():
                    value.untyped_storage().resize_(0)
    if rank == 0:
        go_on.set()
    collectives.wait_for_all()
    if world_size > 1:  # the first rank is done, or soon will be; the others have not begun
        keeper.advance()
        assert not make_run(folder, 2).exists()
    go_on.set()
    keeper.finish()
    assert make_run(folder, 2).exists() and not list((folder / "checkpoints").glob(".*"))
    assert not keeper.save(progress, PendingRows(), policy, Prompts())


@pytest.mark.parametrize("name", LAYOUTS)
def test_async_save_writes_the_state_at_the_save_despite_later_steps(tmp_path, name):
    world_size, layout = LAYOUTS[name]
    run_ranks(save_after, world_size, tmp_path / "at_once", 2, 0, layout)
    run_ranks(save_and_go_on, world_size, tmp_path / "beside", layout)
    before, after = read_tensors([make_run(tmp_path / "at_once", 2), make_run(tmp_path / "beside", 2)])
    assert before.keys() == after.keys() and any("exp_avg_sq" in name for name in before)
    for name in before:
        assert np.array_equal(before[name], after[name]), name
    for file in ("grpo/progress.json", "grpo/prompts.json", "grpo/pending/rank_00000.npz"):
        assert (make_run(tmp_path / "at_once", 2) / file).read_bytes() == (make_run(tmp_path / "beside", 2) / file).read_bytes()


def test_async_save_is_published_between_steps_without_waiting(tmp_path):
    def save(rank, world_size):
        import time

        policy, keeper = SmallPolicy(world_size), make_checkpoint_manager(tmp_path, async_save=True)
        for step in (1, 2, 3):
            policy.step()
            keeper.save(Progress(step=step), PendingRows(), policy, Prompts())
            while keeper._underway is not None:
                keeper.advance()
                time.sleep(0.001)
            assert make_run(tmp_path, step).exists()
        return keeper._sharded._metadata == (make_run(tmp_path, 3) / ".metadata").read_bytes()

    assert run_ranks(save, 2) == [True, False]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    same = {(make_run(tmp_path, step) / ".metadata").read_bytes() for step in (1, 2, 3)}
    assert len(same) == 1  # it was sent to the first rank once


@pytest.mark.parametrize("told_by", ["advance", "the next save", "finish"])
def test_async_save_write_error_stops_all_ranks_and_keeps_older_checkpoint(tmp_path, told_by):
    def fill_the_disk(rank, world_size):
        import resource
        import signal
        import time

        from megatron_grpo.run.checkpoint.saving import CheckpointError

        policy, keeper = SmallPolicy(world_size), make_checkpoint_manager(tmp_path, async_save=True)
        policy.step()
        keeper.save(Progress(step=1), PendingRows(), policy, Prompts())
        keeper.finish()
        policy.step()
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        keeper.save(Progress(step=2), PendingRows(), policy, Prompts())
        said = "step 2 failed and was removed.*complete checkpoint is of step 1.*rank 1: OSError.*File too large"
        with pytest.raises(CheckpointError, match=said):
            if told_by == "finish":
                keeper.finish()
            if told_by == "the next save":
                keeper.save(Progress(step=3), PendingRows(), policy, Prompts())
            while told_by == "advance":
                time.sleep(0.001)
                keeper.advance()

    run_ranks(fill_the_disk, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_save_splits_replicated_bytes_over_ranks_without_duplicates(tmp_path):
    run_ranks(save_after, 4, tmp_path, 2, 0, {"distributed": False})
    sizes = [path.stat().st_size for path in make_run(tmp_path, 2).glob("__*_0.distcp")]
    run_ranks(save_after, 1, tmp_path / "one", 2, 0, {"distributed": False})
    [whole] = [path.stat().st_size for path in make_run(tmp_path / "one", 2).glob("__*_0.distcp")]
    assert len(sizes) == 4 and sum(sizes) == pytest.approx(whole, rel=0.02) and max(sizes) < 1.2 * whole / 4


def test_save_writes_generators_of_all_ranks_to_one_file_and_equal_ones_once(tmp_path):
    def run(rank, world_size):
        import random

        import torch

        from megatron_grpo.run.checkpoint import rng_state

        policy = SmallPolicy(world_size, tp=2)
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(rank if rank == 3 else 7)  # one rank drew where the others did not
        keeper = make_checkpoint_manager(tmp_path)
        keeper.save(Progress(step=1), PendingRows(), policy, Prompts())
        before = rng_state.states()
        random.random(), np.random.random(), torch.rand(3)
        rng_state.restore(make_run(tmp_path, 1) / "grpo" / rng_state.FILE)
        assert rng_state.states() == before
        return {name: hash(state) for name, state in before.items()}

    found = run_ranks(run, 4, env={"PYTHONHASHSEED": "0"})
    [file] = make_run(tmp_path, 1).glob("grpo/rng*")
    with np.load(file) as arrays:
        counts = {name: sum(other.startswith(f"{name}/") for other in arrays.files) - 1 for name in found[0]}
    assert counts == {name: len({states[name] for states in found}) for name in found[0]}
    assert counts["python"] == counts["numpy"] == 1 and counts["torch"] == 2 and counts["megatron.model-parallel-rng"] == 2
