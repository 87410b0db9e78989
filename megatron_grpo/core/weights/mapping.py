"""Exact conversion of tensors from the Hugging Face layout to one rank's Megatron shards, and back.

Uses the shape of the model and plain integers. The caller knows which ranks hold the shards, and in which order layers and experts are
placed on them: names here carry *global* layer and expert numbers (`with_global_numbers` translates).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron_grpo.core.base.errors import ConfigError, config_error, problem_with
from megatron_grpo.core.weights.buckets import TensorSlice
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.hf_files import stored_name
from megatron_grpo.core.weights.names import (
    NAMINGS,
    ShardSplit,
    TensorFusion,
    WeightEntry,
    grouped_experts,
    hf_shapes,
    layer_entries,
    outer_entries,
)
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import DeltaNetShape, LayerKind
from megatron_grpo.core.weights.vision_towers import MEGATRON

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.local_experts\.|mlp\.experts\.linear_fc[12]\.(?:weight|lora_a|lora_b))(\d+)(.*)")
_ADAPTER = re.compile(r"\.lora_[ab]\d*$")
_UNTRAINED = re.compile(r".*\.rotary_emb\.inv_freq")  # a buffer that old checkpoints carry


def with_global_numbers(name: str, *, first_layer: int = 0, first_expert: int = 0) -> str:
    """Return the model-wide name of a parameter from its name in this rank's module. Numbers count from 0.

    Args:
        first_layer: Global number of the module's first layer.
        first_expert: Global number of the rank's first expert.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    suffix = _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}{m[3]}", match[2])
    return f"decoder.layers.{int(match[1]) + first_layer}.{suffix}"


