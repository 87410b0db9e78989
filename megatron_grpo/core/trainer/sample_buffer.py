"""Buffer of the rows that wait to be trained, by (rollout, row).

Every rank has the same `rows`: integers and flags. A sample is held by all model-parallel ranks of its data-parallel rank, and is
sent only when another data-parallel rank scores or trains it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.core.arrays import ragged
from megatron_grpo.core.batching.collate import collate_samples, collate_specs
from megatron_grpo.core.batching.prefix_groups import FREE
from megatron_grpo.core.batching.schedule import ScheduledStep
from megatron_grpo.core.batching.split import BatchPartitioner, partition, partition_for_scoring
from megatron_grpo.core.grpo.loss import TokenWeights
from megatron_grpo.core.grpo.zero_gradient import RowKind, has_zero_gradient
from megatron_grpo.core.metadata import Rollout, TrainingRows
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.types import GlobalBatch, MicroBatch, RowKey, Sample

if TYPE_CHECKING:
    from megatron_grpo.core.policy.passes import ModelScorer

logger = logging.getLogger(__name__)
SHOWN = 8  # rows that a message lists


# Per micro-batch: log-probs, float32 [C]; and the experts of each token of its stream, int16 [T, MoE layers, k], if they are needed.
Scores = tuple[list[np.ndarray], list[np.ndarray] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedRows:
    """Rows that are distributed over data-parallel ranks.

    Args:
        rows: All of the rows, the same on every rank.
        sequences: Sequences of the rows that this data-parallel rank holds.
    """

    rows: TrainingRows
    sequences: Mapping[RowKey, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows(DistributedRows):
    """Rows on the data-parallel ranks that scored them.

    Args:
        logprobs: float32 [T] of each row that this rank now holds, 0 where the mask is false.
        experts: int16 [T, MoE layers, k] of each row that this rank now holds; None if they are not needed.
    """

    logprobs: dict[RowKey, np.ndarray]
    experts: dict[RowKey, np.ndarray] | None


def without_training(sample: Sample) -> Sample:
    """Return the sample without anything that trains. It still counts in N."""
    zeros = np.zeros(len(sample.token_ids), dtype=np.float32)
    return replace(sample, mask=zeros > 0, sampler_logprobs=zeros, mask_offsets=None, mask_ids=None).with_old_logprobs(zeros, "recompute")


def send_to_dp_ranks(items: Iterable[tuple[int, RowKey, Any]], parallel: ParallelState) -> dict[RowKey, Any]:
    """Send items to data-parallel ranks. Collective.

    Args:
        items: (data-parallel rank, row, item). Each row is passed by one rank.

    Returns:
        {row: item} on every rank of the row's data-parallel rank.
    """
    by_dp_rank: dict[int, list[tuple[RowKey, Any]]] = {}
    for dp_rank, key, item in items:
        by_dp_rank.setdefault(dp_rank, []).append((key, item))
    parts = {rank: part for dp_rank, part in by_dp_rank.items() for rank in parallel.layout.model_parallel_ranks(dp_rank)}
    return {key: item for part in collectives.exchange(parts) for key, item in part}


def score_rows(
    placed: DistributedRows, *, score: Callable[[Sequence[MicroBatch]], Scores], cut: BatchPartitioner, parallel: ParallelState
) -> ScoredRows:
    """Compute the log-probs of distributed rows, each on the data-parallel rank that the partition assigns. Collective.

    Args:
        score: Returns the scores of micro-batches.
    """
    rows = placed.rows
    count, keys = len(rows), rows.keys
    assigned = partition_for_scoring(rows.lengths, cut)
    # A row repeated as filler is scored again where it is assigned: its sequence must be there, but its result is not used.
    members, dp_ranks = assigned.packed.rows, assigned.dp_ranks[assigned.packed.rows]
    dp_rank = np.empty(count, dtype=np.int64)
    dp_rank[members[members < count]] = dp_ranks[members < count]
    pairs = np.unique(np.stack([np.where(members < count, members, 0), dp_ranks]), axis=1)
    sequences = move_to_dp_ranks(placed.sequences, rows.take(pairs[0]), pairs[1], parallel)
    micro_specs = assigned[parallel.dp_rank]
    sequence_by_index = {i: sequences[keys[i if i < count else 0]] for micro_spec in micro_specs for i in micro_spec.rows}
    micro_batches = collate_specs(sequence_by_index, micro_specs, cut.alignment)
    logprobs, experts = score(micro_batches)
    logprobs_by_key: dict[RowKey, np.ndarray] = {}
    routes: dict[RowKey, np.ndarray] = {}
    for number, (micro_spec, micro, values) in enumerate(zip(micro_specs, micro_batches, logprobs, strict=True)):
        ends = np.cumsum([len(sequence_by_index[i].token_ids) for i in micro_spec.rows])
        for i, row_values, token_index in zip(micro_spec.rows, micro.by_sequence(values), np.split(micro.places, ends[:-1]), strict=True):
            if i < count:
                logprobs_by_key[keys[i]] = sequence_by_index[i].scatter(row_values)
                if experts is not None:
                    routes[keys[i]] = np.where(token_index[:, None, None] < 0, FREE, experts[number][token_index])
    scored = ScoredRows(
        rows=replace(rows, dp_rank=dp_rank),
        sequences={key: sequences[key] for key in logprobs_by_key},
        logprobs=logprobs_by_key,
        experts=None,
    )
    return scored if experts is None else replace(scored, experts=_same_experts_in_shared_prefixes(routes, scored, parallel))


def without_experts(logprobs: Callable[[Sequence[MicroBatch]], list[np.ndarray]]) -> Callable[[Sequence[MicroBatch]], Scores]:
    """Adapt a log-prob function for `score_rows` when experts are not needed.

    Args:
        logprobs: Returns the log-probs of each micro-batch, float32 [C].
    """
    return lambda micro_batches: (logprobs(micro_batches), None)


def _same_experts_in_shared_prefixes(
    routes: Mapping[RowKey, np.ndarray], scored: DistributedRows, parallel: ParallelState
) -> dict[RowKey, np.ndarray]:
    """Give the common prefix of a group the experts of its first row, so that it can be computed once. Collective.

    Micro-batches differ in rounding, and so occasionally in a routing decision.
    """
    rows = scored.rows
    _, first, group = np.unique(rows.lengths.group, return_index=True, return_inverse=True)
    keys, prefixes = rows.keys, rows.prefix
    lead = {key: (keys[first[group[index]]], prefixes[index]) for index, key in enumerate(keys) if key in routes}
    leaders = {keys[index]: prefixes[index] for index in first.tolist()}
    beginnings = {key: routes[key][:prefix] for key, prefix in leaders.items() if key in routes}
    pairs = np.unique(np.stack([first[group], rows.dp_rank]), axis=1)
    beginnings = move_to_dp_ranks(beginnings, rows.take(pairs[0]), pairs[1], parallel)
    shared = {key: array.copy() for key, array in routes.items()}
    for key, array in shared.items():
        leader, prefix = lead[key]
        for begin in scored.sequences[key].starts:
            array[begin : begin + prefix] = beginnings[leader]
    return shared


def move_to_dp_ranks(items: Mapping[RowKey, Any], rows: TrainingRows, dp_ranks: np.ndarray, parallel: ParallelState) -> dict:
    """Send items from the data-parallel ranks that hold them to those that train them. Collective.

    The first rank of a model-parallel group sends them; items that are already in place are not sent. A row may occur several times.

    Args:
        rows: The rows; `dp_rank` is the rank that holds each row's item.
        dp_ranks: Data-parallel rank to which each row's item is sent, int64 [n].

    Returns:
        The items of the rows that this data-parallel rank holds.
    """
    is_here, stays = rows.dp_rank == parallel.dp_rank, rows.dp_rank == dp_ranks
    staying = {key: items[key] for key in rows.take(np.flatnonzero(is_here & stays)).keys}
    if stays.all():
        return staying
    leaving = np.flatnonzero(is_here & ~stays if parallel.is_model_parallel_src else np.zeros(len(dp_ranks), dtype=bool))
    leaving_keys = zip(dp_ranks[leaving].tolist(), rows.take(leaving).keys, strict=True)
    return staying | send_to_dp_ranks(((dp_rank, key, items[key]) for dp_rank, key in leaving_keys), parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBuffer:
    """Rows in the order in which they arrive, which is that of (rollout, row).

    Every method that returns a `SampleBuffer` is collective, and leaves this one unchanged. Rows of the kinds `zero_gradient` wait and are
    counted like all others, but are neither scored nor trained.

    Args:
        partial_rollouts: Whether completions continue over weight syncs.
        samples: Samples that this data-parallel rank holds.
    """

    parallel: ParallelState
    cut: BatchPartitioner
    zero_gradient: frozenset[RowKind] = frozenset()
    partial_rollouts: bool = False
    rows: TrainingRows = field(default_factory=TrainingRows)
    samples: Mapping[RowKey, Sample] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rollouts: Iterable[Rollout]) -> SampleBuffer:
        """Return the buffer with the rows of new rollouts.

        Args:
            rollouts: New rollouts in their order.
        """
        new_rollouts = list(rollouts)
        samples = dict(self.samples)
        for rollout in new_rollouts:
            samples |= rollout.samples
        return replace(self, rows=TrainingRows.joined([self.rows, *(rollout.rows for rollout in new_rollouts)]), samples=samples)

    def with_old_logprobs(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """Compute old log-probs with the current weights, for the slices whose first use will be stale.

        See docs/batching.md section 3.
        """
        return self._scored(np.flatnonzero(self._trained(step.old_logprob_slices) & ~self.rows.has_old_logprobs), scorer)

    def after_skipped_step(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """Compute old log-probs for later passes after the gradient check has refused the gradient of `step`.

        The log-probs of the refused step's forward pass are discarded. The weights are those that the step started from, so what later
        passes need is scored now, by exactly the required version.
        """
        return self._scored(np.flatnonzero(self._trained(step.keeps)), scorer)

    def _scored(self, due: np.ndarray, scorer: ModelScorer) -> SampleBuffer:
        """Score rows and store the result as their old log-probs.

        A row with log-probs that are not finite trains nothing from here on: its mask is emptied.
        """
        if not len(due):
            return self
        scored = score_rows(self.placed(due), score=scorer.old_logprobs, cut=self.cut, parallel=self.parallel)
        samples = scored.sequences
        if scored.experts is not None:
            samples = {key: replace(sample, experts=scored.experts[key]) for key, sample in samples.items()}
        invalid = self._rows_with_invalid_logprobs(scored.logprobs)
        scored_samples = {
            key: without_training(sample) if key in invalid else sample.with_old_logprobs(scored.logprobs[key], "recompute")
            for key, sample in samples.items()
        }
        moved = self._with_dp_ranks(due, scored.rows.dp_rank, scored_samples)
        num_masked = moved.rows.num_masked.copy()
        num_masked[moved.rows.find_indices(*np.array(sorted(invalid), dtype=np.int64).reshape(-1, 2).T)] = 0
        return replace(moved, rows=replace(moved.rows, num_masked=num_masked))

    def placed(self, index: np.ndarray | None = None) -> DistributedRows:
        """Return rows as `DistributedRows`.

        Args:
            index: Indices of the rows, int64 [k]; None for all.
        """
        rows = self.rows if index is None else self.rows.take(index)
        return DistributedRows(rows=rows, sequences=self.samples)

    def _rows_with_invalid_logprobs(self, logprobs: Mapping[RowKey, np.ndarray]) -> set[RowKey]:
        """Return the rows, of all ranks, that have log-probs that are not finite. Collective."""
        local = {key for key, values in logprobs.items() if not np.isfinite(values).all()}
        if not collectives.all_reduce_max(len(local)):
            return set()
        invalid = set().union(*collectives.all_gather_object(local))
        if self.parallel.is_rank_zero:
            names = ", ".join(f"row {row} of rollout {rollout}" for rollout, row in sorted(invalid)[:SHOWN])
            logger.warning("The policy's log-probs of %d rows are not finite; these rows are not trained: %s.", len(invalid), names)
        return invalid

    def batch(self, step: ScheduledStep, *, token_weight_fn: Callable[..., TokenWeights]) -> tuple[SampleBuffer, GlobalBatch]:
        """Build this rank's share of an optimizer step. The only place where rows are partitioned for training.

        Token weights are computed over the whole step before it is partitioned: that makes the gradient independent of the partition. Then
        rows without a gradient are left out, except for the few that fill the last micro-batches: of these no token is trained.

        Args:
            token_weight_fn: Computes the token weights of the step.

        Returns:
            The buffer with the rows on the data-parallel ranks that train them, and the global batch.

        Raises:
            KeyError: The training schedule asks for a row that was never sampled.
            ValueError: The version of a row contradicts the training schedule.
        """
        index, arrived_at = self._places(step)
        rows = self.rows.take(index)
        _check_versions(rows, arrived_at)
        token_weights = token_weight_fn(rows.num_masked, is_truncated=rows.is_truncated, is_zero_std=rows.is_zero_std)
        chosen, num_trained = self._rows_to_compute(rows)
        computed, weights = rows.take(chosen), token_weights.row_weights[chosen]
        micro_specs = partition(computed.lengths, self.cut)
        local = move_to_dp_ranks(self.samples, computed, micro_specs.dp_ranks, self.parallel)
        keys = np.stack([computed.rollout, computed.row], axis=1)
        micro_batches = []
        for number, micro_spec in enumerate(micro_specs[self.parallel.dp_rank]):
            micro_rows = list(micro_spec.rows)
            samples = [
                local[rollout, row] if i < num_trained else without_training(local[rollout, row])
                for i, (rollout, row) in zip(micro_rows, keys[micro_rows].tolist(), strict=True)
            ]
            micro_batches.append(collate_samples(
                samples, weights[micro_rows], trained_at=step.index, number=number, alignment=self.cut.alignment,
                at_least=micro_spec.at_least, prefix_groups=micro_spec.prefix_groups,
            ))  # fmt: skip
        by_token = self.partial_rollouts or rows.num_stretches.any()
        batch = GlobalBatch(
            step=step.index,
            micro_batches=tuple(micro_batches),
            num_sequences=token_weights.num_sequences,
            num_loss_tokens=token_weights.num_loss_tokens,
            num_tokens=int(rows.contexts.sum()),
            num_contexts=len(rows.contexts),
            num_left_out=len(rows) - num_trained,
            placed=keys[micro_specs.packed.rows],
            counts=micro_specs.packed.counts,
            staleness=step.index - rows.version,
            lag=arrived_at - rows.version,
            by_token=staleness_by_token(rows, step.index) if by_token else {},
            tokens_by_version=count_tokens_by_version(rows) if by_token else [],
        )
        return self._with_dp_ranks(index[chosen], micro_specs.dp_ranks, local), batch

    def _rows_to_compute(self, rows: TrainingRows) -> tuple[np.ndarray, int]:
        """Return the indices of the rows to compute, int64 [n], and how many of them have a gradient.

        The others are last. They fill micro-batches that would be empty: the shortest of the rows that have no gradient.
        """
        is_left_out = has_zero_gradient(rows, self.zero_gradient)
        trained, left_out = np.flatnonzero(~is_left_out), np.flatnonzero(is_left_out)
        num_tokens = np.bincount(np.repeat(np.arange(len(rows)), rows.num_contexts), weights=rows.contexts, minlength=len(rows))
        shortest = left_out[np.argsort(num_tokens[left_out], kind="stable")]
        return np.concatenate([trained, shortest[: self.cut.num_missing(len(trained))]]), len(trained)

    def after(self, step: ScheduledStep, logprobs: Mapping[RowKey, np.ndarray]) -> SampleBuffer:
        """Return the buffer after `step`: without the rows used up, with cached log-probs for later passes.

        The log-probs of the training forward pass become the old log-probs of rows that later passes train.

        Args:
            logprobs: [masked] of this data-parallel rank's rows, on the ranks of the last pipeline stage; empty elsewhere.
        """
        size, used_slices = self.cut.rows_per_slice, set(step.last_use)
        samples = dict(self.samples)
        if step.keeps:
            keys = [key for key in logprobs if key in samples]
            is_kept = self._trained(step.keeps)[self.rows.find_indices(*np.array(keys, dtype=np.int64).reshape(-1, 2).T)].tolist()
            local = {key: logprobs[key] for key, keep in zip(keys, is_kept, strict=True) if keep}
            for key, values in self.parallel.from_last_stage(local).items():
                samples[key] = samples[key].with_old_logprobs(samples[key].scatter(values), "cached")
        return replace(
            self,
            rows=self.rows.take(np.flatnonzero(~self._in_slices(step.last_use))),
            samples={key: sample for key, sample in samples.items() if (key[0], key[1] // size) not in used_slices},
        )

    def to_save(self) -> list[Sample]:
        """Return the samples that this rank writes to a checkpoint. Each is written by one rank."""
        return [self.samples[key] for key in sorted(self.samples)] if self.parallel.is_model_parallel_src else []

    def list_step_samples(self, step: ScheduledStep) -> list[Sample]:
        """Return the rows that a step trains, in its order, on rank 0; on other ranks an empty list. Collective."""
        keys = [(micro.rollout, row) for micro in step.micro_steps for row in range(*micro.rows)]
        local = {key: self.samples[key] for key in keys if key in self.samples} if self.parallel.is_model_parallel_src else {}
        samples = {key: sample for part in collectives.exchange({0: local}) for key, sample in part.items()}
        return [samples[key] for key in keys] if samples else []

    def restored(self, samples: Sequence[Sample]) -> SampleBuffer:
        """Return the buffer as it was when saved."""
        local_rows = TrainingRows.from_samples(
            samples, dp_rank=self.cut.find_dp_rank(np.array([sample.row for sample in samples], dtype=np.int64))
        )
        rows = TrainingRows.joined(collectives.all_gather_object(local_rows))
        dp_ranks = local_rows.dp_rank.tolist()
        local = send_to_dp_ranks(((dp_rank, sample.key, sample) for dp_rank, sample in zip(dp_ranks, samples, strict=True)), self.parallel)
        return replace(self, rows=rows.take(np.lexsort((rows.row, rows.rollout))), samples=local)

    def _in_slices(self, slices: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return whether each row is in one of the (rollout, slice) pairs, bool [n]."""
        rollout, number = np.array(slices, dtype=np.int64).reshape(-1, 2).T
        return np.isin(self.rows.rollout << 32 | self.rows.row // self.cut.rows_per_slice, rollout << 32 | number)

    def _trained(self, slices: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return whether each row is in one of the (rollout, slice) pairs and has a gradient, bool [n]."""
        return self._in_slices(slices) & ~has_zero_gradient(self.rows, self.zero_gradient)

    def _places(self, step: ScheduledStep) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that a step trains, in its order: their indices, and the version at which each rollout arrives; int64 [N]."""
        micro_steps = [(micro.rollout, micro.rows[0], micro.rows[1], micro.on_policy_version) for micro in step.micro_steps]
        rollout, first, end, version = np.array(micro_steps, dtype=np.int64).reshape(-1, 4).T
        counts = end - first
        rows = ragged(first, counts, np.arange(len(first)))
        return self.rows.find_indices(np.repeat(rollout, counts), rows), np.repeat(version, counts)

    def _with_dp_ranks(self, index: np.ndarray, dp_ranks: np.ndarray, scored_samples: Mapping[RowKey, Sample]) -> SampleBuffer:
        """Return the buffer with new data-parallel ranks for some rows.

        Args:
            index: Indices of the rows, int64 [k].
            dp_ranks: Their new data-parallel ranks, int64 [k].
            scored_samples: Their samples, if this rank holds them.
        """
        dp_rank = self.rows.dp_rank.copy()
        dp_rank[index] = dp_ranks
        samples = {**self.samples, **scored_samples}
        rows_index = self.rows.find_indices(*np.array(list(samples), dtype=np.int64).reshape(-1, 2).T)
        is_mine = (dp_rank[rows_index] == self.parallel.dp_rank).tolist()
        local = {key: sample for (key, sample), is_local in zip(samples.items(), is_mine, strict=True) if is_local}
        return replace(self, rows=replace(self.rows, dp_rank=dp_rank), samples=local)


def staleness_by_token(rows: TrainingRows, step: int) -> dict[str, float]:
    """Return the metrics of staleness by token.

    Args:
        step: Number of optimizer steps done before it.
    """
    is_trained, owner = rows.num_masked > 0, np.repeat(np.arange(len(rows)), rows.num_stretches)
    version, num_tokens = rows.stretches.T
    ages = (step - rows.version) * rows.num_masked
    np.subtract.at(ages, owner, (version - rows.version[owner]) * num_tokens * is_trained[owner])
    num_further_versions = len(set(zip(owner.tolist(), version.tolist(), strict=True))) - len(set(owner.tolist()))
    return {
        "staleness/tokens/mean": int(ages.sum()) / max(1, int(rows.num_masked.sum())),
        "staleness/tokens/max": int((step - rows.version)[is_trained].max(initial=0)),
        "staleness/versions_per_row": (len(rows) + num_further_versions) / len(rows),
    }


def count_tokens_by_version(rows: TrainingRows) -> list[list[list[int]]]:
    """Return `GlobalBatch.tokens_by_version`."""
    stretches = np.split(rows.stretches, np.cumsum(rows.num_stretches)[:-1])
    totals = np.stack([rows.version, rows.num_masked], axis=1).tolist()
    return [(row_values.tolist() or [total]) if total[1] else [] for row_values, total in zip(stretches, totals, strict=True)]


def _check_versions(rows: TrainingRows, arrived_at: np.ndarray) -> None:
    # Not `version`: a resumed run may have sampled the row later than planned. Its ratio against the sampler is 1 at `version`.
    on_policy = rows.on_policy_version
    is_invalid = (rows.version > arrived_at) | ((on_policy != arrived_at) & (on_policy != rows.version))
    if is_invalid.any():
        row = int(is_invalid.argmax())
        raise ValueError(
            f"row {rows.row[row]} of rollout {rows.rollout[row]} was sampled by version {rows.version[row]} and is on-policy at "
            f"{on_policy[row]}; the training schedule collects its rollout at version {arrived_at[row]}"
        )
