"""What of a policy goes into a checkpoint, described so that any other layout can read it.

Megatron-Core calls this a sharded state dict: every tensor carries its global name, global shape and this rank's place in it. Of the
optimizer it holds the tensors and the step count. The rest of the optimizer, such as its parameter groups, depends on the layout or is a
setting, and comes from the run that loads.

Of what a distributed optimizer keeps nothing is gathered, nothing is copied. Megatron-Core deals the elements of all weights out over the
data-parallel ranks, in one flat row: this rank has a run of a weight's elements, from the middle of one row of the matrix to the middle of
another. A checkpoint knows boxes. A run is at most 2 d - 1 boxes of a weight with d dimensions: the end of the first row, the whole rows,
the beginning of the last. Each is a view of the optimizer's own memory: it is written from there, and read into it. The names and shapes in
the checkpoint are those of Megatron-Core's "fully reshardable" form, whose own code gathers all of it on one rank first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_grpo.parallel import collectives
from megatron_grpo.policy.adamw import AdamW

REFERENCE = "reference."  # before the global names of a moving reference's tensors, which are the policy's
RESHARDABLE = {"chained_optim_avoid_prefix": True}  # dense and expert parameters have an optimizer each; their names are theirs alone
# A tensor for each layer, expert and half of a gated one. Megatron otherwise describes one over all layers, of whose moments a part would
# lack where some are frozen.
ONE_BY_ONE = {"singleton_local_shards": True}


def sharded_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, *, reference: Sequence[Any] | None = None, is_loading: bool
) -> dict[str, Any]:
    """The sharded state dict of this rank. Collective: every rank calls it.

    chunks: the model chunks of this stage (one, or `vpp` of them), each wrapped in Megatron's DistributedDataParallel or not.
    optimizer: a MegatronOptimizer; None leaves it out. scheduler: anything with `state_dict()`; None leaves it out.
    reference: chunks as `chunks`, but not wrapped; None leaves them out.
    is_loading: describe where to load to, instead of what to save. A distributed optimizer's part is loaded in place.
    """
    is_whole = _all_train(chunks)
    how = RESHARDABLE if is_whole else RESHARDABLE | ONE_BY_ONE
    models = {name: unwrapped(chunk).sharded_state_dict(metadata=dict(how)) for name, chunk in _named(chunks)}
    state: dict[str, Any] = {
        name: models[name] if is_whole else _what_trains(unwrapped(chunk), models[name]) for name, chunk in _named(chunks)
    }
    state = {name: without_extra_state(described) for name, described in state.items()}
    if optimizer is not None:
        # With a single chunk Megatron expects the chunk's own dict, not a dict of chunks.
        whole = models["model"] if len(chunks) == 1 else models
        _make_room(optimizer)
        if is_distributed(optimizer):
            kept = (box for part in chain(optimizer) for box in kept_here(part, whole, is_loading=is_loading))
            state["optimizer"] = {str(place): box for place, box in enumerate(kept)}
        else:
            described = optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=dict(how))
            state["optimizer"] = dict_list_map_inplace(_local_unless_sharded, described)
        state["optimizer_step"] = int(
            collectives.all_reduce_max(steps_counted(optimizer))
        )  # a stage without anything that trains counts none
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    for name, chunk in _named(reference or ()):
        described = without_extra_state(chunk.sharded_state_dict(metadata=dict(how)))
        add_prefix_for_sharding(described, REFERENCE)
        state[REFERENCE + name] = described
    return state


def load_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, state: dict[str, Any], *, reference: Sequence[Any] | None = None
) -> None:
    """Puts back what `megatron.core.dist_checkpointing.load` made of `sharded_state(..., is_loading=True)`. Collective."""
    is_whole = _all_train(chunks)
    for name, chunk in _named(chunks):
        _load_weights(unwrapped(chunk), state.get(name, {}), everything=is_whole)  # what is empty does not come back
    if optimizer is not None:
        if not is_distributed(optimizer):  # else it has been read in place, or into what was lent
            _load_optimizer(optimizer, state["optimizer"], state["optimizer_step"])
        for inner in rounding(optimizer):
            inner.take_back()
        share_rounded(optimizer, chunks)
        _count_steps(optimizer, state["optimizer_step"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    for name, chunk in _named(reference or ()):
        _load_weights(chunk, state[REFERENCE + name], everything=True)


EXTRA = re.compile(r"_extra_state\d*$")  # of grouped layers one for each expert


def without_extra_state(described: dict[str, Any]) -> dict[str, Any]:
    """Without what Transformer Engine's layers keep beside their weights: nothing, but under FP8 a pickle of the recipe, which the settings
    say as well. So a checkpoint is the same with its layers and with the local ones, and none is unpickled."""
    return {name: leaf for name, leaf in described.items() if not EXTRA.search(name)}


def _load_weights(module: Any, values: dict[str, Any], *, everything: bool) -> None:
    """everything: all tensors must be there, else those that train."""
    found = module.load_state_dict(values, strict=False)
    lost = {name for name in found.missing_keys if not EXTRA.search(name)}
    lost = lost if everything else lost & _trained(module)
    if found.unexpected_keys or lost:
        raise ValueError(f"a checkpoint that has been read lacks {sorted(lost)[:3]} and has {found.unexpected_keys[:3]} besides")


def _all_train(chunks: Sequence[Any]) -> bool:
    """Whether every weight of the model trains, on all stages. Collective."""
    return not collectives.all_reduce_max(any(not parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()))


def _what_trains(module: Any, described: dict[str, Any]) -> dict[str, Any]:
    """A model's part of a checkpoint where some of the model is frozen: what is not. The rest is in the model's own files."""
    trained = _trained(module)
    assert trained <= described.keys(), f"Megatron describes no {sorted(trained - described.keys())[:3]}"
    return {name: leaf for name, leaf in described.items() if name in trained}


def _trained(module: Any) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _local_unless_sharded(leaf: Any) -> Any:
    """Marks a value that is neither saved nor loaded: after loading it stands where it was, as it is in this run."""
    return leaf if isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) else LocalNonpersistentObject(leaf)


def _make_room(optimizer: Any) -> None:
    """Gives Adam its moments, all zero, before the first step. (Megatron forgets `step` of torch's Adam.)

    Where this rank owns nothing that trains, Megatron still asks for a count of steps; the key is no parameter, so it is nobody's.
    """
    for part in chain(optimizer):
        if isinstance(part.optimizer, AdamW):  # has them from the beginning
            continue
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _make_room_on_host(part.optimizer)
        elif isinstance(part.optimizer, torch.optim.Adam):  # AdamW is a kind of Adam
            if not any(group["params"] for group in part.optimizer.param_groups):
                part.optimizer.state["nothing trains here"] = {"step": torch.tensor(0.0)}  # type: ignore[index]  # no parameter
            _make_moments(part.optimizer)
        elif part.init_state_fn is not None and not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            if isinstance(optimizer, torch.optim.Adam):  # fused ones count in their groups
                optimizer.state[parameter]["step"] = torch.tensor(0.0)


def _make_room_on_host(optimizer: HybridDeviceOptimizer) -> None:
    """Of one whose parts are on the host, under `optimizer_cpu_offload`. (Megatron takes a step with random gradients for this.)

    It then says of each parameter where its float32 weight and its moments are; those that the parts themselves use, so what is read into
    them has been loaded.
    """
    for part in optimizer.sub_optimizers:
        _make_moments(part)
    optimizer._sync_sub_optimizers_state_to_hdo()


def _load_optimizer(optimizer: Any, state: dict[Any, Any], step: int) -> None:
    """`optimizer.load_state_dict` of one that is not distributed. Megatron-Core looks for torch's `step` among the tensors."""
    parts = chain(optimizer)
    states = [state] if len(parts) == 1 else [state[place] for place in range(len(parts))]
    for part, values in zip(parts, states, strict=True):
        if isinstance(part.optimizer, torch.optim.Adam):
            values.get("optimizer", values)["state"]["common_step"] = torch.tensor(float(step))
    optimizer.load_state_dict(state)


def _count_steps(optimizer: Any, step: int) -> None:
    """As many as the checkpoint counted. Megatron-Core gives all parameters one step tensor, which torch advances once for each of them."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            if "step" in group:  # where Transformer Engine and Apex count
                group["step"] = step
        for entry in inner.state.values():
            if isinstance(inner, torch.optim.Adam) or "step" in entry:
                entry["step"] = torch.tensor(float(step))


def steps_counted(optimizer: Any) -> int:
    """Steps that Adam has counted, for its bias correction; the same for all parameters.

    The highest count that is found: Megatron-Core leaves one in the parameter groups when it loads, which torch's Adam never advances.
    """
    places = (place for inner in torch_optimizers(optimizer) for place in [*inner.param_groups, *inner.state.values()])
    return max((int(place["step"]) for place in places if "step" in place), default=0)


def torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """What does the arithmetic; a hybrid one (`--optimizer_cpu_offload`) has parts on the GPU and on the host."""
    for part in chain(optimizer):
        if part.optimizer is not None:  # as where nothing trains on this rank
            yield part.optimizer
        yield from getattr(part.optimizer, "sub_optimizers", [])


def rounding(optimizer: Any) -> list[AdamW]:
    """What keeps its state in the dtypes of the settings, of `use_precision_aware_optimizer`."""
    return [inner for inner in torch_optimizers(optimizer) if isinstance(inner, AdamW)]


def share_rounded(optimizer: Any, wrapped: Sequence[Any]) -> None:
    """Each rank has what others keep of their share of the weights, where keeping them may have changed them. Collective."""
    if any(inner.rounds_weights for inner in rounding(optimizer)):
        for chunk in wrapped:
            chunk.start_param_sync(force_sync=True)


def is_distributed(optimizer: Any) -> bool:
    return all(isinstance(part, DistributedOptimizer) for part in chain(optimizer))


def chain(optimizer: Any) -> list[Any]:
    """Dense and expert parameters have an optimizer each, where there is expert parallelism."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def unwrapped(chunk: Any) -> Any:
    """Without Megatron's DistributedDataParallel, where there is one: a model that is only exported has none."""
    return getattr(chunk, "module", chunk)


def _named(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


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
