"""What a plan means for a run, in a few numbers: old log-probs, the pipeline's bubble, its length, the flags that say it natively."""

from __future__ import annotations

import shlex
from math import gcd
from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.config import table
from megatron_grpo.config.config import Config
from megatron_grpo.config.read import words_of


def old_logprobs_summary(timetable: Timetable, num_rollouts: int) -> dict[str, Any]:
    """rollouts[r]: some slice of it is trained by another version than sampled it. slices_recomputed: forward-only passes, in slices."""
    sizes = timetable.sizes
    slices, passes = sizes.micro_steps_per_rollout, sizes.num_iterations
    is_stale = [timetable.step_of((r + 1) * slices * passes - 1) > timetable.sampled_by(r) for r in range(num_rollouts)]
    recomputed = 0
    if sizes.old_logprobs != "rollout":
        decides = passes - 1 if sizes.old_logprobs == "always" else 0  # the pass whose uses need it (`Timetable.needs_anchor`)
        for r in range(num_rollouts):
            # Slices are used in order; those from the next optimizer step on need a pass.
            fresh = timetable.first_of(timetable.version_of(r) + 1) - (r * passes + decides) * slices
            recomputed += slices - min(max(fresh, 0), slices)
    return {"rollouts": is_stale, "slices_recomputed": recomputed, "slices_total": num_rollouts * slices}


def staleness(sizes: BatchSizes) -> tuple[float, int]:
    """(mean, largest) over the rows that a long run trains, in optimizer steps, once it has left its beginning behind."""
    timetable, length = Timetable(sizes), sizes.micro_steps_per_rollout * sizes.num_iterations
    # Rollouts lie alike in optimizer steps again after so many of them; of very odd sizes a part will do.
    period = min(sizes.gradient_accumulation_steps // gcd(sizes.gradient_accumulation_steps, length), 1000)
    ages = [timetable.micro_step(s).staleness for s in range(2 * period * length, 3 * period * length)]
    return sum(ages) / len(ages), max(ages)


def most_waiting_rows(sizes: BatchSizes) -> int:
    """Rows that still wait to be trained behind an optimizer step, at most: what a checkpoint then holds."""
    a, slices, passes = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
    begun = {(k + 1) * a % (slices * passes) for k in range(min(slices * passes, 1000))} - {0}  # micro-steps of a rollout that is under way
    waiting = max((slices - max(0, done - (passes - 1) * slices) for done in begun), default=0)
    if sizes.async_rollout_depth:  # a checkpoint waits for what is being sampled, and holds it
        waiting += slices * max(len(Timetable(sizes).new_rollouts(k)) for k in range(min(slices * passes, 1000)))
    return waiting * sizes.completions_per_micro_step


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
            (setting.group in ("batch", "plan") and setting.name not in ("max_tokens_per_micro_batch", "pad_to_multiple_of"))
            or setting.name in ("world_size", *grid)
            or source.startswith(("default", "derived", "implied"))
        ):
            continue
        value = getattr(getattr(cfg, setting.group), setting.name)
        if value in ([], {}) and value == setting.default:
            continue
        values = words_of(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        words += [f"--{setting.name}", *(str(v).lower() if isinstance(v, bool) or v is None else shlex.quote(str(v)) for v in values)]
    return " ".join(words)
