"""Which parameters a rank holds, and how Megatron-Core lays them out: element counts that are exact, not estimates.

Sizes come from the table of weights (`weights.names`), the layout from Megatron-Core's rules: layers over stages and chunks, the
padding of its gradient buffers, the ranges of a buffer that the distributed optimizer gives to each data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.batching.stages import layer_counts
from megatron_grpo.config.config import Config
from megatron_grpo.planning.tuning import Adapters, Tuning
from megatron_grpo.weights.lora import adapter_entries, is_linear
from megatron_grpo.weights.names import Entry, ShardCut, layer_entries, outer_entries, tower_entries
from megatron_grpo.weights.shape import ModelShape

# Megatron-Core's modules in the order in which they are registered; gradient buffers are filled in this order, from the end.
_ORDER = (
    "input_layernorm",
    "core_attention",
    "linear_proj",
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "self_attn_bda",
    "pre_mlp_layernorm",
    "router",
    "linear_fc1",
    "linear_fc2",
    "experts",
    "shared_experts",
    "mlp_bda",
)
START_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements, with overlap_grad_reduce


class Kind(Enum):
    """What a tensor is there for."""

    WEIGHT = "the model's own"
    ADAPTER = "a matrix of an adapter"
    REFERENCE = "a matrix of the adapter that the KL is measured against"
    HELPER = "tells adapters which module a row of a fused linear belongs to"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of one rank. numel: elements of this rank's shard."""

    numel: int
    trains: bool = True
    kind: Kind = Kind.WEIGHT
    is_expert: bool = False  # its gradient is reduced over the expert data-parallel ranks
    is_shared_embedding: bool = False  # two stages hold it


