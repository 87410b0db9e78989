"""How a model sees: transformers' own vision tower, whole on each rank of the first stage, and how its tokens enter the packed stream."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_grpo.batching.images import num_tokens
from megatron_grpo.policy.packed_batch import LocalBatch, LocalPictures
from megatron_grpo.types import Image
from megatron_grpo.weights.families import FAMILIES
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.vision_towers import part_of

KEPT_BYTES = 512 << 20  # of outputs of a tower that does not change
Features = list[torch.Tensor]  # [tokens, hidden]; and where the model has DeepStack one more for each of its first layers


def build_tower(
    shape: ModelShape, model_path: str | Path, *, dtype: torch.dtype, device: torch.device | str, checkpointing: bool = True
) -> torch.nn.Module | None:
    """The tower with weights yet to be set; None for a model that does not see. checkpointing: `vit_gradient_checkpointing`."""
    tower = FAMILIES[shape.architecture].tower
    if tower is None:
        return None
    from transformers import AutoConfig

    module, name = tower.module.rsplit(".", 1)
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).vision_config
    with torch.random.fork_rng(devices=[]), torch.device(device):
        built = kind._from_config(config, attn_implementation="sdpa")
    for parameter in built.parameters():
        # Not `built.to(dtype)`: that rounds the buffers of rotary frequencies as well, which no checkpoint holds.
        parameter.data = parameter.data.to(dtype)
    if checkpointing:
        _checkpoint_layers(built)
    return built


def _checkpoint_layers(tower: Any) -> None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a tower without word embeddings is warned of, and has none
    tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logging.set_verbosity(level)
    # It also makes what the first layer reads ask for a gradient, which would lead the backward through layers that are frozen.
    tower.disable_input_require_grads()


def keep_outputs(chunks: Sequence[Any]) -> None:
    """Pictures that were encoded once need not be again. For towers that nobody changes any more."""
    for chunk in chunks:
        if chunk.vision is not None:
            chunk.vision.keeps_outputs = True


class Vision(torch.nn.Module):
    """Encodes the pictures of a micro-batch, and puts their tokens where the stream has placeholders."""

    def __init__(self, tower: torch.nn.Module, config: TransformerConfig, layers: Sequence[torch.nn.Module], tp_group: Any, *, deep: int):
        """layers: of this model chunk. deep: so many of them, from the first on, take features of the tower (DeepStack)."""
        super().__init__()
        self.tower, self.tp_group, self.sequence_parallel = tower, tp_group, config.sequence_parallel
        self.keeps_outputs = False  # true where the tower does not change as long as this object lives
        self._kept: OrderedDict[str, Features] = OrderedDict()  # by key of the picture, the latest last
        self._added: list[torch.Tensor] = []  # by layer: what is added to its output
        for name, parameter in tower.named_parameters():
            setattr(parameter, f"is_of_{part_of(f'visual.{name}')}", True)  # by which the optimizer finds them
            # A rank sees the gradient of its own rows alone. Megatron sums over TP what carries this mark.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark of Megatron's
        if len(layers) < deep:
            raise ValueError(f"the first model chunk has {len(layers)} layers, and pictures enter the first {deep}")
        for number, layer in enumerate(list(layers)[:deep]):
            layer.register_forward_hook(lambda _, args, output, number=number: self._deepen(number, output))

    def see(self, hidden: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """hidden [t or t/tp, 1, H], embeddings of the stream -> the same, with the tokens of pictures where they belong."""
        self._added = []
        if batch.seen is None:
            return self._touched(hidden)
        at, token = self._mine(batch.seen, len(hidden))
        if not len(at):
            return self._touched(hidden)
        tokens, *deep = (features[token].to(hidden.dtype) for features in self._features(batch.seen.pictures))
        self._added = [torch.zeros_like(hidden[:, 0]).index_copy(0, at, features)[:, None] for features in deep]
        return hidden[:, 0].index_copy(0, at, tokens)[:, None]

    @contextmanager
    def in_layers(self) -> Iterator[None]:
        """Inside, the first layers add what the tower has for them; behind it nothing is held."""
        try:
            yield
        finally:
            self._added = []

    def forget(self) -> None:
        """Gives the memory of kept outputs away."""
        self._kept.clear()

    def _mine(self, seen: LocalPictures, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(places, tokens) in the run of rows that this rank has under sequence parallelism."""
        if not self.sequence_parallel:
            return seen.at, seen.token
        first = self.tp_group.rank() * rows
        mine = (seen.at >= first) & (seen.at < first + rows)
        return seen.at[mine] - first, seen.token[mine]

    def _touched(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same values. Each micro-batch reaches each parameter that trains: a bucket of gradients whose reduction overlaps with the
        backward waits for all of them, and Megatron fails in the next step if one never came."""
        trained = [parameter for parameter in self.tower.parameters() if parameter.requires_grad]
        if not (trained and torch.is_grad_enabled()):
            return hidden
        return hidden + 0.0 * torch.stack([parameter.flatten()[0] for parameter in trained]).sum().to(hidden.dtype)

    def _deepen(self, number: int, output: Any) -> Any:
        if number >= len(self._added):
            return output
        hidden, *others = output
        return hidden + self._added[number], *others

    def _features(self, pictures: Sequence[Image]) -> Features:
        """Of all pictures, one behind the other."""
        if not self.keeps_outputs:
            return self._encode(pictures)
        with torch.no_grad():
            # One by one: which pictures stand beside it must not decide the last bits of what is kept.
            found = [self._kept.get(picture.key) or self._encode([picture]) for picture in pictures]
        for picture, features in zip(pictures, found, strict=True):
            self._keep(picture.key, features)
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _keep(self, key: str, features: Features) -> None:
        self._kept[key] = features
        self._kept.move_to_end(key)
        while sum(one.nbytes for kept in self._kept.values() for one in kept) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def _encode(self, pictures: Sequence[Image]) -> Features:
        first = next(self.tower.parameters())
        patches = torch.from_numpy(np.concatenate([picture.patches() for picture in pictures]))
        grids = torch.tensor([picture.grid for picture in pictures], dtype=torch.int64)
        found = self.tower(patches.to(first.device, first.dtype), grid_thw=grids.to(first.device))
        features = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
        wanted = sum(map(num_tokens, pictures))
        if any(len(one) != wanted for one in features):
            raise ValueError(f"the tower made {[len(one) for one in features]} tokens of pictures that have {wanted}")
        return features
