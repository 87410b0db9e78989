"""A micro-batch as tensors on this rank's device: its part of the packed stream, and the attention runs over it.

Context parallelism splits every segment into 2*cp equal chunks; rank r holds chunk r and its mirror 2*cp-1-r, so that causal attention is
balanced ("zigzag", the order that Megatron-Core and Transformer Engine expect). Segments are padded to a multiple of 2*cp.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from megatron_grpo.core.batching.collate import num_tokens
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.parallel.vocab import SamplingMaskTensors
from megatron_grpo.core.policy.kernels import RotaryFactors
from megatron_grpo.core.types import Image, MicroBatch, Segment

# On a CPU one attention call costs about as much as copying this many tokens to another place and back.
TOKENS_A_CALL = 24


class EqualLengthRuns(NamedTuple):
    """`num` adjacent runs of queries in a part, and their adjacent runs of keys, all of one size."""

    num: int
    num_queries: int
    num_keys: int


Places = slice | torch.Tensor  # indices into a stream: a slice (no copy) if they are contiguous, else int64


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Runs of queries, each with the run of keys that it attends to.

    Args:
        queries: Indices into this rank's part of the stream, each once.
        keys: Indices into the keys of all context-parallel ranks, concatenated in rank order.
        is_causal: Causal runs have as many queries as keys, and a query attends to keys up to its own index. In other runs it attends to
            all keys.
        runs: The sizes of the runs.
        cu_queries: Bounds of the runs of queries, int32 [runs + 1].
        cu_keys: Bounds of the runs of keys, int32 [runs + 1].
    """

    queries: Places
    keys: Places
    is_causal: bool
    runs: tuple[EqualLengthRuns, ...]
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor

    @property
    def most_queries(self) -> int:
        """Queries of the longest run."""
        return max(run.num_queries for run in self.runs)

    @property
    def most_keys(self) -> int:
        """Keys of the longest run."""
        return max(run.num_keys for run in self.runs)


class RecurrenceStage(NamedTuple):
    """Segments whose recurrence starts together: first those without a parent, then the children.

    Args:
        num_segments: Number of segments, the one with the most chunks first.
        steps: Bounds of runs of chunks: the first chunk of every segment, then the second chunk of those that have one, and so on.
        parents: For each segment, the index of its parent in the previous wave, int64; None without parents.
        tokens: The tokens of all segments, one after the other, int64.
        cu_seqlens: Bounds of the segments among `tokens`, int64 [segments + 1].
    """

    num_segments: int
    steps: tuple[tuple[int, int], ...]
    parents: torch.Tensor | None
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceOrder:
    """Order in which a recurrent layer reads the whole stream of T tokens. Indices are int64; T stands for no token.

    Args:
        previous: The token before each token, the one before that, and so on, [kernel size - 1, T]. For the first tokens of a child these
            are the last ones of its parent.
        chunks: The tokens of each chunk, [chunks, chunk size].
        places: Index of each token among those of `chunks`, [T]; chunks * chunk size for padding.
        waves: The segments in the order of computation.
        to_stream: For each token of the stream, its index in the concatenation of all context-parallel ranks' parts, [T].
        to_ranks: The inverse of `to_stream`, [T].
    """

    previous: torch.Tensor
    chunks: torch.Tensor
    places: torch.Tensor
    waves: tuple[RecurrenceStage, ...]
    to_stream: torch.Tensor
    to_ranks: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Attention over the packed stream; every attention layer receives it in place of Megatron-Core's PackedSeqParams.

    `qkv_format` is not "thd": Megatron then applies RoPE row by row, and the frequencies that it receives are already gathered by position.

    Args:
        causal: Every query except padding once, on its own segment or on the chunk of it that lies on this rank. None if all tokens are
            padding.
        full: Keys that queries attend to besides: under context parallelism the earlier chunks of their segment; and their parent.
        has_parents: Whether a segment has a parent.
        windowed: Returns `causal` and `full` for a window, given as the number of tokens that a token attends to, itself included.
        recurrence: Returns the stream as recurrent layers read it, for a kernel size of the convolution and a chunk size.
        longest: Tokens of the longest segment together with its parent.
        cu_seqlens: Bounds of the segments in the whole stream, int32 [segments + 1], for Transformer Engine's attention.
        max_seqlen: Tokens of the longest segment.
        rotations: Rotations of queries and keys, one for each rope of the model, set by the model that reads the stream. Empty if the model
            has rotated them before.
    """

    causal: AttentionBlock | None
    full: tuple[AttentionBlock, ...]
    has_parents: bool
    windowed: Callable[[int], tuple[AttentionBlock | None, tuple[AttentionBlock, ...]]]
    recurrence: Callable[[int, int], RecurrenceOrder]
    longest: int
    cu_seqlens: torch.Tensor
    max_seqlen: int
    rotations: tuple[RotaryFactors, ...] = ()
    qkv_format: str = "segments"
    local_cp_size: None = None
    cp_group: None = None

    def within(self, window: int | None) -> PackedBatch:
        """Return the stream for a layer with sliding-window attention.

        Args:
            window: Tokens that a token attends to, itself included; None for all.

        Raises:
            ValueError: If the window cuts a segment and the stream has parents, because shared prompts need attention to whole sequences.
        """
        if window is None or self.longest <= window:
            return self
        if self.has_parents:
            raise ValueError(f"share_prefix needs full attention, but a layer attends to {window} of {self.longest} tokens")
        causal, full = self.windowed(window)
        return replace(self, causal=causal, full=full)


@dataclass(frozen=True, slots=True, eq=False)
class LocalImages:
    """The images of which this context-parallel rank holds tokens.

    Args:
        at: Indices into the t tokens of this rank, ascending; int64 [n].
        token: Index of that image token among the tokens of all `images`, concatenated; int64 [n].
    """

    images: tuple[Image, ...]
    at: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This context-parallel rank's part of a micro-batch: t = T / cp tokens and c of the C trained positions.

    Args:
        number: Index of the micro-batch in its pass.
        held: Indices of these tokens in the whole stream, int64 [t].
        token_ids: Token IDs, int64 [1, t].
        positions: Position of each token in its context, int64 [t], or [3, t] if the micro-batch has images.
        num_references: Number of contexts that share a token; 0 is alignment padding; int64 [t].
        logit_positions: Indices into the t tokens; an index that several contexts share occurs several times; int64 [c].
        targets: Token to predict at each position, int64 [c].
        trained: Which of the C trained positions these are, int64 [c].
        sampling_mask: Sampling mask of the c trained positions; None: their softmax runs over the whole vocabulary.
        image_tokens: Images of which this rank holds tokens; None if there are none.
    """

    number: int
    held: np.ndarray
    token_ids: torch.Tensor
    positions: torch.Tensor
    num_references: torch.Tensor
    packed: PackedBatch
    logit_positions: torch.Tensor
    targets: torch.Tensor
    trained: np.ndarray
    # By index among the model's MoE layers, those of this stage: int16 [t, k], -1 lets the router choose.
    experts: Mapping[int, torch.Tensor]
    sampling_mask: SamplingMaskTensors | None
    image_tokens: LocalImages | None


