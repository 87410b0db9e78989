"""`megatron-grpo export`: a checkpoint of any layout, or an adapter and its base, as the files that others read."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.base.errors import EXIT_DONE, ConfigError, config_error, problem_with
from megatron_grpo.base.files import why_not_replaced
from megatron_grpo.checkpoint.manifest import read_manifest
from megatron_grpo.config import Parsed
from megatron_grpo.config.config import Config
from megatron_grpo.config.table import table
from megatron_grpo.data.hub import find_model
from megatron_grpo.metrics.card import Card
from megatron_grpo.parallel import collectives, state
from megatron_grpo.run.build.output import start_parallel
from megatron_grpo.run.build.policy import choose_tuner, model_of, sharing_here
from megatron_grpo.run.export import describe, export_model, merge_adapter, open_repositories, push_to_hub
from megatron_grpo.run.opened import layout_of, load_weights, settings_of_checkpoint
from megatron_grpo.weights.shape import ModelShape


def run_export(parsed: Parsed) -> int:
    """Writes to `output_dir`: of a checkpoint (`resume`), or of `model` with `adapters` and `merge_lora`. Returns the exit code."""
    cfg = parsed.config
    out = Path(cfg.run.output_dir)
    wrong = why_not_replaced(out) if "output_dir" in cfg.typed else "export needs --output_dir."
    if problems := [*parsed.problems, *([problem_with("output_dir", wrong)] if wrong else [])]:
        raise ConfigError(problems)
    if cfg.run.resume not in ("auto", "never"):
        cfg = settings_of_checkpoint(cfg, Path(cfg.run.resume))
        export_checkpoint(cfg, find_model(cfg.model.model, with_code=cfg.model.trust_remote_code))
        return EXIT_DONE
    if not (cfg.tuner.adapters and cfg.tuner.merge_lora and cfg.model.model):
        raise config_error("resume", "export needs --resume CHECKPOINT, or --model, --adapters and --merge_lora true.")
    model = find_model(cfg.model.model, with_code=cfg.model.trust_remote_code)
    repositories = open_repositories(cfg, [out])
    merge_adapter(model, cfg.tuner.adapters, out)
    describe(out, Card(kind="merged", cfg=cfg, source=model))
    print(f"Done: {out.resolve()} (the merged model)", flush=True)
    push_to_hub(repositories)
    return EXIT_DONE


def export_checkpoint(cfg: Config, model: Path) -> None:
    """The model of a checkpoint, under the layout of `cfg`, which need not be the one that wrote it. Collective."""
    shape = ModelShape.from_pretrained(model)
    layout, problems = layout_of(cfg, shape)
    if problems:
        raise ConfigError(problems)
    parallel = start_parallel(cfg, layout)
    try:
        sharing_here(cfg, shape, parallel)
        exchange, loaded_chunks = model_of(cfg, shape, parallel, model_path=model)
        chunks = loaded_chunks()
        adapters = choose_tuner(cfg, chunks, exchange)
        load_weights(chunks, Path(cfg.run.resume))
        out, card = Path(cfg.run.output_dir), card_of(Path(cfg.run.resume), model)
        repositories = open_repositories(cfg, [out])
        export_model(exchange, exchange.tensors(chunks), adapters, out, cfg=cfg, source=model, card=card, merged=out)
        is_first = collectives.rank() == 0
        if is_first:
            kind = "model" if adapters is None else "merged model" if cfg.tuner.merge_lora else "adapter"
            print(f"Done: {out.resolve()} (the {kind})", flush=True)
    finally:
        state.stop()
    if is_first:  # the others need not wait for it
        push_to_hub(repositories)


def card_of(directory: Path, model: Path) -> Card:
    """What is told of the model of a checkpoint: the settings that trained it, and the curves of its run where they lie beside it."""
    manifest = read_manifest(directory)
    assert not isinstance(manifest, str)  # it has been read before
    known, beside = table(), directory.absolute().parent.parent
    trained = Config().with_values({name: value for name, value in manifest.origin.settings.items() if name in known})
    return Card(cfg=trained, source=model, run=beside if (beside / "metrics.jsonl").is_file() else None, step=manifest.step)
