"""Pictures in a packed stream: where their tokens stand, at which positions, and which of the encoded tokens each of them is. No torch.

Places come from the sequences' `shown`, never from token ids: a sampler may draw the placeholder itself, and then it is an ordinary word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from megatron_grpo.batching.prefix_groups import ContextSpan
from megatron_grpo.types import Image, Sequence

Shown = tuple[tuple[int, Image], ...]  # (place of the first token, picture), ascending


class StreamImages(NamedTuple):
    """The pictures of one stream."""

    pictures: tuple[Image, ...]  # each key once
    at: np.ndarray  # int64 [n], ascending: places in the stream, each once
    token: np.ndarray  # int64 [n]: which of the tokens of all `pictures`, one picture behind the other, stands there


def grid_of(picture: Image) -> tuple[int, int]:
    """(rows, columns) of its tokens. Raises ValueError for what is not one still picture."""
    frames, rows, columns = picture.grid
    if frames != 1 or rows % picture.merge or columns % picture.merge:
        merge = f"{picture.merge} x {picture.merge}"
        raise ValueError(f"picture {picture.key} has a grid of {picture.grid} patches: a picture is one frame, in whole tokens of {merge}")
    return rows // picture.merge, columns // picture.merge


def num_tokens(picture: Image) -> int:
    rows, columns = grid_of(picture)
    return rows * columns


def shown_in(sequence: Sequence, first: int, end: int) -> Shown:
    """What a context shows, by its place in the context."""
    return tuple((place - first, picture) for place, picture in sequence.shown if first <= place < end)


def positions(length: int, shown: Shown) -> np.ndarray:
    """Of a context of so many tokens: int64 [3, length], by frame, row and column (Qwen2-VL, arXiv:2409.12191, section 2.1).

    A picture's tokens stand on a grid that begins where the text has come to; the text goes on behind the grid's longer side.
    """
    found, behind = np.tile(np.arange(length), (3, 1)), 0
    for place, picture in shown:
        rows, columns = grid_of(picture)
        end = min(place + rows * columns, length)
        row, column = np.divmod(np.arange(end - place), columns)
        found[:, place:end] = place + behind + np.stack([np.zeros_like(row), row, column])
        behind += max(rows, columns) - rows * columns
        found[:, end:] = np.arange(end, length) + behind
    return found


def seen(
    sequences: SequenceOf[Sequence], contexts: Iterable[ContextSpan], in_stream: Callable[[ContextSpan, np.ndarray], np.ndarray]
) -> StreamImages:
    """in_stream: places of a context's tokens. What several contexts share lies, and is looked at, once."""
    pictures: dict[str, tuple[int, Image]] = {}  # by key: its first token among those of all
    at, token, total = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for context in contexts:
        for place, picture in shown_in(sequences[context.row], context.first, context.end):
            count = num_tokens(picture)
            if picture.key not in pictures:
                pictures[picture.key] = total, picture
                total += count
            here = np.arange(min(count, context.num_computed - place))
            at.append(in_stream(context, place + here))
            token.append(pictures[picture.key][0] + here)
    places, first = np.unique(np.concatenate(at), return_index=True)
    return StreamImages(tuple(picture for _, picture in pictures.values()), places, np.concatenate(token)[first])
