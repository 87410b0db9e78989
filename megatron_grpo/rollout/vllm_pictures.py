"""A vLLM engine that is shown pictures: how it is started, asked, and made to forget what it saw. Written for vLLM 0.32.

It is handed the picture and one token for it, and makes patches and tokens by itself. Both must come out as the trainer's: so its image
processor is the trainer's, Pillow's, and the tokens that it sampled from are compared with those of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megatron_grpo.data.album import num_tokens, shortened
from megatron_grpo.data.eyes import Eyes
from megatron_grpo.data.pictures import decoded
from megatron_grpo.types import Picture

Shown = Sequence[tuple[int, Picture]]  # (place of its first token, picture)


def engine_options(eyes: Eyes | None, most_pictures: int, *, on_gpu: bool) -> dict[str, Any]:
    """Of an engine whose prompts show at most so many pictures each; nothing for a model of text."""
    if eyes is None:
        return {}
    take_pillow()
    return {
        "limit_mm_per_prompt": {"image": max(1, most_pictures), "video": 0},
        "mm_processor_kwargs": {"size": eyes.processor_size},
        "mm_device_do_normalize": False,  # the processor does it, as in the trainer
        "skip_mm_profiling": not on_gpu,  # it looks at the largest picture that there may be; a CPU's KV cache is not measured
    }


def take_pillow() -> None:
    """vLLM's image processor is the one whose pixels the trainer has: else transformers takes torchvision's, which resizes to others."""
    from vllm.transformers_utils import processor

    if getattr(processor.cached_get_processor, "takes_pillow", False):
        return
    get = processor.get_processor

    def with_pillow(*args: Any, **kwargs: Any) -> Any:
        found = get(*args, **kwargs)
        theirs: Any = getattr(found, "image_processor", None)
        if type(theirs).__name__.startswith("Qwen2VLImageProcessor"):
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            settings = theirs.to_dict()
            known = {*Qwen2VLImageProcessorPil.valid_kwargs.__annotations__, *_SHARED}
            found.image_processor = Qwen2VLImageProcessorPil(**{name: settings[name] for name in known if settings.get(name) is not None})
        return found

    cached: Any = lru_cache(with_pillow)
    cached.takes_pillow = True
    processor.cached_get_processor = cached


_SHARED = (
    "do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample", "rescale_factor", "size",
)  # fmt: skip


def prompt_of(token_ids: Sequence[int], shown: Shown) -> dict[str, Any]:
    """What vLLM is given for a prompt in its long form. Raises ConfigError where a picture cannot be read any more."""
    if not shown:
        return {"prompt_token_ids": [int(token) for token in token_ids]}
    spans = [(place, num_tokens(picture)) for place, picture in shown]
    return prompt_with(token_ids, spans, [decoded(picture.data()) for _, picture in shown])


def prompt_with(token_ids: Sequence[int], spans: Sequence[tuple[int, int]], images: Sequence[Any], **more: Any) -> dict[str, Any]:
    """The same of pictures that are decoded already. spans: (first token, tokens) of each. more: vLLM's own keys of a prompt."""
    # Long ids beside raw pictures would be expanded once more, without a word.
    return {"prompt_token_ids": shortened(token_ids, spans), "multi_modal_data": {"image": list(images)}, **more}


def difference(output: Any, token_ids: Sequence[int]) -> str | None:
    """What an answer was sampled from, if not from these tokens, as a sentence."""
    theirs = list(output.prompt_token_ids)
    if theirs == [int(token) for token in token_ids]:
        return None
    return (
        f"vLLM made {len(theirs)} tokens of a prompt with pictures, and the trainer {len(token_ids)}: the two do not see the same "
        "(another max_pixels or min_pixels, or another image processor)"
    )


def forget_pictures(llm_engine: Any) -> None:
    """Of what the tower made of pictures: stale when it moves."""
    llm_engine.reset_encoder_cache()
