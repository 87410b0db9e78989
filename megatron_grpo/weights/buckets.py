"""Plan of a weight update: the object a sampler receives (`WeightUpdate`), and the parameters that are sent together.

The plan is made once, from names and byte counts. The order is that of the model: stage, layer, row of the table of weights; parameters
that all expert ranks hold at the same position are adjacent. A sampler that packs each layer when it is complete therefore never holds
more than one.
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

ALIGNMENT = 16  # bytes: valid start for every dtype, so one buffer can mix dtypes
MIB = 2**20
# A collective of 512 MiB takes 40 times its start-up time. On a CPU, 16 MiB stay in the cache.
DEFAULT_BUCKET_MB = {"cuda": 512, "cpu": 16}


class BucketPart(IntEnum):
    """Parts of a rank's byte buffer, by the ranks that hold the other shards of its parameters."""

    WHOLE = 0  # none: replicated
    DENSE = 1  # the tensor-parallel ranks
    EXPERTS = 2  # the ranks that share a stage's experts: expert tensor parallel x expert parallel

    @classmethod
    def of(cls, cut: ShardCut, is_expert: bool) -> BucketPart:
        """Return the part for a parameter with this cut.

        Args:
            cut: How the parameter is cut into shards.
            is_expert: Whether it belongs to an expert.
        """
        return cls.EXPERTS if is_expert else cls.WHOLE if cut is ShardCut.REPLICATED else cls.DENSE


@dataclass(frozen=True, slots=True)
class RankCounts:
    """Numbers of ranks that share the weights being sent."""

    stages: int
    tensor: int
    experts: int  # expert tensor parallel x expert parallel

    def sharing(self, part: BucketPart) -> int:
        """Return how many ranks share the parameters of a part.

        Args:
            part: Part of a bucket.
        """
        return (1, self.tensor, self.experts)[part]

    def travels(self, part: BucketPart) -> bool:
        """Return whether a part needs communication. If not, it is read in place.

        Args:
            part: Part of a bucket.
        """
        return self.stages > 1 or self.sharing(part) > 1


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """One parameter of the whole model, as each rank that holds it has it."""

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
    """A position in the buffer of every rank that holds a parameter there, for parameters of equal shape and dtype."""

    part: BucketPart
    start: int  # bytes from the beginning of its part
    num_bytes: int
    shape: tuple[int, ...]
    dtype: Any
    names: Mapping[int, str]  # by expert rank, in order; a rank may hold nothing here


