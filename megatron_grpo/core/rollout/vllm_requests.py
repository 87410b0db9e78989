"""vLLM's start-up arguments, requests and outputs, with images and without: shared by the trainer's engine and the HTTP server.

Written for vLLM 0.32. vLLM receives an image and one token for it, and computes patches and tokens itself. Both must match the trainer's:
so it uses the trainer's image processor, Pillow's, and the tokens that it sampled from are compared with those of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.images import ImageProcessorSpec, collapse_image_tokens, decode_image, num_tokens
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.rollout.sampling_mask import FIELD, MOST, TIES
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.types import Image
from megatron_grpo.core.weights.lora import LoraSync


def take_logprobs_as_they_come() -> None:
    """Patch vLLM to return log-probs as arrays. Call before the first request, in the process that sends requests. Idempotent.

    vLLM creates Python objects for every token whose log-prob it returns, and detokenizes it: even without detokenizing 0.4 ms per position
    for 256 tokens, 25 kB. With the patch a position has two arrays, of the tokens that were left, the sampled one first, which takes 0.05
    ms; or the sampled token's log-prob alone.
    """
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.logprobs import LogprobsProcessor

    right: Any = LogprobsProcessor
    if output_processor.LogprobsProcessor is not right:
        return

    class AsTheyCome(right):
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            if not request.sampling_params.flat_logprobs:  # a request that scores
                return right.from_new_request(tokenizer, request)
            created = super().from_new_request(None, request)
            created.logprobs = []
            return created

        def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
            all_ids, all_logprobs, *_ = logprobs_lists
            if not self.num_logprobs:
                sampled = all_logprobs[:, 0].tolist()
                self.cumulative_logprob += sum(sampled)
                self.logprobs += [(None, (value,)) for value in sampled]
                return
            for row_ids, row in zip(all_ids, all_logprobs, strict=True):
                self.cumulative_logprob += float(row[0])
                is_left = row[: 1 + self.num_logprobs] > -np.inf  # other requests may ask for more
                is_left[0] = True
                kept_indices = is_left.nonzero()[0]
                self.logprobs.append((row_ids[kept_indices], row[kept_indices]))

    replaced: Any = output_processor
    replaced.LogprobsProcessor = AsTheyCome


def sampling_params(sampling: SamplingSettings, seed: int | None, *, vocab_size: int, **kwargs: Any) -> Any:
    """Return vLLM's SamplingParams.

    Args:
        seed: Seed of the request, or None.

    Raises:
        ValueError: vLLM rejects an argument.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = dict(sampling.more)
    if isinstance(options.get("structured_outputs"), Mapping):
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    if bias := options.get("logit_bias"):
        options["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # JSON's keys are strings

    return SamplingParams(
        n=sampling.n, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, seed=seed,
        max_tokens=sampling.max_completion_length, stop=list(sampling.stop), stop_token_ids=list(sampling.stop_token_ids),
        # The sampled token's; and those of the sampling mask, where it is returned. Flat: see `take_logprobs_as_they_come`.
        logprobs=num_asked(sampling.top_k, vocab_size) if sampling.returns_sampling_mask else 0, flat_logprobs=True,
        **options, **kwargs,
    )  # fmt: skip


def num_asked(top_k: int, vocab_size: int) -> int:
    """Return how many log-probs to request per position, besides the sampled token's.

    Args:
        top_k: Tokens that top-k keeps.
    """
    return min(top_k + TIES, vocab_size)


def logprobs_and_mask(ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> tuple[np.ndarray, SamplingMask]:
    """Convert vLLM's log-probs of n tokens to each sampled token's log-prob, float32 [n], and the sampling mask.

    A set of tokens that may be larger than what vLLM returned is replaced by the returned tokens, and the log-prob is conditioned on them:
    log p - log(sum of p).

    Args:
        ids: Token IDs, int32 [n, 1 + num_asked]: the sampled token first, then the most likely tokens, which may include it.
        logprobs: Their log-probs, float32 of the same shape; -inf for a token outside the sampling mask.
    """
    is_left = logprobs > -np.inf
    is_cut = is_left[:, 1:].all(axis=1) & (ids.shape[1] - 1 < vocab_size)
    is_left[:, 1:] &= ids[:, 1:] != ids[:, :1]  # the sampled token is in the first column already
    is_left[:, 0] = True
    cut_logprobs = np.where(is_left, logprobs, -np.inf).astype(np.float64)
    normalized = logprobs[:, 0] - np.where(is_cut, np.log(np.exp(cut_logprobs).sum(axis=1)), 0.0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_left.sum(axis=1))])
    return normalized.astype(np.float32), SamplingMask(offsets, ids[is_left].astype(np.int32))


