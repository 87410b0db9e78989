"""Count the tokens that one optimizer step computes, and suggest a token budget for its micro-batches.

Lengths come from a file or are the maximum that the settings allow. Steps are counted with each prompt once and with a prompt for every
completion. Imports numpy, which a plan of sizes alone does not need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.commands.planning.summary import bubble_fraction, wanted_micro_batches
from megatron_grpo.core.arrays import SequenceLengths
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.prefix_groups import Alignment, num_tokens
from megatron_grpo.core.batching.split import BatchPartitioner, MicroBatchSpec, partition_padded
from megatron_grpo.core.parallel.layout import sequence_alignment
from megatron_grpo.core.policy.requirements import rank_multiple
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.sharing import Lengths, PrefixSharing, convert_lengths, decide

MOST_ROWS = 65_536  # maximum rows of an optimizer step that are packed
ASSUMED_PROMPT = 512  # tokens, without max_prompt_length and a file of lengths
FLAG = "max_tokens_per_micro_batch"
TRIES = 4  # maximum packings in the search for a budget that leaves enough micro-batches


def sequence_tokens(cfg: Config, lengths: Lengths | None, *, longest: bool) -> tuple[int, int]:
    """Return the (prompt, completion) lengths in tokens that estimates assume.

    They are those of the longest sequence in the file, or the mean; without a file, the maximum that the settings allow.

    Args:
        lengths: Contents of the file of lengths; None without one.
        longest: Return the longest sequence instead of the mean.
    """
    if lengths is None:
        return cfg.data.max_prompt_length or ASSUMED_PROMPT, cfg.rollout.max_completion_length
    if longest:
        return max(lengths, key=sum)
    count = len(lengths)
    return round(sum(p for p, _ in lengths) / count), round(sum(c for _, c in lengths) / count)


def packing(sizes: BatchSizes, cfg: Config, lengths: Lengths, min_saving_ratio: float | None) -> dict[str, Any]:
    """Measure how well these lengths, taken in order as the rows of the run, fill micro-batches.

    They are split as training splits them.

    Args:
        lengths: (prompt, completion) lengths in tokens.

    Returns:
        The `packing` object. `packing_efficiency` is computed tokens divided by stream tokens, which include the alignment that CP and
        sequence parallelism need. `padded_efficiency` is the same if each micro-batch were padded to its longest sequence. `balance` is the
        mean of (mean tokens / maximum tokens) over the DP ranks of a micro-step.
    """
    cut = token_partitioner(sizes, cfg, min_saving_ratio)
    full: list[list[int]] = []  # [micro-step][DP rank] tokens, including the last one of each sequence
    padded = streams = sequences = 0  # tokens if padded, tokens in the streams, rows
    unit = cut.rows_per_slice * cut.multiple
    for begin in range(0, len(lengths), sizes.global_batch_size):
        rows = convert_lengths(lengths[begin : begin + sizes.global_batch_size], sizes.num_generations)
        if len(rows) < unit and full:
            break  # the last lines of the file do not fill a step
        filled = [*rows, *[rows[0]] * unit]
        for together in zip(*partition_padded(rows, cut), strict=True):
            full.append([_computed(micro_spec, filled) + len(micro_spec.rows) for micro_spec in together])
            sequences += sum(len(micro_spec.rows) for micro_spec in together)
            streams += sum(micro_spec.num_tokens for micro_spec in together)
            padded += sum(len(micro_spec.rows) * max(filled[i].contexts[0] for i in micro_spec.rows) for micro_spec in together)
    tokens = [count for step in full for count in step]
    return {
        "sequences": len(lengths),
        "micro_batches": len(tokens),
        "mean_tokens_per_micro_batch": sum(tokens) / len(tokens),
        "min_tokens_per_micro_batch": min(tokens),
        "max_tokens_per_micro_batch": max(tokens),
        "packing_efficiency": (sum(tokens) - sequences) / streams,
        "padded_efficiency": sum(tokens) / padded,
        "balance": sum(sum(step) / (len(step) * max(step)) for step in full) / len(full),
    }


def _computed(micro_spec: MicroBatchSpec, rows: Sequence[SequenceLengths]) -> int:
    """Return the computed tokens of a micro-batch without alignment."""
    computed = [rows[i].contexts[0] - 1 for i in micro_spec.rows]
    return sum(computed) - sum((len(prefix_group.members) - 1) * prefix_group.prefix for prefix_group in micro_spec.prefix_groups)


def token_partitioner(sizes: BatchSizes, cfg: Config, min_saving_ratio: float | None) -> BatchPartitioner:
    """Return the partitioner that `policy.policy.batch_partitioner` makes, except that costs are token counts."""
    layout = sizes.layout
    sequence, stream = sequence_alignment(layout, cfg.parallel.sequence_parallel, rank_multiple(cfg))
    return BatchPartitioner(
        dp_size=sizes.dp_size,
        micro_batch_size=sizes.micro_batch_size,
        alignment=Alignment(sequence=sequence, stream=stream),
        multiple=layout.pp if layout.vpp else 1,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        min_saving_ratio=min_saving_ratio,
    )


# ---- one optimizer step -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCounts:
    """Amount of computation in one forward over some sequences, over all ranks.

    Args:
        sequences: Sequences.
        tokens: Tokens in the streams, alignment included.
        squares: Attention work: twice the number of (query, key) pairs, which is T^2 for a sequence of T tokens.
        lengths: Number of sequences by their tokens.
        scored: Positions of the output layer.
        pieces: Parts of groups, counted over all micro-batches.
        micro_batches: Micro-batches.
        largest: Tokens of the fullest stream.
    """

    sequences: int
    tokens: int
    squares: int
    lengths: Mapping[int, int]
    scored: int
    pieces: int
    micro_batches: int
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Tokens of one optimizer step, or of the first MOST_ROWS rows of a larger one.

    Args:
        sizes: Batch sizes and layout.
        cut: Partitioner of the rows.
        pairs: (prompt, completion) tokens of the rows.
        lengths: The rows as packing uses them.
        apart: The step with a prompt for every completion.
        shared: The step as the run computes it; equal to `apart` if nothing is shared.
    """

    sizes: BatchSizes
    cut: BatchPartitioner
    pairs: Sequence[tuple[int, int]]
    lengths: Sequence[SequenceLengths]
    apart: ComputeCounts
    shared: ComputeCounts

    @classmethod
    def from_lengths(cls, min_saving_ratio: float | None, sizes: BatchSizes, cfg: Config, lengths: Lengths | None) -> StepTokens:
        """Pack one optimizer step with and without prompt sharing.

        A file with fewer rows than a step is repeated from its first line.

        Args:
            min_saving_ratio: As in `BatchPartitioner`; None if nothing is shared.
            lengths: (prompt, completion) lengths in tokens; None to give all sequences the maximum length.
        """
        cut = token_partitioner(sizes, cfg, min_saving_ratio)
        unit = cut.rows_per_slice * cut.multiple
        num_rows = min(sizes.global_batch_size, max(MOST_ROWS // unit, 1) * unit)
        known_lengths = lengths if lengths else [sequence_tokens(cfg, None, longest=True)]
        pairs = [known_lengths[i % len(known_lengths)] for i in range(num_rows)]
        rows = convert_lengths(pairs, sizes.num_generations)
        packed_apart = pack_and_count(pairs, rows, replace(cut, min_saving_ratio=None))
        shared = pack_and_count(pairs, rows, cut) if min_saving_ratio is not None else packed_apart
        return cls(sizes=sizes, cut=cut, pairs=pairs, lengths=rows, apart=packed_apart, shared=shared)

    def with_budget(self, max_tokens: int, min_saving_ratio: float) -> ComputeCounts:
        """Pack the same rows with another token budget and prompts shared.

        Args:
            max_tokens: Token budget of a micro-batch.
        """
        # A budget above all rows together has no effect, and packing allocates memory for every length up to it.
        max_tokens = min(max_tokens, self.cut.alignment.count_stream(self.apart.tokens))
        return pack_and_count(self.pairs, self.lengths, replace(self.cut, max_tokens=max_tokens, min_saving_ratio=min_saving_ratio))

    def micro_batches_of_rank(self, computed: ComputeCounts) -> int:
        """Return the micro-batches per rank of the whole step, extrapolated if only its first rows were packed."""
        return -(-computed.micro_batches * self.sizes.global_batch_size // (computed.sequences * self.sizes.dp_size))

    def bubble(self, computed: ComputeCounts) -> float:
        """Return the fraction of an optimizer step that a pipeline stage is idle."""
        return bubble_fraction(self.sizes, self.micro_batches_of_rank(computed))


def pack_and_count(pairs: Sequence[tuple[int, int]], lengths: Sequence[SequenceLengths], cut: BatchPartitioner) -> ComputeCounts:
    """Pack rows into micro-batches and count what they compute.

    If there are fewer rows than ranks and pipeline stages need, copies of the first one are added, as in forward-only passes.

    Args:
        pairs: (prompt, completion) tokens of the rows.
    """
    micro_specs = [micro_spec for replica_specs in partition_padded(lengths, cut) for micro_spec in replica_specs]
    rows = [i if i < len(pairs) else 0 for micro_spec in micro_specs for i in micro_spec.rows]
    return ComputeCounts(
        sequences=len(rows),
        tokens=sum(micro_spec.num_tokens for micro_spec in micro_specs),
        squares=sum((sum(pairs[i]) - 1) ** 2 for i in rows)
        - sum(_squares_saved(micro_spec, lengths, cut.alignment) for micro_spec in micro_specs),
        lengths=Counter(sum(pairs[i]) - 1 for i in rows),
        scored=sum(min(pairs[i][1], sum(pairs[i]) - 1) for i in rows),
        pieces=sum(len({lengths[i if i < len(lengths) else 0].group for i in micro_spec.rows}) for micro_spec in micro_specs),
        micro_batches=len(micro_specs),
        largest=max(micro_spec.num_tokens for micro_spec in micro_specs),
    )


def _squares_saved(micro_spec: MicroBatchSpec, lengths: Sequence[SequenceLengths], alignment: Alignment) -> int:
    """Return the attention work that prefix sharing saves in a micro-batch.

    A row attends to its whole prefix of P tokens: P^2 + sum (2 P t + t^2) is sum (P + t)^2 minus P^2 for every copy of the prefix but one.
    """
    saved = 0
    for prefix_group in micro_spec.prefix_groups:
        if len(prefix_group.members) > 1 and prefix_group.prefix:
            members = [lengths[i if i < len(lengths) else 0] for i in (micro_spec.rows[index] for index in prefix_group.members)]
            computed = [lengths.contexts[0] - 1 for lengths in members]
            if num_tokens(computed, prefix_group.prefix, alignment) < num_tokens(computed, 0, alignment):
                saved += (len(members) - 1) * prefix_group.prefix**2
    return saved


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
