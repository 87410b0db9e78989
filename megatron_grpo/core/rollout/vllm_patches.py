"""Set vLLM's environment and patch its code, for engines in the trainer's processes and in a server's.

`experts` has further patches.

Inside the trainer, vLLM expects to own the process: it names its shared memory after a constant, destroys the default process group when it
is freed, reseeds torch and rewrites environment variables. Written for vLLM 0.32; each entry states its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.vllm_delta_net import patch_delta_net, patch_hybrids
from megatron_grpo.core.weights.buckets import MIB

# Warnings without a consequence, by logger; all other warnings of vLLM are shown. The filters are on these loggers and not on a handler,
# because vLLM replaces its handlers whenever it builds an engine.
_HARMLESS = {
    "vllm.logging_utils.dump_input": ("Dumping",),  # pages of internal state before an exception, which states the problem
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),  # torch operators are used instead; no such layers here
    "vllm.triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "vllm.v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),  # hints about speed
    "vllm.utils.jit_monitor": ("%s %s during inference",),  # kernels that compile at their first use, the trainer's too
    "vllm.triton_utils.dispatcher": ("Kernel %s is already registered",),  # by an earlier engine of this process
    "vllm.platforms.interface": ("Unknown vLLM environment variable detected",),  # which an earlier engine has set
    # restore_process restores the seed; vLLM itself runs without chunks on some CPUs.
    "vllm.engine.arg_utils": ("The global random seed is set to", "This model does not officially support disabling chunked prefill"),
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),  # as configured
    # No adapter has a tokenizer; and prompts are token IDs only.
    "vllm.v1.engine.input_processor": (
        "vLLM has deprecated support for supporting different tokenizers",
        "Passing raw prompts to InputProcessor is deprecated",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "%s: Failed to load weights",
        "Allocating",
    ),  # RotaryEmbedding has none
}

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_kept: dict[str, str] = {}  # "runner": the value of that variable, if `keep_runner` has set it

# Long calls of a worker while its engine starts, as shown to users.
_PARTS_OF_START = {
    "load_model": "loading weights", "determine_available_memory": "profiling memory", "compile_or_warm_up_model": "compiling, warming up",
}  # fmt: skip


def prepare_environment(*, on_gpu: bool) -> None:
    """Set vLLM's environment variables for an engine inside this process. Call before vLLM is imported.

    The user's variables stay, except where an in-process engine cannot work with them.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process: weights are handed over as tensors
    _prepare(on_gpu=on_gpu)


def prepare_server(*, on_gpu: bool) -> None:
    """Set vLLM's environment variables for a server whose engine and workers are separate processes. Call before vLLM is imported.

    The engine and the workers inherit the environment. The user's variables stay otherwise, as in `prepare_environment`.
    """
    env = os.environ
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the server may have been started by a trainer
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)  # for several HTTP processes; with it no gauge can be read here
    launcher.forget(env)  # nor is it a rank
    # Otherwise all workers are bound to the first core, and two on one NUMA node are rejected.
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # vLLM's default on a CPU; on a GPU a model may have been inspected before
    _prepare(on_gpu=on_gpu)


def _prepare(*, on_gpu: bool) -> None:
    env = os.environ
    env.setdefault("VLLM_NO_USAGE_STATS", "1")  # no report about the user's machine leaves it
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # its INFO lines would bury the progress line
    env.setdefault("TRITON_PRINT_AUTOTUNING", "0")  # which vLLM prints for kernels of the trainer too
    env.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output belongs to the program
    quiet()
    if on_gpu:
        return
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, all zeroed at the start, and it overrides vllm_kv_cache_memory_mb
    env.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first request with log-probs compiles C++ with g++ for 9 s
    if env["TORCHDYNAMO_DISABLE"] == "1":
        import torch._dynamo.config as dynamo_config

        dynamo_config.disable = True  # torch may have been imported before the variable was set


