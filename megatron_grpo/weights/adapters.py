"""Adapters as tensors: PEFT's files, a fresh start, and the padding that gives all matrices of a run one rank.

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.weights.lora import BASE, CONFIG, A, B, LoraSettings, adapter_entries, is_linear, linear_modules, module_of
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.writer import checkpoint_directory

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."

Read = Callable[[str], torch.Tensor]


def adapter_map(base: WeightMap, rank: int) -> WeightMap:
    """The map of `lora_a` and `lora_b` beside every linear layer of `base`, all of `rank`; it packs, cuts and joins as that of weights."""
    layers = {
        moe: {new.megatron: new for entry in entries.values() if is_linear(entry) for new in adapter_entries(entry, rank)}
        for moe, entries in base.layers.items()
    }
    return WeightMap(base.shape, base.padded_vocab_size, {}, layers)


Sizes = Mapping[str, tuple[int, int]]  # of matrices, by name


def own_sizes(settings: LoraSettings, shape: ModelShape) -> Sizes:
    """Every matrix of the whole model's adapters, each of its module's own rank; nothing of modules that have no adapter."""
    found = {}
    for module in linear_modules(shape):
        if rank := settings.rank_of(module.name):
            found[module.name + A], found[module.name + B] = (rank, module.inner), (module.out, rank)
    return found


def even_sizes(shape: ModelShape, rank: int) -> Sizes:
    """As Megatron's linears hold them: of one rank, and of all modules."""
    modules = list(linear_modules(shape))
    return {m.name + A: (rank, m.inner) for m in modules} | {m.name + B: (m.out, rank) for m in modules}


def drawn(sizes: Sizes, seed: int) -> Read:
    """A new adapter. A is uniform in +-1/sqrt(in), as PEFT draws it (`kaiming_uniform_` with a = sqrt(5)); B is zero.

    The name is the seed, so an adapter begins alike under every layout.
    """
    return lambda name: torch.zeros(sizes[name]) if name.endswith(B) else _uniform(name, sizes[name], seed, 1.0)


def drawn_far(settings: LoraSettings, sizes: Sizes, seed: int) -> Read:
    """An adapter far from zero, to try whether it is used: it moves each output by a third of its input's size."""

    def read(name: str) -> torch.Tensor:
        return _uniform(name, sizes[name], seed, 1 / settings.scale_of(module_of(name)) if name.endswith(B) else 1.0)

    return read


def _uniform(name: str, size: tuple[int, int], seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    bound = scale / math.sqrt(size[1])
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


def from_file(directory: str | Path, sizes: Sizes, *, flag: str = "adapters") -> Read:
    """An adapter that PEFT, or `write_adapter`, has written. Raises ConfigError unless it has exactly these matrices.

    flag: the setting that named the directory.
    """
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        raise _wrong(flag, f"{directory} has no {WEIGHTS}. PEFT's save_pretrained writes it.")
    try:
        held = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise _wrong(flag, f"{path} cannot be read as safetensors ({error}); it is damaged or was not downloaded completely.") from error
    names = set(held.keys())
    missing, extra = sorted({PREFIX + name for name in sizes} - names), sorted(names - {PREFIX + name for name in sizes})
    for what, some in (("lacks", missing), ("has, besides what its configuration asks for,", extra)):
        if some:
            shown = ", ".join(some[:3]) + ", ..." * (len(some) > 3)
            raise _wrong(flag, f"{path} {what} {len(some)} of this model's matrices: {shown}.")
    for name, size in sizes.items():
        found = tuple(held.get_slice(PREFIX + name).get_shape())
        if found != size:
            raise _wrong(flag, f"{path}: {name} is {found}, and this model's module with the rank of {CONFIG} needs {size}.")
    return lambda name: held.get_tensor(PREFIX + name)


def padded(read: Read, own: Sizes, even: Sizes) -> Read:
    """Every matrix in its size of `even`: zeros beyond a module's own rank, and zeros for modules that have no adapter.

    They stay zero in training: where A's row and B's column are zero, both gradients are.
    """

    def read_padded(name: str) -> torch.Tensor:
        out = torch.zeros(even[name])
        if name in own:
            rows, columns = own[name]
            out[:rows, :columns] = read(name)
        return out

    return read_padded


def trimmed(named: Iterable[tuple[str, torch.Tensor]], own: Sizes) -> Iterator[tuple[str, torch.Tensor]]:
    """The way back: each module's own rank, and nothing of modules that have no adapter."""
    for name, tensor in named:
        if name in own:
            rows, columns = own[name]
            yield name, tensor[:rows, :columns].contiguous()


def write_adapter(
    directory: str | Path, named: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], base: Mapping[str, str]
) -> None:
    """`directory` as PEFT, transformers and vLLM read it, whole or not at all.

    named: consumed once; kept in memory, for an adapter is small. config: `LoraSettings.to_peft`. base: fingerprints of the base, by name.
    """
    tensors = {PREFIX + name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}
    with checkpoint_directory(Path(directory), marker=CONFIG) as partial:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / BASE).write_text(json.dumps(dict(base), indent=2) + "\n", encoding="utf-8")


def merged(read: Read, adapter: Read, settings: LoraSettings, sizes: Sizes) -> Read:
    """The weights of a checkpoint with an adapter added in: W + scale * B A, in float32, in the dtype of W again."""

    def read_merged(name: str) -> torch.Tensor:
        weight, module = read(name), name.removesuffix(".weight")
        if module + A not in sizes:
            return weight
        delta = settings.scale_of(module) * (adapter(module + B).float() @ adapter(module + A).float())
        return (weight.float() + delta).to(weight.dtype)

    return read_merged


def _wrong(flag: str, message: str) -> ConfigError:
    return ConfigError([Problem(flags=(flag,), message=f"{flag}: {message}")])
