"""What a plan means for a run, in a few numbers: old log-probs, the pipeline's bubble, its length, the flags that say it natively."""

from __future__ import annotations

import shlex
from typing import Any

from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.settings import table
from megatron_grpo.settings.config import Config
from megatron_grpo.settings.foreign import words_of
from megatron_grpo.sizing.batch_sizes import BatchSizes


def old_logprobs_summary(sizes: BatchSizes, num_rollouts: int) -> dict[str, Any]:
    """rollouts[r]: some slice of it is trained by another version than sampled it. slices_recomputed: forward-only passes, in slices."""
    timetable = Timetable(sizes)
    slices, passes, a = sizes.micro_steps_per_rollout, sizes.num_iterations, sizes.gradient_accumulation_steps
    is_stale = [((r + 1) * slices * passes - 1) // a > timetable.version_of(r) for r in range(num_rollouts)]
    recomputed = 0
    if sizes.old_logprobs == "auto":
        for r in range(num_rollouts):
            # Slices are first used in order; those from the next optimizer step on are stale.
            fresh = (timetable.version_of(r) + 1) * a - r * slices * passes
            recomputed += max(0, slices - fresh)
    return {"rollouts": is_stale, "slices_recomputed": recomputed, "slices_total": num_rollouts * slices}


def bubble_fraction(sizes: BatchSizes, micro_batches: int | None = None) -> float:
    """Share of an optimizer step that a pipeline stage waits: (pp - 1) / (vpp * m + pp - 1).

    micro_batches: m, of each rank. None for gradient_accumulation_steps, which it is without a token budget.
    """
    m, waits = micro_batches or sizes.gradient_accumulation_steps, sizes.layout.pp - 1
    return waits / (sizes.layout.num_chunks * m + waits)


def native_flags(cfg: Config, sizes: BatchSizes) -> str:
    """The command line that says the same without a dialect and without defaults that may change."""
    words = ["--world_size", str(sizes.layout.world_size)]
    layout = sizes.layout
    grid = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    for name, value in grid.items():
        if value not in (None, 1):
            words += [f"--{name}", str(value)]
    for name in ("micro_batch_size", "global_batch_size", "generation_batch_size", "num_generations", "num_iterations"):
        words += [f"--{name}", str(getattr(sizes, name))]
    if cfg.batch.allow_unaligned_generation:
        words += ["--allow_unaligned_generation", "true"]
    for name in ("old_logprobs", "share_prompts"):
        if getattr(cfg.batch, name) != "auto":
            words += [f"--{name}", getattr(cfg.batch, name)]
    for setting in table().values():
        source = cfg.sources.get(setting.name, "default")
        if (
            setting.group in ("batch", "plan")
            or setting.name in ("world_size", *grid)
            or source.startswith(("default", "derived", "implied"))
        ):
            continue
        value = getattr(getattr(cfg, setting.group), setting.name)
        values = words_of(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        words += [f"--{setting.name}", *(str(v).lower() if isinstance(v, bool) or v is None else shlex.quote(str(v)) for v in values)]
    return " ".join(words)
