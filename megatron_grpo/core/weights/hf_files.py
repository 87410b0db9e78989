"""Hugging Face checkpoint directories, read one tensor at a time. `run/hf_writer.py` writes them.

gpt-oss and Qwen3-VL store the experts of a layer in one transposed tensor. The table of weights lists experts one by one for all families;
this module also converts exactly between the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_grpo.core.weights.families import FAMILIES, find_family, text_config
from megatron_grpo.core.weights.safetensors_files import file_error, stored_names
from megatron_grpo.core.weights.shape import ModelShape, read_config

# Names of experts in transformers 5, which keeps all experts in one tensor and may write them so.
_FUSED = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")


class HfReader:
    """Reader of a checkpoint. `reader(name)` is a tensor on the CPU, in the dtype of the file. `reader.names` lists all tensors.

    Experts that are stored in one tensor are offered one by one under their names on the Hub. Vision-language models that were saved with
    module names are offered under their names on the Hub too. Callers therefore know a single layout.

    Raises:
        ConfigError: Files are missing or damaged, or (when called) a tensor is missing.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.config = read_config(directory)
        self._files: dict[str, safe_open] = {}
        self._where = stored_names(directory)  # name in the file -> file
        tower = find_family(self.config).tower
        self._stored = {tower.on_the_hub(name) if tower else name: name for name in self._where}  # name -> name in the file
        self._parts: dict[str, tuple[str, Callable[[Any], torch.Tensor]]] = {}  # name -> (name in the file, function that cuts it out)
        for name in self._where:
            if layout := find_family(self.config).fused_experts:
                if not _STORED.fullmatch(name):
                    continue
                size = self._open(name).get_slice(name).get_shape()
                self._check_order(name, size)
                experts = experts_in(name, size, layout)
                self._parts |= {part: (name, partial(_transposed, expert, channels)) for part, expert, channels in experts}
            elif fused := _FUSED.fullmatch(name):
                self._offer_experts(name, *fused.groups())
        self.names = frozenset(self._stored) - {stored for stored, _ in self._parts.values()} | frozenset(self._parts)

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._parts:
            stored, cut = self._parts[name]
            return cut(self._open(stored).get_slice(stored))
        if name not in self._stored:
            raise file_error(f"{self.directory} has no tensor {name}.")
        return self._open(self._stored[name]).get_tensor(self._stored[name])

    def _check_order(self, name: str, size: Sequence[int]) -> None:
        """Check that experts are stored as on the Hub. `save_pretrained` of transformers 5 stores those of Qwen3-VL as in memory."""
        hidden, axis = text_config(self.config)["hidden_size"], 2 if name.endswith("down_proj") else 1
        if len(size) == 3 and size[axis] != hidden and size[3 - axis] == hidden:
            raise file_error(
                f"{self.directory}: {name} has shape {tuple(size)}, with the last two dimensions as transformers 5 has them in memory. "
                f"Files on the Hub, and vLLM, have {(size[0], size[2], size[1])}. Transpose these two dimensions of all experts."
            )

    def _open(self, name: str) -> safe_open:
        file = self._where[name]
        if file not in self._files:
            self._files[file] = _open_safetensors(self.directory / file)
        return self._files[file]

    def _offer_experts(self, stored: str, prefix: str, stored_part: str) -> None:
        family = find_family(self.config)
        parts = family.expert_names[:2] if stored_part == "gate_up_proj" else family.expert_names[2:]
        for expert in range(self._open(stored).get_slice(stored).get_shape()[0]):
            for part, own_name in enumerate(parts):
                name = f"{prefix}.{family.moe_block}.experts.{expert}.{own_name}.weight"
                self._parts[name] = stored, partial(_chunk, expert, part, len(parts))
        router = f"{prefix}.mlp.gate.weight"
        if family.moe_block != "mlp" and router in self._where:
            self._parts[f"{prefix}.{family.moe_block}.gate.weight"] = router, lambda tensor: tensor[:]


def _chunk(expert: int, part: int, parts: int, tensor: Any) -> torch.Tensor:
    return tensor[expert].chunk(parts)[part]


