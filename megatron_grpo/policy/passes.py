"""Passes of a model over micro-batches with Megatron-Core's pipeline schedule, in any layout: training and scoring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_grpo.base import activity
from megatron_grpo.batching.collate import collate_specs
from megatron_grpo.batching.split import BatchPartitioner, partition_for_scoring
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import Slope
from megatron_grpo.policy.memory_offload import require_on_device
from megatron_grpo.policy.packed_batch import LocalBatch, to_local
from megatron_grpo.policy.router import RouterPass, routed, routers
from megatron_grpo.types import MicroBatch, Sequence, SequenceLengths

# (micro-batch, this rank's part of it) -> derivative of the loss that the head may use before the loss is computed; None if there is none.
SlopeOf = Callable[[MicroBatch, LocalBatch], "Slope | None"]


def train(
    model: SequenceOf[torch.nn.Module], micro_batches: SequenceOf[MicroBatch], loss: Any, parallel: ParallelState, routing: RouterPass
) -> list[Any]:
    """Run forward and backward of every micro-batch and reduce the gradients over ranks at the end. Collective.

    Args:
        model: This stage's chunks, wrapped in DDP.
        micro_batches: The micro-batches of this data-parallel rank.
        loss: A `policy.step_loss.StepLoss`; called on the last stage only.
        parallel: The layout and the process groups of this rank.
        routing: What the routers replay in this pass.

    Returns:
        What `loss` kept of each micro-batch, in order, on ranks of the last stage; an empty list elsewhere.
    """

    def finish(batch: MicroBatch, mine: LocalBatch, logprobs, entropy):
        value, kept = loss(batch, mine, logprobs, entropy)
        # Megatron would divide by this count. Nothing is divided here: `policy.optimizer` ignores it.
        return value, torch.ones([], dtype=torch.int, device=value.device), kept

    with torch.enable_grad():
        asked = dict(with_entropy=loss.with_entropy, temperature=None)
        return _run(model, micro_batches, finish, parallel, asked, slope_of=loss.slope_of, routing=routing, trains=True)


@contextmanager
def _without_dropout(model: SequenceOf[torch.nn.Module]) -> Iterator[None]:
    """Put the model in evaluation mode, so that two scorings of one sequence agree.

    Adapters may have dropout, and a policy in training is in training mode.
    """
    was = [chunk.training for chunk in model]
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(model, was, strict=True):
            chunk.train(training)


@contextmanager
def _group_at_most(chunk: torch.nn.Module, num_micro_batches: int) -> Iterator[None]:
    """Limit microbatch_group_size_per_vp_stage to the number of micro-batches.

    Megatron-Core refuses a larger value, and a pass that only scores may have few micro-batches.
    """
    config = get_model_config(chunk)
    asked = config.microbatch_group_size_per_vp_stage
    config.microbatch_group_size_per_vp_stage = min(asked, num_micro_batches)
    try:
        yield
    finally:
        config.microbatch_group_size_per_vp_stage = asked


def _run(
    model, micro_batches, finish, parallel, asked: dict[str, Any], *, slope_of: SlopeOf | None = None, routing: RouterPass, trains: bool
) -> list[Any]:
    """Run one pass of Megatron-Core's schedule.

    Args:
        model: This stage's chunks.
        micro_batches: The micro-batches of this data-parallel rank.
        finish: Called on the last stage with (micro-batch, local batch, log-probs [c], entropies [c] or None).
        parallel: The layout and the process groups of this rank.
        asked: Arguments of the model's forward, besides the slope.
        slope_of: Returns the slope of a micro-batch's loss for the head.
        routing: What the routers replay or record.
        trains: Whether to run the backward too.
    """
    moe_layers = [router.place for router in routers(model)]
    local = [to_local(batch, parallel, moe_layers) for batch in micro_batches]

    def step(batches: Iterator[tuple[MicroBatch, LocalBatch]], chunk: torch.nn.Module):
        batch, mine = next(batches)
        activity.advance()
        routing.in_forward = mine.number
        output = chunk(mine, **asked, slope=slope_of(batch, mine) if slope_of else None)

        def of_output(output: torch.Tensor, non_loss_data: bool = False):
            return finish(batch, mine, output[0], output[1] if asked["with_entropy"] else None)

        return output, of_output

    iterators = [iter(list(zip(micro_batches, local, strict=True))) for _ in model]
    name = "training" if trains else "scoring"
    with (
        routed(model, local, routing),
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
        model: This stage's chunks, as Megatron's schedule takes them.
        parallel: The layout and the process groups of this rank.
        cut: Partitioner for the sequences of `score`.
        around: Context that is active during a pass; inside it the chunks are the model to be scored.
        replay: A `router_replay_mode`. A reference always routes by itself.
    """

    def __init__(
        self,
        model: SequenceOf[torch.nn.Module],
        parallel: ParallelState,
        cut: BatchPartitioner,
        *,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        replay: str = "disabled",
    ):
        self.model, self.parallel, self.cut, self.around, self.replay = model, parallel, cut, around, replay

    def score(self, sequences: SequenceOf[Sequence], *, temperature: float | None = None) -> list[np.ndarray]:
        """Return the log-probs of the masked tokens of each sequence, float32 [T], 0 at all other tokens.

        All ranks pass the same sequences and receive the results of all of them. This is for a few sequences, such as probes; `logprobs` is
        for batches.

        Args:
            sequences: The sequences to score.
            temperature: Divides the logits; None for the sampling temperature of the run.
        """
        if not sequences:
            return []
        filled = partition_for_scoring([SequenceLengths(tuple(end - begin for begin, end in one.contexts)) for one in sequences], self.cut)
        micro_specs = filled[self.parallel.dp_rank]
        whole = [*sequences, *[sequences[0]] * sum(len(micro_spec.rows) for mine in filled for micro_spec in mine)]
        micro_batches = collate_specs(whole, micro_specs, self.cut.alignment)
        found: dict[int, np.ndarray] = {}
        scores = self.last_stage_logprobs(micro_batches, temperature=temperature)
        for micro_spec, micro, values in zip(micro_specs, micro_batches, scores, strict=False):
            found |= dict(zip(micro_spec.rows, micro.by_sequence(values), strict=True))
        scored = {i: v for part in collectives.all_gather_object(found if self.parallel.reports_its_rows else {}) for i, v in part.items()}
        return [sequence.scatter(scored[i]) for i, sequence in enumerate(sequences)]

    def logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """Return the log-probs of each micro-batch, float32 [C], on every rank of the model-parallel group."""
        return self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches))

    def old_logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """Return the old log-probs of each micro-batch, and under R2 the experts that each token was routed to.

        Returns:
            The log-probs as of `logprobs`, float32 [C] per micro-batch; and under `router_replay_mode` R2 the experts, int16 [T, MoE
            layers, k] per micro-batch, else None.
        """
        routing = RouterPass(replays=self.replay == "R3", records=self.replay == "R2")
        values = self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches, routing=routing))
        if self.replay != "R2":
            return values, None
        config: Any = self.model[0].config
        return values, routing.recorded(micro_batches, self.parallel, (sum(config.moe_layer_freq), config.moe_router_topk))

    def router_pass(self) -> RouterPass:
        """Return what the routers do in an ordinary pass: replay, or route by themselves."""
        return RouterPass(replays=self.replay != "disabled")

    def last_stage_logprobs(
        self, micro_batches: SequenceOf[MicroBatch], *, temperature: float | None = None, routing: RouterPass | None = None
    ) -> list[np.ndarray]:
        """Return the log-probs as of `logprobs`, on ranks of the last pipeline stage only; an empty list elsewhere.

        The loss needs them there and on no other stage.

        Args:
            micro_batches: The micro-batches of this data-parallel rank.
            temperature: Divides the logits; None for the sampling temperature of the run.
            routing: What the routers replay or record; None for an ordinary pass.

        Raises:
            RuntimeError: If the weights of the model are offloaded.
        """
        return self._read(micro_batches, lambda logprobs, _: logprobs, routing=routing, temperature=temperature, with_entropy=False)

    def last_stage_entropies(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """Return the entropies of each micro-batch in nats, float32 [C], on ranks of the last pipeline stage.

        The list is empty on other stages.
        """
        return self._read(micro_batches, lambda _, entropy: entropy, temperature=None, with_entropy=True)

    def _read(self, micro_batches: SequenceOf[MicroBatch], which: Callable, *, routing: RouterPass | None = None, **asked: Any) -> list:
        """Run the forward only.

        Args:
            micro_batches: The micro-batches of this data-parallel rank.
            which: Chooses from log-probs and entropies [c].
            routing: What the routers replay or record; None for an ordinary pass.
            asked: Further arguments of the model's forward.
        """

        def finish(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return self.whole(batch, local, which(logprobs, entropy))

        require_on_device(self.model)
        with self.around(), torch.no_grad(), _without_dropout(self.model):
            routing = routing or self.router_pass()
            return _run(self.model, micro_batches, finish, self.parallel, asked, routing=routing, trains=False)

    def whole(self, batch: MicroBatch, local: LocalBatch, values: torch.Tensor) -> np.ndarray:
        """Gather values [c] of the context-parallel ranks to float32 [C] on each of them. Collective.

        Args:
            batch: The micro-batch.
            local: This rank's part of it.
            values: Values at this rank's trained positions, [c].
        """
        whole = torch.zeros(len(batch.targets), device=self.parallel.device)
        whole[torch.from_numpy(local.trained).to(whole.device)] = values.detach().float()
        return collectives.add_(whole, self.parallel.cp_group).cpu().numpy()
