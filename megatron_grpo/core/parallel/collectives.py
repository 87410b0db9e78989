"""Collectives and point-to-point messages between ranks. With `state`, the only importer of torch.distributed.

A process without a process group is a job of one rank: every function then returns its input. Objects are pickled, so they come from this
job's ranks only. A function without `group` is collective over all ranks.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

Value = TypeVar("Value")
Group = Any  # a torch.distributed.ProcessGroup; None is all ranks


def rank() -> int:
    """Return this process's rank among all ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks(group: Group = None) -> int:
    """Return the number of ranks in a group.

    Args:
        group: Process group; None is all ranks.
    """
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_in(group: Group) -> int:
    """Return this process's rank in a group.

    Args:
        group: Process group; None is all ranks.
    """
    return dist.get_rank(group) if dist.is_initialized() else 0


def members(group: Group = None) -> tuple[int, ...]:
    """Return the global ranks of a group.

    Args:
        group: Process group; None is all ranks.
    """
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def has_job() -> bool:
    """Return whether this process belongs to a process group, possibly of one rank."""
    return dist.is_initialized()


def is_current(group: Group) -> bool:
    """Return whether a process group belongs to the job of this process, and not to one that has ended."""
    return group in dist.distributed_c10d._world.pg_map


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the job.

    Args:
        first: Lowest rank on it.
        number: Index of this machine, in the order of their first ranks.
        count: Number of machines.
    """

    first: int = 0
    number: int = 0
    count: int = 1


def node(host: str | None = None) -> Node:
    """Return the machine that this rank runs on. Collective.

    Args:
        host: Name of the machine; None is its host name.
    """
    name = (socket.gethostname() if host is None else host).encode()
    names = all_gather_object(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big"))
    firsts = {name: names.index(name) for name in dict.fromkeys(names)}
    own_node = names[rank()]
    return Node(first=firsts[own_node], number=list(firsts).index(own_node), count=len(firsts))


def store(name: str) -> Any:
    """Return a view of the job's key-value store, through which ranks can communicate while a collective hangs.

    It uses a separate connection, because the main thread may be blocked on the job's own.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, default.clone())


_patient: Group = None


def long_timeout_group() -> Group:
    """Return a gloo group of all ranks with a timeout of a year; None if there is one rank.

    For waits without a limit: NCCL and the job's default group would end the run. Collective at the first call in a job.
    """
    global _patient
    if num_ranks() > 1 and not (_patient is not None and _patient in dist.distributed_c10d._world.pg_map):
        _patient = dist.new_group(backend="gloo", timeout=timedelta(days=365))  # an earlier job's group was destroyed with that job
    return _patient if num_ranks() > 1 else None


def barrier_with_timeout() -> None:
    """Wait until every rank is here, however long one of them takes. Collective.

    Belongs before a collective that follows work which ranks finish at different times, such as sampling. NCCL would count those minutes
    against `distributed_timeout_minutes`, and end the run.
    """
    if num_ranks() > 1:
        dist.barrier(group=long_timeout_group())


# ---- objects ---------------------------------------------------------------------------------------------------------------------------


