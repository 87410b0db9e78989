"""The token budget of a micro-batch that a run would do well with: one that holds groups, fits, and keeps the pipeline busy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.computed import Computed, Step
from megatron_grpo.planning.sharing import Sharing, decide
from megatron_grpo.weights.shape import ModelShape

FLAG = "max_tokens_per_micro_batch"
TRIES = 4  # packings, until a budget leaves enough micro-batches


def suggest_budget(
    cfg: Config, shape: ModelShape | None, sharing: Sharing, step: Step, memory: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """{max_tokens_per_micro_batch, why, tokens, micro_batches_of_rank, bubble}: of the step if it were packed so, prompts shared.

    None where prompts would not be shared with a budget either, where none fits, and where the one that is given will do.
    """
    given = cfg.batch.max_tokens_per_micro_batch
    saving = (sharing if given or sharing.least_saving is not None else decide(cfg.with_values({FLAG: 1}), shape)).least_saving
    if saving is None:
        return None
    if given:
        budget, found, why = given, step.shared, None
    else:
        fits = memory and memory["gpu_memory_bytes"]
        budget, why = _that_fits(step, memory["most_tokens_per_micro_batch"]) if memory and fits else _whole_group(step)
        if not budget:
            return None
        found = step.with_budget(budget, saving)
        if step.micro_batches_of_rank(found) == step.cut.multiple and found.largest < budget:
            budget, why = found.largest, "all that a rank computes in an optimizer step"
    if is_short_of_micro_batches(step, found) and (smaller := budget_for_pipeline(step, found, saving)):
        budget, found = smaller
        why = f"at least {wanted_micro_batches(step.sizes)} micro-batches a rank, 4 (pp - 1) / vpp, keep the pipeline busy"
    if why is None:
        return None
    return {
        FLAG: budget,
        "why": why,
        "tokens": found.tokens,
        "micro_batches_of_rank": step.micro_batches_of_rank(found),
        "bubble": step.bubble(found),
    }


def _that_fits(step: Step, most: int) -> tuple[int, str]:
    """most: tokens of a micro-batch on one rank that fit beside everything else."""
    grain = step.cut.alignment.grain
    return most * step.sizes.layout.cp // grain * grain, "the most whose activations fit in gpu_memory_gb"


def _whole_group(step: Step) -> tuple[int, str]:
    return largest_group(step), "the least that holds a whole group, its prompt once and all its completions"


def largest_group(step: Step) -> int:
    """Tokens of the stream that holds the step's largest group whole: its prompt once, and all its completions."""
    size, of_segment, largest = step.sizes.num_generations, step.cut.alignment.of_segment, 0
    for begin in range(0, len(step.pairs), size):
        group = step.pairs[begin : begin + size]
        largest = max(largest, of_segment(max(prompt for prompt, _ in group)) + sum(of_segment(completion) for _, completion in group))
    return step.cut.alignment.of_stream(largest)


def wanted_micro_batches(sizes: BatchSizes) -> int:
    """Of a rank, so that pipeline stages wait a fifth of a step at most: 4 (pp - 1) / vpp, a multiple of pp where stages interleave."""
    multiple = sizes.layout.pp if sizes.layout.vpp else 1
    return max(1, -(-4 * (sizes.layout.pp - 1) // (sizes.layout.num_chunks * multiple))) * multiple


def is_short_of_micro_batches(step: Step, computed: Computed) -> bool:
    """Fewer than the pipeline wants, and fewer than there would be with a prompt for every completion."""
    found = step.micro_batches_of_rank(computed)
    return found < min(wanted_micro_batches(step.sizes), step.micro_batches_of_rank(step.apart))


def budget_for_pipeline(step: Step, computed: Computed, least_saving: float) -> tuple[int, Computed] | None:
    """The largest budget found that leaves a rank `wanted_micro_batches`; None if the rows are too few. computed: under a larger one."""
    sizes, grain, wanted = step.sizes, step.cut.alignment.grain, wanted_micro_batches(step.sizes)
    whole = computed.tokens * sizes.global_batch_size // computed.sequences
    budget = whole // (sizes.dp_size * wanted) // grain * grain
    for _ in range(TRIES):
        if budget < grain:
            return None
        computed = step.with_budget(budget, least_saving)
        found = step.micro_batches_of_rank(computed)
        if found >= wanted:
            return budget, computed
        budget = budget * found // wanted // grain * grain
    return None
