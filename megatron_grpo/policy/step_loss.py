"""The loss of one optimizer step: what must be known before its first gradient, and what each micro-batch adds."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from megatron_grpo.grpo.entropy import AdaptiveEntropy, entropy_threshold
from megatron_grpo.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.grpo.objectives import Labels, classification
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.autograd import sum_over_ranks
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import Slope
from megatron_grpo.policy.packed_batch import LocalBatch
from megatron_grpo.policy.passes import ModelScorer
from megatron_grpo.types import GlobalBatch, RowKey, TrainingMicroBatch

OfSequences = tuple[np.ndarray, np.ndarray]  # values and slopes of `classification`, float64 [S]


class StepLoss:
    """Loss of one optimizer step, for `passes.train`. Making one is collective, because it may score the batch.

    Of each micro-batch it keeps (logs, the micro-batch, its log-probs float32 [C]).

    Args:
        loss: The GRPO loss.
        batch: The global batch of the step.
        scorer: Scorer of the model that trains.
        reference: The reference's log-probs by micro-batch, float32 [C], on ranks of the last stage; empty without a reference.
        entropy: Current state of the adaptive entropy coefficient; None if the coefficient is constant.
    """

    def __init__(
        self, loss: GrpoLoss, batch: GlobalBatch, scorer: ModelScorer, reference: SequenceOf[np.ndarray], entropy: AdaptiveEntropy | None
    ):
        self.loss, self.batch, self.scorer, self.reference = loss, batch, scorer, reference
        self.parallel, self.with_entropy = scorer.parallel, loss.needs_entropy
        self._entropy_coef = entropy.applied if entropy else None
        # The entropy, in nats, from which on a token trains; and the classification labels by micro-batch. None off the last stage, where
        # neither is used.
        self._threshold = _entropy_threshold(batch, scorer, loss.top_entropy_quantile) if loss.needs_entropy_threshold else None
        self._labels = _labels(batch, scorer, loss.needs_classification) if loss.needs_classification is not None else None

    def __call__(self, micro: TrainingMicroBatch, local: LocalBatch, logprobs: torch.Tensor, entropy: torch.Tensor | None):
        """Compute the loss of a micro-batch on this context-parallel rank.

        Args:
            micro: The micro-batch.
            local: This rank's part of it.
            logprobs: Log-probs of this rank's trained positions, float32 [c].
            entropy: Entropies of the same positions in nats, float32 [c]; None if the loss needs none.

        Returns:
            The loss; and what is kept of the micro-batch.
        """
        inputs, ref_logprobs = self._inputs(micro, local.trained)
        loss, logs = self.loss(
            inputs,
            logprobs=logprobs,
            entropy=entropy,
            ref_logprobs=ref_logprobs,
            entropy_threshold=self._threshold,
            entropy_coef=self._entropy_coef,
            sum_over_context=lambda x: sum_over_ranks(x, self.parallel.cp_group),
        )
        return loss, (logs, micro, self.scorer.whole(micro, local, logprobs))

    def slope_of(self, micro: TrainingMicroBatch, local: LocalBatch) -> Slope | None:
        """Return the function that lets the head compute its gradients while it has the logits.

        Args:
            micro: The micro-batch.
            local: This rank's part of it.

        Returns:
            See `parallel.vocab.Slope`; None if the loss of a token depends on other tokens.
        """
        if not self.loss.is_per_token:
            return None

        def slope(chunk: slice, logprobs: torch.Tensor) -> torch.Tensor:
            inputs, ref_logprobs = self._inputs(micro, local.trained[chunk])
            return self.loss.slope(inputs, logprobs=logprobs, ref_logprobs=ref_logprobs)

        return slope

    def _inputs(self, micro: TrainingMicroBatch, trained: np.ndarray) -> tuple[LossInputs, torch.Tensor | None]:
        """Return the loss inputs of some trained positions of a micro-batch, and the reference's log-probs if there is a reference.

        Args:
            micro: The micro-batch.
            trained: The positions, int64 indices into its C trained positions.
        """

        def mine(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[trained]).to(self.parallel.device)

        inputs = LossInputs(
            token_weights=mine(micro.token_weights),
            advantages=mine(micro.advantages),
            teacher_logprobs=mine(micro.teacher_logprobs),
            sampler_logprobs=mine(micro.sampler_logprobs),
            old_logprobs=mine(micro.old_logprobs),
            is_compared=mine(micro.is_compared),
            sequence=mine(micro.sequence),
            num_sequences=micro.num_sequences,
            num_loss_tokens=self.batch.num_loss_tokens,
            place=mine(micro.place),
            longest=int(micro.place.max(initial=0)) + 1,
            labels=None if self._labels is None else Labels(*(mine(of[micro.sequence]) for of in self._labels[micro.number])),
        )
        return inputs, mine(self.reference[micro.number]) if self.reference else None


def _entropy_threshold(batch: GlobalBatch, scorer: ModelScorer, quantile: float) -> float | None:
    entropies, parallel = scorer.last_stage_entropies(batch.micro_batches), scorer.parallel
    if not parallel.is_last_stage:
        return None

    def over_ranks(counts: np.ndarray) -> np.ndarray:
        return collectives.add_(torch.from_numpy(counts).to(parallel.device), parallel.dp_group).cpu().numpy()

    masks = [micro.token_weights > 0 for micro in batch.micro_batches]
    return entropy_threshold(entropies, masks, quantile, over_ranks=over_ranks)


def _labels(batch: GlobalBatch, scorer: ModelScorer, tau: float) -> SequenceOf[OfSequences] | None:
    """Compute the classification labels of the rows, by micro-batch, on ranks of the last stage; None elsewhere. Collective.

    The rows of a group may lie on several ranks. An on-policy row has a score of 0, so nothing is scored if no row is stale.
    """
    is_stale = any((~np.isnan(micro.old_logprobs)).any() for micro in batch.micro_batches)
    scores = scorer.last_stage_logprobs(batch.micro_batches) if collectives.all_reduce_max(int(is_stale)) else []
    mine = _scores_of_rows(batch.micro_batches, scores, scorer.parallel)
    rows = {row: said for part in collectives.all_gather_object(mine) for row, said in part.items()}
    if not scorer.parallel.is_last_stage:
        return None
    groups, values, advantages, trains = zip(*rows.values(), strict=True)
    found = dict(zip(rows, zip(*classification(values, advantages, groups, trains, tau=tau), strict=True), strict=True))
    of_micros = [np.array([found[row] for row in micro.rows]).reshape(-1, 2) for micro in batch.micro_batches]
    return [(both[:, 0], both[:, 1]) for both in of_micros]


def _scores_of_rows(
    micro_batches: SequenceOf[TrainingMicroBatch], logprobs: SequenceOf[np.ndarray], parallel: ParallelState
) -> dict[RowKey, tuple[tuple[int, int], float, float, bool]]:
    """Return row -> (group, score, advantage, whether any token of it trains).

    Has the rows of this data-parallel rank, on the one rank that reports them; empty elsewhere.
    """
    found = {}
    for micro in micro_batches if parallel.reports_its_rows else ():
        shift = np.zeros(len(micro.targets))
        if logprobs:
            shift = np.nan_to_num(logprobs[micro.number].astype(np.float64) - micro.old_logprobs)  # 0 where it is on-policy
        trained = micro.token_weights > 0
        for i, (row, prompt) in enumerate(zip(micro.rows, micro.prompts, strict=True)):
            at = np.flatnonzero(trained & (micro.sequence == i))
            score, advantage = (float(shift[at].mean()), float(micro.advantages[at[0]])) if len(at) else (0.0, 0.0)
            found[row] = (row[0], prompt), score, advantage, bool(len(at))
    return found
