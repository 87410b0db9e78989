"""What the settings of the learning rate and of weight decay come to over a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """In optimizer steps. The decay ends after `decay` of them, and its last `anneal` are those of WSD."""

    warmup: int
    decay: int
    anneal: int | None
    start_wd: float
    end_wd: float


def course_of(cfg: OptimizerConfig, num_steps: int) -> Course:
    """num_steps: length of the run."""
    warmup = cfg.lr_warmup_iters if cfg.lr_warmup_fraction is None else round(cfg.lr_warmup_fraction * num_steps)
    start = cfg.weight_decay if cfg.start_weight_decay is None else cfg.start_weight_decay
    end = cfg.weight_decay if cfg.end_weight_decay is None else cfg.end_weight_decay
    # Megatron-Core wants a decay that is longer than the warm-up, also where the run ends before it.
    decay = max(cfg.lr_decay_iters or num_steps, warmup + 1)
    return Course(warmup=warmup, decay=decay, anneal=cfg.lr_wsd_decay_iters, start_wd=start, end_wd=end)


def length_problems(cfg: OptimizerConfig, num_steps: int | None) -> list[Problem]:
    """What does not fit into a run of so many optimizer steps."""
    if num_steps is None or cfg.lr_decay_style != "WSD" or cfg.lr_wsd_decay_iters is None:
        return []
    course = course_of(cfg, num_steps)
    room = course.decay - course.warmup
    if cfg.lr_wsd_decay_iters <= room:
        return []
    message = (
        f"lr_wsd_decay_iters ({cfg.lr_wsd_decay_iters}) is more than what the warm-up leaves: {course.decay} - {course.warmup} = {room} "
        f"optimizer steps. Use {room} or less."
    )
    return [Problem(flags=("lr_wsd_decay_iters",), message=message, nearest={"lr_wsd_decay_iters": [room]})]
