"""Which experts a sampler routed tokens to: how vLLM says it, how a group's completions have it, and what must be true of it.

No torch, and vLLM only inside functions: servers and those who ask them read it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_grpo.batching.prefix_groups import FREE
from megatron_grpo.types import Sequence as Tokens
from megatron_grpo.weights.shape import ModelShape


class InvalidRoutingError(RuntimeError):
    """The sampler named experts that the model cannot have taken, or none. Replaying them would train another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Where a model has experts, and how many of them a token takes."""

    layers: tuple[int, ...]  # of all layers of the model, those with experts
    num_experts: int
    topk: int

    @classmethod
    def of(cls, shape: ModelShape) -> ExpertLayers:
        """Raises ValueError for a dense model."""
        if shape.moe is None:
            raise ValueError(f"{shape.architecture} has no experts")
        layers = tuple(layer for layer, has_experts in enumerate(shape.moe.layers) if has_experts)
        return cls(layers=layers, num_experts=shape.moe.num_experts, topk=shape.moe.topk)

    def read(self, routed: np.ndarray | None) -> np.ndarray:
        """vLLM's `CompletionOutput.routed_experts` -> int16 [tokens, MoE layers, k].

        vLLM has a row of zeros for a layer without experts; and no row for the last token, which it never ran. Raises InvalidRoutingError.
        """
        if routed is None:
            raise InvalidRoutingError("vLLM returned no experts; it does with enable_return_routed_experts.")
        if routed.ndim != 3 or routed.shape[1] <= self.layers[-1]:
            raise InvalidRoutingError(
                f"vLLM returned experts of the form {routed.shape}, and the last layer with experts is {self.layers[-1]}."
            )
        return routed[:, self.layers].astype(np.int16)

    def check(self, sequence: Tokens) -> None:
        """Each token takes k different experts in every layer, or routes freely in all of them. Raises InvalidRoutingError."""
        experts, form = sequence.experts, (len(sequence.token_ids), len(self.layers), self.topk)
        if experts is None or experts.shape != form:
            found = "no experts" if experts is None else f"experts of the form {experts.shape}"
            raise InvalidRoutingError(
                f"the sampler returned {found} for {form[0]} tokens; {form[1]} layers have experts, and a token takes {form[2]} in each."
            )
        ids = np.sort(experts, axis=-1)
        is_wrong = (ids[..., 0] < 0) | (ids[..., -1] >= self.num_experts) | (ids[..., 1:] == ids[..., :-1]).any(axis=-1)
        is_wrong &= ~(experts == FREE).all(axis=(1, 2))[:, None]
        if is_wrong.any():
            token, layer = np.argwhere(is_wrong)[0]
            raise InvalidRoutingError(
                f"the sampler routed token {token} of a sequence to experts {experts[token, layer].tolist()} in layer "
                f"{self.layers[layer]}. It must be {self.topk} different ones of {self.num_experts}, or -1 in all layers."
            )


def told(routes: np.ndarray, opening: int, place: int) -> np.ndarray:
    """What is handed on of a completion: of the first of its group all tokens, of the others those behind the prompt.

    routes: [tokens, MoE layers, k] from the prompt's first token on. opening: tokens of the prompt.
    """
    return routes if place == 0 else routes[opening:]


def of_group(told: Sequence[np.ndarray], opening: int) -> list[np.ndarray]:
    """`Sequence.experts` of each completion, from what was told of it: the prompt takes for all of them the experts of the first.

    So what they have in common stays equal, and is computed once. The last token, which the sampler did not run, routes freely.
    """
    prompt, last = told[0][:opening], np.broadcast_to(FREE, (1, *told[0].shape[1:]))
    return [np.concatenate([prompt, routes if place else routes[opening:], last]) for place, routes in enumerate(told)]


# ---- vLLM tells them, also in ranks of ours and on a CPU, where a release of it does not ------------------------------------------------


def expert_options(*, on_gpu: bool) -> dict[str, Any]:
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
