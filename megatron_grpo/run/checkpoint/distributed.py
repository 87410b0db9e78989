"""The sharded part of a checkpoint in Megatron-Core's `torch_dist` format, written in this process, with errors raised on every rank.

Megatron-Core's own writer starts a manager process and forks writers; it gathers the description of every rank on every rank, and again
on rank 0 at each save. The files here are identical. They are staged in host memory, hashed while they are written, and optionally
written in a thread of this process. No process is started: a process unknown to the launcher survives a killed run, and forking a process
that holds an engine and collective threads is unsafe. The thread does not communicate with other ranks; all agreement between ranks
happens between steps.

A piece is a box of a tensor, or an object. Tensors that several data-parallel ranks hold are divided among them, as in Megatron-Core's
FullyParallelSaveStrategyWrapper: every rank writes its share, and only names and sizes are exchanged. `.metadata` records the position of
each piece.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, ReadItem, metadata  # noqa: TID251 - the file format
from torch.distributed.checkpoint.api import CheckpointException  # noqa: TID251 - the file format
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: TID251 - the file format
from torch.distributed.checkpoint.planner import LoadItemType  # noqa: TID251 - the file format

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.parallel import collectives

ALIGNMENT = 64  # bytes, of a tensor in staged memory
CHUNK = 256 << 20  # bytes of host memory allocated at once; torch rounds pinned allocations up to a power of two
Contents = torch.Tensor | bytes
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape
Entry = Mapping[str, Any]  # a file in a manifest: {"bytes": size, "sha256": digest}
# Exceptions of writing and reading. torch's CheckpointException is a BaseException; torch.save reports a full disk as RuntimeError.
FAILURES = (OSError, RuntimeError, ValueError, KeyError, CheckpointException, CheckpointingException)


class CheckpointError(RunError):
    """Error raised if a checkpoint cannot be written or read: on every rank, with the errors of all ranks."""


@contextmanager
def errors_on_all_ranks(action: str) -> Iterator[None]:
    """Raise CheckpointError on all ranks if the `with` block fails on any of them. Collective.

    Without it, the other ranks would wait in a collective. Inside the block no rank may wait for another, unless the called function
    propagates errors to all ranks.
    """
    problem, cause = None, None
    try:
        yield
    except FAILURES as error:
        problem, cause = _describe(error), error
    if collectives.all_reduce_max(problem is not None):
        problems = collectives.all_gather_object(problem)
        # An error that torch has already sent to all ranks names its rank and is the same everywhere: report it once.
        texts = [text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        raise CheckpointError(f"{action}: {'; '.join(dict.fromkeys(texts))}") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFiles:
    """Files that this rank has written.

    Args:
        files: Size and digest of each file, by name.
        file: Name of the file with the sharded state; "" if this rank has none.
        placed: Position of each piece in that file.
    """

    files: dict[str, Entry]
    file: str
    placed: list[PlacedShard]


class ShardedWriter:
    """Writer of a run's sharded state dicts. Each rank writes its share; unchanged descriptions are not sent again.

    Args:
        group: Process group of the ranks that may hold the same state as this rank, and share the writing of it; None for all ranks.
        staged: Whether the state is copied first, so that writing can continue during training.
    """

    def __init__(self, group: Any = None, *, staged: bool = False):
        self._group = group
        self._staging = Staging() if staged else None
        self._mine: frozenset[int] | None = None  # names of shared tensors that this rank writes; constant over the run
        self._known: list[PlacedShard] | None = None  # the placement that rank 0 has received
        self._metadata = b""

    def capture(self, state: dict[str, Any], other_files: dict[str, bytes]) -> Callable[[Path], WrittenFiles]:
        """Capture the current state, and return a function that writes it into a directory without communication. Collective.

        With `staged` the model may change before the function runs.
        """
        with errors_on_all_ranks("describing the model and optimizer"):
            sharded, common = save_preprocess(state, validate_access_integrity=False)  # `serialize_metadata` checks integrity, on one rank
        if self._mine is None:
            self._mine = assigned_tensors(sharded, self._group)
        with errors_on_all_ranks("copying the model and optimizer"):
            pieces = list_pieces(sharded, self._mine)
            if self._staging is not None:
                pieces = self._staging.copies(pieces)
            if collectives.rank() == 0:
                stream = io.BytesIO()
                torch.save(common, stream)
                config_json = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
                other_files = {"common.pt": stream.getvalue(), "metadata.json": config_json, **other_files}
        return partial(_write, pieces, other_files, rank=collectives.rank())

    def gather_files(self, written: WrittenFiles) -> Callable[[Path], dict[str, Entry]] | None:
        """Gather the files of all ranks on rank 0. Collective.

        Returns:
            On rank 0, a function that writes `.metadata` and returns the files of all ranks; None elsewhere.
        """
        is_new = bool(collectives.all_reduce_max(written.placed != self._known))
        parts = collectives.gather_object(written if is_new else replace(written, placed=[]))
        self._known = written.placed
        return None if parts is None else partial(self._write_metadata, parts, is_new=is_new)

    def _write_metadata(self, parts: Sequence[WrittenFiles], directory: Path, *, is_new: bool) -> dict[str, Entry]:
        if is_new:
            self._metadata = serialize_metadata([(part.file, part.placed) for part in parts])
        files = {name: entry for part in parts for name, entry in part.files.items()}
        return files | {".metadata": write_file(directory / ".metadata", self._metadata)}


def _write(pieces: Sequence[tuple[Shard, Contents]], other_files: dict[str, bytes], directory: Path, *, rank: int) -> WrittenFiles:
    files, file, placed = {}, f"__{rank}_0.distcp" if pieces else "", list[PlacedShard]()
    if pieces:
        files[file], placed = write_pieces(directory / file, pieces)
    files |= {name: write_file(directory / name, contents) for name, contents in other_files.items()}
    return WrittenFiles(files=files, file=file, placed=placed)


def read_sharded(state: dict[str, Any], directory: Path, *, partly: bool = False) -> dict[str, Any]:
    """Load a checkpoint into the tensors of `state`, under any parallel layout. Collective.

    Args:
        partly: Whether the checkpoint may contain more than `state`, for example the optimizer.

    Returns:
        The loaded state dict.

    Raises:
        CheckpointError: On every rank, if entries are missing, or left over (unless `partly`), or reading fails on any rank.
    """
    from megatron_grpo.run.checkpoint.safe_unpickle import refuse_extra_state, without_code_execution

    with errors_on_all_ranks(f"loading {directory} into this model"), without_code_execution(directory):
        needed_here = {leaf.key for leaf in nested_values(load_preprocess(state)[0]) if isinstance(leaf, ShardedBase)}
        stored = sorted({part.key for part in load_sharded_metadata(str(directory)).values()})
    if collectives.all_reduce_max(not needed_here <= set(stored)):
        raise CheckpointError(f"it lacks {_shorten(set().union(*collectives.all_gather_object(needed_here - set(stored))))}")
    # "_extra_state" is extra state of Transformer Engine's layers: empty unless they compute in FP8.
    is_needed = [name in needed_here or name.endswith("_extra_state") for name in stored]
    left_over = {name for name, is_wanted in zip(stored, collectives.all_reduce_any(is_needed), strict=True) if not is_wanted}
    if left_over and not partly:
        raise CheckpointError(f"it has unexpected entries: {_shorten(left_over)}")
    with errors_on_all_ranks(f"loading {directory} into this model"), without_code_execution(directory):
        with _reads_counted():
            loaded = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_UNEXPECTED, validate_access_integrity=False)
        refuse_extra_state(loaded)
        return loaded


@contextmanager
def _reads_counted() -> Iterator[None]:
    """Count the tensors that torch reads inside the block, which reports nothing until all are read."""
    readers: Any = FileSystemReader
    read_data = readers.read_data

    def counted(reader: FileSystemReader, plan: LoadPlan, planner: Any) -> Any:
        resolve = planner.resolve_tensor  # called once for each tensor, when it is read

        def resolved(item: ReadItem) -> torch.Tensor:
            activity.advance()
            return resolve(item)

        planner.resolve_tensor = resolved
        with activity.phase("restoring", total=sum(item.type is LoadItemType.TENSOR for item in plan.items), unit="tensors"):
            return read_data(reader, plan, planner)

    readers.read_data = counted
    try:
        yield
    finally:
        readers.read_data = read_data


def _shorten(names: set[str]) -> str:
    listed = sorted(names)[:2]
    return ", ".join(listed) + (f" and {len(names) - len(listed)} more" if len(names) > len(listed) else "")


def _describe(error: BaseException) -> str:
    """Return one line about an error. For torch's CheckpointException, whose text is `ranks:dict_keys([0])`, describe the errors inside."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_describe(inner)}" for rank, (inner, _) in error.failures.items())
    # torch's zip writer, closed on a full disk, hides the OSError behind RuntimeErrors about an unexpected position.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__ if isinstance(cause, RuntimeError) else None
    error = cause or error
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -- writing files -------------------------------------------------------------------------------------------------------------------------


