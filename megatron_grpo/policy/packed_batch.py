"""A micro-batch as tensors on this rank's device: its part of the packed stream, and how attention should read it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megatron_grpo.batching.images import num_tokens
from megatron_grpo.parallel.context import gathered_places, held_tokens
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import VocabMask
from megatron_grpo.policy.kernels import Rotation
from megatron_grpo.types import Image, MicroBatch, Segment

# On a CPU a call of attention costs about as much as copying so many tokens there and back.
TOKENS_A_CALL = 24


class Runs(NamedTuple):
    """`num` runs of queries that lie side by side in a part, as their runs of keys do, all of one size."""

    num: int
    num_queries: int
    num_keys: int


Places = slice | torch.Tensor  # of a stream; without a copy if they lie side by side, else int64


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Runs of queries, each on a run of keys.

    queries: in this rank's part of the stream, each once. keys: among the keys of all context-parallel ranks, rank after rank. Causal runs
    have as many queries as keys, and a query sees keys up to its own place; of others it sees all. cu_queries, cu_keys: int32 [runs + 1],
    bounds of the runs.
    """

    queries: Places
    keys: Places
    is_causal: bool
    runs: tuple[Runs, ...]
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor

    @property
    def most_queries(self) -> int:
        return max(run.num_queries for run in self.runs)

    @property
    def most_keys(self) -> int:
        return max(run.num_keys for run in self.runs)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Given to every attention layer in place of Megatron-Core's PackedSeqParams.

    `qkv_format` is not "thd": Megatron then applies RoPE row by row, and the frequencies we hand it are already a gather by position.
    """

    causal: Part | None  # every query but those of padding once, on its segment, or on the chunk of it that lies here; None: all is padding
    full: tuple[Part, ...]  # what queries see besides: under context parallelism earlier chunks of their segment; their parent
    has_parents: bool
    windowed: Callable[[int], tuple[Part | None, tuple[Part, ...]]]  # the same two where a token sees so many, itself among them
    longest: int  # tokens of a segment and its parent
    cu_seqlens: torch.Tensor  # int32 [segments + 1], of the whole stream: what Transformer Engine's attention reads
    max_seqlen: int
    # Of queries and keys, by the model that reads the stream, for each of its ropes; (): it has rotated them before.
    rotations: tuple[Rotation, ...] = ()
    qkv_format: str = "segments"
    local_cp_size: None = None
    cp_group: None = None

    def within(self, window: int | None) -> PackedBatch:
        """As a layer reads it whose tokens see `window` tokens, themselves among them; all of them where it is None."""
        if window is None or self.longest <= window:
            return self
        if self.has_parents:
            raise ValueError(f"share_prompts needs attention to whole sequences, and a layer sees {window} of {self.longest} tokens")
        causal, full = self.windowed(window)
        return replace(self, causal=causal, full=full)


@dataclass(frozen=True, slots=True, eq=False)
class LocalPictures:
    """The pictures of which this context-parallel rank holds tokens."""

    pictures: tuple[Image, ...]
    at: torch.Tensor  # int64 [n], ascending: places among the t tokens
    token: torch.Tensor  # int64 [n]: which of the tokens of all `pictures`, one picture behind the other, stands there


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This context-parallel rank's part of a micro-batch. t = T / cp tokens, c of the C trained positions."""

    number: int  # of the micro-batch in its pass
    held: np.ndarray  # int64 [t]: places of these tokens in the whole stream
    token_ids: torch.Tensor  # int64 [1, t]
    positions: torch.Tensor  # int64 [t], or [3, t] where the micro-batch has pictures
    multiplicity: torch.Tensor  # int64 [t]: contexts that a token stands for; 0 is alignment padding
    packed: PackedBatch
    predict_at: torch.Tensor  # int64 [c], places among the t tokens; shared ones stand several times
    targets: torch.Tensor  # int64 [c]
    trained: np.ndarray  # int64 [c], which of the C trained positions these are
    experts: Mapping[int, torch.Tensor]  # by place among the model's layers with experts, of this stage's: int16 [t, k], -1 routes freely
    kept: VocabMask | None  # of the c trained positions; None: their softmax runs over all words
    seen: LocalPictures | None  # None: no picture's token is here


