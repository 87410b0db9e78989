"""Where metrics go besides metrics.jsonl: one small class per service, all with the same three methods."""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_grpo.errors import Problem


class Reporter(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers only."""

    def close(self) -> None: ...


class Tensorboard:
    """Event files under output_dir/tensorboard. Steps beyond the one resumed from are hidden."""

    def __init__(self, output_dir: Path, config: Mapping[str, Any], first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases; its own environment variables (WANDB_PROJECT, WANDB_MODE, WANDB_RUN_ID, ...) apply."""

    def __init__(self, output_dir: Path, config: Mapping[str, Any], first_step: int):
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron-grpo"),
            name=os.environ.get("WANDB_NAME", output_dir.name),
            dir=str(output_dir),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class Swanlab:
    """SwanLab; its own environment variables (SWANLAB_MODE, SWANLAB_API_KEY, ...) apply."""

    def __init__(self, output_dir: Path, config: Mapping[str, Any], first_step: int):
        import swanlab

        self.swanlab = swanlab
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "megatron-grpo"),
            experiment_name=output_dir.name,
            logdir=str(output_dir / "swanlab"),
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.swanlab.log(dict(values), step=step)

    def close(self) -> None:
        self.swanlab.finish()


class Mlflow:
    """MLflow; its own environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) apply."""

    def __init__(self, output_dir: Path, config: Mapping[str, Any], first_step: int):
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=output_dir.name)
        mlflow.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.mlflow.end_run()


REPORTERS: dict[str, Callable[[Path, Mapping[str, Any], int], Reporter]] = {
    "tensorboard": Tensorboard,
    "wandb": Wandb,
    "swanlab": Swanlab,
    "mlflow": Mlflow,
}


def report_to_problems(report_to: Sequence[str]) -> list[Problem]:
    """What is wrong with `--report_to`: unknown names, and services whose package is not installed. Imports none of them."""
    problems = []
    for name in report_to:
        if name == "none":
            continue
        if name not in REPORTERS:
            close = difflib.get_close_matches(name, REPORTERS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use {', '.join(REPORTERS)} or none."
            problems.append(Problem(flags=("report_to",), message=f"report_to {name} is unknown: {hint}", nearest={"report_to": close}))
        elif importlib.util.find_spec(name) is None:
            problems.append(
                Problem(
                    flags=("report_to",),
                    message=(f"report_to {name} needs the package {name}, which is not installed: pip install 'megatron-grpo[{name}]'."),
                )
            )
    return problems
