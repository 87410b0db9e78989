"""The policy on disk, as others read it: a Hugging Face checkpoint, or an adapter as PEFT writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_grpo.checkpoint.content import base_problems, model_fingerprint
from megatron_grpo.errors import ConfigError
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.policy import Policy
from megatron_grpo.weights.adapters import from_file, merged, own_sizes, write_adapter
from megatron_grpo.weights.lora import LoraSettings
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.writer import HfWriter


def export_hf(policy: Policy, out: str | Path, *, source: str | Path, dtype: torch.dtype, parallel: ParallelState) -> None:
    """Writes safetensors, config and tokenizer to `out`, whole or not at all; adapters are added in. Collective; the main rank writes.

    source: the checkpoint that config.json and the tokenizer are taken from.
    """
    if parallel.is_main:
        with HfWriter(out, source, dtype=dtype, expected=policy.exchange.map.expected_hf_names()) as write:
            for name, tensor in policy.named_weights():
                write(name, tensor)
    else:
        _pass(policy.named_weights())
    collectives.wait_for_all()


def export_adapter(policy: Policy, out: str | Path, *, source: str | Path, parallel: ParallelState) -> None:
    """Writes the adapter to `out`, whole or not at all, as PEFT, transformers and vLLM read it. Collective; the main rank writes.

    source: the base, whose fingerprint goes beside it.
    """
    assert policy.adapters is not None, "asked for where all weights train"
    if parallel.is_main:
        write_adapter(out, policy.named_adapters(), policy.adapters.config, {"fingerprint": model_fingerprint(Path(source))})
    else:
        _pass(policy.named_adapters())
    collectives.wait_for_all()


def merge_adapter(model: str | Path, adapter: str | Path, out: str | Path) -> None:
    """Writes the model with the adapter added in, tensor by tensor, in the dtype of its files. One process, and no Megatron.

    Raises ConfigError where the adapter is not for this model.
    """
    shape, reader, settings = ModelShape.from_pretrained(model), HfReader(model), LoraSettings.from_peft(adapter)
    if problems := [*settings.problems(shape), *base_problems(adapter, Path(model))]:
        raise ConfigError(problems)
    sizes = own_sizes(settings, shape)
    read = merged(reader, from_file(adapter, sizes), settings, sizes)
    names = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size).expected_hf_names()
    with HfWriter(out, model, expected=names) as write:
        for name in sorted(names):
            write(name, read(name))


def _pass(stream: Iterator[Any]) -> None:
    for _ in stream:
        pass
