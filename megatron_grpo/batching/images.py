"""Images in a packed stream: the indices of their tokens, their positions, and the image embedding at each token. No torch.

Locations come from the sequences' `images`, never from token IDs: a sampler may sample the placeholder, which is then an ordinary token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from megatron_grpo.batching.prefix_groups import ContextSpan
from megatron_grpo.types import Image, Sequence

PlacedImages = tuple[tuple[int, Image], ...]  # (index of the first token, image), ascending


class StreamImages(NamedTuple):
    """Images of one packed stream."""

    images: tuple[Image, ...]  # each key once
    at: np.ndarray  # int64 [n], ascending: indices in the stream, each once
    token: np.ndarray  # int64 [n]: index into the concatenated image tokens of all `images`


def grid_of(image: Image) -> tuple[int, int]:
    """Return (rows, columns) of an image's tokens.

    Args:
        image: The image.

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
    rows, columns = grid_of(image)
    return rows * columns


def images_in(sequence: Sequence, first: int, end: int) -> PlacedImages:
    """Return the images of a context, by their index in the context.

    Args:
        sequence: The sequence that contains the context.
        first: First token of the context.
        end: End of the context, exclusive.
    """
    return tuple((place - first, image) for place, image in sequence.images if first <= place < end)


def positions(length: int, images: PlacedImages) -> np.ndarray:
    """Return the positions of a context's tokens, int64 [3, length]: frame, row and column (Qwen2-VL, arXiv:2409.12191, section 2.1).

    The tokens of an image are on a grid that begins at the next text position; the text continues after the grid's longer side.

    Args:
        length: Tokens of the context.
        images: Images of the context, by their index in it.
    """
    found, behind = np.tile(np.arange(length), (3, 1)), 0
    for place, image in images:
        rows, columns = grid_of(image)
        end = min(place + rows * columns, length)
        row, column = np.divmod(np.arange(end - place), columns)
        found[:, place:end] = place + behind + np.stack([np.zeros_like(row), row, column])
        behind += max(rows, columns) - rows * columns
        found[:, end:] = np.arange(end, length) + behind
    return found


def image_tokens(
    sequences: SequenceOf[Sequence], contexts: Iterable[ContextSpan], in_stream: Callable[[ContextSpan, np.ndarray], np.ndarray]
) -> StreamImages:
    """Collect the images of a packed stream. What several contexts share is in the stream, and encoded, once.

    Args:
        sequences: Sequences of the micro-batch.
        contexts: Their contexts.
        in_stream: Maps a context and indices of its tokens, int64 [n], to indices in the stream.
    """
    images: dict[str, tuple[int, Image]] = {}  # by key: its first token among those of all
    at, token, total = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for context in contexts:
        for place, image in images_in(sequences[context.row], context.first, context.end):
            count = num_tokens(image)
            if image.key not in images:
                images[image.key] = total, image
                total += count
            here = np.arange(min(count, context.num_computed - place))
            at.append(in_stream(context, place + here))
            token.append(images[image.key][0] + here)
    places, first = np.unique(np.concatenate(at), return_index=True)
    return StreamImages(tuple(image for _, image in images.values()), places, np.concatenate(token)[first])
