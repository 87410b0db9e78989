"""Open a checkpoint outside the run that wrote it: its settings, a layout for this job, and its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import Problem, config_error, problem_with
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.policy import sharded_state
from megatron_grpo.core.policy.requirements import OPTIMIZER_SETTINGS
from megatron_grpo.core.settings import ParallelConfig
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.checkpoint.distributed import CheckpointError, read_sharded
from megatron_grpo.run.checkpoint.manifest import Manifest, find_damage, read_manifest
from megatron_grpo.run.checkpoint.resume import join_faults, read_initial_weights
from megatron_grpo.run.checkpoint.saving import verify_files
from megatron_grpo.run.config.rules.layout import layout_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table

# Settings of a checkpoint that are ignored: an export has its own layout, needs no reference, and is not a training run.
_OTHERS = (
    *(*vars(ParallelConfig()), "resume", "output_dir", "beta", "ref_adapters", "merge_lora", "share_prefix"),
    "trust_remote_code",  # must be typed by the user, because the checkpoint may come from someone else
    *("metric_for_best_model", "greater_is_better", "load_best_model_at_end", "finetune", "no_load_optim", "no_load_rng"),
    *OPTIMIZER_SETTINGS,  # they exclude float32, which may be typed over the run's bfloat16
)


def settings_of_checkpoint(cfg: Config, directory: Path) -> Config:
    """Return the settings of the checkpoint's run, with typed values on top.

    Raises:
        ConfigError: If the checkpoint is damaged, or if there is none.
    """
    return settings_over(cfg, undamaged_checkpoint(directory).origin.settings)


def undamaged_checkpoint(directory: Path) -> Manifest:
    """Return the manifest of an undamaged checkpoint.

    Raises:
        ConfigError: If the checkpoint is damaged, or if there is none.
    """
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        raise config_error("resume", f"resume: {manifest}. Use a directory such as OUTPUT_DIR/checkpoints/iter_0000100.")
    if faults := find_damage(directory, manifest.files):
        raise config_error("resume", f"resume: {directory} is damaged: {join_faults(faults)}.")
    return manifest


def settings_over(cfg: Config, run_settings: Mapping[str, Any]) -> Config:
    """Return a run's settings, except those that only concern a training run, with typed values on top."""
    known_settings = table()
    values = {name: value for name, value in run_settings.items() if name in known_settings and name not in _OTHERS}
    start = values.get("adapters")
    if start and not Path(start).is_dir():
        values["adapters"] = None  # the run's initial adapters are gone; its settings contain ranks and targets too
    if values.get("mcore_model") and not Path(values["mcore_model"]).is_dir():
        values["mcore_model"] = None
    typed_values = {name: getattr(section, name) for section in cfg.groups().values() for name in vars(section) if name in cfg.typed}
    return cfg.with_values(values | typed_values)


def make_layout(cfg: Config, shape: ModelShape) -> tuple[Layout, list[Problem]]:
    """Return the parallel layout of this job and its problems, without regard to batch sizes."""
    p = cfg.parallel
    layout = Layout(
        world_size=launcher.read().world_size, tp=p.tensor_model_parallel_size, pp=p.pipeline_model_parallel_size,
        vpp=p.virtual_pipeline_model_parallel_size, cp=p.context_parallel_size, ep=p.expert_model_parallel_size,
        etp=p.expert_tensor_parallel_size,
    )  # fmt: skip
    ranks = math.prod((layout.tp, layout.pp, layout.cp))
    problems = layout_problems(shape, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    if layout.world_size % ranks:
        message = (
            f"{layout.world_size} ranks cannot hold copies of a model that is sharded over {ranks} ranks. Start a multiple of {ranks}."
        )
        problems.append(problem_with("world_size", message))
    return layout, problems


def load_weights(chunks: Sequence[Any], directory: Path) -> None:
    """Load the model's weights from a checkpoint into `chunks`, adapters included. Collective."""
    described = sharded_state.sharded_state(chunks, None, None, is_loading=True)
    sharded_state.load_state(chunks, None, None, read_sharded(described, directory, partly=True))


def begin_with(chunks: Sequence[Any], path: str | Path) -> None:
    """Load the initial weights of a run (`mcore_model`) into `chunks`. Collective.

    Raises:
        ConfigError: If the checkpoint is damaged, or of another shape.
    """
    manifest = read_initial_weights(path)
    directory = manifest.directory
    if faults := verify_files(manifest):
        raise config_error("mcore_model", f"mcore_model: {directory} is damaged: {join_faults(faults)}.")
    try:
        load_weights(chunks, directory)
    except CheckpointError as error:
        message = f"mcore_model: {directory} is undamaged but does not match this model: {error}. Use the model from which it was trained."
        raise config_error("mcore_model", message) from error
