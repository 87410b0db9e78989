"""Buffer of the rows that wait to be trained, by (rollout, row).

Every rank has the same `rows`: integers and flags. A sample is held by all model-parallel ranks of its data-parallel rank, and is
sent only when another data-parallel rank scores or trains it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.batching.collate import collate_samples, collate_specs
from megatron_grpo.batching.prefix_groups import FREE
from megatron_grpo.batching.schedule import ScheduledStep
from megatron_grpo.batching.split import BatchPartitioner, partition, partition_for_scoring
from megatron_grpo.grpo.loss import TokenWeights
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.types import GlobalBatch, MicroBatch, Rollout, RowKey, Sample, SequenceLengths, TrainingRow

if TYPE_CHECKING:
    from megatron_grpo.policy.passes import ModelScorer

logger = logging.getLogger(__name__)
SHOWN = 8  # rows that a message lists


# Per micro-batch: log-probs, float32 [C]; and the experts of each token of its stream, int16 [T, MoE layers, k], if they are needed.
Scores = tuple[list[np.ndarray], list[np.ndarray] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRows:
    """Rows that are distributed over data-parallel ranks.

    `lengths` and `dp_ranks` cover all of the rows and are the same on every rank.
    """

    lengths: Mapping[RowKey, SequenceLengths]
    dp_ranks: Mapping[RowKey, int]  # data-parallel ranks
    sequences: Mapping[RowKey, Any]  # of the rows that this data-parallel rank holds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows on the data-parallel ranks that scored them.

    Args:
        rows: The rows, with their new homes.
        logprobs: float32 [T] of each row that this rank now holds, 0 where the mask is false.
        experts: int16 [T, MoE layers, k] of each row that this rank now holds; None if they are not needed.
    """

    rows: PlacedRows
    logprobs: dict[RowKey, np.ndarray]
    experts: dict[RowKey, np.ndarray] | None


def emptied(sample: Sample) -> Sample:
    """Return the sample without anything that trains. It still counts in N."""
    nothing = np.zeros(len(sample.token_ids), dtype=np.float32)
    return replace(sample, mask=nothing > 0, sampler_logprobs=nothing, mask_offsets=None, mask_ids=None).with_old_logprobs(
        nothing, "recompute"
    )


def deliver(items: Mapping[RowKey, tuple[int, Any]], parallel: ParallelState) -> dict[RowKey, Any]:
    """Send items to data-parallel ranks. Collective.

    Args:
        items: {row: (data-parallel rank, item)}. Each row is passed by one rank.
        parallel: The parallel layout.

    Returns:
        {row: item} on every rank of the row's data-parallel rank.
    """
    return _to_dp_ranks(((dp_rank, key, item) for key, (dp_rank, item) in items.items()), parallel)


def _to_dp_ranks(items: Iterable[tuple[int, RowKey, Any]], parallel: ParallelState) -> dict[RowKey, Any]:
    """Return the items that all ranks together send to this data-parallel rank. Collective.

    Args:
        items: (data-parallel rank, row, item).
        parallel: The parallel layout.
    """
    by_dp_rank: dict[int, list[tuple[RowKey, Any]]] = {}
    for dp_rank, key, item in items:
        by_dp_rank.setdefault(dp_rank, []).append((key, item))
    parts = {rank: part for dp_rank, part in by_dp_rank.items() for rank in parallel.layout.model_parallel_ranks(dp_rank)}
    return {key: item for part in collectives.exchange(parts) for key, item in part}


def score_rows(
    rows: PlacedRows, *, score: Callable[[SequenceOf[MicroBatch]], Scores], cut: BatchPartitioner, parallel: ParallelState
) -> ScoredRows:
    """Compute the log-probs of distributed rows, each on the data-parallel rank that the partition assigns. Collective.

    Args:
        rows: The rows.
        score: Returns the scores of micro-batches.
        cut: Partitions the rows over data-parallel ranks and micro-batches.
        parallel: The parallel layout.
    """
    keys = list(rows.lengths)
    dealt = partition_for_scoring(list(rows.lengths.values()), cut)
    filled = [*keys, *[keys[0]] * (sum(len(micro_spec.rows) for mine in dealt for micro_spec in mine) - len(keys))]
    places = [(dp_rank, i) for dp_rank, mine in enumerate(dealt) for micro_spec in mine for i in micro_spec.rows]
    dp_ranks = {filled[i]: dp_rank for dp_rank, i in places if i < len(keys)}
    # A row repeated as filler is scored again where it is assigned: its sequence must be there, but its result is not used.
    wanted: dict[RowKey, set[int]] = {key: set() for key in keys}
    for dp_rank, i in places:
        wanted[filled[i]].add(dp_rank)
    held = _send_to_dp_ranks(rows.sequences, rows.dp_ranks, wanted, parallel)
    mine = dealt[parallel.dp_rank]
    micro_batches = collate_specs([held.get(key) for key in filled], mine, cut.alignment)
    logprobs, experts = score(micro_batches)
    found: dict[RowKey, np.ndarray] = {}
    routes: dict[RowKey, np.ndarray] = {}
    for number, (micro_spec, micro, values) in enumerate(zip(mine, micro_batches, logprobs, strict=True)):
        ends = np.cumsum([len(held[filled[i]].token_ids) for i in micro_spec.rows])
        for i, of_row, at in zip(micro_spec.rows, micro.by_sequence(values), np.split(micro.places, ends[:-1]), strict=True):
            if i < len(keys):
                found[keys[i]] = held[keys[i]].scatter(of_row)
                if experts is not None:
                    routes[keys[i]] = np.where(at[:, None, None] < 0, FREE, experts[number][at])
    scored = PlacedRows(lengths=rows.lengths, dp_ranks=dp_ranks, sequences={key: held[key] for key in found})
    return ScoredRows(
        rows=scored, logprobs=found, experts=None if experts is None else _same_experts_in_shared_prefixes(routes, scored, parallel)
    )


