"""Consequences of a plan: sizes, training schedule and epochs as JSON, old log-prob passes, the pipeline bubble, and native flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.schedule import MicroStep, TrainingSchedule
from megatron_grpo.run.check import CheckedConfig
from megatron_grpo.run.config import table
from megatron_grpo.run.config.read import split_words
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.schedule import last_micro_steps

MOST_EPOCHS = 1000  # epochs whose ends are listed


def sizes_object(sizes: BatchSizes) -> dict[str, dict[str, Any]]:
    """Return the `parallel` and `batch` objects of `plan --json`."""
    parallel = ("world_size", "tp", "pp", "vpp", "cp", "ep", "etp", "dp_size", "expert_dp_size")
    batch = (
        "micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "steps_per_generation", "generation_batch_size",
        "num_generations", "num_iterations", "num_rollout_prompts", "num_train_prompts", "num_prompts_per_dp_group",
    )  # fmt: skip
    return {"parallel": {name: getattr(sizes.layout, name) for name in parallel}, "batch": {name: getattr(sizes, name) for name in batch}}


def plan_object(schedule: TrainingSchedule, num_rollouts: int) -> dict[str, Any]:
    """Return the first part of `plan --json`: sizes, old log-probs, epochs, and the training schedule."""
    content: dict[str, Any] = {**sizes_object(schedule.sizes), "old_logprobs": old_logprobs_summary(schedule, num_rollouts)}
    if epochs := epochs_object(schedule):
        content["epochs"] = epochs
    return content | {"timetable": list(schedule_rows(schedule, num_rollouts))}


def schedule_rows(schedule: TrainingSchedule, num_rollouts: int) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each micro-step of the first `num_rollouts` rollouts, in micro-step order."""
    sizes = schedule.sizes
    slices, size, group = sizes.micro_steps_per_rollout, sizes.micro_batch_size, sizes.num_generations
    rows: dict[int, list[list[int]]] = {}  # by slice; equal in all rollouts and passes

    def newest(row: MicroStep) -> dict[str, int]:
        return {"newest_version": row.on_policy_version} if sizes.partial_rollouts else {}

    for rollout in range(num_rollouts):
        first = rollout * sizes.num_rollout_prompts
        prompts: dict[int, list[tuple[int, ...]]] = {}  # by slice; equal in all passes over this rollout
        for s in range(rollout * slices * sizes.num_iterations, (rollout + 1) * slices * sizes.num_iterations):
            row = schedule.micro_step(s)
            j, begins = row.slice_index, range(row.rows[0], row.rows[1], size)
            if j not in rows:
                rows[j] = [[x, x + size] for x in begins]
            if j not in prompts:
                prompts[j] = [tuple(range(first + x // group, first + (x + size - 1) // group + 1)) for x in begins]
            yield {
                "micro_step": s, "optimizer_step": row.optimizer_step, "rollout": rollout, "pass": row.pass_index, "slice": j,
                "sampled_by_version": row.sampled_by_version, **newest(row), "trained_at_version": row.optimizer_step,
                "staleness": row.staleness,
                "old_logprobs": row.old_logprobs, "rows": rows[j], "prompts": prompts[j],
            }  # fmt: skip


def old_logprobs_summary(schedule: TrainingSchedule, num_rollouts: int) -> dict[str, Any]:
    """Summarize which rollouts are off-policy and how many slices need a forward-only pass for old log-probs.

    A slice is the rows of a rollout that one micro-step trains.

    Args:
        num_rollouts: Rollouts to count, from the first.

    Returns:
        `rollouts[r]` is True if a version other than the one that sampled rollout r trains some slice of it; `slices_recomputed` is the
        number of slices with a forward-only pass, and `slices_total` the number of all slices.
    """
    sizes = schedule.sizes
    slices, passes = sizes.micro_steps_per_rollout, sizes.num_iterations
    is_stale = [schedule.find_step((r + 1) * slices * passes - 1) > schedule.oldest_version(r) for r in range(num_rollouts)]
    recomputed = 0
    if sizes.old_logprobs != "rollout":
        decides = passes - 1 if sizes.old_logprobs == "always" else 0  # the pass that needs them (`TrainingSchedule.needs_old_logprobs`)
        for r in range(num_rollouts):
            # Slices are trained in order; those of the next optimizer step and later need a forward-only pass.
            fresh = schedule.find_first_micro_step(schedule.find_version(r) + 1) - (r * passes + decides) * slices
            recomputed += slices - min(max(fresh, 0), slices)
    return {"rollouts": is_stale, "slices_recomputed": recomputed, "slices_total": num_rollouts * slices}


def _period(sizes: BatchSizes) -> int:
    """Return after how many rollouts their position in optimizer steps repeats. For very uneven sizes a part of the period is enough."""
    length = sizes.micro_steps_per_rollout * sizes.num_iterations
    return min(sizes.gradient_accumulation_steps // gcd(sizes.gradient_accumulation_steps, length), 1000)


def rollouts_in_periods(schedule: TrainingSchedule) -> int:
    """Return the rollouts to count for `old_logprobs_summary`: the whole periods of the first four or more, as far as the run goes."""
    sizes, period = schedule.sizes, _period(schedule.sizes)
    count = -(-4 // period) * period
    if schedule.num_steps is None:
        return count
    return min(count, -(-schedule.find_first_micro_step(schedule.num_steps) // (sizes.micro_steps_per_rollout * sizes.num_iterations)))


def staleness(sizes: BatchSizes) -> tuple[float, int]:
    """Return (mean, maximum) staleness of the trained rows in optimizer steps, for the steady state of a long run."""
    schedule, length = TrainingSchedule(sizes), sizes.micro_steps_per_rollout * sizes.num_iterations
    period = _period(sizes)
    first = max(2, sizes.async_rollout_depth + 1)  # the first rollouts of a run are less stale
    ages = [schedule.micro_step(s).staleness for s in range(first * period * length, (first + 1) * period * length)]
    return sum(ages) / len(ages), max(ages)


def most_waiting_rows(sizes: BatchSizes) -> int:
    """Return the maximum number of rows that still wait for training after an optimizer step. A checkpoint stores these rows."""
    a, slices, passes = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
    starts = {(k + 1) * a % (slices * passes) for k in range(min(slices * passes, 1000))} - {0}  # micro-steps done of a partial rollout
    waiting = max((slices - max(0, num_done - (passes - 1) * slices) for num_done in starts), default=0)
    if sizes.async_rollout_depth and not sizes.partial_rollouts:  # a checkpoint waits for the rollout that is being sampled, and stores it
        waiting += slices * max(len(TrainingSchedule(sizes).new_rollouts(k)) for k in range(min(slices * passes, 1000)))
    return waiting * sizes.completions_per_micro_step


def wanted_micro_batches(sizes: BatchSizes) -> int:
    """Return the micro-batches per rank that limit pipeline idle time to a fifth of a step: 4 (pp - 1) / vpp.

    The number is a multiple of pp for interleaved stages.
    """
    multiple = sizes.layout.pp if sizes.layout.vpp else 1
    return max(1, -(-4 * (sizes.layout.pp - 1) // (sizes.layout.num_chunks * multiple))) * multiple


def bubble_fraction(sizes: BatchSizes, micro_batches: int | None = None) -> float:
    """Return the fraction of an optimizer step that a pipeline stage is idle: (pp - 1) / (vpp * m + pp - 1).

    Args:
        micro_batches: m, the micro-batches of each rank. None for `gradient_accumulation_steps`, its value without a token budget.
    """
    m, waits = micro_batches or sizes.gradient_accumulation_steps, sizes.layout.pp - 1
    return waits / (sizes.layout.num_chunks * m + waits)


def native_flags(cfg: Config, sizes: BatchSizes) -> str:
    """Return an equivalent command line that uses no dialect and does not rely on defaults that may change."""
    layout = sizes.layout
    grid = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    flags: dict[str, Any] = {"world_size": layout.world_size}
    flags |= {name: value for name, value in grid.items() if value not in (None, 1)}
    for name in ("micro_batch_size", "global_batch_size", "generation_batch_size", "num_generations", "num_iterations"):
        flags[name] = getattr(sizes, name)
    flags |= {"allow_unaligned_generation": "true"} if cfg.batch.allow_unaligned_generation else {}
    flags |= {name: value for name in ("old_logprobs", "share_prefix") if (value := getattr(cfg.batch, name)) != "auto"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    for setting in table().values():
        source = cfg.sources.get(setting.name, "default")
        if (
            (setting.group in ("batch", "plan") and setting.name not in ("max_tokens_per_micro_batch", "pad_to_multiple_of"))
            or setting.name in ("world_size", "further_datasets", *grid)
            or source.startswith(("default", "derived", "implied"))
        ):
            continue
        value = getattr(getattr(cfg, setting.group), setting.name)
        if value in ([], {}) and value == setting.default:
            continue
        values = split_words(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        values = [*values, *(cfg.data.further_datasets if setting.name == "dataset" else ())]
        words += [f"--{setting.name}", *(str(v).lower() if isinstance(v, bool) or v is None else shlex.quote(str(v)) for v in values)]
    return " ".join(words)


# ---- epochs -----------------------------------------------------------------------------------------------------------------------------


def epochs_object(schedule: TrainingSchedule) -> dict[str, Any] | None:
    """Return the `epochs` object of `plan --json`; None if the size of the data set or the length of the run is unknown.

    `ends_after_steps` lists the optimizer steps completed at the end of each of the first MOST_EPOCHS epochs.
    """
    prompts, sizes = schedule.prompts_per_epoch, schedule.sizes
    if not prompts or schedule.num_steps is None:
        return None
    steps = schedule.whole_epoch[1] if schedule.whole_epoch else prompts * sizes.num_iterations / sizes.num_train_prompts
    ends = [end for n in range(MOST_EPOCHS) if (end := schedule.steps_of_epochs(n + 1)) <= schedule.num_steps]
    counts = {"prompts": prompts, "dropped_prompts": (schedule.num_prompts or 0) - prompts, "optimizer_steps": steps}
    return {**counts, "micro_steps_of_last_step": last_micro_steps(schedule), "ends_after_steps": ends}


def describe_epoch(epochs: dict[str, Any], checked: CheckedConfig) -> str:
    """Describe an epoch in one line: its prompts and optimizer steps, the prompts it drops, and the steps in which epochs end.

    Args:
        epochs: Object that `epochs_object` returned.
    """
    ends, short, num_dropped = epochs["ends_after_steps"], epochs["micro_steps_of_last_step"], epochs["dropped_prompts"]
    a, order_note = checked.sizes.gradient_accumulation_steps, "" if checked.config.data.dataset_shuffle else ", always the last ones"
    return (
        f"optimizer steps of {epochs['prompts']} prompts"
        + f", the last with {short} of {a} micro-steps" * (short < a)
        + f"; {num_dropped} prompts do not fill a rollout and are dropped{order_note}" * (num_dropped > 0)
        + f"; epochs end in steps {', '.join(str(end - 1) for end in ends[:5])}{', ...' * (len(ends) > 5)}" * (len(ends) > 0)
        + ", or earlier because of dynamic_sample" * (checked.config.grpo.dynamic_sample and len(ends) > 0)
    )


# ---- problems ---------------------------------------------------------------------------------------------------------------------------


def errors_object(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the JSON object that `plan --json` prints for an invalid configuration."""
    return {
        "errors": [
            {"flags": list(problem.flags), "message": problem.message, "nearest": {k: list(v) for k, v in problem.nearest.items()}}
            for problem in problems
        ]
    }
