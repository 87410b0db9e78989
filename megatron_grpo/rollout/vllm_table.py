"""Where each pushed tensor belongs in a vLLM engine: a table that is learnt from one reload by vLLM itself, and followed from then on.

vLLM finds out for every tensor anew which part of which weight it becomes: 0.1 ms of Python and more for each. The answer never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_grpo.rollout.engine import WeightSyncError

Named = Iterable[tuple[str, torch.Tensor]]
Pack = Callable[[torch.nn.Module], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A view of a tensor; stride and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor, whole: torch.Tensor) -> Place:
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - whole.storage_offset()))

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor looks like without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a pushed tensor becomes a part of a weight."""

    unit: int  # number of the unit
    weight: str  # of that unit
    to: Place
    part: Place | None  # of the pushed tensor, laid out without gaps; None: all of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """Weights of one module that are complete together."""

    module: torch.nn.Module
    loaded: dict[str, Form]  # by name: as they are loaded
    live: dict[str, Form]  # as the engine keeps them
    packed: frozenset[str]  # those that it keeps in another form, which is made when all of them are there
    padding: list[tuple[str, Place, float]]
    num_copies: int

    def targets(self) -> dict[str, torch.Tensor]:
        """Where copies go: the engine's own memory; for what is packed, memory until then."""
        found = {}
        for name, form in self.loaded.items():
            live = getattr(self.module, name).data
            fresh = name in self.packed
            found[name] = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=live.device) if fresh else live
        for name, place, value in self.padding:
            place.within(found[name]).fill_(value)
        return found

    def finish(self, targets: dict[str, torch.Tensor], pack: Pack) -> None:
        for name in self.packed:
            setattr(self.module, name, torch.nn.Parameter(targets[name], requires_grad=False))
        if self.packed:
            pack(self.module)

    def is_as_learnt(self) -> bool:
        return all(Form.of(getattr(self.module, name)) == form for name, form in self.live.items())


@dataclass(slots=True)
class Table:
    """By names of pushed tensors: their shapes, and the copies to make of them; none where vLLM has no use for one."""

    units: list[Unit] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, list[Copy]] = field(default_factory=dict)

    def is_as_learnt(self) -> bool:
        """Whether the engine's weights look as they did. They may lie elsewhere: where is asked at every push."""
        return all(unit.is_as_learnt() for unit in self.units)

    def load(self, named: Named, pack: Pack) -> list[str]:
        """Returns the names that did not come. Holds no tensor; but of weights that are packed those of one unit, if they come in order.

        pack: called with the module of a unit whose packed weights are there. Raises WeightSyncError at a tensor that the table does not
        know, or knows in another shape, or that comes again.
        """
        awaited = dict.fromkeys(self.copies)
        targets, left = dict[int, dict[str, torch.Tensor]](), dict[int, int]()
        for name, tensor in named:
            if name not in awaited or tuple(tensor.shape) != self.shapes[name]:
                raise WeightSyncError(self._stranger(name, tensor))
            del awaited[name]
            for copy in self.copies[name]:
                number, unit = copy.unit, self.units[copy.unit]
                if number not in targets:
                    targets[number], left[number] = unit.targets(), unit.num_copies
                part = tensor if copy.part is None else copy.part.within(tensor.contiguous())
                copy.to.within(targets[number][copy.weight]).copy_(part)
                left[number] -= 1
                if not left[number]:
                    unit.finish(targets.pop(number), pack)
        return sorted(name for name in awaited if self.copies[name])

    def _stranger(self, name: str, tensor: torch.Tensor) -> str:
        if name not in self.copies:
            return f"{name} was pushed to the rollout engine, but is not among the {len(self.copies)} weights of its first push."
        if tuple(tensor.shape) != self.shapes[name]:
            return f"{name} was pushed with shape {list(tensor.shape)}; at the first push it had {list(self.shapes[name])}."
        return f"{name} was pushed to the rollout engine twice in one push."
