"""Random generators in a checkpoint: to the bit, also from the files that each rank had once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.checkpoint import rng_state

FORMAT_2 = Path(__file__).parents[2] / "data" / "format_2.tar.xz"


@pytest.fixture(autouse=True)
def put_back():
    before = rng_state.states()
    yield
    rng_state.set_states(before)


def drawn():
    return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))


def test_what_was_collected_is_restored_to_the_bit_also_half_way_through_a_pair_of_gaussians(tmp_path):
    random.gauss(0, 1), np.random.normal()
    (tmp_path / "rng.npz").write_bytes(rng_state.gather_states())
    before, numbers = rng_state.states(), drawn()
    assert rng_state.states() != before
    rng_state.restore(tmp_path / "rng.npz")
    assert rng_state.states() == before and drawn() == numbers


def test_a_file_that_one_rank_had_of_its_own_is_read(tmp_path):
    shutil.unpack_archive(FORMAT_2, tmp_path)
    [path] = (tmp_path / "one_rank").rglob("rank_00000.pt")
    written = torch.load(path, weights_only=True)
    rng_state.restore_from_own_file(path)
    assert torch.equal(torch.get_rng_state(), written["torch"])
    assert list(random.getstate()[1]) == written["python"][1]
    assert np.array_equal(np.random.get_state()[1], written["numpy"][1].numpy())
    roles = {name for name in rng_state.states() if name.startswith(rng_state.MEGATRON)}
    assert roles == {f"{rng_state.MEGATRON}{role}" for role in written["megatron"]}
    before = rng_state.states()
    [other] = (tmp_path / "two_ranks").rglob("rank_00001.pt")
    rng_state.restore_from_own_file(other)  # of a run with two ranks
    assert rng_state.states() == before
