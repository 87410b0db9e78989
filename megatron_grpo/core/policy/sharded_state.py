"""State of a policy for a checkpoint, described so that any other layout can load it.

Megatron-Core calls this a sharded state dict: every tensor has its global name, its global shape and this rank's offset in it. Of the
optimizer it holds the tensors and the step count. The rest of the optimizer, such as its parameter groups, depends on the layout or is a
setting, and comes from the run that loads.

The state of a distributed optimizer is neither gathered nor copied. Megatron-Core distributes the elements of all weights over the
data-parallel ranks as one flat row: this rank has a run of a weight's elements, from the middle of one row of the matrix to the middle of
another. A checkpoint stores boxes. A run is at most 2 d - 1 boxes of a weight with d dimensions: the end of the first row, the whole rows,
the beginning of the last. Each box is a view of the optimizer's own memory, from which it is written and into which it is read. The names
and shapes in the checkpoint are those of Megatron-Core's "fully reshardable" form, whose own code gathers everything on one rank first.
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

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.adamw import AdamW

REFERENCE = "reference."  # prefix of the global names of a synced reference's tensors, which are otherwise the policy's names
RESHARDABLE = {"chained_optim_avoid_prefix": True}  # dense and expert parameters have an optimizer each, and their names do not collide
# One tensor for each layer, expert and half of a gated layer. Otherwise Megatron describes one tensor over all layers, whose moments would
# be incomplete if some layers are frozen.
ONE_BY_ONE = {"singleton_local_shards": True}


def sharded_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, *, reference: Sequence[Any] | None = None, is_loading: bool
) -> dict[str, Any]:
    """Return the sharded state dict of this rank. Collective.

    Args:
        chunks: The model chunks of this stage (one, or `vpp` of them), each wrapped in Megatron's DistributedDataParallel or not.
        optimizer: A MegatronOptimizer; None leaves it out.
        scheduler: Any object with `state_dict()`; None leaves it out.
        reference: Chunks of the reference, not wrapped; None leaves them out.
        is_loading: Describe where to load to, instead of what to save. The state of a distributed optimizer is then loaded in place.
    """
    is_whole = _all_train(chunks)
    options = RESHARDABLE if is_whole else RESHARDABLE | ONE_BY_ONE
    models = {name: unwrapped(chunk).sharded_state_dict(metadata=dict(options)) for name, chunk in _named(chunks)}
    state: dict[str, Any] = {
        name: models[name] if is_whole else _what_trains(unwrapped(chunk), models[name]) for name, chunk in _named(chunks)
    }
    state = {name: without_extra_state(described) for name, described in state.items()}
    if optimizer is not None:
        # With a single chunk Megatron expects the chunk's own dict, not a dict of chunks.
        model_state = models["model"] if len(chunks) == 1 else models
        _allocate_moments(optimizer)
        if is_distributed(optimizer):
            parts = (box for part in chain(optimizer) for box in local_optimizer_state(part, model_state, is_loading=is_loading))
            state["optimizer"] = {str(index): box for index, box in enumerate(parts)}
        else:
            described = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=dict(options))
            state["optimizer"] = dict_list_map_inplace(_local_unless_sharded, described)
        state["optimizer_step"] = int(
            collectives.all_reduce_max(steps_counted(optimizer))
        )  # a stage without anything that trains counts none
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    for name, chunk in _named(reference or ()):
        described = without_extra_state(chunk.sharded_state_dict(metadata=dict(options)))
        add_prefix_for_sharding(described, REFERENCE)
        state[REFERENCE + name] = described
    return state


def load_state(
    chunks: Sequence[Any], optimizer: Any, scheduler: Any, state: dict[str, Any], *, reference: Sequence[Any] | None = None
) -> None:
    """Load the state that `megatron.core.dist_checkpointing.load` returned for `sharded_state(..., is_loading=True)`. Collective.

    Args:
        chunks: The model chunks of this stage, as for `sharded_state`.
        optimizer: A MegatronOptimizer; None if it was left out.
        scheduler: Any object with `load_state_dict()`; None if it was left out.
        reference: Chunks of the reference; None if they were left out.

    Raises:
        ValueError: If a weight is missing from the state, or the state has others.
    """
    is_whole = _all_train(chunks)
    for name, chunk in _named(chunks):
        _load_weights(unwrapped(chunk), state.get(name, {}), everything=is_whole)  # an empty entry is missing after loading
    if optimizer is not None:
        if not is_distributed(optimizer):  # else its state was read in place, or into the buffers of `AdamW.lend`
            _load_optimizer(optimizer, state["optimizer"], state["optimizer_step"])
        for inner in rounding(optimizer):
            inner.take_back()
        share_rounded(optimizer, chunks)
        _count_steps(optimizer, state["optimizer_step"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])
    for name, chunk in _named(reference or ()):
        _load_weights(chunk, state[REFERENCE + name], everything=True)


EXTRA = re.compile(r"_extra_state\d*$")  # grouped layers have one for each expert


def without_extra_state(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description without the extra state of Transformer Engine's layers.

    The extra state is empty, except under FP8: then it is a pickle of the recipe, which the settings contain too. Without it a checkpoint
    is the same with Transformer Engine's layers and with the local ones, and no pickle is loaded.
    """
    return {name: leaf for name, leaf in described.items() if not EXTRA.search(name)}


