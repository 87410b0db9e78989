"""What a vision tower takes of the first pipeline stage, and how many layers fewer that stage should hold. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import Activations
from megatron_grpo.planning.tuning import Tuning
from megatron_grpo.weights.names import tower_entries
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import VisionShape
from megatron_grpo.weights.trains import trains_tower

PER_PATCH = 34  # channels a patch and layer, in widths of the tower: what its backward needs (attention without scores, two norms, an MLP)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerPlan:
    """Bytes on a rank of the first stage."""

    patches: int  # of one micro-batch
    activations: Activations
    trains: bool


def tower_plan(shape: ModelShape, cfg: Config, tuning: Tuning, picture_tokens: int) -> TowerPlan | None:
    """None for a model that does not see. picture_tokens: of one micro-batch."""
    vision = shape.vision
    if vision is None:
        return None
    trains = any(map(tuning.trains_outer, tower_entries(shape)))
    patches = picture_tokens * vision.merge**2
    layer = patches * vision.width * tuning.size * PER_PATCH
    return TowerPlan(
        patches=patches, trains=trains, activations=Activations(training=_kept(vision, cfg, tuning, patches, layer, trains), forward=layer)
    )


def _kept(vision: VisionShape, cfg: Config, tuning: Tuning, patches: int, layer: int, trains: bool) -> int:
    """A frozen tower works layer by layer. A trained one keeps what each layer reads, and one layer while it is computed again; or all."""
    if not trains:
        return layer
    if not cfg.model.vit_gradient_checkpointing:
        return vision.depth * layer
    return vision.depth * patches * vision.width * tuning.size + layer


def with_tower(found: Activations, tower: Activations, in_flight: int) -> Activations:
    """in_flight: micro-batches of which the first stage keeps what the backward needs."""
    return Activations(training=found.training + tower.training * in_flight, forward=found.forward + tower.forward)


def learns_nothing(cfg: Config, shape: ModelShape) -> Iterator[str]:
    """What to say of a data set that shows no picture."""
    if trains_tower(cfg.tuner, shape):
        thawed = " and ".join(f"{name} false" for name in ("freeze_vit", "freeze_aligner") if not getattr(cfg.tuner, name))
        yield (
            f"no prompt of {cfg.data.dataset} shows a picture, so the vision tower ({thawed or 'trainable_parameters'}) learns nothing: "
            "its gradient is zero, and it has the memory of what trains."
        )


def fewer_layers(shape: ModelShape, sizes: BatchSizes, cfg: Config, rows: Sequence[Mapping[str, Any]], tower_bytes: int) -> dict[str, Any]:
    """By how many layers a tower of so many bytes outweighs the first stage. rows: of each stage, what it holds.

    Stages hold alike where the first has `layers` fewer than the others; `first` is the nearest `decoder_first_pipeline_num_layers` that
    comes out even, None where there is no other stage, or no layer to give away.
    """
    own = rows[0]
    of_layers = sum(own[name] for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")) - tower_bytes
    layers = tower_bytes / max(of_layers / max(own["num_layers"], 1), 1)
    pp, chunks = sizes.layout.pp, sizes.layout.num_chunks
    least = (shape.vision.num_deepstack if shape.vision else 0) or 1
    legal = [
        first
        for first in range(least * chunks, shape.num_layers)
        if first % chunks == 0 and pp > 1 and (shape.num_layers - first) % ((pp - 1) * chunks) == 0 and first < shape.num_layers
    ]
    even = (shape.num_layers - layers * (pp - 1)) / pp  # where first + layers is what each of the others holds
    return {"layers": round(layers, 1), "first": min(legal, key=lambda first: abs(first - even), default=None)}
