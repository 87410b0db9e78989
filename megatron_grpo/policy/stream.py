"""A micro-batch as tensors on this rank's device: its part of the packed stream, and how attention should read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_grpo.parallel.context import gathered_places, held_positions, held_tokens
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.kernels import Rotation
from megatron_grpo.types import MicroBatch, Segment

# Segments of up to so many tokens are worth a copy that lets many of them run in one call of attention; longer ones are read in place.
LONGEST_COPIED = 256
# A call takes segments that are shorter than its longest one by up to this part of it, and by some tokens in any case.
MOST_FILL, FREE_FILL = 1 / 8, 4


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """n runs of places in a stream, all of one length.

    at: a slice where all lie side by side, so that they are read without a copy; else int64 [n, length]. is_fill: bool [n, length], where
    runs are filled up to one length by repeating their last place; None: nowhere.
    """

    n: int
    at: slice | torch.Tensor
    is_fill: torch.Tensor | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [heads, t, ...] -> [n, heads, length, ...]."""
        if isinstance(self.at, slice):
            return x[:, self.at].unflatten(1, (self.n, -1)).transpose(0, 1)
        return x.transpose(0, 1)[self.at].transpose(1, 2)  # in memory a token's heads lie side by side, so whole rows are copied

    def of_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """As `of`, and 0 at fill: what is computed there is used by nobody, so nothing may come back from it."""
        found = self.of(x)
        return found if self.is_fill is None else found.masked_fill_(self.is_fill[:, None, :, None], 0.0)

    def put(self, x: torch.Tensor, values: torch.Tensor, *, add: bool = False) -> None:
        """x [heads, t, ...] becomes, or is increased by, values [n, heads, length, ...] at these places. Fill is left out."""
        x, values = x.transpose(0, 1), values.transpose(1, 2).flatten(0, 1)
        at: slice | torch.Tensor = self.at
        if isinstance(at, torch.Tensor):
            at = at.flatten()
            if self.is_fill is not None:
                real = ~self.is_fill.flatten()
                at, values = at[real], values[real]
        if add:
            x[at] += values  # no place stands twice
        else:
            x[at] = values


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One call of an attention kernel: runs of queries, each on a run of keys.

    queries: in this rank's part of the stream. keys: among the keys of all context-parallel ranks, rank after rank. mask: bool
    [n or 1, 1, queries, keys], true where a query sees a key; None: all of them, or where `is_causal`, those up to its own place.
    """

    queries: Places
    keys: Places
    is_causal: bool
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PackedStream:
    """Given to every attention layer in place of Megatron-Core's PackedSeqParams.

    `qkv_format` is not "thd": Megatron then applies RoPE row by row, and the frequencies we hand it are already a gather by position.
    """

    own: tuple[Part, ...]  # each segment on itself: every query but those of padding once
    inherited: tuple[Part, ...]  # the children of each parent on that parent
    cu_seqlens: torch.Tensor  # int32 [segments + 1], of the whole stream: what Transformer Engine's attention reads
    max_seqlen: int
    rotation: Rotation | None = None  # of queries and keys, by the model that reads the stream; None: it has rotated them before
    qkv_format: str = "segments"
    local_cp_size: None = None
    cp_group: None = None


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This context-parallel rank's part of a micro-batch. t = T / cp tokens, c of the C trained positions."""

    token_ids: torch.Tensor  # int64 [1, t]
    positions: torch.Tensor  # int64 [t]
    all_positions: torch.Tensor  # int64 [T]: of the whole stream
    multiplicity: torch.Tensor  # int64 [t]: contexts that a token stands for; 0 is alignment padding
    packed: PackedStream
    predict_at: torch.Tensor  # int64 [c], places among the t tokens; shared ones stand several times
    targets: torch.Tensor  # int64 [c]
    trained: np.ndarray  # int64 [c], which of the C trained positions these are


ToDevice = Callable[[np.ndarray], torch.Tensor]


def to_local(batch: MicroBatch, parallel: ParallelState) -> LocalBatch:
    """Cuts a micro-batch for this rank and moves it to its device."""
    cp, rank, device = parallel.cp_size, parallel.cp_rank, parallel.device
    held = held_tokens(batch.segments, cp, rank)
    place = np.full(batch.num_tokens, -1)
    place[held] = np.arange(len(held))
    trained = np.flatnonzero(place[batch.predict_at] >= 0)
    trained = trained[np.argsort(place[batch.predict_at[trained]], kind="stable")]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return LocalBatch(
        token_ids=tensor(batch.token_ids[held])[None],
        positions=tensor(batch.positions[held]),
        all_positions=tensor(batch.positions),
        multiplicity=tensor(batch.multiplicity[held]),
        packed=packed_stream(batch.segments, cp, rank, tensor),
        predict_at=tensor(place[batch.predict_at[trained]]),
        targets=tensor(batch.targets[trained]),
        trained=trained,
    )


