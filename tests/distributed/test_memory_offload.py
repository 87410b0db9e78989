"""Offload for the sampler: all memory is freed and restored, and training stays equal bit for bit. Other ways to offload are detected.

Those ways raise no error by themselves. All layouts in both precisions: `python tools/parity.py --only offload`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import offload_cases
from tests.ranks import run_ranks


def move_module_to_cpu(policy, trip):
    """Mutation: `module.to("cpu")` and back."""
    trip()
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.clone()


def replace_gradient_buffers(policy, trip):
    trip()
    for wrapped in policy.wrapped:
        for buffer in wrapped.buffers:
            buffer.grad_data = buffer.grad_data.clone()


def drop_moments(policy, trip):
    trip()
    for state in policy.optimizer.chained_optimizers[0].optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


def remake_master_weights(policy, trip):
    trip()
    policy.optimizer.reload_model_params()


def count_storages_twice(policy, trip):
    once = policy.offloader._storages
    policy.offloader._storages = lambda: {role: storages * 2 for role, storages in once().items()}
    trip()


def without(policy, leaves):
    """Leave out the policy's tensors for which `leaves(role, tensor)` is true."""
    from megatron_grpo.core.policy.memory_offload import iterate_tensors

    policy.offloader._held = lambda: ((role, tensor) for role, tensor in iterate_tensors(policy) if not leaves(role, tensor))


def keep_reference(policy, trip):
    without(policy, lambda role, tensor: role == "reference")
    trip()


def offload_first_chunk_only(policy, trip):
    """Mutation: `model[0].offload_grad_buffers()`."""
    from megatron_grpo.core.policy.memory_offload import iterate_tensors

    first = SimpleNamespace(chunks=policy.chunks[:1], wrapped=policy.wrapped[:1], reference=None, optimizer=policy.optimizer)
    policy.offloader._held = lambda: iterate_tensors(first)
    trip()


def keep_module_buffers(policy, trip):
    buffers = {buffer.data_ptr() for chunk in policy.chunks for buffer in chunk.buffers()}
    without(policy, lambda role, tensor: tensor.data_ptr() in buffers)
    trip()


def keep_base(policy, trip):
    base = {p.data_ptr() for chunk in policy.chunks for p in chunk.parameters() if not p.requires_grad}
    without(policy, lambda role, tensor: tensor.data_ptr() in base)
    trip()


CASES = [
    (
        "DP2 with reference, overlapped",
        "bfloat16",
        (
            move_module_to_cpu,
            replace_gradient_buffers,
            drop_moments,
            remake_master_weights,
            count_storages_twice,
            keep_reference,
        ),
    ),
    ("PP2 VPP2", "float32", (offload_first_chunk_only,)),
    ("MLA EP2", "bfloat16", (keep_module_buffers,)),
    ("LoRA TP2, from an adapter", "bfloat16", (keep_base,)),
    ("few bits, DP2, overlapped", "bfloat16", (drop_moments,)),
    ("few bits, MoE EP2", "bfloat16", ()),
]


@pytest.mark.parametrize(("name", "dtype", "breaks"), CASES, ids=[f"{name} {dtype}" for name, dtype, _ in CASES])
def test_offload_keeps_training_exact_and_frees_all_memory(tmp_path, name, dtype, breaks):
    path, world, settings = offload_cases.read_size_inputs(name, dtype, tmp_path, layers=4 if "VPP" in name else 2)
    for found in run_ranks(offload_cases.differences, world, path, settings, tmp_path, breaks, timeout=120):
        print(found)
        assert found.pop("offload") == found.pop("resumed") == []
        assert found.keys() == {break_.__name__ for break_ in breaks}
        assert all(found.values()), "another way to make the trip does not show"
