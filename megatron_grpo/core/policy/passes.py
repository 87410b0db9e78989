"""Passes of a model over micro-batches with Megatron-Core's pipeline schedule, in any layout: scoring, and training with a `StepLoss`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_grpo.core.arrays import SequenceLengths
from megatron_grpo.core.base import activity
from megatron_grpo.core.batching.collate import collate_specs
from megatron_grpo.core.batching.split import BatchPartitioner, partition_for_scoring
from megatron_grpo.core.grpo.entropy import AdaptiveEntropy, entropy_threshold
from megatron_grpo.core.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.core.grpo.objectives import ClassificationTerms, classification
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.autograd import sum_over_ranks
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.parallel.vocab import Slope
from megatron_grpo.core.policy.memory_offload import require_on_device
from megatron_grpo.core.policy.packed_batch import LocalBatch, to_local
from megatron_grpo.core.policy.router import RouterReplayPass, routers, routers_replay
from megatron_grpo.core.types import GlobalBatch, MicroBatch, RowKey, TokenSequence, TrainingMicroBatch

# (micro-batch, this rank's part of it) -> derivative of the loss that the head may use before the loss is computed; None if there is none.
SlopeOf = Callable[[MicroBatch, LocalBatch], "Slope | None"]


def train(
    model: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], loss: Any, parallel: ParallelState, routing: RouterReplayPass
) -> list[Any]:
    """Run forward and backward of every micro-batch and reduce the gradients over ranks at the end. Collective.

    Args:
        loss: A `policy.passes.StepLoss`; called on the last stage only.

    Returns:
        What `loss` kept of each micro-batch, in order, on ranks of the last stage; an empty list elsewhere.
    """

    def finish(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
        value, detail = loss(batch, local, logprobs, entropy)
        # Megatron would divide by this count. Nothing is divided here: `policy.optimizer` ignores it.
        return value, torch.ones([], dtype=torch.int, device=value.device), detail

    with torch.enable_grad():
        model_kwargs = dict(with_entropy=loss.with_entropy, temperature=None)
        return _run(model, micro_batches, finish, parallel, model_kwargs, make_slope=loss.make_slope, routing=routing, trains=True)


@contextmanager
def _without_dropout(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put the model in evaluation mode, so that two scorings of one sequence agree.

    Adapters may have dropout, and a policy in training is in training mode.
    """
    training_flags = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(model, training_flags, strict=True):
            chunk.train(training)


@contextmanager
def _group_at_most(chunk: torch.nn.Module, num_micro_batches: int) -> Iterator[None]:
    """Limit microbatch_group_size_per_vp_stage to the number of micro-batches.

    Megatron-Core refuses a larger value, and a pass that only scores may have few micro-batches.
    """
    config = get_model_config(chunk)
    configured = config.microbatch_group_size_per_vp_stage
    config.microbatch_group_size_per_vp_stage = min(configured, num_micro_batches)
    try:
        yield
    finally:
        config.microbatch_group_size_per_vp_stage = configured


def _run(
    model,
    micro_batches,
    finish,
    parallel,
    model_kwargs: dict[str, Any],
    *,
    make_slope: SlopeOf | None = None,
    routing: RouterReplayPass,
    trains: bool,
) -> list[Any]:
    """Run one pass of Megatron-Core's schedule.

    Args:
        finish: Called on the last stage with (micro-batch, local batch, log-probs [c], entropies [c] or None).
        make_slope: Returns the slope of a micro-batch's loss for the head.
        trains: Whether to run the backward too.
    """
    moe_layers = [router.place for router in routers(model)]
    local = [to_local(batch, parallel, moe_layers) for batch in micro_batches]

    def step(batches: Iterator[tuple[MicroBatch, LocalBatch]], chunk: torch.nn.Module):
        batch, local = next(batches)
        activity.advance()
        routing.in_forward = local.number
        output = chunk(local, **model_kwargs, slope=make_slope(batch, local) if make_slope else None)

        def compute_output_loss(output: torch.Tensor, non_loss_data: bool = False):
            return finish(batch, local, output[0], output[1] if model_kwargs["with_entropy"] else None)

        return output, compute_output_loss

    iterators = [iter(list(zip(micro_batches, local, strict=True))) for _ in model]
    name = "training" if trains else "scoring"
    with (
        routers_replay(model, local, routing),
        _group_at_most(model[0], len(micro_batches)),
        activity.phase(name, total=len(micro_batches) * len(model), unit="micro-batches"),
    ):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=list(model),
            num_microbatches=len(micro_batches),
            # Lengths vary and are sent ahead of the data; the schedule only checks these against the layout.
            seq_length=max(batch.num_tokens for batch in micro_batches),
            micro_batch_size=1,
            forward_only=not trains,
            collect_non_loss_data=not trains,
        )


