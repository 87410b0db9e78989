"""The sharded part of a checkpoint: Megatron-Core's `torch_dist` format, written in this process, with errors that every rank learns of.

Megatron-Core's own writer starts a manager process and forks writers, and gathers every rank's description on every rank, and on rank 0 at
each save. The files are the same. Here they are staged, hashed while they are written, and written in a thread of this process where asked.
No process is started: one of which the launcher knows nothing outlives a killed run, and forking a process that holds an engine and
collective threads is a gamble. The thread speaks to no other rank: what ranks agree on, they agree on between steps.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException  # noqa: TID251 - the file format

from megatron_grpo.base.errors import RunError
from megatron_grpo.checkpoint.safe_unpickle import nothing_runs, refuse_extra_state
from megatron_grpo.checkpoint.shards import Contents, PlacedShard, Shard, dealt, metadata_of, pieces_of
from megatron_grpo.parallel import collectives

CHUNK = 256 << 20  # bytes of host memory that are asked for at once; torch rounds what it pins up to a power of two
Entry = Mapping[str, Any]  # of one file: {"bytes": ..., "sha256": ...}, as a manifest has it
# What writing and reading may raise. torch's CheckpointException is a BaseException; torch.save reports a full disk as RuntimeError.
FAILURES = (OSError, RuntimeError, ValueError, KeyError, CheckpointException, CheckpointingException)


class CheckpointError(RunError):
    """A checkpoint could not be written or read. Raised on every rank, with what went wrong on each."""


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Leave together: a failure of one rank in the block is raised on all, instead of leaving the others in a collective.

    Inside the block no rank may wait for another, unless what it calls brings errors to all ranks by itself.
    """
    problem, cause = None, None
    try:
        yield
    except FAILURES as error:
        problem, cause = _describe(error), error
    if collectives.all_reduce_max(problem is not None):
        problems = collectives.all_gather_object(problem)
        # What torch has already brought to all ranks names its rank and reads alike everywhere: once is enough.
        texts = [text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        raise CheckpointError(f"{what}: {'; '.join(dict.fromkeys(texts))}") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What this rank has written: its files by name, and what lies where in the one of the sharded state dict ("" where it has none)."""

    files: dict[str, Entry]
    file: str
    placed: list[PlacedShard]


class ShardedWriter:
    """Writes the sharded state dicts of one run, one after another, each rank its share. What does not change is not sent again.

    group: the ranks that may hold what this rank holds, and share the writing of it; None for all. staged: what is to be written is copied
    first, so that writing may go on beside training.
    """

    def __init__(self, group: Any = None, *, staged: bool = False):
        self._group = group
        self._staging = Staging() if staged else None
        self._mine: frozenset[int] | None = None  # of what others hold too; the same for the whole run
        self._known: list[PlacedShard] | None = None  # what rank 0 has been told of
        self._metadata = b""

    def taken(self, state: dict[str, Any], others: dict[str, bytes]) -> Callable[[Path], Written]:
        """What `state` holds now, as a function that writes it into a directory without asking other ranks. Collective.

        others: files of this rank that go with it, by name. Where this is staged the model may change before the function runs.
        """
        with agreed("describing the model and optimizer"):
            sharded, common = save_preprocess(state, validate_access_integrity=False)  # `metadata_of` sees to that, on one rank
        if self._mine is None:
            self._mine = dealt(sharded, self._group)
        with agreed("copying the model and optimizer"):
            pieces = pieces_of(sharded, self._mine)
            if self._staging is not None:
                pieces = self._staging.copies(pieces)
            if collectives.rank() == 0:
                stream = io.BytesIO()
                torch.save(common, stream)
                said = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
                others = {"common.pt": stream.getvalue(), "metadata.json": said, **others}
        return partial(_write, pieces, others, rank=collectives.rank())

    def told(self, written: Written) -> Callable[[Path], dict[str, Entry]] | None:
        """On rank 0, a function that writes `.metadata` and returns the files of all ranks; None elsewhere. Collective."""
        is_new = bool(collectives.all_reduce_max(written.placed != self._known))
        parts = collectives.gather_object((written.files, written.file, written.placed) if is_new else (written.files, "", ()))
        self._known = written.placed
        return None if parts is None else partial(self._publish, parts, is_new=is_new)

    def _publish(
        self, parts: Sequence[tuple[dict[str, Entry], str, Sequence[PlacedShard]]], directory: Path, *, is_new: bool
    ) -> dict[str, Entry]:
        if is_new:
            self._metadata = metadata_of([(file, placed) for _, file, placed in parts])
        return {name: entry for files, *_ in parts for name, entry in files.items()} | {
            ".metadata": write_file(directory / ".metadata", self._metadata)
        }


def _write(pieces: Sequence[tuple[Shard, Contents]], others: dict[str, bytes], directory: Path, *, rank: int) -> Written:
    files, file, placed = {}, f"__{rank}_0.distcp" if pieces else "", list[PlacedShard]()
    try:
        if pieces:
            files[file], placed = write_pieces(directory / file, pieces)
        files |= {name: write_file(directory / name, contents) for name, contents in others.items()}
    except RuntimeError as error:
        raise _first_cause(error) from error
    return Written(files=files, file=file, placed=placed)


def read_sharded(state: dict[str, Any], directory: Path, *, partly: bool = False) -> dict[str, Any]:
    """Reads into the tensors that `state` describes, under any layout. Collective. Nothing may be lacking there, and nothing left over.

    partly: what is left over is not wanted; a model without its optimizer, say.
    """
    with agreed(f"loading {directory} into this model"), nothing_runs(directory):
        mine = {leaf.key for leaf in nested_values(load_preprocess(state)[0]) if isinstance(leaf, ShardedBase)}
        held = sorted({part.key for part in load_sharded_metadata(str(directory)).values()})
    if collectives.all_reduce_max(not mine <= set(held)):
        raise CheckpointError(f"it lacks {_some(set().union(*collectives.all_gather_object(mine - set(held))))}")
    # "_extra_state" is what Transformer Engine's layers keep beside their weights: nothing, unless they compute in FP8.
    wanted = [name in mine or name.endswith("_extra_state") for name in held]
    left_over = {name for name, is_wanted in zip(held, collectives.all_reduce_any(wanted), strict=True) if not is_wanted}
    if left_over and not partly:
        raise CheckpointError(f"it holds {_some(left_over)}, which this run has no use for")
    with agreed(f"loading {directory} into this model"), nothing_runs(directory):
        loaded = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_UNEXPECTED, validate_access_integrity=False)
        refuse_extra_state(loaded)
        return loaded


def _some(names: set[str]) -> str:
    shown = sorted(names)[:2]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _describe(error: BaseException) -> str:
    """One line. Of torch's CheckpointException, whose own text is `ranks:dict_keys([0])`, the failures inside."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_describe(inner)}" for rank, (inner, _) in error.failures.items())
    error = _first_cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"


def _first_cause(error: BaseException) -> BaseException:
    """torch's zip writer, closed on a full disk, hides the OSError behind RuntimeErrors about an unexpected position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__ if isinstance(cause, RuntimeError) else None
    return cause or error


# -- files on their way to the disk --------------------------------------------------------------------------------------------------------


class HashedFile:
    """A new file. When its block has ended it is on the disk, and `entry` says its size and SHA-256: nothing is read back."""

    def __init__(self, path: Path):
        self._stream, self._digest, self._size = path.open("wb"), hashlib.sha256(), 0
        self.entry: Entry = {}

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._stream.write(data)
        self._size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stream:
            if error is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        self.entry = {"bytes": self._size, "sha256": self._digest.hexdigest()}


def write_file(path: Path, contents: bytes) -> Entry:
    """The whole of a file, in a directory that may have to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        file.write(contents)
    return file.entry


def write_pieces(path: Path, pieces: Sequence[tuple[Shard, Contents]]) -> tuple[Entry, list[PlacedShard]]:
    """One rank's file of a sharded state dict: its pieces one behind the other, as torch's own writer has them."""
    placed = []
    with HashedFile(path) as file:
        for piece, contents in pieces:
            start = file.tell()
            if isinstance(contents, bytes):
                file.write(contents)
            else:
                torch.save(_alone(contents), cast(IO[bytes], file))
            placed.append(PlacedShard(piece, start, file.tell() - start))
    return file.entry, placed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, without what else is in its storage: torch saves storages."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Staging:
    """Host memory for what this rank writes, made at the first save and kept for the next."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copies(self, pieces: Sequence[tuple[Shard, Contents]]) -> list[tuple[Shard, Contents]]:
        """The pieces as they are now, bit for bit; they stay so whatever happens to the model. The copies are done when this returns.

        Valid until it is called again.
        """
        sizes = [_aligned(contents.nbytes) if isinstance(contents, torch.Tensor) else 0 for _, contents in pieces]
        left, chunk, place, copied = sum(sizes), 0, 0, []
        on_device = False
        for (piece, contents), size in zip(pieces, sizes, strict=True):
            if isinstance(contents, torch.Tensor):
                on_device |= contents.is_cuda
                while chunk < len(self._chunks) and place + size > len(self._chunks[chunk]):
                    chunk, place = chunk + 1, 0
                if chunk == len(self._chunks):
                    self._chunks.append(torch.empty(max(size, min(left, CHUNK)), dtype=torch.uint8, pin_memory=contents.is_cuda))
                room = self._chunks[chunk][place : place + contents.nbytes].view(contents.dtype).view(contents.shape)
                contents, place, left = room.copy_(contents, non_blocking=True), place + size, left - size
            copied.append((piece, contents))
        if on_device:
            torch.cuda.synchronize()
        return copied


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
