"""Megatron-Core's optimizer of `optimizer_cpu_offload` on a CPU, with tensors that claim to be on a GPU and host copies that do not.

Its steps equal those of an ordinary optimizer, and a checkpoint contains all state of the next step.
"""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_grpo.core.policy.sharded_state import load_state, sharded_state, without_extra_state
from megatron_grpo.run.checkpoint.distributed import read_sharded
from tests import fused_adam
from tests import parity_cases as cases
from tests.checkpoint_files import write_sharded
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny


class HostTensor(torch.Tensor):
    """A tensor on the host, whose derived tensors are on the host too."""

    is_cuda = False


@contextlib.contextmanager
def pretend_gpu():
    """Make every second tensor claim to be on a GPU; Megatron's optimizer checks each."""
    cpu, pinned, empty = torch.Tensor.cpu, torch.Tensor.pin_memory, torch.empty
    torch.Tensor.is_cuda = property(lambda self: not isinstance(self, HostTensor))
    torch.Tensor.cpu = lambda self: cpu(self).clone().as_subclass(HostTensor)
    torch.Tensor.pin_memory = lambda self: self
    torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda
        torch.Tensor.cpu, torch.Tensor.pin_memory, torch.empty = cpu, pinned, empty


def read_plain_state(policy, *, is_loading):
    """Return the state with ordinary tensors that share memory, which a file can hold."""
    state = sharded_state(policy.wrapped, policy.optimizer, policy.scheduler, is_loading=is_loading)
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedTensor) and isinstance(leaf.data, HostTensor):
            leaf.data = leaf.data.as_subclass(torch.Tensor)
    return state


def take_steps(policy, batches, first):
    for index, rows in enumerate(batches, first):
        policy.train_step(cases.make_batch(policy, rows, index))
    return {name: tensor.float().numpy().copy() for name, tensor in policy.named_weights()}


@pytest.mark.parametrize("dtype, on_host", [("float32", 1.0), ("bfloat16", 1.0), ("bfloat16", 0.5)])
def test_host_optimizer_steps_and_resume_equal_those_of_ordinary_optimizer(tmp_path, dtype, on_host):
    """The part on the GPU counts its steps like Transformer Engine's and Apex's optimizers."""
    path = write_tiny(tmp_path / "model", **cases.MODELS["dense"])
    batches = cases.stored_rollout(path, num_steps=3, vocab=125)
    cfg = cases.settings(torch_dtype=dtype)
    (tmp_path / "saved").mkdir()

    def run(rank, world):
        if on_host < 1:
            fused_adam.take()
        parallel = cases.join(cfg, world)
        plain = take_steps(cases.build(path, cfg, world, parallel), batches, 0)
        with pretend_gpu():
            from megatron_grpo.run.assemble import policy as build

            build.machine_problems = lambda *args, **more: []  # there is no GPU
            host = cfg.with_values({"optimizer_cpu_offload": True, "optimizer_offload_fraction": on_host})
            straight = take_steps(cases.build(path, host, world, parallel), batches, 0)
            policy = cases.build(path, host, world, parallel)
            kinds = {type(part) for part in policy.optimizer.chained_optimizers[0].optimizer.sub_optimizers}
            assert kinds == {torch.optim.AdamW, *([fused_adam.FusedAdam] if on_host < 1 else [])}
            take_steps(policy, batches[:2], 0)
            again = cases.build(path, host, world, parallel)
        write_sharded(read_plain_state(policy, is_loading=False), tmp_path / "saved")
        state = read_plain_state(again, is_loading=True)
        load_state(again.wrapped, again.optimizer, again.scheduler, read_sharded(state, tmp_path / "saved"))
        with pretend_gpu():
            resumed = take_steps(again, batches[2:], 2)
        # The same checkpoint without it, and the other way round its moments are the same tensors.
        other = cases.build(path, cfg, world, parallel)
        state = sharded_state(other.wrapped, other.optimizer, other.scheduler, is_loading=True)
        load_state(other.wrapped, other.optimizer, other.scheduler, read_sharded(state, tmp_path / "saved"))
        return plain, straight, resumed, take_steps(other, batches[2:], 2)

    for plain, straight, resumed, other in run_ranks(run, 2):
        for name in plain:
            assert np.array_equal(straight[name], resumed[name]), name
            bar = 1e-6 if dtype == "float32" else 2e-3  # bfloat16 rounds a weight of 0.3 by 1e-3
            assert np.abs(plain[name] - straight[name]).max() < bar and np.abs(other[name] - straight[name]).max() < bar, name


def count_tensor_bytes() -> int:
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not one.is_meta]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}.values())


@pytest.mark.parametrize(
    "settings", [{}, {"tuner_type": "lora"}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}], ids=str
)
def test_host_optimizer_build_leaves_no_tensor_to_the_garbage_collector(tmp_path, settings):
    """On a GPU its memory would stay allocated until the collector runs."""
    path = write_tiny(tmp_path / "model", **cases.MODELS["dense"])
    cfg = cases.settings(torch_dtype="bfloat16").with_values(settings)

    def run(rank, world):
        parallel = cases.join(cfg, world)
        with pretend_gpu():
            from megatron_grpo.run.assemble import policy as build

            build.machine_problems = lambda *args, **more: []  # there is no GPU
            cases.build(path, cfg, world, parallel)  # imports, and caches that are filled once
            gc.collect()
            gc.disable()
            policy = cases.build(path, cfg, world, parallel)
            before = count_tensor_bytes()
            gc.collect()
            return before - count_tensor_bytes(), before, len(policy.chunks)

    [(freed, held, _)] = run_ranks(run, 1)
    assert held > 100_000 and freed == 0


class LayerWithExtraState(torch.nn.Linear):
    """A layer with extra state, like Transformer Engine's."""

    def get_extra_state(self):
        return torch.ones(3, dtype=torch.uint8)

    def set_extra_state(self, state):
        raise AssertionError("nothing of a checkpoint is unpickled")


def test_checkpoint_ignores_extra_state_of_layers():
    from megatron_grpo.core.policy.sharded_state import _load_weights

    layer = LayerWithExtraState(2, 2)
    described = without_extra_state({**layer.state_dict(), "experts._extra_state3": 1})
    assert set(described) == {"weight", "bias"} and "_extra_state" in layer.state_dict()
    _load_weights(LayerWithExtraState(2, 2), described, everything=True)
    with pytest.raises(ValueError, match="lacks .'bias'."):
        _load_weights(LayerWithExtraState(2, 2), {"weight": described["weight"]}, everything=True)
    with pytest.raises(ValueError, match="has unexpected .'more'."):
        _load_weights(LayerWithExtraState(2, 2), described | {"more": torch.ones(1)}, everything=True)
