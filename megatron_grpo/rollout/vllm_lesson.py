"""How the table of `vllm_table` is made: one layer-wise reload by vLLM is watched, and what was seen is tried on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.rollout import vllm_patches
from megatron_grpo.rollout.vllm_table import Copy, Form, Named, Pack, Place, Table, Unit

# vLLM's methods that keep a weight as it comes, or pack it for a CPU without losing a bit.
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@dataclass(slots=True)
class _Seen:
    """What went into one weight, each once: vLLM loads some twice."""

    form: Form
    copies: dict[tuple[str, Place, Place | None], None] = field(default_factory=dict)  # (name, to, part)
    padding: dict[tuple[Place, float], None] = field(default_factory=dict)

    def covers_all_once(self) -> bool:
        length = 1 + sum((size - 1) * step for size, step in zip(self.form.shape, self.form.stride, strict=True))
        times = torch.zeros(length, dtype=torch.uint8)
        for place in [*(to for _, to, _ in self.copies), *(to for to, _ in self.padding)]:
            place.within(times).add_(1)
        return bool((times.as_strided(self.form.shape, self.form.stride) == 1).all())


class Lesson(TorchDispatchMode):
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
        self._parts: dict[int, tuple[str, Place, Form]] = {}
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
            self._parts[_address(result)] = name, Place.of(args[0], self._clones[name]), Form.of(result)
        elif function is torch.ops.aten.zero_.default and (name := self._names.get(_address(args[0]))) in self._clones:
            self._zeroed.add(name)
        return result

    def _note(self, to: torch.Tensor, what: torch.Tensor | float) -> None:
        loading = {_address(tensor): (self._layer, weight, tensor) for weight, tensor in own_tensors(self._layer).items()}
        module, weight, whole = loading.get(_address(to)) or self._kept.get(_address(to)) or (None, "", to)
        if module is None or not whole.numel():
            return
        seen = self._seen.setdefault((module, weight), _Seen(Form.of(whole)))
        if not isinstance(what, torch.Tensor):
            seen.padding[Place.of(to, whole), what] = None
        elif (name := self._names.get(_address(what))) in self._zeroed:
            seen.padding[Place.of(to, whole), 0.0] = None
        elif name in self._clones:
            clone = self._clones[name]
            part = None if Form.of(what) == Form.of(clone) else Place.of(what, clone)
            seen.copies[name, Place.of(to, whole), part] = None
        elif (found := self._parts.get(_address(what))) is not None and found[0] in self._clones and found[2] == Form.of(what):
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
        live = {weight: Form.of(getattr(module, weight)) for weight in found}
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
            and all(Form.of(now[name]) == Form.of(kept) and same_bits(now[name], kept) for name, (_, kept) in self.tensors.items())
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
