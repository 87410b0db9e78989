"""The only place where data is sharded: one optimizer step's rows, cut for one data-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_grpo.batching.collate import collate, padded_length, stream_length
from megatron_grpo.batching.pack import pack
from megatron_grpo.batching.timetable import Step
from megatron_grpo.types import GlobalBatch, MicroBatch, Sample


class TokenWeigher(Protocol):
    """The `u` of every sample of a step; grpo.weights.token_weights with the loss already chosen."""

    def __call__(self, loss_masks: Sequence[np.ndarray], *, is_truncated: Sequence[bool], is_dead: Sequence[bool]) -> Any:
        """An object with `weights` (float64, one entry per token of each sample), `num_sequences` and `num_loss_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCut:
    """How a step is cut for one rank. align_*: see `parallel.layout.sequence_alignment`. The others: see `batching.pack`."""

    dp_rank: int
    dp_size: int
    micro_batch_size: int
    align_sequence: int = 1
    align_stream: int = 1
    multiple: int = 1
    max_tokens: int | None = None  # None: micro_batch_size completions each, whatever their lengths
    even_length: float = math.inf
    even_streams: bool = False  # the n-th micro-batches of all ranks are padded to one length

    @property
    def rows_per_slice(self) -> int:
        """Completions of one micro-step, over all data-parallel ranks."""
        return self.micro_batch_size * self.dp_size


def split(pending: Sequence[Sample], step: Step, weigh: TokenWeigher, cut: BatchCut) -> tuple[GlobalBatch, list[Sample]]:
    """This rank's share of optimizer step `step`, and the samples that later steps still need.

    Token weights are computed over the whole step, then cut: that is what makes the gradient independent of the cut.
    Raises KeyError when the timetable asks for a row that was never sampled, ValueError when a sample's version contradicts it.
    """
    by_row = {(sample.rollout, sample.row): sample for sample in pending}
    chosen = [[by_row[micro.rollout, row] for row in range(*micro.rows)] for micro in step.micro_steps]
    everyone = [sample for samples in chosen for sample in samples]
    found = weigh(
        [sample.loss_mask for sample in everyone],
        is_truncated=[sample.is_truncated for sample in everyone],
        is_dead=[sample.is_dead for sample in everyone],
    )

    for micro, samples in zip(step.micro_steps, chosen, strict=True):
        for sample in samples:
            if step.index - sample.version != micro.staleness:
                raise ValueError(
                    f"row {sample.row} of rollout {sample.rollout} is {step.index - sample.version} versions old; "
                    f"the timetable says {micro.staleness}"
                )
    _, micro_batches = cut_up(everyone, found.weights, cut, trained_at=step.index)
    batch = GlobalBatch(
        micro_batches=tuple(micro_batches),
        num_sequences=found.num_sequences,
        num_loss_tokens=found.num_loss_tokens,
        num_tokens=sum(len(sample.token_ids) for sample in everyone),
        staleness=tuple(step.index - sample.version for sample in everyone),
    )
    return batch, still_needed(pending, step, cut.rows_per_slice)


def cut_up(
    samples: Sequence[Sample], weights: Sequence[np.ndarray], cut: BatchCut, *, trained_at: int
) -> tuple[list[list[int]], list[MicroBatch]]:
    """This rank's micro-batches, and which of the samples each holds. Every rank gets as many, a multiple of `cut.multiple`.

    As the timetable has it: slices in order, each shared out in rank order. With a token budget: rearranged (`batching.pack`).
    ValueError where the samples do not come out even; `filled_up` sees to that where they need not be trained.
    """
    align = {"align_sequence": cut.align_sequence, "align_stream": cut.align_stream}
    everywhere = _rows(samples, cut)
    mine = everywhere[cut.dp_rank]
    longest = [0] * len(mine)
    if cut.even_streams:
        longest = [
            max(stream_length([samples[i] for i in rows], **align) for rows in together) for together in zip(*everywhere, strict=True)
        ]
    return mine, [
        collate([samples[i] for i in rows], [weights[i] for i in rows], trained_at=trained_at, at_least=at_least, **align)
        for rows, at_least in zip(mine, longest, strict=True)
    ]


def _rows(samples: Sequence[Sample], cut: BatchCut) -> list[list[list[int]]]:
    """[data-parallel rank][micro-batch] -> places in `samples`."""
    if cut.max_tokens is not None:
        # The stream is rounded up at its end: a budget that is a multiple of what it is rounded to is kept all the same.
        grain = math.lcm(cut.align_sequence, cut.align_stream)
        return pack(
            [padded_length(sample, cut.align_sequence) for sample in samples],
            max_tokens=max(cut.max_tokens // grain * grain, grain),
            dp_size=cut.dp_size,
            multiple=cut.multiple,
            even_length=cut.even_length,
        )
    if len(samples) % (cut.rows_per_slice * cut.multiple):
        raise ValueError(f"{len(samples)} samples are no multiple of {cut.rows_per_slice} x {cut.multiple}")
    rows = np.arange(len(samples)).reshape(-1, cut.dp_size, cut.micro_batch_size)
    return rows.swapaxes(0, 1).tolist()


def filled_up(samples: Sequence[Sample], cut: BatchCut) -> list[Sample]:
    """The samples, and the first of them again until `cut_up` comes out even."""
    unit = cut.rows_per_slice * cut.multiple
    return [*samples, *[samples[0]] * (-len(samples) % unit)]


def still_needed(pending: Sequence[Sample], step: Step, rows_per_slice: int) -> list[Sample]:
    """Pending samples without those whose last use was `step`."""
    done = set(step.last_use)
    return [sample for sample in pending if (sample.rollout, sample.row // rows_per_slice) not in done]


def in_slices(pending: Sequence[Sample], slices: Sequence[tuple[int, int]], rows_per_slice: int) -> list[Sample]:
    """The pending samples that belong to the given (rollout, slice) pairs, in row order."""
    wanted = set(slices)
    return [sample for sample in pending if (sample.rollout, sample.row // rows_per_slice) in wanted]
