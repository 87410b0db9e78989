"""A push of weights: what a sampler takes (`WeightUpdate`), and which parameters are sent together, planned once, from names and bytes.

The order is that of the model: stage, layer, row of the table of weights, and what all expert ranks hold at the same place side by side. So
a sampler that packs a layer when it is complete never holds more than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from megatron_grpo.weights.names import ShardCut

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: every dtype may begin there, so dtypes mix in one run
MIB = 2**20
# A collective of 512 MiB lasts 40 times as long as it takes to start. On a CPU 16 MiB stay in the cache.
DEFAULT_BUCKET_MB = {"cuda": 512, "cpu": 16}


class BucketPart(IntEnum):
    """The parts of a rank's run of bytes, by who has the other shards of what lies there."""

    WHOLE = 0  # nobody
    DENSE = 1  # the tensor-parallel ranks
    EXPERTS = 2  # the ranks that share a stage's experts: expert tensor parallel x expert parallel

    @classmethod
    def of(cls, cut: ShardCut, is_expert: bool) -> BucketPart:
        return cls.EXPERTS if is_expert else cls.WHOLE if cut is ShardCut.REPLICATED else cls.DENSE


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks share what is pushed."""

    stages: int
    tensor: int
    experts: int  # expert tensor parallel x expert parallel

    def sharing(self, part: BucketPart) -> int:
        return (1, self.tensor, self.experts)[part]

    def travels(self, part: BucketPart) -> bool:
        """Whether other ranks need, or have, what one holds of it. If not it is read where it lives."""
        return self.stages > 1 or self.sharing(part) > 1


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter of the whole model, as each of the ranks that hold it has it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    num_bytes: int
    part: BucketPart
    place: tuple[int, int, int]  # layer, row of the table, expert on its rank
    stage: int
    expert_rank: int = 0


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """A place in the run of every rank that holds something there, for parameters that are alike."""

    part: BucketPart
    start: int  # bytes from the beginning of its part
    num_bytes: int
    shape: tuple[int, ...]
    dtype: Any
    names: Mapping[int, str]  # by expert rank, in order; an expert rank may hold nothing there


@dataclass(slots=True)
class Bucket:
    """A run of one stage's parameters."""

    stage: int
    full_bytes: int  # of full tensors: what it may hold, and what one gather may bring, if a parameter is larger
    slots: list[BucketSlot] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])  # bytes of a rank's run, by part
    whole: int = 0  # bytes of all shards

    def at_once(self, sharing: int) -> int:
        """Bytes of a rank's run that go in one gather. On a CPU gloo takes 1.4 times as long for 64 MiB at once as for four times 16."""
        return max(1, self.full_bytes // sharing)

    def num_collectives(self, ranks: Ranks) -> int:
        """One over stages, and for each part that several ranks share one, or as many as a parameter takes that is larger than a bucket."""
        shared = [(self.sizes[part], ranks.sharing(part)) for part in BucketPart if ranks.sharing(part) > 1]
        return (ranks.stages > 1) + sum(-(-size // self.at_once(sharing)) for size, sharing in shared)

    def received_bytes(self, ranks: Ranks, stage: int) -> int:
        """By a rank of that stage."""
        return (sum(self.sizes) if stage != self.stage else 0) + sum(self.sizes[part] * (ranks.sharing(part) - 1) for part in BucketPart)

    def memory_bytes(self, ranks: Ranks) -> int:
        """On its way: a rank's run, what is gathered of it, and a piece of what is gathered in pieces."""
        packed = sum(self.sizes[part] for part in BucketPart if ranks.travels(part))
        gathered = sum(self.sizes[part] * ranks.sharing(part) for part in BucketPart if ranks.sharing(part) > 1)
        return packed + gathered + (self.full_bytes if gathered > self.full_bytes else 0)


def fill(owned: Iterable[Owned], ranks: Ranks, bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` of full tensors; a parameter that is larger has one to itself.

    Raises ValueError where parameters at one place of several expert ranks are not alike, since one gather takes them all.
    """
    beside: dict[tuple[int, tuple[int, int, int]], list[Owned]] = {}
    for one in owned:
        beside.setdefault((one.stage, one.place), []).append(one)
    buckets: list[Bucket] = []
    for (stage, _), alike in sorted(beside.items(), key=itemgetter(0)):
        first, length = alike[0], -(-alike[0].num_bytes // ALIGNMENT) * ALIGNMENT
        names = {one.expert_rank: one.name for one in sorted(alike, key=lambda one: one.expert_rank)}
        if len({(one.shape, one.dtype, one.part) for one in alike}) > 1 or len(names) < len(alike):
            raise ValueError(
                f"not alike, yet at one place of the model: {', '.join(str((one.name, one.shape, one.dtype)) for one in alike)}"
            )
        whole = length * ranks.sharing(first.part)
        if not buckets or buckets[-1].stage != stage or buckets[-1].whole + whole > bucket_bytes:
            buckets.append(Bucket(stage, bucket_bytes))
        bucket = buckets[-1]
        bucket.slots.append(BucketSlot(first.part, bucket.sizes[first.part], first.num_bytes, first.shape, first.dtype, names))
        bucket.sizes[first.part] += length
        bucket.whole += whole
    return buckets


def num_collectives(buckets: Sequence[Bucket], ranks: Ranks) -> int:
    """Of one push; the same on every rank."""
    return sum(bucket.num_collectives(ranks) for bucket in buckets)


def most_bytes(buckets: Sequence[Bucket], ranks: Ranks) -> int:
    """That two buckets take on a rank: one with the receiver, and the next one, on its way."""
    held = [bucket.memory_bytes(ranks) for bucket in buckets]
    return max([sum(pair) for pair in pairwise(held)] or held, default=0)


NO_VERSION = -1  # of an update that makes no version by itself: a base before its adapter, a trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """What a holder takes at once. `tensors` yields (Hugging Face name, full tensor), is consumed once, and may be collective.

    A tensor stays as it is until the stream ends; who keeps one longer clones it.
    """

    kind: Literal["weights", "merged", "adapter"]  # all weights; all weights with an adapter added in; an adapter alone
    version: int  # what the holder has when it has taken this; or NO_VERSION
    tensors: Iterable[tuple[str, torch.Tensor]]
    config: Mapping[str, Any] = field(default_factory=dict)  # of an adapter, as PEFT writes it
    moves_tower: bool = False  # the weights that see pictures are among them, so what was made of pictures is stale
