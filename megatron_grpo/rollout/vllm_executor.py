"""Several workers of one engine that tells experts on a CPU. vLLM imports this module in the engine's own process, by name."""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megatron_grpo.rollout.experts import wire_cpu_runner

wire_cpu_runner()  # the engine's process checks its configuration once more, after the process that made it


class ToldWorkers(MultiprocExecutor):
    """vLLM's own."""
