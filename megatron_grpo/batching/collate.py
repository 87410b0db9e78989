"""Samples -> the arrays of one packed forward pass. Where a stale sample without old log-probs is stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_grpo.types import AnchoredSample, MicroBatch, Sample, Segment


def padded_length(sample: Sample, align_sequence: int = 1) -> int:
    """Tokens that a sample takes in the stream. Its last token predicts nothing, so it is not computed."""
    return -(-(len(sample.token_ids) - 1) // align_sequence) * align_sequence


def stream_length(samples: Sequence[Sample], *, align_sequence: int = 1, align_stream: int = 1) -> int:
    """Tokens in the stream of one micro-batch. Never 0: where no sample has anything to compute, a stretch of padding is computed."""
    grain = math.lcm(align_sequence, align_stream)
    return max(-(-sum(padded_length(sample, align_sequence) for sample in samples) // grain), 1) * grain


def collate(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    *,
    trained_at: int,
    align_sequence: int = 1,
    align_stream: int = 1,
    at_least: int = 0,
) -> MicroBatch:
    """Packs whole sequences end to end.

    weights: `u` of each sample, one entry per token. trained_at: the version whose gradient this is; a sample of that very version is
    on-policy and its old log-probs are NaN (the loss then takes the current ones). align_*: see `parallel.layout.sequence_alignment`;
    padding goes behind a sequence, where causal attention cannot see it, and behind the last one as a segment of its own. at_least: tokens
    in the stream, itself aligned.

    Raises ValueError for a sample of an older version that carries no old log-probs: its ratio would be 1 where it is not.
    """
    total = max(stream_length(samples, align_sequence=align_sequence, align_stream=align_stream), at_least)
    tokens, positions = np.zeros(total, dtype=np.int64), np.zeros(total, dtype=np.int64)
    is_padding = np.ones(total, dtype=bool)
    segments, columns, start = [], [], 0
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        length, padded = len(sample.token_ids) - 1, padded_length(sample, align_sequence)
        tokens[start : start + length] = sample.token_ids[:-1]
        is_padding[start : start + length] = False
        positions[start : start + padded] = np.arange(padded)
        if padded:  # a prompt of one token and no completion computes nothing
            segments.append(Segment(start=start, end=start + padded))
        at = np.flatnonzero(sample.loss_mask)
        columns.append(
            (
                start + at - 1,
                sample.token_ids[at],
                np.full(len(at), index),
                weight[at],
                np.full(len(at), sample.advantage),
                sample.sampler_logprobs[at],
                _old_logprobs(sample, trained_at)[at],
            )
        )
        start += padded
    if start < total:
        positions[start:] = np.arange(total - start)
        segments.append(Segment(start=start, end=total))
    predict_at, targets, sequence, weight, advantage, sampler, old = (np.concatenate(column) for column in zip(*columns, strict=True))
    return MicroBatch(
        token_ids=tokens,
        positions=positions,
        segments=tuple(segments),
        predict_at=predict_at.astype(np.int64),
        targets=targets.astype(np.int64),
        sequence=sequence.astype(np.int64),
        weights=weight.astype(np.float64),
        advantages=advantage.astype(np.float32),
        sampler_logprobs=sampler.astype(np.float32),
        old_logprobs=old.astype(np.float32),
        rows=tuple((sample.rollout, sample.row) for sample in samples),
        is_padding=is_padding,
    )


def _old_logprobs(sample: Sample, trained_at: int) -> np.ndarray:
    if sample.version == trained_at:
        return np.full(len(sample.token_ids), np.nan)
    if not isinstance(sample, AnchoredSample):
        raise ValueError(
            f"row {sample.row} of rollout {sample.rollout} was sampled by version {sample.version} and is trained at version "
            f"{trained_at} without old log-probs"
        )
    return sample.old_logprobs
