"""A checkpoint opened by another program than the run that goes on from it: its settings, a layout of one's own, its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo import launcher
from megatron_grpo.checkpoint import folder
from megatron_grpo.checkpoint.distributed import read_sharded
from megatron_grpo.checkpoint.manifest import Manifest, read_manifest
from megatron_grpo.checkpoint.resume import several
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.policy import sharded_state
from megatron_grpo.settings.config import Config, ParallelConfig
from megatron_grpo.settings.table import table
from megatron_grpo.weights.fit import layout_problems
from megatron_grpo.weights.shape import ModelShape

# Of a checkpoint's settings these are not wanted: an export has a layout of its own, needs no reference, and is no run.
_OTHERS = (*vars(ParallelConfig()), "resume", "output_dir", "beta", "ref_adapters", "merge_lora", "share_prompts")


def settings_of_checkpoint(cfg: Config, directory: Path) -> Config:
    """What was typed, over what the run was that wrote the checkpoint. Raises ConfigError where it is damaged, or no checkpoint."""
    return settings_over(cfg, whole_checkpoint(directory).origin.settings)


def whole_checkpoint(directory: Path) -> Manifest:
    """Its manifest. Raises ConfigError where it is damaged, or no checkpoint."""
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        raise ConfigError([_problem("resume", f"resume: {manifest}. Name a directory such as OUTPUT_DIR/checkpoints/iter_0000100.")])
    if faults := folder.damage(directory, manifest.files):
        raise ConfigError([_problem("resume", f"resume: {directory} is damaged: {several(faults)}.")])
    return manifest


def settings_over(cfg: Config, of_run: Mapping[str, Any]) -> Config:
    """What was typed, over a run's settings by name, but for those that belong to a run alone."""
    known = table()
    values = {name: value for name, value in of_run.items() if name in known and name not in _OTHERS}
    start = values.get("adapters")
    if start and not Path(start).is_dir():
        values["adapters"] = None  # where the run began; ranks and targets stand in its settings too
    typed = {name: getattr(section, name) for section in cfg.groups().values() for name in vars(section) if name in cfg.typed}
    return cfg.with_values(values | typed)


def layout_of(cfg: Config, shape: ModelShape) -> tuple[Layout, list[Problem]]:
    """How this job's ranks are arranged, and what forbids it. No sizes of batches enter."""
    p = cfg.parallel
    layout = Layout(
        world_size=launcher.read().world_size, tp=p.tensor_model_parallel_size, pp=p.pipeline_model_parallel_size,
        vpp=p.virtual_pipeline_model_parallel_size, cp=p.context_parallel_size, ep=p.expert_model_parallel_size,
        etp=p.expert_tensor_parallel_size,
    )  # fmt: skip
    ranks = math.prod((layout.tp, layout.pp, layout.cp))
    problems = layout_problems(shape, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    if layout.world_size % ranks:
        message = f"{layout.world_size} ranks cannot hold copies of a model that is cut over {ranks}. Start a multiple of {ranks}."
        problems.append(_problem("world_size", message))
    return layout, problems


def load_weights(chunks: Sequence[Any], directory: Path) -> None:
    """Puts what a checkpoint holds of the model into `chunks`, adapters too. Collective."""
    described = sharded_state.sharded_state(chunks, None, None, is_loading=True)
    sharded_state.load_state(chunks, None, None, read_sharded(described, directory, partly=True))


def _problem(flag: str, message: str) -> Problem:
    return Problem(flags=(flag,), message=message)
