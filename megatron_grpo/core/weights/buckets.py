"""Plan of a weight update: the object a sampler receives (`WeightUpdate`), and the parameters that are sent together.

The plan is made once, from names and byte counts. The order is that of the model: stage, layer, row of the table of weights; parameters
that all expert ranks hold at the same position are adjacent. A sampler that packs each layer when it is complete therefore never holds
more than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from megatron_grpo.core.weights.names import ShardSplit

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: valid start for every dtype, so one buffer can mix dtypes
MIB = 2**20
# A collective of 512 MiB takes 40 times its start-up time. On a CPU, 16 MiB stay in the cache.
DEFAULT_BUCKET_MB = {"cuda": 512, "cpu": 16}
SMALLEST_SLICE = 1 / 64  # of a bucket: less room than this at its end stays empty


class BucketPart(IntEnum):
    """Parts of a rank's byte buffer, by the ranks that hold the other shards of its parameters."""

    WHOLE = 0  # none: replicated
    DENSE = 1  # the tensor-parallel ranks
    EXPERTS = 2  # the ranks that share a stage's experts: expert tensor parallel x expert parallel

    @classmethod
    def from_cut(cls, cut: ShardSplit, is_expert: bool) -> BucketPart:
        """Return the part for a parameter with this cut.

        Args:
            is_expert: Whether it belongs to an expert.
        """
        return cls.EXPERTS if is_expert else cls.WHOLE if cut is ShardSplit.REPLICATED else cls.DENSE


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Numbers of ranks that share the weights being sent.

    Args:
        experts: Number of ranks of expert tensor parallelism x expert parallelism.
    """

    stages: int
    tensor: int
    experts: int

    def sharing(self, part: BucketPart) -> int:
        """Return how many ranks share the parameters of a part."""
        return (1, self.tensor, self.experts)[part]

    def travels(self, part: BucketPart) -> bool:
        """Return whether a part needs communication. If not, it is read in place."""
        return self.stages > 1 or self.sharing(part) > 1


@dataclass(frozen=True, slots=True)
class ParameterPlacement:
    """One parameter of the whole model, as each rank that holds it has it.

    Args:
        place: (layer, row of the table, expert on its rank).
        units: Equal runs of rows between which a shard may be sliced; 0: it has no rows of its own in the full tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    num_bytes: int
    part: BucketPart
    place: tuple[int, int, int]
    stage: int
    expert_rank: int = 0
    units: int = 0


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """A position in the buffer of every rank that holds a parameter there, for parameters of equal shape and dtype.

    It has the units from `begin` to `end` of each shard: all of them, or a slice. A shard without units is one.

    Args:
        start: Offset in bytes from the beginning of its part.
        shape: Shape of the shard.
        names: Names by expert rank, in order; a rank may hold nothing here.
    """

    part: BucketPart
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: Any
    names: Mapping[int, str]
    begin: int = 0
    end: int = 1
    units: int = 0

    @property
    def is_slice(self) -> bool:
        """Whether other slots have the rest of the shard."""
        return self.end - self.begin < self.units

    @property
    def shard_bytes(self) -> int:
        """Size of the whole shard in bytes."""
        return self.num_bytes * max(1, self.units) // (self.end - self.begin)

    @property
    def rows(self) -> tuple[int, int]:
        """First row of the shard that is here, and the one past the last."""
        per_unit = self.shape[0] // self.units
        return self.begin * per_unit, self.end * per_unit


@dataclass(slots=True)
class Bucket:
    """A buffer with consecutive parameters of one stage.

    Args:
        sizes: Bytes of a rank's buffer, by part.
        num_bytes: Bytes of all shards, without what is read in place.
    """

    stage: int
    slots: list[BucketSlot] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])
    num_bytes: int = 0

    def num_collectives(self, ranks: RankCounts) -> int:
        """Return the number of collectives of this bucket.

        For each part that it has there is one over stages, and one over the ranks that share the part.
        """
        return sum((ranks.stages > 1) + (ranks.sharing(part) > 1) for part in BucketPart if self.sizes[part])

    def received_bytes(self, ranks: RankCounts, stage: int) -> int:
        """Return the bytes received by a rank of `stage`."""
        return (sum(self.sizes) if stage != self.stage else 0) + sum(self.sizes[part] * (ranks.sharing(part) - 1) for part in BucketPart)

    def memory_bytes(self, ranks: RankCounts) -> int:
        """Return the bytes a bucket needs in transit: the shards of all ranks."""
        return sum(self.sizes[part] * ranks.sharing(part) for part in BucketPart if ranks.travels(part))


