"""Multi-worker executor of an engine that returns experts on a CPU. vLLM imports this module by name in the engine's process."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megatron_grpo.core.rollout.experts import wire_cpu_runner

wire_cpu_runner()  # the engine's process validates its configuration again, after the process that created it


class PatchedMultiprocExecutor(MultiprocExecutor):
    """vLLM's multiprocess executor, unchanged; importing this module applies the patch."""
