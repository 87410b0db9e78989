"""Adapter tensors: initialization, and the padding that gives all matrices of a run one rank.

Names are those of PEFT's files without their prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`. `weights.lora` has the rules.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_grpo.core.weights import lora
from megatron_grpo.core.weights.lora import A, B, LoraSettings, Sizes
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.shape import ModelShape

Read = Callable[[str], torch.Tensor]


def adapter_map(base: WeightMap, rank: int) -> WeightMap:
    """Return the weight map of `lora_a` and `lora_b` of every linear layer of `base`. It packs, cuts and joins like the map of weights."""
    layers = {
        moe: {new.megatron: new for entry in entries.values() if lora.is_linear(entry) for new in lora.adapter_entries(entry, rank)}
        for moe, entries in base.layers.items()
    }
    return WeightMap(base.shape, base.padded_vocab_size, {}, layers)


def even_sizes(shape: ModelShape, rank: int) -> Sizes:
    """Return the matrix sizes as Megatron's linears hold them: one rank for all, and all modules."""
    modules = list(lora.linear_modules(shape))
    return {m.name + A: (rank, m.inner) for m in modules} | {m.name + B: (m.out, rank) for m in modules}


def initial_adapter(sizes: Sizes, seed: int) -> Read:
    """Return a reader of a newly initialized adapter.

    A is uniform in +-1/sqrt(in), the initialization of PEFT (`kaiming_uniform_` with a = sqrt(5)); B is zero. The name is part of the seed,
    so an adapter has the same initial values under every layout.

    Args:
        sizes: Size of each matrix.
    """
    return lambda name: torch.zeros(sizes[name]) if name.endswith(B) else _uniform(name, sizes[name], seed, 1.0)


def random_adapter_far_from_zero(settings: LoraSettings, sizes: Sizes, seed: int) -> Read:
    """Return a reader of an adapter far from zero, for tests that the adapter is used. Each output changes by a third of its input's size.

    Args:
        sizes: Size of each matrix.
    """

    def read(name: str) -> torch.Tensor:
        return _uniform(name, sizes[name], seed, 1 / settings.compute_lora_scale(lora.find_module(name)) if name.endswith(B) else 1.0)

    return read


def _uniform(name: str, size: tuple[int, int], seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    bound = scale / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def padded(read: Read, sizes: Sizes, padded_sizes: Sizes) -> Read:
    """Return a reader of every matrix in its size of `padded_sizes`, with zeros beyond a module's own rank and for modules without adapter.

    The zeros stay zero in training: where A's row and B's column are zero, both gradients are zero.

    Args:
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
        sizes: Own size of each matrix.
    """
    for name, tensor in tensors:
        if name in sizes:
            rows, columns = sizes[name]
            yield name, tensor[:rows, :columns].contiguous()
