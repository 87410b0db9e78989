"""Configuration -> what a run writes and tells; and the job that it joins."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.base.activity import Timers
from megatron_grpo.checkpoint.best import Best
from megatron_grpo.checkpoint.fingerprints import facts_of
from megatron_grpo.checkpoint.saving import Checkpoints
from megatron_grpo.checkpoint.written import claim, start_afresh, still_there
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import is_greater_better, metric_of
from megatron_grpo.config.write import write_config
from megatron_grpo.metrics import Metrics
from megatron_grpo.metrics.metrics_logger import MetricsLogger
from megatron_grpo.metrics.rollout import Completions
from megatron_grpo.metrics.summary import DriftWatch
from megatron_grpo.parallel import collectives, state
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.planning.command import Plan
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.trainer.reward_manager import RewardManager


def start_parallel(cfg: Config, layout: Layout, *, typed: Config | None = None, content: Mapping[str, str] | None = None) -> ParallelState:
    """Joins the job, on the grid that the plan describes. Collective. Raises ConfigError on all ranks where settings, versions or files
    differ between them.

    typed: the settings without those that follow from others; `cfg` where none do. content: fingerprints of what they name.
    """
    facts, p = facts_of(typed or cfg, content or {}), cfg.parallel
    minutes = p.distributed_timeout_minutes
    return state.start(layout, sequence_parallel=p.sequence_parallel, seed=cfg.run.seed, timeout_minutes=minutes, facts=facts)


def open_output(made: Plan, inputs: ValidatedInputs, parallel: ParallelState) -> Checkpoints:
    """The checkpoints of a run, with the one to continue chosen; and output_dir as a run begins with it. Collective."""
    cfg, out = made.checked.config, Path(made.checked.config.run.output_dir)
    checkpoints = Checkpoints(inputs.resume, cfg.run, replicas=parallel.dp_cp_group)
    if metric := metric_of(cfg):
        checkpoints.best = Best(out / "checkpoints", metric, greater=is_greater_better(cfg))
    checkpoints.choose()  # before anything in output_dir is overwritten
    if parallel.is_main:
        if inputs.resume.wipes:
            start_afresh(out)
        claim(out)
        write_config(cfg, out / "config.yaml")
        made.save(out / "plan.json")
    collectives.wait_for_all()
    return checkpoints


def build_journal(
    made: Plan, judge: RewardManager, parallel: ParallelState, clock: Timers, *, heard: Callable[[int, Mapping[str, Any]], None] | None
) -> MetricsLogger:
    """What the run tells, and to whom. heard: who else is given its numbers."""
    cfg, out, run_cfg = made.checked.config, Path(made.checked.config.run.output_dir), made.checked.config.run
    metrics = Metrics(
        out,
        report_to=run_cfg.report_to,
        rank=parallel.rank,
        total_steps=made.timetable.num_steps,
        plot_steps=run_cfg.save_steps,
        config={name: value for section in cfg.groups().values() for name, value in vars(section).items()},
        heard=heard,
    )
    gap = gap_of(cfg)
    return MetricsLogger(
        metrics,
        Completions(
            out,
            reward_names=judge.names,
            every=run_cfg.log_completions_steps,
            rank=parallel.rank,
            node=collectives.node(),
            most_nodes=run_cfg.log_completions_nodes,
            tell=metrics.completions,
        ),
        clock=clock,
        reward_weights=judge.reward_weights,
        tells_selection=cfg.grpo.dynamic_sample or cfg.grpo.oversample_ratio > 1,
        from_all=partial(collectives.all_gather_object, group=parallel.dp_group),
        watches=[lambda progress, found: gap(found), *([lambda *_: still_there(out)] if parallel.is_main else [])],
    )


def gap_of(cfg: Config) -> Callable[[Mapping[str, float]], str | None]:
    """Of the log-probs of trainer and sampler. One rollout ahead the difference is also what weights have moved: no bound is usual then."""
    if cfg.rollout.logp_difference_warn is None and cfg.rollout.async_rollout_depth:
        return lambda metrics: None
    bound = 0.0 if cfg.rollout.same_bits else cfg.rollout.logp_difference_warn
    return DriftWatch(bound=bound, dtype=cfg.model.torch_dtype, hint=where_they_part(cfg)).warning


def where_they_part(cfg: Config) -> str:
    """What to type where trainer and sampler differ too much."""
    return f"To see at which operation they part: megatron-grpo mismatch {shlex.quote(cfg.run.output_dir)}"
