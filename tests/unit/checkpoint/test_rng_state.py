"""Random generator states in a checkpoint, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megatron_grpo.run.checkpoint import rng_state


@pytest.fixture(autouse=True)
def put_back():
    before = rng_state.states()
    yield
    rng_state.set_states(before)


def draw_numbers():
    return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))


def test_rng_state_is_restored_exactly_within_a_pair_of_gaussians(tmp_path):
    random.gauss(0, 1), np.random.normal()
    (tmp_path / "rng.npz").write_bytes(rng_state.gather_states())
    before, numbers = rng_state.states(), draw_numbers()
    assert rng_state.states() != before
    rng_state.restore(tmp_path / "rng.npz")
    assert rng_state.states() == before and draw_numbers() == numbers
