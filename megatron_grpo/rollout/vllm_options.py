"""The run's settings as arguments of a vLLM engine, and vLLM's refusals as sentences about the run's settings."""

from __future__ import annotations

import re
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import RolloutConfig

CPU_BLOCK_SIZE = 32  # tokens: the smallest that vLLM's CPU attention takes; its default of 128 would share no short prompt


def cpu_options(cfg: RolloutConfig) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        # A prompt that is cut in two makes vLLM rewind the generator of its seed, and torch's CPU generators cannot: it would crash.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": cfg.vllm_kv_cache_memory_mb << 20,
        "block_size": CPU_BLOCK_SIZE,
    }


def gpu_options(cfg: RolloutConfig) -> dict[str, Any]:
    return {
        "enforce_eager": cfg.vllm_enforce_eager,
        "gpu_memory_utilization": cfg.vllm_gpu_memory_utilization,
        "enable_sleep_mode": cfg.sleep_level > 0,
    }


# What torch and vLLM say where its weights, its warm-up or its CUDA graphs find no memory.
_NO_ROOM = ("CUDA out of memory", "CUDA error: out of memory", "CUDA Error: out of memory", "OutOfMemoryError")


def problem_of(cfg: RolloutConfig, max_model_len: int, on_gpu: bool, error: str) -> Problem | None:
    """What a refusal of vLLM means in the user's settings; None where it is not about them."""
    if "less than desired GPU memory utilization" in error:
        found = re.search(r"\(([\d.]+)/([\d.]+) GiB\)", error)
        free = f"{found[1]} of {found[2]} GiB are free" if found else "less than that is free"
        share = int(100 * float(found[1]) / float(found[2])) / 100 if found else None
        return Problem(
            flags=["vllm_gpu_memory_utilization"], nearest={} if share is None else {"vllm_gpu_memory_utilization": [share]},
            message=f"vllm_gpu_memory_utilization ({cfg.vllm_gpu_memory_utilization}): {free} on the GPU when vLLM starts, the policy "
            f"being there already. Use {'less' if share is None else f'at most {share}'}, or offload_optimizer true and offload_model "
            "true, which give the policy's memory away first.")  # fmt: skip
    if any(sign in error for sign in _NO_ROOM):
        return Problem(flags=["vllm_gpu_memory_utilization", "vllm_max_num_seqs"], message=(
            "the GPU has no room for vLLM beside the policy. Use offload_optimizer true and offload_model true, which give the "
            f"policy's memory away first; or a vllm_gpu_memory_utilization below {cfg.vllm_gpu_memory_utilization}, or a vllm_max_num_seqs "
            f"below {cfg.vllm_max_num_seqs}. vLLM says: {error.splitlines()[0]}"))  # fmt: skip
    if "Error in memory profiling" in error:
        return Problem(flags=["vllm_gpu_memory_utilization"], message=(
            "another process gave back memory of this GPU while vLLM measured how much there is: let nothing else run on it while a run "
            f"starts. vLLM says: {error.splitlines()[0]}"))  # fmt: skip
    if "KV cache" in error or "cache blocks" in error:
        flag = "vllm_gpu_memory_utilization" if on_gpu else "vllm_kv_cache_memory_mb"
        return Problem(flags=[flag, "vllm_max_model_len"], message=(
            f"{flag} ({getattr(cfg, flag)}) leaves a KV cache that cannot hold one sequence of {max_model_len} tokens. Raise it, or lower "
            f"max_completion_length or vllm_max_model_len. vLLM says: {error}"))  # fmt: skip
    if "derived max_model_len" in error:
        found = re.search(r"max_position_embeddings=(\d+)", error)
        positions = found[1] if found else "fewer"
        return Problem(flags=["vllm_max_model_len", "max_completion_length"], message=(
            f"prompt and completion may have {max_model_len} tokens together, but the model was made for {positions} positions. "
            "Lower max_completion_length, max_prompt_length or vllm_max_model_len."))  # fmt: skip
    if cfg.vllm_engine_kwargs:
        given = ", ".join(f"{name}={value}" for name, value in cfg.vllm_engine_kwargs.items())
        return Problem(flags=["vllm_engine_kwargs"], message=f"vLLM does not start with vllm_engine_kwargs {given}. It says: {error}")
    return None
