"""Cost of images, computed from their headers: tokens per image and prompt, and the patches of a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.images import MANY_TOKENS
from megatron_grpo.core.weights.trainable_parameters import trains_tower

if TYPE_CHECKING:
    from megatron_grpo.core.batching.batch_sizes import BatchSizes
    from megatron_grpo.core.weights.shape import ModelShape
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.data.prompts import PromptDataset

MOST_ROWS = 2000  # maximum rows examined, evenly spaced
CHARACTERS_OF_A_TOKEN = 4  # estimate for text that is not tokenized


def measure_images(prompts: PromptDataset, sizes: BatchSizes) -> dict[str, Any] | None:
    """Measure the images in a data set's prompts. Means include prompts without an image.

    Returns:
        The `images` object of `plan --json`; None if the data set has no images. Of it `text_is_estimated` is whether text tokens are
        estimated from characters, because the prompts are not tokenized; `side` the side of the square that one token covers, in pixels;
        `patches_bytes_of_micro_batch` the maximum bytes of a micro-batch's patches in float32.

    Raises:
        ConfigError: If an image cannot be opened.
    """
    import numpy as np

    from megatron_grpo.core.images import num_tokens

    if prompts.image_store is None:
        return None
    indices = np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), MOST_ROWS)).astype(np.int64))
    per_row = [[num_tokens(image) for image in prompts.images(int(index))] for index in indices]
    tokens, tokens_per_prompt = [count for row in per_row for count in row], [sum(row) for row in per_row]
    if prompts.tokens is not None:
        text = float(np.mean(prompts.tokens.lengths[prompts.keep[indices]] - tokens_per_prompt))
    else:
        text = float(np.mean([_characters(prompts.raw(int(index))) for index in indices])) / CHARACTERS_OF_A_TOKEN
    image_spec, mean = prompts.image_store.image_spec, sum(tokens_per_prompt) / len(tokens_per_prompt)
    # Completions of one prompt are adjacent and share its processed images.
    # A micro-batch begins inside a group at a multiple of gcd(rows, group).
    group, rows = sizes.num_generations, sizes.micro_batch_size
    num_prompts = math.ceil((group - math.gcd(rows, group) + rows) / group)
    max_tokens = sum(sorted(tokens_per_prompt, reverse=True)[: min(num_prompts, rows)])
    return {
        "rows_examined": len(indices), "rows_with_images": sum(map(bool, per_row)), "max_images": prompts.max_images,
        "tokens_per_image_mean": sum(tokens) / max(1, len(tokens)), "tokens_per_image_max": max(tokens, default=0),
        "image_tokens_per_prompt_mean": mean, "image_tokens_per_prompt_max": max(tokens_per_prompt),
        "text_tokens_of_prompt_mean": text, "text_is_estimated": prompts.tokens is None,
        "max_pixels": image_spec.max_pixels, "side": image_spec.side,
        "patches_bytes_of_micro_batch": max_tokens * image_spec.merge**2 * image_spec.channels * 4,
        "share_of_prompt_tokens": mean / max(1e-9, mean + text),
    }  # fmt: skip


def describe_images(images: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the report.

    Args:
        images: `images` object of the plan.
    """
    about, estimate_note = "", ""
    if images["text_is_estimated"]:
        about, estimate_note = "about ", f"; its text is estimated at {CHARACTERS_OF_A_TOKEN} characters per token"
    yield (
        "an image has {tokens_per_image_mean:,.0f} tokens on average, at most {tokens_per_image_max:,} ({side} x {side} pixels each, "
        "max_pixels {max_pixels:,}); a prompt has up to {max_images}"
    ).format_map(images)
    yield (
        f"a prompt has {images['image_tokens_per_prompt_mean']:,.0f} image tokens on average, {about}"
        f"{images['share_of_prompt_tokens']:.0%} of it, and at most {images['image_tokens_per_prompt_max']:,}{estimate_note}"
    )
    yield (
        f"patches of a micro-batch: up to {images['patches_bytes_of_micro_batch'] / 1e6:,.1f} MB in float32 on each rank of the first "
        f"stage ({images['rows_examined']:,} rows examined, {images['rows_with_images']:,} of them with images)"
    )


def list_image_warnings(images: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if an image has many tokens.

    Args:
        images: `images` object of the plan.
    """
    if images["tokens_per_image_max"] > MANY_TOKENS:
        yield (
            f"The largest image has {images['tokens_per_image_max']:,} tokens, to which every completion of its prompt attends. "
            f"--max_pixels {1280 * images['side'] ** 2} limits it to 1,280."
        )


def _characters(raw: Any) -> int:
    if isinstance(raw, str):
        return len(raw)
    texts = [message.get("content") for message in raw]
    return sum(
        len(text) if isinstance(text, str) else sum(len(part.get("text") or "") for part in text or [] if isinstance(part, dict))
        for text in texts
    )


def tower_without_images(cfg: Config, shape: ModelShape) -> Iterator[str]:
    """Yield a warning if the vision tower trains on a data set without images."""
    if trains_tower(cfg.tuner, shape):
        thawed = " and ".join(f"{name} false" for name in ("freeze_vit", "freeze_aligner") if not getattr(cfg.tuner, name))
        yield (
            f"no prompt of {cfg.data.dataset} has an image, so the vision tower ({thawed or 'trainable_parameters'}) is not trained: its "
            "gradient is zero, but it takes the memory of trained weights."
        )
