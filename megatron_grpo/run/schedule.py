"""The part of a plan that every rank of a run needs: validated settings and the training schedule. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.policy.requirements import make_lr_schedule
from megatron_grpo.core.settings import OptimizerConfig
from megatron_grpo.run.check import CheckedConfig
from megatron_grpo.run.config.rules import in_typed_names
from megatron_grpo.run.sharing import read_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun:
    """A run whose settings are valid and whose length is settled.

    Args:
        checked: Validated configuration, with its batch sizes and model shapes.
        schedule: Training schedule, of the run's length where that is known.
        num_prompts: Prompts in the data set; None if unknown.
        notes: Sentences about the length of the run.
    """

    checked: CheckedConfig
    schedule: TrainingSchedule
    num_prompts: int | None
    notes: tuple[str, ...] = ()


def schedule_run(checked: CheckedConfig, num_prompts: int | None = None) -> ScheduledRun:
    """Return the schedule of a configuration that passed validation.

    Args:
        num_prompts: Prompts in the data set; None to use the setting `num_prompts`.

    Raises:
        ConfigError: If the file of lengths cannot be read, the data set's size does not suit the batch sizes, or the
            decay of the learning rate does not fit into the run.
    """
    if num_prompts is None:
        num_prompts = checked.config.plan.num_prompts
    checked, notes = with_dialect_length(checked, num_prompts)
    cfg = checked.config
    schedule = TrainingSchedule.from_length(
        checked.sizes, max_steps=cfg.run.max_steps, num_train_epochs=cfg.run.num_train_epochs, num_prompts=num_prompts,
        drops_last=cfg.data.dataset_drop_last,
    )  # fmt: skip
    if problems := epoch_problems(checked, schedule) or length_problems(cfg.optimizer, schedule.num_steps):
        raise ConfigError(problems)
    if cfg.plan.lengths:  # rank 0 alone plans with them; a file that cannot be read ends every rank here
        read_lengths(cfg.plan.lengths)
    return ScheduledRun(checked=checked, schedule=schedule, num_prompts=num_prompts, notes=tuple(notes))


def with_dialect_length(checked: CheckedConfig, rows: int | None) -> tuple[CheckedConfig, list[str]]:
    """Set `max_steps` to the length that the system of the run's dialect derives from the number of rows.

    Args:
        rows: Rows of the data set; None if unknown.

    Returns:
        (the configuration, notes for the user). The configuration is unchanged if there is no dialect or the length stays the same.
    """
    cfg, run, system = checked.config, checked.config.run, checked.parsed.system
    steps, notes = system.length(cfg, checked.sizes, rows) if system else (None, [])
    if rows is None and cfg.data.dataset_drop_last:
        notes.append("Note: the length of an epoch is unknown without num_prompts or a dataset; the schedule is that of one long epoch.")
    if system is None or steps in (None, run.max_steps):
        return checked, notes
    epochs = run.num_train_epochs or 1
    notes.append(f"Note: {epochs:g} epochs of {rows} prompts are {steps} optimizer steps in {system.title}: max_steps {steps}.")
    source = {"max_steps": f"{system.title}'s rule for {rows} prompts"}
    return replace(checked, config=cfg.with_values({"max_steps": steps, "num_train_epochs": None}, sources=source)), notes


def epoch_problems(checked: CheckedConfig, schedule: TrainingSchedule) -> list[Problem]:
    """Return problems of the data set's size.

    There are two: the data set does not fill one rollout, or the number of micro-steps in the last optimizer step of an epoch does not suit
    interleaved pipeline stages.
    """
    cfg, sizes, rows = checked.config, schedule.sizes, schedule.num_prompts
    last, pp = last_micro_steps(schedule), sizes.layout.pp
    if rows and (not schedule.prompts_per_epoch or cfg.run.max_steps == 0):
        flags = ("dataset" if cfg.data.dataset else "num_prompts", "dataset_drop_last")
        message = (
            f"Nothing would be trained: the data set has {rows} prompts, a rollout takes {sizes.num_rollout_prompts}, and an epoch drops "
            "prompts that do not fill a rollout. Use a smaller rollout, more rows, or dataset_drop_last false with max_steps."
        )
    elif sizes.layout.vpp and last % pp and schedule.whole_epoch and schedule.whole_epoch[1] <= (schedule.num_steps or 0):
        flags = ("dataset_drop_last", "virtual_pipeline_model_parallel_size")
        message = (
            f"With dataset_drop_last the last optimizer step of an epoch has {last} micro-steps, but the interleaved pipeline "
            f"schedule requires a multiple of pipeline_model_parallel_size ({pp}). Use dataset_drop_last false, or a rollout of whole "
            "optimizer steps."
        )
    else:
        return []
    return [in_typed_names(cfg, Problem(flags=flags, message=message))]


def last_micro_steps(schedule: TrainingSchedule) -> int:
    """Return the number of micro-steps in the last optimizer step of an epoch."""
    a = schedule.sizes.gradient_accumulation_steps
    return (schedule.whole_epoch[0] - 1) % a + 1 if schedule.whole_epoch else a


def length_problems(cfg: OptimizerConfig, num_steps: int | None) -> list[Problem]:
    """Return problems with a schedule that does not fit into the run.

    Args:
        num_steps: Optimizer steps of the run; None if unknown.
    """
    if num_steps is None or cfg.lr_decay_style != "WSD" or cfg.lr_wsd_decay_iters is None:
        return []
    course = make_lr_schedule(cfg, num_steps)
    max_decay_steps = course.decay - course.warmup
    if cfg.lr_wsd_decay_iters <= max_decay_steps:
        return []
    message = (
        f"lr_wsd_decay_iters ({cfg.lr_wsd_decay_iters}) exceeds the steps that remain after the warm-up: {course.decay} - {course.warmup} "
        f"= {max_decay_steps} optimizer steps. Use {max_decay_steps} or less."
    )
    return [Problem(flags=("lr_wsd_decay_iters",), message=message, nearest={"lr_wsd_decay_iters": [max_decay_steps]})]