def _load_weights(module: Any, values: dict[str, Any], *, everything: bool) -> None:
    """Load the weights of a module.

    Args:
        everything: All tensors must be present; otherwise those that train.

    Raises:
        ValueError: If a required tensor is missing or an unknown one is present.
    """
    result = module.load_state_dict(values, strict=False)
    missing = {name for name in result.missing_keys if not EXTRA.search(name)}
    missing = missing if everything else missing & _trained(module)
    if result.unexpected_keys or missing:
        raise ValueError(f"the loaded checkpoint lacks {sorted(missing)[:3]} and has unexpected {result.unexpected_keys[:3]}")


def _all_train(chunks: Sequence[Any]) -> bool:
    """Return whether every weight of the model trains, on all stages. Collective."""
    return not collectives.all_reduce_max(any(not parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()))


def _what_trains(module: Any, described: dict[str, Any]) -> dict[str, Any]:
    """Return the trained part of a model's description, if some of the model is frozen. The rest is in the model's own files."""
    trained = _trained(module)
    assert trained <= described.keys(), f"Megatron's sharded state dict lacks {sorted(trained - described.keys())[:3]}"
    return {name: leaf for name, leaf in described.items() if name in trained}


def _trained(module: Any) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def _local_unless_sharded(leaf: Any) -> Any:
    """Mark a value that is neither saved nor loaded: after loading, the state has this run's value in its position."""
    return leaf if isinstance(leaf, (ShardedBase, LocalNonpersistentObject)) else LocalNonpersistentObject(leaf)


def _allocate_moments(optimizer: Any) -> None:
    """Allocate Adam's moments, all zero, before the first step.

    If no trained parameter belongs to this rank, Megatron still asks for a step count; its key is no parameter. Megatron omits `step` for
    torch's Adam.
    """
    for part in chain(optimizer):
        if isinstance(part.optimizer, AdamW):  # allocates them at construction
            continue
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _allocate_moments_on_host(part.optimizer)
        elif isinstance(part.optimizer, torch.optim.Adam):  # torch's AdamW is a subclass
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


def _allocate_moments_on_host(optimizer: HybridDeviceOptimizer) -> None:
    """Allocate the moments of an optimizer on the host, under `optimizer_cpu_offload`.

    It then maps each parameter to its float32 weight and its moments. These are the tensors that the parts use, so reading into them loads
    the optimizer. Megatron's own code takes a step with random gradients instead.
    """
    for part in optimizer.sub_optimizers:
        _make_moments(part)
    optimizer._sync_sub_optimizers_state_to_hdo()