def keep_runner(recorded: str | None, *, on_gpu: bool, returns_experts: bool) -> None:
    """Make vLLM take the model runner of the checkpoint, because with another one the same seeds sample other tokens.

    The user's VLLM_USE_V2_MODEL_RUNNER stays. Only a GPU is made to take V2, and no GPU to take V1 where experts are returned.

    Args:
        recorded: "V1" or "V2"; None without a checkpoint.
        returns_experts: Whether completions are returned with their experts.
    """
    if os.environ.get(RUNNER_VARIABLE) == _kept.pop("runner", ""):
        del os.environ[RUNNER_VARIABLE]  # of an earlier run of this process
    fits = {"V1": not (on_gpu and returns_experts), "V2": on_gpu}
    if recorded is not None and fits[recorded] and RUNNER_VARIABLE not in os.environ:
        os.environ[RUNNER_VARIABLE] = _kept["runner"] = str(int(recorded == "V2"))


def apply_patches(*, on_gpu: bool) -> None:
    """Patch vLLM for engines in this process. Call after vLLM is imported, before its first engine. Idempotent.

    Args:
        on_gpu: Whether the engines run on a GPU.
    """
    import vllm.distributed.parallel_state as parallel_state
    import vllm.v1.engine.core as core

    patch_start(on_gpu=on_gpu)
    # Freeing an engine destroys torch's default process group, which is the trainer's.
    core.cleanup_dist_env_and_memory = _keep_process_groups
    # Only an executor with separate worker processes reads these queues: 24 MiB of shared memory per engine, which a kill would leave
    # behind.
    if parallel_state.init_model_parallel_group.__name__ != "without_queue":
        parallel_state.init_model_parallel_group = _without_queue(parallel_state.init_model_parallel_group)
    if not on_gpu:
        from vllm.distributed.device_communicators import cpu_communicator

        _keep_cpu_experts()
        _multiply_adapters_once()
        _bind_no_memory()
        shm: Any = cpu_communicator._CPUSHMDistributed
        # The name is a constant for every torchrun job, so two jobs on a machine collide and a killed one blocks the next.
        shm.make_group_name = staticmethod(_shared_memory_name)
        _unlink_segments_early()


def patch_start(*, on_gpu: bool) -> None:
    """Patch vLLM in every process that reads a model's configuration with it."""
    import transformers.utils.logging as transformers_logging
    import vllm.model_executor.models.registry as registry

    transformers_logging.disable_progress_bar()
    # It inspects a model class in a new Python process, 17 s at the first use of each architecture, to keep CUDA out of a process that
    # forks; ours does not.
    registry._run_in_subprocess = lambda fn: fn()
    patch_hybrids(on_gpu=on_gpu)


def patch_worker(*, on_gpu: bool) -> None:
    """Patch vLLM in a worker of a server. Call before its model loads.

    Args:
        on_gpu: Whether the worker runs on a GPU.
    """
    patch_start(on_gpu=on_gpu)
    if not on_gpu:
        _keep_cpu_experts()
        _multiply_adapters_once()
        patch_delta_net()
        _bind_no_memory()
        _unlink_segments_early()


def _bind_no_memory() -> None:
    # It would bind all memory of the process, the trainer's included, to one NUMA node.
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None