@dataclass(slots=True)
class Bucket:
    """A buffer with consecutive parameters of one stage."""

    stage: int
    full_bytes: int  # of full tensors: limit of the bucket, and of one gather of a larger parameter
    slots: list[BucketSlot] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])  # bytes of a rank's buffer, by part
    whole: int = 0  # bytes of all shards

    def at_once(self, sharing: int) -> int:
        """Return the bytes of a rank's buffer per gather.

        On a CPU, gloo takes 1.4 times as long for one gather of 64 MiB as for four of 16 MiB.

        Args:
            sharing: Number of ranks that share the part.
        """
        return max(1, self.full_bytes // sharing)

    def num_collectives(self, ranks: RankCounts) -> int:
        """Return the number of collectives of this bucket.

        There is one over stages for each part, and one for each shared part, or several for a parameter that is larger than a bucket.

        Args:
            ranks: Parallel sizes.
        """
        shared = [(self.sizes[part], ranks.sharing(part)) for part in BucketPart if ranks.sharing(part) > 1]
        over_stages = sum(map(bool, self.sizes)) if ranks.stages > 1 else 0
        return over_stages + sum(-(-size // self.at_once(sharing)) for size, sharing in shared)

    def received_bytes(self, ranks: RankCounts, stage: int) -> int:
        """Return the bytes received by a rank of `stage`.

        Args:
            ranks: Parallel sizes.
            stage: Pipeline stage of the rank.
        """
        return (sum(self.sizes) if stage != self.stage else 0) + sum(self.sizes[part] * (ranks.sharing(part) - 1) for part in BucketPart)

    def memory_bytes(self, ranks: RankCounts) -> int:
        """Return the bytes a bucket needs in transit: the shards of all ranks, and one piece if it is gathered in pieces.

        Args:
            ranks: Parallel sizes.
        """
        gathered = sum(self.sizes[part] * ranks.sharing(part) for part in BucketPart if ranks.travels(part))
        return gathered + (self.full_bytes if gathered > self.full_bytes else 0)


def fill(owned: Iterable[OwnedParameter], ranks: RankCounts, bucket_bytes: int) -> list[Bucket]:
    """Distribute parameters over buckets of at most `bucket_bytes` of full tensors. A larger parameter has its own bucket.

    Args:
        owned: Parameters of the whole model.
        ranks: Numbers of ranks that share them.
        bucket_bytes: Bytes of full tensors per bucket.

    Raises:
        ValueError: Parameters of several expert ranks at one position differ in shape, dtype or part; one gather takes them all.
    """
    by_position: dict[tuple[int, tuple[int, int, int]], list[OwnedParameter]] = {}
    for tensor in owned:
        by_position.setdefault((tensor.stage, tensor.place), []).append(tensor)
    buckets: list[Bucket] = []
    for (stage, _), same_position in sorted(by_position.items(), key=itemgetter(0)):
        first, length = same_position[0], -(-same_position[0].num_bytes // ALIGNMENT) * ALIGNMENT
        names = {tensor.expert_rank: tensor.name for tensor in sorted(same_position, key=lambda tensor: tensor.expert_rank)}
        if len({(tensor.shape, tensor.dtype, tensor.part) for tensor in same_position}) > 1 or len(names) < len(same_position):
            raise ValueError(
                "tensors at the same position of the model differ in shape or dtype: "
                f"{', '.join(str((tensor.name, tensor.shape, tensor.dtype)) for tensor in same_position)}"
            )
        part = first.part if ranks.sharing(first.part) > 1 else BucketPart.WHOLE  # one run of bytes for all that is on one rank
        gathered_bytes = length * ranks.sharing(part)
        if not buckets or buckets[-1].stage != stage or buckets[-1].whole + gathered_bytes > bucket_bytes:
            buckets.append(Bucket(stage, bucket_bytes))
        bucket = buckets[-1]
        bucket.slots.append(BucketSlot(part, bucket.sizes[part], first.num_bytes, first.shape, first.dtype, names))
        bucket.sizes[part] += length
        bucket.whole += gathered_bytes
    return buckets


def num_collectives(buckets: Sequence[Bucket], ranks: RankCounts) -> int:
    """Return the number of collectives of one weight update, which is the same on every rank.

    Args:
        buckets: Buckets of one weight update, in order.
        ranks: Parallel sizes.
    """
    return sum(bucket.num_collectives(ranks) for bucket in buckets)


def most_bytes(buckets: Sequence[Bucket], ranks: RankCounts) -> int:
    """Return the peak bytes of two buckets on a rank: one being received by the sampler, and the next in transit.

    Args:
        buckets: Buckets of one weight update, in order.
        ranks: Parallel sizes.
    """
    bytes_of_buckets = [bucket.memory_bytes(ranks) for bucket in buckets]
    return max([sum(pair) for pair in pairwise(bytes_of_buckets)] or bytes_of_buckets, default=0)


NO_VERSION = -1  # of an update that makes no version: a base before its adapter, a trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """One set of tensors for a holder of weights.

    `tensors` yields (Hugging Face name, full tensor), is consumed once, and may be collective. A tensor is valid until the stream ends;
    clone it to keep it longer.
    """

    kind: Literal["weights", "merged", "adapter"]  # all weights; all weights with an adapter merged; an adapter alone
    version: int  # version of the weights after this update; or NO_VERSION
    tensors: Iterable[tuple[str, torch.Tensor]]
    config: Mapping[str, Any] = field(default_factory=dict)  # of an adapter, as PEFT writes it
    moves_tower: bool = False  # vision weights are included, so cached image embeddings are stale