def sampled_logprobs(output: Any, *, may_be_aborted: bool = False) -> list[float]:
    """Return the log-prob of each token of a finished completion.

    Args:
        may_be_aborted: Whether a completion that was aborted is accepted.

    Raises:
        RuntimeError: The completion was aborted, or has another number of log-probs than tokens.
    """
    if output.finish_reason not in ("stop", "length", *(["abort"] * may_be_aborted)):
        raise RuntimeError(f"vLLM ended a completion with finish_reason {output.finish_reason!r}")
    logprobs = [float(top_logprobs[0]) for _, top_logprobs in output.logprobs or ()]  # the sampled token comes first at each position
    if len(logprobs) != len(output.token_ids):
        raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(output.token_ids)} tokens")
    return logprobs


def sampled(
    output: Any, sampling: SamplingSettings, vocab_size: int, *, may_be_aborted: bool = False
) -> tuple[list[float], SamplingMask | None]:
    """Return (log-probs of a finished completion, its sampling mask or None if it was not requested).

    Args:
        may_be_aborted: As in `sampled_logprobs`.

    Raises:
        RuntimeError: As in `sampled_logprobs`.
        ConfigError: A grammar allows no next token of the model's vocabulary.
    """
    if output.finish_reason == "error" and sampling.more.get(FIELD):
        raise ConfigError(
            f"vLLM ended a completion with an error under {FIELD} {sampling.more[FIELD]}: no token of the model's vocabulary is "
            "allowed next, because its tokenizer cannot express the required text; or see the log of vLLM for another reason."
        )
    logprobs = sampled_logprobs(output, may_be_aborted=may_be_aborted)
    if not sampling.returns_sampling_mask:
        return logprobs, None
    form = len(logprobs), 1 + num_asked(sampling.top_k, vocab_size)
    ids, top_logprobs = np.zeros(form, dtype=np.int32), np.full(form, -np.inf, dtype=np.float32)
    for index, (kept_ids, values) in enumerate(output.logprobs or ()):
        ids[index, : len(kept_ids)], top_logprobs[index, : len(kept_ids)] = kept_ids, values
    normalized, sampling_mask = logprobs_and_mask(ids, top_logprobs, vocab_size)
    return normalized.tolist(), sampling_mask


def decode_completion(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], sampling: SamplingSettings, *, is_stopped: bool
) -> str:
    """Decode a completion whose tokens come from several requests, as vLLM decodes those of one.

    Args:
        prompt_ids: Token IDs of the prompt.
        token_ids: Token IDs of the completion.
        is_stopped: Whether a stop string or its last token ended the completion; neither is part of the text.
    """
    detokenizer, stop = _detokenized(tokenizer, prompt_ids, token_ids, sampling, is_stopped and not sampling.stop)
    if is_stopped and sampling.stop and stop is None:
        detokenizer, _ = _detokenized(tokenizer, prompt_ids, token_ids, sampling, True)
    return detokenizer.get_next_output_text(finished=True, delta=False)


def until_stop(output: Any, tokenizer: Any, ids: Sequence[int], num_sampled: int, sampling: SamplingSettings) -> Any:
    """Return a part of a completion as far as a stop string that began in an earlier part, which vLLM does not see.

    Args:
        ids: Token IDs of its request.
        num_sampled: Number of the last `ids` that belong to the completion.
    """
    begin, is_token = len(ids) - num_sampled, output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    detokenizer, stop = _detokenized(tokenizer, ids[:begin], [*ids[begin:], *output.token_ids], sampling, is_token)
    if stop is None:
        return output
    count, output = detokenizer.num_output_tokens() - num_sampled, copy(output)
    output.token_ids, output.logprobs, output.finish_reason = list(output.token_ids)[:count], output.logprobs[:count], "stop"
    return output


