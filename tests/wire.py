"""Count what a rank sends through torch.distributed: collectives, and the bytes that it receives in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_NAMES = ("broadcast", _GATHER, "all_gather", "all_reduce", "reduce_scatter_tensor", "all_to_all_single",
          "all_gather_object", "broadcast_object_list", "gather_object", "barrier")  # fmt: skip


@dataclass
class Wire:
    collectives: int = 0
    received: int = 0  # bytes
    reduced: int = 0  # bytes of what is summed over ranks


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """Count calls of `torch.distributed.<name>` in the context; one object counts as one collective."""
    found, kept = Wire(), {name: getattr(dist, name) for name in _NAMES}

    def counted(name):
        def call(*args, **kwargs):
            found.collectives += 1
            if name == "broadcast":
                found.received += args[0].nbytes if kwargs["src"] != dist.get_rank() else 0
            elif name == _GATHER:
                found.received += args[0].nbytes - args[1].nbytes
            elif name == "all_gather":
                found.received += sum(tensor.nbytes for tensor in args[0]) - args[1].nbytes
            elif name == "all_reduce":
                found.reduced += args[0].nbytes
            return kept[name](*args, **kwargs)

        return call

    for name in _NAMES:
        setattr(dist, name, counted(name))
    try:
        yield found
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
