"""Samples -> the arrays of one packed forward pass. Where a stale sample without old log-probs is stopped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_grpo.types import AnchoredSample, MicroBatch, Sample, Segment


def collate(
    samples: Sequence[Sample],
    weights: Sequence[np.ndarray],
    *,
    trained_at: int,
    align_sequence: int = 1,
    align_stream: int = 1,
) -> MicroBatch:
    """Packs whole sequences end to end.

    weights: `u` of each sample, one entry per token. trained_at: the version whose gradient this is; a sample of that very version is
    on-policy and its old log-probs are NaN (the loss then takes the current ones). align_*: see `parallel.layout.sequence_alignment`;
    padding goes behind a sequence, where causal attention cannot see it.

    Raises ValueError for a sample of an older version that carries no old log-probs: its ratio would be 1 where it is not.
    """
    parts = []
    offset = 0
    for index, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        # The last token predicts nothing that is trained, so it is not computed.
        length = len(sample.token_ids) - 1
        padded = -(-length // align_sequence) * align_sequence
        if index == len(samples) - 1:
            while (offset + padded) % align_stream:
                padded += align_sequence
        parts.append((sample, weight, offset, length, padded))
        offset += padded

    tokens, positions = np.zeros(offset, dtype=np.int64), np.zeros(offset, dtype=np.int64)
    is_padding = np.ones(offset, dtype=bool)
    segments, columns = [], []
    for index, (sample, weight, start, length, padded) in enumerate(parts):
        tokens[start : start + length] = sample.token_ids[:-1]
        is_padding[start : start + length] = False
        positions[start : start + padded] = np.arange(padded)
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
