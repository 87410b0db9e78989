"""Everything that travels between ranks, under names that say who gets what. With `state`, the only importer of torch.distributed.

A process without a process group is a job of one rank: every function then gives back what it was given. Objects are pickled, so they come
from this job's own ranks only. A function without `group` is collective over all ranks.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

Value = TypeVar("Value")
Group = Any  # a torch.distributed.ProcessGroup; None is all ranks


def rank() -> int:
    """This process's place among all ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def place_in(group: Group) -> int:
    """This process's place in the group; None is all ranks."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def members(group: Group = None) -> tuple[int, ...]:
    """The ranks of a group."""
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else (0,)


def has_job() -> bool:
    """Whether this process has joined other ranks, or a job of one."""
    return dist.is_initialized()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine among those of the job. first: the rank that speaks for it. number: of this machine, in the order of their first ranks."""

    first: int = 0
    number: int = 0
    count: int = 1


def node(host: str | None = None) -> Node:
    """The machine that this rank runs on. Collective. host: what it is called (default: its own name)."""
    name = (socket.gethostname() if host is None else host).encode()
    names = all_gather_object(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big"))
    firsts = {name: names.index(name) for name in dict.fromkeys(names)}
    mine = names[rank()]
    return Node(first=firsts[mine], number=list(firsts).index(mine), count=len(firsts))


def store(name: str) -> Any:
    """The job's key-value store, through which ranks can speak while a collective hangs: under names of `name`'s own, by a connection of
    its own, for the main thread may be waiting on the other one."""
    default: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(name, default.clone())


_patient: Group = None


def long_timeout_group() -> Group:
    """All ranks, for what one of them may wait for without a limit: NCCL, and a job's own group, would end the run. Collective at the first
    call in a job; None where there is one rank."""
    global _patient
    if num_ranks() > 1 and not (_patient is not None and _patient in dist.distributed_c10d._world.pg_map):
        _patient = dist.new_group(backend="gloo", timeout=timedelta(days=365))  # of this job: an earlier one's went with it
    return _patient if num_ranks() > 1 else None


def barrier_with_timeout() -> None:
    """Until every rank is here, however long one of them takes: before a collective behind work that ranks end at different times, such as
    sampling. NCCL would count those minutes against `distributed_timeout_minutes`, and end the run. Collective."""
    if num_ranks() > 1:
        dist.barrier(group=long_timeout_group())


# ---- objects ---------------------------------------------------------------------------------------------------------------------------


def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """Every rank's `value`, in rank order of the group, on every rank of it. For integers, flags, rewards and sentences."""
    size = num_ranks(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: Any) -> list[Any] | None:
    """Every rank's `value`, in rank order, on rank 0; None elsewhere. For what a file will hold: texts, records."""
    if num_ranks() == 1:
        return [value]
    values: list[Any] | None = [None] * num_ranks() if rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    return from_rank(value, 0)


def from_rank(value: Any, source: int, group: Group = None) -> Any:
    """The `value` of one rank, on every rank of the group. source: its number among all ranks."""
    if num_ranks(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def told(work: Callable[[], Value], failures: tuple[type[Exception], ...]) -> Value:
    """What `work` gives on rank 0, on every rank; or what it raises, if that is one of `failures`. Others wait as long as it takes."""
    group = long_timeout_group()  # the first call makes it, which waits no longer than a job's own group does
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
    """Sends `parts[r]` to rank r, and to nobody else; returns what this rank was sent, in the order of the senders.

    For what few ranks need: tokens and log-probs go to those who train them. What a rank sends to itself is not copied. One object for
    several ranks is pickled once.
    """
    me, size = rank(), num_ranks()
    if size == 1:
        return [parts[0]] if 0 in parts else []
    pickled = {id(part): pickle.dumps(part, protocol=5) for part in {id(part): part for part in parts.values()}.values()}
    outgoing = [pickled[id(parts[r])] if r in parts and r != me else b"" for r in range(size)]
    device = device_of_messages()
    sizes = torch.tensor([len(part) for part in outgoing], dtype=torch.int64, device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    sent = torch.frombuffer(bytearray(b"".join(outgoing)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())].to(device)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, incoming.tolist(), sizes.tolist())
    found = []
    for source, part in enumerate(received.cpu().split(incoming.tolist())):
        if source == me and me in parts:
            found.append(parts[me])
        elif len(part):
            found.append(pickle.loads(part.numpy().tobytes()))
    return found


def device_of_messages() -> torch.device:
    """Where a tensor must lie to travel: NCCL sends from the GPU alone."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


# ---- numbers ---------------------------------------------------------------------------------------------------------------------------


def all_reduce_max(number: float) -> float:
    """Over all ranks."""
    if num_ranks() == 1:
        return number
    tensor = torch.tensor([number], dtype=torch.float64, device=device_of_messages())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def all_reduce_any(flags: Sequence[bool]) -> list[bool]:
    """For each of as many flags on every rank: whether it is set on any."""
    if num_ranks() == 1 or not flags:
        return list(flags)
    tensor = torch.tensor(flags, dtype=torch.uint8, device=device_of_messages())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.bool().tolist()


def wait_for_all() -> None:
    """Returns once every rank is here."""
    if num_ranks() > 1:
        dist.barrier()


# ---- tensors ---------------------------------------------------------------------------------------------------------------------------


def add_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, in place. Raises ValueError for a tensor whose elements do not lie in order: a copy would get the sum."""
    if num_ranks(group) > 1:
        _require_order(tensor)
        dist.all_reduce(tensor, group=group)
    return tensor


def max_(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The largest over the group, element by element, in place."""
    if num_ranks(group) > 1:
        _require_order(tensor)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor


def of_each(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The tensors of all members of the group, in rank order, on all of them. All have one shape."""
    if num_ranks(group) == 1:
        return [tensor]
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(num_ranks(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def _require_order(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")


def start_gather(run: torch.Tensor, group: Group, *, at_once: int, memory: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """[ranks, len(run)], every rank's run in rank order, once all of the list has been waited for. Of one rank it is `run` itself.

    at_once: elements of `run` that go in one collective; there are as many as it takes. memory: gives room for so many elements.
    """
    if num_ranks(group) == 1:
        return run[None], []
    rows = memory(num_ranks(group) * len(run)).view(num_ranks(group), len(run))
    if len(run) <= at_once:
        into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # since torch 2.13 the first is its name
        return rows, [into(rows.view(-1), run, group=group, async_op=True)]
    pieces = zip(run.split(at_once), *(row.split(at_once) for row in rows), strict=True)
    return rows, [dist.all_gather(places, piece, group=group, async_op=True) for piece, *places in pieces]


def from_member_(tensor: torch.Tensor, member: int, group: Group) -> torch.Tensor:
    """The tensor of one member of the group (its place in it), on all of them, in place."""
    if num_ranks(group) > 1:
        dist.broadcast(tensor, src=dist.get_global_rank(group, member), group=group)
    return tensor


def send(tensor: torch.Tensor, to: int) -> None:
    """To one rank, which receives it with `start_receive`. Several between two ranks arrive in their order."""
    _require_order(tensor)
    dist.send(tensor, to)


def start_receive(tensor: torch.Tensor, source: int) -> Any:
    """What that rank sends is in `tensor` once the thing returned has been waited for."""
    _require_order(tensor)
    return dist.irecv(tensor, source)
