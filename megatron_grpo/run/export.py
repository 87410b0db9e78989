"""Export of the policy in Hugging Face or PEFT format, `--push_to_hub`, and the `megatron-grpo export` command.

A Hub repository is created or found before training starts, so that a missing token or an invalid name costs no training. The token is
handled by the Hub's own client (HF_TOKEN).
"""

from __future__ import annotations

import logging
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError, RunError, config_error, first_line, keep_secret, one_line, problem_with
from megatron_grpo.core.base.files import MARK, export_obstacle, read_mark, write_mark
from megatron_grpo.core.parallel import collectives, state
from megatron_grpo.core.policy.policy import Policy
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.lora import A, B, LoraSettings, own_sizes, peft_name
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.adapters import from_file, peft_leaves_out
from megatron_grpo.run.assemble.output import start_parallel
from megatron_grpo.run.assemble.policy import build_loaded
from megatron_grpo.run.checkpoint.fingerprints import base_problems, model_fingerprint
from megatron_grpo.run.checkpoint.manifest import read_manifest
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import parse_byte_size, table
from megatron_grpo.run.hf_writer import HfWriter, write_adapter
from megatron_grpo.run.metrics.model_card import CARD, CURVES, ModelCard, write_card
from megatron_grpo.run.metrics.records import BestEffort
from megatron_grpo.run.models import find_model

if TYPE_CHECKING:
    from megatron_grpo.core.policy.reference import FrozenPolicy

logger = logging.getLogger(__name__)
_HUB_SETTINGS = ("push_to_hub", "hub_model_id")
Stream = Iterable[tuple[str, torch.Tensor]]  # (name, full tensor) pairs; iterating is collective


def export_hf(
    tensors: Stream, out: str | Path, *, source: str | Path, dtype: torch.dtype, expected: frozenset[str], max_shard_size: str = "5GB"
) -> None:
    """Write safetensors, config and tokenizer to `out`, completely or not at all. Collective; the main rank writes.

    Args:
        dtype: Dtype of the written tensors.
        expected: Names of all tensors that must be written.
        max_shard_size: Maximum size of one file, such as "5GB".
    """
    with drain_rest(tensors) as remaining:
        if collectives.rank() == 0:
            write = HfWriter(out, source, dtype=dtype, expected=expected, max_shard_bytes=parse_byte_size(max_shard_size) or 1)
            with write, activity.phase("exporting", total=len(expected), unit="tensors"):
                for name, tensor in remaining:
                    write(name, tensor)
                    activity.advance()
    collectives.wait_for_all()


def export_adapter(tensors: Stream, out: str | Path, *, source: str | Path, config: Mapping[str, Any]) -> None:
    """Write an adapter to `out`, completely or not at all, as PEFT, transformers and vLLM read it. Collective; the main rank writes.

    Args:
        source: The base model; its fingerprint is written beside the adapter.
    """
    with drain_rest(tensors) as remaining:
        if collectives.rank() == 0:
            shape = ModelShape.from_pretrained(source)
            tensors = ((peft_name(name, shape), tensor) for name, tensor in remaining)
            write_adapter(out, tensors, config, {"fingerprint": model_fingerprint(Path(source))})
    collectives.wait_for_all()


def export_model(
    model: Policy | FrozenPolicy, out: Path, *, cfg: Config, source: str | Path, card: ModelCard, merged: Path | None = None
) -> None:  # fmt: skip
    """Write the trained model or adapter to `out`. Collective.

    Args:
        card: Content of the model cards; its kind is set here.
        merged: Directory of the merged model that `merge_lora` writes; default `out`_merged. If it equals `out`, only the merged model is
            written.
    """
    exchange, tensors, adapters = model.exchange, model.tensors(), model.adapters
    dtype, expected = getattr(torch, cfg.model.torch_dtype), exchange.map.stored_names()
    if adapters is None:
        weights = exchange.stream(tensors, "weights")
        export_hf(weights, out, source=source, dtype=dtype, expected=expected, max_shard_size=cfg.run.max_shard_size)
        describe(out, card)
        return
    if not (cfg.tuner.merge_lora and merged == out):
        export_adapter(adapters.named(), out, source=source, config=adapters.config)
        describe(out, replace(card, kind="adapter"))
        unread = peft_leaves_out(adapters.settings, exchange.map.shape)
        if unread and collectives.rank() == 0:
            logger.warning("%s: %s", out, unread)
    if cfg.tuner.merge_lora:
        weights, merged = exchange.stream(tensors, "merged", prepare=adapters.merged), merged or merged_directory(out)
        export_hf(weights, merged, source=source, dtype=dtype, expected=expected, max_shard_size=cfg.run.max_shard_size)
        describe(merged, replace(card, kind="merged"))


