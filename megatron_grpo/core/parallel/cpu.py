"""Megatron-Core on a machine without a GPU: patches of its code and of torch.cuda.

Megatron-Core's schedules, DDP buffers, optimizers and MoE layers are ordinary PyTorch, but they name CUDA: as `torch.cuda.*` calls, as
`device="cuda"`, and as type strings. `enable()` makes those names mean the CPU. It is never imported where there is a GPU. Nothing here
changes what is computed. A repair of Megatron-Core that a GPU needs too, as one without Transformer Engine does, does not belong here, but
in the module of `policy` that uses the repaired code.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

_enabled = False


class _CpuStream:
    """Stand-in for torch.cuda.Stream and torch.cuda.Event: on a CPU everything is already in order, and already done."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    wait = wait_event = record = synchronize = wait_stream

    def record_event(self, event=None):
        return event or _CpuStream()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _CpuTorch(types.ModuleType):
    """A module `torch` whose factories treat device="cuda" as the CPU. Given to the modules that contain that literal."""

    def __init__(self):
        super().__init__("torch")
        for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
            setattr(self, name, self._on_cpu(getattr(torch, name)))

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def _on_cpu(factory):
        def create(*args, device=None, **kwargs):
            return factory(*args, device=None if device == "cuda" else device, **kwargs)

        return create


# Modules of Megatron-Core 0.16 to 0.19 that write device="cuda" as a literal on paths this package runs.
_LITERAL_CUDA = (
    "megatron.core.utils",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.transformer.moe.moe_utils",
)


def _patch_cuda_calls() -> None:
    cuda: Any = torch.cuda  # what stands in has other types
    tensor: Any = torch.Tensor
    cuda.current_device = lambda: torch.device("cpu")  # Megatron often passes "device=torch.cuda.current_device()"
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _CpuStream
    cuda.current_stream = cuda.default_stream = lambda *args: _CpuStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed  # Megatron keeps one RNG state per parallel role and swaps them
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None


def _patch_type_strings():
    """Make `p.type() == "torch.cuda.FloatTensor"` true on the CPU, for Megatron-Core's optimizers only, which sort parameters by it."""
    real = torch.Tensor.type

    def tensor_type(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is not None:
            return real(self, dtype, non_blocking, **kwargs)
        name = real(self)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer") and ".cuda." not in name:
            return name.replace("torch.", "torch.cuda.")
        return name

    torch.Tensor.type = tensor_type


def _patch_megatron():
    for name in _LITERAL_CUDA:
        importlib.import_module(name).torch = _CpuTorch()
    mcore_random = importlib.import_module("megatron.core.tensor_parallel.random")
    # It warns when the CPU's generator advances while it guards the GPU's: here they are the same.
    logging.getLogger(mcore_random.__name__).setLevel(logging.ERROR)
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_gloo():
    """Extend gloo's collectives to what Megatron-Core passes to them.

    gloo takes split sizes as a list, where the token dispatcher passes a tensor. It gathers and scatters equal parts only, where experts
    with expert tensor parallelism exchange as many tokens as the router sent them.
    """
    all_to_all_single, all_gather, reduce_scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def with_lists(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        sizes = [s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input, *sizes, **kwargs)

    def gather_unequal(tensor_list, tensor, group=None, async_op=False):
        if _are_alike(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        longest = max(len(part) for part in tensor_list)
        padded = [part.new_empty(longest, *part.shape[1:]) for part in tensor_list]
        all_gather(padded, torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])]), group)
        for part, padded_part in zip(tensor_list, padded, strict=True):
            part.copy_(padded_part[: len(part)])
        return None

    def scatter_unequal(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _are_alike(input_list):
            return reduce_scatter(output, input_list, op, group, async_op)
        joined = torch.cat(list(input_list))
        dist.all_reduce(joined, op, group)
        output.copy_(joined.split([len(part) for part in input_list])[dist.get_rank(group)])
        return None

    dist.all_to_all_single, dist.all_gather, dist.reduce_scatter = with_lists, gather_unequal, scatter_unequal


def _are_alike(tensors):
    return len({tensor.shape for tensor in tensors}) == 1


def enable() -> None:
    """Apply the patches once; later calls do nothing. Must run before the first Megatron object is built."""
    global _enabled
    if _enabled:
        return
    _patch_cuda_calls()
    _patch_type_strings()
    _patch_megatron()
    _patch_gloo()
    _enabled = True
