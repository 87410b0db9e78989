"""One global batch through Megatron-Core's forward-backward schedule, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.stream import LocalBatch, to_local
from megatron_grpo.types import MicroBatch

# (micro-batch, its place, log-probs [c], entropies [c] or None) -> (loss, what to keep). Called on the last stage only.
LossFunction = Callable[[MicroBatch, LocalBatch, torch.Tensor, "torch.Tensor | None"], "tuple[torch.Tensor, Any]"]


def run(
    model: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: LossFunction,
    parallel: ParallelState,
    *,
    with_entropy: bool,
    forward_only: bool,
    temperature: float | None = None,
) -> list[Any]:
    """Runs every micro-batch; with `forward_only` false also its backward, and reduces gradients over ranks at the end.

    temperature: divides the logits (default: the sampling temperature of the run).
    Returns what `loss` kept of each micro-batch, in order, on ranks of the last stage; an empty list elsewhere.
    """
    local = [to_local(batch, parallel) for batch in micro_batches]

    def step(batches: Iterator[tuple[MicroBatch, LocalBatch]], chunk: torch.nn.Module):
        batch, mine = next(batches)
        output = chunk(mine, with_entropy=with_entropy, temperature=temperature)

        def finish(output: torch.Tensor):
            value, kept = loss(batch, mine, output[0], output[1] if with_entropy else None)
            # The count is what Megatron would divide by; nothing here is divided (policy.optimizer drops it).
            return value, torch.ones([], dtype=torch.int, device=value.device), kept

        return output, finish

    iterators = [iter(list(zip(micro_batches, local, strict=True))) for _ in model]
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=list(model),
            num_microbatches=len(micro_batches),
            # Lengths vary and are sent ahead of the data; the schedule only checks these against the layout.
            seq_length=max(batch.num_tokens for batch in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )
