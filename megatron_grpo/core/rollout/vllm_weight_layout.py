"""Table of where each synced tensor belongs in a vLLM engine, learned from one reload by vLLM itself and used from then on.

For every tensor of every sync, vLLM determines which part of which weight it becomes: 0.1 ms of Python and more for each. The result never
changes. So one layer-wise reload by vLLM is observed (`WeightLayoutRecorder`), and the resulting table is tested at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.core.rollout import vllm_patches
from megatron_grpo.core.rollout.engine import WeightSyncError
from megatron_grpo.core.weights.buckets import TensorSlice, joined

Named = Iterable[tuple[str, torch.Tensor]]
Pack = Callable[[torch.nn.Module], None]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A view of a tensor; stride and offset in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_view(cls, view: torch.Tensor, base: torch.Tensor) -> TensorView:
        """Return the location of `view` in the storage of `base`.

        Args:
            view: View of a part of `base`.
        """
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - base.storage_offset()))

    def within(self, base: torch.Tensor) -> torch.Tensor:
        """Return the view at this location of `base`."""
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape, stride and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorLayout:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One copy: part of a synced tensor to part of a weight.

    Args:
        unit: Index of the unit in the table.
        weight: Name of the weight in that unit.
        part: Part of the synced tensor, made contiguous; None: all of it.
    """

    unit: int
    weight: str
    to: TensorView
    part: TensorView | None

    def start(self, shape: tuple[int, ...]) -> list[int] | None:
        """Return the index at which the part begins in the synced tensor; None if its axes are not those of the tensor.

        Args:
            shape: Shape of the synced tensor.
        """
        if self.part is None:
            return [0] * len(shape) if self.to.shape == shape else None
        indices, offset, steps = [], self.part.offset, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        for step in steps:
            first, offset = divmod(offset, step)
            indices.append(first)
        return indices if list(self.part.stride) == steps and self.to.shape == self.part.shape else None

    def copy_slice(self, tensor: TensorSlice, to: torch.Tensor) -> None:
        """Copy what a slice of the synced tensor has of the part."""
        starts = self.start(tensor.shape)
        assert starts is not None
        there, here = [], []
        for start, first, size, length in zip(starts, tensor.start, tensor.part.shape, to.shape, strict=True):
            begin, end = max(start, first), min(start + length, first + size)
            if begin >= end:
                return
            there.append(slice(begin - start, end - start))
            here.append(slice(begin - first, end - first))
        to[tuple(there)] = tensor.part[tuple(here)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleWeights:
    """Weights of one module that are complete together.

    Args:
        loaded: Form in which weights are loaded, by name.
        live: Form in which the engine keeps them.
        packed: Weights that it keeps in another form, made when all of them have arrived.
    """

    module: torch.nn.Module
    loaded: dict[str, TensorLayout]
    live: dict[str, TensorLayout]
    packed: frozenset[str]
    padding: list[tuple[str, TensorView, float]]
    num_copies: int

    def targets(self) -> dict[str, torch.Tensor]:
        """Return the destinations of copies: the engine's memory; for packed weights, temporary memory."""
        targets = {}
        for name, form in self.loaded.items():
            live = getattr(self.module, name).data
            fresh = name in self.packed
            targets[name] = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=live.device) if fresh else live
        for name, region, value in self.padding:
            region.within(targets[name]).fill_(value)
        return targets

    def finish(self, targets: dict[str, torch.Tensor], pack: Pack) -> None:
        """Install and pack the packed weights, once all copies of the unit are done.

        Args:
            targets: Result of `targets`.
        """
        for name in self.packed:
            setattr(self.module, name, torch.nn.Parameter(targets[name], requires_grad=False))
        if self.packed:
            pack(self.module)

    def is_as_learnt(self) -> bool:
        """Return whether the engine's weights have the recorded forms."""
        return all(TensorLayout.from_tensor(getattr(self.module, name)) == form for name, form in self.live.items())


@dataclass(slots=True)
class CopyRecord:
    """Copies of a sync, by names of synced tensors: their shapes, and the copies to make of them; none where vLLM does not use a tensor."""

    units: list[ModuleWeights] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, list[TensorCopy]] = field(default_factory=dict)

    def is_as_learnt(self) -> bool:
        """Return whether the engine's weights have the recorded forms. Their addresses may change: they are read at every weight sync."""
        return all(unit.is_as_learnt() for unit in self.units)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]], pack: Pack) -> list[str]:
        """Copy synced tensors into the engine; return the names that did not arrive.

        Holds no tensor, except those of one unit with packed weights if tensors arrive in order.

        Args:
            pack: Packs a module; called for a unit with packed weights when they have arrived.

        Raises:
            WeightSyncError: A tensor is not in the table, has another shape, or arrives twice.
        """
        awaited = {name: math.prod(shape) for name, shape in self.shapes.items()}  # elements
        targets, copies_left = dict[int, dict[str, torch.Tensor]](), dict[int, int]()
        for name, tensor in joined(tensors, unless=self._is_sliceable):
            if name not in awaited or tuple(tensor.shape) != self.shapes[name]:
                raise WeightSyncError(self._unknown_weight(name, tensor))
            is_slice = isinstance(tensor, TensorSlice)
            awaited[name] -= tensor.part.numel() if is_slice else awaited[name]
            is_complete = not awaited[name]
            if is_complete:
                del awaited[name]
            for copy in self.copies[name]:
                number, unit = copy.unit, self.units[copy.unit]
                if number not in targets:
                    targets[number], copies_left[number] = unit.targets(), unit.num_copies
                to = copy.to.within(targets[number][copy.weight])
                if is_slice:
                    copy.copy_slice(tensor, to)
                else:
                    to.copy_(tensor if copy.part is None else copy.part.within(tensor.contiguous()))
                copies_left[number] -= is_complete
                if not copies_left[number]:
                    unit.finish(targets.pop(number), pack)
        return sorted(name for name in awaited if self.copies[name])

    def _is_sliceable(self, name: str) -> bool:
        """Return whether a slice of a tensor can be copied without the others."""
        return all(copy.start(self.shapes[name]) is not None for copy in self.copies.get(name, ()))

    def _unknown_weight(self, name: str, tensor: torch.Tensor | TensorSlice) -> str:
        if name not in self.copies:
            return f"{name} was sent to the rollout engine, but is not among the {len(self.copies)} weights of its first update."
        if tuple(tensor.shape) != self.shapes[name]:
            return f"{name} was sent with shape {list(tensor.shape)}; in the first update it had {list(self.shapes[name])}."
        return f"{name} was sent to the rollout engine twice in one update."


# ---- how the table is learned --------------------------------------------------------------------------------------------------------


# vLLM's methods that keep a weight unchanged, or pack it for a CPU without losing a bit.
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@dataclass(slots=True)
class _CopiesOfWeight:
    """Copies into one weight without duplicates, because vLLM loads some twice."""

    form: TensorLayout
    copies: dict[tuple[str, TensorView, TensorView | None], None] = field(default_factory=dict)  # (name, to, part)
    padding: dict[tuple[TensorView, float], None] = field(default_factory=dict)

    def covers_all_once(self) -> bool:
        """Return whether every element of the weight is written exactly once."""
        length = 1 + sum((size - 1) * step for size, step in zip(self.form.shape, self.form.stride, strict=True))
        times = torch.zeros(length, dtype=torch.uint8)
        for region in [*(target for _, target, _ in self.copies), *(target for target, _ in self.padding)]:
            region.within(times).add_(1)
        return bool((times.as_strided(self.form.shape, self.form.stride) == 1).all())


class WeightLayoutRecorder(TorchDispatchMode):
    """Recorder of the copies into the engine's weights, while it is the current dispatch mode.

    Every synced tensor is cloned, so that the source address of a copy identifies its name. The clones of a layer are dropped once its
    copies have been tested.
    """

    def __init__(self, model: torch.nn.Module, pack: Pack):
        super().__init__()
        self.packed: set[torch.nn.Module] = set()  # modules whose experts are packed already
        self._pack, self._table, self._reason, self._is_trying = pack, CopyRecord(), "", False
        self._paths = {module: path for path, module in model.named_modules()}
        weights_of_modules = [(module, weight, tensor) for module in model.modules() for weight, tensor in own_tensors(module).items()]
        self._kept = {
            _address(tensor): (module, weight, tensor) for module, weight, tensor in reversed(weights_of_modules)
        }  # tied: the embedding's
        self._clones: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}  # by address of a clone
        # Clones made by vLLM: name, part of our clone, form. An address may have been reused since; the test would detect it.
        self._parts: dict[int, tuple[str, TensorView, TensorLayout]] = {}
        self._zeroed: set[str] = set()  # tensors that vLLM zeroes on this rank
        self._layer: torch.nn.Module | None = None  # layer that vLLM is loading
        self._records: dict[tuple[torch.nn.Module, str], _CopiesOfWeight] = {}

    def record_names(self, tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield clones of the synced tensors, and record their names and shapes."""
        for name, tensor in tensors:
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
            self._parts[_address(result)] = name, TensorView.from_view(args[0], self._clones[name]), TensorLayout.from_tensor(result)
        elif function is torch.ops.aten.zero_.default and (name := self._names.get(_address(args[0]))) in self._clones:
            self._zeroed.add(name)
        return result

    def _note(self, target: torch.Tensor, source: torch.Tensor | float) -> None:
        loading = {_address(tensor): (self._layer, weight, tensor) for weight, tensor in own_tensors(self._layer).items()}
        module, weight, base = loading.get(_address(target)) or self._kept.get(_address(target)) or (None, "", target)
        if module is None or not base.numel():
            return
        record = self._records.setdefault((module, weight), _CopiesOfWeight(TensorLayout.from_tensor(base)))
        if not isinstance(source, torch.Tensor):
            record.padding[TensorView.from_view(target, base), source] = None
        elif (name := self._names.get(_address(source))) in self._zeroed:
            record.padding[TensorView.from_view(target, base), 0.0] = None
        elif name in self._clones:
            clone = self._clones[name]
            part = None if TensorLayout.from_tensor(source) == TensorLayout.from_tensor(clone) else TensorView.from_view(source, clone)
            record.copies[name, TensorView.from_view(target, base), part] = None
        elif (
            (cloned := self._parts.get(_address(source))) is not None
            and cloned[0] in self._clones
            and cloned[2] == TensorLayout.from_tensor(source)
        ):
            record.copies[cloned[0], TensorView.from_view(target, base), cloned[1]] = None

    def layer(self, load: Callable[..., None], module: torch.nn.Module, info: Any) -> None:
        """Load a layer in place of vLLM's `load(module, info)` when all its tensors have arrived, and test its copies."""
        weights = {weight for weight, _ in info.loaded_weights}
        self._layer = module
        load(module, info)
        self._layer = None
        if vllm_patches.has_cpu_experts(module):
            self._pack(module)
            self.packed.add(module)
        self._reason = self._reason or self._add(module, weights)

    def outcome(self) -> tuple[CopyRecord | None, str | None]:
        """Return (table, None), or (None, the reason why there is none)."""
        for module, weight in [
            key for key, record in self._records.items() if record.copies
        ]:  # weights that vLLM loads apart from their layer
            self._reason = self._reason or self._add(module, {weight})
        return (None, self._reason) if self._reason else (self._table, None)

    def _add(self, module: torch.nn.Module, weights: set[str]) -> str:
        """Add a unit of these weights to the table; return the reason against it, or ""."""
        path, method = self._paths[module], getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN:
            return f"{path} is loaded by vLLM's {type(method).__name__}"
        records_here = {weight: record for weight in sorted(weights) if (record := self._records.pop((module, weight), None)) is not None}
        for weight in sorted(weights):
            if weight not in records_here or not records_here[weight].covers_all_once():
                return f"the source of each part of {path}.{weight} is unknown"
        names = {name for record in records_here.values() for name, _, _ in record.copies}
        if unknown := names - self._clones.keys():
            return f"{min(unknown)} is copied to {path} and to another layer"
        live = {weight: TensorLayout.from_tensor(getattr(module, weight)) for weight in records_here}
        packed_names = vllm_patches.PACKED_OF_EXPERTS if module in self.packed else ()
        unit = ModuleWeights(
            module=module, loaded={weight: record.form for weight, record in records_here.items()}, live=live,
            packed=frozenset(weight for weight, record in records_here.items() if weight in packed_names or live[weight] !=
            record.form), padding=[(weight, to, value) for weight, record in records_here.items() for to, value in record.padding],
            num_copies=sum(len(record.copies) for record in records_here.values()),
        )  # fmt: skip
        if unit.packed and torch.cuda.is_available():  # packing makes new memory: CUDA graphs would read the old
            return f"{path} keeps its weights in another form than it loads them, which needs new memory"
        for weight, record in records_here.items():
            for name, to, part in record.copies:
                self._table.copies[name].append(TensorCopy(len(self._table.units), weight, to, part))
        self._table.units.append(unit)
        return "" if self._try(unit, names) else f"{path} differs when it is loaded without vLLM"

    def _try(self, unit: ModuleWeights, names: set[str]) -> bool:
        bits, self._is_trying = SavedTensors(unit), True
        for weight in unit.loaded.keys() - unit.packed:
            getattr(unit.module, weight).data.fill_(float("nan"))
        self._table.load([(name, self._clones.pop(name)) for name in sorted(names)], self._pack)
        is_same = bits.is_unchanged(unit)
        if not is_same:
            bits.put_back(unit)
        self._is_trying = False
        return is_same


class SavedTensors:
    """Copy of all tensors of a unit's module."""

    def __init__(self, unit: ModuleWeights):
        self.tensors = {name: (tensor, tensor.detach().clone()) for name, tensor in own_tensors(unit.module).items()}
        self.linear = getattr(unit.module, "cpu_linear", None)
        self.answer = self._answer(unit)

    def is_unchanged(self, unit: ModuleWeights) -> bool:
        """Return whether the module still holds the same bits."""
        current = own_tensors(unit.module)
        return (
            current.keys() == self.tensors.keys()
            and all(
                TensorLayout.from_tensor(current[name]) == TensorLayout.from_tensor(saved) and is_bitwise_equal(current[name], saved)
                for name, (_, saved) in self.tensors.items()
            )
            and is_bitwise_equal(self.answer, self._answer(unit))
        )

    def put_back(self, unit: ModuleWeights) -> None:
        """Restore the module."""
        for name, (tensor, saved) in self.tensors.items():
            setattr(unit.module, name, tensor)
            tensor.data.copy_(saved)
        if self.linear is not None:
            unit.module.cpu_linear = self.linear

    def _answer(self, unit: ModuleWeights) -> torch.Tensor:
        """Return a linear layer's output for fixed inputs, where a CPU keeps its packed weight hidden."""
        linear: Any = getattr(unit.module, "cpu_linear", None)  # a packed convolution has none, and its weight is not hidden
        if "weight" not in unit.packed or linear is None:
            return torch.empty(0)
        form = unit.loaded["weight"]
        numbers = torch.arange(4 * form.shape[-1]).cos().view(4, -1).to(form.dtype)
        return linear(numbers, unit.module.weight, None)


def own_tensors(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module without those of its children, by name; empty for None."""
    if module is None:
        return {}
    return {name: tensor for name, tensor in [*module._parameters.items(), *module._buffers.items()] if tensor is not None}


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def is_bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and bits.

    Args:
        second: Second tensor.
    """
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
    )
