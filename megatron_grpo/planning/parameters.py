"""Which parameters a rank holds, and how Megatron-Core lays them out: element counts that are exact, not estimates.

Sizes come from the table of weights (`weights.names`), the layout from Megatron-Core's rules: layers over stages and chunks, the
padding of its gradient buffers, the ranges of a buffer that the distributed optimizer gives to each data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.names import Entry, ShardCut, layer_entries, outer_entries
from megatron_grpo.weights.shape import ModelShape

# Megatron-Core's modules in the order in which they are registered; gradient buffers are filled in this order, from the end.
_ORDER = (
    "input_layernorm",
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
    "pre_mlp_layernorm",
    "router",
    "linear_fc1",
    "linear_fc2",
    "experts",
    "shared_experts",
)
START_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements, with overlap_grad_reduce


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of one rank. numel: elements of this rank's shard."""

    numel: int
    in_expert_buffer: bool = False  # its gradient is reduced over the expert data-parallel ranks
    is_shared_embedding: bool = False  # two stages hold it


def padded_vocab(shape: ModelShape, sizes: BatchSizes, cfg: Config) -> int:
    """Rows of the embedding over all TP ranks."""
    multiple = cfg.model.padded_vocab_multiple * sizes.layout.tp
    return -(-shape.vocab_size // multiple) * multiple


def layers_of_stages(num_layers: int, sizes: BatchSizes, cfg: Config) -> list[int]:
    """Layers of each pipeline stage, over all its chunks."""
    first, last = cfg.parallel.decoder_first_pipeline_num_layers, cfg.parallel.decoder_last_pipeline_num_layers
    ends = (first or 0) + (last or 0)
    middle = sizes.layout.pp - (first is not None) - (last is not None)
    counts = [(num_layers - ends) // middle if middle else 0] * sizes.layout.pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def chunks_of_stage(num_layers: int, sizes: BatchSizes, cfg: Config, stage: int) -> list[range]:
    """Global numbers of the layers of each model chunk of a stage: one range, or `vpp` of them."""
    counts, chunks = layers_of_stages(num_layers, sizes, cfg), sizes.layout.num_chunks
    begin, found = 0, []
    for _ in range(chunks):
        for other, count in enumerate(counts):
            if other == stage:
                found.append(range(begin, begin + count // chunks))
            begin += count // chunks
    return found


def parameters_of_chunk(shape: ModelShape, sizes: BatchSizes, cfg: Config, stage: int, chunk: int) -> list[Parameter]:
    """The parameters of one model chunk of a rank, in the order of `named_parameters()`."""
    chunks = sizes.layout.num_chunks
    is_first, is_last = stage == 0 and chunk == 0, stage == sizes.layout.pp - 1 and chunk == chunks - 1
    outer = {entry.megatron: entry for entry in outer_entries(shape)}
    rows = padded_vocab(shape, sizes, cfg)
    shared = shape.tied_embeddings and sizes.layout.pp > 1
    found = []
    if is_first:
        found.append(Parameter(rows * shape.hidden_size // sizes.layout.tp, is_shared_embedding=shared))
    for layer in chunks_of_stage(shape.num_layers, sizes, cfg, stage)[chunk]:
        found += _layer(shape, sizes, shape.is_moe_layer(layer))
    if is_last:
        found += [Parameter(numel_of(entry, sizes)) for name, entry in outer.items() if name == "decoder.final_layernorm.weight"]
        if not shape.tied_embeddings or not is_first:
            found.append(Parameter(rows * shape.hidden_size // sizes.layout.tp, is_shared_embedding=shared))
    return found


def _layer(shape: ModelShape, sizes: BatchSizes, moe: bool) -> Iterator[Parameter]:
    entries = [entry for entry in layer_entries(shape, moe=moe) if not entry.is_buffer]
    ordered = sorted(entries, key=_place)
    outside = [entry for entry in ordered if not entry.is_expert]
    experts = [entry for entry in ordered if entry.is_expert]
    before = [entry for entry in outside if "shared_experts" not in entry.megatron]
    after = [entry for entry in outside if "shared_experts" in entry.megatron]
    yield from (Parameter(numel_of(entry, sizes)) for entry in before)
    if experts:
        for _ in range(shape.num_experts // sizes.layout.ep):
            yield from (Parameter(numel_of(entry, sizes), in_expert_buffer=sizes.layout.ep > 1) for entry in experts)
    yield from (Parameter(numel_of(entry, sizes)) for entry in after)


def _place(entry: Entry) -> tuple[int, bool]:
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
    return Buffer(places, buckets, ranks, holds_experts=any(parameter.in_expert_buffer for parameter in parameters))


def buffers_of_stage(shape: ModelShape, sizes: BatchSizes, cfg: Config, stage: int) -> list[Buffer]:
    """All gradient buffers of a rank of this stage: per model chunk one for dense parameters and, with EP, one for experts."""
    is_sharded = cfg.optimizer.use_distributed_optimizer
    found = []
    for chunk in range(sizes.layout.num_chunks):
        parameters = parameters_of_chunk(shape, sizes, cfg, stage, chunk)
        for experts, ranks in ((False, sizes.dp_size * sizes.layout.cp), (True, sizes.layout.expert_dp_size)):
            own = [parameter for parameter in parameters if parameter.in_expert_buffer == experts]
            overlaps = cfg.optimizer.overlap_grad_reduce and stage == 0 and chunk == 0
            size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * sizes.dp_size) if overlaps else None
            if own:
                found.append(buffer_of(own, ranks=ranks, is_sharded=is_sharded, bucket_size=size))
    return found
