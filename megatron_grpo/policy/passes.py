"""Passes of a model over micro-batches, whatever the layout: Megatron-Core's schedule, and all that is asked without gradients."""

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
from megatron_grpo.batching.collate import collate_portions
from megatron_grpo.batching.split import BatchPartitioner, partition_for_scoring
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import Slope
from megatron_grpo.policy.memory_offload import refuse_if_away
from megatron_grpo.policy.packed_batch import LocalBatch, to_local
from megatron_grpo.policy.router import RouterPass, routed, routers
from megatron_grpo.types import MicroBatch, Sequence, SequenceLengths

# (micro-batch, its place) -> what the head may know of the loss before it is computed; None: nothing.
SlopeOf = Callable[[MicroBatch, LocalBatch], "Slope | None"]


def train(
    model: SequenceOf[torch.nn.Module], micro_batches: SequenceOf[MicroBatch], loss: Any, parallel: ParallelState, routing: RouterPass
) -> list[Any]:
    """Forward and backward of every micro-batch; reduces gradients over ranks at the end.

    loss: a `policy.step_loss.StepLoss`, called on the last stage alone. routing: what routers are told. Returns what `loss` kept of each
    micro-batch, in order, on ranks of the last stage; an empty list elsewhere.
    """

    def finish(batch: MicroBatch, mine: LocalBatch, logprobs, entropy):
        value, kept = loss(batch, mine, logprobs, entropy)
        # The count is what Megatron would divide by; nothing here is divided (policy.optimizer drops it).
        return value, torch.ones([], dtype=torch.int, device=value.device), kept

    with torch.enable_grad():
        asked = dict(with_entropy=loss.with_entropy, temperature=None)
        return _run(model, micro_batches, finish, parallel, asked, slope_of=loss.slope_of, routing=routing, trains=True)


@contextmanager
def _without_dropout(model: SequenceOf[torch.nn.Module]) -> Iterator[None]:
    """Two scorings of one text agree. (Adapters may have dropout, and a policy in training is in training mode.)"""
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
    """Megatron-Core refuses a microbatch_group_size_per_vp_stage above the number of micro-batches; a pass that scores may have few."""
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
    """asked: of the model's forward, besides the slope."""
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
    """Every method is collective: all ranks call it. model: this stage's chunks, as Megatron's schedule takes them."""

    def __init__(
        self,
        model: SequenceOf[torch.nn.Module],
        parallel: ParallelState,
        cut: BatchPartitioner,
        *,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        replay: str = "disabled",
    ):
        """around: holds while a pass runs; inside it the model is what is to be asked. replay: a `router_replay_mode`; a reference routes
        for itself."""
        self.model, self.parallel, self.cut, self.around, self.replay = model, parallel, cut, around, replay

    def score(self, sequences: SequenceOf[Sequence], *, temperature: float | None = None) -> list[np.ndarray]:
        """Log-probs of the masked tokens, float32 [T], 0 elsewhere. All ranks pass the same sequences, and all get all of them.

        temperature: instead of the sampling temperature of the run. For a few sequences, such as probes; `logprobs` is for batches.
        """
        if not sequences:
            return []
        filled = partition_for_scoring([SequenceLengths(tuple(end - begin for begin, end in one.contexts)) for one in sequences], self.cut)
        portions = filled[self.parallel.dp_rank]
        whole = [*sequences, *[sequences[0]] * sum(len(portion.rows) for mine in filled for portion in mine)]
        micro_batches = collate_portions(whole, portions, self.cut.alignment)
        found: dict[int, np.ndarray] = {}
        scores = self.last_stage_logprobs(micro_batches, temperature=temperature)
        for portion, micro, values in zip(portions, micro_batches, scores, strict=False):
            found |= dict(zip(portion.rows, micro.by_sequence(values), strict=True))
        scored = {
            i: v for part in collectives.all_gather_object(found if self.parallel.speaks_for_its_rows else {}) for i, v in part.items()
        }
        return [sequence.spread(scored[i]) for i, sequence in enumerate(sequences)]

    def logprobs(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """float32 [C] of each of this share's micro-batches, on every rank of the share."""
        return self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches))

    def anchors(self, micro_batches: SequenceOf[MicroBatch]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """As `logprobs`; and under R2 where each token was routed, int16 [T, MoE layers, k]."""
        routing = RouterPass(replays=self.replay == "R3", records=self.replay == "R2")
        values = self.parallel.from_last_stage(self.last_stage_logprobs(micro_batches, routing=routing))
        if self.replay != "R2":
            return values, None
        config: Any = self.model[0].config
        return values, routing.recorded(micro_batches, self.parallel, (sum(config.moe_layer_freq), config.moe_router_topk))

    def router_pass(self) -> RouterPass:
        """What the routers are told in an ordinary pass."""
        return RouterPass(replays=self.replay != "disabled")

    def last_stage_logprobs(
        self, micro_batches: SequenceOf[MicroBatch], *, temperature: float | None = None, routing: RouterPass | None = None
    ) -> list[np.ndarray]:
        """As `logprobs`, on ranks of the last pipeline stage, where the loss asks; an empty list elsewhere.

        temperature: divides the logits (default: the sampling temperature of the run).
        """
        return self._read(micro_batches, lambda logprobs, _: logprobs, routing=routing, temperature=temperature, with_entropy=False)

    def last_stage_entropies(self, micro_batches: SequenceOf[MicroBatch]) -> list[np.ndarray]:
        """float32 [C] of each micro-batch, in nats, on ranks of the last pipeline stage; an empty list elsewhere."""
        return self._read(micro_batches, lambda _, entropy: entropy, temperature=None, with_entropy=True)

    def _read(self, micro_batches: SequenceOf[MicroBatch], which: Callable, *, routing: RouterPass | None = None, **asked: Any) -> list:
        """Forward alone. which: of a micro-batch's log-probs and entropies [c]."""

        def finish(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return self.whole(batch, local, which(logprobs, entropy))

        refuse_if_away(self.model)
        with self.around(), torch.no_grad(), _without_dropout(self.model):
            routing = routing or self.router_pass()
            return _run(self.model, micro_batches, finish, self.parallel, asked, routing=routing, trains=False)

    def whole(self, batch: MicroBatch, local: LocalBatch, values: torch.Tensor) -> np.ndarray:
        """[c] on each context-parallel rank -> [C] on all of them."""
        whole = torch.zeros(len(batch.targets), device=self.parallel.device)
        whole[torch.from_numpy(local.trained).to(whole.device)] = values.detach().float()
        return collectives.add_(whole, self.parallel.cp_group).cpu().numpy()
