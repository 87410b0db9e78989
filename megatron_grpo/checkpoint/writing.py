"""Files of a checkpoint on their way to the disk: staged, hashed while they are written, in a thread of this process where asked.

No process is started: one of which the launcher knows nothing outlives a killed run, and forking a process that holds an engine and
collective threads is a gamble. The thread speaks to no other rank: what ranks agree on, they agree on between steps.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, Self, TypeVar, cast

import torch

from megatron_grpo.checkpoint.pieces import Contents, Piece, Placed

CHUNK = 256 << 20  # bytes of host memory that are asked for at once; torch rounds what it pins up to a power of two
Entry = Mapping[str, Any]  # of one file: {"bytes": ..., "sha256": ...}, as a manifest has it
T = TypeVar("T")


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


def write_pieces(path: Path, pieces: Sequence[tuple[Piece, Contents]]) -> tuple[Entry, list[Placed]]:
    """One rank's file of a sharded state dict: its pieces one behind the other, as torch's own writer has them."""
    placed = []
    with HashedFile(path) as file:
        for piece, contents in pieces:
            start = file.tell()
            if isinstance(contents, bytes):
                file.write(contents)
            else:
                torch.save(_alone(contents), cast(IO[bytes], file))
            placed.append(Placed(piece, start, file.tell() - start))
    return file.entry, placed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, without what else is in its storage: torch saves storages."""
    tensor = tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Staging:
    """Host memory for what this rank writes, made at the first save and kept for the next."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def copies(self, pieces: Sequence[tuple[Piece, Contents]]) -> list[tuple[Piece, Contents]]:
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


class Task(Generic[T]):
    """A function at work: at once, or beside what this process does next."""

    def __init__(self, work: Callable[[], T], *, beside: bool):
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True) if beside else None
        if self._thread is None:
            self._run()
        else:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody asks
            self._error = error

    @property
    def is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def result(self) -> T:
        """Waits for the end; raises what the function raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(T, self._result)
