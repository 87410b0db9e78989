"""What the settings of the learning rate and of weight decay come to over a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config, OptimizerConfig
from megatron_grpo.config.tuner import Pair

_OF_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_style")


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


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem that needs no length of the run."""
    opt = cfg.optimizer
    if opt.min_lr > opt.lr:
        yield ("min_lr", "lr"), f"min_lr ({opt.min_lr}) must not be above lr ({opt.lr}).", {"min_lr": [opt.lr], "lr": [opt.min_lr]}
    if opt.lr_warmup_init > opt.lr:
        message = f"lr_warmup_init ({opt.lr_warmup_init}) must not be above lr ({opt.lr}): the warm-up rises to it."
        yield ("lr_warmup_init", "lr"), message, {"lr_warmup_init": [opt.lr]}
    if opt.lr_warmup_iters and opt.lr_warmup_fraction is not None:
        yield (
            ("lr_warmup_iters", "lr_warmup_fraction"),
            f"lr_warmup_iters ({opt.lr_warmup_iters}) and lr_warmup_fraction ({opt.lr_warmup_fraction}) both say how long the warm-up is. "
            "Keep one of them.",
            {"lr_warmup_iters": [0], "lr_warmup_fraction": ["none"]},
        )
    if opt.lr_decay_style == "WSD" and opt.lr_wsd_decay_iters is None:
        message = "lr_decay_style WSD needs lr_wsd_decay_iters: the optimizer steps of its last part, in which the learning rate falls."
        yield ("lr_decay_style", "lr_wsd_decay_iters"), message, {}
    elif opt.lr_decay_style != "WSD":
        for name in _OF_WSD:
            if getattr(opt, name) != getattr(OptimizerConfig(), name):
                message = f"{name} ({getattr(opt, name)}) belongs to lr_decay_style WSD, which is {opt.lr_decay_style}."
                yield (name, "lr_decay_style"), message, {"lr_decay_style": ["WSD"]}
    if opt.lr_decay_style == "constant" and opt.lr_decay_iters is not None:
        yield (
            ("lr_decay_iters", "lr_decay_style"),
            f"lr_decay_iters ({opt.lr_decay_iters}) does nothing with lr_decay_style constant. Leave it out.",
            {},
        )
    yield from _weight_decay(opt)


def _weight_decay(opt: OptimizerConfig) -> Iterator[Pair]:
    start, end, style = opt.start_weight_decay, opt.end_weight_decay, opt.weight_decay_incr_style
    if style == "constant" and (start is not None or end is not None):
        yield (
            ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
            "start_weight_decay and end_weight_decay belong to weight_decay_incr_style linear or cosine; constant is weight_decay.",
            {"weight_decay_incr_style": ["linear", "cosine"]},
        )
    elif style != "constant" and (start is None or end is None):
        yield (
            ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
            f"weight_decay_incr_style {style} needs start_weight_decay and end_weight_decay.",
            {"weight_decay_incr_style": ["constant"]},
        )
    elif style != "constant" and opt.weight_decay:
        message = f"weight_decay ({opt.weight_decay}) is not used beside start_weight_decay and end_weight_decay. Leave it out."
        yield ("weight_decay", "weight_decay_incr_style"), message, {"weight_decay": [0.0]}
    elif start is not None and end is not None and end < start:
        yield (
            ("end_weight_decay", "start_weight_decay"),
            f"end_weight_decay ({end}) must not be below start_weight_decay ({start}): Megatron-Core's weight decay rises.",
            {"end_weight_decay": [start]},
        )


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