def _keep_cpu_experts() -> None:
    """Keep vLLM from choosing Triton's experts for an engine with room for adapters, even where no expert has one; a CPU has no Triton."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend
    if select.__name__ != "without_adapters":

        def without_adapters(moe_config: Any) -> Any:
            return select(dataclasses.replace(moe_config, is_lora_enabled=False))

        method.select_unquantized_moe_backend = without_adapters


def _multiply_adapters_once() -> None:
    """Multiply all tokens of a step with an adapter's matrices at once, if they have the same adapter.

    vLLM's CPU kernels copy the matrices for every token, and multiply it with its own copies.
    """
    import vllm.lora.punica_wrapper.punica_cpu as punica

    shrink, expand = punica.sgmv_shrink, punica.sgmv_expand_slice
    if shrink.__name__ == "shrink_once":
        return

    def product(x: Any, weights: Any, indices: Any, dtype: Any) -> Any:
        return x.to(dtype) @ weights[indices[0]].view(-1, weights.shape[-1]).to(dtype).T

    def shrink_once(x: Any, weights: Any, y: Any, starts: Any, lengths: Any, indices: Any, num_adapters: int, *rest: Any) -> None:
        if num_adapters > 1:
            return shrink(x, weights, y, starts, lengths, indices, num_adapters, *rest)
        *_, scale = rest
        y[:, : weights.shape[-2]] = scale * product(x, weights, indices, y.dtype)

    def expand_once(x: Any, weights: Any, y: Any, starts: Any, lengths: Any, indices: Any, num_adapters: int, *rest: Any) -> None:
        if num_adapters > 1:
            return expand(x, weights, y, starts, lengths, indices, num_adapters, *rest)
        *_, offset, size, is_added = rest
        part, added = y[:, offset : offset + size], product(x, weights, indices, y.dtype)
        part.copy_(part + added if is_added else added)

    kernels: Any = punica
    kernels.sgmv_shrink, kernels.sgmv_expand_slice = shrink_once, expand_once


def _keep_process_groups(*args: object, **kwargs: object) -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _without_queue(init_group):
    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return init_group(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    return without_queue


def _shared_memory_name(communicator) -> str:
    """Return a name that no other running job on this machine has: two jobs cannot listen at the same master address."""
    job = launcher.read()
    parts = [job.address, str(job.port or os.getpid()), communicator.unique_name, *map(str, communicator.ranks)]
    return re.sub(r"[^A-Za-z0-9.-]", "_", f"megatron-grpo-{os.getuid()}-" + "-".join(parts))


def _unlink_segments_early() -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    shm: Any = cpu_communicator._CPUSHMDistributed
    if shm._init_cpu_shm.__name__ != "init_and_unlink":
        shm._init_cpu_shm = _unlinking(shm._init_cpu_shm)


def _unlinking(init_cpu_shm):
    """Wrap shared-memory creation: segments lose their names once every rank has mapped them.

    They then live as long as their processes, and a kill leaves none behind.
    """

    def init_and_unlink(self) -> int:
        # A job killed between creating and unlinking, a few milliseconds, leaves these; only the rank that creates a segment may remove it.
        unlink_segments(f"{self.group_name}_{self.communicator.rank}")
        handle = init_cpu_shm(self)  # ends with a barrier
        unlink_segments(f"{self.group_name}_{self.communicator.rank}")
        return handle

    return init_and_unlink


def unlink_segments(name: str) -> None:
    """Remove the shared-memory segment with this name, if there is one.

    Args:
        name: Name of the segment, without its directory.
    """
    for path in glob.glob(f"/dev/shm/{glob.escape(name)}"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def quiet() -> None:
    """Filter out vLLM's harmless warnings. Call before vLLM is imported, since its import already emits some."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm.triton_utils.dispatcher")  # it accesses every name in torch
    for name, starts in _HARMLESS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(existing, _HarmlessMessages) for existing in logger.filters):
            logger.addFilter(_HarmlessMessages(starts))


class _HarmlessMessages(logging.Filter):
    def __init__(self, starts: tuple[str, ...]):
        super().__init__()
        self.starts = starts

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.starts)


