"""Hugging Face safetensors on disk, one tensor at a time: nothing is read before it is asked for.

gpt-oss stores the experts of a layer in one tensor, transposed, a gate's channels and those that it gates side by side. The table of
weights has them one by one, as it has all experts; how one becomes the other, bit for bit, is here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_grpo.weights.families import FAMILIES, family_of
from megatron_grpo.weights.shape import ModelShape, read_config
from megatron_grpo.weights.stored import stored_names, wrong

# What transformers 5 calls the experts inside a model, and may write when asked to keep its own layout: all experts in one tensor.
_FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")


class HfReader:
    """`reader(name)` is the tensor of that name, on the CPU, in the dtype of the file. `reader.names` is all there is.

    Experts that are stored in one tensor are offered one by one under their names on the Hub, and so are models that see which were saved
    with the names of their modules: callers know a single layout.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = read_config(directory)
        self._files: dict[str, safe_open] = {}
        self._where = stored_names(directory)  # name in the file -> file
        tower = family_of(self.config).tower
        self._stored = {tower.on_the_hub(name) if tower else name: name for name in self._where}  # name -> name in the file
        self._parts: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {}  # name -> name in the file, what is taken of that
        for name in self._where:
            if family_of(self.config).are_experts_interleaved:
                experts = experts_in(name, self.config.get("num_local_experts", self.config.get("num_experts", 0)))
                self._parts |= {one: (name, partial(_transposed, expert, channels)) for one, expert, channels in experts}
            elif fused := _FUSED.fullmatch(name):
                self._offer_experts(name, *fused.groups())
        self.names = frozenset(self._stored) - {stored for stored, _ in self._parts.values()} | frozenset(self._parts)

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._parts:
            stored, taken = self._parts[name]
            return taken(self._open(stored).get_slice(stored))
        if name not in self._stored:
            raise wrong(f"{self.directory} has no tensor {name}.")
        return self._open(self._stored[name]).get_tensor(self._stored[name])

    def _open(self, name: str) -> safe_open:
        file = self._where[name]
        if file not in self._files:
            self._files[file] = _open_safetensors(self.directory / file)
        return self._files[file]

    def _offer_experts(self, stored: str, prefix: str, which: str) -> None:
        family = family_of(self.config)
        parts = family.expert_names[:2] if which == "gate_up_proj" else family.expert_names[2:]
        for expert in range(self._open(stored).get_slice(stored).get_shape()[0]):
            for part, own_name in enumerate(parts):
                name = f"{prefix}.{family.moe_block}.experts.{expert}.{own_name}.weight"
                self._parts[name] = stored, partial(_chunk, expert, part, len(parts))
        router = f"{prefix}.mlp.gate.weight"
        if family.moe_block != "mlp" and router in self._where:
            self._parts[f"{prefix}.{family.moe_block}.gate.weight"] = router, lambda held: held[:]


def _chunk(expert: int, part: int, parts: int, held: Any) -> torch.Tensor:
    return held[expert].chunk(parts)[part]


def _transposed(expert: int, channels: slice, held: Any) -> torch.Tensor:
    one = held[expert][..., channels]
    return one.t() if one.dim() > 1 else one


def check_tied_head(reader: HfReader) -> None:
    """`ConfigError` where config.json says that the head is the embedding and the checkpoint ships another one.

    vLLM (0.32) and transformers (5) then take the head that is there: the sampler would be another model than the policy.
    """
    embedding, head = f"{family_of(reader.config).text_prefix}embed_tokens.weight", "lm_head.weight"
    if not ModelShape.from_hf(reader.config).tied_embeddings or not {embedding, head} <= reader.names:
        return
    one, other = reader(embedding), reader(head)
    if torch.equal(one, other):
        return
    if one.shape == other.shape:
        differences = (one.float() - other.float()).abs()
        how = f"{int((differences.amax(dim=1) > 0).sum()):,} of {len(one):,} rows differ, by up to {float(differences.max()):.2g}"
    else:
        how = f"their shapes are {tuple(other.shape)} and {tuple(one.shape)}"
    raise wrong(
        f"config.json says tie_word_embeddings (or says nothing of it, in a family that ties them), but {head} is not {embedding}: {how}. "
        "vLLM and transformers use the head that is there. "
        f"Set tie_word_embeddings to false in {reader.directory / 'config.json'} to train both, or remove {head} to train them as one."
    )


def _open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise wrong(f"{path} cannot be read as safetensors ({error}); it is damaged or was not downloaded completely.") from error


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
