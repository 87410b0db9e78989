"""Experts as gpt-oss stores them: those of a layer in one tensor, transposed, a gate's channels and those that it gates side by side.

The table of weights has them one by one, as it has all experts; here is how one becomes the other, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from megatron_grpo.weights.families import FAMILIES
from megatron_grpo.weights.shape import ModelShape

_STORED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|)")
_ONE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def experts_in(stored: str, num_experts: int) -> Iterator[tuple[str, int, slice]]:
    """The tensors of single experts that a stored one holds: name, number, the channels of its last dimension."""
    if match := _STORED.fullmatch(stored):
        prefix, which, bias = match.groups()
        parts = _PARTS[which]
        for expert in range(num_experts):
            for place, part in enumerate(parts):
                name = f"{prefix}.{expert}.{part}_proj.{'bias' if bias else 'weight'}"
                yield name, expert, slice(place, None, len(parts))


def stored_name(name: str) -> str:
    """Of the tensor that holds this one: its own where it is of no expert."""
    match = _ONE.fullmatch(name)
    if match is None:
        return name
    prefix, _, part, kind = match.groups()
    return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def as_stored(named: Iterable[tuple[str, torch.Tensor]], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights with the experts of each layer together, where the family's files have them so.

    A tensor is held until the last of its experts has come; experts of a layer come one after another.
    """
    if not FAMILIES[shape.architecture].are_experts_interleaved:
        yield from named
        return
    waiting: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in named:
        match = _ONE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        whole, parts = stored_name(name), _PARTS["down" if match[3] == "down" else "gate_up"]
        held = waiting.setdefault(whole, {})
        held[match[3], int(match[2])] = tensor.t() if tensor.dim() > 1 else tensor
        if len(held) == shape.num_experts * len(parts):
            experts = [torch.stack([held[part, e] for part in parts], dim=-1).flatten(-2) for e in range(shape.num_experts)]
            yield whole, torch.stack(experts)
            del waiting[whole]
    if waiting:
        raise ValueError(f"experts of {', '.join(sorted(waiting)[:3])} are missing")
