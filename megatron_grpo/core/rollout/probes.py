"""Sequences that trainer and engine both score after a weight update: the same on every rank, at every call, for every engine."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_grpo.core.images import ORIENTATION, compute_image_key, decode_image
from megatron_grpo.core.types import Image, TokenSequence

if TYPE_CHECKING:
    from megatron_grpo.core.images import Grid, ImageProcessorSpec

BLOCK = 32  # tokens: the largest block of the prefix cache
LENGTH = 2 * BLOCK + 2  # two full blocks, then the token that is read through the cache
NUM_PROBES = 4
FEWEST_WORDS = 3  # text tokens around an image


@dataclass(frozen=True, kw_only=True)
class ProbeImage:
    """An `Image` of color waves: the same pixels wherever it is generated.

    Args:
        height: Height of the upright image in pixels.
        is_turned: Whether the file holds the image turned by a quarter, with an EXIF tag that says so, like a photo of a phone.
    """

    image_spec: ImageProcessorSpec
    height: int
    width: int
    is_turned: bool = False

    @property
    def grid(self) -> Grid:
        return self.image_spec.grid(self.height, self.width)

    @property
    def merge(self) -> int:
        return self.image_spec.merge

    @property
    def num_tokens(self) -> int:
        return self.image_spec.tokens(self.grid)

    @cached_property
    def key(self) -> str:
        return compute_image_key(self.data(), self.image_spec)

    def data(self) -> bytes:
        from PIL import Image

        y, x = np.mgrid[0 : self.height, 0 : self.width]
        planes = np.stack([(x * a + y * b) // 3 % 256 for a, b in ((7, 3), (2, 11), (5, -4))], -1).astype(np.uint8)
        stream, exif = io.BytesIO(), Image.Exif()
        if self.is_turned:
            exif[ORIENTATION] = 6  # to be shown turned clockwise
        Image.fromarray(np.rot90(planes) if self.is_turned else planes).save(stream, "PNG", exif=exif)
        return stream.getvalue()

    @cached_property
    def _patches(self) -> np.ndarray:
        return self.image_spec.patches(decode_image(self.data()))

    def patches(self) -> np.ndarray:
        return self._patches


def make_sequence(tokens: Sequence[int], images: tuple[tuple[int, Image], ...] = ()) -> TokenSequence:
    """Return a sequence of one context in which every token but the first is scored.

    Args:
        tokens: Token IDs, [T].
        images: (index in tokens, image) of each image, ascending.
    """
    token_ids = np.asarray(tokens, dtype=np.int64)
    return TokenSequence(token_ids=token_ids, mask=np.arange(len(token_ids)) > 0, images=images)


def probe_sequences(
    tokenizer: Any, *, vocab_size: int, max_model_len: int, image_spec: ImageProcessorSpec | None = None
) -> list[TokenSequence]:
    """Return sequences of random ordinary tokens; for a vision-language model, up to half of them contain an image.

    A fault of the vision tower shows in no other sequence. Where `max_model_len` is small, the sequences with an image have fewer text
    tokens; an image that fits only without text is left out.

    Args:
        vocab_size: Vocabulary size of the model; the tokenizer may have more or fewer tokens.
        max_model_len: Maximum length of a sequence and one generated token, in tokens.
        image_spec: Image processing of a vision-language model; None for a text model.
    """
    special = set(tokenizer.all_special_ids) | ({image_spec.image_token, *image_spec.around} if image_spec else set())
    ordinary = np.array([token for token in range(min(len(tokenizer), vocab_size)) if token not in special])
    # One position is reserved for the token that vLLM always generates.
    length = min(LENGTH, max_model_len - 1)
    sampled = np.random.default_rng(0).choice(ordinary, (NUM_PROBES, length)).tolist()
    if image_spec is None:
        return [make_sequence(row) for row in sampled]
    side = image_spec.side
    images = [ProbeImage(image_spec=image_spec, height=2 * side, width=width * side, is_turned=width == 3) for width in (3, 2)]
    fitting = [(image, max_tokens) for image in images if (max_tokens := max_model_len - 1 - image.num_tokens - 2) >= FEWEST_WORDS]
    with_images = [_showing(row[:max_tokens], image) for row, (image, max_tokens) in zip(sampled, fitting, strict=False)]
    return [*with_images, *(make_sequence(row) for row in sampled[len(with_images) :])]


def _showing(tokens: list[int], image: ProbeImage) -> TokenSequence:
    """Insert the image in the middle, so that tokens after it attend to it."""
    begin, end = image.image_spec.around
    start = len(tokens) // 3
    image_tokens = [begin, *[image.image_spec.image_token] * image.num_tokens, end]
    return make_sequence([*tokens[:start], *image_tokens, *tokens[start:]], images=((start + 1, image),))
