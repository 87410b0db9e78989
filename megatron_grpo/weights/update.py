"""What a push of weights carries: the policy makes it, a `WeightHolder` takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


NO_VERSION = -1  # of an update that makes no version by itself: a base before its adapter, a trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """What a holder takes at once. `tensors` yields (Hugging Face name, full tensor), is consumed once, and may be collective.

    A tensor stays as it is until the stream ends; who keeps one longer clones it.
    """

    kind: Literal["weights", "merged", "adapter"]  # all weights; all weights with an adapter added in; an adapter alone
    version: int  # what the holder has when it has taken this; or NO_VERSION
    tensors: Iterable[tuple[str, torch.Tensor]]
    config: Mapping[str, Any] = field(default_factory=dict)  # of an adapter, as PEFT writes it
    moves_tower: bool = False  # the weights that see pictures are among them, so what was made of pictures is stale
