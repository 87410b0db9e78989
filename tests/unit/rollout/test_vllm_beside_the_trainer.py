"""Effects of vLLM on the trainer's process, and of its own errors. vLLM's code is called or replaced, without an engine."""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.core.base import launcher
from megatron_grpo.core.rollout import vllm_patches
from megatron_grpo.core.rollout.colocated import ColocatedEngine
from megatron_grpo.core.rollout.engine import WeightSyncError
from megatron_grpo.core.rollout.vllm_requests import CPU_BLOCK_SIZE, explain_vllm_error
from megatron_grpo.core.rollout.vllm_scheduling import patch_scheduling
from megatron_grpo.core.rollout.vllm_weight_layout import CopyRecord, ModuleWeights, WeightLayoutRecorder
from megatron_grpo.core.rollout.vllm_weights import copy_buffers, refuse_changed
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.run.config.rules.policy import CPU_HEADS


def test_colocated_vllm_does_not_advance_random_generators():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with vllm_patches.restore_process():
        random.seed(7), np.random.seed(7), torch.manual_seed(7)  # as `vllm.utils.torch_utils.set_random_seed` does
        np.random.randint(9)  # as Model Runner V2 does for a request without a seed
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_colocated_vllm_keeps_torch_threads_and_matmul_precision():
    """vLLM's GPU worker leaves torch one thread once its weights are loaded, and sets the precision of float32 products."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2), torch.set_float32_matmul_precision("high")
    try:
        with vllm_patches.restore_process():
            torch.set_num_threads(1), torch.set_float32_matmul_precision("highest")
            torch.set_num_threads = lambda number: None  # as on a CPU
        assert torch.get_num_threads() == 2 and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_num_threads(threads), torch.set_float32_matmul_precision(precision)


class AsynchronousLLM:
    """vLLM with asynchronous scheduling: steps are in flight after the last request has stopped."""

    def __init__(self, in_flight: int):
        self.engine_core = SimpleNamespace(batch_queue=deque(range(in_flight)), shutdown=lambda: None)
        self.engine_core.engine_core = self.engine_core
        self.llm_engine, self.is_busy, self.slept = self, False, []

    def has_unfinished_requests(self):
        return self.is_busy

    def step(self):
        self.engine_core.batch_queue.pop()

    def reset_prefix_cache(self):
        assert not self.engine_core.batch_queue or self.is_busy, "auxiliary output generation changed with output in flight"
        return not self.is_busy

    def sleep(self, level):
        assert not self.engine_core.batch_queue
        self.slept.append(level)

    def collective_rpc(self, call, args=(), kwargs=None):
        assert self.is_busy or not self.engine_core.batch_queue
        return [()]


def make_engine(llm: AsynchronousLLM) -> ColocatedEngine:
    return ColocatedEngine(llm, rank=0, world_size=1, tensor_parallel_size=1, max_model_len=64, sleep_level=1)


UPDATE: Any = SimpleNamespace(kind="weights", version=1, moves_tower=False, tensors=())


def test_vllm_has_no_step_in_flight_at_weight_sync_or_sleep():
    llm = AsynchronousLLM(2)
    engine = make_engine(llm)
    engine.load_weights(UPDATE)
    assert engine.version == 1 and not llm.engine_core.batch_queue
    llm.engine_core.batch_queue.append(1)
    with engine.wake_up():
        pass
    assert llm.slept == [1]


def test_vllm_engine_with_running_request_rejects_weights():
    llm = AsynchronousLLM(2)
    llm.is_busy = True
    with pytest.raises(WeightSyncError, match="a request is still running"):
        make_engine(llm).load_weights(UPDATE)
    assert len(llm.engine_core.batch_queue) == 2


def test_closed_vllm_engine_releases_model_layers():
    engine, layer = make_engine(AsynchronousLLM(0)), torch.nn.Linear(2, 2)
    unit = ModuleWeights(module=layer, loaded={}, live={}, packed=frozenset(), padding=[], num_copies=0)
    engine._weights.tables[False] = CopyRecord(units=[unit])
    alive = weakref.ref(layer)
    del layer, unit
    engine.close()
    assert alive() is None


def test_an_engine_with_model_runner_v2_is_not_patched():
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(use_v2_model_runner=True)))
    patch_scheduling(llm)
    assert make_engine(llm).model_runner == "V2"


def test_vllm_weights_in_another_layout_are_reloaded_on_gpu(monkeypatch):
    """The table would install new parameters, and CUDA graphs would read the old ones."""

    def outcome(dtype):
        model = torch.nn.Module()
        model.layer = torch.nn.Linear(3, 2, bias=False)
        recorder = WeightLayoutRecorder(model, lambda module: module.to(dtype))
        with recorder:
            for _, tensor in recorder.record_names([("layer.weight", torch.rand(2, 3))]):
                load = lambda layer, info, part=tensor: (layer.weight.data.copy_(part), layer.to(dtype))  # noqa: E731
                recorder.layer(load, model.layer, SimpleNamespace(loaded_weights=[("weight", None)]))
        return recorder.outcome()

    assert outcome(torch.float64)[1] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert outcome(torch.float32)[1] is None
    assert "layer keeps its weights in another form" in outcome(torch.float64)[1]


@pytest.mark.parametrize("recorded, on_gpu, returns_experts, kept", [
    (None, True, False, None), ("V1", True, False, "0"), ("V2", True, False, "1"), ("V2", True, True, "1"), ("V1", False, True, "0"),
    ("V1", True, True, None),  # on a GPU only V2 returns experts
    ("V2", False, False, None),  # a CPU may have no Triton
])  # fmt: skip
def test_resumed_run_keeps_its_vllm_model_runner(monkeypatch, recorded, on_gpu, returns_experts, kept):
    monkeypatch.delenv(vllm_patches.RUNNER_VARIABLE, raising=False)
    how = {"on_gpu": on_gpu, "returns_experts": returns_experts}
    vllm_patches.keep_runner(recorded, **how)
    assert os.environ.get(vllm_patches.RUNNER_VARIABLE) == kept
    vllm_patches.keep_runner(None, **how)  # the next run of this process
    assert vllm_patches.RUNNER_VARIABLE not in os.environ
    monkeypatch.setenv(vllm_patches.RUNNER_VARIABLE, "0")
    vllm_patches.keep_runner(recorded, **how)
    assert os.environ[vllm_patches.RUNNER_VARIABLE] == "0"  # the user's


def test_vllm_engine_uses_gpu_of_the_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    with launcher.on_device(0):  # a launcher that shows each task one GPU
        assert os.environ["LOCAL_RANK"] == "0"
    with launcher.on_device(None):
        assert os.environ["LOCAL_RANK"] == "3"
    monkeypatch.delenv("LOCAL_RANK")
    with launcher.on_device(1):
        assert os.environ["LOCAL_RANK"] == "1"
    assert "LOCAL_RANK" not in os.environ


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("bias", torch.zeros(2))


def test_refuse_changed_rejects_lost_buffers():
    model = Model()
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    before = copy_buffers(worker)
    model.weight.data.fill_(2.0)
    refuse_changed(worker, before, "the push")
    model.bias.fill_(1.0)
    refuse_changed(worker, before, "the push", besides={"bias"})
    model.table[3] = -3.0
    with pytest.raises(WeightSyncError, match="sleep changed 2 of the engine's tensors that are not weights: bias, table"):
        refuse_changed(worker, before, "sleep")
    del model.table
    with pytest.raises(WeightSyncError, match="table"):
        refuse_changed(worker, before, "sleep", besides={"bias"})


# What vLLM 0.32 and 0.33 say, with the file that says it.
SAID = {
    "v1/worker/utils.py": (
        "Free memory on device cuda:0 (23.51/79.11 GiB) on startup is less than desired GPU memory utilization (0.4, 31.64 GiB). Decrease "
        "GPU memory utilization or reduce GPU memory used by other processes.", "23.51 of 79.11 GiB are free", 0.29),
    "v1/core/kv_cache_planning.py, none": (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine", "Raise it", None),
    "v1/core/kv_cache_planning.py, few": (
        "To serve at least one request with the model's max seq len (4096), (0.44 GiB KV cache is needed, which is larger than the "
        "available KV cache memory (0.2 GiB).", "cannot hold one sequence of 4096 tokens", None),
    "v1/worker/gpu_model_runner.py": (
        "CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or "
        "`gpu_memory_utilization` when initializing the engine.", "not have enough memory for vLLM and the policy", None),
    "torch": ("CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 79.11 GiB", "offload_optimizer true", None),
    "csrc/cumem_allocator.cpp": ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139", "offload_model true", None),
    "v1/worker/gpu_worker.py": (
        "Error in memory profiling. Initial free memory 20.1 GiB, current free memory 21.0 GiB. This happens when other processes sharing",
        "Run nothing else on the GPU", None),
}  # fmt: skip


@pytest.mark.parametrize("where", SAID)
def test_vllm_out_of_memory_errors_name_settings(where):
    said, words, nearest = SAID[where]
    problem = explain_vllm_error(RolloutConfig(), 4096, True, said)
    assert words in problem.message and "vllm_gpu_memory_utilization" in problem.flags
    assert problem.nearest == ({} if nearest is None else {"vllm_gpu_memory_utilization": [nearest]})
    assert explain_vllm_error(RolloutConfig(), 4096, True, "another error") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_plan_allows_on_a_cpu_are_those_for_which_vllm_has_a_kernel(dtype):
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()

    def has_kernel(channels: int) -> bool:
        ends = torch.tensor([0, 8], dtype=torch.int32)
        try:
            _custom_ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1, num_heads=2, num_kv_heads=1, head_dim=channels, seq_lens=ends[1:], dtype=dtype, query_start_loc=ends,
                causal=True, sliding_window_size=-1, isa=_get_attn_isa(dtype, CPU_BLOCK_SIZE, channels), enable_kv_split=True,
            )  # fmt: skip
        except RuntimeError as error:
            assert "Unsupported CPU attention configuration" in str(error)
            return False
        return True

    assert tuple(channels for channels in range(2, 600, 2) if has_kernel(channels)) == CPU_HEADS
