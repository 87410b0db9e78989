"""Assignment of the pieces of a sharded state dict to ranks, and `.metadata`, which records the position of each piece.

A piece is a box of a tensor, or an object. Tensors that several data-parallel ranks hold are divided among them, as in Megatron-Core's
FullyParallelSaveStrategyWrapper: every rank writes its share, and only names and sizes are exchanged.
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

from megatron_grpo.core.parallel import collectives

Contents = torch.Tensor | bytes
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


class Shard(NamedTuple):
    """A box of the tensor `key`; or the object `key`, which has no shape and no dtype.

    Args:
        global_shape: Global shape of the tensor.
    """

    key: str
    offset: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    global_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class PlacedShard(NamedTuple):
    """A piece, and its position in its rank's file in bytes."""

    piece: Shard
    start: int
    length: int


class MissingShardError(ValueError):
    """Error raised if the shards of all ranks do not cover a tensor exactly: some element is in none of them, or in two."""


def pieces_of(state: dict[str, Any], assigned_names: frozenset[int]) -> list[tuple[Shard, Contents]]:
    """Return the pieces that this rank writes, with their contents.

    Args:
        state: Sharded state dict.
        assigned_names: Names of the shared tensors that this rank writes, from `assigned_tensors`.
    """
    pieces: list[tuple[Shard, Contents]] = []
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedObject):
            if is_main_replica(leaf.replica_id):
                stream = io.BytesIO()
                torch.save([leaf.data], stream)  # in a list, as Megatron-Core expects
                pieces.append((Shard(leaf.unique_key), stream.getvalue()))
        elif name_of(leaf) in assigned_names if _may_be_shared(leaf) else is_main_replica(leaf.replica_id):
            box = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
            piece = Shard(leaf.key, tuple(leaf.global_offset), box, tuple(leaf.global_shape), leaf.dtype)
            pieces.append((piece, leaf.data.detach().reshape(box)))
    return pieces


# ---- dividing shared tensors -------------------------------------------------------------------------------------------------------------


def assigned_tensors(state: dict[str, Any], group: Any) -> frozenset[int]:
    """Return the names of the shared tensors that this rank writes. Collective over the group.

    Tensors are assigned to the rank with the least to write: those with the fewest holders first, then the largest. If the main replica
    is in another group, that group writes.

    Args:
        state: Sharded state dict.
        group: Process group of the ranks that may hold the same tensors; None for all ranks.
    """
    tensors = [(name_of(leaf), leaf.data.nbytes, is_main_replica(leaf.replica_id)) for leaf in nested_values(state) if _may_be_shared(leaf)]
    return divide_tensors(collectives.all_gather_object(tensors, group))[collectives.rank_in(group)]


def divide_tensors(tensors_of_ranks: Sequence[Sequence[tuple[int, int, bool]]]) -> list[frozenset[int]]:
    """Divide tensors among the ranks that hold them.

    Args:
        tensors_of_ranks: Per rank, (name, bytes, whether it is the main replica) of its tensors.

    Returns:
        The names that each rank writes.
    """
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    main: set[int] = set()
    for rank, tensors in enumerate(tensors_of_ranks):
        for name, size, is_rank_zero in tensors:
            holders.setdefault(name, []).append(rank)
            sizes[name] = size
            if is_rank_zero:
                main.add(name)
    loads, assigned_names = [0] * len(tensors_of_ranks), [set[int]() for _ in tensors_of_ranks]
    # Tensors with few holders first, because they have the least choice.
    for name in sorted(main, key=lambda name: (len(holders[name]), -sizes[name], name)):
        rank = min(holders[name], key=loads.__getitem__)
        loads[rank] += sizes[name]
        assigned_names[rank].add(name)
    return [frozenset(names) for names in assigned_names]


def name_of(tensor: ShardedTensor) -> int:
    """Return a 64-bit name of a box, equal on every rank that holds it.

    Args:
        tensor: Shard of a parameter or of optimizer state.
    """
    return int.from_bytes(blake2b(repr((tensor.key, tuple(tensor.global_offset))).encode(), digest_size=8).digest())


def _may_be_shared(leaf: Any) -> bool:
    """Return whether other ranks may hold the tensor. Boxes of a distributed optimizer, which fit no regular grid, belong to one rank."""
    return isinstance(leaf, ShardedTensor) and leaf.has_regular_grid


# ---- .metadata ---------------------------------------------------------------------------------------------------------------------------


def metadata_of(files: Iterable[tuple[str, Sequence[PlacedShard]]]) -> bytes:
    """Return the contents of `.metadata`, as torch reads it.

    Args:
        files: Per rank, the name of its file and the pieces in it.

    Raises:
        MissingShardError: If the pieces do not cover each tensor exactly once.
    """
    described: dict[str, Any] = {}
    storage: dict[metadata.MetadataIndex, _StorageInfo] = {}
    for file, pieces in files:
        for (key, offset, shape, global_shape, dtype), start, length in pieces:
            if dtype is None:
                index, described[key] = metadata.MetadataIndex(key), metadata.BytesStorageMetadata()
            else:
                index = metadata.MetadataIndex(key, offset)
                if key not in described:
                    described[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype), torch.Size(global_shape), [])
                described[key].chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
            if index in storage:
                raise MissingShardError(f"{key} at {offset} was written by two ranks, in {storage[index].relative_path} and in {file}")
            storage[index] = _StorageInfo(file, start, length)
    for key, tensor in described.items():
        if isinstance(tensor, metadata.TensorStorageMetadata):
            check_coverage(key, tuple(tensor.size), [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks])
    return pickle.dumps(metadata.Metadata(described, storage_data=storage))


def check_coverage(key: str, global_shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that each element of a tensor is in exactly one box.

    torch's own check compares every box of a layer with all others, which takes hours at 16,384 ranks.

    Args:
        key: Name of the tensor.
        global_shape: Shape of the tensor.
        boxes: Offset and shape of each box.

    Raises:
        MissingShardError: If an element is in no box or in two, or a box exceeds the tensor.
    """
    for offset, shape in boxes:
        if any(start < 0 or start + size > bound for start, size, bound in zip(offset, shape, global_shape, strict=True)):
            raise MissingShardError(f"{key} of shape {global_shape} cannot contain a shard of shape {shape} at {offset}")
    num_written = sum(prod(shape) for _, shape in boxes)
    if num_written != prod(global_shape):
        raise MissingShardError(f"{key} of shape {global_shape} has {prod(global_shape)} elements, but {num_written} were written")
    if overlap := _overlap(list(boxes), tuple(range(len(global_shape)))):
        raise MissingShardError(f"{key} has overlapping shards: {overlap[0]} and {overlap[1]}")


def _overlap(boxes: list[Box], axes: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Find two boxes that share an element.

    Args:
        axes: Axes along which boxes may still be disjoint.
    """
    if len(boxes) < 2:
        return None
    if not axes:
        return boxes[0], boxes[1]
    axis, *other_axes = axes
    if all(shape[axis] == 1 for _, shape in boxes):  # layers, experts
        groups: dict[int, list[Box]] = {}
        for box in boxes:
            groups.setdefault(box[0][axis], []).append(box)
        return next(filter(None, (_overlap(group, tuple(other_axes)) for group in groups.values())), None)
    axis = max(axes, key=lambda axis: len({offset[axis] for offset, _ in boxes}))  # the axis with the most distinct offsets
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        open_boxes = [open_box for open_box in open_boxes if open_box[0][axis] + open_box[1][axis] > box[0][axis]]
        for open_box in open_boxes:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *open_box, strict=True)):
                return open_box, box
        open_boxes.append(box)
    return None
