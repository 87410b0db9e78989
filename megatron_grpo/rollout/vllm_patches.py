"""Sets vLLM's environment and patches its code, for engines in the trainer's processes and in a server's. (`experts` has the rest.)

Inside the trainer, vLLM expects to own the process: it names its shared memory after a constant, destroys the default process group when it
is freed, reseeds torch and rewrites environment variables. Written for vLLM 0.32; each entry says why it is there.
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
from typing import Any

import numpy as np
import torch

from megatron_grpo.base import activity, launcher
from megatron_grpo.base.errors import CancelledError

# Warnings without a consequence, by logger: anything else that vLLM warns of is shown. Filters sit on these loggers and not on a handler,
# because vLLM replaces its handlers whenever it builds an engine.
_HARMLESS = {
    "vllm.logging_utils.dump_input": ("Dumping",),  # pages of internal state before an exception, which says what it is about
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),  # torch operators are used instead; no such layers here
    "vllm.triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "vllm.v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",
        "CPU backend doesn't allow to use `torch.set_num_threads`",
    ),  # hints about speed
    "vllm.triton_utils.dispatcher": ("Kernel %s is already registered",),  # by an earlier engine of this process
    "vllm.platforms.interface": ("Unknown vLLM environment variable detected",),  # which an earlier engine has set
    # trainer_untouched sees to the seed; vLLM itself runs without chunks on some CPUs.
    "vllm.engine.arg_utils": ("The global random seed is set to", "This model does not officially support disabling chunked prefill"),
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),  # as we ask for
    # No adapter brings one; and token ids are all that is asked.
    "vllm.v1.engine.input_processor": (
        "vLLM has deprecated support for supporting different tokenizers",
        "Passing raw prompts to InputProcessor is deprecated",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "%s: Failed to load weights",
        "Allocating",
    ),  # RotaryEmbedding has none
}


def prepare_environment(*, on_gpu: bool) -> None:
    """Before vLLM is imported. What the user has set for himself stays, except where an in-process engine cannot work with it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process: weights are handed over as tensors
    _prepare(on_gpu=on_gpu)


def prepare_server(*, on_gpu: bool) -> None:
    """As `prepare_environment`, for a process whose engine and workers are processes of their own. They inherit the environment."""
    env = os.environ
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # it may have been started by a trainer
    env.pop("PROMETHEUS_MULTIPROC_DIR", None)  # for several HTTP processes; with it no gauge can be read here
    launcher.forget(env)  # nor is it a rank
    # Else all workers are bound to the first core, and two on one NUMA node are refused.
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # on a CPU vLLM does so by itself; on a GPU a model may have been looked at before
    _prepare(on_gpu=on_gpu)


def _prepare(*, on_gpu: bool) -> None:
    env = os.environ
    env.setdefault("VLLM_NO_USAGE_STATS", "1")  # no report about the user's machine leaves it
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # its INFO lines would bury the progress line
    env.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output belongs to the program
    quiet()
    if on_gpu:
        return
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, all zeroed at the start, and it overrides vllm_kv_cache_memory_mb
    env.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first request with log-probs compiles C++ with g++ for 9 s
    if env["TORCHDYNAMO_DISABLE"] == "1":
        import torch._dynamo.config as dynamo_config

        dynamo_config.disable = True  # torch may have been imported before the variable was set


def apply_patches(*, on_gpu: bool) -> None:
    """After vLLM is imported, before its first engine. Calling it again changes nothing."""
    import vllm.distributed.parallel_state as parallel_state
    import vllm.v1.engine.core as core

    patch_start()
    # Freeing an engine destroys torch's default process group, which is the trainer's.
    core.cleanup_dist_env_and_memory = _keep_process_groups
    # Only an executor with worker processes of its own reads these queues: 24 MiB of shared memory an engine, which a kill would leave
    # behind.
    if parallel_state.init_model_parallel_group.__name__ != "without_queue":
        parallel_state.init_model_parallel_group = _without_queue(parallel_state.init_model_parallel_group)
    if not on_gpu:
        from vllm.distributed.device_communicators import cpu_communicator

        _keep_cpu_experts()
        _bind_no_memory()
        shm: Any = cpu_communicator._CPUSHMDistributed
        # The name is a constant for every torchrun job, so two jobs on a machine collide and a killed one blocks the next.
        shm.make_group_name = staticmethod(_shared_memory_name)
        _unlink_segments_early()


def patch_start() -> None:
    """In every process that reads a model's configuration with vLLM."""
    import transformers.utils.logging as transformers_logging
    import vllm.model_executor.models.registry as registry

    transformers_logging.disable_progress_bar()
    # It looks at a model class in a fresh Python, 17 s at the first use of each architecture. That is to keep CUDA out of a process that
    # will fork; ours will not.
    registry._run_in_subprocess = lambda fn: fn()


def patch_worker(*, on_gpu: bool) -> None:
    """In every worker of a server, before its model loads."""
    patch_start()
    if not on_gpu:
        _keep_cpu_experts()
        _bind_no_memory()
        _unlink_segments_early()


def _bind_no_memory() -> None:
    # It would bind all memory of the process, the trainer's too where it is inside, to one NUMA node.
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None


