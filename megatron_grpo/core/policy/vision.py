"""Vision-language models: transformers' vision tower, whole on each rank of the first stage, and its tokens in the packed stream."""

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

from megatron_grpo.core.batching.collate import num_tokens
from megatron_grpo.core.policy.packed_batch import LocalBatch, LocalImages
from megatron_grpo.core.types import Image
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.vision_towers import find_part

KEPT_BYTES = 512 << 20  # bytes of cached outputs of a frozen tower
Features = list[torch.Tensor]  # [tokens, hidden]; and with DeepStack one more for each of the model's first layers


def build_tower(
    shape: ModelShape, model_path: str | Path, *, dtype: torch.dtype, device: torch.device | str, checkpointing: bool = True
) -> torch.nn.Module | None:
    """Build the vision tower of a model. Its weights are not loaded yet.

    Args:
        dtype: Dtype of the parameters.
        checkpointing: Recompute its layers in the backward (`vit_gradient_checkpointing`).

    Returns:
        The tower; None if the model has none.
    """
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
        # Not `built.to(dtype)`: that would also round the buffers of rotary frequencies, which no checkpoint holds.
        parameter.data = parameter.data.to(dtype)
    if checkpointing:
        _checkpoint_layers(built)
    return built


def _checkpoint_layers(tower: Any) -> None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns that the tower has no word embeddings
    tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logging.set_verbosity(level)
    # The call above also makes the input of the first layer require a gradient, so that the backward would run through frozen layers.
    tower.disable_input_require_grads()


class VisionEncoder(torch.nn.Module):
    """Vision part of a model, which encodes images and puts their tokens at the placeholders of the packed stream.

    Args:
        deep: Number of layers, from the first on, whose output receives features of the tower (DeepStack).

    Raises:
        ValueError: If the chunk has fewer layers than `deep`.

    Attributes:
        keeps_outputs: Cache outputs by image. Set it only if the tower does not change.
    """

    def __init__(self, tower: torch.nn.Module, config: TransformerConfig, layers: Sequence[torch.nn.Module], tp_group: Any, *, deep: int):
        super().__init__()
        self.tower, self.tp_group, self.sequence_parallel = tower, tp_group, config.sequence_parallel
        self.keeps_outputs = False
        self._kept: OrderedDict[str, Features] = OrderedDict()  # by key of the image, the latest last
        self._added: list[torch.Tensor] = []  # by layer: the features added to its output
        for name, parameter in tower.named_parameters():
            setattr(parameter, f"is_of_{find_part(f'visual.{name}')}", True)  # the optimizer's learning rates refer to this attribute
            # A rank has the gradient of its own rows only. Megatron sums the gradients of parameters with this attribute over TP.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # a mark of Megatron's
        if len(layers) < deep:
            raise ValueError(f"the first model chunk has {len(layers)} layers, but image features are added to the first {deep}")
        for number, layer in enumerate(list(layers)[:deep]):
            layer.register_forward_hook(lambda _, args, output, number=number: self._deepen(number, output))

    def embed_images(self, hidden: torch.Tensor, batch: LocalBatch) -> torch.Tensor:
        """Replace the placeholders in the embeddings by the tokens of the images.

        Args:
            hidden: Embeddings of the stream, [t, 1, H], or [t/tp, 1, H] under sequence parallelism.

        Returns:
            The embeddings with image tokens, in the shape of `hidden`.
        """
        self._added = []
        if batch.image_tokens is None:
            return self._touched(hidden)
        rows, token = self._mine(batch.image_tokens, len(hidden))
        if not len(rows):
            return self._touched(hidden)
        tokens, *deep = (features[token].to(hidden.dtype) for features in self._features(batch.image_tokens.images))
        self._added = [torch.zeros_like(hidden[:, 0]).index_copy(0, rows, features)[:, None] for features in deep]
        return hidden[:, 0].index_copy(0, rows, tokens)[:, None]

    @contextmanager
    def in_layers(self) -> Iterator[None]:
        """Let the first layers add the tower's features inside the block (DeepStack); the features are released at its end."""
        try:
            yield
        finally:
            self._added = []

    def forget(self) -> None:
        """Release the memory of cached outputs."""
        self._kept.clear()

    def _mine(self, image_tokens: LocalImages, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (indices, image tokens) in the run of rows that this rank holds under sequence parallelism."""
        if not self.sequence_parallel:
            return image_tokens.at, image_tokens.token
        first = self.tp_group.rank() * rows
        is_local = (image_tokens.at >= first) & (image_tokens.at < first + rows)
        return image_tokens.at[is_local] - first, image_tokens.token[is_local]

    def _touched(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the same values, connected to every parameter of the tower that trains.

        A bucket of gradients whose reduction overlaps with the backward waits for all of its parameters, and Megatron fails in the next
        step if one of them received no gradient. So each micro-batch must reach each of them.
        """
        trained = [parameter for parameter in self.tower.parameters() if parameter.requires_grad]
        if not (trained and torch.is_grad_enabled()):
            return hidden
        return hidden + 0.0 * torch.stack([parameter.flatten()[0] for parameter in trained]).sum().to(hidden.dtype)

    def _deepen(self, number: int, output: Any) -> Any:
        if number >= len(self._added):
            return output
        hidden, *extras = output
        return hidden + self._added[number], *extras

    def _features(self, images: Sequence[Image]) -> Features:
        """Return the features of all images, concatenated."""
        if not self.keeps_outputs:
            return self._encode(images)
        with torch.no_grad():
            # One by one: the last bits of cached features must not depend on which other images are in the batch.
            encoded = [self._kept.get(image.key) or self._encode([image]) for image in images]
        for image, features in zip(images, encoded, strict=True):
            self._keep(image.key, features)
        return [torch.cat(parts) for parts in zip(*encoded, strict=True)]

    def _keep(self, key: str, features: Features) -> None:
        self._kept[key] = features
        self._kept.move_to_end(key)
        while sum(tensor.nbytes for cached in self._kept.values() for tensor in cached) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def _encode(self, images: Sequence[Image]) -> Features:
        first = next(self.tower.parameters())
        patches = torch.from_numpy(np.concatenate([image.patches() for image in images]))
        grids = torch.tensor([image.grid for image in images], dtype=torch.int64)
        output = self.tower(patches.to(first.device, first.dtype), grid_thw=grids.to(first.device))
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        expected = sum(map(num_tokens, images))
        if any(len(tensor) != expected for tensor in features):
            raise ValueError(f"the vision tower returned {[len(tensor) for tensor in features]} tokens for images of {expected} tokens")
        return features
