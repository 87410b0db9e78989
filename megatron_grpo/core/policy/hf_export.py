"""Conversion between this rank's Megatron shards and full Hugging Face tensors, and streams of them in few large buckets.

Every rank packs its shards as bytes, and collectives gather a whole bucket at once: broadcasts of shards over the pipeline
stages, one gather over tensor parallelism, and one over the ranks that share the experts. `weights.buckets` defines what is in a bucket;
the rest of `weights` does the arithmetic.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_grpo.core.base import activity
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.weights.buckets import (
    DEFAULT_BUCKET_MB,
    MIB,
    Bucket,
    BucketPart,
    BucketSlot,
    ParameterPlacement,
    RankCounts,
    fill,
    joined,
    peak_bytes,
)
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.hf_files import as_stored
from megatron_grpo.core.weights.mapping import WeightMap, is_of_adapter, with_global_numbers
from megatron_grpo.core.weights.names import ShardSplit, TensorFusion, num_units


class MegatronToHF:
    """Conversion of the weights of one pipeline's model chunks, or of the adapters in the same chunks.

    Args:
        weight_map: Names and shapes of the weights in both formats.
        converts_adapters: Convert the adapters instead of the weights.
        bucket_bytes: Size of the full tensors in one bucket; None for the default of the device.
        gather: Only rank 0 receives what streams; the streams of all other ranks are empty.
    """

    def __init__(
        self, weight_map: WeightMap, parallel: ParallelState, *, converts_adapters: bool = False, bucket_bytes: int | None = None,
        gather: bool = False,
    ):  # fmt: skip
        self.map, self.parallel, self.converts_adapters, self.gather = weight_map, parallel, converts_adapters, gather
        self.bucket_bytes = bucket_bytes or DEFAULT_BUCKET_MB[parallel.device.type] * MIB
        self._plans: dict[str, WeightSyncPlan] = {}
        self._buffers = weight_map.buffer_names()

    def tensors(self, chunks: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
        """Return this rank's parameters, and the buffers that a checkpoint holds, by their names in the whole model."""
        tensors = {}
        for chunk in chunks:
            first_layer = min((layer.layer_number for layer in chunk.decoder.layers), default=1) - 1
            num_experts = chunk.config.num_moe_experts or 0
            first_expert = self.parallel.ep_rank * (num_experts // self.parallel.ep_size)
            for local, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                name = with_global_numbers(local, first_layer=first_layer, first_expert=first_expert)
                if is_of_adapter(name) == self.converts_adapters and (isinstance(tensor, torch.nn.Parameter) or name in self._buffers):
                    tensors[name] = tensor
        return tensors

    @torch.no_grad()
    def load(self, chunks: Sequence[GPTModel], read: Callable[[str], torch.Tensor]) -> None:
        """Load every parameter from a checkpoint. Collective.

        Args:
            read: Returns the full Hugging Face tensor of a name.

        Raises:
            ValueError: If a tensor of the model is on no rank, because training would continue without it; or if a shard has another shape
                than the parameter.
        """
        local = self.tensors(chunks)
        self.map.check_held(owned.name for owned in self._catalogue(local))
        with activity.phase("loading weights", total=len(local), unit="tensors"):
            self._load(local, read)

    def _load(self, local: dict[str, torch.Tensor], read: Callable[[str], torch.Tensor]) -> None:
        p = self.parallel
        for name, tensor in local.items():
            self.mark(name, tensor)
            shard = self.map.load(name, read, tp_rank=p.tp_rank, tp_size=p.tp_size, expert_tp_rank=p.etp_rank, expert_tp_size=p.etp_size)
            if shard.shape != tensor.shape:
                raise ValueError(f"{name}: Megatron's shard has shape {tuple(tensor.shape)}, the checkpoint's {tuple(shard.shape)}")
            tensor.copy_(shard)
            activity.advance()

    def mark(self, name: str, tensor: Any) -> None:
        """Set the attributes by which Megatron knows how a parameter is sharded.

        Megatron's initialisation, which is skipped, would have set them.
        """
        kind = self.map.entry(name)
        if kind.cut is not ShardSplit.REPLICATED or kind.is_expert:
            # Without it the gradient norm counts the shards of the first TP rank only. A replicated bias belongs to this rank's expert.
            tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, int(kind.cut is ShardSplit.ROW), 1
        if kind.is_expert:
            # Megatron sets it only with EP > 1; with EP 1 and ETP below TP, experts too have a separate data-parallel group.
            tensor.allreduce = False

    def stream(
        self, local: dict[str, torch.Tensor], kind: str, *, prepare: Prepare = lambda tensor: tensor, in_slices: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """Yield (Hugging Face name, full tensor) of every weight, layer by layer. Collective.

        Every rank receives the tensors; with `gather` only rank 0 does.

        A yielded tensor may be a view, also of a live parameter, and stays valid until the stream ends: clone it to keep it longer.

        Args:
            kind: Name of the kind of stream, the same on every rank. All streams of one kind have the same names, shapes and dtypes.
            prepare: Converts each tensor to what is sent, when its turn comes; shape and dtype stay the same.
            in_slices: Yield a `TensorSlice` for each slice of a tensor that is in several buckets, so that no more than two buckets are in
                memory. Otherwise the full tensor is yielded once all its slices have arrived.
        """
        in_slices = in_slices and FAMILIES[self.map.shape.architecture].fused_experts is None
        streamed = self.plan(local, kind).stream(local, prepare, in_slices=in_slices)
        if not in_slices:
            streamed = joined(streamed)
        return streamed if self.converts_adapters else as_stored(streamed, self.map.shape)

    def plan(self, local: dict[str, torch.Tensor], kind: str) -> WeightSyncPlan:
        """Return the plan of a kind of stream, which is made at its first stream. Collective.

        The caller names the kind. A stage that has no tensor of two kinds could not distinguish them by its own list of tensors, and would
        not take part when the other stages plan the second kind.

        Args:
            kind: Name of the kind of stream, the same on every rank.
        """
        if kind not in self._plans:
            make = Rank0WeightGather if self.gather else WeightSyncPlan
            self._plans[kind] = make(self._catalogue(local), self.map, self.parallel, bucket_bytes=self.bucket_bytes)
        return self._plans[kind]

    def whole_bytes(self, local: dict[str, torch.Tensor]) -> int:
        """Return the size of the whole model in bytes, as it would be written. Collective."""
        p, total = self.parallel, 0
        for owned in self._catalogue(local):
            kind = self.map.entry(owned.name)
            pieces = 1 if kind.cut is ShardSplit.REPLICATED else p.etp_size if kind.is_expert else p.tp_size
            total += owned.num_bytes * pieces
        return total

    def forget_memory(self) -> None:
        """Release the memory that streams have used."""
        for plan in self._plans.values():
            plan.memory.forget()

    def _catalogue(self, local: dict[str, torch.Tensor]) -> list[ParameterPlacement]:
        """Return every exported parameter of the model once, in the same order on every rank. Collective."""
        p = self.parallel
        on_stage = [self._owned(name, tensor) for name, tensor in local.items() if not self.map.entry(name).is_copy]
        over_pp = [owned for rank in collectives.all_gather_object(on_stage, p.pp_group) for owned in rank]
        return list({owned.name: owned for rank in collectives.all_gather_object(over_pp, p.ep_group) for owned in rank}.values())

    def _owned(self, name: str, tensor: torch.Tensor) -> ParameterPlacement:
        p, kind = self.parallel, self.map.entry(name)
        layer, row, expert = self.map.place(name)
        on_rank, expert_rank = expert, 0
        if kind.is_expert:
            expert_rank, on_rank = divmod(expert, self.map.shape.num_experts // p.ep_size)
        position = (layer, row, on_rank)
        ranks, rows = p.etp_size if kind.is_expert else p.tp_size, len(tensor) if tensor.dim() else 1
        return ParameterPlacement(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.nbytes,
            BucketPart.from_cut(kind.cut, kind.is_expert),
            position,
            p.pp_rank,
            expert_rank,
            units=0 if self.converts_adapters else num_units(kind, rows, self.map.shape, ranks),
        )


Prepare = Callable[[torch.Tensor], torch.Tensor]  # a parameter -> the tensor that is sent for it, of the same shape and dtype


class WeightSyncPlan:
    """Contents and buckets of one kind of stream, the same on every rank. Making one is collective.

    Args:
        owned: All tensors of the stream, over all ranks.
        weight_map: Names and shapes of the weights in both formats.
    """

    def __init__(self, owned: Iterable[ParameterPlacement], weight_map: WeightMap, parallel: ParallelState, *, bucket_bytes: int):
        self.map, self.parallel, self.bucket_bytes = weight_map, parallel, bucket_bytes
        self._groups = {BucketPart.DENSE: parallel.tp_group, BucketPart.EXPERTS: parallel.expert_group}
        self._place = {part: collectives.rank_in(group) for part, group in self._groups.items()}  # this rank's row of a gather
        positions = collectives.all_gather_object((parallel.ep_rank, parallel.etp_rank), parallel.expert_group)
        self._row = {position: row for row, position in enumerate(positions)}  # row of each rank in a gather of experts
        self.ranks = RankCounts(parallel.pp_size, parallel.tp_size, len(positions))
        self.buckets = fill(owned, self.ranks, bucket_bytes)
        self.memory = BucketMemory(parallel.device, peak_bytes(self.buckets, self.ranks))

    def stream(self, local: Mapping[str, torch.Tensor], prepare: Prepare, *, in_slices: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield (Hugging Face name, full tensor or `TensorSlice`) of every tensor, on every rank. Collective.

        A tensor arrives in slices if it is in several buckets.

        A yielded tensor may be a view of a live parameter or of a bucket. It stays valid until the stream ends. While the receiver uses one
        bucket the next is being gathered; there are never more than two. A receiver that stops early still takes part in the remaining
        collectives.

        Args:
            prepare: Converts each tensor to what is sent; shape and dtype stay the same.
            in_slices: Yield slices of other large tensors too, instead of joining their shards in new memory.

        Raises:
            ValueError: If `local` is not what was planned.
        """
        self._check(local)
        tensors = self._own(local, prepare)
        remaining, in_flight = iter(self.buckets), deque[PendingBucket]()

        def send_next() -> None:
            in_flight.extend(self._send(bucket, tensors) for bucket in islice(remaining, 1))

        try:
            send_next()
            while in_flight:
                # The receiver holds a tensor of the previous bucket until it has one of this bucket: only then is there room for the next.
                unpacked = self._unpack(in_flight.popleft(), tensors, in_slices)
                yield from islice(unpacked, 1)
                send_next()
                yield from unpacked
        except GeneratorExit:
            for pending in in_flight:
                pending.wait()
            for bucket in remaining:
                self._send(bucket, tensors).wait()
            raise

    def _own(self, local: Mapping[str, torch.Tensor], prepare: Prepare) -> LocalTensors:
        return LocalTensors(local, prepare, self.memory)

    def _check(self, local: Mapping[str, torch.Tensor]) -> None:
        p = self.parallel
        planned = {
            slot.names[rank]
            for bucket in self.buckets
            if bucket.stage == p.pp_rank
            for slot in bucket.slots
            if (rank := p.ep_rank if slot.part is BucketPart.EXPERTS else 0) in slot.names
        }
        present = {name for name in local if not self.map.entry(name).is_copy}
        if different := sorted(planned ^ present):
            raise ValueError(f"{len(different)} tensors differ from the plan of this weight sync: {', '.join(different[:3])}")

    def _send(self, bucket: Bucket, tensors: LocalTensors) -> PendingBucket:
        p = self.parallel
        rows: list[torch.Tensor | None] = [None, None, None]
        handles = []
        parts = [part for part in BucketPart if bucket.sizes[part] and self.ranks.travels(part)]
        alone = {part: slot for part in parts if (slot := self._alone(bucket, part)) is not None}
        memory = tensors.memory.take_all([self.ranks.sharing(part) * bucket.sizes[part] for part in parts if part not in alone])
        for part in parts:
            sharing = self.ranks.sharing(part)
            if part in alone:
                buffer = _sliced(tensors.tensor(alone[part].names[0], alone[part]), alone[part]).contiguous().view(1, -1).view(torch.uint8)
            else:
                buffer = next(memory).view(sharing, -1)
                if p.pp_rank == bucket.stage:
                    self._pack(bucket, part, buffer[self._place.get(part, 0)], tensors)
            rows[part], own_rows = buffer, buffer[self._place.get(part, 0)]
            # Shards cross the stages, not full tensors: over the slow links a rank receives only its own shard.
            collectives.from_member_(own_rows, bucket.stage, p.pp_group)
            if sharing > 1:
                handles.append(collectives.start_gather(buffer, self._groups[part]))
        is_on_gpu = p.device.type == "cuda" and any(row is not None for row in rows)
        return PendingBucket(bucket, rows, handles, torch.cuda.current_stream() if is_on_gpu else None)

    def _alone(self, bucket: Bucket, part: BucketPart) -> BucketSlot | None:
        """Return the slot of a part that is a single tensor on one rank, as the embedding often is: it is sent from its own memory."""
        slots = [slot for slot in bucket.slots if slot.part is part]
        is_one = len(slots) == 1 and slots[0].num_bytes == bucket.sizes[part] and self.ranks.sharing(part) == 1
        return slots[0] if is_one and self.parallel.pp_rank == bucket.stage else None

    def _pack(self, bucket: Bucket, part: BucketPart, run: torch.Tensor, tensors: LocalTensors) -> None:
        """Copy this rank's shards of one part of a bucket into `run`, uint8 [bytes]."""
        expert_rank = self.parallel.ep_rank if part is BucketPart.EXPERTS else 0
        for slot in bucket.slots:
            if slot.part is part and expert_rank in slot.names:
                _view(run, slot).copy_(_sliced(tensors.tensor(slot.names[expert_rank], slot), slot))

    def _unpack(self, pending: PendingBucket, tensors: LocalTensors, in_slices: bool) -> Iterator[tuple[str, Any]]:
        pending.wait()
        large = self.bucket_bytes // 16 if in_slices else sys.maxsize
        for slot in pending.bucket.slots:
            rows = pending.rows[slot.part]
            for expert_rank, name in slot.names.items():
                entry = self.map.entry(name)
                if rows is None:
                    shards = [_sliced(tensors.tensor(name, slot), slot)]
                else:
                    shards = self._shards(slot, rows, expert_rank, entry.cut)
                needs_copy = len(shards) > 1 or entry.packing not in (TensorFusion.PLAIN, TensorFusion.STACK)
                if slot.is_slice or (slot.units and needs_copy and slot.num_bytes * len(shards) > large):
                    yield from self.map.export_rows(name, shards, slot.rows[0], slot.shape[0])
                else:
                    yield from self.map.export(name, shards)

    def _shards(self, slot: BucketSlot, rows: torch.Tensor, expert_rank: int, cut: ShardSplit) -> list[torch.Tensor]:
        """Return the shards of one tensor from a gather, whose rows are uint8 [ranks of the gather, bytes]."""
        if slot.part is BucketPart.EXPERTS:
            copies = 1 if cut is ShardSplit.REPLICATED else self.parallel.etp_size
            return [_view(rows[self._row[expert_rank, rank]], slot) for rank in range(copies)]
        return [_view(row, slot) for row in rows]


class BucketMemory:
    """Memory for buckets, reused on a CPU as soon as no view of it is alive, across streams too.

    On a CPU every 4 KiB of new memory is a page fault, and for dense layers over two ranks that cost half as much as gloo itself. A GPU's
    allocator reuses memory anyway.

    Args:
        max_bytes: Bytes that are kept, in use or not.
    """

    def __init__(self, device: torch.device, max_bytes: int):
        self._device, self._most = device, max_bytes
        self._mine: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [num_bytes].

        Args:
            num_bytes: Size in bytes.
        """
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        idle = sorted((buffer for buffer in self._mine if _is_idle(buffer)), key=len)
        for buffer in idle:
            if len(buffer) >= num_bytes:
                return buffer[:num_bytes]
        while idle and sum(map(len, self._mine)) + num_bytes > self._most:
            dropped = idle.pop()
            self._mine = [buffer for buffer in self._mine if buffer is not dropped]
        self._mine.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self._mine[-1][:num_bytes]

    def take_all(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Return uninitialised memory of several sizes that is reused as one."""
        return iter(self.take(sum(sizes)).split(sizes) if sizes else ())

    def forget(self) -> None:
        """Keep no memory for the next stream."""
        self._mine = []


def _is_idle(tensor: torch.Tensor) -> bool:
    """Return whether no view of the tensor is alive, in a receiver or in gloo.

    Two references remain then: the tensor, and the name in this function.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2


class LocalTensors:
    """This rank's tensors, each prepared when its turn comes, with the memory for the bytes that are sent.

    Args:
        prepare: Converts each tensor to what is sent.
    """

    def __init__(self, local: Mapping[str, torch.Tensor], prepare: Prepare, memory: BucketMemory):
        self._mine, self._prepare, self.memory = local, prepare, memory
        self._last: tuple[str, torch.Tensor] | None = None  # a slice of it may be asked for next

    def tensor(self, name: str, slot: BucketSlot) -> torch.Tensor:
        """Return the prepared tensor of a name.

        Args:
            slot: Its planned shape and dtype.

        Raises:
            ValueError: If shape or dtype differ from the plan. A copy into the bucket would broadcast and convert it without an error.
        """
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        with torch.no_grad():
            tensor = self._prepare(self._mine[name]).detach()
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} does not match the planned {slot.dtype} {slot.shape}")
        self._last = (name, tensor) if slot.is_slice else None
        return tensor


class PendingBucket:
    """A bucket that is being gathered.

    Args:
        rows: Gathered bytes by part, uint8 [ranks, bytes]; None for a part of which nothing is sent.
        handles: The collectives that are running.
        packed_on: CUDA stream on which the bucket was packed; None on a CPU.
    """

    def __init__(self, bucket: Bucket, rows: list[torch.Tensor | None], handles: list[Any], packed_on: Any):
        self.bucket, self.rows, self._works, self._packed_on = bucket, rows, handles, packed_on

    def wait(self) -> None:
        """Wait for the bucket.

        On a GPU the host does not wait: work that is queued from now on runs after the packing and the gather.
        """
        for work in self._works:
            work.wait()
        self._works = []
        if self._packed_on is None or self._packed_on == (stream := torch.cuda.current_stream()):
            return
        stream.wait_stream(self._packed_on)  # the receiver works on another CUDA stream
        for rows in self.rows:
            if rows is not None:
                rows.record_stream(stream)


def _view(run: torch.Tensor, slot: BucketSlot) -> torch.Tensor:
    shape = (-1, *slot.shape[1:]) if slot.is_slice else slot.shape
    return run[slot.start : slot.start + slot.num_bytes].view(slot.dtype).view(shape)


def _sliced(tensor: torch.Tensor, slot: BucketSlot) -> torch.Tensor:
    """Return the rows of a shard that are in a slot."""
    return tensor[slice(*slot.rows)] if slot.is_slice else tensor


class Rank0WeightGather(WeightSyncPlan):
    """`WeightSyncPlan` whose stream is empty on all ranks but 0. They must still run it to its end, because they send in it.

    On rank 0 the next bucket is being received while the receiver uses the current one. A sender holds one bucket.

    Args:
        bucket_bytes: Maximum bytes of a bucket.
    """

    def __init__(self, owned: Iterable[ParameterPlacement], weight_map: WeightMap, parallel: ParallelState, *, bucket_bytes: int):
        super().__init__(owned, weight_map, parallel, bucket_bytes=bucket_bytes)
        p = parallel
        # The first of the ranks that hold the same shard sends it. Rank 0 comes first and reads its own shards from their memory.
        first: dict[tuple[BucketPart, int, Any], int] = {}
        for rank, (stage, tp, expert) in enumerate(collectives.all_gather_object((p.pp_rank, p.tp_rank, (p.ep_rank, p.etp_rank)))):
            first.setdefault((BucketPart.DENSE, stage, tp), rank)
            first.setdefault((BucketPart.EXPERTS, stage, expert), rank)
            first.setdefault((BucketPart.WHOLE, stage, 0), rank)
        positions = {
            BucketPart.WHOLE: [0],
            BucketPart.DENSE: list(range(p.tp_size)),
            BucketPart.EXPERTS: sorted(self._row, key=self._row.__getitem__),
        }
        # Sending ranks by part and stage, in the order of the rows of a gather.
        self._senders = {
            (part, stage): [first[part, stage, position] for position in positions[part]]
            for part in BucketPart
            for stage in range(p.pp_size)
        }

    def stream(self, local: Mapping[str, torch.Tensor], prepare: Prepare, *, in_slices: bool = False) -> Iterator[tuple[str, Any]]:
        if self.parallel.rank == 0:
            yield from super().stream(local, prepare, in_slices=in_slices)
            return
        self._check(local)
        tensors = self._own(local, prepare)
        for bucket in self.buckets:
            self._send(bucket, tensors)

    def _send(self, bucket: Bucket, tensors: LocalTensors) -> PendingBucket:
        """Start to receive a bucket on rank 0; send this rank's shards on the others."""
        own_rank, stage = self.parallel.rank, bucket.stage
        rows: list[torch.Tensor | None] = [None, None, None]
        handles = []
        senders_by_part = {part: self._senders[part, stage] for part in BucketPart if bucket.sizes[part]}
        sent = {part: senders for part, senders in senders_by_part.items() if senders != [0] and own_rank in (0, *senders)}
        memory = tensors.memory.take_all([(len(senders) if own_rank == 0 else 1) * bucket.sizes[part] for part, senders in sent.items()])
        for part, senders in sent.items():
            buffer = next(memory).view(-1, bucket.sizes[part])
            for row, rank in zip(buffer, senders if own_rank == 0 else [own_rank], strict=True):
                if rank == own_rank:
                    self._pack(bucket, part, row, tensors)
                else:
                    handles.append(collectives.start_receive(row, rank))
            if own_rank == 0:
                rows[part] = buffer
            else:
                collectives.send(buffer[0], 0)
        return PendingBucket(bucket, rows, handles, torch.cuda.current_stream() if self.parallel.device.type == "cuda" else None)
