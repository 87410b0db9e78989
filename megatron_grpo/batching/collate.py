"""Sequences -> the arrays of one packed forward pass. Where a stale sample without old log-probs is stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from megatron_grpo.types import AnchoredSample, MicroBatch, Sample, Segment, Sequence, TrainingMicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What lengths are rounded up to, in tokens: each context, and the whole stream. See `parallel.layout.sequence_alignment`."""

    sequence: int = 1
    stream: int = 1

    @property
    def grain(self) -> int:
        """Every stream is a multiple of it."""
        return math.lcm(self.sequence, self.stream)

    def of_contexts(self, contexts: SequenceOf[int]) -> int:
        """Tokens that a sequence takes in the stream. contexts: tokens of each; the last one predicts nothing, so it is not computed."""
        return sum(-(-(tokens - 1) // self.sequence) * self.sequence for tokens in contexts)

    def of_stream(self, total: int) -> int:
        """Tokens in a stream whose sequences take `total`. Never 0: Megatron's layers take no empty stream."""
        return max(-(-total // self.grain), 1) * self.grain


class _Context(NamedTuple):
    """One context of a sequence: its row in the micro-batch, and where it begins and ends in the tokens of that row."""

    row: int
    first: int
    end: int


def collate(sequences: SequenceOf[Sequence], *, number: int = 0, alignment: Alignment | None = None, at_least: int = 0) -> MicroBatch:
    """Packs sequences end to end, so that they can be scored.

    number: the micro-batch's place in its pass. Padding goes behind a context, where causal attention cannot see it, and behind the last
    context as a segment of its own. at_least: tokens in the stream, itself aligned.
    """
    alignment = alignment or Alignment()
    contexts = [_Context(row, first, end) for row, sequence in enumerate(sequences) for first, end in sequence.contexts]
    total = max(alignment.of_stream(alignment.of_contexts([end - first for _, first, end in contexts])), at_least)
    tokens, positions, multiplicity = (np.zeros(total, dtype=np.int64) for _ in range(3))
    segments: list[Segment] = []
    begins: dict[_Context, int] = {}  # context -> where it begins in the stream
    start = 0
    for context in contexts:
        length = context.end - context.first - 1
        padded = alignment.of_contexts([length + 1])
        tokens[start : start + length] = sequences[context.row].token_ids[context.first : context.end - 1]
        positions[start : start + padded] = np.arange(padded)
        multiplicity[start : start + length] = 1
        if padded:
            segments.append(Segment(start=start, end=start + padded, length=length))
        begins[context] = start
        start += padded
    if start < total:
        positions[start:] = np.arange(total - start)
        segments.append(Segment(start=start, end=total, length=0))
    trained = list(_trained(sequences, begins))
    return MicroBatch(
        number=number,
        token_ids=tokens,
        positions=positions,
        multiplicity=multiplicity,
        segments=tuple(segments),
        predict_at=_column([at for at, _, _ in trained], np.int64),
        targets=_column([targets for _, targets, _ in trained], np.int64),
        sequence=_column([rows for _, _, rows in trained], np.int64),
        num_sequences=len(sequences),
        num_contexts=len(contexts),
    )


def _trained(sequences: SequenceOf[Sequence], begins: dict[_Context, int]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(places in the stream, targets, rows) of each context's masked tokens. Contexts come row by row, so trained positions do too."""
    for context, begin in begins.items():
        sequence = sequences[context.row]
        at = np.flatnonzero(sequence.mask[context.first : context.end])
        yield begin + at - 1, sequence.token_ids[context.first + at], np.full(len(at), context.row)


def collate_samples(
    samples: SequenceOf[Sample],
    token_weights: SequenceOf[float],
    *,
    trained_at: int,
    number: int = 0,
    alignment: Alignment | None = None,
    at_least: int = 0,
) -> TrainingMicroBatch:
    """As `collate`, with what the loss needs.

    token_weights: `u` of each sample's trained tokens. trained_at: the version whose gradient this is. A sample that is fresh there is
    on-policy: its old log-probs are NaN, and the loss takes the current ones.

    Raises ValueError for a sample that is stale there and carries no old log-probs: its ratio would be 1 where it is not.
    """
    stream = collate(samples, number=number, alignment=alignment, at_least=at_least)
    old = [_old_logprobs(sample, trained_at)[sample.mask] for sample in samples]
    counts = [sample.num_masked for sample in samples]
    return TrainingMicroBatch(
        **{field.name: getattr(stream, field.name) for field in fields(MicroBatch)},
        rows=tuple(sample.key for sample in samples),
        token_weights=np.repeat(np.asarray(token_weights, dtype=np.float64), counts),
        advantages=np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), counts),
        sampler_logprobs=_column([sample.sampler_logprobs[sample.mask] for sample in samples], np.float32),
        old_logprobs=_column(old, np.float32),
        is_compared=np.repeat(np.array([_is_compared(sample, trained_at) for sample in samples], dtype=bool), counts),
    )


def _column(parts: SequenceOf[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)


def _old_logprobs(sample: Sample, trained_at: int) -> np.ndarray:
    if sample.fresh_at == trained_at:
        return np.full(len(sample.token_ids), np.nan)
    if not isinstance(sample, AnchoredSample):
        raise ValueError(
            f"row {sample.row} of rollout {sample.rollout} was sampled by version {sample.version} and is trained at version "
            f"{trained_at} without old log-probs"
        )
    return sample.old_logprobs


def _is_compared(sample: Sample, trained_at: int) -> bool:
    """False if the old log-probs are the sampler's own: compared with themselves they say nothing."""
    return sample.fresh_at == trained_at or not (isinstance(sample, AnchoredSample) and sample.anchored_by == "rollout")