def without_experts(logprobs: Callable[[SequenceOf[MicroBatch]], list[np.ndarray]]) -> Callable[[SequenceOf[MicroBatch]], Scores]:
    """Adapt a log-prob function for `score_rows` when experts are not needed.

    Args:
        logprobs: Returns the log-probs of each micro-batch, float32 [C].
    """
    return lambda micro_batches: (logprobs(micro_batches), None)


def _same_experts_in_shared_prefixes(
    routes: Mapping[RowKey, np.ndarray], rows: PlacedRows, parallel: ParallelState
) -> dict[RowKey, np.ndarray]:
    """Give the common prefix of a group the experts of its first row, so that it can be computed once. Collective.

    Micro-batches differ in rounding, and so occasionally in a routing decision.
    """
    lengths = rows.lengths
    first: dict[object, RowKey] = {}
    for key in sorted(lengths):
        first.setdefault(lengths[key].group or key, key)
    lead = {key: first[lengths[key].group or key] for key in lengths}
    beginnings = {key: routes[key][: lengths[key].prefix] for key in routes if lead[key] == key}
    wanted: dict[RowKey, set[int]] = {key: set() for key in first.values()}
    for key, leader in lead.items():
        wanted[leader].add(rows.dp_ranks[key])
    beginnings = _send_to_dp_ranks(beginnings, rows.dp_ranks, wanted, parallel)
    found = {key: array.copy() for key, array in routes.items()}
    for key, array in found.items():
        for begin in rows.sequences[key].starts:
            array[begin : begin + lengths[key].prefix] = beginnings[lead[key]]
    return found


def local_samples(items: Mapping[RowKey, Any], now: Mapping[RowKey, int], dp_ranks: Mapping[RowKey, int], parallel: ParallelState) -> dict:
    """Send items from the data-parallel ranks that hold them to their homes. Collective.

    Args:
        items: Items of the rows that this rank holds.
        now: Data-parallel rank that holds each row's item.
        dp_ranks: Data-parallel rank to which each row's item is sent.
        parallel: The parallel layout.

    Returns:
        The items of the rows that this data-parallel rank holds.
    """
    return _send_to_dp_ranks(items, now, {key: {dp_ranks[key]} for key in now}, parallel)


