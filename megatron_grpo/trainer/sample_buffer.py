"""Owns the rows that wait to be trained, by (rollout, row): what every rank knows of them, and the samples that this rank holds.

Every rank has the same `rows`: integers and flags. A sample is with the ranks of one data-parallel share, its home, and travels only when
another share is to score or train it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.batching.collate import collate_portions, collate_samples
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
SHOWN = 8  # rows that are named one by one


# Of each micro-batch: log-probs, float32 [C]; and the experts of each token of its stream, int16 [T, MoE layers, k], where they are wanted.
Scores = tuple[list[np.ndarray], list[np.ndarray] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRows:
    """Rows that lie on several shares. extents, homes: of all of them, the same on every rank."""

    extents: Mapping[RowKey, SequenceLengths]
    homes: Mapping[RowKey, int]  # data-parallel ranks
    sequences: Mapping[RowKey, Any]  # of those whose home this rank is


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Rows where they were scored. Of those that this rank now holds log-probs (float32 [T], 0 where the mask is false) and experts (int16
    [T, MoE layers, k]; None where they are not wanted)."""

    rows: PlacedRows
    logprobs: dict[RowKey, np.ndarray]
    experts: dict[RowKey, np.ndarray] | None


def emptied(sample: Sample) -> Sample:
    """The sample without anything that trains. It still counts in N."""
    nothing = np.zeros(len(sample.token_ids), dtype=np.float32)
    return replace(sample, mask=nothing > 0, sampler_logprobs=nothing, kept_at=None, kept_ids=None).anchored(nothing, "recompute")


def deliver(items: Mapping[RowKey, tuple[int, Any]], parallel: ParallelState) -> dict[RowKey, Any]:
    """{row: (data-parallel rank, item)} -> {row: item} on every rank of that share. Each row is handed in by one rank. Collective."""
    return _to_shares(((home, key, item) for key, (home, item) in items.items()), parallel)


def _to_shares(items: Iterable[tuple[int, RowKey, Any]], parallel: ParallelState) -> dict[RowKey, Any]:
    """What all ranks together hand in for this rank's share. items: (data-parallel rank, row, item). Collective."""
    by_share: dict[int, list[tuple[RowKey, Any]]] = {}
    for share, key, item in items:
        by_share.setdefault(share, []).append((key, item))
    parts = {rank: part for share, part in by_share.items() for rank in parallel.layout.ranks_of_share(share)}
    return {key: item for part in collectives.exchange(parts) for key, item in part}


def score_rows(
    rows: PlacedRows, *, score: Callable[[SequenceOf[MicroBatch]], Scores], cut: BatchPartitioner, parallel: ParallelState
) -> ScoredRows:
    """Log-probs of rows that lie on several shares, wherever the cut has them scored. Collective."""
    keys = list(rows.extents)
    dealt = partition_for_scoring(list(rows.extents.values()), cut)
    filled = [*keys, *[keys[0]] * (sum(len(portion.rows) for mine in dealt for portion in mine) - len(keys))]
    places = [(home, i) for home, mine in enumerate(dealt) for portion in mine for i in portion.rows]
    homes = {filled[i]: home for home, i in places if i < len(keys)}
    # A row that fills up is scored where it is dealt to again: its sequence must be there, and its result is not needed.
    wanted: dict[RowKey, set[int]] = {key: set() for key in keys}
    for home, i in places:
        wanted[filled[i]].add(home)
    held = _spread(rows.sequences, rows.homes, wanted, parallel)
    mine = dealt[parallel.dp_rank]
    micro_batches = collate_portions([held.get(key) for key in filled], mine, cut.alignment)
    logprobs, experts = score(micro_batches)
    found: dict[RowKey, np.ndarray] = {}
    routes: dict[RowKey, np.ndarray] = {}
    for number, (portion, micro, values) in enumerate(zip(mine, micro_batches, logprobs, strict=True)):
        ends = np.cumsum([len(held[filled[i]].token_ids) for i in portion.rows])
        for i, of_row, at in zip(portion.rows, micro.by_sequence(values), np.split(micro.places, ends[:-1]), strict=True):
            if i < len(keys):
                found[keys[i]] = held[keys[i]].spread(of_row)
                if experts is not None:
                    routes[keys[i]] = np.where(at[:, None, None] < 0, FREE, experts[number][at])
    scored = PlacedRows(extents=rows.extents, homes=homes, sequences={key: held[key] for key in found})
    return ScoredRows(rows=scored, logprobs=found, experts=None if experts is None else _alike_where_shared(routes, scored, parallel))


