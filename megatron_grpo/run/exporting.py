"""`megatron-grpo export`: a checkpoint of any layout, or an adapter and its base, as the files that others read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo import launcher
from megatron_grpo.build import choose_tuner, model_of, sharing_here
from megatron_grpo.checkpoint import folder
from megatron_grpo.checkpoint.distributed import read_sharded
from megatron_grpo.checkpoint.manifest import read_manifest
from megatron_grpo.checkpoint.resume import several
from megatron_grpo.errors import EXIT_DONE, ConfigError, Problem
from megatron_grpo.export import describe, export_model, merge_adapter, merged_folder
from megatron_grpo.metrics.card import Card
from megatron_grpo.parallel import collectives, state
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.policy import sharded_state
from megatron_grpo.run import hub
from megatron_grpo.settings import Parsed
from megatron_grpo.settings.config import Config, ParallelConfig
from megatron_grpo.settings.table import table
from megatron_grpo.sources import find_model
from megatron_grpo.weights.fit import layout_problems
from megatron_grpo.weights.shape import ModelShape

# Of a checkpoint's settings these are not wanted: an export has a layout of its own, needs no reference, and is no run.
_OTHERS = (*vars(ParallelConfig()), "resume", "output_dir", "beta", "ref_adapters", "merge_lora", "share_prompts")


def run_export(parsed: Parsed) -> int:
    """Writes to `output_dir`: of a checkpoint (`resume`), or of `model` with `adapters` and `merge_lora`. Returns the exit code."""
    cfg = parsed.config
    problems = [*parsed.problems, *([] if "output_dir" in cfg.typed else [_problem("output_dir", "export needs --output_dir.")])]
    if problems:
        raise ConfigError(problems)
    if cfg.run.resume not in ("auto", "never"):
        cfg = settings_of_checkpoint(cfg, Path(cfg.run.resume))
        export_checkpoint(cfg, find_model(cfg.model.model))
        return EXIT_DONE
    if not (cfg.tuner.adapters and cfg.tuner.merge_lora and cfg.model.model):
        raise ConfigError([_problem("resume", "export needs --resume CHECKPOINT, or --model, --adapters and --merge_lora true.")])
    out, model = Path(cfg.run.output_dir), find_model(cfg.model.model)
    repositories = hub.open_repositories(cfg, [out])
    merge_adapter(model, cfg.tuner.adapters, out)
    describe(out, Card(kind="merged", cfg=cfg, source=model))
    print(f"Done: {out.resolve()}", flush=True)
    hub.push(repositories)
    return EXIT_DONE


def settings_of_checkpoint(cfg: Config, directory: Path) -> Config:
    """What was typed, over what the run was that wrote the checkpoint. Raises ConfigError where it is damaged, or no checkpoint."""
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        raise ConfigError([_problem("resume", f"resume: {manifest}. Name a directory such as OUTPUT_DIR/checkpoints/iter_0000100.")])
    if faults := folder.damage(directory, manifest.files):
        raise ConfigError([_problem("resume", f"resume: {directory} is damaged: {several(faults)}.")])
    known = table()
    values = {name: value for name, value in manifest.origin.settings.items() if name in known and name not in _OTHERS}
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


def export_checkpoint(cfg: Config, model: Path) -> None:
    """The model of a checkpoint, under the layout of `cfg`, which need not be the one that wrote it. Collective."""
    p, shape = cfg.parallel, ModelShape.from_pretrained(model)
    layout, problems = layout_of(cfg, shape)
    if problems:
        raise ConfigError(problems)
    parallel = state.start(layout, sequence_parallel=p.sequence_parallel, seed=cfg.run.seed)
    try:
        sharing_here(cfg, shape, parallel)
        exchange, loaded_chunks = model_of(cfg, shape, parallel, model_path=model)
        chunks = loaded_chunks()
        adapters = choose_tuner(cfg, chunks, exchange)
        load_weights(chunks, Path(cfg.run.resume))
        out, card = Path(cfg.run.output_dir), card_of(Path(cfg.run.resume), model)
        repositories = hub.open_repositories(cfg, [out, *([merged_folder(out)] if adapters and cfg.tuner.merge_lora else [])])
        export_model(exchange, exchange.tensors(chunks), adapters, out, cfg=cfg, source=model, card=card)
        is_first = collectives.rank() == 0
        if is_first:
            print(f"Done: {out.resolve()}", flush=True)
    finally:
        state.stop()
    if is_first:  # the others need not wait for it
        hub.push(repositories)


def load_weights(chunks: Sequence[Any], directory: Path) -> None:
    """Puts what a checkpoint holds of the model into `chunks`, adapters too. Collective."""
    described = sharded_state.sharded_state(chunks, None, None, is_loading=True)
    sharded_state.load_state(chunks, None, None, read_sharded(described, directory, partly=True))


def card_of(directory: Path, model: Path) -> Card:
    """What is told of the model of a checkpoint: the settings that trained it, and the curves of its run where they lie beside it."""
    manifest = read_manifest(directory)
    assert not isinstance(manifest, str)  # it has been read before
    known, beside = table(), directory.absolute().parent.parent
    trained = Config().with_values({name: value for name, value in manifest.origin.settings.items() if name in known})
    return Card(cfg=trained, source=model, run=beside if (beside / "metrics.jsonl").is_file() else None, step=manifest.step)


def _problem(flag: str, message: str) -> Problem:
    return Problem(flags=(flag,), message=message)
