"""A `MetricsLogger` for tests, assembled as in a run, on rank 0 with no settings unless given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.run.metrics.display import Display
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.metrics.reporters import TrackingServices
from megatron_grpo.run.metrics.rollout import Completions


def logger_in(
    folder: Path,
    *,
    rank: int = 0,
    reward_names: tuple[str, ...] = (),
    total_steps: int | None = None,
    console: Console | None = None,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> MetricsLogger:
    """Return a logger that writes no completions tables."""
    config = config or {}
    return MetricsLogger(
        Completions(folder, reward_names=reward_names, interval=0, rank=rank),
        Display(console, total=total_steps, folder=folder),
        timers=Timers(),
        config=config,
        services=TrackingServices(folder, config) if "report_to" in config else None,
        **settings,
    )