def without_experts(logprobs: Callable[[SequenceOf[MicroBatch]], list[np.ndarray]]) -> Callable[[SequenceOf[MicroBatch]], Scores]:
    """What `score_rows` asks of a model whose experts are not wanted."""
    return lambda micro_batches: (logprobs(micro_batches), None)


def _alike_where_shared(routes: Mapping[RowKey, np.ndarray], rows: PlacedRows, parallel: ParallelState) -> dict[RowKey, np.ndarray]:
    """Experts of rows, where what those of a group begin with has the experts of the first of them, so that it can be computed once.

    (Micro-batches differ in rounding, and so now and then in a choice.) Collective.
    """
    extents = rows.extents
    first: dict[object, RowKey] = {}
    for key in sorted(extents):
        first.setdefault(extents[key].group or key, key)
    lead = {key: first[extents[key].group or key] for key in extents}
    beginnings = {key: routes[key][: extents[key].prefix] for key in routes if lead[key] == key}
    wanted: dict[RowKey, set[int]] = {key: set() for key in first.values()}
    for key, leader in lead.items():
        wanted[leader].add(rows.homes[key])
    beginnings = _spread(beginnings, rows.homes, wanted, parallel)
    found = {key: array.copy() for key, array in routes.items()}
    for key, array in found.items():
        for begin in rows.sequences[key].starts:
            array[begin : begin + extents[key].prefix] = beginnings[lead[key]]
    return found


def local_samples(items: Mapping[RowKey, Any], now: Mapping[RowKey, int], homes: Mapping[RowKey, int], parallel: ParallelState) -> dict:
    """Items of rows that lie on the shares `now`, where their homes are. Every rank gets those of its share. Collective."""
    return _spread(items, now, {key: {homes[key]} for key in now}, parallel)


