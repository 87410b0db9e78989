"""Weight transfer from a trainer to rollout servers over a link: a process group of the trainer's rank 0 and all workers of all servers.

The group is independent of all other process groups of its members; it uses gloo on CPUs and NCCL on GPUs. Rank 0 broadcasts
self-describing buckets (a mark, a JSON header, the bytes), so receivers need not know names or shapes beforehand, and the source may be a
generator that is collective over the trainer's ranks. Members rendezvous at a TCP store of rank 0. The store listens on all addresses
without a password: it carries no weights, and link names are random. Weights are sent unencrypted.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from megatron_grpo.core.weights.buckets import TensorSlice

ALIGNMENT = 64  # in bytes, of every tensor in a bucket, so that a view of its dtype is legal

Named = tuple[str, torch.Tensor | TensorSlice]


class LinkError(RuntimeError):
    """Error raised if a weight sync fails. After TransferCancelledError the link is usable; after any other LinkError it is closed."""


class TransferCancelledError(LinkError):
    """Error raised if the trainer cancels a weight sync before its end."""


class _MessageKind(IntEnum):
    BUCKET, END, GAVE_UP = 1, 2, 3


class Rendezvous(dist.TCPStore):
    """TCP store of rank 0 at which the members of a link meet, on any free port. One store serves all links of a run."""

    def __init__(self) -> None:
        super().__init__("0.0.0.0", 0, is_master=True, wait_for_workers=False)


class _Link:
    """Member of a link. Construction is collective over all members.

    Args:
        rank: Rank of this member; 0 is the sender.
        local_host: This machine's address on the route to the others (`local_address`).
        device: Device of the tensors. It is the CPU if two members share a GPU.

    Raises:
        LinkError: A member died or did not join within `seconds`.
    """

    def __init__(
        self, store: Any, *, name: str, world: int, local_host: str, seconds: float, rank: int = 0, device: torch.device | str = "cpu"
    ):
        self.name, self.device = name, torch.device(device)
        self._group: Any = None
        limit, prefixed = timedelta(seconds=seconds), dist.PrefixStore(name, store)
        try:
            uuid = "" if self.device.type == "cpu" else str(torch.cuda.get_device_properties(self.device).uuid)
            if uuid and _share_a_gpu(prefixed, rank, world, limit, uuid):
                self.device = torch.device("cpu")  # NCCL allows one member per GPU; received tensors may be on the host
            if self.device.type == "cpu":
                options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
                # Not the address of the hostname, which is 127.0.1.1 on many machines.
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
                options._timeout = limit
                self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
            else:
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = limit
                self._group = dist.ProcessGroupNCCL(prefixed, rank, world, nccl)
        except RuntimeError as error:
            raise LinkError(f"the link of {world} members was not established within {seconds:.0f} s: {_reason(error)}") from error

    @property
    def is_whole(self) -> bool:
        """Whether the link is usable."""
        return self._group is not None

    def drop(self) -> None:
        """Close the connections at once, so that the other members fail without waiting for their timeout."""
        group, self._group = self._group, None
        if group is not None and self.device.type != "cpu":
            with suppress(RuntimeError):  # a member has already died
                group.abort()

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        # Nothing may be sent after a failed broadcast: gloo does not compare lengths, so a short message would be taken for the beginning
        # of the long one that a member still waits for.
        if self._group is None:
            raise LinkError(f"the link {self.name} is closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._group.broadcast([tensor], options).wait()
            if self.device.type != "cpu":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.drop()
            raise LinkError(f"the link {self.name} broke: {_reason(error)}") from error
        return tensor

    def _numbers(self, *numbers: int) -> list[int]:
        return self._broadcast(torch.tensor(numbers, dtype=torch.int64, device=self.device)).tolist()


class WeightSender(_Link):
    """Rank 0 of a link."""

    def send(self, tensors: Iterable[Named], bucket_bytes: int) -> tuple[int, int]:
        """Send tensors to all other members.

        Iterates over `tensors` once, and holds one bucket at a time.

        Args:
            tensors: (name, tensor or slice) pairs. An exception of this iterable is raised unchanged after the other members were notified;
                the link stays usable.
            bucket_bytes: Largest size of a bucket in bytes; a larger tensor forms a bucket alone.

        Returns:
            Number of tensors and slices, and number of bytes sent.

        Raises:
            LinkError: The link broke; it is closed.
        """
        count = total = number = 0
        source = _buckets(tensors, bucket_bytes, self.device)
        while True:
            try:
                bucket = next(source, None)
            except BaseException:
                self._numbers(_MessageKind.GAVE_UP, number, 0, 0)
                raise
            if bucket is None:
                self._numbers(_MessageKind.END, number, count, total)
                return count, total
            self._send(bucket, number)
            count, total, number = count + len(bucket.names), total + bucket.num_bytes, number + 1

    def _send(self, bucket: _Bucket, number: int) -> None:
        header = json.dumps({
            "names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "slices": bucket.slices,
        }).encode()  # fmt: skip
        self._numbers(_MessageKind.BUCKET, number, len(header), bucket.used)
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self.device))
        if bucket.used:
            self._broadcast(bucket.flat[: bucket.used])


class WeightReceiverWorker(_Link):
    """Receiving member of a link.

    Args:
        rank: Rank of this member, above 0.
    """

    def __init__(self, *, address: str, port: int, rank: int, world: int, name: str, seconds: float, device: torch.device | str = "cpu"):
        try:
            store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
            local_host = local_address(address, port)
        except (RuntimeError, OSError) as error:
            raise LinkError(f"the trainer's store at {address}:{port} does not answer: {_reason(error)}") from error
        super().__init__(store, name=name, rank=rank, world=world, local_host=local_host, seconds=seconds, device=device)

    def receive(self) -> Iterator[Named]:
        """Yield the (name, tensor or slice) pairs of one weight sync.

        The tensors may be kept, since no memory is reused. Iterate to the end: closing the generator early closes the link.

        Raises:
            TransferCancelledError: The trainer cancelled the weight sync; the link stays usable.
            LinkError: The link broke, or fewer tensors arrived than were sent.
        """
        is_whole = False
        try:
            count = number = 0
            while True:
                mark, sender_number, first, second = self._numbers(0, 0, 0, 0)
                if sender_number != number or mark not in _MessageKind.__members__.values():
                    raise LinkError(
                        f"expected message {number} of a weight update on the link {self.name}, received ({mark}, {sender_number})"
                    )
                if mark == _MessageKind.GAVE_UP:
                    is_whole = True
                    raise TransferCancelledError("the trainer cancelled this weight update")
                if mark == _MessageKind.END:
                    if first != count:
                        raise LinkError(f"received {count} of {first} tensors")
                    is_whole = True
                    return
                bucket = self._receive(first, second)
                yield from bucket
                count, number = count + len(bucket), number + 1
        finally:
            if not is_whole:
                self.drop()

    def _receive(self, header_bytes: int, bucket_bytes: int) -> list[Named]:
        header = json.loads(self._broadcast(torch.empty(header_bytes, dtype=torch.uint8, device=self.device)).cpu().numpy().tobytes())
        flat = torch.empty(bucket_bytes, dtype=torch.uint8, device=self.device)
        if bucket_bytes:
            self._broadcast(flat)
        bucket: list[Named] = []
        start = 0
        for number, (name, word, shape) in enumerate(zip(header["names"], header["dtypes"], header["shapes"], strict=True)):
            tensor = _view(flat, start, getattr(torch, word), torch.Size(shape))
            start += _room(tensor.nbytes)
            region = header.get("slices", {}).get(str(number))
            bucket.append((name, TensorSlice(tensor, *map(tuple, region)) if region else tensor))
        return bucket


def _share_a_gpu(store: Any, rank: int, world: int, limit: timedelta, own_gpu: str) -> bool:
    """Return whether two members of a link share a GPU, as when a server runs on the trainer's GPU. Collective over all members."""
    store.set(f"gpu/{rank}", own_gpu)
    names = [f"gpu/{member}" for member in range(world)]
    store.wait(names, limit)
    return len({store.get(name) for name in names}) < world


