"""What a training step samples from: structured outputs and the largest top_k. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_grpo.core.settings import RolloutConfig

FIELD, REGEX = "structured_outputs", "vllm_structured_outputs_regex"  # a field of vLLM's SamplingParams; a setting of this package
# The largest top_k: its token ids take a kilobyte per token wherever a row is stored or sent. Other restrictions alone imply it.
MOST = 256
# vLLM's model runner V1 keeps every token that is as likely as the last of the top_k; V2 keeps exactly top_k. This many of them are
# returned besides; of more (logits rounded to bfloat16 may be equal) the first ones are, and the sampled token counts as sampled among
# them: `logprobs_and_mask`.
TIES = 8


def training_structured_outputs(rollout: RolloutConfig) -> Mapping[str, Any] | None:
    """Return the structured outputs of training in the form of vLLM's `structured_outputs`; None if completions are not restricted."""
    regex = rollout.vllm_structured_outputs_regex
    return rollout.generation_kwargs.get(FIELD) if regex is None else {"regex": regex}


def find_mask_flag(rollout: RolloutConfig) -> str:
    """Return the setting that defines the structured outputs of training."""
    return REGEX if rollout.vllm_structured_outputs_regex is not None else "generation_kwargs"


def list_sampling_fields(rollout: RolloutConfig) -> Mapping[str, Any]:
    """Return the extra fields of vLLM's SamplingParams in training, besides those that have a setting."""
    regex = rollout.vllm_structured_outputs_regex
    return rollout.generation_kwargs if regex is None else {**rollout.generation_kwargs, FIELD: {"regex": regex}}


def samples_from_part(rollout: RolloutConfig) -> bool:
    """Return whether training samples from less than the whole vocabulary."""
    return rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0 or training_structured_outputs(rollout) is not None


def max_mask_tokens(rollout: RolloutConfig) -> int:
    """Return the top_k that training samples with; 0 means the whole vocabulary."""
    return rollout.top_k or (MOST if samples_from_part(rollout) else 0)
