"""A push of weights to rank 0 alone, which hands them on to rollout servers: of each shard one rank sends, and nobody else takes part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.buckets import Coming, Own, Prepare, PushPlan
from megatron_grpo.weights.buckets import Bucket, Owned, Part
from megatron_grpo.weights.mapping import WeightMap


class PushToFirst(PushPlan):
    """As `PushPlan`, but every rank other than 0 has an empty stream. It runs it to its end all the same, and sends in it.

    On rank 0 a bucket is on its way while the receiver has the one before. A sender holds one bucket.
    """

    def __init__(self, owned: Iterable[Owned], weight_map: WeightMap, parallel: ParallelState, *, bucket_bytes: int):
        super().__init__(owned, weight_map, parallel, bucket_bytes=bucket_bytes)
        p = parallel
        # Of ranks that hold the same shard the first sends: rank 0 is the first of all, and reads its own where they live.
        first: dict[tuple[Part, int, Any], int] = {}
        for rank, (stage, tp, expert) in enumerate(collectives.from_all((p.pp_rank, p.tp_rank, (p.ep_rank, p.etp_rank)))):
            first.setdefault((Part.DENSE, stage, tp), rank)
            first.setdefault((Part.EXPERTS, stage, expert), rank)
            first.setdefault((Part.WHOLE, stage, 0), rank)
        places = {Part.WHOLE: [0], Part.DENSE: list(range(p.tp_size)), Part.EXPERTS: sorted(self._row, key=self._row.__getitem__)}
        # By part and stage, in the order of the rows of a gather.
        self._senders = {
            (part, stage): [first[part, stage, place] for place in places[part]] for part in Part for stage in range(p.pp_size)
        }

    def stream(self, mine: Mapping[str, torch.Tensor], prepare: Prepare) -> Iterator[tuple[str, torch.Tensor]]:
        if self.parallel.rank == 0:
            yield from super().stream(mine, prepare)
            return
        self._check(mine)
        own = self._own(mine, prepare)
        for bucket in self.buckets:
            self._send(bucket, own)

    def _send(self, bucket: Bucket, own: Own) -> Coming:
        """Rank 0 begins to receive, all others send what is theirs to send."""
        me, stage = self.parallel.rank, bucket.stage
        senders = {part: self._senders[part, stage] for part in Part if bucket.sizes[part] and self._senders[part, stage] != [0]}
        sizes = [bucket.sizes[part] if me in senders.get(part, ()) else 0 for part in Part]
        packed = self._pack(bucket, sizes, own).split(sizes) if any(sizes) else None
        if me != 0:
            for part in senders:
                if sizes[part] and packed is not None:
                    collectives.send(packed[part].contiguous(), 0)
            return Coming(bucket, [None, None, None], [], None)
        rows: list[torch.Tensor | None] = [None, None, None]
        works = []
        for part, ranks in senders.items():
            found = own.memory.take(len(ranks) * bucket.sizes[part]).view(len(ranks), -1)
            for row, rank in zip(found, ranks, strict=True):
                if rank == 0 and packed is not None:
                    row.copy_(packed[part])
                else:
                    works.append(collectives.start_receive(row, rank))
            rows[part] = found
        return Coming(bucket, rows, works, torch.cuda.current_stream() if self.parallel.device.type == "cuda" else None)