def sequences(packed: PackedBatch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the runs of queries and the keys that belong to each, as int64 indices.

    Under context parallelism a sequence has two runs on this rank.

    Yields:
        The indices of a run of queries; and those of all keys of its sequence up to the last of these queries, in the order of the
        sequence.

    Raises:
        ValueError: If the sequences have parents.
    """
    if packed.has_parents:
        raise ValueError("expected sequences without parents")
    shared_keys = {int(queries[0]): keys for part in packed.full for queries, keys in _pairs(part)}
    for queries, keys in _pairs(packed.causal) if packed.causal else ():
        prefix_keys = shared_keys.get(int(queries[0]))
        yield queries, keys if prefix_keys is None else torch.cat([prefix_keys, keys])


def _pairs(part: AttentionBlock) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    ways = ((part.queries, part.cu_queries), (part.keys, part.cu_keys))
    return zip(*(_tensor(index, bounds).split(bounds.diff().tolist()) for index, bounds in ways), strict=True)


def _tensor(index: Places, bounds: torch.Tensor) -> torch.Tensor:
    return torch.arange(index.start, index.stop, device=bounds.device) if isinstance(index, slice) else index


ToDevice = Callable[[np.ndarray], torch.Tensor]


def to_local(batch: MicroBatch, parallel: ParallelState, moe_layers: Sequence[int] = ()) -> LocalBatch:
    """Cut a micro-batch for this rank and move it to its device.

    Args:
        moe_layers: MoE layers of this stage, by their index among those of the model.
    """
    cp, rank, device = parallel.cp_size, parallel.cp_rank, parallel.device
    local_positions = tokens_of_cp_rank(batch.segments, cp, rank)
    local_index = np.full(batch.num_tokens, -1)
    local_index[local_positions] = np.arange(len(local_positions))
    trained = np.flatnonzero(local_index[batch.logit_positions] >= 0)
    trained = trained[np.argsort(local_index[batch.logit_positions[trained]], kind="stable")]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return LocalBatch(
        number=batch.number,
        held=local_positions,
        token_ids=tensor(batch.token_ids[local_positions])[None],
        positions=tensor(batch.positions[..., local_positions]),
        num_references=tensor(batch.num_references[local_positions]),
        packed=packed_stream(batch.segments, cp, rank, tensor, by_length=device.type == "cpu"),
        logit_positions=tensor(local_index[batch.logit_positions[trained]]),
        targets=tensor(batch.targets[trained]),
        trained=trained,
        experts={} if batch.experts is None else {layer: tensor(batch.experts[local_positions, layer]) for layer in moe_layers},
        sampling_mask=None if batch.sampling_mask is None else SamplingMaskTensors.from_offsets(*batch.sampling_mask.take(trained), device),
        image_tokens=_local_images(batch, local_index, tensor),
    )


def _local_images(batch: MicroBatch, local_index: np.ndarray, tensor: ToDevice) -> LocalImages | None:
    """Return the images of which this rank holds tokens.

    Args:
        local_index: Index of each token of the stream among the tokens of this rank, -1 for tokens of other ranks.
    """
    local = np.flatnonzero(local_index[batch.image_positions] >= 0)
    if not len(local):
        return None
    ends = np.cumsum([num_tokens(image) for image in batch.images])
    image_of_token = np.searchsorted(ends, batch.image_token_index[local], side="right")  # the image of each token
    image_numbers = np.unique(image_of_token)
    counts = np.diff(ends, prepend=0)
    begins = np.zeros(len(ends), dtype=np.int64)
    # First token of each needed image among those of the needed ones.
    begins[image_numbers] = np.cumsum(counts[image_numbers]) - counts[image_numbers]
    token = batch.image_token_index[local] - (ends - counts)[image_of_token] + begins[image_of_token]
    local_rows = local_index[batch.image_positions[local]]
    order = np.argsort(local_rows, kind="stable")
    return LocalImages(tuple(batch.images[i] for i in image_numbers), tensor(local_rows[order]), tensor(token[order]))


def packed_stream(segments: Sequence[Segment], cp: int, rank: int, tensor: ToDevice, *, by_length: bool = False) -> PackedBatch:
    """Return the attention of one context-parallel rank over a stream of segments.

    Args:
        cp: Number of context-parallel ranks.
        by_length: Short segments may be copied and sorted by length, to save attention calls.
    """
    causal, full = _self_attention(segments, cp, rank)
    cu = np.array([0] + [segment.end for segment in segments], dtype=np.int32)

    def diagonal(pairs: Sequence[Pair]) -> AttentionBlock | None:
        return _part(_by_length(pairs) if by_length else pairs, tensor, is_causal=True) if pairs else None

    @functools.cache
    def windowed(window: int) -> tuple[AttentionBlock | None, tuple[AttentionBlock, ...]]:
        causal_pairs, bands, image_tokens = _in_window(causal, full, window)
        parts = ((bands, True), (image_tokens, False))
        return diagonal(causal_pairs), tuple(_part(pairs, tensor, is_causal=is_causal) for pairs, is_causal in parts if pairs)

    return PackedBatch(
        causal=diagonal(causal),
        full=tuple(_part(pairs, tensor, is_causal=False) for pairs in (full, _inherited(segments, cp)) if pairs),
        has_parents=any(segment.parent >= 0 for segment in segments),
        windowed=windowed,
        recurrence=functools.cache(functools.partial(_recurrence, segments, cp, tensor)),
        longest=max(segment.end - segment.start + (segments[segment.parent].length if segment.parent >= 0 else 0) for segment in segments),
        cu_seqlens=tensor(cu),
        max_seqlen=max(segment.end - segment.start for segment in segments),
    )


Pair = tuple[np.ndarray, np.ndarray]  # indices of a run of queries, and of the keys that it attends to


def _self_attention(segments: Sequence[Segment], cp: int, rank: int) -> tuple[list[Pair], list[Pair]]:
    """Return the attention of segments to themselves, as (causal, full). Padding attends to nothing: no other token attends to it."""
    causal, full, total = [], [], segments[-1].end
    for segment in segments:
        if not segment.length:
            continue
        if cp == 1:
            positions = np.arange(segment.start, segment.end)
            causal.append((positions, positions))
            continue
        keys, chunk = gathered_positions(segment, total, cp), (segment.end - segment.start) // (2 * cp)
        for slot, number in enumerate((rank, 2 * cp - 1 - rank)):  # the chunks that this rank holds, in the order it holds them
            queries = segment.start // cp + slot * chunk + np.arange(chunk)
            causal.append((queries, keys[number * chunk : (number + 1) * chunk]))
            if number:
                full.append((queries, keys[: number * chunk]))
    return causal, full


def _in_window(causal: Sequence[Pair], full: Sequence[Pair], window: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Reduce the result of `_self_attention` to a sliding window, as (causal, causal, full). No part needs a mask.

    Runs are cut into blocks of one window. In its own block a token attends to the tokens before it. Of the previous block it attends to a
    triangle in the opposite direction, which is causal attention in reverse order.

    Args:
        causal: Causal pairs of `_self_attention`.
        full: Full pairs of `_self_attention`.
        window: Tokens that a token attends to, itself included.
    """
    causal_pairs: list[Pair] = []
    bands: list[Pair] = []
    image_tokens: list[Pair] = []
    for queries, keys in causal:
        for begin in range(0, len(queries), window):
            causal_pairs.append((queries[begin : begin + window], keys[begin : begin + window]))
            if begin:
                _add_band(queries[begin : begin + window], keys[begin - window : begin], window, bands, image_tokens)
    for queries, keys in full:  # earlier chunks of the segment, which end at the first query
        _add_band(queries[:window], keys[-window:], window, bands, image_tokens)
    return causal_pairs, bands, image_tokens


def _add_band(queries: np.ndarray, keys: np.ndarray, window: int, bands: list[Pair], image_tokens: list[Pair]) -> None:
    """Add the attention of queries to the keys directly before them.

    Query i attends to all but the first i + 1 + len(keys) - window keys.
    """
    if window == 1:
        return
    queries, keys = queries[: window - 1], keys[-(window - 1) :]
    see_all = window - 1 - len(keys)
    if len(queries[:see_all]):
        image_tokens.append((queries[:see_all], keys))
    late_queries = queries[see_all:]
    if len(late_queries):
        bands.append((late_queries[::-1], keys[: len(late_queries)][::-1]))
        if len(late_queries) < len(keys):
            image_tokens.append((late_queries, keys[len(late_queries) :]))


def _by_length(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """Sort pairs by length if that saves enough attention calls to pay for the copies."""
    ordered = sorted(pairs, key=lambda pair: len(pair[0]))
    saves = (len(_runs(pairs)) - len(_runs(ordered))) * TOKENS_A_CALL > sum(len(queries) for queries, _ in pairs)
    return ordered if saves else pairs


def _inherited(segments: Sequence[Segment], cp: int) -> list[Pair]:
    """Return the attention of children to their parents.

    The children of a parent are adjacent, so their queries are one run. They attend to the whole parent except its alignment padding.
    """
    children: dict[int, list[Segment]] = {}
    for segment in segments:
        if segment.parent >= 0:
            children.setdefault(segment.parent, []).append(segment)
    return [
        (
            np.arange(siblings[0].start // cp, siblings[-1].end // cp),
            gathered_positions(segments[number], segments[-1].end, cp)[: segments[number].length],
        )
        for number, siblings in children.items()
    ]


def _recurrence(segments: Sequence[Segment], cp: int, tensor: ToDevice, kernel: int, chunk: int) -> RecurrenceOrder:
    total = segments[-1].end
    to_stream = np.concatenate([gathered_positions(segment, total, cp) for segment in segments])
    waves, token_chunks = _waves(segments, chunk)
    chunks = np.full((len(token_chunks), chunk), total)
    for row, tokens in zip(chunks, token_chunks, strict=True):
        row[: len(tokens)] = tokens
    chunk_index = np.full(total + 1, chunks.size)  # the last one takes what stands for no token
    chunk_index[chunks.reshape(-1)] = np.arange(chunks.size)
    return RecurrenceOrder(
        previous=tensor(_previous(segments, kernel)),
        chunks=tensor(chunks),
        places=tensor(chunk_index[:total]),
        waves=tuple(
            RecurrenceStage(count, steps, None if parents is None else tensor(parents), tensor(tokens), tensor(cu_seqlens))
            for count, steps, parents, tokens, cu_seqlens in waves
        ),
        to_stream=tensor(to_stream),
        to_ranks=tensor(np.argsort(to_stream)),
    )


def _previous(segments: Sequence[Segment], kernel: int) -> np.ndarray:
    """Return `RecurrenceOrder.previous`."""
    total = segments[-1].end
    index = np.full((kernel - 1, total), total)
    for segment in segments:
        preceding = np.full(kernel - 1, total)
        if segment.parent >= 0:
            parent = segments[segment.parent]
            last = np.arange(parent.start, parent.start + parent.length)[max(0, parent.length - kernel + 1) :]
            preceding[kernel - 1 - len(last) :] = last
        tokens = np.concatenate([preceding, np.arange(segment.start, segment.end)])
        for shift in range(1, kernel):
            index[shift - 1, segment.start : segment.end] = tokens[kernel - 1 - shift : len(tokens) - shift]
    return index


# Of a `RecurrenceStage`, in numpy.
_WaveFields = tuple[int, tuple[tuple[int, int], ...], np.ndarray | None, np.ndarray, np.ndarray]


def _waves(segments: Sequence[Segment], chunk: int) -> tuple[list[_WaveFields], list[np.ndarray]]:
    """Return the fields of each `RecurrenceStage`, and the tokens of each chunk. A chunk ends before alignment padding."""
    waves: list[_WaveFields] = []
    chunks: list[np.ndarray] = []
    index: dict[int, int] = {}  # of a segment in its wave
    for has_parent in (False, True):
        numbers = [i for i, segment in enumerate(segments) if segment.length and (segment.parent >= 0) == has_parent]
        numbers.sort(key=lambda i: -segments[i].length)
        steps, first = list[tuple[int, int]](), 0
        while active := [segments[i] for i in numbers if segments[i].length > first]:
            steps.append((len(chunks), len(chunks) + len(active)))
            chunks += [np.arange(segment.start + first, segment.start + min(first + chunk, segment.length)) for segment in active]
            first += chunk
        if numbers:
            parents = np.array([index[segments[i].parent] for i in numbers]) if has_parent else None
            tokens = [np.arange(segments[i].start, segments[i].start + segments[i].length) for i in numbers]
            cu_seqlens = np.cumsum([0, *map(len, tokens)])
            waves.append((len(numbers), tuple(steps), parents, np.concatenate(tokens), cu_seqlens))
        index = {i: position for position, i in enumerate(numbers)}
    return waves, chunks


def _runs(pairs: Sequence[Pair]) -> tuple[EqualLengthRuns, ...]:
    sizes = itertools.groupby((len(queries), len(keys)) for queries, keys in pairs)
    return tuple(EqualLengthRuns(len(list(equal)), *size) for size, equal in sizes)


def _part(pairs: Sequence[Pair], tensor: ToDevice, *, is_causal: bool) -> AttentionBlock:
    queries, keys = zip(*pairs, strict=True)

    def bounds(runs: Sequence[np.ndarray]) -> torch.Tensor:
        return tensor(np.cumsum([0, *map(len, runs)], dtype=np.int32))

    return AttentionBlock(
        queries=_places(queries, tensor),
        keys=_places(keys, tensor),
        is_causal=is_causal,
        runs=_runs(pairs),
        cu_queries=bounds(queries),
        cu_keys=bounds(keys),
    )


def _places(runs: Sequence[np.ndarray], tensor: ToDevice) -> Places:
    index = np.concatenate(runs)
    first, last = int(index[0]), int(index[-1])
    is_slice = last - first == len(index) - 1 and (np.diff(index) == 1).all()
    return slice(first, last + 1) if is_slice else tensor(index)


def held_positions(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """Return the offsets within a sequence that `cp_rank` holds; int64 [length / cp_size], ascending.

    Args:
        length: Tokens of the sequence.

    Raises:
        ValueError: The sequence does not divide into 2 * cp_size equal chunks.
    """
    if length % (2 * cp_size) and cp_size > 1:
        raise ValueError(f"a sequence of {length} tokens cannot be split into 2 x {cp_size} equal chunks")
    if cp_size == 1:
        return np.arange(length)
    chunk = length // (2 * cp_size)
    mirror = 2 * cp_size - 1 - cp_rank
    return np.concatenate([np.arange(cp_rank * chunk, (cp_rank + 1) * chunk), np.arange(mirror * chunk, (mirror + 1) * chunk)])


def tokens_of_cp_rank(segments: Sequence[Segment], cp_size: int, cp_rank: int) -> np.ndarray:
    """Return the indices in the whole stream that `cp_rank` holds, in the order it holds them; int64 [T / cp_size]."""
    return np.concatenate([s.start + held_positions(s.end - s.start, cp_size, cp_rank) for s in segments])


def gathered_positions(segment: Segment, total: int, cp_size: int) -> np.ndarray:
    """Return where the tokens of a segment, in order, are in the concatenation of all ranks' parts of a stream; int64 [length].

    Args:
        total: Tokens of the whole stream.
    """
    length = segment.end - segment.start
    order = np.concatenate([held_positions(length, cp_size, rank) for rank in range(cp_size)])
    local = segment.start // cp_size + np.arange(length // cp_size)
    return np.concatenate([rank * (total // cp_size) + local for rank in range(cp_size)])[np.argsort(order)]
