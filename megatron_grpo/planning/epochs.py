"""Where epochs end: whether that comes out, how long a run is in the system whose names were typed, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Any

from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.errors import Problem
from megatron_grpo.planning.check import Checked, in_typed_names
from megatron_grpo.sizing.dialects import DIALECTS, length_there

MOST_EPOCHS = 1000  # whose ends are listed


def as_long_as_there(checked: Checked, rows: int | None) -> tuple[Checked, list[str]]:
    """(the configuration with the `max_steps` that so many rows come to in the system of its dialect, what is said of it)."""
    cfg, run, dialect = checked.config, checked.config.run, checked.config.plan.dialect or ""
    drops_last, epochs = cfg.data.dataset_drop_last, run.num_train_epochs or 1
    found = length_there(dialect, checked.sizes, rows or 0, max_steps=run.max_steps, epochs=epochs, drops_last=drops_last)
    notes = []
    if cfg.grpo.dynamic_sample and drops_last and dialect in ("verl", "skyrl", "skyrl-doc"):
        notes.append("What differs: what dynamic_sample draws besides shortens an epoch there, and a run of epochs; here it draws on.")
    if rows is None or found is None:
        return checked, notes
    steps, why = found
    source = f"{DIALECTS[dialect].title}'s reading of {rows} prompts"
    cfg = cfg.with_values({"max_steps": steps, "num_train_epochs": None}, sources={"max_steps": source})
    return replace(checked, config=cfg), [*notes, f"Note: {why}: max_steps {steps}."]


def epoch_problems(checked: Checked, timetable: Timetable) -> list[Problem]:
    """What is wrong with a data set of this size: it fills no rollout, or the last step of an epoch does not suit interleaved stages."""
    cfg, sizes, rows = checked.config, timetable.sizes, timetable.num_prompts
    epochs, pp = epochs_object(timetable), sizes.layout.pp
    if rows and (not timetable.prompts_per_epoch or cfg.run.max_steps == 0):
        message = f"Nothing would be trained: the data set has {rows} prompts, a rollout takes {sizes.num_rollout_prompts}, and what does \
not fill one is left out of an epoch. Use a smaller rollout, or more rows; or dataset_drop_last false with max_steps."
        flags = ("dataset" if cfg.data.dataset else "num_prompts", "dataset_drop_last")
    elif sizes.layout.vpp and epochs and epochs["ends_after_steps"] and (last := epochs["micro_steps_of_last_step"]) % pp:
        message = (
            f"With dataset_drop_last the last optimizer step of an epoch has {last} micro-steps, and the interleaved schedule needs a \
multiple of pipeline_model_parallel_size ({pp}). Use dataset_drop_last false, or a rollout of whole optimizer steps."
        )
        flags = ("dataset_drop_last", "virtual_pipeline_model_parallel_size")
    else:
        return []
    return [in_typed_names(cfg, Problem(flags=flags, message=message))]


def epochs_object(timetable: Timetable) -> dict[str, Any] | None:
    """Where epochs end, of a data set of known size. ends_after_steps: optimizer steps done then, of the first MOST_EPOCHS."""
    prompts, last, sizes = timetable.prompts_per_epoch, timetable.num_steps or 0, timetable.sizes
    ends = takewhile(lambda end: end <= last, (timetable.steps_of_epochs(n) for n in range(1, MOST_EPOCHS + 1)))
    micro_steps, steps = timetable.whole_epoch or (0, prompts * sizes.num_iterations / sizes.num_train_prompts)
    short, left = (micro_steps - 1) % sizes.gradient_accumulation_steps + 1, (timetable.num_prompts or 0) - prompts
    found = {"prompts": prompts, "dropped_prompts": left, "optimizer_steps": steps, "micro_steps_of_last_step": short}
    return {**found, "ends_after_steps": list(ends)} if prompts else None


def epoch_in_words(epochs: dict[str, Any], checked: Checked) -> str:
    """What an epoch trains, and the optimizer steps in which epochs end."""
    steps, short, left = [end - 1 for end in epochs["ends_after_steps"]], epochs["micro_steps_of_last_step"], epochs["dropped_prompts"]
    a, of_order = checked.sizes.gradient_accumulation_steps, "" if checked.config.data.dataset_shuffle else ", always the last ones"
    sooner = ", sooner by what dynamic_sample draws besides" if checked.config.grpo.dynamic_sample else ""
    return (
        f"optimizer steps of {epochs['prompts']} prompts"
        + f", the last with {short} of {a} micro-steps" * (short < a)
        + f"; {left} prompts fill no rollout and are left out{of_order}" * (left > 0)
        + f"; epochs end in steps {', '.join(map(str, steps[:5]))}{', ...' * (len(steps) > 5)}{sooner}" * (len(steps) > 0)
    )
