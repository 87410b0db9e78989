"""Convert sequences to the arrays of one packed forward pass, with images. Rejects stale samples without old log-probs. No torch.

Locations of images come from the sequences' `images`, never from token IDs: a sampler may sample the placeholder, which is then an
ordinary token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.batching.prefix_groups import FREE, Alignment, ContextSpan, PrefixGroup, common_prefix, list_contexts, num_shared
from megatron_grpo.core.batching.split import MicroBatchSpec
from megatron_grpo.core.types import Image, MicroBatch, Sample, SampleWithOldLogprobs, Segment, TokenSequence, TrainingMicroBatch

PlacedImages = tuple[tuple[int, Image], ...]  # (index of the first token, image), ascending


class StreamImages(NamedTuple):
    """Images of one packed stream.

    Args:
        images: The images, each key once.
        at: Indices of image tokens in the stream, ascending; int64 [n].
        token: Index into the concatenated image tokens of all `images`, int64 [n].
    """

    images: tuple[Image, ...]
    at: np.ndarray
    token: np.ndarray


def compute_grid(image: Image) -> tuple[int, int]:
    """Return (rows, columns) of an image's tokens.

    Raises:
        ValueError: It is not a single frame, or its grid does not divide into whole tokens.
    """
    frames, rows, columns = image.grid
    if frames != 1 or rows % image.merge or columns % image.merge:
        merge = f"{image.merge} x {image.merge}"
        raise ValueError(f"Image {image.key} has a grid of {image.grid} patches; a grid must be one frame, a multiple of {merge}")
    return rows // image.merge, columns // image.merge


def num_tokens(image: Image) -> int:
    """Return the number of tokens of an image."""
    rows, columns = compute_grid(image)
    return rows * columns


def images_in(sequence: TokenSequence, first: int, end: int) -> PlacedImages:
    """Return the images of a context, by their index in the context.

    Args:
        first: First token of the context.
    """
    return tuple((position - first, image) for position, image in sequence.images if first <= position < end)


def positions(length: int, images: PlacedImages) -> np.ndarray:
    """Return the positions of a context's tokens, int64 [3, length]: frame, row and column (Qwen2-VL, arXiv:2409.12191, section 2.1).

    The tokens of an image are on a grid that begins at the next text position; the text continues after the grid's longer side.

    Args:
        length: Tokens of the context.
        images: Images of the context, by their index in it.
    """
    result, offset = np.tile(np.arange(length), (3, 1)), 0
    for start, image in images:
        rows, columns = compute_grid(image)
        end = min(start + rows * columns, length)
        row, column = np.divmod(np.arange(end - start), columns)
        result[:, start:end] = start + offset + np.stack([np.zeros_like(row), row, column])
        offset += max(rows, columns) - rows * columns
        result[:, end:] = np.arange(end, length) + offset
    return result


def image_tokens(
    sequences: Sequence[TokenSequence], contexts: Iterable[ContextSpan], in_stream: Callable[[ContextSpan, np.ndarray], np.ndarray]
) -> StreamImages:
    """Collect the images of a packed stream. What several contexts share is in the stream, and encoded, once.

    Args:
        in_stream: Maps a context and indices of its tokens, int64 [n], to indices in the stream.
    """
    images: dict[str, tuple[int, Image]] = {}  # by key: its first token among those of all
    positions, token, total = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for context in contexts:
        for start, image in images_in(sequences[context.row], context.first, context.end):
            count = num_tokens(image)
            if image.key not in images:
                images[image.key] = total, image
                total += count
            local = np.arange(min(count, context.num_computed - start))
            positions.append(in_stream(context, start + local))
            token.append(images[image.key][0] + local)
    unique_positions, first = np.unique(np.concatenate(positions), return_index=True)
    return StreamImages(tuple(image for _, image in images.values()), unique_positions, np.concatenate(token)[first])


class _SharedContexts(NamedTuple):
    """Contexts that share their first `shared` computed tokens; without a shared prefix (0), a single context."""

    shared: int
    contexts: tuple[ContextSpan, ...]


class _ContextLocation(NamedTuple):
    """Location of a context in the stream: its first `shared` tokens begin at `shared_prefix`, the others at `own`."""

    shared_prefix: int
    shared: int
    own: int

    def find_stream_index(self, tokens: np.ndarray) -> np.ndarray:
        """Return the indices in the stream of these tokens of the context."""
        return np.where(tokens < self.shared, self.shared_prefix + tokens, self.own + tokens - self.shared)


class _Stream:
    """Packed stream under construction: segments laid end to end.

    Args:
        has_axes: Whether positions are [3, T] instead of [T].
    """

    def __init__(self, alignment: Alignment, *, has_axes: bool):
        self.alignment, self.has_axes, self.length = alignment, has_axes, 0
        self.segments: list[Segment] = []
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.num_references: list[np.ndarray] = []

    def lay(self, tokens: np.ndarray, token_positions: np.ndarray, *, copies: int, parent: int = -1) -> int:
        """Append a segment and return where its tokens begin. Without tokens there is no segment.

        Args:
            tokens: Token IDs, int64 [n].
            token_positions: Their positions, int64 [n] or [3, n].
            parent: Segment of the shared prefix that they continue; -1 if there is none.
        """
        begin, length = self.length, len(tokens)
        padded = self.alignment.count_segment(length)
        if padded:
            self._add(Segment(start=begin, end=begin + padded, parent=parent, length=length), tokens, token_positions, copies)
        return begin

    def compute_positions(self, length: int, images: PlacedImages) -> np.ndarray:
        """Return the positions of the tokens of a context."""
        return positions(length, images) if self.has_axes else np.arange(length)

    def pad(self, total: int) -> None:
        """Append a segment of padding, so that the stream has `total` tokens."""
        if self.length < total:
            self._add(Segment(start=self.length, end=total, length=0), np.zeros(0, dtype=np.int64), self.compute_positions(0, ()), 0)

    def _add(self, segment: Segment, tokens: np.ndarray, token_positions: np.ndarray, copies: int) -> None:
        self.segments.append(segment)
        self.length = segment.end
        self.tokens.append(tokens)
        self.positions.append(token_positions)
        self.num_references.append(np.full(segment.length, copies))
        if num_padded := segment.end - segment.start - segment.length:
            begin = token_positions[..., -1:] + 1 if segment.length else np.zeros((*token_positions.shape[:-1], 1), dtype=np.int64)
            self.tokens.append(np.zeros(num_padded, dtype=np.int64))
            self.positions.append(begin + np.arange(num_padded))
            self.num_references.append(np.zeros(num_padded, dtype=np.int64))


def collate(
    sequences: Sequence[TokenSequence],
    *,
    number: int = 0,
    alignment: Alignment | None = None,
    at_least: int = 0,
    prefix_groups: Sequence[PrefixGroup] = (),
) -> MicroBatch:
    """Pack sequences end to end, so that they can be scored. A prefix that contexts of a prefix group share is in the stream once.

    Padding follows each segment, where causal attention cannot see it, and the last segment as a segment by itself.

    Args:
        number: Index of the micro-batch in its pass.
        alignment: Multiples that segments and the stream are rounded up to; None rounds nothing.
        at_least: Minimum number of tokens in the stream; a multiple of the stream's alignment.
        prefix_groups: Rows that may share a prefix; see `batching.split.MicroBatchSpec`.

    Raises:
        ValueError: The rows of a prefix group have fewer equal tokens than its `prefix`.
    """
    alignment = alignment or Alignment()
    contexts = list_contexts(sequences)
    stream = _Stream(alignment, has_axes=any(sequence.images for sequence in sequences))
    placed = _lay(stream, sequences, _trees(sequences, contexts, prefix_groups, alignment))
    stream.pad(max(alignment.count_stream(stream.length), at_least))
    trained = list(_trained(sequences, contexts, placed))
    stream_index = _column(
        [np.append(placed[context].find_stream_index(np.arange(context.num_computed)), -1) for context in contexts], np.int64
    )
    images = image_tokens(sequences, contexts, lambda context, tokens: placed[context].find_stream_index(tokens))
    return MicroBatch(
        number=number,
        token_ids=_column(stream.tokens, np.int64),
        positions=np.concatenate([stream.compute_positions(0, ()), *stream.positions], axis=-1).astype(np.int64),
        num_references=_column(stream.num_references, np.int64),
        segments=tuple(stream.segments),
        logit_positions=_column([logit_positions for logit_positions, _, _ in trained], np.int64),
        targets=_column([targets for _, targets, _ in trained], np.int64),
        sequence=_column([rows for _, _, rows in trained], np.int64),
        num_sequences=len(sequences),
        num_contexts=len(contexts),
        places=stream_index,
        experts=_experts(sequences, stream_index, stream.length),
        sampling_mask=_join_masks(sequences),
        images=images.images,
        image_positions=images.at,
        image_token_index=images.token,
    )


def collate_specs(
    sequences: Sequence[TokenSequence] | Mapping[int, TokenSequence], micro_specs: Sequence[MicroBatchSpec], alignment: Alignment
) -> list[MicroBatch]:
    """Pack the micro-batches of one rank, so that they can be scored.

    Args:
        sequences: Sequences by their index in the partitioned list, at least those that `micro_specs` contain.
    """
    return [
        collate(
            [sequences[i] for i in micro_spec.rows],
            number=number, alignment=alignment, at_least=micro_spec.at_least, prefix_groups=micro_spec.prefix_groups,
        )
        for number, micro_spec in enumerate(micro_specs)
    ]  # fmt: skip


def _trees(
    sequences: Sequence[TokenSequence], contexts: Sequence[ContextSpan], prefix_groups: Sequence[PrefixGroup], alignment: Alignment
) -> list[_SharedContexts]:
    """Return trees that contain every context once."""
    group_by_row = {row: prefix_group for prefix_group in prefix_groups for row in prefix_group.members}
    by_family: dict[object, list[ContextSpan]] = {}
    for context in contexts:
        by_family.setdefault(group_by_row.get(context.row, context), []).append(context)
    trees = []
    for prefix_group, members in by_family.items():
        shared = 0
        if isinstance(prefix_group, PrefixGroup) and len(members) > 1:
            common = common_prefix(sequences, members)
            if common < prefix_group.prefix:
                raise ValueError(
                    f"rows {prefix_group.members} must share a prefix of {prefix_group.prefix} tokens; only {common} are equal"
                )
            shared = num_shared([context.num_computed for context in members], common, prefix_group, alignment)
        trees += [_SharedContexts(shared, tuple(members))] if shared else [_SharedContexts(0, (context,)) for context in members]
    return trees


def _lay(stream: _Stream, sequences: Sequence[TokenSequence], trees: Sequence[_SharedContexts]) -> dict[ContextSpan, _ContextLocation]:
    """Lay all shared prefixes, then the suffixes of each, then the contexts without a shared prefix.

    Each class is ordered by length, so that equal lengths lie side by side.
    """
    prefix_groups = sorted((tree for tree in trees if tree.shared), key=lambda tree: tree.shared)
    unshared = sorted((tree.contexts[0] for tree in trees if not tree.shared), key=lambda context: context.num_computed)
    placed: dict[ContextSpan, _ContextLocation] = {}

    def slice_context(context: ContextSpan, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, positions) of a part of a context. Positions are those of the whole context: an image shifts what follows it."""
        sequence = sequences[context.row]
        token_positions = stream.compute_positions(context.num_computed, images_in(sequence, context.first, context.end))
        return sequence.token_ids[context.first : context.first + context.num_computed][part], token_positions[..., part]

    shared_prefixes = [
        stream.lay(*slice_context(tree.contexts[0], slice(tree.shared)), copies=len(tree.contexts)) for tree in prefix_groups
    ]
    for parent, (tree, shared_prefix) in enumerate(zip(prefix_groups, shared_prefixes, strict=True)):
        for context in sorted(tree.contexts, key=lambda context: context.num_computed):
            suffix = stream.lay(*slice_context(context, slice(tree.shared, None)), copies=1, parent=parent)
            placed[context] = _ContextLocation(shared_prefix, tree.shared, suffix)
    for context in unshared:
        placed[context] = _ContextLocation(stream.length, 0, stream.lay(*slice_context(context, slice(None)), copies=1))
    return placed


