"""Expert routing of sampled tokens: how vLLM returns it, how a group's completions carry it, and its validation.

No torch, and vLLM only inside functions: servers and their clients import it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_grpo.core.batching.prefix_groups import FREE
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.core.weights.shape import ModelShape


class InvalidRoutingError(RuntimeError):
    """Expert IDs from the sampler that are impossible for the model, or missing. Replaying them would train another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Layers of a model with experts, and the number of experts per token.

    Args:
        layers: Indices of the layers with experts, among all layers of the model.
        num_experts: Number of routed experts of a layer.
        topk: Number of experts per token.
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def from_shape(cls, shape: ModelShape) -> ExpertLayers:
        """Return the expert layers of a model.

        Raises:
            ValueError: The model is dense.
        """
        if shape.moe is None:
            raise ValueError(f"{shape.architecture} has no experts")
        layers = tuple(layer for layer, has_experts in enumerate(shape.moe.layers) if has_experts)
        return cls(layers=layers, num_experts=shape.moe.num_experts, topk=shape.moe.topk)

    def read(self, routed: np.ndarray | None) -> np.ndarray:
        """Convert vLLM's `CompletionOutput.routed_experts` to int16 [tokens, MoE layers, k].

        vLLM returns a row of zeros for a layer without experts; and no row for the last token, which it never ran.

        Args:
            routed: vLLM's array [tokens, layers, k], or None.

        Raises:
            InvalidRoutingError: The array is missing or has another shape.
        """
        if routed is None:
            raise InvalidRoutingError("vLLM returned no routed experts. Set enable_return_routed_experts.")
        if routed.ndim != 3 or routed.shape[1] <= self.layers[-1]:
            raise InvalidRoutingError(
                f"vLLM returned routed experts of shape {routed.shape}, but the last layer with experts is {self.layers[-1]}."
            )
        return routed[:, self.layers].astype(np.int16)

    def check(self, sequence: TokenSequence) -> None:
        """Check that each token takes k different experts in every layer, or routes freely in all of them.

        Raises:
            InvalidRoutingError: It does not, or the sequence has no experts of the right shape.
        """
        experts, form = sequence.experts, (len(sequence.token_ids), len(self.layers), self.topk)
        if experts is None or experts.shape != form:
            returned = "no routed experts" if experts is None else f"routed experts of shape {experts.shape}"
            raise InvalidRoutingError(
                f"The sampler returned {returned} for {form[0]} tokens; expected {form[1]} layers with {form[2]} experts per token."
            )
        ids = np.sort(experts, axis=-1)
        is_wrong = (ids[..., 0] < 0) | (ids[..., -1] >= self.num_experts) | (ids[..., 1:] == ids[..., :-1]).any(axis=-1)
        is_wrong &= ~(experts == FREE).all(axis=(1, 2))[:, None]
        if is_wrong.any():
            token, layer = np.argwhere(is_wrong)[0]
            raise InvalidRoutingError(
                f"The sampler routed token {token} of a sequence to experts {experts[token, layer].tolist()} in layer "
                f"{self.layers[layer]}; expected {self.topk} different ones of {self.num_experts}, or -1 in all layers."
            )


def completion_routes(routes: np.ndarray, opening: int, index: int) -> np.ndarray:
    """Return the part of a completion's routing that is transferred.

    That is all tokens for the first completion of its group, and the tokens after the prompt for the others.

    Args:
        routes: Routing from the prompt's first token on, [tokens, MoE layers, k].
        opening: Tokens of the prompt.
        index: Index of the completion in its group.
    """
    return routes if index == 0 else routes[opening:]


def collect_group_experts(completion_routes: Sequence[np.ndarray], opening: int) -> list[np.ndarray]:
    """Return `TokenSequence.experts` of each completion of a group. The prompt uses the experts of the first completion in all of them.

    So the common prefix stays equal, and is computed once. The last token, which the sampler did not run, routes freely.

    Args:
        completion_routes: Result of `completion_routes` for each completion.
        opening: Tokens of the prompt.

    Returns:
        int16 [tokens, MoE layers, k] for each completion.
    """
    prompt, last = completion_routes[0][:opening], np.broadcast_to(FREE, (1, *completion_routes[0].shape[1:]))
    return [np.concatenate([prompt, routes if index else routes[opening:], last]) for index, routes in enumerate(completion_routes)]


# ---- patches that make vLLM return experts in our ranks and on a CPU, which a release does not ------------------------------------------


def expert_options(*, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine that returns experts, and patch vLLM for it. Idempotent.

    Call after `vllm_patches.apply_patches`.
    """
    from vllm.distributed.aux_output_connector import worker

    # With one worker per rank, each rank's scheduler waits for experts; the worker has them on the first rank of an engine only.
    patched: Any = worker
    patched.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    if on_gpu:
        return {"enable_return_routed_experts": True}
    wire_cpu_runner()
    return {"enable_return_routed_experts": True, "async_scheduling": False}


def wire_cpu_runner() -> None:
    """Make vLLM's CPU model runner return experts. Idempotent, and without effect on engines that return none.

    Call in the process of an engine, before it loads the model. Only vLLM's newer model runner returns experts, and that one needs Triton,
    which a CPU lacks; this patch adds it to the older runner.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    if runner.initialize_kv_cache.__name__ == "with_experts":
        return
    config: Any = VllmConfig
    config._verify_aux_output_compatibility = lambda self: None  # it rejects the older runner
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
        if pending is None:  # only the first worker of an engine returns them
            return output
        sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))  # nothing is drafted, so nothing is rejected
        output.aux_output_connector_output = pending.process_output()
        return output

    runner.initialize_kv_cache, runner.execute_model, runner.sample_tokens = with_experts, execute_model, sample_tokens
