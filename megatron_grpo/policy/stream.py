"""A micro-batch as tensors on this rank's device: its part of the packed stream, and how attention should read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_grpo.parallel.context import held_positions, held_tokens
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.types import MicroBatch


@dataclass(frozen=True, slots=True)
class EqualSegments:
    """All segments of one length, so that they run as one batched attention without a padding token.

    mine: [n, length / cp] places in this rank's part of the stream. key_order: [length] puts the keys gathered from all context-parallel
    ranks, rank after rank, back into sequence order. mask: [length / cp, length], or None where plain causal attention says it.
    """

    mine: torch.Tensor
    key_order: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedStream:
    """Given to every attention layer in place of Megatron-Core's PackedSeqParams.

    `qkv_format` is not "thd": Megatron then applies RoPE row by row, and the frequencies we hand it are already a gather by position.
    """

    lengths: tuple[EqualSegments, ...]
    cu_seqlens: torch.Tensor  # int32 [segments + 1], of the whole stream: what Transformer Engine's attention reads
    max_seqlen: int
    qkv_format: str = "segments"
    local_cp_size: None = None
    cp_group: None = None


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This context-parallel rank's part of a micro-batch. t = T / cp tokens, c of the C trained positions."""

    token_ids: torch.Tensor  # int64 [1, t]
    positions: torch.Tensor  # int64 [t]
    all_positions: torch.Tensor  # int64 [T]: of the whole stream
    is_padding: torch.Tensor  # bool [t]
    packed: PackedStream
    predict_at: torch.Tensor  # int64 [c], places among the t tokens
    targets: torch.Tensor  # int64 [c]
    trained: np.ndarray  # int64 [c], which of the C trained positions these are


def to_local(batch: MicroBatch, parallel: ParallelState) -> LocalBatch:
    """Cuts a micro-batch for this rank and moves it to its device."""
    cp, rank, device = parallel.cp_size, parallel.cp_rank, parallel.device
    held = held_tokens(batch.segments, cp, rank)
    place = np.full(batch.num_tokens, -1)
    place[held] = np.arange(len(held))
    trained = np.flatnonzero(place[batch.predict_at] >= 0)
    trained = trained[np.argsort(place[batch.predict_at[trained]], kind="stable")]

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return LocalBatch(
        token_ids=tensor(batch.token_ids[held])[None],
        positions=tensor(batch.positions[held]),
        all_positions=tensor(batch.positions),
        is_padding=tensor(batch.is_padding[held]),
        packed=_packed(batch, cp, rank, tensor),
        predict_at=tensor(place[batch.predict_at[trained]]),
        targets=tensor(batch.targets[trained]),
        trained=trained,
    )


def _packed(batch: MicroBatch, cp: int, rank: int, tensor) -> PackedStream:
    starts: dict[int, list[int]] = {}
    for segment in batch.segments:
        if segment.parent >= 0:
            raise NotImplementedError("segments with a parent")
        starts.setdefault(segment.end - segment.start, []).append(segment.start)
    lengths = []
    for length, begins in sorted(starts.items()):
        # Every rank holds length / cp tokens of each segment, so a segment begins at start / cp in a rank's own part.
        mine = np.array(begins)[:, None] // cp + np.arange(length // cp)
        order = mask = None
        if cp > 1:
            held = [held_positions(length, cp, r) for r in range(cp)]
            order = tensor(np.argsort(np.concatenate(held)))
            mask = tensor(held[rank][:, None] >= np.arange(length))
        lengths.append(EqualSegments(mine=tensor(mine), key_order=order, mask=mask))
    cu = np.array([0] + [s.end for s in batch.segments], dtype=np.int32)
    return PackedStream(lengths=tuple(lengths), cu_seqlens=tensor(cu), max_seqlen=max(starts))