def merged_directory(out: Path) -> Path:
    """Return the default directory of the merged model, for an adapter in `out`."""
    return out.with_name(f"{out.name}_merged")


def describe(out: Path, card: ModelCard) -> None:
    """Write the model card of an export. Only the main rank writes; an error is logged, because an export is complete without a card."""
    if collectives.rank() == 0:
        with BestEffort()(f"the model card in {out}"):
            write_mark(out, "export", files=[*read_mark(out)["files"], CARD, CURVES])
            write_card(out, card)


def merge_adapter(model: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Write the model with the adapter merged in, tensor by tensor: W + scale * B A, computed in float32, in the dtype of W.

    One process, without Megatron.

    Raises:
        ConfigError: If the adapter does not belong to this model, or if the model stores the experts of a layer in one tensor.
    """
    shape, read, settings = ModelShape.from_pretrained(model), HfReader(model), LoraSettings.from_peft(adapter)
    read_adapter, adapted = from_file(adapter, settings, shape), own_sizes(settings, shape)
    if problems := base_problems(adapter, Path(model)):
        raise ConfigError(problems)
    weights = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size)
    names = weights.expected_hf_names()
    if names != weights.stored_names():
        raise ConfigError(
            f"model: {shape.architecture} has the experts of a layer in one tensor, into which merging an adapter is not supported."
        )

    def read_merged(name: str) -> torch.Tensor:
        weight, module = read(name), name.removesuffix(".weight")
        if module + A not in adapted:
            return weight
        delta = settings.compute_lora_scale(module) * (read_adapter(module + B).float() @ read_adapter(module + A).float())
        return (weight.float() + delta).to(weight.dtype)

    with HfWriter(out, model, expected=names) as write:
        for name in sorted(names):
            write(name, read_merged(name))


@contextmanager
def drain_rest(tensors: Stream) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Consume what the block leaves of a stream, because the other ranks send it too and would wait for this one."""
    remaining = iter(tensors)
    with CleanUp(lambda: deque(remaining, maxlen=0)):
        yield remaining


# ---- the Hub


def open_repositories(cfg: Config, folders: Sequence[Path]) -> dict[Path, str]:
    """Create or find the Hub repositories. Collective; the first rank talks to the Hub.

    Returns:
        {folder to upload: its repository}; {} unless `push_to_hub` is true.

    Raises:
        ConfigError: On every rank, if the Hub refuses.
    """
    if not cfg.run.push_to_hub:
        return {}

    def open_all() -> dict[Path, str]:
        return {folder: _repository(cfg, suffix) for folder, suffix in zip(folders, ("", "-merged"), strict=False)}

    return collectives.run_on_rank_zero(open_all, (ConfigError,))


def push_to_hub(repositories: dict[Path, str]) -> None:
    """Upload each folder. Call it on one rank.

    Args:
        repositories: {folder: repository}.

    Raises:
        RunError: For all failed uploads, with the commands that repeat them.
    """
    from huggingface_hub import upload_folder

    failures = []
    for folder, repository in repositories.items():
        try:
            upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=MARK, commit_message="Trained with megatron_grpo")
        except Exception as error:  # noqa: BLE001 - errors of HTTP, of files or of the client: the export is complete anyway
            upload_command = shlex.join(["hf", "upload", repository, str(folder.absolute()), "."])
            reason = one_line(error, first_line) or type(error).__name__
            failures.append(
                f"{folder} was not uploaded to {repository} ({reason}). It is complete on this disk; upload it with: {upload_command}"
            )
        else:
            print(f"Pushed: {folder} to {repository}", flush=True)
    if failures:
        raise RunError("\n".join(failures))