def is_of_adapter(name: str) -> bool:
    """Return whether the Megatron parameter `name` is an adapter matrix. All other parameters belong to the base model."""
    return _ADAPTER.search(name) is not None


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Mapping between the Hugging Face and Megatron parameters of one model. Built by `for_shape`.

    Args:
        padded_vocab_size: Rows of the padded vocabulary.
    """

    shape: ModelShape
    padded_vocab_size: int
    outer: dict[str, WeightEntry]
    layers: dict[LayerKind, dict[str, WeightEntry]]
    _located: dict[str, tuple[WeightEntry, str, int]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def for_shape(cls, shape: ModelShape, *, padded_vocab_size: int, naming: str = "local") -> WeightMap:
        """Build the mapping of a model.

        Args:
            naming: A key of `names.NAMINGS`. With Transformer Engine's, experts are in a TEGroupedMLP.

        Raises:
            ConfigError: `padded_vocab_size` is less than the vocabulary size.
        """
        if padded_vocab_size < shape.vocab_size:
            raise ConfigError(f"padded_vocab_size ({padded_vocab_size}) is less than the model's vocabulary ({shape.vocab_size}).")
        rename, layers = NAMINGS[naming], {}
        for kind in set(map(shape.find_layer_kind, range(shape.num_layers))):
            entries = [rename(entry, shape=shape, moe=kind.moe) for entry in layer_entries(shape, kind)]
            entries = [grouped_experts(entry) for entry in entries] if naming == "transformer_engine" else entries
            layers[kind] = {entry.megatron: entry for entry in entries}
        return cls(shape, padded_vocab_size, {entry.megatron: entry for entry in outer_entries(shape)}, layers)

    def megatron_names(self) -> Iterator[str]:
        """Yield every parameter and buffer of the whole model on one rank, with global numbers.

        `output_layer.weight` is included even where embeddings are tied.
        """
        yield from self.outer
        for layer in range(self.shape.num_layers):
            for template, entry in self.layers[self.shape.find_layer_kind(layer)].items():
                for expert in range(self.shape.num_experts) if entry.is_expert else (0,):
                    yield f"decoder.layers.{layer}.{template.format(e=expert)}"

    def expected_hf_names(self) -> frozenset[str]:
        """Return the tensors that a complete checkpoint has and a complete export writes. With tied embeddings there is no lm_head."""
        return frozenset(hf_shapes(self.shape))

    def stored_names(self) -> frozenset[str]:
        """Return `expected_hf_names` as they are in files.

        Some families store the experts of a layer in one tensor (`hf_files.stored_name`).
        """
        names = self.expected_hf_names()
        return frozenset(map(stored_name, names)) if FAMILIES[self.shape.architecture].fused_experts else names

    def check_complete(self, names: frozenset[str] | set[str]) -> None:
        """Check that a checkpoint has every tensor the model needs and none that would be ignored.

        Raises:
            ConfigError: Tensors are missing, or there are unknown ones.
        """
        expected = self.expected_hf_names()
        missing = sorted(expected - names)
        unused = sorted(name for name in names - expected if not self._may_be_ignored(name))
        problems = [
            problem_with(
                "model",
                f"model: the checkpoint {fault} {len(names)} tensor{'s' * (len(names) > 1)}: "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}.",
            )
            for fault, names in (("lacks", missing), (f"is not a plain {self.shape.architecture}: it has unexpected", unused))
            if names
        ]
        if problems:
            raise ConfigError(problems)

    def buffer_names(self) -> frozenset[str]:
        """Return the members of `megatron_names` that are buffers, which named_parameters() does not list."""
        return frozenset(name for name in self.megatron_names() if self.entry(name).is_buffer)

    def check_held(self, names: Iterable[str]) -> None:
        """Check that all ranks together hold every parameter of the model. A parameter that no module has would be lost silently.

        Args:
            names: Global names of the parameters held, over all ranks.

        Raises:
            ValueError: A parameter is on no rank.
        """
        missing = sorted(set(self.megatron_names()) - set(names) - {name for name, entry in self.outer.items() if entry.is_copy})
        if missing:
            raise ValueError(
                f"{self.shape.architecture} needs {len(missing)} parameters that no Megatron module has: {', '.join(missing[:5])}"
            )

    def entry(self, name: str) -> WeightEntry:
        """Return the table row of a parameter, which tells the caller how to gather its shards."""
        return self._locate(name)[0]

    def place(self, name: str) -> tuple[int, int, int]:
        """Return the position of a parameter in the model: (layer, table row, expert).

        The layer is -1 for parameters before the layers, and the number of layers for those after them.
        """
        entry, _, expert = self._locate(name)
        match = _LAYER.fullmatch(name)
        if match is None:
            return (-1 if name.startswith(("embedding.", MEGATRON)) else self.shape.num_layers), list(self.outer).index(entry.megatron), 0
        layer = int(match[1])
        return layer, list(self.layers[self.shape.find_layer_kind(layer)]).index(entry.megatron), expert

    def hf_names(self, name: str) -> tuple[str, ...]:
        """Return the Hugging Face tensors that Megatron parameter `name` consists of."""
        entry, prefix, expert = self._locate(name)
        return tuple(prefix + template.format(e=expert) for template, _ in entry.hf)

    def load(
        self,
        name: str,
        read: Callable[[str], torch.Tensor],
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        expert_tp_rank: int = 0,
        expert_tp_size: int = 1,
    ) -> torch.Tensor:
        """Return this rank's shard of Megatron parameter `name`, in the checkpoint's dtype.

        Args:
            tp_size: Number of tensor-parallel ranks.
            expert_tp_size: Number of expert tensor-parallel ranks.

        Raises:
            ConfigError: A tensor has the wrong size, or cannot be divided over that many ranks.
        """
        entry, prefix, expert = self._locate(name)
        tensors = []
        for template, size in entry.hf:
            hf_name = prefix + template.format(e=expert)
            tensor = read(hf_name)
            if tuple(tensor.shape) != size:
                raise config_error(
                    "model", f"model: {hf_name} has shape {tuple(tensor.shape)} in the checkpoint, but config.json requires {size}."
                )
            tensors.append(tensor)
        rank, ranks = (expert_tp_rank, expert_tp_size) if entry.is_expert else (tp_rank, tp_size)
        full = _PACK[entry.packing](tensors, self.shape)
        if entry.cut is ShardSplit.VOCAB:
            full = torch.cat([full, full.new_zeros(self.padded_vocab_size - len(full), *full.shape[1:])])
        _check_divides(name, entry.cut, full, ranks)
        return _CUT[entry.cut](full, rank, ranks).contiguous()

    def export(self, name: str, shards: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) from all shards of one Megatron parameter. Vocabulary padding is removed.

        Yields nothing for a copy (`WeightEntry.is_copy`). The tensors may be views of `shards`.

        Args:
            shards: Shards in rank order. A replicated parameter needs only one.

        Raises:
            ValueError: The joined shards do not have the expected size.
        """
        entry, prefix, expert = self._locate(name)
        if entry.is_copy:
            return
        full = shards[0] if len(shards) == 1 else _JOIN[entry.cut](shards)
        if entry.cut is ShardSplit.VOCAB:
            full = full[: self.shape.vocab_size]
        for (template, size), tensor in zip(entry.hf, _UNPACK[entry.packing](full, self.shape, len(entry.hf)), strict=True):
            if tuple(tensor.shape) != size:
                raise ValueError(
                    f"{name}: {len(shards)} shards of {tuple(shards[0].shape)} give {tuple(tensor.shape)} for {template}, not {size}"
                )
            yield prefix + template.format(e=expert), tensor

    def export_rows(self, name: str, shards: Sequence[torch.Tensor], first: int, rows: int) -> Iterator[tuple[str, TensorSlice]]:
        """Yield (Hugging Face name, slice of its full tensor) from the same slice of all shards of one Megatron parameter.

        Args:
            shards: The slices in rank order, whole units (`names.num_units`) each.
        """
        entry, prefix, expert = self._locate(name)
        is_grouped = entry.packing in (TensorFusion.QKV, TensorFusion.GATED_QKV)  # one by one, query groups need no copy
        step = sum(size[0] for _, size in entry.hf) // self.shape.num_query_groups if is_grouped else rows
        for row, column, full in _slices(entry.cut, shards, first, rows, step):
            for (template, size), (begin, part) in zip(entry.hf, _unpack_rows(entry, row, full, self.shape), strict=True):
                if len(part):
                    yield prefix + template.format(e=expert), TensorSlice(part, (begin, column, *[0] * len(size))[: len(size)], size)

    def _locate(self, name: str) -> tuple[WeightEntry, str, int]:
        """Return the entry of a name with global numbers, the prefix of its Hugging Face names, and its expert number."""
        if name in self._located:
            return self._located[name]
        match, entry, prefix, expert = _LAYER.fullmatch(name), self.outer.get(name), "", 0
        if match is not None and int(match[1]) < self.shape.num_layers:
            prefix, template = self.shape.layer_prefix(int(match[1])), match[2]
            numbered = _EXPERT.fullmatch(template)
            if numbered is not None:
                expert, template = int(numbered[2]), f"{numbered[1]}{{e}}{numbered[3]}"
            entry = self.layers[self.shape.find_layer_kind(int(match[1]))].get(template)
            if entry is not None and entry.is_expert and expert >= self.shape.num_experts:
                entry = None
        if entry is None:
            raise LookupError(f"{name} is not a parameter of {self.shape.architecture} with {self.shape.num_layers} layers in this naming")
        self._located[name] = entry, prefix, expert
        return self._located[name]

    def _may_be_ignored(self, name: str) -> bool:
        if name == "lm_head.weight":
            return self.shape.tied_embeddings
        has_prediction_layers = FAMILIES[self.shape.architecture].has_prediction_layers
        layer = re.match(rf"{re.escape(self.shape.text_prefix)}layers\.(\d+)\.", name)
        is_beyond_layers = layer is not None and int(layer[1]) >= self.shape.num_layers
        return bool(_UNTRAINED.fullmatch(name)) or (has_prediction_layers and (is_beyond_layers or name.startswith("mtp.")))


def _pack_qkv(tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    by_group = [tensor.reshape(shape.num_query_groups, -1, *tensor.shape[1:]) for tensor in tensors]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _unpack_qkv(full: torch.Tensor, shape: ModelShape, count: int) -> list[torch.Tensor]:
    queries = shape.query_size // shape.num_query_groups
    by_group = full.unflatten(0, (-1, queries + 2 * shape.head_dim))
    return [part.flatten(0, 1) for part in by_group.split([queries, shape.head_dim, shape.head_dim], dim=1)]


def _pack_gated_qkv(tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    queries = tensors[0].reshape(shape.num_query_groups, -1, 2, shape.head_dim, *tensors[0].shape[1:])
    return _pack_qkv([queries.transpose(1, 2).flatten(0, 3), *tensors[1:]], shape)


def _unpack_gated_qkv(full: torch.Tensor, shape: ModelShape, count: int) -> list[torch.Tensor]:
    heads = 2 * shape.query_size // shape.num_query_groups // shape.head_dim + 2
    by_group = full.unflatten(0, (-1, heads, shape.head_dim))
    queries, *key_value = by_group.split([by_group.shape[1] - 2, 1, 1], dim=1)
    queries = queries.unflatten(1, (2, -1)).transpose(1, 2)
    return [queries.flatten(0, 3), *(part.flatten(0, 2) for part in key_value)]


def _sections(rows: int, delta: DeltaNetShape) -> tuple[int, ...]:
    """Return the sections of so many rows: query, key and value for the convolution, all six for the projection."""
    return delta.sections if rows == sum(delta.sections) else delta.sections[:3]


def _pack_delta_net(tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    delta, rows = _delta_net(shape), sum(map(len, tensors))
    is_grouped = delta.is_grouped and rows == sum(delta.sections)
    parts = tensors if is_grouped else torch.cat(list(tensors)).split(_sections(rows, delta))
    return torch.cat([part.unflatten(0, (delta.num_key_heads, -1)) for part in parts], dim=1).flatten(0, 1)


def _unpack_delta_net(full: torch.Tensor, shape: ModelShape, count: int) -> list[torch.Tensor]:
    delta, sections = _delta_net(shape), _sections(len(full), _delta_net(shape))
    by_group = full.unflatten(0, (delta.num_key_heads, -1))
    parts = by_group.split([rows // delta.num_key_heads for rows in sections], dim=1)
    if delta.is_grouped and count > 1:
        return [torch.cat(group, dim=1).flatten(0, 1) for group in (parts[:4], parts[4:])]
    flat = [part.flatten(0, 1) for part in parts]
    return [torch.cat(flat[:3]), *flat[3:]]


def _delta_net(shape: ModelShape) -> DeltaNetShape:
    assert shape.delta_net is not None
    return shape.delta_net


def _run(full: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    return full.chunk(ranks, dim)[rank]


def _check_divides(name: str, cut: ShardSplit, full: torch.Tensor, ranks: int) -> None:
    rows = {ShardSplit.REPLICATED: ranks, ShardSplit.ROW: full.shape[-1], ShardSplit.GATED_COLUMN: full.shape[0] // 2}.get(
        cut, full.shape[0]
    )
    if rows % ranks:
        raise ConfigError(
            f"{name}: {rows} channels are not a multiple of {ranks} tensor-parallel ranks: {rows} = {rows // ranks} x {ranks} + "
            f"{rows % ranks}."
        )


def _join_gated(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([shard.chunk(2)[half] for half in (0, 1) for shard in shards])


def _slices(cut: ShardSplit, shards: Sequence[torch.Tensor], first: int, rows: int, step: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (row, column, part) of the full Megatron parameter from the rows from `first` of all shards, which have `rows` rows.

    A part has at most `step` rows.
    """
    halves = 2 if cut is ShardSplit.GATED_COLUMN else 1
    length = rows // halves
    for rank, shard in enumerate(shards):
        if cut is ShardSplit.ROW:
            yield first, rank * shard.shape[1], shard
            continue
        for half in range(halves):
            end = min(first + len(shard), (half + 1) * length)
            for begin in range(max(first, half * length), end, step):
                yield (half * (len(shards) - 1) + rank) * length + begin, 0, shard[begin - first : min(begin + step, end) - first]


def _unpack_rows(entry: WeightEntry, start: int, full: torch.Tensor, shape: ModelShape) -> list[tuple[int, torch.Tensor]]:
    """Return (first row, rows) of each Hugging Face tensor from the rows from `start` of the Megatron parameter, without padding."""
    sizes, parts = [size[0] for _, size in entry.hf], []
    if entry.packing not in (TensorFusion.PLAIN, TensorFusion.STACK):
        unpacked = _UNPACK[entry.packing](full, shape, len(sizes))
        return [(start * size // sum(sizes), part) for size, part in zip(sizes, unpacked, strict=True)]
    for size in sizes:
        begin, end = max(start, 0), min(start + len(full), size)
        parts.append((begin, full[begin - start : max(begin, end) - start]))
        start -= size  # relative to the next tensor
    return parts


_PACK = {
    TensorFusion.PLAIN: lambda tensors, shape: tensors[0],
    TensorFusion.QKV: _pack_qkv,
    TensorFusion.GATED_QKV: _pack_gated_qkv,
    TensorFusion.DELTA_NET: _pack_delta_net,
    TensorFusion.STACK: lambda tensors, shape: torch.cat(list(tensors)),
}
_UNPACK = {
    TensorFusion.PLAIN: lambda full, shape, count: [full],
    TensorFusion.QKV: _unpack_qkv,
    TensorFusion.GATED_QKV: _unpack_gated_qkv,
    TensorFusion.DELTA_NET: _unpack_delta_net,
    TensorFusion.STACK: lambda full, shape, count: full.chunk(count),
}
_CUT = {
    ShardSplit.REPLICATED: lambda full, rank, ranks: full,
    # With fewer key/value heads than ranks, Megatron still cuts linear_qkv into equal parts within a group, and gathers later.
    ShardSplit.COLUMN: _run,
    ShardSplit.VOCAB: _run,
    ShardSplit.ROW: lambda full, rank, ranks: _run(full, rank, ranks, 1),
    ShardSplit.GATED_COLUMN: lambda full, rank, ranks: torch.cat([_run(half, rank, ranks) for half in full.chunk(2)]),
}
_JOIN = {
    ShardSplit.REPLICATED: lambda shards: shards[0],
    ShardSplit.COLUMN: lambda shards: torch.cat(list(shards)),
    ShardSplit.VOCAB: lambda shards: torch.cat(list(shards)),
    ShardSplit.ROW: lambda shards: torch.cat(list(shards), dim=1),
    ShardSplit.GATED_COLUMN: _join_gated,
}