def _trained(
    sequences: Sequence[TokenSequence], contexts: Sequence[ContextSpan], placed: dict[ContextSpan, _ContextLocation]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (indices in the stream, targets, rows) of each context's masked tokens.

    Contexts come row by row, so trained positions do too.
    """
    for context in contexts:
        sequence = sequences[context.row]
        trained_index = np.flatnonzero(sequence.mask[context.first : context.end])
        yield (
            placed[context].find_stream_index(trained_index - 1),
            sequence.token_ids[context.first + trained_index],
            np.full(len(trained_index), context.row),
        )


def _join_masks(sequences: Sequence[TokenSequence]) -> SamplingMask | None:
    """Join the sampling masks of all trained positions; None if no token of any sequence has one."""
    masks = [sequence.sampling_mask for sequence in sequences]
    if all(sampling_mask is None for sampling_mask in masks):
        return None
    return SamplingMask.joined(
        [sampling_mask or SamplingMask.unfiltered(sequence.num_masked) for sampling_mask, sequence in zip(masks, sequences, strict=True)]
    )


def _experts(sequences: Sequence[TokenSequence], positions_in_stream: np.ndarray, length: int) -> np.ndarray | None:
    """Return the forced experts, int16 [length of the stream, MoE layers, k]; None if all sequences route freely."""
    form = next((sequence.experts.shape[1:] for sequence in sequences if sequence.experts is not None), None)
    if form is None:
        return None
    routes = np.full((length, *form), -1, dtype=np.int16)
    stream_index = np.concatenate(
        [
            np.broadcast_to(FREE if sequence.experts is None else sequence.experts, (len(sequence.token_ids), *form))
            for sequence in sequences
        ]
    )
    routes[positions_in_stream[positions_in_stream >= 0]] = stream_index[
        positions_in_stream >= 0
    ]  # what several contexts share, they route alike (`common_prefix`)
    return routes


def collate_samples(
    samples: Sequence[Sample],
    token_weights: Sequence[float] | np.ndarray,
    *,
    trained_at: int,
    number: int = 0,
    alignment: Alignment | None = None,
    at_least: int = 0,
    prefix_groups: Sequence[PrefixGroup] = (),
) -> TrainingMicroBatch:
    """Pack samples as `collate` does, with what the loss needs.

    A sample whose rollout arrived at version `trained_at` is on-policy: its old log-probs are NaN, and the loss uses the current ones.

    Args:
        token_weights: Weight `u` of each sample's trained tokens, one per sample.
        number: As in `collate`.
        alignment: As in `collate`.
        at_least: As in `collate`.
        prefix_groups: As in `collate`.

    Raises:
        ValueError: A sample is stale at `trained_at` and carries no old log-probs. Its ratio would be 1 where it is not.
    """
    stream = collate(samples, number=number, alignment=alignment, at_least=at_least, prefix_groups=prefix_groups)
    old = [_old_logprobs(sample, trained_at)[sample.mask] for sample in samples]
    counts = [sample.num_masked for sample in samples]
    return TrainingMicroBatch(
        **{field.name: getattr(stream, field.name) for field in fields(MicroBatch)},
        rows=tuple((sample.rollout, sample.row) for sample in samples),
        prompts=tuple(sample.prompt_number for sample in samples),
        token_index=_column([np.flatnonzero(sample.mask) for sample in samples], np.int64),
        token_weights=np.repeat(np.asarray(token_weights, dtype=np.float64), counts),
        advantages=np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), counts),
        teacher_logprobs=_column([_read_teacher_logprobs(sample)[sample.mask] for sample in samples], np.float32),
        sampler_logprobs=_column([sample.sampler_logprobs[sample.mask] for sample in samples], np.float32),
        old_logprobs=_column(old, np.float32),
        is_compared=np.repeat(np.array([_is_compared(sample, trained_at) for sample in samples], dtype=bool), counts),
    )


def _column(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)


def _read_teacher_logprobs(sample: Sample) -> np.ndarray:
    return np.full(len(sample.token_ids), np.nan) if sample.teacher_logprobs is None else sample.teacher_logprobs


def _old_logprobs(sample: Sample, trained_at: int) -> np.ndarray:
    if sample.on_policy_version == trained_at:
        return np.full(len(sample.token_ids), np.nan)
    if not isinstance(sample, SampleWithOldLogprobs):
        raise ValueError(
            f"row {sample.row} of rollout {sample.rollout} was sampled by version {sample.version} and is trained at version "
            f"{trained_at} without old log-probs"
        )
    return sample.old_logprobs


def _is_compared(sample: Sample, trained_at: int) -> bool:
    """Return False if the old log-probs are the sampler's: a comparison with themselves is meaningless."""
    return sample.on_policy_version == trained_at or not (
        isinstance(sample, SampleWithOldLogprobs) and sample.old_logprobs_from == "rollout"
    )
