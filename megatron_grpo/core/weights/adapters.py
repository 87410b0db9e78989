"""Adapter tensors: PEFT's files, initialization, and the padding that gives all matrices of a run one rank.

Names are those of PEFT's files without their prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`. `weights.lora` has the rules.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights import lora
from megatron_grpo.core.weights.hf_files import checkpoint_directory, save_tensors
from megatron_grpo.core.weights.lora import A, B, LoraSettings, Sizes
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.safetensors_files import adapter_problems
from megatron_grpo.core.weights.shape import ModelShape

Read = Callable[[str], torch.Tensor]


def adapter_map(base: WeightMap, rank: int) -> WeightMap:
    """Return the weight map of `lora_a` and `lora_b` of every linear layer of `base`. It packs, cuts and joins like the map of weights.

    Args:
        base: Map of the base model's weights.
        rank: Rank of all matrices.
    """
    layers = {
        moe: {new.megatron: new for entry in entries.values() if lora.is_linear(entry) for new in lora.adapter_entries(entry, rank)}
        for moe, entries in base.layers.items()
    }
    return WeightMap(base.shape, base.padded_vocab_size, {}, layers)


def even_sizes(shape: ModelShape, rank: int) -> Sizes:
    """Return the matrix sizes as Megatron's linears hold them: one rank for all, and all modules.

    Args:
        shape: Shape of the model.
        rank: Rank of all matrices.
    """
    modules = list(lora.linear_modules(shape))
    return {m.name + A: (rank, m.inner) for m in modules} | {m.name + B: (m.out, rank) for m in modules}


def initial_adapter(sizes: Sizes, seed: int) -> Read:
    """Return a reader of a newly initialized adapter.

    A is uniform in +-1/sqrt(in), the initialization of PEFT (`kaiming_uniform_` with a = sqrt(5)); B is zero. The name is part of the seed,
    so an adapter has the same initial values under every layout.

    Args:
        sizes: Size of each matrix.
        seed: Seed of the run.
    """
    return lambda name: torch.zeros(sizes[name]) if name.endswith(B) else _uniform(name, sizes[name], seed, 1.0)


def random_adapter_far_from_zero(settings: LoraSettings, sizes: Sizes, seed: int) -> Read:
    """Return a reader of an adapter far from zero, for tests that the adapter is used. Each output changes by a third of its input's size.

    Args:
        settings: Settings of the adapter.
        sizes: Size of each matrix.
        seed: Seed of the random values.
    """

    def read(name: str) -> torch.Tensor:
        return _uniform(name, sizes[name], seed, 1 / settings.scale_of(lora.module_of(name)) if name.endswith(B) else 1.0)

    return read


def _uniform(name: str, size: tuple[int, int], seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    bound = scale / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def from_file(directory: str | Path, settings: LoraSettings, shape: ModelShape, *, flag: str = "adapters") -> Read:
    """Return a reader of an adapter that PEFT or `write_adapter` has written.

    Args:
        directory: Directory of the adapter.
        settings: Settings that its matrices must fit.
        shape: Sizes of the model.
        flag: Setting that named the directory, for error messages.

    Raises:
        ConfigError: The file does not have exactly the matrices of these settings.
    """
    if problems := adapter_problems(directory, settings, shape, flag=flag):
        raise ConfigError(problems)
    file = safe_open(Path(directory) / lora.WEIGHTS, framework="pt")
    stored = {lora.own_name(name.removeprefix(lora.PREFIX), shape): name for name in file.keys()}
    return lambda name: file.get_tensor(stored[name])


def padded(read: Read, sizes: Sizes, padded_sizes: Sizes) -> Read:
    """Return a reader of every matrix in its size of `padded_sizes`, with zeros beyond a module's own rank and for modules without adapter.

    The zeros stay zero in training: where A's row and B's column are zero, both gradients are zero.

    Args:
        read: Reader of the matrices in their own sizes.
        sizes: Own size of each matrix.
        padded_sizes: Padded size of each matrix.
    """

    def read_padded(name: str) -> torch.Tensor:
        out = torch.zeros(padded_sizes[name])
        if name in sizes:
            rows, columns = sizes[name]
            out[:rows, :columns] = read(name)
        return out

    return read_padded


def trimmed(tensors: Iterable[tuple[str, torch.Tensor]], sizes: Sizes) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each matrix with its module's own rank, and nothing of modules without adapter: the inverse of `padded`.

    Args:
        tensors: (name, padded matrix).
        sizes: Own size of each matrix.
    """
    for name, tensor in tensors:
        if name in sizes:
            rows, columns = sizes[name]
            yield name, tensor[:rows, :columns].contiguous()


def write_adapter(
    directory: str | Path, named_tensors: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], base: Mapping[str, str]
) -> None:
    """Write an adapter that PEFT, transformers and vLLM can read. The directory appears complete or not at all.

    Args:
        directory: Output directory.
        named_tensors: (name by `peft_name`, matrix). Consumed once and kept in memory, because an adapter is small.
        config: Content of adapter_config.json (`LoraSettings.to_peft`).
        base: Fingerprints of the base model's tensors, by name.
    """
    tensors = {lora.PREFIX + name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
    with checkpoint_directory(Path(directory)) as partial:
        save_tensors(tensors, partial / lora.WEIGHTS)
        (partial / lora.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / lora.BASE).write_text(json.dumps(dict(base), indent=2) + "\n", encoding="utf-8")


def merged(read: Read, adapter: Read, settings: LoraSettings, sizes: Sizes) -> Read:
    """Return a reader of a checkpoint's weights with an adapter merged: W + scale * B A, computed in float32, in the dtype of W.

    Args:
        read: Reader of the base weights.
        adapter: Reader of the adapter matrices.
        settings: Settings of the adapter.
        sizes: Size of each adapter matrix.
    """

    def read_merged(name: str) -> torch.Tensor:
        weight, module = read(name), name.removesuffix(".weight")
        if module + A not in sizes:
            return weight
        delta = settings.scale_of(module) * (adapter(module + B).float() @ adapter(module + A).float())
        return (weight.float() + delta).to(weight.dtype)

    return read_merged