def _repository(cfg: Config, suffix: str) -> str:
    from huggingface_hub import create_repo, get_token

    name = (cfg.run.hub_model_id or Path(cfg.run.output_dir).absolute().name) + suffix
    keep_secret(token := get_token())
    if not token:
        raise config_error(
            _HUB_SETTINGS, "push_to_hub true requires a token with write access: set HF_TOKEN, or log in with `hf auth login`."
        )
    try:
        return create_repo(name, private=cfg.run.hub_private_repo, exist_ok=True).repo_id
    except Exception as error:  # HTTP errors, an invalid name, no network
        reason = one_line(error, first_line) or type(error).__name__
        raise config_error(_HUB_SETTINGS, f"push_to_hub: the repository {name} can neither be created nor used: {reason}") from error


# ---- `megatron-grpo export`: a checkpoint of any layout, or an adapter and its base -----------------------------------------------------


def run_export(parsed: ParsedConfig) -> int:
    """Run the command: export a checkpoint (`resume`), or merge `adapters` into `model` (`merge_lora`).

    Returns:
        The exit code.

    Raises:
        ConfigError: If settings are missing or invalid.
    """
    cfg = parsed.config
    out = Path(cfg.run.output_dir)
    obstacle = export_obstacle(out) if "output_dir" in cfg.typed else "export needs --output_dir."
    if problems := [*parsed.problems, *([problem_with("output_dir", obstacle)] if obstacle else [])]:
        raise ConfigError(problems)
    if cfg.run.resume not in ("auto", "never"):
        from megatron_grpo.run.open_checkpoint import settings_of_checkpoint

        cfg = settings_of_checkpoint(cfg, Path(cfg.run.resume))
        export_checkpoint(cfg, find_model(cfg.model.model, with_code=cfg.model.trust_remote_code))
        return EXIT_DONE
    if not (cfg.tuner.adapters and cfg.tuner.merge_lora and cfg.model.model):
        raise config_error("resume", "export needs --resume CHECKPOINT, or --model, --adapters and --merge_lora true.")
    model = find_model(cfg.model.model, with_code=cfg.model.trust_remote_code)
    repositories = open_repositories(cfg, [out])
    merge_adapter(model, cfg.tuner.adapters, out)
    describe(out, ModelCard(kind="merged", cfg=cfg, source=model))
    print(f"Done: {out.resolve()} (the merged model)", flush=True)
    push_to_hub(repositories)
    return EXIT_DONE


def export_checkpoint(cfg: Config, model: Path) -> None:
    """Export a training checkpoint under the layout of `cfg`, which may differ from the layout that wrote it. Collective.

    Raises:
        ConfigError: If the layout does not fit the model.
    """
    from megatron_grpo.run.open_checkpoint import make_layout

    shape = ModelShape.from_pretrained(model)
    layout, problems = make_layout(cfg, shape)
    if problems:
        raise ConfigError(problems)
    parallel = start_parallel(cfg, layout)
    try:
        loaded = build_loaded(cfg, shape, parallel, model_path=model, checkpoint=Path(cfg.run.resume))
        out, card = Path(cfg.run.output_dir), make_card(Path(cfg.run.resume), model)
        repositories = open_repositories(cfg, [out])
        export_model(loaded, out, cfg=cfg, source=model, card=card, merged=out)
        is_first = collectives.rank() == 0
        if is_first:
            kind = "model" if loaded.adapters is None else "merged model" if cfg.tuner.merge_lora else "adapter"
            print(f"Done: {out.resolve()} (the {kind})", flush=True)
    finally:
        state.stop()
    if is_first:  # the other ranks need not wait for the upload
        push_to_hub(repositories)


def make_card(directory: Path, model: Path) -> ModelCard:
    """Return the content of a checkpoint's model card: the settings it was trained with, and its run's curves if they are found."""
    manifest = read_manifest(directory)
    assert not isinstance(manifest, str)  # it has been read before
    known_settings, run_directory = table(), directory.absolute().parent.parent
    trained = Config().with_values({name: value for name, value in manifest.origin.settings.items() if name in known_settings})
    return ModelCard(
        cfg=trained, source=model, run=run_directory if (run_directory / "metrics.jsonl").is_file() else None, step=manifest.step
    )
