"""A push of weights in few large pieces: every rank packs its shards as bytes, and one collective brings a whole bucket together.

Of a bucket there is at most one broadcast of shards over the stages, one gather over tensor parallelism, and one over the ranks that share
the experts. `weights.buckets` says what is in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.weights.buckets import Bucket, Owned, Part, Ranks, Slot, fill, most_bytes
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.names import ShardCut

Prepare = Callable[[torch.Tensor], torch.Tensor]  # a parameter -> what is sent of it, of the same shape and dtype


class PushPlan:
    """What one kind of push sends, and in which pieces; the same on every rank. Making one is collective."""

    def __init__(self, owned: Iterable[Owned], weight_map: WeightMap, parallel: ParallelState, *, bucket_bytes: int):
        """owned: what is pushed, over all ranks."""
        self.map, self.parallel = weight_map, parallel
        self._groups = {Part.DENSE: parallel.tp_group, Part.EXPERTS: parallel.expert_group}
        places = collectives.from_all((parallel.ep_rank, parallel.etp_rank), parallel.expert_group)
        self._row = {place: row for row, place in enumerate(places)}  # in a gather of experts
        self.ranks = Ranks(parallel.pp_size, parallel.tp_size, len(places))
        self.buckets = fill(owned, self.ranks, bucket_bytes)
        self.memory = Memory(parallel.device, most_bytes(self.buckets, self.ranks))

    def stream(self, mine: Mapping[str, torch.Tensor], prepare: Prepare) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of everything, on every rank. Collective.

        mine: this rank's tensors. A tensor may be a view of a live parameter or of a bucket. It stays as it is until the stream ends.
        While the receiver has one bucket the next is on its way; there are never more than two. A receiver that stops early still takes
        part in the rest of the collectives. Raises ValueError where `mine` is not what was planned.
        """
        self._check(mine)
        own = self._own(mine, prepare)
        rest, coming = iter(self.buckets), deque[Coming]()

        def send_next() -> None:
            coming.extend(self._send(bucket, own) for bucket in islice(rest, 1))

        try:
            send_next()
            while coming:
                # The receiver holds a tensor of the bucket before until it has one of this: only then is there room for the next.
                for number, named in enumerate(self._unpack(coming.popleft(), own)):
                    yield named
                    if number == 0:
                        send_next()
        except GeneratorExit:
            for sent in coming:
                sent.wait()
            for bucket in rest:
                self._send(bucket, own).wait()
            raise

    def _own(self, mine: Mapping[str, torch.Tensor], prepare: Prepare) -> Own:
        return Own(mine, prepare, self.memory)

    def _check(self, mine: Mapping[str, torch.Tensor]) -> None:
        p = self.parallel
        planned = {
            slot.names[rank]
            for bucket in self.buckets
            if bucket.stage == p.pp_rank
            for slot in bucket.slots
            if (rank := p.ep_rank if slot.part is Part.EXPERTS else 0) in slot.names
        }
        given = {name for name in mine if self.map.kind(name).is_exported}
        if wrong := sorted(planned ^ given):
            raise ValueError(f"{len(wrong)} tensors differ from those that this kind of push was planned for: {', '.join(wrong[:3])}")

    def _send(self, bucket: Bucket, own: Own) -> Coming:
        p, sizes = self.parallel, [size if self.ranks.travels(part) else 0 for part, size in zip(Part, bucket.sizes, strict=True)]
        if not any(sizes):
            return Coming(bucket, [None, None, None], [], None)
        run = self._pack(bucket, sizes, own)
        parts = run.split(sizes)
        # Shards cross the stages, not full tensors: of the slow links a rank needs its share alone.
        collectives.from_member_(run, bucket.stage, p.pp_group)
        rows: list[torch.Tensor | None] = [None, None, None]
        works = []
        for part, group in self._groups.items():
            if sizes[part]:
                at_once = bucket.at_once(self.ranks.sharing(part))
                rows[part], started = collectives.start_gather(parts[part], group, at_once=at_once, memory=own.memory.take)
                works += started
        if sizes[Part.WHOLE]:
            rows[Part.WHOLE] = parts[Part.WHOLE][None]
        return Coming(bucket, rows, works, torch.cuda.current_stream() if p.device.type == "cuda" else None)

    def _pack(self, bucket: Bucket, sizes: list[int], own: Own) -> torch.Tensor:
        """This rank's run, uint8; of another stage's bucket, memory for it."""
        is_own, p = self.parallel.pp_rank == bucket.stage, self.parallel
        held = [
            (slot, slot.names.get(p.ep_rank if slot.part is Part.EXPERTS else 0)) for slot in bucket.slots if is_own and sizes[slot.part]
        ]
        if len(held) == 1 and held[0][1] is not None and held[0][0].num_bytes == sum(sizes):
            # Alone, as the embedding often is: it is sent from where it lives.
            return own.tensor(held[0][1], held[0][0]).contiguous().view(-1).view(torch.uint8)
        run = own.memory.take(sum(sizes))
        parts = run.split(sizes)
        for slot, name in held:
            if name is not None:
                _view(parts[slot.part], slot).copy_(own.tensor(name, slot))
        return run

    def _unpack(self, coming: Coming, own: Own) -> Iterator[tuple[str, torch.Tensor]]:
        coming.wait()
        for slot in coming.bucket.slots:
            rows = coming.rows[slot.part]
            for expert_rank, name in slot.names.items():
                shards = [own.tensor(name, slot)] if rows is None else self._shards(slot, rows, expert_rank, self.map.kind(name).cut)
                yield from self.map.export(name, shards)

    def _shards(self, slot: Slot, rows: torch.Tensor, expert_rank: int, cut: ShardCut) -> list[torch.Tensor]:
        """rows: uint8 [ranks of the gather, bytes]."""
        if slot.part is Part.EXPERTS:
            copies = 1 if cut is ShardCut.REPLICATED else self.parallel.etp_size
            return [_view(rows[self._row[expert_rank, rank]], slot) for rank in range(copies)]
        if slot.num_bytes == rows.shape[1] and cut in (ShardCut.COLUMN, ShardCut.VOCAB):
            # Alone in its gather, as the embedding often is: one shard lies behind the other, which is the full tensor.
            return [rows.view(-1).view(slot.dtype).view(-1, *slot.shape[1:])]
        return [_view(row, slot) for row in rows]