def _transposed(expert: int, channels: slice, tensor: Any) -> torch.Tensor:
    weight = tensor[expert][..., channels]
    return weight.t() if weight.dim() > 1 else weight


def check_tied_head(reader: HfReader) -> None:
    """Check that a checkpoint with tied embeddings does not contain a different head.

    vLLM (0.32) and transformers (5) would use that head, so the sampler and the policy would be different models.

    Raises:
        ConfigError: config.json ties head and embedding, and the two tensors differ.
    """
    embedding, head = f"{find_family(reader.config).text_prefix}embed_tokens.weight", "lm_head.weight"
    if not ModelShape.from_hf(reader.config).tied_embeddings or not {embedding, head} <= reader.names:
        return
    embedding_weight, head_weight = reader(embedding), reader(head)
    if torch.equal(embedding_weight, head_weight):
        return
    if embedding_weight.shape == head_weight.shape:
        differences = (embedding_weight.float() - head_weight.float()).abs()
        difference_text = (
            f"{int((differences.amax(dim=1) > 0).sum()):,} of {len(embedding_weight):,} rows differ, by up to "
            f"{float(differences.max()):.2g}"
        )
    else:
        difference_text = f"their shapes are {tuple(head_weight.shape)} and {tuple(embedding_weight.shape)}"
    raise file_error(
        f"config.json sets tie_word_embeddings (explicitly or by the family's default), but {head} differs from {embedding}: "
        f"{difference_text}. "
        f"vLLM and transformers use the stored head. Set tie_word_embeddings to false in {reader.directory / 'config.json'} to train "
        f"both, or remove {head} to train them as one."
    )


def _open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise file_error(f"{path} cannot be read as safetensors ({error}); it is damaged or was not downloaded completely.") from error


_STORED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias|)")
_ONE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


def experts_in(stored: str, size: Sequence[int], layout: str) -> Iterator[tuple[str, int, slice]]:
    """Yield the single-expert tensors that a stored tensor contains: (name, expert number, slice of the last dimension).

    Args:
        layout: `ModelFamily.fused_experts`.
    """
    if match := _STORED.fullmatch(stored):
        prefix, stored_part, bias = match.groups()
        parts = _PARTS[stored_part]
        width = size[-1] // len(parts)
        for expert in range(size[0]):
            for index, part in enumerate(parts):
                name = f"{prefix}.{expert}.{part}_proj.{'bias' if bias else 'weight'}"
                is_mixed = layout == "interleaved"
                yield name, expert, slice(index, None, len(parts)) if is_mixed else slice(index * width, (index + 1) * width)


def stored_name(name: str) -> str:
    """Return the name of the tensor in the file that contains `name`. Tensors that belong to no expert keep their name."""
    match = _ONE.fullmatch(name)
    if match is None:
        return name
    prefix, _, part, kind = match.groups()
    return f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def as_stored(tensors: Iterable[tuple[str, torch.Tensor]], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same weights with the experts of each layer in one tensor, if the family's files have them so.

    A tensor is held until the last of its experts arrives. The experts of a layer must be consecutive.

    Raises:
        ValueError: Experts of a layer are missing.
    """
    layout = FAMILIES[shape.architecture].fused_experts
    if layout is None:
        yield from tensors
        return
    waiting: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors:
        match = _ONE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        stored, parts = stored_name(name), _PARTS["down" if match[3] == "down" else "gate_up"]
        parts_by_expert = waiting.setdefault(stored, {})
        parts_by_expert[match[3], int(match[2])] = tensor.t() if tensor.dim() > 1 else tensor
        if len(parts_by_expert) == shape.num_experts * len(parts):
            experts = [[parts_by_expert[part, e] for part in parts] for e in range(shape.num_experts)]
            is_mixed = layout == "interleaved"
            yield (
                stored,
                torch.stack(
                    [
                        torch.stack(expert_parts, dim=-1).flatten(-2) if is_mixed else torch.cat(expert_parts, dim=-1)
                        for expert_parts in experts
                    ]
                ),
            )
            del waiting[stored]
    if waiting:
        raise ValueError(f"missing experts of {', '.join(sorted(waiting)[:3])}")
