"""vLLM tells which experts it routed to (`enable_return_routed_experts`), also where a release of it does not: in ranks of ours, on a CPU.

vLLM 0.32 has the whole way, from routers through the prefix cache to the answer. What is missing is said with each patch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def engine_options(*, on_gpu: bool) -> dict[str, Any]:
    """Arguments of an engine that returns experts. After `vllm_patches.apply_patches`; calling it again changes nothing."""
    from vllm.distributed.aux_output_connector import worker

    # With one worker a rank, each rank's scheduler waits for experts; the worker has them on the first rank of an engine alone.
    patched: Any = worker
    patched.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    if on_gpu:
        return {"enable_return_routed_experts": True}
    wire_cpu_runner()
    return {"enable_return_routed_experts": True, "async_scheduling": False}


def wire_cpu_runner() -> None:
    """In the process of an engine, before it loads; changes nothing where nobody asks for experts.

    Only vLLM's newer model runner asks for experts, and that one needs Triton, which a CPU has not: the older one asks here."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    if runner.initialize_kv_cache.__name__ == "with_experts":
        return
    config: Any = VllmConfig
    config._verify_aux_output_compatibility = lambda self: None  # it refuses the older runner
    initialize, execute, sample = runner.initialize_kv_cache, runner.execute_model, runner.sample_tokens

    def with_experts(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, kv_cache_config, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled:
            self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self: Any, scheduler_output: Any, *args: Any) -> Any:
        if self.vllm_config.aux_output_config.enabled:
            self.experts.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(self, scheduler_output, *args)

    def sample_tokens(self: Any, *args: Any) -> Any:
        if not self.vllm_config.aux_output_config.enabled:
            return sample(self, *args)
        batch, num_requests = self.input_batch, self.input_batch.num_reqs
        pending = self.experts.prepare_output(
            SimpleNamespace(
                req_ids=batch.req_ids,
                query_start_loc_np=self.query_start_loc.np[: num_requests + 1].copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:num_requests].copy(),
            )
        )
        output = sample(self, *args)
        if pending is None:  # the first worker of an engine tells them
            return output
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))  # nothing is drafted, so nothing is rejected
        output.aux_output_connector_output = pending.process_output()
        return output

    runner.initialize_kv_cache, runner.execute_model, runner.sample_tokens = with_experts, execute_model, sample_tokens
