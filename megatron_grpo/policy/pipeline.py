"""One pass over a batch through Megatron-Core's forward-backward schedule, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_grpo.base import activity
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import Slope
from megatron_grpo.policy.router import RouterPass, routed, routers
from megatron_grpo.policy.stream import LocalBatch, to_local
from megatron_grpo.types import MicroBatch

# (micro-batch, its place, log-probs [c], entropies [c] or None) -> something of it. Called on the last stage only.
Reader = Callable[[MicroBatch, LocalBatch, torch.Tensor, "torch.Tensor | None"], Any]
# As a reader, but -> (loss, what to keep).
LossFunction = Callable[[MicroBatch, LocalBatch, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor, Any]"]
# (micro-batch, its place) -> what the head may know of the loss before it is computed; None: nothing.
SlopeOf = Callable[[MicroBatch, LocalBatch], "Slope | None"]


def train(
    model: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: LossFunction,
    parallel: ParallelState,
    *,
    with_entropy: bool,
    slope_of: SlopeOf,
    routing: RouterPass,
) -> list[Any]:
    """Forward and backward of every micro-batch; reduces gradients over ranks at the end. routing: what its routers are told.

    Returns what `loss` kept of each micro-batch, in order, on ranks of the last stage; an empty list elsewhere.
    """

    def finish(batch: MicroBatch, mine: LocalBatch, logprobs, entropy):
        value, kept = loss(batch, mine, logprobs, entropy)
        # The count is what Megatron would divide by; nothing here is divided (policy.optimizer drops it).
        return value, torch.ones([], dtype=torch.int, device=value.device), kept

    with torch.enable_grad():
        asked = dict(with_entropy=with_entropy, temperature=None)
        return _run(model, micro_batches, finish, parallel, asked, slope_of=slope_of, routing=routing, forward_only=False)


def read(
    model: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    reader: Reader,
    parallel: ParallelState,
    *,
    with_entropy: bool = False,
    temperature: float | None = None,
    routing: RouterPass,
) -> list[Any]:
    """Forward alone: what `reader` makes of each micro-batch, in order, on ranks of the last stage; an empty list elsewhere.

    temperature: divides the logits (default: the sampling temperature of the run).
    """
    with torch.no_grad(), _without_dropout(model):
        asked = dict(with_entropy=with_entropy, temperature=temperature)
        return _run(model, micro_batches, reader, parallel, asked, slope_of=lambda batch, mine: None, routing=routing, forward_only=True)


@contextmanager
def _without_dropout(model: Sequence[torch.nn.Module]) -> Iterator[None]:
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
    model, micro_batches, finish, parallel, asked: dict[str, Any], *, slope_of: SlopeOf, routing: RouterPass, forward_only: bool
) -> list[Any]:
    moe_layers = [router.place for router in routers(model)]
    local = [to_local(batch, parallel, moe_layers) for batch in micro_batches]

    def step(batches: Iterator[tuple[MicroBatch, LocalBatch]], chunk: torch.nn.Module):
        batch, mine = next(batches)
        activity.advance()
        routing.in_forward = mine.number
        output = chunk(mine, **asked, slope=slope_of(batch, mine))

        def of_output(output: torch.Tensor, non_loss_data: bool = False):
            return finish(batch, mine, output[0], output[1] if asked["with_entropy"] else None)

        return output, of_output

    iterators = [iter(list(zip(micro_batches, local, strict=True))) for _ in model]
    name = "scoring" if forward_only else "training"
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
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
