"""Join the job, and build what a run writes: output directory, checkpoints and metrics."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.base.activity import Timers
from megatron_grpo.checkpoint.best import Best
from megatron_grpo.checkpoint.fingerprints import facts_of
from megatron_grpo.checkpoint.saving import Checkpoints
from megatron_grpo.checkpoint.written import check_output_dir, claim, remove_run
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import is_greater_better, metric_of
from megatron_grpo.config.write import write_config
from megatron_grpo.metrics import Metrics, card
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
    """Join the job on the grid that the plan describes. Collective.

    Args:
        cfg: Settings of the run.
        layout: Parallel layout.
        typed: The settings without derived values; `cfg` if omitted. The ranks compare these.
        content: Fingerprints of the files that settings name, by setting. The ranks compare these too.

    Raises:
        ConfigError: On all ranks, if settings, versions or files differ between ranks.
    """
    facts, p = facts_of(typed or cfg, content or {}), cfg.parallel
    minutes = p.distributed_timeout_minutes
    return state.start(layout, sequence_parallel=p.sequence_parallel, seed=cfg.run.seed, timeout_minutes=minutes, facts=facts)


def open_output(made: Plan, inputs: ValidatedInputs, parallel: ParallelState, *, print_line: Callable[[str], None]) -> Checkpoints:
    """Prepare `output_dir` for the run and choose the checkpoint to resume from. Collective.

    The main rank clears the previous run's files if the run starts afresh, and writes config.yaml and plan.json.

    Args:
        made: Plan of the run.
        inputs: Validated inputs: how the run begins.
        parallel: Process groups of this rank.
        print_line: Prints messages about checkpoints on the main rank.
    """
    cfg, out = made.checked.config, Path(made.checked.config.run.output_dir)
    checkpoints = Checkpoints(inputs.resume, cfg.run, replicas=parallel.dp_cp_group, print_line=print_line)
    if metric := metric_of(cfg):
        checkpoints.best = Best(out / "checkpoints", metric, greater=is_greater_better(cfg), print_line=print_line)
    checkpoints.choose()  # before anything in output_dir is overwritten
    if parallel.is_rank_zero:
        if inputs.resume.wipes:
            remove_run(out)
        claim(out)
        write_config(cfg, out / "config.yaml")
        made.save(out / "plan.json", versions=versions_on(parallel.device))
    collectives.wait_for_all()
    return checkpoints


def versions_on(device: torch.device) -> dict[str, str]:
    """Return the versions of the program, its libraries and the GPU driver, and the name of the device, by name.

    Args:
        device: Device of this rank.
    """
    if device.type != "cuda":
        return {**card.versions(), "device": f"CPU ({platform.machine()}, {os.cpu_count()} cores)"}
    found = {**card.versions(), "device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", read_if_there(Path("/proc/driver/nvidia/version")))
    return {**found, "driver": driver[1]} if driver else found


def read_if_there(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""


def build_metrics_logger(
    made: Plan,
    reward_manager: RewardManager,
    parallel: ParallelState,
    timers: Timers,
    *,
    heard: Callable[[int, Mapping[str, Any]], None] | None,
) -> MetricsLogger:
    """Build the logger of metrics and completions.

    Args:
        made: Plan of the run.
        reward_manager: Reward manager: names and weights of the rewards.
        parallel: Process groups of this rank.
        timers: Timers of the run.
        heard: Also called with each record: (optimizer step, metrics).
    """
    cfg, out, run_cfg = made.checked.config, Path(made.checked.config.run.output_dir), made.checked.config.run
    metrics = Metrics(
        out,
        report_to=run_cfg.report_to,
        rank=parallel.rank,
        total_steps=made.schedule.num_steps,
        plot_steps=run_cfg.save_steps,
        config={name: value for section in cfg.groups().values() for name, value in vars(section).items()},
        heard=heard,
    )
    gap = gap_of(cfg)
    return MetricsLogger(
        metrics,
        Completions(
            out,
            reward_names=reward_manager.names,
            every=run_cfg.log_completions_steps,
            rank=parallel.rank,
            node=collectives.node(),
            most_nodes=run_cfg.log_completions_nodes,
            write_table=metrics.completions,
        ),
        timers=timers,
        reward_weights=reward_manager.reward_weights,
        tells_selection=cfg.grpo.dynamic_sample or cfg.grpo.oversample_ratio > 1,
        all_gather=partial(collectives.all_gather_object, group=parallel.dp_group),
        watches=[lambda progress, found: gap(found), *([lambda *_: check_output_dir(out)] if parallel.is_rank_zero else [])],
    )


def gap_of(cfg: Config) -> Callable[[Mapping[str, float]], str | None]:
    """Return the check of the difference between the log-probs of trainer and sampler.

    With `async_rollout_depth` the difference contains what training has changed since the tokens were sampled. No default bound applies
    then, and the check warns only if `logprob_diff_warn` is set.

    Returns:
        A function from metrics to a warning, or to None if the difference is within bounds.
    """
    if cfg.rollout.logprob_diff_warn is None and cfg.rollout.async_rollout_depth:
        return lambda metrics: None
    bound = 0.0 if cfg.rollout.bitwise_parity else cfg.rollout.logprob_diff_warn
    return DriftWatch(bound=bound, dtype=cfg.model.torch_dtype, hint=where_they_part(cfg)).warning


def where_they_part(cfg: Config) -> str:
    """Return the hint that names the `mismatch` command, for warnings about differing log-probs."""
    return f"To see at which operation they part: megatron-grpo mismatch {shlex.quote(cfg.run.output_dir)}"