def _spread(items: Mapping[RowKey, Any], homes: Mapping[RowKey, int], wanted: Mapping[RowKey, set[int]], parallel: ParallelState) -> dict:
    """Each row's item on every share that wants it. The first rank of its home sends it; what already lies there does not travel."""
    kept = {key: items[key] for key, shares in wanted.items() if parallel.dp_rank in shares and homes[key] == parallel.dp_rank}
    if all(shares <= {homes[key]} for key, shares in wanted.items()):
        return kept
    mine = [key for key in wanted if homes[key] == parallel.dp_rank] if parallel.is_model_parallel_src else []
    return kept | _to_shares(((share, key, items[key]) for key in mine for share in wanted[key] - {parallel.dp_rank}), parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBuffer:
    """Rows in the order in which they came. Every method that returns a `SampleBuffer` is collective, and leaves this one as it was."""

    parallel: ParallelState
    cut: BatchPartitioner
    rows: Mapping[RowKey, TrainingRow] = field(default_factory=dict)
    samples: Mapping[RowKey, Sample] = field(default_factory=dict)  # those whose home this rank is

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rollouts: Iterable[Rollout]) -> SampleBuffer:
        """With what has come in."""
        rows, samples = dict(self.rows), dict(self.samples)
        for rollout in rollouts:
            rows |= {row.key: row for row in rollout.rows}
            samples |= rollout.samples
        return replace(self, rows=rows, samples=samples)

    def anchored(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """Log-probs by the weights as they are, for the slices whose first use will be stale (batching.md section 3)."""
        return self._scored([key for key in self._in_slices(step.anchors) if not self.rows[key].is_anchored], scorer)

    def after_refusal(self, scorer: ModelScorer, step: ScheduledStep) -> SampleBuffer:
        """The guard has refused the gradient of `step`: what its forward said of rows is not kept. The weights are those that it started
        from, so what later passes need of them is scored now, by the very version that it is to be of."""
        return self._scored(self._in_slices(step.keeps), scorer)

    def _scored(self, due: list[RowKey], scorer: ModelScorer) -> SampleBuffer:
        """A row that the policy cannot score, for it finds no number, trains nothing from here on: its mask is empty."""
        if not due:
            return self
        scored = score_rows(self.placed(due), score=scorer.anchors, cut=self.cut, parallel=self.parallel)
        samples = scored.rows.sequences
        if scored.experts is not None:
            samples = {key: replace(sample, experts=scored.experts[key]) for key, sample in samples.items()}
        lost = self._without_a_number(scored.logprobs)
        held = {
            key: emptied(sample) if key in lost else sample.anchored(scored.logprobs[key], "recompute") for key, sample in samples.items()
        }
        moved = self._moved(scored.rows.homes, held)
        return replace(moved, rows={key: replace(row, num_masked=0) if key in lost else row for key, row in moved.rows.items()})

    def placed(self, keys: Iterable[RowKey]) -> PlacedRows:
        """These of the rows, as others are handed them."""
        rows = {key: self.rows[key] for key in keys}
        return PlacedRows(
            extents={key: row.extent for key, row in rows.items()},
            homes={key: row.home for key, row in rows.items()},
            sequences={key: self.samples[key] for key in rows if key in self.samples},
        )

    def _without_a_number(self, logprobs: Mapping[RowKey, np.ndarray]) -> set[RowKey]:
        """Rows that the policy itself cannot score, of all ranks. Collective."""
        mine = {key for key, values in logprobs.items() if not np.isfinite(values).all()}
        if not collectives.all_reduce_max(len(mine)):
            return set()
        lost = set().union(*collectives.all_gather_object(mine))
        if self.parallel.is_main:
            named = ", ".join(f"row {row} of rollout {rollout}" for rollout, row in sorted(lost)[:SHOWN])
            logger.warning("The policy gives no log-probs that are numbers to %d rows, which train nothing: %s.", len(lost), named)
        return lost

    def batch(self, step: ScheduledStep, *, weigh: Callable[..., TokenWeights]) -> tuple[SampleBuffer, GlobalBatch]:
        """This rank's share of an optimizer step, and the rows where they then are. The only place where rows are cut for training.

        Token weights are fixed over the whole step, then cut: that is what makes the gradient independent of the cut.
        Raises KeyError where the timetable asks for a row that was never sampled, ValueError where a row's version contradicts it.
        """
        rows = [self.rows[micro.rollout, row] for micro in step.micro_steps for row in range(*micro.rows)]
        _check_versions(step, self.rows)
        found = weigh(
            [row.num_masked for row in rows], is_truncated=[row.is_truncated for row in rows], is_dead=[row.is_dead for row in rows]
        )
        dealt = partition([row.extent for row in rows], self.cut)
        homes = {rows[i].key: home for home, mine in enumerate(dealt) for portion in mine for i in portion.rows}
        keys = [row.key for row in rows]
        held = _spread(self.samples, {key: self.rows[key].home for key in keys}, {key: {homes[key]} for key in keys}, self.parallel)
        micro_batches = [
            collate_samples(
                [held[keys[i]] for i in portion.rows], [found.of_rows[i] for i in portion.rows], trained_at=step.index,
                number=number, alignment=self.cut.alignment, at_least=portion.at_least, families=portion.families,
            )
            for number, portion in enumerate(dealt[self.parallel.dp_rank])
        ]  # fmt: skip
        batch = GlobalBatch(
            step=step.index,
            micro_batches=tuple(micro_batches),
            num_sequences=found.num_sequences,
            num_loss_tokens=found.num_loss_tokens,
            num_tokens=sum(sum(row.contexts) for row in rows),
            num_contexts=sum(len(row.contexts) for row in rows),
            staleness=tuple(step.index - row.version for row in rows),
            lag=tuple(micro.fresh_at - self.rows[micro.rollout, row].version for micro in step.micro_steps for row in range(*micro.rows)),
        )
        return self._moved(homes, held), batch

    def after(self, step: ScheduledStep, logprobs: Mapping[RowKey, np.ndarray]) -> SampleBuffer:
        """Without what `step` has used up; with the log-probs of its training forward, where later passes take their ratio against them.

        logprobs: [masked] of this share's rows, on the ranks of the last pipeline stage; empty elsewhere.
        """
        keeps = set(self._in_slices(step.keeps))
        samples = dict(self.samples)
        if keeps:
            mine = {key: values for key, values in logprobs.items() if key in keeps}
            for key, values in self.parallel.from_last_stage(mine).items():
                samples[key] = samples[key].anchored(samples[key].spread(values), "cached")
        done = set(self._in_slices(step.last_use))
        return replace(
            self,
            rows={key: row for key, row in self.rows.items() if key not in done},
            samples={key: sample for key, sample in samples.items() if key not in done},
        )

    def to_save(self) -> list[Sample]:
        """The samples that this rank writes: each is written by one rank."""
        return [self.samples[key] for key in self.rows if key in self.samples] if self.parallel.is_model_parallel_src else []

    def of_step(self, step: ScheduledStep) -> list[Sample]:
        """The rows that a step trains, in its order, on the first rank of all; elsewhere none. Collective."""
        keys = [(micro.rollout, row) for micro in step.micro_steps for row in range(*micro.rows)]
        mine = {key: self.samples[key] for key in keys if key in self.samples} if self.parallel.is_model_parallel_src else {}
        found = {key: sample for part in collectives.exchange({0: mine}) for key, sample in part.items()}
        return [found[key] for key in keys] if found else []

    def restored(self, samples: SequenceOf[Sample]) -> SampleBuffer:
        """As it was when saved. samples: those that this rank has read; every one is read by one rank."""
        mine = [TrainingRow.of(sample, home=self.cut.dp_rank_of(sample.row)) for sample in samples]
        rows = {row.key: row for rows in collectives.all_gather_object(mine) for row in rows}
        held = deliver({row.key: (row.home, sample) for row, sample in zip(mine, samples, strict=True)}, self.parallel)
        return replace(self, rows=dict(sorted(rows.items())), samples=held)

    def _in_slices(self, slices: SequenceOf[tuple[int, int]]) -> list[RowKey]:
        """The rows of the given (rollout, slice) pairs, in order."""
        wanted, size = set(slices), self.cut.rows_per_slice
        return [key for key in self.rows if (key[0], key[1] // size) in wanted]

    def _moved(self, homes: Mapping[RowKey, int], held: Mapping[RowKey, Sample]) -> SampleBuffer:
        """With other homes for some rows, whose samples this rank holds where it is the home."""
        rows = {key: replace(row, home=homes[key]) if homes.get(key, row.home) != row.home else row for key, row in self.rows.items()}
        stay = {key: sample for key, sample in self.samples.items() if key not in homes}
        return replace(self, rows=rows, samples=stay | dict(held))


def _check_versions(step: ScheduledStep, rows: Mapping[RowKey, TrainingRow]) -> None:
    for micro in step.micro_steps:
        for row in (rows[micro.rollout, row] for row in range(*micro.rows)):
            # Not `version`: a resumed run may have sampled the row later than planned. Its ratio against the sampler is 1 at `version`.
            if row.version > micro.fresh_at or row.fresh_at not in (micro.fresh_at, row.version):
                raise ValueError(
                    f"row {row.row} of rollout {row.rollout} was sampled by version {row.version} and is fresh at {row.fresh_at}; "
                    f"the timetable has its rollout come in at version {micro.fresh_at}"
                )