@contextlib.contextmanager
def report_start(model_path: str | Path) -> Iterator[None]:
    """Open a phase for each long part of the start of an engine in this process, and count the weights that it reads."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    workers, loaders = cast(Any, WorkerWrapperBase), cast(Any, DefaultModelLoader)
    get_method, get_weights = workers.__getattr__, loaders.get_all_weights
    size = -(-sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors")) // MIB)

    def reported(worker: Any, name: str) -> Any:
        method, part = get_method(worker, name), _PARTS_OF_START.get(name)
        total = size or None if name == "load_model" else None
        return activity.phase(f"starting vLLM: {part}", total=total, unit="MiB", pause=activity.LONG)(method) if part else method

    def counted(*args: Any) -> Iterator[Any]:
        num_read = 0
        for name, tensor in get_weights(*args):
            num_read, previous = num_read + tensor.nbytes, num_read
            activity.advance(num_read // MIB - previous // MIB)
            yield name, tensor

    workers.__getattr__, loaders.get_all_weights = reported, counted
    try:
        yield
    finally:
        workers.__getattr__, loaders.get_all_weights = get_method, get_weights


def report_steps(llm: Any) -> None:
    """Report each engine step as progress, with the completions that finished in it. vLLM itself reports nothing until all are done."""
    engine = llm.llm_engine
    step = engine.step

    def reported_step() -> list[Any]:
        outputs = step()
        activity.advance(sum(len(output.outputs) for output in outputs if output.finished))
        return outputs

    engine.step = reported_step


@contextlib.contextmanager
def restore_process() -> Iterator[None]:
    """Restore what vLLM changes of the process. Wraps every call of vLLM.

    Building an engine reseeds the global generators of Python, NumPy and torch. Sampling uses torch's even when every request has a seed;
    Model Runner V2 uses NumPy's for a request that has none, as scoring requests do. Without this the trainer's random numbers would depend
    on the sampler. vLLM also overwrites LOCAL_WORLD_SIZE (with its own TP size), LD_PRELOAD (which child processes would inherit), and
    `torch.set_num_threads` (with a function that only warns). On a GPU it leaves torch one CPU thread, where an optimizer on the host needs
    all of them, and sets the precision of torch's float32 products.
    """
    saved = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads, precision = torch.set_num_threads, torch.get_num_threads(), torch.get_float32_matmul_precision()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        _set_environment(saved)


def forget_ended_groups() -> None:
    """Make vLLM create its process groups anew if those that it holds belong to an earlier run of this process, whose job has ended."""
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is None or collectives.is_current(world.device_group):
        return
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):
            setattr(parallel_state, name, None)
    parallel_state._NODE_COUNT = None


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def cancellable_steps(engine: Any, has_no_time: Callable[[], bool]) -> Iterator[None]:
    """Check for cancellation before every engine step inside the context; on cancellation abort all requests and raise CancelledError.

    `LLM.generate` steps until every request is finished, and cannot be interrupted otherwise.

    Args:
        has_no_time: Whether to cancel.

    Raises:
        CancelledError: `has_no_time` returned true.
    """
    step = engine.step

    def step_unless_cancelled() -> Any:
        if has_no_time():
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise CancelledError
        return step()

    engine.step = step_unless_cancelled
    try:
        yield
    finally:
        engine.step = step


@contextlib.contextmanager
def layers_watched(watch: Callable[..., None]) -> Iterator[None]:
    """Replace the loading of layers in a layer-wise reload inside the context.

    Args:
        watch: Called as watch(load, layer, info) in place of vLLM's load(layer, info), when all tensors of the layer have arrived.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    load = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: watch(load, layer, info)
    try:
        yield
    finally:
        layerwise._layerwise_process = load


def settle_attention(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute the weight products that latent attention keeps, for all attention layers, as a reload does at its end.

    Args:
        dtype: Dtype of the model.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for module in model.modules():
        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(dtype)  # type: ignore[operator]


# Packed copies of weights, which a CPU's kernels read instead of the weights.


# Packed weights of experts. Their biases stay as they are: the kernel keeps the parameters that it was created with.
PACKED_OF_EXPERTS = ("w13_weight", "w2_weight")


def has_cpu_experts(module: torch.nn.Module) -> bool:
    """Return whether a module holds experts of a CPU kernel."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return not torch.cuda.is_available() and kernel is not None and hasattr(module, "w13_weight")


def pack(module: Any) -> None:
    """Make the packed copy of a module's weights."""
    if has_cpu_experts(module):
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    else:
        module.cpu_linear = None  # free the old one first: there is never room for two, and malloc reuses its memory
        module.quant_method.process_weights_after_loading(module)


def pack_experts(modules: Iterable[torch.nn.Module], pack: Callable[[torch.nn.Module], None]) -> None:
    """Pack the experts among the modules. A reload leaves them in their loaded layout, and the kernel expects packed ones."""
    for module in list(modules):
        if has_cpu_experts(module):
            pack(module)


def pack_heads(model: torch.nn.Module, pack: Callable[[torch.nn.Module], None]) -> None:
    """Pack the output head again after a reload.

    With tied embeddings a reload writes to the embedding, and the head would continue with its packed copy of the old one. A model without
    a separate head may multiply with any weight that vLLM keeps beside its packed copy, so all of these are packed.
    """
    modules: list[Any] = list(model.modules())
    candidates = [module._modules["lm_head"] for module in modules if "lm_head" in module._modules]
    heads = [head for head in candidates if hasattr(head, "cpu_linear")]
    for head in heads or [module for module in modules if hasattr(module, "cpu_linear") and module.weight.numel()]:
        pack(head)