def _load_optimizer(optimizer: Any, state: dict[Any, Any], step: int) -> None:
    """Load an optimizer that is not distributed. Megatron-Core looks for torch's `step` among the tensors."""
    parts = chain(optimizer)
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, values in zip(parts, states, strict=True):
        if isinstance(part.optimizer, torch.optim.Adam):
            values.get("optimizer", values)["state"]["common_step"] = torch.tensor(float(step))
    optimizer.load_state_dict(state)


def _count_steps(optimizer: Any, step: int) -> None:
    """Set Adam's step counts to that of the checkpoint.

    Megatron-Core gives all parameters one step tensor, which torch would advance once for each of them.

    The FusedAdam of Transformer Engine and of Apex counts in its groups, and a new one has no count there until its first step. A hybrid
    optimizer copies its groups into its parts before every step, so a count in them would replace that of a FusedAdam.
    """
    for inner in torch_optimizers(optimizer):
        counts_in_groups = not isinstance(inner, (torch.optim.Adam, HybridDeviceOptimizer))
        for group in inner.param_groups:
            group.pop("step", None)
            if counts_in_groups:
                group["step"] = step
        for entry in inner.state.values():
            if isinstance(inner, torch.optim.Adam) or "step" in entry:
                entry["step"] = torch.tensor(float(step))


def steps_counted(optimizer: Any) -> int:
    """Return the number of steps that Adam has counted for its bias correction; the same for all parameters.

    It is the highest count found: when Megatron-Core loads, it leaves a count in the parameter groups, which torch's Adam never advances.
    """
    holders = (holder for inner in torch_optimizers(optimizer) for holder in [*inner.param_groups, *inner.state.values()])
    return max((int(holder["step"]) for holder in holders if "step" in holder), default=0)


def torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the inner optimizers, which do the arithmetic.

    A hybrid one (`--optimizer_cpu_offload`) has parts on the GPU and on the host, which are yielded too.
    """
    for part in chain(optimizer):
        if part.optimizer is not None:  # None if nothing trains on this rank
            yield part.optimizer
        yield from getattr(part.optimizer, "sub_optimizers", [])


def rounding(optimizer: Any) -> list[AdamW]:
    """Return the inner optimizers that store state in the dtypes of the settings (`use_precision_aware_optimizer`)."""
    return [inner for inner in torch_optimizers(optimizer) if isinstance(inner, AdamW)]


def share_rounded(optimizer: Any, wrapped: Sequence[Any]) -> None:
    """Gather the weights of other ranks again if storing main weights may have rounded them. Collective."""
    if any(inner.rounds_weights for inner in rounding(optimizer)):
        for chunk in wrapped:
            chunk.start_param_sync(force_sync=True)


def is_distributed(optimizer: Any) -> bool:
    """Return whether every part is a distributed optimizer."""
    return all(isinstance(part, DistributedOptimizer) for part in chain(optimizer))


def chain(optimizer: Any) -> list[Any]:
    """Return the parts of an optimizer. With expert parallelism dense and expert parameters have one each."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def unwrapped(chunk: Any) -> Any:
    """Return the chunk without Megatron's DistributedDataParallel; a model that is only exported is not wrapped."""
    return getattr(chunk, "module", chunk)