class HashedFile(io.BufferedWriter):
    """A new file that is hashed while it is written.

    At the end of the `with` block the file is on disk, and `entry` has its size and SHA-256; nothing is read back.
    """

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self._digest = hashlib.sha256()
        self.entry: Entry = {}

    def write(self, data: Any) -> int:
        """Append bytes. Return their number.

        Args:
            data: Bytes or a buffer of them.
        """
        self._digest.update(data)
        return super().write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with closing(self):
            if error is None:
                self.flush()
                os.fsync(self.fileno())
                self.entry = {"bytes": self.tell(), "sha256": self._digest.hexdigest()}


def write_file(path: Path, contents: bytes) -> Entry:
    """Write a file, creating its directory if necessary.

    Returns:
        Size and digest of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        file.write(contents)
    return file.entry


def write_pieces(path: Path, pieces: Sequence[tuple[Shard, Contents]]) -> tuple[Entry, list[PlacedShard]]:
    """Write one rank's file of a sharded state dict: its pieces one after another, in the format of torch's writer.

    Returns:
        Size and digest of the file, and the position of each piece.
    """
    placed, is_main_thread = [], threading.current_thread() is threading.main_thread()  # a save in the background is no phase of the run
    phase = activity.phase("saving", total=len(pieces), unit="tensors") if is_main_thread else nullcontext()
    with HashedFile(path) as file, phase:
        for piece, contents in pieces:
            start = file.tell()
            if isinstance(contents, bytes):
                file.write(contents)
            else:
                torch.save(_alone(contents), file)
            placed.append(PlacedShard(piece, start, file.tell() - start))
            if is_main_thread:
                activity.advance()
    return file.entry, placed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host without the rest of its storage, because torch saves whole storages."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Staging:
    """Host memory for the state that this rank writes, allocated at the first save and reused."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copies(self, pieces: Sequence[tuple[Shard, Contents]]) -> list[tuple[Shard, Contents]]:
        """Copy pieces to host memory, bit for bit. The copies are complete on return and independent of the model.

        They are valid until the next call.
        """
        sizes = [-(-contents.nbytes // ALIGNMENT) * ALIGNMENT if isinstance(contents, torch.Tensor) else 0 for _, contents in pieces]
        remaining, chunk, offset, copied = sum(sizes), 0, 0, []
        on_device = False
        for (piece, contents), size in zip(pieces, sizes, strict=True):
            if isinstance(contents, torch.Tensor):
                on_device |= contents.is_cuda
                while chunk < len(self._chunks) and offset + size > len(self._chunks[chunk]):
                    chunk, offset = chunk + 1, 0
                if chunk == len(self._chunks):
                    self._chunks.append(torch.empty(max(size, min(remaining, CHUNK)), dtype=torch.uint8, pin_memory=contents.is_cuda))
                view = self._chunks[chunk][offset : offset + contents.nbytes].view(contents.dtype).view(contents.shape)
                contents, offset, remaining = view.copy_(contents, non_blocking=True), offset + size, remaining - size
            copied.append((piece, contents))
        if on_device:
            torch.cuda.synchronize()
        return copied


# -- the pieces of a state dict ------------------------------------------------------------------------------------------------------------


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


def list_pieces(state: dict[str, Any], assigned_names: frozenset[int]) -> list[tuple[Shard, Contents]]:
    """Return the pieces that this rank writes, with their contents.

    Args:
        assigned_names: Names of the shared tensors that this rank writes, from `assigned_tensors`.
    """
    pieces: list[tuple[Shard, Contents]] = []
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedObject):
            if is_main_replica(leaf.replica_id):
                stream = io.BytesIO()
                torch.save([leaf.data], stream)  # in a list, as Megatron-Core expects
                pieces.append((Shard(leaf.unique_key), stream.getvalue()))
        elif compute_shard_id(leaf) in assigned_names if _may_be_shared(leaf) else is_main_replica(leaf.replica_id):
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
        group: Process group of the ranks that may hold the same tensors; None for all ranks.
    """
    tensors = [
        (compute_shard_id(leaf), leaf.data.nbytes, is_main_replica(leaf.replica_id))
        for leaf in nested_values(state)
        if _may_be_shared(leaf)
    ]
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


def compute_shard_id(tensor: ShardedTensor) -> int:
    """Return a 64-bit name of a box, equal on every rank that holds it."""
    return int.from_bytes(hashlib.blake2b(repr((tensor.key, tuple(tensor.global_offset))).encode(), digest_size=8).digest())


def _may_be_shared(leaf: Any) -> bool:
    """Return whether other ranks may hold the tensor. Boxes of a distributed optimizer, which fit no regular grid, belong to one rank."""
    return isinstance(leaf, ShardedTensor) and leaf.has_regular_grid


# ---- .metadata ---------------------------------------------------------------------------------------------------------------------------


def serialize_metadata(files: Iterable[tuple[str, Sequence[PlacedShard]]]) -> bytes:
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
    """Find two boxes that share an element."""
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
