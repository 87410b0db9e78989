"""The policy on disk, as others read it: a Hugging Face checkpoint, or an adapter as PEFT writes it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.base.cleanup import CleanUp
from megatron_grpo.base.errors import ConfigError
from megatron_grpo.base.files import mark, mark_of
from megatron_grpo.checkpoint.content import base_problems, model_fingerprint
from megatron_grpo.config.config import Config
from megatron_grpo.config.table import bytes_of
from megatron_grpo.metrics.card import CARD, CURVES, Card, write_card
from megatron_grpo.metrics.records import Courtesy
from megatron_grpo.parallel import collectives
from megatron_grpo.policy.hf_export import WeightExchange
from megatron_grpo.policy.lora import Adapters
from megatron_grpo.weights.adapters import from_file, merged, write_adapter
from megatron_grpo.weights.lora import LoraSettings, own_sizes, peft_leaves_out, peft_name
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.writer import HfWriter

logger = logging.getLogger(__name__)
Stream = Iterable[tuple[str, torch.Tensor]]  # full tensors under their names; collective


def export_hf(
    named: Stream, out: str | Path, *, source: str | Path, dtype: torch.dtype, expected: frozenset[str], max_shard_size: str = "5GB"
) -> None:
    """Writes safetensors, config and tokenizer to `out`, whole or not at all. Collective; the main rank writes.

    named: of a whole model. source: the checkpoint that config.json and the tokenizer are taken from. expected: every name there must be.
    max_shard_size: of one file.
    """
    with _taken(named) as rest:
        if collectives.rank() == 0:
            with HfWriter(out, source, dtype=dtype, expected=expected, max_shard_bytes=bytes_of(max_shard_size) or 1) as write:
                for name, tensor in rest:
                    write(name, tensor)
    collectives.wait_for_all()


def export_adapter(named: Stream, out: str | Path, *, source: str | Path, config: Mapping[str, Any]) -> None:
    """Writes an adapter to `out`, whole or not at all, as PEFT, transformers and vLLM read it. Collective; the main rank writes.

    source: the base, whose fingerprint goes beside it. config: adapter_config.json.
    """
    with _taken(named) as rest:
        if collectives.rank() == 0:
            shape = ModelShape.from_pretrained(source)
            named = ((peft_name(name, shape), tensor) for name, tensor in rest)
            write_adapter(out, named, config, {"fingerprint": model_fingerprint(Path(source))})
    collectives.wait_for_all()


def export_model(
    exchange: WeightExchange,
    tensors: dict[str, torch.Tensor],
    adapters: Adapters | None,
    out: Path,
    *,
    cfg: Config,
    source: str | Path,
    card: Card,
    merged: Path | None = None,
) -> None:
    """Writes what was trained to `out`: a model, or an adapter. Collective.

    merged: where merge_lora puts the model that adapter and base make (default: `out`_merged); where that is `out`, it is written alone.
    tensors: this rank's weights, complete. card: what their model cards say; its kind is filled in here.
    """
    dtype, expected = getattr(torch, cfg.model.torch_dtype), exchange.map.stored_names()
    if adapters is None:
        weights = exchange.stream(tensors, "weights")
        export_hf(weights, out, source=source, dtype=dtype, expected=expected, max_shard_size=cfg.run.max_shard_size)
        describe(out, card)
        return
    if not (cfg.tuner.merge_lora and merged == out):
        export_adapter(adapters.named(), out, source=source, config=adapters.config)
        describe(out, replace(card, kind="adapter"))
        lost = peft_leaves_out(adapters.settings, exchange.map.shape)
        if lost and collectives.rank() == 0:
            logger.warning("%s: %s", out, lost)
    if cfg.tuner.merge_lora:
        weights, merged = exchange.stream(tensors, "merged", prepare=adapters.merged), merged or merged_folder(out)
        export_hf(weights, merged, source=source, dtype=dtype, expected=expected, max_shard_size=cfg.run.max_shard_size)
        describe(merged, replace(card, kind="merged"))


def merged_folder(out: Path) -> Path:
    """Where the model goes that an adapter in `out` makes of its base."""
    return out.with_name(f"{out.name}_merged")


def describe(out: Path, card: Card) -> None:
    """The model card of an export. The main rank writes; without it an export is whole all the same."""
    if collectives.rank() == 0:
        with Courtesy()(f"the model card in {out}"):
            mark(out, "export", files=[*mark_of(out)["files"], CARD, CURVES])
            write_card(out, card)


def merge_adapter(model: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Writes the model with the adapter added in, tensor by tensor, in the dtype of its files. One process, and no Megatron.

    Raises ConfigError where the adapter is not for this model.
    """
    shape, reader, settings = ModelShape.from_pretrained(model), HfReader(model), LoraSettings.from_peft(adapter)
    adapter_read = from_file(adapter, settings, shape)
    if problems := base_problems(adapter, Path(model)):
        raise ConfigError(problems)
    read = merged(reader, adapter_read, settings, own_sizes(settings, shape))
    weights = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size)
    names = weights.expected_hf_names()
    if names != weights.stored_names():
        raise ConfigError(f"model: {shape.architecture} keeps the experts of a layer in one tensor, into which no adapter is merged here.")
    with HfWriter(out, model, expected=names) as write:
        for name in sorted(names):
            write(name, read(name))


@contextmanager
def _taken(named: Stream) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Whatever the block leaves of a stream is taken after it: the other ranks are sent it too, and would wait for this one."""
    rest = iter(named)
    with CleanUp(lambda: deque(rest, maxlen=0)):
        yield rest