def _keep_cpu_experts() -> None:
    """An engine with room for adapters takes Triton's experts, also where no expert has one; a CPU has no Triton."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend
    if select.__name__ != "without_adapters":

        def without_adapters(moe_config: Any) -> Any:
            return select(dataclasses.replace(moe_config, is_lora_enabled=False))

        method.select_unquantized_moe_backend = without_adapters


def _keep_process_groups(*args: object, **kwargs: object) -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _without_queue(init_group):
    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return init_group(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    return without_queue


def _shared_memory_name(communicator) -> str:
    """Unlike that of any other job alive on this machine: two jobs cannot listen at the same master address."""
    job = launcher.read()
    parts = [job.address, str(job.port or os.getpid()), communicator.unique_name, *map(str, communicator.ranks)]
    return re.sub(r"[^A-Za-z0-9.-]", "_", f"megatron-grpo-{os.getuid()}-" + "-".join(parts))


def _unlink_segments_early() -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    shm: Any = cpu_communicator._CPUSHMDistributed
    if shm._init_cpu_shm.__name__ != "init_and_unlink":
        shm._init_cpu_shm = _unlinking(shm._init_cpu_shm)


def _unlinking(init_cpu_shm):
    """Segments lose their names once every rank has mapped them: they live as long as their processes, and a kill leaves none behind."""

    def init_and_unlink(self) -> int:
        # A job killed between creating and unlinking, a few milliseconds, left these; only the rank that creates a segment may remove it.
        unlink_segments(f"{self.group_name}_{self.communicator.rank}")
        handle = init_cpu_shm(self)  # ends with a barrier
        unlink_segments(f"{self.group_name}_{self.communicator.rank}")
        return handle

    return init_and_unlink


def unlink_segments(name: str) -> None:
    for path in glob.glob(f"/dev/shm/{glob.escape(name)}"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def quiet() -> None:
    """Before vLLM is imported, which says some of it already."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm.triton_utils.dispatcher")  # it looks at every name in torch
    for name, starts in _HARMLESS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(existing, _Harmless) for existing in logger.filters):
            logger.addFilter(_Harmless(starts))


class _Harmless(logging.Filter):
    def __init__(self, starts: tuple[str, ...]):
        super().__init__()
        self.starts = starts

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.starts)


def tell_of_steps(llm: Any) -> None:
    """Each step of the engine is progress, and a request that it ends so many completions: vLLM itself tells nothing until all are done."""
    engine = llm.llm_engine
    step = engine.step

    def told() -> list[Any]:
        outputs = step()
        activity.advance(sum(len(one.outputs) for one in outputs if one.finished))
        return outputs

    engine.step = told


@contextlib.contextmanager
def trainer_untouched() -> Iterator[None]:
    """Around everything that vLLM does: what it changes of the process is put back.

    Building an engine reseeds the global generators of Python, NumPy and torch. Sampling draws from torch's even when every request has a
    seed of its own; Model Runner V2 draws from NumPy's for a request that has none, as those that score have. Without this the trainer's
    random numbers would depend on the sampler. It also overwrites LOCAL_WORLD_SIZE (with its own TP size), LD_PRELOAD (which children would
    inherit), and `torch.set_num_threads` (with a function that only warns).
    """
    kept = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    of_python, of_numpy = random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        _set_environment(kept)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def given_up_where(engine: Any, has_no_time: Callable[[], bool]) -> Iterator[None]:
    """Inside, `engine` (vLLM's LLMEngine) asks before every step; where it is told so, it forgets its requests and raises CancelledError.

    `LLM.generate` steps until all is answered, and has no way to be asked to end.
    """
    step = engine.step

    def step_unless_given_up() -> Any:
        if has_no_time():
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise CancelledError
        return step()

    engine.step = step_unless_given_up
    try:
        yield
    finally:
        engine.step = step


@contextlib.contextmanager
def layers_watched(watch: Callable[..., None]) -> Iterator[None]:
    """Inside, a layer-wise reload calls watch(load, layer, info) for load(layer, info), when all tensors of the layer have come."""
    from vllm.model_executor.model_loader.reload import layerwise

    load = layerwise._layerwise_process
    layerwise._layerwise_process = lambda layer, info: watch(load, layer, info)
    try:
        yield
    finally:
        layerwise._layerwise_process = load


def settle_attention(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Latent attention keeps products of its weights. A reload makes them anew at its end, for all layers of attention."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for module in model.modules():
        if is_deferred_attention_layer(module):
            module.process_weights_after_loading(dtype)  # type: ignore[operator]


# What a CPU's kernels read in place of a weight, in a layout of their own.


# Of experts. Their biases stay as they are: the kernel holds on to the parameters that it was made with.
PACKED_OF_EXPERTS = ("w13_weight", "w2_weight")


def has_cpu_experts(module: torch.nn.Module) -> bool:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return not torch.cuda.is_available() and kernel is not None and hasattr(module, "w13_weight")


def pack(module: Any) -> None:
    """Of a module whose weights are there as they were loaded."""
    if has_cpu_experts(module):
        module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    else:
        module.cpu_linear = None  # the old one goes first: there is never room for two, and malloc gives its memory again
        module.quant_method.process_weights_after_loading(module)


def pack_experts(modules: Iterable[torch.nn.Module], pack: Callable[[torch.nn.Module], None]) -> None:
    """A reload leaves experts as they were loaded, and the kernel expects packed ones."""
    for module in list(modules):
        if has_cpu_experts(module):
            pack(module)


def pack_heads(model: torch.nn.Module, pack: Callable[[torch.nn.Module], None]) -> None:
    """With tied embeddings a reload goes to the embedding, and the head samples on from its packed copy of the old one.

    A model without a head of its own may multiply with any weight that vLLM keeps beside its packed copy.
    """
    modules: list[Any] = list(model.modules())
    named = [module._modules["lm_head"] for module in modules if "lm_head" in module._modules]
    heads = [head for head in named if hasattr(head, "cpu_linear")]
    for head in heads or [module for module in modules if hasattr(module, "cpu_linear") and module.weight.numel()]:
        pack(head)
