"""Where each pushed tensor belongs in a vLLM engine: a table that is learnt from one reload by vLLM itself, and followed from then on.

vLLM finds out for every tensor anew which part of which weight it becomes: 0.1 ms of Python and more for each. The answer never changes.
So one layer-wise reload by vLLM is watched (`WeightLayoutRecorder`), and what was seen is tried on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.rollout import vllm_patches
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
class TensorForm:
    """What a tensor looks like without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
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
    loaded: dict[str, TensorForm]  # by name: as they are loaded
    live: dict[str, TensorForm]  # as the engine keeps them
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
        return all(TensorForm.of(getattr(self.module, name)) == form for name, form in self.live.items())


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


# ---- how it is learnt ----------------------------------------------------------------------------------------------------------------


# vLLM's methods that keep a weight as it comes, or pack it for a CPU without losing a bit.
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@dataclass(slots=True)
class _Seen:
    """What went into one weight, each once: vLLM loads some twice."""

    form: TensorForm
    copies: dict[tuple[str, Place, Place | None], None] = field(default_factory=dict)  # (name, to, part)
    padding: dict[tuple[Place, float], None] = field(default_factory=dict)

    def covers_all_once(self) -> bool:
        length = 1 + sum((size - 1) * step for size, step in zip(self.form.shape, self.form.stride, strict=True))
        times = torch.zeros(length, dtype=torch.uint8)
        for place in [*(to for _, to, _ in self.copies), *(to for to, _ in self.padding)]:
            place.within(times).add_(1)
        return bool((times.as_strided(self.form.shape, self.form.stride) == 1).all())


class WeightLayoutRecorder(TorchDispatchMode):
    """Watches what is copied into the engine's weights while it is the current mode.

    Every pushed tensor is cloned, so that a copy from its memory tells its name. The clones of a layer are dropped when it has been tried.
    """

    def __init__(self, model: torch.nn.Module, pack: Pack):
        super().__init__()
        self.packed: set[torch.nn.Module] = set()  # whose experts need no packing any more
        self._pack, self._table, self._reason, self._is_trying = pack, Table(), "", False
        self._paths = {module: path for path, module in model.named_modules()}
        kept = [(module, weight, tensor) for module in model.modules() for weight, tensor in own_tensors(module).items()]
        self._kept = {_address(tensor): (module, weight, tensor) for module, weight, tensor in reversed(kept)}  # tied: the embedding's
        self._clones: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # by address of a clone
        # Of what vLLM has laid out anew: name, part of the clone, form. An address may be of something else by now; the trial would tell.
        self._parts: dict[int, tuple[str, Place, TensorForm]] = {}
        self._zeroed: set[str] = set()  # which vLLM does not take on this rank
        self._layer: torch.nn.Module | None = None  # which vLLM is loading
        self._seen: dict[tuple[torch.nn.Module, str], _Seen] = {}

    def heard(self, named: Named) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            clone = tensor.clone(memory_format=torch.contiguous_format)
            self._table.shapes[name], self._table.copies[name] = tuple(tensor.shape), []
            self._clones[name], self._names[_address(clone)] = clone, name
            yield name, clone

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._is_trying:
            return result
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar):
            self._note(args[0], args[1])
        elif function is torch.ops.aten.clone.default and (name := self._names.get(_address(args[0]))) in self._clones:
            self._parts[_address(result)] = name, Place.of(args[0], self._clones[name]), TensorForm.of(result)
        elif function is torch.ops.aten.zero_.default and (name := self._names.get(_address(args[0]))) in self._clones:
            self._zeroed.add(name)
        return result

    def _note(self, to: torch.Tensor, what: torch.Tensor | float) -> None:
        loading = {_address(tensor): (self._layer, weight, tensor) for weight, tensor in own_tensors(self._layer).items()}
        module, weight, whole = loading.get(_address(to)) or self._kept.get(_address(to)) or (None, "", to)
        if module is None or not whole.numel():
            return
        seen = self._seen.setdefault((module, weight), _Seen(TensorForm.of(whole)))
        if not isinstance(what, torch.Tensor):
            seen.padding[Place.of(to, whole), what] = None
        elif (name := self._names.get(_address(what))) in self._zeroed:
            seen.padding[Place.of(to, whole), 0.0] = None
        elif name in self._clones:
            clone = self._clones[name]
            part = None if TensorForm.of(what) == TensorForm.of(clone) else Place.of(what, clone)
            seen.copies[name, Place.of(to, whole), part] = None
        elif (found := self._parts.get(_address(what))) is not None and found[0] in self._clones and found[2] == TensorForm.of(what):
            seen.copies[found[0], Place.of(to, whole), found[1]] = None

    def layer(self, load: Callable[..., None], module: torch.nn.Module, info: Any) -> None:
        """In place of vLLM's `load(module, info)`, which loads a layer when all its tensors have come."""
        weights = {weight for weight, _ in info.loaded_weights}
        self._layer = module
        load(module, info)
        self._layer = None
        if vllm_patches.has_cpu_experts(module):
            self._pack(module)
            self.packed.add(module)
        self._reason = self._reason or self._add(module, weights)

    def outcome(self) -> tuple[Table | None, str | None]:
        """The table, or why there is none."""
        for module, weight in [key for key, seen in self._seen.items() if seen.copies]:  # what vLLM loads apart from its layer
            self._reason = self._reason or self._add(module, {weight})
        return (None, self._reason) if self._reason else (self._table, None)

    def _add(self, module: torch.nn.Module, weights: set[str]) -> str:
        """A unit of these weights; returns what speaks against it."""
        path, method = self._paths[module], getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN:
            return f"{path} is loaded by vLLM's {type(method).__name__}"
        found = {weight: seen for weight in sorted(weights) if (seen := self._seen.pop((module, weight), None)) is not None}
        for weight in sorted(weights):
            if weight not in found or not found[weight].covers_all_once():
                return f"it was not seen where each part of {path}.{weight} comes from"
        names = {name for seen in found.values() for name, _, _ in seen.copies}
        if lost := names - self._clones.keys():
            return f"{min(lost)} becomes a part of {path} and of another layer"
        live = {weight: TensorForm.of(getattr(module, weight)) for weight in found}
        unit = Unit(
            module=module, loaded={weight: seen.form for weight, seen in found.items()}, live=live,
            packed=frozenset(weight for weight, seen in found.items() if self._is_packed(module, weight) or live[weight] != seen.form),
            padding=[(weight, to, value) for weight, seen in found.items() for to, value in seen.padding],
            num_copies=sum(len(seen.copies) for seen in found.values()),
        )  # fmt: skip
        for weight, seen in found.items():
            for name, to, part in seen.copies:
                self._table.copies[name].append(Copy(len(self._table.units), weight, to, part))
        self._table.units.append(unit)
        return "" if self._try(unit, names) else f"{path} has other bits when it is loaded without vLLM"

    def _is_packed(self, module: torch.nn.Module, weight: str) -> bool:
        return module in self.packed and weight in vllm_patches.PACKED_OF_EXPERTS

    def _try(self, unit: Unit, names: set[str]) -> bool:
        before, self._is_trying = Bits(unit), True
        for weight in unit.loaded.keys() - unit.packed:
            getattr(unit.module, weight).data.fill_(float("nan"))
        self._table.load([(name, self._clones.pop(name)) for name in sorted(names)], self._pack)
        is_same = before.are_those_of(unit)
        if not is_same:
            before.put_back(unit)
        self._is_trying = False
        return is_same