def local_address(address: str, port: int) -> str:
    """Return this machine's address on the route to another one, which the other machine can reach.

    Raises:
        OSError: The address does not accept a connection within 10 s.
    """
    with socket.create_connection((address, port), timeout=10) as probe:
        return probe.getsockname()[0]


def _reason(error: Exception) -> str:
    """Return the first line of a torch error without its source position and advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).partition(". This")[0]


def _room(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(flat: torch.Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return flat[start : start + dtype.itemsize * shape.numel()].view(dtype).view(shape)


@dataclass(slots=True)
class _Bucket:
    """Tensors that are sent together, copied as they arrive, so that their source can reuse its memory."""

    flat: torch.Tensor
    used: int = 0  # bytes of `flat`
    num_bytes: int = 0  # of the tensors
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    slices: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # by number: start, and shape of the tensor

    def add(self, name: str, tensor: torch.Tensor | TensorSlice) -> None:
        """Copy a tensor or slice into the bucket."""
        if isinstance(tensor, TensorSlice):
            self.slices[len(self.names)] = tensor.start, tuple(tensor.shape)
            tensor = tensor.part
        _view(self.flat, self.used, tensor.dtype, tensor.shape).copy_(tensor)
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.used, self.num_bytes = self.used + _room(tensor.nbytes), self.num_bytes + tensor.nbytes


def _buckets(tensors: Iterable[Named], bucket_bytes: int, device: torch.device) -> Iterator[_Bucket]:
    """Group tensors into buckets of at most `bucket_bytes`; a larger tensor forms a bucket alone."""
    bucket: _Bucket | None = None
    for name, tensor in tensors:
        room = _room(tensor.nbytes)
        if bucket is not None and bucket.used + room > len(bucket.flat):
            yield bucket
            bucket = None
        if bucket is None:
            bucket = _Bucket(torch.zeros(max(room, bucket_bytes), dtype=torch.uint8, device=device))
        bucket.add(name, tensor)
    if bucket is not None:
        yield bucket
