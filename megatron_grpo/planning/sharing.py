"""Whether a run computes each prompt once (`--share_prompts`), why, and what that saves. Decided once, before training. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.planning.lengths import extents_of, read_lengths
from megatron_grpo.policy.validation import attention_channels, flash_obstacle, sharing_obstacle
from megatron_grpo.weights.shape import ModelShape

LEAST_SAVING = 1 / 16  # of a group's tokens; on CPU, sharing that saved less was slower than computing them again

_PLAIN = "attention with parents is plain matrix products, and every score of a part exists at one time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The decision. least_saving: as in `BatchCut`, None if nothing is shared. why: a phrase."""

    least_saving: float | None
    why: str

    def __str__(self) -> str:
        return f"{'off' if self.least_saving is None else 'on'}: {self.why}"


def decide(
    cfg: Config,
    shape: ModelShape | None,
    *,
    has_gpu: bool | None = None,
    gpu_lacks: str | None = None,
) -> Sharing:
    """has_gpu: of the machine that trains, None where that is not known. Who gives `gpu_memory_gb` plans for GPUs.
    gpu_lacks: why this GPU has no kernel for attention with parents (`policy.attention.gpu_kernel`).

    Raises ConfigError where the file of lengths cannot be read. `true` with an obstacle is refused before (`policy.validation`).
    """
    lacks = gpu_lacks
    if has_gpu is None:
        lacks = flash_obstacle(cfg.model.torch_dtype, attention_channels(shape) if shape else 8)
    if cfg.batch.share_prompts == "false":
        return Sharing(least_saving=None, why="share_prompts false")
    if cfg.batch.share_prompts == "true":
        kernel = _kernel(has_gpu, f"{_PLAIN}: {lacks}" if lacks else None)
        return Sharing(least_saving=0.0, why="share_prompts true, wherever a token is saved" + kernel)
    reason = sharing_obstacle(cfg, shape) or _nothing_to_gain(cfg)
    if reason is None and lacks and (has_gpu or cfg.plan.gpu_memory_gb):
        reason = f"{lacks}; share_prompts true takes plain matrix products"
    if reason is not None:
        return Sharing(least_saving=None, why=reason)
    why = "each group in which 1/16 of the tokens or more need not be computed again"
    return Sharing(least_saving=LEAST_SAVING, why=why + _kernel(has_gpu, f"it would be off: {lacks}" if lacks else None))


def _kernel(has_gpu: bool | None, otherwise: str | None) -> str:
    """What attention does on a GPU. otherwise: than torch's flash attention."""
    if has_gpu is False:
        return ""
    condition = "" if otherwise or has_gpu else ", of compute capability 8.0 or more,"
    return f". On {'this' if has_gpu else 'a'} GPU{condition} {otherwise or 'attention with parents is flash attention'}"


def _nothing_to_gain(cfg: Config) -> str | None:
    batch = cfg.batch
    if batch.num_generations == 1:
        return "num_generations 1 has one completion a prompt"
    if batch.micro_batch_size == 1 and batch.max_tokens_per_micro_batch is None:
        return "micro_batch_size 1 puts no two completions together; max_tokens_per_micro_batch would"
    if cfg.plan.lengths:
        pairs = read_lengths(cfg.plan.lengths).pairs
        apart, least = _tokens(extents_of(pairs, batch.num_generations))
        if least > (1 - LEAST_SAVING) * apart:
            return f"of the lengths in {cfg.plan.lengths}, {1 - least / apart:.1%} of the tokens could be saved, less than 1/16"
    return None


def _tokens(extents: Sequence[Any]) -> tuple[int, int]:
    """Computed tokens if every row is computed by itself, and if every prefix is computed once."""
    apart = sum(tokens - 1 for extent in extents for tokens in extent.contexts)
    copies = sum(extent.prefix for extent in extents)
    once = sum({extent.group: extent.prefix for extent in extents}.values())
    return max(apart, 1), apart - copies + once
