"""Suggest a token budget for micro-batches that holds whole groups, fits in memory and keeps the pipeline busy. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.sharing import PrefixSharing, decide

if TYPE_CHECKING:
    from megatron_grpo.commands.planning.token_counts import ComputeCounts, StepTokens

FLAG = "max_tokens_per_micro_batch"
TRIES = 4  # maximum packings in the search for a budget that leaves enough micro-batches


def suggest_budget(
    cfg: Config, shape: ModelShape | None, sharing: PrefixSharing, step: StepTokens, memory: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Suggest `max_tokens_per_micro_batch` for a run with prompt sharing.

    Args:
        shape: Shape of the model; None if unknown.
        memory: `memory` object of the plan; None if unknown.

    Returns:
        {max_tokens_per_micro_batch, why, tokens, micro_batches_of_rank, bubble} of the step packed with that budget. None if prompts would
        not be shared with a budget either, if no budget fits in memory, or if the configured one is good enough.
    """
    configured = cfg.batch.max_tokens_per_micro_batch
    saving = (sharing if configured or sharing.min_saving_ratio is not None else decide(cfg.with_values({FLAG: 1}), shape)).min_saving_ratio
    if saving is None:
        return None
    if configured:
        budget, packing, reason = configured, step.shared, None
    else:
        budget, reason = largest_group(step), "the smallest that fits a whole group: its prompt once and all completions"
        if memory and memory["gpu_memory_bytes"]:
            grain, reason = step.cut.alignment.grain, "the largest whose activations fit in gpu_memory_gb"
            budget = memory["most_tokens_per_micro_batch"] * step.sizes.layout.cp // grain * grain
        if not budget:
            return None
        packing = step.with_budget(budget, saving)
        if step.micro_batches_of_rank(packing) == step.cut.multiple and packing.largest < budget:
            budget, reason = packing.largest, "all tokens of a rank in an optimizer step"
    # Fewer than the pipeline needs, and fewer than without sharing.
    is_short = step.micro_batches_of_rank(packing) < min(wanted_micro_batches(step.sizes), step.micro_batches_of_rank(step.apart))
    if is_short and (smaller := budget_for_pipeline(step, packing, saving)):
        budget, packing = smaller
        reason = f"at least {wanted_micro_batches(step.sizes)} micro-batches per rank, 4 (pp - 1) / vpp, keep the pipeline busy"
    if reason is None:
        return None
    return {
        FLAG: budget,
        "why": reason,
        "tokens": packing.tokens,
        "micro_batches_of_rank": step.micro_batches_of_rank(packing),
        "bubble": step.bubble(packing),
    }


def largest_group(step: StepTokens) -> int:
    """Return the stream length in tokens that holds the step's largest group: its prompt once and all its completions."""
    size, count_segment, largest = step.sizes.num_generations, step.cut.alignment.count_segment, 0
    for begin in range(0, len(step.pairs), size):
        group = step.pairs[begin : begin + size]
        largest = max(
            largest, count_segment(max(prompt for prompt, _ in group)) + sum(count_segment(completion) for _, completion in group)
        )
    return step.cut.alignment.count_stream(largest)


def wanted_micro_batches(sizes: BatchSizes) -> int:
    """Return the micro-batches per rank that limit pipeline idle time to a fifth of a step: 4 (pp - 1) / vpp.

    The number is a multiple of pp for interleaved stages.
    """
    multiple = sizes.layout.pp if sizes.layout.vpp else 1
    return max(1, -(-4 * (sizes.layout.pp - 1) // (sizes.layout.num_chunks * multiple))) * multiple


def budget_for_pipeline(step: StepTokens, computed: ComputeCounts, min_saving_ratio: float) -> tuple[int, ComputeCounts] | None:
    """Find a budget that leaves each rank `wanted_micro_batches`, in at most TRIES packings, starting from the largest.

    Returns:
        (budget, the step packed with it); None if the step has too few rows.
    """
    sizes, grain, num_wanted = step.sizes, step.cut.alignment.grain, wanted_micro_batches(step.sizes)
    total_tokens = computed.tokens * sizes.global_batch_size // computed.sequences
    budget = total_tokens // (sizes.dp_size * num_wanted) // grain * grain
    for _ in range(TRIES):
        if budget < grain:
            return None
        computed = step.with_budget(budget, min_saving_ratio)
        num_micro_batches = step.micro_batches_of_rank(computed)
        if num_micro_batches >= num_wanted:
            return budget, computed
        budget = budget * num_micro_batches // num_wanted // grain * grain
    return None
