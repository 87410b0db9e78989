"""What a distributed optimizer keeps on this rank, described for a checkpoint where it lies: nothing is gathered, nothing is copied.

Megatron-Core deals the elements of all weights out over the data-parallel ranks, in one flat row: this rank has a run of a weight's
elements, from the middle of one row of the matrix to the middle of another. A checkpoint knows boxes. A run is at most 2 d - 1 boxes of a
weight with d dimensions: the end of the first row, the whole rows, the beginning of the last. Each is a view of the optimizer's own memory:
it is written from there, and read into it. The names and shapes in the checkpoint are those of Megatron-Core's "fully reshardable" form,
whose own code gathers all of it on one rank first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_grpo.policy.adamw import AdamW

Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its shape


def kept_here(optimizer: DistributedOptimizer, described: Mapping[str, Any], *, is_loading: bool) -> Iterator[ShardedTensor]:
    """Main weights and moments of this rank in float32, box by box; views, so that loading into them loads the optimizer.

    Of those that an `AdamW` keeps in another dtype copies on the host; `AdamW.take_back` then keeps what was read into them.
    described: the sharded state dict of the optimizer's model chunks, with the parameters themselves in it.
    """
    if optimizer.is_stub_optimizer:  # nothing trains on this rank
        return
    weights = {id(leaf.data): leaf for leaf in nested_values(described) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))}
    for parameter, first, _, states in _runs(optimizer):
        leaf = weights[id(parameter)]
        if isinstance(optimizer.optimizer, AdamW):
            states = _in_float32(optimizer, parameter, states, is_loading=is_loading)
        for name, values in states.items():
            if name != "step":  # a count, and the same for all
                for part in _parts(leaf, f"optimizer.state.{name}.{leaf.key}", values.dtype):
                    yield from _boxes_of(part, values.detach(), first)


def _in_float32(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, states: dict[str, torch.Tensor], *, is_loading: bool
) -> dict[str, torch.Tensor]:
    """States that are kept in other dtypes, on the host: what they are, or room for what they will be."""
    inner: AdamW = optimizer.optimizer
    group, place = optimizer.model_param_group_index_map[parameter]
    shard = inner.param_groups[group]["params"][place]
    found = {}
    for name, values in states.items():
        own = "master_param" if name == "param" else name  # Megatron-Core's two words
        if not inner.is_kept_in_float32(shard, own):
            values = inner.lend(shard, own) if is_loading else values.cpu()
        found[name] = values
    return found


Run = tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor]]  # a weight; the first of its elements here, the first behind; its states


def runs_of(optimizer: Any) -> Iterator[Run]:
    """What a distributed optimizer keeps on this rank. optimizer: one, or a chain of them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:  # as where nothing trains on this rank
            yield from _runs(part)


def _runs(optimizer: DistributedOptimizer) -> Iterator[Run]:
    for ranges in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
            for parameter, places in bucket["param_map"].items():
                states = optimizer._get_main_param_and_optimizer_states(parameter)
                yield parameter, places["param"].start, places["param"].end, states


def _parts(leaf: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """The weight as the checkpoint has it, one tensor or several (the halves of a gated layer), without memory: views of nothing."""
    nothing = torch.empty(leaf.data.shape, dtype=dtype, device="meta")
    if isinstance(leaf, ShardedTensor):
        return [replace(leaf, key=key, data=nothing, dtype=dtype)]
    return list(nested_values({"parts": replace(leaf, key=key, data=nothing).build()}))


def _boxes_of(part: ShardedTensor, run: torch.Tensor, first: int) -> Iterator[ShardedTensor]:
    """What of `part` lies in a run of the weight's elements that begins at element `first`."""
    assert part.data is not None and part.data.is_contiguous(), f"{part.key} is not whole rows of its weight, so no box holds a run of it"
    begins, size = part.data.storage_offset(), part.data.numel()
    start, end = max(first, begins), min(first + len(run), begins + size)
    outer, at = part.prepend_axis_num, start - first
    for offset, shape in boxes(start - begins, end - begins, tuple(part.local_shape)):
        values, at = run[at : at + prod(shape)], at + prod(shape)
        inside = (a + b for a, b in zip(part.global_offset[outer:], offset, strict=True))
        shape = (1,) * outer + shape
        yield replace(
            part, data=values.view(shape), local_shape=shape, global_offset=(*part.global_offset[:outer], *inside), prepend_axis_num=0,
            axis_fragmentations=None, replica_id=(*part.replica_id[:2], 0),  # no other data-parallel rank has it
        )  # fmt: skip


def boxes(start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The elements from `start` up to `end` of an array, counted row by row, as boxes in the same order."""
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    top, bottom = -(-start // row), end // row  # the rows that are whole
    if top > bottom:  # a part of a single row
        yield from _in_row(bottom, start - bottom * row, end - bottom * row, shape)
        return
    yield from _in_row(top - 1, start - (top - 1) * row, row, shape)
    if top < bottom:
        yield (top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])
    yield from _in_row(bottom, 0, end - bottom * row, shape)


def _in_row(number: int, start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    for offset, inner in boxes(start, end, shape[1:]) if start < end else ():
        yield (number, *offset), (1, *inner)