class Memory:
    """Room for buckets. On a CPU what nobody holds any more is used again, in the next push too: every 4 KiB of new memory is a page fault,
    and for dense layers over two ranks that cost half as much as gloo itself. GPUs have an allocator that does so."""

    def __init__(self, device: torch.device, most: int):
        """most: bytes that are kept, in use or not."""
        self._device, self._most = device, most
        self._mine: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], of any content."""
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        idle = sorted((one for one in self._mine if _is_idle(one)), key=len)
        for one in idle:
            if len(one) >= num_bytes:
                return one[:num_bytes]
        while idle and sum(map(len, self._mine)) + num_bytes > self._most:
            dropped = idle.pop()
            self._mine = [one for one in self._mine if one is not dropped]
        self._mine.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._mine[-1][:num_bytes]

    def forget(self) -> None:
        """Keeps none of it for the next push."""
        self._mine = []


def _is_idle(tensor: torch.Tensor) -> bool:
    """Whether no view of it lives, in a receiver's hands or in gloo's. Two hold it then: the tensor, and the name in this function."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2


class Own:
    """This rank's tensors, each prepared when its turn comes; and memory for what of them travels."""

    def __init__(self, mine: Mapping[str, torch.Tensor], prepare: Prepare, memory: Memory):
        self._mine, self._prepare, self.memory = mine, prepare, memory

    def tensor(self, name: str, slot: Slot) -> torch.Tensor:
        with torch.no_grad():
            tensor = self._prepare(self._mine[name]).detach()
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:  # a copy into the bucket would stretch and round it
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is to be pushed where {slot.dtype} {slot.shape} was planned")
        return tensor


class Coming:
    """A bucket on its way."""

    def __init__(self, bucket: Bucket, rows: list[torch.Tensor | None], works: list[Any], packed_on: Any):
        """rows: by part, uint8 [ranks, bytes]; None where nothing travels. packed_on: the stream of the GPU."""
        self.bucket, self.rows, self._works, self._packed_on = bucket, rows, works, packed_on

    def wait(self) -> None:
        """On a GPU nothing waits on the host: what is queued from now on is done after what was packed and gathered."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._packed_on is None or self._packed_on == (now := torch.cuda.current_stream()):
            return
        now.wait_stream(self._packed_on)  # the receiver works on a stream of its own
        for rows in self.rows:
            if rows is not None:
                rows.record_stream(now)


def _view(run: torch.Tensor, slot: Slot) -> torch.Tensor:
    return run[slot.start : slot.start + slot.num_bytes].view(slot.dtype).view(slot.shape)
