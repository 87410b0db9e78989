"""Decide whether a run computes each prompt once (`--share_prefix`), and suggest a token budget for micro-batches.

The decision, its reason and the saving are fixed before training. A suggested budget holds whole groups, fits in memory and keeps the
pipeline busy. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.policy.flash import flash_obstacle
from megatron_grpo.core.settings import Config
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.policy import attention_channels, sharing_obstacle

if TYPE_CHECKING:
    from megatron_grpo.commands.planning.token_counts import ComputeCounts, StepTokens

FLAG = "max_tokens_per_micro_batch"
TRIES = 4  # maximum packings in the search for a budget that leaves enough micro-batches
LEAST_SAVING = 1 / 16  # of a group's tokens; on a CPU, sharing that saved less was slower than recomputing them

_PLAIN = "attention with shared prefixes uses plain matrix products, and all scores of a sequence are in memory at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSharing:
    """Decision about prompt sharing.

    Args:
        min_saving_ratio: Minimum share of a group's tokens that sharing must save, as in `BatchPartitioner`; None if nothing is shared.
        why: Reason, a phrase.
    """

    min_saving_ratio: float | None
    why: str

    def __str__(self) -> str:
        return f"{'off' if self.min_saving_ratio is None else 'on'}: {self.why}"


def decide(cfg: Config, shape: ModelShape | None, *, has_gpu: bool | None = None, gpu_lacks: str | None = None) -> PrefixSharing:
    """Decide whether prompts are shared.

    Args:
        cfg: Configuration of the run. A set `gpu_memory_gb` means that the plan is for GPUs.
        shape: Shape of the model; None if unknown.
        has_gpu: Whether the training machine has a GPU; None if unknown.
        gpu_lacks: Why this GPU has no kernel for attention with shared prefixes (`policy.attention.gpu_kernel`).

    Raises:
        ConfigError: If the file of lengths cannot be read. Validation rejects `true` with an obstacle before (`policy.validation`).
    """
    obstacle = gpu_lacks
    if has_gpu is None:
        obstacle = flash_obstacle(cfg.model.torch_dtype, attention_channels(shape) if shape else 8)
    if cfg.batch.share_prefix == "false":
        return PrefixSharing(min_saving_ratio=None, why="share_prefix false")
    if cfg.batch.share_prefix == "true":
        kernel = _kernel(has_gpu, f"{_PLAIN}: {obstacle}" if obstacle else None)
        return PrefixSharing(min_saving_ratio=0.0, why="share_prefix true: all groups that save at least one token" + kernel)
    reason = sharing_obstacle(cfg, shape) or _nothing_to_gain(cfg)
    if reason is None and obstacle and (has_gpu or cfg.plan.gpu_memory_gb):
        reason = f"{obstacle}; share_prefix true uses plain matrix products"
    if reason is not None:
        return PrefixSharing(min_saving_ratio=None, why=reason)
    explanation = "groups for which it saves at least 1/16 of the tokens"
    return PrefixSharing(
        min_saving_ratio=LEAST_SAVING, why=explanation + _kernel(has_gpu, f"it is disabled: {obstacle}" if obstacle else None)
    )


def _kernel(has_gpu: bool | None, otherwise: str | None) -> str:
    """Describe the attention kernel on a GPU.

    Args:
        otherwise: Alternative to torch's flash attention, a phrase; None if flash attention is used.
    """
    if has_gpu is False:
        return ""
    condition = "" if otherwise or has_gpu else ", of compute capability 8.0 or more,"
    return f". On {'this' if has_gpu else 'a'} GPU{condition} {otherwise or 'attention with shared prefixes uses flash attention'}"


def _nothing_to_gain(cfg: Config) -> str | None:
    batch = cfg.batch
    if batch.num_generations == 1:
        return "num_generations 1: one completion per prompt"
    if batch.micro_batch_size == 1 and batch.max_tokens_per_micro_batch is None:
        return "micro_batch_size 1: one completion per micro-batch; use max_tokens_per_micro_batch"
    if cfg.plan.lengths:
        from megatron_grpo.run.lengths import lengths_of, read_lengths

        tokens_apart, tokens_shared = _tokens(lengths_of(read_lengths(cfg.plan.lengths), batch.num_generations))
        if tokens_shared > (1 - LEAST_SAVING) * tokens_apart:
            return (
                f"of the lengths in {cfg.plan.lengths}, {1 - tokens_shared / tokens_apart:.1%} of the tokens could be saved, less than 1/16"
            )
    return None


def _tokens(lengths: Sequence[Any]) -> tuple[int, int]:
    """Return computed tokens (with every row separate, with every prefix computed once)."""
    tokens_apart = sum(tokens - 1 for row in lengths for tokens in row.contexts)
    copies = sum(row.prefix for row in lengths)
    prefix_tokens = sum({row.group: row.prefix for row in lengths}.values())
    return max(tokens_apart, 1), tokens_apart - copies + prefix_tokens


# ---- a token budget ---------------------------------------------------------------------------------------------------------------------


def suggest_budget(
    cfg: Config, shape: ModelShape | None, sharing: PrefixSharing, step: StepTokens, memory: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Suggest `max_tokens_per_micro_batch` for a run with prompt sharing.

    Args:
        cfg: Configuration of the run.
        shape: Shape of the model; None if unknown.
        sharing: Decision about prompt sharing.
        step: Tokens of one optimizer step.
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
    """Return the stream length in tokens that holds the step's largest group: its prompt once and all its completions.

    Args:
        step: Tokens of one optimizer step.
    """
    size, of_segment, largest = step.sizes.num_generations, step.cut.alignment.of_segment, 0
    for begin in range(0, len(step.pairs), size):
        group = step.pairs[begin : begin + size]
        largest = max(largest, of_segment(max(prompt for prompt, _ in group)) + sum(of_segment(completion) for _, completion in group))
    return step.cut.alignment.of_stream(largest)


def wanted_micro_batches(sizes: BatchSizes) -> int:
    """Return the micro-batches per rank that limit pipeline idle time to a fifth of a step: 4 (pp - 1) / vpp.

    The number is a multiple of pp for interleaved stages.

    Args:
        sizes: Batch sizes and layout.
    """
    multiple = sizes.layout.pp if sizes.layout.vpp else 1
    return max(1, -(-4 * (sizes.layout.pp - 1) // (sizes.layout.num_chunks * multiple))) * multiple


def budget_for_pipeline(step: StepTokens, computed: ComputeCounts, min_saving_ratio: float) -> tuple[int, ComputeCounts] | None:
    """Find a budget that leaves each rank `wanted_micro_batches`, in at most TRIES packings, starting from the largest.

    Args:
        step: Tokens of one optimizer step.
        computed: The step packed with a larger budget.
        min_saving_ratio: As in `BatchPartitioner`.

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
