"""Which rank writes which piece of a sharded state dict, and `.metadata`, which says where each piece lies.

A piece is a box of a tensor, or an object. What several data-parallel ranks hold alike is dealt out among them, as Megatron-Core's
FullyParallelSaveStrategyWrapper does it: all of them write, each its share, and nothing is sent but names and sizes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from torch.distributed.checkpoint import metadata  # noqa: TID251 - the file format
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: TID251 - the file format

from megatron_grpo.parallel import collectives

Contents = torch.Tensor | bytes
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its shape


class Shard(NamedTuple):
    """A box of the tensor `key`; or the object `key`, which has no shape and no type."""

    key: str
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()  # the tensor's shape
    dtype: torch.dtype | None = None


class PlacedShard(NamedTuple):
    """A piece, and which bytes of its rank's file it is."""

    piece: Shard
    start: int
    length: int


class MissingShardError(ValueError):
    """The pieces of all ranks are not the whole: some element is in none of them, or in two."""


def pieces_of(state: dict[str, Any], mine: frozenset[int]) -> list[tuple[Shard, Contents]]:
    """What this rank writes. mine: names of what it writes of that which others may hold too, from `dealt`."""
    found: list[tuple[Shard, Contents]] = []
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedObject):
            if is_main_replica(leaf.replica_id):
                stream = io.BytesIO()
                torch.save([leaf.data], stream)  # a list, as Megatron-Core reads it
                found.append((Shard(leaf.unique_key), stream.getvalue()))
        elif name_of(leaf) in mine if _may_be_shared(leaf) else is_main_replica(leaf.replica_id):
            box = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
            piece = Shard(leaf.key, tuple(leaf.global_offset), box, tuple(leaf.global_shape), leaf.dtype)
            found.append((piece, leaf.data.detach().reshape(box)))
    return found


# ---- who writes what several hold --------------------------------------------------------------------------------------------------------


def dealt(state: dict[str, Any], group: Any) -> frozenset[int]:
    """Names of the tensors that this rank writes for the ranks of `group` that hold them too. Collective over the group.

    The largest first, each to the rank that has least to write. Where the main replica is in another group, that group writes.
    """
    held = [(name_of(leaf), leaf.data.nbytes, is_main_replica(leaf.replica_id)) for leaf in nested_values(state) if _may_be_shared(leaf)]
    return shares(collectives.all_gather_object(held, group))[collectives.place_in(group)]


def shares(held: Sequence[Sequence[tuple[int, int, bool]]]) -> list[frozenset[int]]:
    """held: of each rank, (name, bytes, whether it is the main replica) of what it has. Returns the names that each rank writes."""
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    main: set[int] = set()
    for rank, tensors in enumerate(held):
        for name, size, is_main in tensors:
            holders.setdefault(name, []).append(rank)
            sizes[name] = size
            if is_main:
                main.add(name)
    loads, given = [0] * len(held), [set[int]() for _ in held]
    for name in sorted(main, key=lambda name: (len(holders[name]), -sizes[name], name)):  # what few hold has the least choice
        rank = min(holders[name], key=loads.__getitem__)
        loads[rank] += sizes[name]
        given[rank].add(name)
    return [frozenset(names) for names in given]


def name_of(tensor: ShardedTensor) -> int:
    """The same on every rank that holds this box."""
    return int.from_bytes(blake2b(repr((tensor.key, tuple(tensor.global_offset))).encode(), digest_size=8).digest())


def _may_be_shared(leaf: Any) -> bool:
    """Boxes of a distributed optimizer, which fit no regular grid, are their rank's alone."""
    return isinstance(leaf, ShardedTensor) and leaf.has_regular_grid


# ---- .metadata ---------------------------------------------------------------------------------------------------------------------------


def metadata_of(files: Iterable[tuple[str, Sequence[PlacedShard]]]) -> bytes:
    """`.metadata`, as torch reads it. files: of each rank, the name of its file and what is in it. Raises Uncovered."""
    described: dict[str, Any] = {}
    storage: dict[metadata.MetadataIndex, _StorageInfo] = {}
    for file, pieces in files:
        for (key, offset, shape, whole, dtype), start, length in pieces:
            if dtype is None:
                index, described[key] = metadata.MetadataIndex(key), metadata.BytesStorageMetadata()
            else:
                index = metadata.MetadataIndex(key, offset)
                if key not in described:
                    described[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype), torch.Size(whole), [])
                described[key].chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            if index in storage:
                raise MissingShardError(f"{key} at {offset} was written by two ranks, in {storage[index].relative_path} and in {file}")
            storage[index] = _StorageInfo(file, start, length)
    for key, tensor in described.items():
        if isinstance(tensor, metadata.TensorStorageMetadata):
            require_whole(key, tuple(tensor.size), [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks])
    return pickle.dumps(metadata.Metadata(described, storage_data=storage))


def require_whole(key: str, whole: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises Uncovered unless each element of a tensor of shape `whole` is in exactly one box.

    torch's own check compares every box of a layer with those of all others: at 16,384 ranks that takes hours.
    """
    for offset, shape in boxes:
        if any(start < 0 or start + size > most for start, size, most in zip(offset, shape, whole, strict=True)):
            raise MissingShardError(f"{key} of shape {whole} has no {shape} at {offset}")
    held = sum(prod(shape) for _, shape in boxes)
    if held != prod(whole):
        raise MissingShardError(f"{key} of shape {whole} has {prod(whole)} elements, {held} were written")
    if both := _overlap(list(boxes), tuple(range(len(whole)))):
        raise MissingShardError(f"{key} was written twice where {both[0]} and {both[1]} meet")


def _overlap(boxes: list[Box], axes: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any. axes: those along which they may still be apart."""
    if len(boxes) < 2:
        return None
    if not axes:
        return boxes[0], boxes[1]
    axis, *rest = axes
    if all(shape[axis] == 1 for _, shape in boxes):  # layers, experts
        groups: dict[int, list[Box]] = {}
        for box in boxes:
            groups.setdefault(box[0][axis], []).append(box)
        return next(filter(None, (_overlap(group, tuple(rest)) for group in groups.values())), None)
    axis = max(axes, key=lambda axis: len({offset[axis] for offset, _ in boxes}))  # where most of them are apart
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        open_boxes = [other for other in open_boxes if other[0][axis] + other[1][axis] > box[0][axis]]
        for other in open_boxes:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other, strict=True)):
                return other, box
        open_boxes.append(box)
    return None