class ModelScorer:
    """Scorer of sequences and micro-batches by one model. Every method is collective: all ranks call it.

    Args:
        cut: Partitioner for the sequences of `score`.
        context: Context that is active during a pass; inside it the chunks are the model to be scored.
        replay: A `router_replay_mode`. A reference always routes by itself.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        parallel: ParallelState,
        cut: BatchPartitioner,
        *,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        replay: str = "disabled",
    ):
        self.model, self.parallel, self.cut, self.around, self.replay = model, parallel, cut, context, replay

    def score(self, sequences: Sequence[TokenSequence], *, temperature: float | None = None) -> list[np.ndarray]:
        """Return the log-probs of the masked tokens of each sequence, float32 [T], 0 at all other tokens.

        All ranks pass the same sequences and receive the results of all of them. This is for a few sequences, such as probes; `logprobs` is
        for batches.

        Args:
            temperature: Divides the logits; None for the sampling temperature of the run.
        """
        if not sequences:
            return []
        filled = partition_for_scoring(
            [SequenceLengths(tuple(end - begin for begin, end in sample.contexts)) for sample in sequences], self.cut
        )
        micro_specs = filled[self.parallel.dp_rank]
        padded = [*sequences, *[sequences[0]] * sum(len(micro_spec.rows) for replica_specs in filled for micro_spec in replica_specs)]
        micro_batches = collate_specs(padded, micro_specs, self.cut.alignment)
        rows_to_values: dict[int, np.ndarray] = {}
        scores = self.last_stage_logprobs(micro_batches, temperature=temperature)
        for micro_spec, micro, values in zip(micro_specs, micro_batches, scores, strict=False):
            rows_to_values |= dict(zip(micro_spec.rows, micro.by_sequence(values), strict=True))
        scored = {
            i: v
            for part in collectives.all_gather_object(rows_to_values if self.parallel.reports_its_rows else {})
            for i, v in part.items()
        }
        return [sequence.scatter(scored[i]) for i, sequence in enumerate(sequences)]

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the log-probs of each micro-batch, float32 [C], on every rank of the model-parallel group."""
        return self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches))

    def old_logprobs(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Return the old log-probs of each micro-batch, and under R2 the experts that each token was routed to.

        Returns:
            The log-probs as of `logprobs`, float32 [C] per micro-batch; and under `router_replay_mode` R2 the experts, int16 [T, MoE
            layers, k] per micro-batch, else None.
        """
        routing = RouterReplayPass(replays=self.replay == "R3", records=self.replay == "R2")
        values = self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches, routing=routing))
        if self.replay != "R2":
            return values, None
        config: Any = self.model[0].config
        return values, routing.recorded(micro_batches, self.parallel, (sum(config.moe_layer_freq), config.moe_router_topk))

    def router_pass(self) -> RouterReplayPass:
        """Return what the routers do in an ordinary pass: replay, or route by themselves."""
        return RouterReplayPass(replays=self.replay != "disabled")

    def last_stage_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float | None = None, routing: RouterReplayPass | None = None
    ) -> list[np.ndarray]:
        """Return the log-probs as of `logprobs`, on ranks of the last pipeline stage only; an empty list elsewhere.

        The loss needs them there and on no other stage.

        Args:
            temperature: Divides the logits; None for the sampling temperature of the run.
            routing: Routing that is replayed or recorded; None for an ordinary pass.

        Raises:
            RuntimeError: If the weights of the model are offloaded.
        """
        return self._read(micro_batches, lambda logprobs, _: logprobs, routing=routing, temperature=temperature, with_entropy=False)

    def last_stage_entropies(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Return the entropies of each micro-batch in nats, float32 [C], on ranks of the last pipeline stage.

        The list is empty on other stages.
        """
        return self._read(micro_batches, lambda _, entropy: entropy, temperature=None, with_entropy=True)

    def _read(
        self, micro_batches: Sequence[MicroBatch], select: Callable, *, routing: RouterReplayPass | None = None, **model_kwargs: Any
    ) -> list:
        """Run the forward only.

        Args:
            select: Chooses from log-probs and entropies [c].
            routing: Routing that is replayed or recorded; None for an ordinary pass.
        """

        def finish(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return self.gather_tokens(batch, local, select(logprobs, entropy))

        require_on_device(self.model)
        with self.around(), torch.no_grad(), _without_dropout(self.model):
            routing = routing or self.router_pass()
            return _run(self.model, micro_batches, finish, self.parallel, model_kwargs, routing=routing, trains=False)

    def gather_tokens(self, batch: MicroBatch, local: LocalBatch, values: torch.Tensor) -> np.ndarray:
        """Gather values [c] of the context-parallel ranks to float32 [C] on each of them. Collective.

        Args:
            values: Values at this rank's trained positions, [c].
        """
        full = torch.zeros(len(batch.targets), device=self.parallel.device)
        full[torch.from_numpy(local.trained).to(full.device)] = values.detach().float()
        return collectives.add_(full, self.parallel.cp_group).cpu().numpy()


ValuesAndSlopes = tuple[np.ndarray, np.ndarray]  # values and slopes of `classification`, float64 [S]


class StepLoss:
    """Loss of one optimizer step, for `passes.train`. Making one is collective, because it may score the batch.

    Of each micro-batch it keeps (logs, the micro-batch, its log-probs float32 [C]).

    Args:
        reference: The reference's log-probs by micro-batch, float32 [C], on ranks of the last stage; empty without a reference.
        entropy: Current state of the adaptive entropy coefficient; None if the coefficient is constant.
    """

    def __init__(
        self, loss: GrpoLoss, batch: GlobalBatch, scorer: ModelScorer, reference: Sequence[np.ndarray], entropy: AdaptiveEntropy | None
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
        return loss, (logs, micro, self.scorer.gather_tokens(micro, local, logprobs))

    def make_slope(self, micro: TrainingMicroBatch, local: LocalBatch) -> Slope | None:
        """Return the function that lets the head compute its gradients while it has the logits.

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
            trained: The positions, int64 indices into its C trained positions.
        """

        def local(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array[trained]).to(self.parallel.device)

        inputs = LossInputs(
            token_weights=local(micro.token_weights),
            advantages=local(micro.advantages),
            teacher_logprobs=local(micro.teacher_logprobs),
            sampler_logprobs=local(micro.sampler_logprobs),
            old_logprobs=local(micro.old_logprobs),
            is_compared=local(micro.is_compared),
            sequence=local(micro.sequence),
            num_sequences=micro.num_sequences,
            num_loss_tokens=self.batch.num_loss_tokens,
            token_index=local(micro.token_index),
            longest=int(micro.token_index.max(initial=0)) + 1,
            labels=None
            if self._labels is None
            else ClassificationTerms(*(local(values[micro.sequence]) for values in self._labels[micro.number])),
        )
        return inputs, local(self.reference[micro.number]) if self.reference else None


def _entropy_threshold(batch: GlobalBatch, scorer: ModelScorer, quantile: float) -> float | None:
    entropies, parallel = scorer.last_stage_entropies(batch.micro_batches), scorer.parallel
    if not parallel.is_last_stage:
        return None

    def over_ranks(counts: np.ndarray) -> np.ndarray:
        return collectives.add_(torch.from_numpy(counts).to(parallel.device), parallel.dp_group).cpu().numpy()

    masks = [micro.token_weights > 0 for micro in batch.micro_batches]
    return entropy_threshold(entropies, masks, quantile, over_ranks=over_ranks)


def _labels(batch: GlobalBatch, scorer: ModelScorer, tau: float) -> Sequence[ValuesAndSlopes] | None:
    """Compute the classification labels of the rows, by micro-batch, on ranks of the last stage; None elsewhere. Collective.

    The rows of a group may lie on several ranks. An on-policy row has a score of 0, so nothing is scored if no row is stale.
    """
    is_stale = any((~np.isnan(micro.old_logprobs)).any() for micro in batch.micro_batches)
    scores = scorer.last_stage_logprobs(batch.micro_batches) if collectives.all_reduce_max(int(is_stale)) else []
    local = _scores_of_rows(batch.micro_batches, scores, scorer.parallel)
    rows = {row: score for part in collectives.all_gather_object(local) for row, score in part.items()}
    if not scorer.parallel.is_last_stage:
        return None
    groups, values, advantages, trains = zip(*rows.values(), strict=True)
    label_of_row = dict(zip(rows, zip(*classification(values, advantages, groups, trains, tau=tau), strict=True), strict=True))
    label_pairs = [np.array([label_of_row[row] for row in micro.rows]).reshape(-1, 2) for micro in batch.micro_batches]
    return [(pair[:, 0], pair[:, 1]) for pair in label_pairs]


def _scores_of_rows(
    micro_batches: Sequence[TrainingMicroBatch], logprobs: Sequence[np.ndarray], parallel: ParallelState
) -> dict[RowKey, tuple[tuple[int, int], float, float, bool]]:
    """Return row -> (group, score, advantage, whether any token of it trains).

    Has the rows of this data-parallel rank, on the one rank that reports them; empty elsewhere.
    """
    scores_of_rows = {}
    for micro in micro_batches if parallel.reports_its_rows else ():
        shift = np.zeros(len(micro.targets))
        if logprobs:
            shift = np.nan_to_num(logprobs[micro.number].astype(np.float64) - micro.old_logprobs)  # 0 where it is on-policy
        trained = micro.token_weights > 0
        for i, (row, prompt) in enumerate(zip(micro.rows, micro.prompts, strict=True)):
            indices = np.flatnonzero(trained & (micro.sequence == i))
            score, advantage = (float(shift[indices].mean()), float(micro.advantages[indices[0]])) if len(indices) else (0.0, 0.0)
            scores_of_rows[row] = (row[0], prompt), score, advantage, bool(len(indices))
    return scores_of_rows