def padded_vocab(shape: ModelShape, sizes: BatchSizes, cfg: Config) -> int:
    """Rows of the embedding over all TP ranks."""
    multiple = cfg.model.padded_vocab_multiple * sizes.layout.tp
    return -(-shape.vocab_size // multiple) * multiple


def layers_of_stages(num_layers: int, sizes: BatchSizes, cfg: Config) -> list[int]:
    """Layers of each pipeline stage, over all its chunks."""
    return [sum(counts) for counts in zip(*layer_counts(cfg.parallel, num_layers), strict=True)]


def chunks_of_stage(num_layers: int, sizes: BatchSizes, cfg: Config, stage: int) -> list[range]:
    """Global numbers of the layers of each model chunk of a stage: one range, or `vpp` of them."""
    begin, found = 0, []
    for counts in layer_counts(cfg.parallel, num_layers):
        for other, count in enumerate(counts):
            if other == stage:
                found.append(range(begin, begin + count))
            begin += count
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank, as far as what it holds depends on it: its pipeline stage, and its place among the ranks that share out the experts."""

    stage: int
    ep_rank: int = 0


def parameters_of_chunk(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: Tuning, place: Place, chunk: int) -> Iterator[Parameter]:
    """The parameters of one model chunk of a rank, in the order of `named_parameters()`."""
    is_first = place.stage == 0 and chunk == 0
    is_last = place.stage == sizes.layout.pp - 1 and chunk == sizes.layout.num_chunks - 1
    outer = {entry.megatron: entry for entry in outer_entries(shape)}
    shared = shape.tied_embeddings and sizes.layout.pp > 1

    def vocabulary(name: str) -> Parameter:
        numel = padded_vocab(shape, sizes, cfg) * shape.hidden_size // sizes.layout.tp
        return Parameter(numel, trains=tuning.trains_outer(outer[name]), is_shared_embedding=shared)

    if is_first:
        yield vocabulary("embedding.word_embeddings.weight")
    for layer in chunks_of_stage(shape.num_layers, sizes, cfg, place.stage)[chunk]:
        yield from _layer(shape, sizes, tuning, layer, place.ep_rank)
    if is_last:
        norm = outer["decoder.final_layernorm.weight"]
        yield Parameter(numel_of(norm, sizes), trains=tuning.trains_outer(norm))
        if not shape.tied_embeddings or not is_first:
            yield vocabulary("output_layer.weight")
    if is_first:
        for entry in tower_entries(shape):
            yield Parameter(numel_of(entry, sizes), trains=tuning.trains_outer(entry))


def _layer(shape: ModelShape, sizes: BatchSizes, tuning: Tuning, layer: int, ep_rank: int) -> Iterator[Parameter]:
    entries = [entry for entry in layer_entries(shape, moe=shape.is_moe_layer(layer)) if not entry.is_buffer]
    groups: dict[str, list[Entry]] = {"": [], "experts": [], "shared_experts": []}  # in Megatron's order
    for entry in sorted(entries, key=_order):
        groups["experts" if entry.is_expert else "shared_experts" if "shared_experts" in entry.megatron else ""].append(entry)
    count = shape.num_experts // sizes.layout.ep
    for group, rows in groups.items():
        modules = [_Module.of(list(module), sizes, tuning) for _, module in groupby(rows, key=lambda entry: _order(entry)[0])]
        for expert in range(ep_rank * count, (ep_rank + 1) * count) if group == "experts" else (0,):
            for module in modules:
                yield from module.parameters(tuning, layer, expert)


@dataclass(frozen=True, slots=True)
class _Module:
    """The rows of one Megatron module, its weight first, and what stands beside them where it has an adapter."""

    rows: Sequence[tuple[Entry, int]]  # with the elements of this rank's shard
    adapter: Sequence[Parameter]
    reference: Sequence[Parameter]
    helper: Sequence[Parameter]

    @classmethod
    def of(cls, rows: Sequence[Entry], sizes: BatchSizes, tuning: Tuning) -> _Module:
        weight = rows[0]

        def pair(adapters: Adapters | None, kind: Kind) -> list[Parameter]:
            if adapters is None or not is_linear(weight):
                return []
            shards = (numel_of(entry, sizes) for entry in adapter_entries(weight, adapters.rank))
            return [Parameter(numel, trains=kind is Kind.ADAPTER, kind=kind, is_expert=weight.is_expert) for numel in shards]

        modules = len(weight.hf)
        row_count = numel_of(weight, sizes) // weight.hf[0][1][-1]  # of a fused linear, which is cut by rows
        helper = [Parameter(row_count * modules, trains=False, kind=Kind.HELPER)] if modules > 1 else []
        own = [(entry, numel_of(entry, sizes)) for entry in rows]
        return cls(own, pair(tuning.adapters, Kind.ADAPTER), pair(tuning.reference, Kind.REFERENCE), helper)

    def parameters(self, tuning: Tuning, layer: int, expert: int) -> Iterator[Parameter]:
        """In the order in which they are registered."""
        weight = self.rows[0][0]
        for entry, numel in self.rows:
            yield Parameter(numel, trains=tuning.trains_weight(entry, layer, expert), is_expert=entry.is_expert)
        has_adapter, has_reference = (
            which is not None and which.is_on(weight, layer, expert) for which in (tuning.adapters, tuning.reference)
        )
        if has_adapter:
            yield from self.adapter
        if has_reference:
            yield from self.reference
        if has_adapter or has_reference:
            yield from self.helper


def _order(entry: Entry) -> tuple[int, bool]:
    parts = entry.megatron.split(".")
    return next((i for i, name in enumerate(_ORDER) if name in parts), len(_ORDER)), parts[-1] == "bias"


def numel_of(entry: Entry, sizes: BatchSizes) -> int:
    """Elements of this rank's shard of an entry inside a layer."""
    total = sum(math.prod(size) for _, size in entry.hf)
    if entry.cut is ShardCut.REPLICATED:
        return total
    return total // (sizes.layout.etp if entry.is_expert else sizes.layout.tp)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A gradient buffer of Megatron-Core's DDP. Places are in elements; `buckets` are (begin, end) with padding."""

    places: Sequence[tuple[int, int]]  # begin and end of each parameter
    buckets: Sequence[tuple[int, int]]
    ranks: int  # data-parallel ranks that share it
    holds_experts: bool = False

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def numel_of_parameters(self) -> int:
        return sum(end - begin for begin, end in self.places)

    def owned_by(self, rank: int) -> int:
        """Elements whose optimizer state a data-parallel rank holds: its equal run of every bucket, without padding."""
        total = 0
        for begin, end in self.buckets:
            share = (end - begin) // self.ranks
            low, high = begin + rank * share, begin + (rank + 1) * share
            total += sum(max(0, min(high, stop) - max(low, start)) for start, stop in self.places)
        return total


def buffer_of(parameters: Sequence[Parameter], *, ranks: int, is_sharded: bool, bucket_size: int | None) -> Buffer:
    """How Megatron-Core places parameters in a buffer: from the last to the first, aligned where the optimizer is distributed."""

    def padded(value: int, multiple: int) -> int:
        return -(-value // multiple) * multiple if is_sharded else value

    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = position = 0
    bucket_alignment = math.lcm(ranks, BUCKET_ALIGNMENT)
    is_open = False  # some parameter lies in the bucket being filled
    for parameter in reversed(parameters):
        position = padded(position, START_ALIGNMENT)
        alone = parameter.is_shared_embedding and is_sharded  # so that both stages cut it over ranks in the same way
        if alone and is_open:
            buckets.append((begin, padded(position, bucket_alignment)))
            begin = position = buckets[-1][1]
        places.append((position, position + parameter.numel))
        position, is_open = position + parameter.numel, True
        if alone or (bucket_size is not None and position - begin >= bucket_size):
            buckets.append((begin, padded(position, bucket_alignment)))
            begin = position = buckets[-1][1]
            is_open = False
    if is_open:
        buckets.append((begin, padded(position, bucket_alignment)))
    return Buffer(places, buckets, ranks, holds_experts=any(parameter.is_expert for parameter in parameters))


def buffers_of_chunk(parameters: Sequence[Parameter], sizes: BatchSizes, cfg: Config, *, is_first_chunk: bool) -> list[Buffer]:
    """The gradient buffers of one model chunk, for what trains of it: one for dense parameters and one for experts."""
    # So that communication overlaps; of later chunks and stages it waits for nothing.
    overlaps = cfg.optimizer.overlap_grad_reduce and is_first_chunk
    size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * sizes.dp_size) if overlaps else None
    found = []
    for experts, ranks in ((False, sizes.dp_size * sizes.layout.cp), (True, sizes.layout.expert_dp_size)):
        own = [parameter for parameter in parameters if parameter.trains and parameter.is_expert == experts]
        if own:
            found.append(buffer_of(own, ranks=ranks, is_sharded=cfg.optimizer.use_distributed_optimizer, bucket_size=size))
    return found