def packed_stream(segments: Sequence[Segment], cp: int, rank: int, tensor: ToDevice) -> PackedStream:
    """How rank `rank` of `cp` reads a stream of these segments."""
    own = _own(segments, cp, rank, tensor)
    cu = np.array([0] + [segment.end for segment in segments], dtype=np.int32)
    return PackedStream(
        own=tuple(own),
        inherited=tuple(_inherited(segments, cp, tensor)),
        cu_seqlens=tensor(cu),
        max_seqlen=max(segment.end - segment.start for segment in segments),
    )


def _own(segments: Sequence[Segment], cp: int, rank: int, tensor: ToDevice) -> Iterator[Part]:
    """Padding attends to nothing: nobody sees it."""
    scattered: list[Segment] = []
    for run in _runs([segment for segment in segments if segment.length]):
        size = run[0].end - run[0].start
        if cp == 1 and len(run) * size > LONGEST_COPIED:
            places = Places(len(run), slice(run[0].start, run[-1].end))
            yield Part(places, places, is_causal=True)
        else:
            scattered += run
    total = segments[-1].end
    for alike in _alike(scattered):
        if cp == 1:
            places = _filled([np.arange(segment.start, segment.end) for segment in alike], tensor)
            yield Part(places, places, is_causal=True)
        else:
            yield _held_part(alike, total, cp, rank, tensor)


def _runs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments of one size that lie side by side."""
    run: list[Segment] = []
    for segment in segments:
        if run and (segment.start != run[-1].end or segment.end - segment.start != run[-1].end - run[-1].start):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _alike(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments of nearly one size, the longest first; those too long to be worth a copy with their equals alone."""
    alike: list[Segment] = []
    least = 0
    for segment in sorted(segments, key=lambda segment: segment.start - segment.end):
        size = segment.end - segment.start
        if not alike or size < least:
            if alike:
                yield alike
            alike, least = [], size if size > LONGEST_COPIED else size - int(size * MOST_FILL) - FREE_FILL
        alike.append(segment)
    if alike:
        yield alike


def _filled(runs: Sequence[np.ndarray], tensor: ToDevice) -> Places:
    """Runs of places of several lengths, filled up to the longest."""
    longest = max(map(len, runs))
    at = np.stack([np.pad(run, (0, longest - len(run)), mode="edge") for run in runs])
    is_fill = np.arange(longest) >= np.array([len(run) for run in runs])[:, None]
    return Places(len(runs), tensor(at), tensor(is_fill) if is_fill.any() else None)


def _held_part(segments: Sequence[Segment], total: int, cp: int, rank: int, tensor: ToDevice) -> Part:
    """Segments on themselves, where this rank holds 1 / cp of their queries. A rank's part of a segment begins at start / cp."""
    sizes = [segment.end - segment.start for segment in segments]
    queries = _filled([segment.start // cp + np.arange(size // cp) for segment, size in zip(segments, sizes)], tensor)
    keys = _filled([gathered_places(segment, total, cp) for segment in segments], tensor)
    longest = max(sizes)
    sees = []
    for size in sizes:
        held = np.pad(held_positions(size, cp, rank), (0, (longest - size) // cp), mode="edge")
        sees.append(held[:, None] >= np.arange(longest))  # a held place is below `size`, so fill is not seen
    return Part(queries, keys, is_causal=False, mask=tensor(np.stack(sees)[:, None]))


def _inherited(segments: Sequence[Segment], cp: int, tensor: ToDevice) -> Iterator[Part]:
    """The children of a parent lie side by side, so their queries are one run. They see all of it but its alignment padding."""
    children: dict[int, list[Segment]] = {}
    for segment in segments:
        if segment.parent >= 0:
            children.setdefault(segment.parent, []).append(segment)
    total = segments[-1].end
    for number, found in children.items():
        parent = segments[number]
        queries = Places(1, slice(found[0].start // cp, found[-1].end // cp))
        at: slice | torch.Tensor = slice(parent.start, parent.start + parent.length)
        if cp > 1:
            at = tensor(gathered_places(parent, total, cp)[None, : parent.length])
        yield Part(queries, Places(1, at), is_causal=False)