def fill(owned: Iterable[ParameterPlacement], ranks: RankCounts, bucket_bytes: int) -> list[Bucket]:
    """Distribute parameters over buckets of at most `bucket_bytes` of full tensors.

    What does not fit into the rest of a bucket is sliced. A parameter that cannot be sliced, and is larger, has its own bucket.

    Args:
        bucket_bytes: Bytes of full tensors per bucket.

    Raises:
        ValueError: Parameters of several expert ranks at one position differ in shape, dtype or part; one gather takes them all.
    """
    by_position: dict[tuple[int, tuple[int, int, int]], list[ParameterPlacement]] = {}
    for tensor in owned:
        by_position.setdefault((tensor.stage, tensor.place), []).append(tensor)
    buckets: list[Bucket] = []
    for (stage, _), same_position in sorted(by_position.items(), key=itemgetter(0)):
        first = same_position[0]
        names = {tensor.expert_rank: tensor.name for tensor in sorted(same_position, key=lambda tensor: tensor.expert_rank)}
        if len({(tensor.shape, tensor.dtype, tensor.part) for tensor in same_position}) > 1 or len(names) < len(same_position):
            raise ValueError(
                "tensors at the same position of the model differ in shape or dtype: "
                f"{', '.join(str((tensor.name, tensor.shape, tensor.dtype)) for tensor in same_position)}"
            )
        part = first.part if ranks.sharing(first.part) > 1 else BucketPart.WHOLE  # one run of bytes for all that is on one rank
        sharing, units, begin = ranks.sharing(part), max(1, first.units), 0
        unit_bytes = max(1, first.num_bytes // units)
        while begin < units:
            if not buckets or buckets[-1].stage != stage:
                buckets.append(Bucket(stage))
            bucket, end = buckets[-1], units
            if ranks.travels(part):
                end = min(units, begin + (bucket_bytes - bucket.num_bytes) // sharing // ALIGNMENT * ALIGNMENT // unit_bytes)
            if end < units and (end - begin) * unit_bytes * sharing < bucket_bytes * SMALLEST_SLICE:
                if bucket.num_bytes:
                    buckets.append(Bucket(stage))
                    continue
                end = max(end, begin + 1)
            num_bytes = first.num_bytes * (end - begin) // units
            bucket.slots.append(
                BucketSlot(part, bucket.sizes[part], num_bytes, first.shape, first.dtype, names, begin=begin, end=end, units=first.units)
            )
            length = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            bucket.sizes[part] += length
            bucket.num_bytes += length * sharing if ranks.travels(part) else 0
            begin = end
    return buckets


def num_collectives(buckets: Sequence[Bucket], ranks: RankCounts) -> int:
    """Return the number of collectives of one weight update, which is the same on every rank.

    Args:
        buckets: Buckets of one weight update, in order.
    """
    return sum(bucket.num_collectives(ranks) for bucket in buckets)


def peak_bytes(buckets: Sequence[Bucket], ranks: RankCounts) -> int:
    """Return the peak bytes of two buckets on a rank: one being received by the sampler, and the next in transit.

    Args:
        buckets: Buckets of one weight update, in order.
    """
    bytes_of_buckets = [bucket.memory_bytes(ranks) for bucket in buckets]
    return max([sum(pair) for pair in pairwise(bytes_of_buckets)] or bytes_of_buckets, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlice:
    """Some rows of a tensor, or some columns of these, where a bucket has no room for all of it. Each element arrives once.

    Args:
        start: Index of its first element in the tensor.
        shape: Shape of the tensor.
    """

    part: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the slice in bytes."""
        return self.part.nbytes

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the slice in the tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.part.shape, strict=True))

    @property
    def is_last(self) -> bool:
        """Whether it has the tensor's last element, as one of its slices does."""
        return all(first + size == length for first, size, length in zip(self.start, self.part.shape, self.shape, strict=True))


def joined(tensors: Iterable[tuple[str, Any]], *, unless: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[str, Any]]:
    """Yield the same tensors, with those that arrive in slices joined.

    Args:
        tensors: (name, tensor or `TensorSlice`).
        unless: Returns whether the slices of a tensor are yielded as they are.

    Raises:
        ValueError: Slices of a tensor are missing.
    """
    waiting: dict[str, tuple[torch.Tensor, int]] = {}
    for name, tensor in tensors:
        if not isinstance(tensor, TensorSlice) or unless(name):
            yield name, tensor
            continue
        if name not in waiting:
            waiting[name] = tensor.part.new_empty(tensor.shape), math.prod(tensor.shape)
        full, missing = waiting.pop(name)
        full[tensor.index] = tensor.part
        if missing > tensor.part.numel():
            waiting[name] = full, missing - tensor.part.numel()
        else:
            yield name, full
    if waiting:
        raise ValueError(f"slices are missing of {', '.join(sorted(waiting)[:3])}")


NO_VERSION = -1  # of an update that makes no version: a base before its adapter, a trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """One set of tensors for a holder of weights.

    `tensors` yields (Hugging Face name, full tensor), is consumed once, and may be collective. For a receiver that takes slices, a tensor
    may be a `TensorSlice`. A tensor is valid until the stream ends; clone it to keep it longer.

    Args:
        kind: "weights" (all), "merged" (all, with an adapter merged) or "adapter" (an adapter alone).
        version: Version of the weights after this update; or NO_VERSION.
        config: Configuration of an adapter, as PEFT writes it.
        moves_tower: Whether vision weights are included, so cached image embeddings are stale.
    """

    kind: Literal["weights", "merged", "adapter"]
    version: int
    tensors: Iterable[tuple[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    moves_tower: bool = False
