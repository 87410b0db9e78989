"""Offloading of the policy, on small tensors: owners of storages, rejected calls, and restored bytes."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.policy import memory_offload as room_module
from megatron_grpo.core.policy.memory_offload import ROLES, PolicyOffloader

CPU = torch.device("cpu")


@pytest.fixture
def held():
    """A flat buffer with a parameter and a float32 master that are views of it; moments, a reference, gradients."""
    flat = torch.arange(10.0)
    tensors = {
        "weights": [flat[2:6], flat],
        "reference": [torch.arange(7, dtype=torch.int16)],
        "optimizer": [flat[3:5], torch.full((3, 3), 4.0, dtype=torch.float64)],
        "gradients": [torch.ones(5)],
    }
    return tensors


def make_offloader(tensors, movable=ROLES, timers=None):
    def everything():  # in no order
        return ((role, tensor) for role in reversed(tensors) for tensor in tensors[role])

    return PolicyOffloader(everything, movable, CPU, timers or Timers())


def list_storage_sizes(tensors):
    return {role: [tensor.untyped_storage().nbytes() for tensor in its] for role, its in tensors.items()}


def test_offload_frees_all_storages_and_restores_them_in_place(held):
    before = {role: [tensor.clone() for tensor in its] for role, its in held.items()}
    room = make_offloader(held)
    room.offload()
    assert not any(map(any, list_storage_sizes(held).values()))
    assert room.offloaded_bytes == 10 * 4 + 7 * 2 + 9 * 8 + 5 * 4, "a view of a storage is no storage"
    with room.on_device("all"):
        for role in ("weights", "reference", "optimizer"):
            assert all(torch.equal(found, right) for found, right in zip(held[role], before[role], strict=True)), role
        assert torch.equal(held["gradients"][0], torch.zeros(5))
        held["weights"][1][3] = 77.0
        assert held["weights"][0][1] == held["optimizer"][0][0] == 77.0


@pytest.mark.parametrize(
    ("part", "there"),
    [("nothing", ()), ("weights", ("weights",)), ("reference", ("weights", "reference")), ("all", ROLES)],
)
def test_offload_on_device_restores_only_the_requested_part(held, part, there):
    room = make_offloader(held)
    room.offload()
    with room.on_device(part):
        assert {role for role, its in list_storage_sizes(held).items() if its[-1]} == set(there)
        room.require(part)
        if part != "all":
            with pytest.raises(RuntimeError, match="gradients .*on_device"):
                room.require("all")


def test_offload_keep_weights_keeps_weights_and_their_views(held):
    room = make_offloader(held)
    room.offload(keep="weights")
    assert list_storage_sizes(held) == {"weights": [40, 40], "reference": [0], "optimizer": [40, 0], "gradients": [0]}
    room.offload()
    assert not any(map(any, list_storage_sizes(held).values())) and room.offloaded_bytes == 146


def test_offload_frees_only_the_configured_parts(held):
    room = make_offloader(held, ("optimizer",))
    room.offload()
    assert list_storage_sizes(held) == {"weights": [40, 40], "reference": [14], "optimizer": [40, 0], "gradients": [20]}
    still = make_offloader(held, ())
    still.offload()
    assert still.offloaded_bytes == 0


def test_offload_while_on_device_raises(held):
    room = make_offloader(held)
    with room.on_device("all"):
        with pytest.raises(RuntimeError, match="while all is in use"):
            room.offload(keep="weights")
        with room.on_device("nothing"), pytest.raises(RuntimeError, match="in use"):
            room.offload()
    with room.on_device("weights"):
        room.offload(keep="weights")
    room.offload()
    with room.on_device("weights"), pytest.raises(RuntimeError, match="while weights is in use"):
        room.offload()


def test_offload_without_host_memory_keeps_device_tensors(held, monkeypatch):
    room = make_offloader(held)
    real = room._host_memory

    def full(role, size):
        if role == "optimizer":
            raise RuntimeError("no memory")
        return real(role, size)

    monkeypatch.setattr(room, "_host_memory", full)
    with pytest.raises(RuntimeError, match="no memory"):
        room.offload()
    assert all(map(all, list_storage_sizes(held).values()))
    room.require("all")


@pytest.mark.parametrize("chunk", [1, 8, 32, 1 << 20])
def test_offload_host_chunks_are_allocated_once(monkeypatch, chunk):
    monkeypatch.setattr(room_module, "CHUNK", chunk)
    rng = torch.Generator().manual_seed(0)
    tensors = {"weights": [torch.rand(n, generator=rng, dtype=torch.float64) for n in (1, 4, 9, 0, 3)], "optimizer": [torch.rand(5)]}
    right = {role: [tensor.clone() for tensor in its] for role, its in tensors.items()}
    room, made = make_offloader(tensors), []
    for _ in range(3):
        room.offload()
        made.append([piece.data_ptr() for pieces in room._host.values() for piece in pieces])
        with room.on_device("all"):
            assert all(torch.equal(a, b) for role in tensors for a, b in zip(tensors[role], right[role], strict=True))
    assert made[0] == made[1] == made[2]
    assert all(len(piece) & (len(piece) - 1) == 0 for pieces in room._host.values() for piece in pieces), "nothing is rounded up"
    tensors["optimizer"].append(torch.ones(6))  # moments, after the first step
    room.offload()
    with room.on_device("all"):
        assert torch.equal(tensors["optimizer"][1], torch.ones(6)) and room.offloaded_bytes == 17 * 8 + 44


def test_offload_time_is_recorded(held):
    timers = Timers()
    room = make_offloader(held, timers=timers)
    with timers("train"):
        room.offload()
        with room.on_device("all"):
            pass
    assert set(timers.take()) == {"time/train", "time/offload", "time/other", "time/step"}
    with room.on_device("all"):  # nothing to do
        pass
    assert "time/offload" not in timers.take()