def _detokenized(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], sampling: SamplingSettings, ends_by_token: bool
) -> tuple[Any, str | None]:
    """Return vLLM's detokenizer with the tokens of a completion as far as its first stop string, and that string or None."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = sampling_params(sampling, None, vocab_size=len(tokenizer))
    request: Any = SimpleNamespace(request_id="", sampling_params=params, prompt_token_ids=list(prompt_ids), prompt_embeds=None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    return detokenizer, detokenizer.update(list(token_ids), ends_by_token)


def scoring_requests(ids: Sequence[int]) -> list[tuple[Sequence[int], Any]]:
    """Return the two requests that score a sequence, for `scores`: tokens, images expanded, and parameters.

    Prompt log-probs never read the prefix cache, so alone they could not detect a stale one; sampling does, so the last token is scored by
    a separate request.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    last = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=[ids[-1]], detokenize=False)
    return [(ids, params), (ids[:-1], last)]


def scores(ids: Sequence[int], uncached: Any, cached: Any) -> list[float]:
    """Return log p of each token after the first, in nats.

    Args:
        uncached: vLLM's answer to the first of `scoring_requests`.
        cached: vLLM's answer to the second.
    """
    logprobs = [position[token].logprob for position, token in zip(uncached.prompt_logprobs[1:-1], ids[1:-1], strict=True)]
    return [*logprobs, cached.outputs[0].logprobs[0][ids[-1]].logprob]


def scoring_params() -> Any:
    """Return parameters that score a whole sequence in one request, which never reads the prefix cache."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def sequence_logprobs(ids: Sequence[int], output: Any) -> list[float]:
    """Return log p of each token after the first, in nats.

    Args:
        output: vLLM's answer to `scoring_params`.

    Raises:
        RuntimeError: vLLM scored other tokens.
    """
    flat = output.prompt_logprobs
    if list(flat.token_ids) != list(ids[1:]):
        raise RuntimeError(f"vLLM scored {len(flat.token_ids)} tokens of a sequence of {len(ids)}, or other tokens than it received")
    return list(flat.logprobs)


# ---- a prompt with images ------------------------------------------------------------------------------------------------------------


PlacedImages = Sequence[tuple[int, Image]]  # (index of its first token, image)


def image_options(image_spec: ImageProcessorSpec | None, max_images: int, *, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of an engine for prompts with images; none for a text model. Patches vLLM's image processor.

    Args:
        image_spec: Image processing of a vision-language model; None for a text model.
    """
    if image_spec is None:
        return {}
    take_pillow()
    return {
        "limit_mm_per_prompt": {"image": max(1, max_images), "video": 0},
        "mm_processor_kwargs": {"size": image_spec.processor_size},
        "mm_device_do_normalize": False,  # the processor does it, as in the trainer
        "skip_mm_profiling": not on_gpu,  # it encodes the largest possible image; a CPU's KV cache is not measured
    }


def take_pillow() -> None:
    """Make vLLM use the trainer's image processor. Idempotent.

    Otherwise transformers takes torchvision's, which resizes to other pixels.
    """
    from vllm.transformers_utils import processor

    if getattr(processor.cached_get_processor, "takes_pillow", False):
        return
    get = processor.get_processor

    def with_pillow(*args: Any, **kwargs: Any) -> Any:
        loaded = get(*args, **kwargs)
        image_processor: Any = getattr(loaded, "image_processor", None)
        if type(image_processor).__name__.startswith("Qwen2VLImageProcessor"):
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            settings = image_processor.to_dict()
            setting_names = {*Qwen2VLImageProcessorPil.valid_kwargs.__annotations__, *_SHARED}
            loaded.image_processor = Qwen2VLImageProcessorPil(
                **{name: settings[name] for name in setting_names if settings.get(name) is not None}
            )
        return loaded

    cached: Any = lru_cache(with_pillow)
    cached.takes_pillow = True
    processor.cached_get_processor = cached


_SHARED = (
    "do_convert_rgb", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample", "rescale_factor", "size",
)  # fmt: skip


