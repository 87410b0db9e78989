"""Completions on their way between ranks: arrays of all tokens instead of a million Python objects, and a digest to compare ranks by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_grpo.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCompletions:
    """The completions of some prompts, prompt by prompt. `token_ids` and `logprobs` are all of them end to end."""

    num_completions: np.ndarray  # int32, one entry a prompt
    lengths: np.ndarray  # int32, one entry a completion
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32: what the engine computes in, so nothing is lost
    texts: list[str]
    is_stopped: np.ndarray  # bool: finish_reason "stop", else "length"

    def digest(self) -> str:
        """Equal on two ranks exactly when they drew the same tokens. Log-probs may differ in their last bit."""
        return hashlib.blake2b(self.lengths.tobytes() + self.token_ids.tobytes(), digest_size=16).hexdigest()


def to_arrays(groups: Sequence[Sequence[Completion]]) -> PackedCompletions:
    flat = [completion for group in groups for completion in group]
    return PackedCompletions(
        num_completions=np.array([len(group) for group in groups], np.int32),
        lengths=np.array([len(c.token_ids) for c in flat], np.int32),
        token_ids=np.array([token for c in flat for token in c.token_ids], np.int32),
        logprobs=np.array([logprob for c in flat for logprob in c.logprobs], np.float32),
        texts=[c.text for c in flat],
        is_stopped=np.array([c.finish_reason == "stop" for c in flat], bool),
    )


def to_completions(packed: PackedCompletions) -> list[tuple[Completion, ...]]:
    ends = np.cumsum(packed.lengths)
    completions = iter([
        Completion(
            token_ids=tuple(packed.token_ids[end - length : end].tolist()),
            logprobs=tuple(packed.logprobs[end - length : end].tolist()),
            text=text,
            finish_reason="stop" if is_stopped else "length",
        )
        for end, length, text, is_stopped in zip(ends, packed.lengths, packed.texts, packed.is_stopped, strict=True)
    ])  # fmt: skip
    return [tuple(next(completions) for _ in range(num)) for num in packed.num_completions]


def gather_over_all_ranks(item: Any) -> list[Any]:
    """The item of every rank, by rank, on every rank. Collective over the default process group, where there is one."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items
