"""The only place where data is sharded: one optimizer step's rows, cut for one data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_grpo.batching.collate import collate
from megatron_grpo.batching.timetable import Step
from megatron_grpo.types import GlobalBatch, Sample

# All samples of a step -> (`u` of each, one entry per token; N; trained tokens).
Weigh = Callable[[Sequence[Sample]], "tuple[list[np.ndarray], int, int]"]


def split(
    pending: Sequence[Sample],
    step: Step,
    weigh: Weigh,
    *,
    dp_rank: int,
    dp_size: int,
    micro_batch_size: int,
    align_sequence: int = 1,
    align_stream: int = 1,
) -> tuple[GlobalBatch, list[Sample]]:
    """This rank's share of optimizer step `step`, and the samples that later steps still need.

    Token weights are computed over the whole step, then cut: that is what makes the gradient independent of the cut.
    Raises KeyError when the timetable asks for a row that was never sampled, ValueError when a sample's version contradicts it.
    """
    by_row = {(sample.rollout, sample.row): sample for sample in pending}
    chosen = [[by_row[micro.rollout, row] for row in range(*micro.rows)] for micro in step.micro_steps]
    everyone = [sample for samples in chosen for sample in samples]
    weights, num_sequences, num_loss_tokens = weigh(everyone)

    micro_batches = []
    for index, (micro, samples) in enumerate(zip(step.micro_steps, chosen, strict=True)):
        for sample in samples:
            if step.index - sample.version != micro.staleness:
                raise ValueError(
                    f"row {sample.row} of rollout {sample.rollout} is {step.index - sample.version} versions old; "
                    f"the timetable says {micro.staleness}"
                )
        first = dp_rank * micro_batch_size
        mine = slice(first, first + micro_batch_size)
        begin = index * micro_batch_size * dp_size
        micro_batches.append(
            collate(
                samples[mine],
                weights[begin : begin + len(samples)][mine],
                trained_at=step.index,
                align_sequence=align_sequence,
                align_stream=align_stream,
            )
        )
    batch = GlobalBatch(
        micro_batches=tuple(micro_batches),
        num_sequences=num_sequences,
        num_loss_tokens=num_loss_tokens,
        num_tokens=sum(len(sample.token_ids) for sample in everyone),
        staleness=tuple(step.index - sample.version for sample in everyone),
    )
    return batch, still_needed(pending, step, micro_batch_size * dp_size)


def still_needed(pending: Sequence[Sample], step: Step, rows_per_slice: int) -> list[Sample]:
    """Pending samples without those whose last use was `step`."""
    done = set(step.last_use)
    return [sample for sample in pending if (sample.rollout, sample.row // rows_per_slice) not in done]


def in_slices(pending: Sequence[Sample], slices: Sequence[tuple[int, int]], rows_per_slice: int) -> list[Sample]:
    """The pending samples that belong to the given (rollout, slice) pairs, in row order."""
    wanted = set(slices)
    return [sample for sample in pending if (sample.rollout, sample.row // rows_per_slice) in wanted]
