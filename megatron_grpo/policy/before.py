"""What a loss must know of a whole global batch before its step: passes without gradients, and what ranks then tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_grpo.grpo.entropy import entropy_threshold
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.grpo.objectives import classification
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.scorer import ModelScorer
from megatron_grpo.types import GlobalBatch, RowKey, TrainingMicroBatch

OfSequences = tuple[np.ndarray, np.ndarray]  # values and slopes of `classification`, float64 [S]


class BeforeTheStep(NamedTuple):
    """By micro-batch where it is a list. On ranks of the last stage; elsewhere nobody asks."""

    reference: Sequence[np.ndarray]  # log-probs of the reference, float32 [C]; empty without one
    threshold: float | None = None  # the entropy from which on a token trains
    labels: Sequence[OfSequences] | None = None


def known_of(batch: GlobalBatch, loss: GrpoLoss, scorer: ModelScorer, reference: Sequence[np.ndarray]) -> BeforeTheStep:
    """Collective."""
    threshold = _entropy_threshold(batch, scorer, loss.top_entropy_quantile) if loss.needs_entropy_threshold else None
    labels = _labels(batch, scorer, loss.needs_classification) if loss.needs_classification is not None else None
    return BeforeTheStep(reference, threshold, labels)


def _entropy_threshold(batch: GlobalBatch, scorer: ModelScorer, quantile: float) -> float | None:
    entropies, parallel = scorer.last_stage_entropies(batch.micro_batches), scorer.parallel
    if not parallel.is_last_stage:
        return None

    def over_ranks(counts: np.ndarray) -> np.ndarray:
        return collectives.add_(torch.from_numpy(counts).to(parallel.device), parallel.dp_group).cpu().numpy()

    masks = [micro.token_weights > 0 for micro in batch.micro_batches]
    return entropy_threshold(entropies, masks, quantile, over_ranks=over_ranks)


def _labels(batch: GlobalBatch, scorer: ModelScorer, tau: float) -> Sequence[OfSequences] | None:
    """The rows of a group may lie on several ranks. What is on-policy has a score of 0: without a stale row there is nothing to compute."""
    is_stale = any((~np.isnan(micro.old_logprobs)).any() for micro in batch.micro_batches)
    scores = scorer.last_stage_logprobs(batch.micro_batches) if collectives.largest(int(is_stale)) else []
    mine = _scores_of_rows(batch.micro_batches, scores, scorer.parallel)
    rows = {row: said for part in collectives.from_all(mine) for row, said in part.items()}
    if not scorer.parallel.is_last_stage:
        return None
    groups, values, advantages, trains = zip(*rows.values(), strict=True)
    found = dict(zip(rows, zip(*classification(values, advantages, groups, trains, tau=tau), strict=True), strict=True))
    of_micros = [np.array([found[row] for row in micro.rows]).reshape(-1, 2) for micro in batch.micro_batches]
    return [(both[:, 0], both[:, 1]) for both in of_micros]


def _scores_of_rows(
    micro_batches: Sequence[TrainingMicroBatch], logprobs: Sequence[np.ndarray], parallel: ParallelState
) -> dict[RowKey, tuple[tuple[int, int], float, float, bool]]:
    """Row -> (group, score, advantage, whether anything of it trains), of this share's rows, on the rank that speaks for them."""
    found = {}
    for micro in micro_batches if parallel.speaks_for_its_rows else ():
        shift = np.zeros(len(micro.targets))
        if logprobs:
            shift = np.nan_to_num(logprobs[micro.number].astype(np.float64) - micro.old_logprobs)  # 0 where it is on-policy
        trained = micro.token_weights > 0
        for i, (row, prompt) in enumerate(zip(micro.rows, micro.prompts, strict=True)):
            at = np.flatnonzero(trained & (micro.sequence == i))
            score, advantage = (float(shift[at].mean()), float(micro.advantages[at[0]])) if len(at) else (0.0, 0.0)
            found[row] = (row[0], prompt), score, advantage, bool(len(at))
    return found
