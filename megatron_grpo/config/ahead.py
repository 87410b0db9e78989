"""What sampling one rollout ahead of training asks of the other settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config
from megatron_grpo.config.tuner import Pair


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    depth, mode = cfg.rollout.async_rollout_depth, cfg.rollout.vllm_mode
    if depth > 1:
        yield (
            ("async_rollout_depth",),
            f"async_rollout_depth ({depth}) must be 0 or 1: further ahead, weights would be pushed while prompts are being answered, and a "
            "completion would be drawn by two versions of them. Use 1.",
            {"async_rollout_depth": [1]},
        )
        return
    if depth and mode != "server":
        yield (
            ("async_rollout_depth", "vllm_mode"),
            f"async_rollout_depth {depth} needs vllm_mode server: a colocated engine samples only while training waits. "
            "Use async_rollout_depth 0, or start servers and name them.",
            {"async_rollout_depth": [0]},
        )
    if depth and cfg.batch.old_logprobs != "rollout" and cfg.grpo.rollout_importance_sampling_mode == "none":
        yield (
            ("async_rollout_depth", "rollout_importance_sampling_mode", "old_logprobs"),
            f"async_rollout_depth {depth} trains on what older weights sampled, old log-probs are those of the weights that are there when "
            "a rollout comes in, and with rollout_importance_sampling_mode none nothing corrects for the difference. Use "
            "rollout_importance_sampling_mode token_truncate, or old_logprobs rollout (the ratio is then against the sampler itself).",
            {"rollout_importance_sampling_mode": ["token_truncate"], "old_logprobs": ["rollout"]},
        )