def sequences(packed: PackedBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each run of queries their places, and those of all keys of their sequence up to the last query, in its order; int64.

    Under context parallelism a sequence has two runs here. ValueError where sequences have parents.
    """
    if packed.has_parents:
        raise ValueError("a sequence with a parent begins elsewhere in the stream")
    earlier = {int(queries[0]): keys for part in packed.full for queries, keys in _pairs(part)}
    for queries, keys in _pairs(packed.causal) if packed.causal else ():
        before = earlier.get(int(queries[0]))
        yield queries, keys if before is None else torch.cat([before, keys])


def _pairs(part: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ways = ((part.queries, part.cu_queries), (part.keys, part.cu_keys))
    return zip(*(_tensor(places, bounds).split(bounds.diff().tolist()) for places, bounds in ways), strict=True)


def _tensor(places: Places, bounds: torch.Tensor) -> torch.Tensor:
    return torch.arange(places.start, places.stop, device=bounds.device) if isinstance(places, slice) else places


ToDevice = Callable[[np.ndarray], torch.Tensor]


def to_local(batch: MicroBatch, parallel: ParallelState, moe_layers: Sequence[int] = ()) -> LocalBatch:
    """Cuts a micro-batch for this rank and moves it to its device. moe_layers: this stage's, by their place among those of the model."""
    cp, rank, device = parallel.cp_size, parallel.cp_rank, parallel.device
    held = held_tokens(batch.segments, cp, rank)
    place = np.full(batch.num_tokens, -1)
    place[held] = np.arange(len(held))
    trained = np.flatnonzero(place[batch.predict_at] >= 0)
    trained = trained[np.argsort(place[batch.predict_at[trained]], kind="stable")]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return LocalBatch(
        number=batch.number,
        held=held,
        token_ids=tensor(batch.token_ids[held])[None],
        positions=tensor(batch.positions[..., held]),
        multiplicity=tensor(batch.multiplicity[held]),
        packed=packed_stream(batch.segments, cp, rank, tensor, by_length=device.type == "cpu"),
        predict_at=tensor(place[batch.predict_at[trained]]),
        targets=tensor(batch.targets[trained]),
        trained=trained,
        experts={} if batch.experts is None else {layer: tensor(batch.experts[held, layer]) for layer in moe_layers},
        kept=None if batch.kept is None else VocabMask.of(*batch.kept.taken(trained), device),
        seen=_seen(batch, place, tensor),
    )


def _seen(batch: MicroBatch, place: np.ndarray, tensor: ToDevice) -> LocalPictures | None:
    """place: of each token of the stream among those of this rank, -1 for those of others."""
    here = np.flatnonzero(place[batch.picture_at] >= 0)
    if not len(here):
        return None
    ends = np.cumsum([num_tokens(picture) for picture in batch.pictures])
    which = np.searchsorted(ends, batch.picture_token[here], side="right")  # the picture of each token
    needed = np.unique(which)
    counts = np.diff(ends, prepend=0)
    begins = np.zeros(len(ends), dtype=np.int64)
    begins[needed] = np.cumsum(counts[needed]) - counts[needed]  # of those that are needed, among themselves
    token = batch.picture_token[here] - (ends - counts)[which] + begins[which]
    at = place[batch.picture_at[here]]
    order = np.argsort(at, kind="stable")
    return LocalPictures(tuple(batch.pictures[i] for i in needed), tensor(at[order]), tensor(token[order]))


def packed_stream(segments: Sequence[Segment], cp: int, rank: int, tensor: ToDevice, *, by_length: bool = False) -> PackedBatch:
    """How rank `rank` of `cp` reads a stream of these segments. by_length: short ones may be copied, by length."""
    causal, full = _own(segments, cp, rank)
    cu = np.array([0] + [segment.end for segment in segments], dtype=np.int32)

    def diagonal(pairs: Sequence[Pair]) -> Part | None:
        return _part(_by_length(pairs) if by_length else pairs, tensor, is_causal=True) if pairs else None

    @functools.cache
    def windowed(window: int) -> tuple[Part | None, tuple[Part, ...]]:
        own, bands, seen = _in_window(causal, full, window)
        parts = ((bands, True), (seen, False))
        return diagonal(own), tuple(_part(pairs, tensor, is_causal=is_causal) for pairs, is_causal in parts if pairs)

    return PackedBatch(
        causal=diagonal(causal),
        full=tuple(_part(pairs, tensor, is_causal=False) for pairs in (full, _inherited(segments, cp)) if pairs),
        has_parents=any(segment.parent >= 0 for segment in segments),
        windowed=windowed,
        longest=max(one.end - one.start + (segments[one.parent].length if one.parent >= 0 else 0) for one in segments),
        cu_seqlens=tensor(cu),
        max_seqlen=max(segment.end - segment.start for segment in segments),
    )


Pair = tuple[np.ndarray, np.ndarray]  # places of a run of queries, and of the keys that it sees


def _own(segments: Sequence[Segment], cp: int, rank: int) -> tuple[list[Pair], list[Pair]]:
    """Segments on themselves: (causal, full). Padding attends to nothing: nobody sees it."""
    causal, full, total = [], [], segments[-1].end
    for segment in segments:
        if not segment.length:
            continue
        if cp == 1:
            places = np.arange(segment.start, segment.end)
            causal.append((places, places))
            continue
        keys, chunk = gathered_places(segment, total, cp), (segment.end - segment.start) // (2 * cp)
        for place, number in enumerate((rank, 2 * cp - 1 - rank)):  # the chunks that this rank holds, in its order
            queries = segment.start // cp + place * chunk + np.arange(chunk)
            causal.append((queries, keys[number * chunk : (number + 1) * chunk]))
            if number:
                full.append((queries, keys[: number * chunk]))
    return causal, full


def _in_window(causal: Sequence[Pair], full: Sequence[Pair], window: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """What is left of `_own` where a token sees `window` tokens, itself among them, as (causal, causal, full): no part needs a mask.

    Runs are cut into blocks of a window. In its own block a token sees what comes before it; of the block before it sees a triangle the
    other way round, which is causal attention of what stands in reverse.
    """
    own: list[Pair] = []
    bands: list[Pair] = []
    seen: list[Pair] = []
    for queries, keys in causal:
        for begin in range(0, len(queries), window):
            own.append((queries[begin : begin + window], keys[begin : begin + window]))
            if begin:
                _add_band(queries[begin : begin + window], keys[begin - window : begin], window, bands, seen)
    for queries, keys in full:  # earlier chunks of the segment, which end where the queries begin
        _add_band(queries[:window], keys[-window:], window, bands, seen)
    return own, bands, seen


def _add_band(queries: np.ndarray, keys: np.ndarray, window: int, bands: list[Pair], seen: list[Pair]) -> None:
    """The keys come before the queries, side by side: query i sees all but the first i + 1 + len(keys) - window of them."""
    if window == 1:
        return
    queries, keys = queries[: window - 1], keys[-(window - 1) :]
    see_all = window - 1 - len(keys)
    if len(queries[:see_all]):
        seen.append((queries[:see_all], keys))
    late = queries[see_all:]
    if len(late):
        bands.append((late[::-1], keys[: len(late)][::-1]))
        if len(late) < len(keys):
            seen.append((late, keys[len(late) :]))


def _by_length(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """In the order of their lengths, where that saves calls enough to pay for the copies."""
    ordered = sorted(pairs, key=lambda pair: len(pair[0]))
    saves = (len(_runs(pairs)) - len(_runs(ordered))) * TOKENS_A_CALL > sum(len(queries) for queries, _ in pairs)
    return ordered if saves else pairs


def _inherited(segments: Sequence[Segment], cp: int) -> list[Pair]:
    """The children of a parent lie side by side, so their queries are one run. They see all of it but its alignment padding."""
    children: dict[int, list[Segment]] = {}
    for segment in segments:
        if segment.parent >= 0:
            children.setdefault(segment.parent, []).append(segment)
    return [
        (
            np.arange(found[0].start // cp, found[-1].end // cp),
            gathered_places(segments[number], segments[-1].end, cp)[: segments[number].length],
        )
        for number, found in children.items()
    ]


def _runs(pairs: Sequence[Pair]) -> tuple[Runs, ...]:
    sizes = itertools.groupby((len(queries), len(keys)) for queries, keys in pairs)
    return tuple(Runs(len(list(equal)), *size) for size, equal in sizes)


def _part(pairs: Sequence[Pair], tensor: ToDevice, *, is_causal: bool) -> Part:
    queries, keys = zip(*pairs, strict=True)

    def bounds(runs: Sequence[np.ndarray]) -> torch.Tensor:
        return tensor(np.cumsum([0, *map(len, runs)], dtype=np.int32))

    return Part(
        queries=_places(queries, tensor),
        keys=_places(keys, tensor),
        is_causal=is_causal,
        runs=_runs(pairs),
        cu_queries=bounds(queries),
        cu_keys=bounds(keys),
    )


def _places(runs: Sequence[np.ndarray], tensor: ToDevice) -> Places:
    places = np.concatenate(runs)
    first, last = int(places[0]), int(places[-1])
    is_slice = last - first == len(places) - 1 and (np.diff(places) == 1).all()
    return slice(first, last + 1) if is_slice else tensor(places)
