"""Work of one rollout and of the training on it: matmul FLOPs by phase, bytes of a weight push, and how lengths pack."""

from __future__ import annotations

import math
from typing import Any

from megatron_grpo.planning.facts import old_logprobs_summary
from megatron_grpo.planning.lengths import Lengths, packing, sequence_tokens
from megatron_grpo.planning.memory import BYTES
from megatron_grpo.planning.sharing import Sharing, estimate_sharing
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.names import layer_entries, num_parameters
from megatron_grpo.weights.shape import ModelShape


def estimate_cost(shape: ModelShape | None, sizes: BatchSizes, cfg: Config, lengths: Lengths | None, sharing: Sharing) -> dict[str, Any]:
    """The `cost` object of `plan --json`. Without a model, only what the lengths say."""
    cost: dict[str, Any] = {}
    if shape is not None:
        cost = _flops(shape, sizes, cfg, lengths)
    if lengths is not None:
        cost["packing"] = packing(sizes, cfg, lengths, sharing.least_saving)
    cost["sharing"] = estimate_sharing(sharing, sizes, cfg, lengths)
    return cost


def forward_flops(shape: ModelShape, prompt: int, completion: int, *, head_positions: int) -> int:
    """Multiply-adds x 2 of one sequence's forward pass; the output layer at `head_positions` of its tokens."""
    tokens = prompt + completion
    products = sum(_layer_products(shape, shape.is_moe_layer(layer)) for layer in range(shape.num_layers))
    # Causal attention: half of the tokens x tokens scores, once for the scores and once for the values.
    value_size = shape.num_attention_heads * (shape.mla.v_head_dim if shape.mla else shape.head_dim)
    attention = shape.num_layers * tokens * tokens * (shape.query_size + value_size)
    return 2 * products * tokens + attention + 2 * head_positions * shape.hidden_size * shape.vocab_size


def _layer_products(shape: ModelShape, moe: bool) -> int:
    """Elements of the matrices that one token meets in a layer."""
    total = 0
    for entry in layer_entries(shape, moe=moe):
        size = sum(math.prod(size) for _, size in entry.hf if len(size) == 2)
        total += size * (shape.moe.topk if shape.moe and entry.is_expert else 1)
    return total


def _flops(shape: ModelShape, sizes: BatchSizes, cfg: Config, lengths: Lengths | None) -> dict[str, Any]:
    prompt, completion = sequence_tokens(cfg, lengths, longest=False)
    rows, prompts = sizes.generation_batch_size, sizes.num_rollout_prompts
    forward = forward_flops(shape, prompt, completion, head_positions=completion)
    prefill = forward_flops(shape, prompt, 0, head_positions=1)
    decode = forward_flops(shape, prompt, completion, head_positions=completion) - prefill
    shares_prompts = cfg.rollout.vllm_enable_prefix_caching
    period = min(1000, sizes.gradient_accumulation_steps)  # after so many rollouts the timetable repeats
    summary = old_logprobs_summary(sizes, period)
    recomputed = summary["slices_recomputed"] / summary["slices_total"]
    passes = sizes.num_iterations * rows
    recompute = forward if cfg.model.recompute_granularity == "full" else 0
    phases = {
        "rollout": (prompts if shares_prompts else rows) * prefill + rows * decode,
        "old_logprobs": round(rows * recomputed * forward),
        "reference_logprobs": rows * forward if cfg.grpo.beta > 0 else 0,
        "training": passes * (3 * forward + recompute),
    }
    parameters = num_parameters(shape)
    return {
        "parameters": parameters,
        "active_parameters": num_parameters(shape, active_only=True),
        "tokens_per_rollout": rows * (prompt + completion),
        "flops_per_rollout": phases,
        "flops_per_rollout_total": sum(phases.values()),
        "weight_push_bytes": parameters * BYTES[cfg.model.torch_dtype],
        "assumptions": [
            f"every sequence has {prompt} + {completion} tokens ("
            + ("the mean of the file of lengths)" if lengths else "the longest that the settings allow)"),
            "matrix products alone, 2 FLOPs each; causal attention at half of its square; a backward is twice a forward",
            "per rollout, over all ranks; the output layer at completion positions only",
            "rollout: prompts are computed once per group" if shares_prompts else "rollout: prompts are computed once per completion",
        ],
    }