def make_vllm_prompt(token_ids: Sequence[int], images: PlacedImages) -> dict[str, Any]:
    """Return vLLM's input for a prompt with expanded image tokens.

    Args:
        token_ids: Token IDs of the prompt.

    Raises:
        ConfigError: An image cannot be read any more.
    """
    if not images:
        return {"prompt_token_ids": [int(token) for token in token_ids]}
    spans = [(start, num_tokens(image)) for start, image in images]
    return prompt_with(token_ids, spans, [decode_image(image.data()) for _, image in images])


def prompt_with(token_ids: Sequence[int], spans: Sequence[tuple[int, int]], images: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
    """Return vLLM's input for a prompt whose images are decoded already.

    Args:
        token_ids: Token IDs of the prompt, image tokens expanded.
        spans: (first token, number of tokens) of each image.
    """
    # vLLM would silently expand IDs a second time, if they were passed expanded with raw images.
    return {"prompt_token_ids": collapse_image_tokens(token_ids, spans), "multi_modal_data": {"image": list(images)}, **kwargs}


def prompt_difference(output: Any, token_ids: Sequence[int]) -> str | None:
    """Return a sentence if a completion was sampled from other prompt tokens than these; None if not.

    Args:
        token_ids: Token IDs of the prompt.
    """
    vllm_ids = list(output.prompt_token_ids)
    if vllm_ids == [int(token) for token in token_ids]:
        return None
    return (
        f"vLLM has {len(vllm_ids)} tokens for a prompt with images, but the trainer has {len(token_ids)}: they process images "
        "differently (max_pixels, min_pixels or the image processor differs)"
    )


# ---- the run's settings as arguments of an engine, and vLLM's errors as messages about them --------------------------------------------


def engine_options(
    cfg: RolloutConfig, *, dtype: str, trust_remote_code: bool, image_spec: ImageProcessorSpec | None, max_images: int,
    lora: LoraSync | None,
    returns_experts: bool, on_gpu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of every engine, inside the ranks and behind HTTP. Call after `vllm_patches.apply_patches`.

    Args:
        dtype: Dtype of the model; `vllm_dtype` of the settings takes precedence.
        trust_remote_code: Whether vLLM may run code of the checkpoint.
        lora: How adapters are synced, if they are synced separately.
        returns_experts: Whether the engine returns expert routing.
    """
    from megatron_grpo.core.rollout.experts import expert_options
    from megatron_grpo.core.rollout.vllm_weights import lora_options

    options = gpu_options(cfg) if on_gpu else cpu_options(cfg)
    options |= lora_options(lora) if lora is not None else {}
    options |= expert_options(on_gpu=on_gpu) if returns_experts else {}
    return options | image_options(image_spec, max_images, on_gpu=on_gpu) | cfg.vllm_engine_kwargs | {
        "dtype": cfg.vllm_dtype or dtype,
        "trust_remote_code": trust_remote_code,
        "tensor_parallel_size": cfg.vllm_tensor_parallel_size,
        "max_num_seqs": cfg.vllm_max_num_seqs,
        "enable_prefix_caching": cfg.vllm_enable_prefix_caching,
        "mamba_ssm_cache_dtype": "float32",  # as in the trainer; vLLM's default is the model's dtype
        "max_logprobs": MOST + TIES,  # requests may ask for the sampling mask
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from; the default ignores temperature and top-p
        "use_tqdm_on_load": False,
    }  # fmt: skip


@contextmanager
def startup_errors(cfg: RolloutConfig, max_model_len: int, *, on_gpu: bool) -> Iterator[None]:
    """Convert vLLM's errors into messages about settings. Wraps the start of an engine.

    Args:
        max_model_len: Prompt and completion together, in tokens.

    Raises:
        ConfigError: vLLM rejects something that other settings can fix.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        problem = explain_vllm_error(cfg, max_model_len, on_gpu, str(error))
        if problem is None:
            raise
        raise ConfigError([problem]) from error


CPU_BLOCK_SIZE = 32  # tokens: the smallest that vLLM's CPU attention supports; its default of 128 would share no short prompt


def cpu_options(cfg: RolloutConfig) -> dict[str, Any]:
    """Return the engine arguments for a CPU."""
    return {
        "enforce_eager": True,
        # A prompt split in two makes vLLM rewind the generator of its seed, which torch's CPU generators do not support: it would crash.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": cfg.vllm_kv_cache_memory_mb << 20,
        "block_size": CPU_BLOCK_SIZE,
    }


def gpu_options(cfg: RolloutConfig) -> dict[str, Any]:
    """Return the engine arguments for a GPU."""
    return {
        "enforce_eager": cfg.vllm_enforce_eager,
        "gpu_memory_utilization": cfg.vllm_gpu_memory_utilization,
        "enable_sleep_mode": cfg.sleep_level > 0,
    }


# Error messages of torch and vLLM when weights, warm-up or CUDA graphs find no memory.
_OUT_OF_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUDA Error: out of memory", "OutOfMemoryError")


def explain_vllm_error(cfg: RolloutConfig, max_model_len: int, on_gpu: bool, error: str) -> Problem | None:
    """Return what an error of vLLM means in the user's settings; None if it is not about them.

    Args:
        max_model_len: Prompt and completion together, in tokens.
    """
    if "less than desired GPU memory utilization" in error:
        match = re.search(r"\(([\d.]+)/([\d.]+) GiB\)", error)
        free = f"{match[1]} of {match[2]} GiB are free" if match else "less memory is free"
        share = int(100 * float(match[1]) / float(match[2])) / 100 if match else None
        return Problem(
            flags=["vllm_gpu_memory_utilization"], nearest={} if share is None else {"vllm_gpu_memory_utilization": [share]},
            message=f"vllm_gpu_memory_utilization ({cfg.vllm_gpu_memory_utilization}): {free} on the GPU when vLLM starts after the "
            f"policy. Use {'less' if share is None else f'at most {share}'}, or offload_optimizer true and offload_model true, which free "
            "the policy's memory first.")  # fmt: skip
    if any(sign in error for sign in _OUT_OF_MEMORY):
        return Problem(flags=["vllm_gpu_memory_utilization", "vllm_max_num_seqs"], message=(
            "The GPU does not have enough memory for vLLM and the policy. Use offload_optimizer true and offload_model true, which free "
            f"the policy's memory first; or a vllm_gpu_memory_utilization below {cfg.vllm_gpu_memory_utilization}, or a vllm_max_num_seqs "
            f"below {cfg.vllm_max_num_seqs}. Error of vLLM: {error.splitlines()[0]}"))  # fmt: skip
    if "Error in memory profiling" in error:
        return Problem(flags=["vllm_gpu_memory_utilization"], message=(
            "Another process freed memory of this GPU while vLLM measured the free memory. Run nothing else on the GPU while a run "
            f"starts. Error of vLLM: {error.splitlines()[0]}"))  # fmt: skip
    if "KV cache" in error or "cache blocks" in error:
        flag = "vllm_gpu_memory_utilization" if on_gpu else "vllm_kv_cache_memory_mb"
        return Problem(flags=[flag, "vllm_max_model_len"], message=(
            f"{flag} ({getattr(cfg, flag)}) leaves a KV cache that cannot hold one sequence of {max_model_len} tokens. Raise it, or lower "
            f"max_completion_length or vllm_max_model_len. Error of vLLM: {error}"))  # fmt: skip
    if "derived max_model_len" in error:
        match = re.search(r"max_position_embeddings=(\d+)", error)
        positions = match[1] if match else "fewer"
        return Problem(flags=["vllm_max_model_len", "max_completion_length"], message=(
            f"Prompt plus completion may have {max_model_len} tokens, but the model supports {positions} positions. "
            "Lower max_completion_length, max_prompt_length or vllm_max_model_len."))  # fmt: skip
    if cfg.vllm_engine_kwargs:
        kwargs_text = ", ".join(f"{name}={value}" for name, value in cfg.vllm_engine_kwargs.items())
        return Problem(
            flags=["vllm_engine_kwargs"], message=f"vLLM does not start with vllm_engine_kwargs {kwargs_text}. Error of vLLM: {error}"
        )
    return None
