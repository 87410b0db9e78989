"""Finds out who made a gradient that the guard refused. Costs as much as the step did, so only after one that was refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.guard import Culprit
from megatron_grpo.policy.optimizer import own_norm
from megatron_grpo.types import RowKey, TrainingMicroBatch

MOST = 8  # micro-batches that a rank tells of
# (its place, micro-batch) -> its log-probs, float32 [C], on ranks of the last stage; None elsewhere. Leaves its gradient in the buffers.
RunAlone = Callable[[int, TrainingMicroBatch], "np.ndarray | None"]


def ranks_not_finite(own: torch.Tensor) -> tuple[int, ...]:
    """Ranks whose own gradient, of which `own` is the norm, was not finite. Collective."""
    return tuple(rank for rank, is_finite in enumerate(collectives.from_all(math.isfinite(float(own)))) if not is_finite)


def weights_not_finite(chunks: Sequence[torch.nn.Module]) -> tuple[tuple[int, str], ...]:
    """(rank, the first of its parameters that is not finite) of every rank that has one. Collective."""
    named = ((name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters())
    mine = next((name for name, parameter in named if not bool(torch.isfinite(parameter.detach()).all())), None)
    return tuple((rank, name) for rank, name in enumerate(collectives.from_all(mine)) if name is not None)


def search(
    wrapped: Sequence[Any],
    micro_batches: Sequence[TrainingMicroBatch],
    run_alone: RunAlone,
    parallel: ParallelState,
    *,
    references: Sequence[np.ndarray],
    finite: bool,
) -> tuple[Culprit, ...]:
    """Runs every micro-batch alone, without summing over ranks. Collective; the gradient buffers are left as they fall.

    references: the reference's log-probs by micro-batch, where it has any. finite: the gradient was finite, and the largest is wanted;
    else those that are not.
    """
    mine: list[_Told] = []
    for place, micro in enumerate(micro_batches):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        with _unsummed(wrapped):
            logprobs = run_alone(place, micro)
        rows, what = wrong_rows(micro, logprobs, references[place] if references else None) if logprobs is not None else ((), "")
        norm, dense = float(own_norm(wrapped)), float(own_norm(wrapped, with_experts=False))
        if finite or rows or not math.isfinite(norm):
            is_own = finite or bool(rows) or not math.isfinite(dense)
            mine.append(_Told(norm if math.isfinite(norm) else math.inf, place, is_own, rows or micro.rows, what))
    worst = sorted(mine, key=lambda told: -told.norm)[: 1 if finite else MOST]
    heard = [
        (told, share, rank) for rank, (share, its) in enumerate(collectives.from_all((parallel.dp_rank, worst))) for told in its
    ]  # by rank
    origins = {told.micro_batch for told, _, _ in heard if told.is_own}
    heard = [one for one in heard if one[0].is_own or one[0].micro_batch not in origins]
    if finite:
        heard = sorted(heard, key=lambda one: -one[0].norm)[:1]
    together: dict[tuple[int, int], list[tuple[_Told, int]]] = {}
    for told, share, rank in sorted(heard, key=lambda one: (one[0].micro_batch, one[1], one[2])):
        together.setdefault((told.micro_batch, share), []).append((told, rank))
    return tuple(_joined(told) for told in together.values())


class _Told(NamedTuple):
    """What a rank says of a micro-batch. is_own: more than gradients of experts, which are of other ranks' tokens too, is wrong there."""

    norm: float
    micro_batch: int
    is_own: bool
    rows: tuple[RowKey, ...]
    what: str


def _joined(told: Sequence[tuple[_Told, int]]) -> Culprit:
    """What the ranks of a share say of one micro-batch. The last stage alone knows which of its rows it was."""
    first = next((one for one, _ in told if one.what), told[0][0])
    norm, ranks = max(one.norm for one, _ in told), tuple(rank for _, rank in told)
    return Culprit(micro_batch=first.micro_batch, ranks=ranks, norm=norm, rows=first.rows, what=first.what)


def wrong_rows(micro: TrainingMicroBatch, logprobs: np.ndarray, reference: np.ndarray | None) -> tuple[tuple[RowKey, ...], str]:
    """Rows with a number that is not finite, and the name of that number. A NaN is no fault where it says that there is none."""
    numbers = {
        "the policy's log-probs": logprobs,
        "the reference's log-probs": reference,
        "advantages": micro.advantages,
        "token weights": micro.token_weights,
        "old log-probs": np.where(np.isnan(micro.old_logprobs), 0.0, micro.old_logprobs),
        "the sampler's log-probs": np.where(np.isnan(micro.sampler_logprobs), 0.0, micro.sampler_logprobs),
    }
    wrong = {name: ~np.isfinite(values) for name, values in numbers.items() if values is not None}
    names = [name for name, places in wrong.items() if places.any()]
    if not names:
        return (), ""
    places = np.unique(micro.sequence[np.any([wrong[name] for name in names], axis=0)])
    return tuple(micro.rows[place] for place in places.tolist()), " and ".join(names)


@contextmanager
def _unsummed(wrapped: Sequence[Any]) -> Iterator[None]:
    """Inside, a pass that trains leaves each rank its own gradient: nobody adds anything, neither behind it nor while it runs."""
    config = wrapped[0].config
    names = {"finalize_model_grads_func": None, "no_sync_func": None, "grad_sync_func": None, "param_sync_func": None}
    before = {name: getattr(config, name) for name in names}
    with ExitStack() as stack:
        for chunk in wrapped:
            stack.enter_context(chunk.no_sync())
        for name in names:
            setattr(config, name, nullcontext if name == "no_sync_func" else None)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)