def _named(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


Box = tuple[tuple[int, ...], tuple[int, ...]]  # its offset, and its shape


def local_optimizer_state(optimizer: DistributedOptimizer, described: Mapping[str, Any], *, is_loading: bool) -> Iterator[ShardedTensor]:
    """Yield this rank's main weights and moments in float32, box by box, as views: loading into them loads the optimizer.

    State that an `AdamW` stores in another dtype is yielded as a copy on the host; after loading, `AdamW.take_back` stores it.

    Args:
        is_loading: Describe where to load to, instead of what to save.
    """
    if optimizer.is_stub_optimizer:  # nothing trains on this rank
        return
    weights = {id(leaf.data): leaf for leaf in nested_values(described) if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))}
    for parameter, first, _, states in _runs(optimizer):
        leaf = weights[id(parameter)]
        if isinstance(optimizer.optimizer, AdamW):
            states = _in_float32(optimizer, parameter, states, is_loading=is_loading)
        for name, values in states.items():
            if name != "step":  # a count, the same for all parameters
                for part in _parts(leaf, f"optimizer.state.{name}.{leaf.key}", values.dtype):
                    yield from _split_into_boxes(part, values.detach(), first)


def _in_float32(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, states: dict[str, torch.Tensor], *, is_loading: bool
) -> dict[str, torch.Tensor]:
    """Return states in float32. Those stored in another dtype are on the host: a copy, or a buffer to load into."""
    inner: AdamW = optimizer.optimizer
    group, index = optimizer.model_param_group_index_map[parameter]
    shard = inner.param_groups[group]["params"][index]
    result = {}
    for name, values in states.items():
        state_name = "master_param" if name == "param" else name  # Megatron-Core's two words
        if inner.state[shard][state_name].dtype is not torch.float32:
            values = inner.lend(shard, state_name) if is_loading else values.cpu()
        result[name] = values
    return result


Run = tuple[torch.nn.Parameter, int, int, dict[str, torch.Tensor]]  # a weight; the start and end of its elements on this rank; its states


def iterate_runs(optimizer: Any) -> Iterator[Run]:
    """Yield the runs of weights that a distributed optimizer holds on this rank, with their states."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:  # a stub if nothing trains on this rank
            yield from _runs(part)


def _runs(optimizer: DistributedOptimizer) -> Iterator[Run]:
    for ranges in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
            for parameter, spans in bucket["param_map"].items():
                states = optimizer._get_main_param_and_optimizer_states(parameter)
                yield parameter, spans["param"].start, spans["param"].end, states


def _parts(leaf: ShardedTensor | ShardedTensorFactory, key: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """Return the weight's tensors in the checkpoint, without memory: one, or several for the halves of a gated layer."""
    empty = torch.empty(leaf.data.shape, dtype=dtype, device="meta")
    if isinstance(leaf, ShardedTensor):
        return [replace(leaf, key=key, data=empty, dtype=dtype)]
    return list(nested_values({"parts": replace(leaf, key=key, data=empty).build()}))


def _split_into_boxes(part: ShardedTensor, run: torch.Tensor, first: int) -> Iterator[ShardedTensor]:
    """Yield the boxes of `part` that lie in a run of the weight's elements.

    Args:
        first: Index in the weight of the first element of the run.
    """
    assert part.data is not None and part.data.is_contiguous(), f"{part.key} is not a set of whole rows of its weight"
    begins, size = part.data.storage_offset(), part.data.numel()
    start, end = max(first, begins), min(first + len(run), begins + size)
    outer, offset_in_run = part.prepend_axis_num, start - first
    for offset, shape in boxes(start - begins, end - begins, tuple(part.local_shape)):
        values, offset_in_run = run[offset_in_run : offset_in_run + prod(shape)], offset_in_run + prod(shape)
        inner_offset = (a + b for a, b in zip(part.global_offset[outer:], offset, strict=True))
        shape = (1,) * outer + shape
        yield replace(
            part, data=values.view(shape), local_shape=shape, global_offset=(*part.global_offset[:outer], *inner_offset),
            prepend_axis_num=0, axis_fragmentations=None, replica_id=(*part.replica_id[:2], 0),  # no other data-parallel rank has it
        )  # fmt: skip


def boxes(start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes that cover a run of an array's elements, in the order of the elements.

    Args:
        start: First element, in row-major order.
        shape: Shape of the array.
    """
    if start >= end:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    top, bottom = -(-start // row), end // row  # the whole rows
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
