"""Where epochs end: whether that comes out, how long a run is in the system whose names were typed, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.compat import DIALECTS, length_there
from megatron_grpo.planning.check import Checked, in_typed_names

MOST_EPOCHS = 1000  # whose ends are listed


def as_long_as_there(checked: Checked, rows: int | None) -> tuple[Checked, list[str]]:
    """(the configuration with the `max_steps` that so many rows come to in the system of its dialect, what is said of it)."""
    cfg, run, dialect = checked.config, checked.config.run, checked.config.plan.dialect or ""
    drops_last, epochs, notes = cfg.data.dataset_drop_last, run.num_train_epochs or 1, []
    if cfg.grpo.dynamic_sample and drops_last and dialect in ("verl", "skyrl", "skyrl-doc"):
        notes.append("What differs: what dynamic_sample draws besides shortens an epoch there, and a run of epochs; here it draws on.")
    if rows is None and drops_last:
        notes.append("Note: where an epoch ends is not known without num_prompts or a dataset; the timetable is that of one long epoch.")
    steps = length_there(dialect, checked.sizes, rows or 0, max_steps=run.max_steps, epochs=epochs, drops_last=drops_last)
    if rows is None or steps in (None, run.max_steps):
        return checked, notes
    notes.append(f"Note: {epochs:g} epochs of {rows} prompts are {steps} optimizer steps in {DIALECTS[dialect].title}: max_steps {steps}.")
    source = {"max_steps": f"{DIALECTS[dialect].title}'s reading of {rows} prompts"}
    return replace(checked, config=cfg.with_values({"max_steps": steps, "num_train_epochs": None}, sources=source)), notes


def epoch_problems(checked: Checked, timetable: Timetable) -> list[Problem]:
    """What is wrong with a data set of this size: it fills no rollout, or the last step of an epoch does not suit interleaved stages."""
    cfg, sizes, rows = checked.config, timetable.sizes, timetable.num_prompts
    last, pp = last_micro_steps(timetable), sizes.layout.pp
    if rows and (not timetable.prompts_per_epoch or cfg.run.max_steps == 0):
        flags = ("dataset" if cfg.data.dataset else "num_prompts", "dataset_drop_last")
        message = f"Nothing would be trained: the data set has {rows} prompts, a rollout takes {sizes.num_rollout_prompts}, and what does \
not fill one is left out of an epoch. Use a smaller rollout, or more rows; or dataset_drop_last false with max_steps."
    elif sizes.layout.vpp and last % pp and timetable.whole_epoch and timetable.whole_epoch[1] <= (timetable.num_steps or 0):
        flags = ("dataset_drop_last", "virtual_pipeline_model_parallel_size")
        message = f"With dataset_drop_last the last optimizer step of an epoch has {last} micro-steps, and the interleaved schedule needs \
a multiple of pipeline_model_parallel_size ({pp}). Use dataset_drop_last false, or a rollout of whole optimizer steps."
    else:
        return []
    return [in_typed_names(cfg, Problem(flags=flags, message=message))]


def last_micro_steps(timetable: Timetable) -> int:
    """Micro-steps of the last optimizer step of an epoch."""
    a = timetable.sizes.gradient_accumulation_steps
    return (timetable.whole_epoch[0] - 1) % a + 1 if timetable.whole_epoch else a


def epochs_object(timetable: Timetable) -> dict[str, Any] | None:
    """Where epochs end, of a data set of known size. ends_after_steps: optimizer steps done then, of the first MOST_EPOCHS."""
    prompts, sizes = timetable.prompts_per_epoch, timetable.sizes
    if not prompts or timetable.num_steps is None:
        return None
    steps = timetable.whole_epoch[1] if timetable.whole_epoch else prompts * sizes.num_iterations / sizes.num_train_prompts
    ends = [end for n in range(MOST_EPOCHS) if (end := timetable.steps_of_epochs(n + 1)) <= timetable.num_steps]
    found = {"prompts": prompts, "dropped_prompts": (timetable.num_prompts or 0) - prompts, "optimizer_steps": steps}
    return {**found, "micro_steps_of_last_step": last_micro_steps(timetable), "ends_after_steps": ends}


def epoch_in_words(epochs: dict[str, Any], checked: Checked) -> str:
    """What an epoch trains, and the optimizer steps in which epochs end."""
    ends, short, left = epochs["ends_after_steps"], epochs["micro_steps_of_last_step"], epochs["dropped_prompts"]
    a, of_order = checked.sizes.gradient_accumulation_steps, "" if checked.config.data.dataset_shuffle else ", always the last ones"
    return (
        f"optimizer steps of {epochs['prompts']} prompts"
        + f", the last with {short} of {a} micro-steps" * (short < a)
        + f"; {left} prompts fill no rollout and are left out{of_order}" * (left > 0)
        + f"; epochs end in steps {', '.join(str(end - 1) for end in ends[:5])}{', ...' * (len(ends) > 5)}" * (len(ends) > 0)
        + ", sooner by what dynamic_sample draws besides" * (checked.config.grpo.dynamic_sample and len(ends) > 0)
    )