def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """Gather every rank's `value`, in rank order of the group, on every rank of it. For integers, flags, rewards and sentences. Collective.

    Args:
        group: Process group; None is all ranks.
    """
    if num_ranks(group) == 1:
        return [value]
    data, device = pickle.dumps(value, protocol=5), device_of_messages(group)
    sizes = torch.cat(all_gather_tensors(torch.tensor([len(data)], device=device), group)).tolist()
    ends, own_rank = list(accumulate(sizes)), rank_in(group)
    # A gather pads every object to the largest. Each rank's bytes are added to zeros instead.
    flat = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
    flat[ends[own_rank] - len(data) : ends[own_rank]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    received = add_(flat, group).cpu().numpy().data
    return [pickle.loads(received[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def gather_object(value: Any) -> list[Any] | None:
    """Gather every rank's `value`, in rank order, on rank 0; None on other ranks. Collective.

    Use it for the contents of files, such as texts and records.
    """
    values = exchange({0: value})
    return values if rank() == 0 else None


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. Collective.

    Args:
        value: Any object that can be pickled; ignored on the other ranks.
    """
    return from_rank(value, 0)


def from_rank(value: Any, source: int, group: Group = None) -> Any:
    """Return the `value` of one rank on every rank of a group. Collective.

    Args:
        group: Process group; None is all ranks.
    """
    if num_ranks(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def run_on_rank_zero(work: Callable[[], Value], failures: tuple[type[Exception], ...]) -> Value:
    """Run `work` on rank 0 and return its result, or raise its exception, on every rank. Collective.

    The other ranks wait without a limit.

    Args:
        work: Called on rank 0 only.
        failures: Exceptions that are raised on every rank. Any other is raised on rank 0 alone.
    """
    group = long_timeout_group()  # the first call creates it, which waits no longer than the job's default group
    value: Value | None = None
    failure: Exception | None = None
    if rank() == 0:
        try:
            value = work()
        except failures as error:
            failure = error
    value, failure = from_rank((value, failure), 0, group)
    if failure is not None:
        raise failure
    return cast(Value, value)


def exchange(parts: Mapping[int, Any]) -> list[Any]:
    """Send `parts[r]` to rank r only; return the objects sent to this rank, in the order of the senders. Collective.

    For data that few ranks need, such as tokens and log-probs, which go to the ranks that train them. What a rank sends to itself is not
    copied. One object for several ranks is pickled once.

    Args:
        parts: Objects by destination rank; a destination may be absent.
    """
    own_rank, size = rank(), num_ranks()
    if size == 1:
        return [parts[0]] if 0 in parts else []
    pickled = {id(part): pickle.dumps(part, protocol=5) for part in {id(part): part for part in parts.values()}.values()}
    outgoing = [pickled[id(parts[r])] if r in parts and r != own_rank else b"" for r in range(size)]
    device = device_of_messages()
    sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    sent_bytes = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())].to(device)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent_bytes, incoming.tolist(), sizes.tolist())
    result = []
    for source, part in enumerate(received.cpu().split(incoming.tolist())):
        if source == own_rank and own_rank in parts:
            result.append(parts[own_rank])
        elif len(part):
            result.append(pickle.loads(part.numpy().tobytes()))
    return result


def device_of_messages(group: Group = None) -> torch.device:
    """Return the device that a tensor must be on to be sent: NCCL sends from the GPU only.

    Args:
        group: Process group; None is all ranks.
    """
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")


# ---- numbers ---------------------------------------------------------------------------------------------------------------------------


def all_reduce_max(number: float) -> float:
    """Return the maximum over all ranks. Collective.

    Args:
        number: This rank's number; sent as float64.
    """
    if num_ranks() == 1:
        return number
    tensor = torch.tensor([number], dtype=torch.float64, device=device_of_messages())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def all_reduce_any(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set on any rank. Collective.

    Args:
        flags: Flags, equally many on every rank.
    """
    if num_ranks() == 1 or not flags:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.uint8, device=device_of_messages())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.bool().tolist()


def wait_for_all() -> None:
    """Wait until every rank is here. Collective."""
    if num_ranks() > 1:
        dist.barrier()


# ---- tensors ---------------------------------------------------------------------------------------------------------------------------


def add_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum a tensor over the group, in place. Collective over `group`.

    Args:
        tensor: Contiguous tensor of one shape on every rank.
        group: Process group; None is all ranks.

    Raises:
        ValueError: The tensor is not contiguous: a copy would receive the sum.
    """
    if num_ranks(group) > 1:
        _require_order(tensor)
        dist.all_reduce(tensor, group=group)
    return tensor


def max_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Take the elementwise maximum of a tensor over the group, in place. Collective over `group`.

    Args:
        tensor: Contiguous tensor of one shape on every rank.
        group: Process group; None is all ranks.

    Raises:
        ValueError: The tensor is not contiguous.
    """
    if num_ranks(group) > 1:
        _require_order(tensor)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def all_gather_tensors(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Gather the tensors of all members of the group, in rank order. Collective over `group`.

    Args:
        tensor: Tensor of one shape on every rank.
        group: Process group; None is all ranks.
    """
    if num_ranks(group) == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(num_ranks(group))]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors


def _require_order(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides {tensor.stride()}")


def start_gather(rows: torch.Tensor, group: Group) -> Any:
    """Start gathering every rank's row into the rows of the others; return a handle. Collective over `group`.

    The rows are complete once the handle has been waited for.

    Args:
        rows: [ranks, n] in rank order, contiguous. This rank's row holds what it sends.
        group: Process group; None is all ranks.
    """
    into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed to the first in torch 2.13
    return into(rows.view(-1), rows[rank_in(group)], group=group, async_op=True)


def from_member_(tensor: torch.Tensor, member: int, group: Group) -> torch.Tensor:
    """Broadcast the tensor of one member of the group to all of them, in place. Collective over `group`.

    Args:
        tensor: Tensor of one shape on every rank.
    """
    if num_ranks(group) > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, member), group=group)
    return tensor


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send a tensor to one rank, which receives it with `start_receive`. Messages between two ranks arrive in order.

    Raises:
        ValueError: The tensor is not contiguous.
    """
    _require_order(tensor)
    dist.send(tensor, dst)


def start_receive(tensor: torch.Tensor, source: int) -> Any:
    """Start receiving a tensor from one rank; return a handle. The data is in `tensor` once the handle has been waited for.

    Args:
        tensor: Contiguous tensor of the sender's shape and dtype, which is overwritten.

    Raises:
        ValueError: The tensor is not contiguous.
    """
    _require_order(tensor)
    return dist.irecv(tensor, source)