def _send_to_dp_ranks(
    items: Mapping[RowKey, Any], dp_ranks: Mapping[RowKey, int], wanted: Mapping[RowKey, set[int]], parallel: ParallelState
) -> dict:
    """Send each row's item to every data-parallel rank that needs it.

    The first rank of its model-parallel group sends it; items that are already in place are not sent.
    """
    kept = {key: items[key] for key, needing in wanted.items() if parallel.dp_rank in needing and dp_ranks[key] == parallel.dp_rank}
    if all(needing <= {dp_ranks[key]} for key, needing in wanted.items()):
        return kept
    mine = [key for key in wanted if dp_ranks[key] == parallel.dp_rank] if parallel.is_model_parallel_src else []
    return kept | _to_dp_ranks(((dp_rank, key, items[key]) for key in mine for dp_rank in wanted[key] - {parallel.dp_rank}), parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBuffer:
    """Rows in the order in which they arrived.

    Every method that returns a `SampleBuffer` is collective, and leaves this one unchanged.
    """

    parallel: ParallelState
    cut: BatchPartitioner
    rows: Mapping[RowKey, TrainingRow] = field(default_factory=dict)
    samples: Mapping[RowKey, Sample] = field(default_factory=dict)  # samples that this data-parallel rank holds

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rollouts: Iterable[Rollout]) -> SampleBuffer:
        """Return the buffer with the rows of new rollouts."""
        rows, samples = dict(self.rows), dict(self.samples)
        for rollout in rollouts:
            rows |= {row.key: row for row in rollout.rows}
            samples |= rollout.samples
        return replace(self, rows=rows, samples=samples)

    def with_old_logprobs(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """Compute old log-probs with the current weights, for the slices whose first use will be stale.

        See docs/batching.md section 3.

        Args:
            scorer: Computes log-probs of the policy.
            step: The step from the training schedule.
        """
        return self._scored([key for key in self._in_slices(step.old_logprob_slices) if not self.rows[key].has_old_logprobs], scorer)

    def after_skipped_step(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """Compute old log-probs for later passes after the guard has refused the gradient of `step`.

        The log-probs of the refused step's forward pass are discarded. The weights are those that the step started from, so what later
        passes need is scored now, by exactly the required version.

        Args:
            scorer: Computes log-probs of the policy.
            step: The refused step.
        """
        return self._scored(self._in_slices(step.keeps), scorer)

    def _scored(self, due: list[RowKey], scorer: ModelScorer) -> SampleBuffer:
        """Score rows and store the result as their old log-probs.

        A row with log-probs that are not finite trains nothing from here on: its mask is emptied.
        """
        if not due:
            return self
        scored = score_rows(self.placed(due), score=scorer.old_logprobs, cut=self.cut, parallel=self.parallel)
        samples = scored.rows.sequences
        if scored.experts is not None:
            samples = {key: replace(sample, experts=scored.experts[key]) for key, sample in samples.items()}
        lost = self._rows_with_invalid_logprobs(scored.logprobs)
        held = {
            key: emptied(sample) if key in lost else sample.with_old_logprobs(scored.logprobs[key], "recompute")
            for key, sample in samples.items()
        }
        moved = self._with_dp_ranks(scored.rows.dp_ranks, held)
        return replace(moved, rows={key: replace(row, num_masked=0) if key in lost else row for key, row in moved.rows.items()})

    def placed(self, keys: Iterable[RowKey]) -> PlacedRows:
        """Return these rows as `PlacedRows`."""
        rows = {key: self.rows[key] for key in keys}
        return PlacedRows(
            lengths={key: row.lengths for key, row in rows.items()},
            dp_ranks={key: row.dp_rank for key, row in rows.items()},
            sequences={key: self.samples[key] for key in rows if key in self.samples},
        )

    def _rows_with_invalid_logprobs(self, logprobs: Mapping[RowKey, np.ndarray]) -> set[RowKey]:
        """Return the rows, of all ranks, that have log-probs that are not finite. Collective."""
        mine = {key for key, values in logprobs.items() if not np.isfinite(values).all()}
        if not collectives.all_reduce_max(len(mine)):
            return set()
        lost = set().union(*collectives.all_gather_object(mine))
        if self.parallel.is_rank_zero:
            named = ", ".join(f"row {row} of rollout {rollout}" for rollout, row in sorted(lost)[:SHOWN])
            logger.warning("The policy's log-probs of %d rows are not finite; these rows are not trained: %s.", len(lost), named)
        return lost

    def batch(self, step: ScheduledStep, *, token_weight_fn: Callable[..., TokenWeights]) -> tuple[SampleBuffer, GlobalBatch]:
        """Build this rank's share of an optimizer step. The only place where rows are partitioned for training.

        Token weights are computed over the whole step before it is partitioned: that makes the gradient independent of the partition.

        Args:
            step: The step from the training schedule.
            token_weight_fn: Computes the token weights of the step.

        Returns:
            The buffer with the rows in their new homes, and the global batch.

        Raises:
            KeyError: The training schedule asks for a row that was never sampled.
            ValueError: The version of a row contradicts the training schedule.
        """
        rows = [self.rows[micro.rollout, row] for micro in step.micro_steps for row in range(*micro.rows)]
        _check_versions(step, self.rows)
        found = token_weight_fn(
            [row.num_masked for row in rows], is_truncated=[row.is_truncated for row in rows], is_zero_std=[row.is_zero_std for row in rows]
        )
        dealt = partition([row.lengths for row in rows], self.cut)
        dp_ranks = {rows[i].key: dp_rank for dp_rank, mine in enumerate(dealt) for micro_spec in mine for i in micro_spec.rows}
        keys = [row.key for row in rows]
        held = _send_to_dp_ranks(
            self.samples, {key: self.rows[key].dp_rank for key in keys}, {key: {dp_ranks[key]} for key in keys}, self.parallel
        )
        micro_batches = [
            collate_samples(
                [held[keys[i]] for i in micro_spec.rows], [found.of_rows[i] for i in micro_spec.rows], trained_at=step.index,
                number=number, alignment=self.cut.alignment, at_least=micro_spec.at_least, prefix_groups=micro_spec.prefix_groups,
            )
            for number, micro_spec in enumerate(dealt[self.parallel.dp_rank])
        ]  # fmt: skip
        batch = GlobalBatch(
            step=step.index,
            micro_batches=tuple(micro_batches),
            num_sequences=found.num_sequences,
            num_loss_tokens=found.num_loss_tokens,
            num_tokens=sum(sum(row.contexts) for row in rows),
            num_contexts=sum(len(row.contexts) for row in rows),
            staleness=tuple(step.index - row.version for row in rows),
            lag=tuple(
                micro.on_policy_version - self.rows[micro.rollout, row].version for micro in step.micro_steps for row in range(*micro.rows)
            ),
        )
        return self._with_dp_ranks(dp_ranks, held), batch

    def after(self, step: ScheduledStep, logprobs: Mapping[RowKey, np.ndarray]) -> SampleBuffer:
        """Return the buffer after `step`: without the rows used up, with cached log-probs for later passes.

        The log-probs of the training forward pass become the old log-probs of rows that later passes train.

        Args:
            step: The step that was trained.
            logprobs: [masked] of this data-parallel rank's rows, on the ranks of the last pipeline stage; empty elsewhere.
        """
        keeps = set(self._in_slices(step.keeps))
        samples = dict(self.samples)
        if keeps:
            mine = {key: values for key, values in logprobs.items() if key in keeps}
            for key, values in self.parallel.from_last_stage(mine).items():
                samples[key] = samples[key].with_old_logprobs(samples[key].scatter(values), "cached")
        done = set(self._in_slices(step.last_use))
        return replace(
            self,
            rows={key: row for key, row in self.rows.items() if key not in done},
            samples={key: sample for key, sample in samples.items() if key not in done},
        )

    def to_save(self) -> list[Sample]:
        """Return the samples that this rank writes to a checkpoint. Each is written by one rank."""
        return [self.samples[key] for key in self.rows if key in self.samples] if self.parallel.is_model_parallel_src else []

    def of_step(self, step: ScheduledStep) -> list[Sample]:
        """Return the rows that a step trains, in its order, on rank 0; on other ranks an empty list. Collective.

        Args:
            step: The step from the training schedule.
        """
        keys = [(micro.rollout, row) for micro in step.micro_steps for row in range(*micro.rows)]
        mine = {key: self.samples[key] for key in keys if key in self.samples} if self.parallel.is_model_parallel_src else {}
        found = {key: sample for part in collectives.exchange({0: mine}) for key, sample in part.items()}
        return [found[key] for key in keys] if found else []

    def restored(self, samples: SequenceOf[Sample]) -> SampleBuffer:
        """Return the buffer as it was when saved.

        Args:
            samples: The samples that this rank has read. Every sample is read by one rank.
        """
        mine = [TrainingRow.of(sample, dp_rank=self.cut.dp_rank_of(sample.row)) for sample in samples]
        rows = {row.key: row for rows in collectives.all_gather_object(mine) for row in rows}
        held = deliver({row.key: (row.dp_rank, sample) for row, sample in zip(mine, samples, strict=True)}, self.parallel)
        return replace(self, rows=dict(sorted(rows.items())), samples=held)

    def _in_slices(self, slices: SequenceOf[tuple[int, int]]) -> list[RowKey]:
        """Return the rows of the given (rollout, slice) pairs, in order."""
        wanted, size = set(slices), self.cut.rows_per_slice
        return [key for key in self.rows if (key[0], key[1] // size) in wanted]

    def _with_dp_ranks(self, dp_ranks: Mapping[RowKey, int], held: Mapping[RowKey, Sample]) -> SampleBuffer:
        """Return the buffer with new data-parallel ranks for some rows.

        Args:
            dp_ranks: New data-parallel rank of each row that moves.
            held: Their samples, if they move to this rank.
        """
        rows = {
            key: replace(row, dp_rank=dp_ranks[key]) if dp_ranks.get(key, row.dp_rank) != row.dp_rank else row
            for key, row in self.rows.items()
        }
        unmoved = {key: sample for key, sample in self.samples.items() if key not in dp_ranks}
        return replace(self, rows=rows, samples=unmoved | dict(held))


def _check_versions(step: ScheduledStep, rows: Mapping[RowKey, TrainingRow]) -> None:
    for micro in step.micro_steps:
        for row in (rows[micro.rollout, row] for row in range(*micro.rows)):
            # Not `version`: a resumed run may have sampled the row later than planned. Its ratio against the sampler is 1 at `version`.
            if row.version > micro.on_policy_version or row.on_policy_version not in (micro.on_policy_version, row.version):
                raise ValueError(
                    f"row {row.row} of rollout {row.rollout} was sampled by version {row.version} and is on-policy at "
                    f"{row.on_policy_version}; the training schedule collects its rollout at version {micro.on_policy_version}"
                )