class Bits:
    """All that the module of a unit holds."""

    def __init__(self, unit: Unit):
        self.tensors = {name: (tensor, tensor.detach().clone()) for name, tensor in own_tensors(unit.module).items()}
        self.linear = getattr(unit.module, "cpu_linear", None)
        self.answer = self._answer(unit)

    def are_those_of(self, unit: Unit) -> bool:
        now = own_tensors(unit.module)
        return (
            now.keys() == self.tensors.keys()
            and all(
                TensorForm.of(now[name]) == TensorForm.of(kept) and same_bits(now[name], kept) for name, (_, kept) in self.tensors.items()
            )
            and same_bits(self.answer, self._answer(unit))
        )

    def put_back(self, unit: Unit) -> None:
        for name, (tensor, kept) in self.tensors.items():
            setattr(unit.module, name, tensor)
            tensor.data.copy_(kept)
        if self.linear is not None:
            unit.module.cpu_linear = self.linear

    def _answer(self, unit: Unit) -> torch.Tensor:
        """What a linear layer makes of some numbers, where a CPU keeps its weight out of sight."""
        if "weight" not in unit.packed or not hasattr(unit.module, "cpu_linear"):
            return torch.empty(0)
        form = unit.loaded["weight"]
        numbers = torch.arange(4 * form.shape[-1]).cos().view(4, -1).to(form.dtype)
        linear: Any = unit.module.cpu_linear
        return linear(numbers, unit.module.weight, None)


def own_tensors(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module without those of its children."""
    if module is None:
        return {}
    return {name: tensor for name, tensor in [*module._parameters.items(), *module._buffers.items()] if tensor is not None}


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
    )
