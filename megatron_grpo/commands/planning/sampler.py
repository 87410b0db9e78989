"""Memory and communication that the sampler costs a rank.

vLLM's memory is an estimate. Collectives, received bytes and bucket memory of a weight sync come from the sync's own plan, so they are
exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_grpo.commands.planning.parameters import BYTES, FP32, TrainableSpec, WeightRow, count_elements, layers_of_stage, padded_vocab
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.weights.buckets import (
    DEFAULT_BUCKET_MB,
    MIB,
    Bucket,
    BucketPart,
    ParameterPlacement,
    RankCounts,
    fill,
    num_collectives,
    peak_bytes,
)
from megatron_grpo.core.weights.lora import LoraSync, adapter_entries, is_linear, linear_modules
from megatron_grpo.core.weights.names import ShardSplit, WeightEntry, num_parameters, num_units, outer_entries, tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import DeltaNetShape
from megatron_grpo.core.weights.vision_towers import MEGATRON
from megatron_grpo.run.config.settings import Config


def sampler_memory(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, sequence: int) -> dict[str, int]:
    """Return the memory of vLLM on one rank in bytes; zeros with rollout servers.

    The KV cache is what `vllm_gpu_memory_utilization` leaves beside the weights, or without `gpu_memory_gb` the maximum that its sequences
    can need.

    Args:
        sequence: Maximum sequence length in tokens.
    """
    if cfg.rollout.vllm_mode == "server":
        zero_fields = (
            "weights_bytes",
            "adapters_bytes",
            "kv_cache_bytes",
            "kv_bytes_per_token",
            "state_bytes_per_sequence",
            "kv_cache_tokens",
        )
        return dict.fromkeys((*zero_fields, "sequences_at_once"), 0)
    size = BYTES[cfg.rollout.vllm_dtype or cfg.model.torch_dtype]
    tp = cfg.rollout.vllm_tensor_parallel_size
    weights = -(-num_parameters(shape) * size // tp)
    adapters = _adapter_room(shape, tuning.adapter_sync, tp) * size if tuning.adapter_sync and tuning.syncs_adapters else 0
    per_token = 2 * shape.num_attention_layers * max(1, shape.num_query_groups // tp) * shape.head_dim * size
    if shape.mla:
        per_token = shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim) * size
    engines = max(1, sizes.layout.world_size // tp)
    sequences = min(cfg.rollout.vllm_max_num_seqs, -(-sizes.num_rollout_prompts // engines) * sizes.num_generations)
    sequence_bytes = _state_bytes(shape.delta_net, size) // tp if shape.delta_net else 0
    kv = sequences * (sequence * per_token + sequence_bytes)
    if cfg.plan.gpu_memory_gb:
        kv = max(0, round(cfg.plan.gpu_memory_gb * 1e9 * cfg.rollout.vllm_gpu_memory_utilization) - weights - adapters)
    return {
        "weights_bytes": weights,
        "adapters_bytes": adapters,
        "kv_cache_bytes": kv,
        "kv_bytes_per_token": per_token,
        "state_bytes_per_sequence": sequence_bytes,
        "kv_cache_tokens": max(0, kv - sequences * sequence_bytes) // per_token,
        "sequences_at_once": sequences,
    }


def _state_bytes(delta: DeltaNetShape, size: int) -> int:
    """Return the bytes of a sequence in vLLM's cache, over all layers: the state in float32, and the last inputs of the convolution."""
    state = FP32 * delta.num_value_heads * delta.key_head_dim * delta.value_head_dim
    return sum(delta.layers) * (state + size * (delta.conv_kernel_dim - 1) * sum(delta.sections[:3]))


def _adapter_room(shape: ModelShape, adapter_sync: LoraSync, tp: int) -> int:
    """Return the elements that vLLM allocates on one rank for one adapter: in all modules with a targeted name, in every layer."""
    total, words = 0, set(adapter_sync.last_name_parts)
    for module in linear_modules(shape):
        if module.name.rsplit(".", 1)[1] in words:
            total += -(-module.inner // tp) + module.out if module.is_row else module.inner + -(-module.out // tp)
    return adapter_sync.slot_rank * total


# ---- weight syncs ------------------------------------------------------------------------------------------------------------------------


def sync_traffic(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> dict[str, int]:
    """Return collectives, buckets and received bytes of one weight sync, without what is sent only once.

    `received_bytes` is that of the rank that receives most.
    """
    ranks = count_ranks(sizes)
    synced: list[list[Bucket]] = []
    if not tuning.syncs_adapters or cfg.rollout.sleep_level == 2:  # the sampler drops its weights
        synced.append(pack_buckets(weights(shape, sizes, cfg, tuning), sizes, cfg))
    if tuning.syncs_adapters:
        synced.append(pack_buckets(adapters(shape, sizes, cfg, tuning), sizes, cfg))
    gather = cfg.rollout.vllm_mode == "server"
    stages = range(1 if gather else sizes.layout.pp)  # with servers only rank 0 receives, which is in the first stage
    received = [sum(_received(b, ranks, stage, gather) for buckets in synced for b in buckets) for stage in stages]
    return {
        "collectives": 0 if gather else sum(num_collectives(buckets, ranks) for buckets in synced),
        "buckets": sum(map(len, synced)),
        "received_bytes": max(received),
        "bucket_bytes": bucket_bytes(cfg),
    }


def _received(bucket: Bucket, ranks: RankCounts, stage: int, gather: bool) -> int:
    """Return the bytes that a rank of `stage` receives of a bucket.

    Rank 0 receives every shard of another stage's bucket when it sends to servers. Otherwise, one shard is sent and the rest is gathered.
    """
    if not gather or stage == bucket.stage:
        return bucket.received_bytes(ranks, stage)
    return sum(bucket.sizes[part] * ranks.sharing(part) for part in BucketPart)


def sync_memory(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> int:
    """Return the memory of a weight sync in bytes: two buckets (one with the receiver, one in transit), and one parameter.

    A parameter is whole in memory in the first sync, when it is merged with an adapter, and where vLLM's own reload loads it.

    With adapters it is the same: the model weights are sent before the first adapter.
    """
    ranks, buckets = count_ranks(sizes), pack_buckets(weights(shape, sizes, cfg, tuning), sizes, cfg)
    joined = max(slot.shard_bytes * ranks.sharing(slot.part) // (sizes.layout.ep if slot.part is BucketPart.EXPERTS else 1)
                 for bucket in buckets for slot in bucket.slots)  # fmt: skip
    link = bucket_bytes(cfg) if cfg.rollout.vllm_mode == "server" else 0  # rank 0 packs what it sends once more
    return peak_bytes(buckets, ranks) + joined + link


def bucket_bytes(cfg: Config) -> int:
    """Return the bucket size in bytes: `weight_sync_bucket_mb`, or the default for GPUs."""
    return (cfg.rollout.weight_sync_bucket_mb or DEFAULT_BUCKET_MB["cuda"]) * MIB


def count_ranks(sizes: BatchSizes) -> RankCounts:
    """Return the numbers of ranks that share the weights of a layout."""
    return RankCounts(sizes.layout.pp, sizes.layout.tp, sizes.layout.ep * sizes.layout.etp)


def pack_buckets(owned: Iterator[ParameterPlacement], sizes: BatchSizes, cfg: Config) -> list[Bucket]:
    """Pack parameters into buckets of the configured size.

    Args:
        owned: Parameters in the order in which they are sent.
    """
    return fill(owned, count_ranks(sizes), bucket_bytes(cfg))


def weights(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> Iterator[ParameterPlacement]:
    """Yield the parameters that a sync of all weights sends.

    Of experts at the same position on all expert ranks, only those of the first expert rank are yielded: the others have the same sizes.
    """
    for index, entry in enumerate(outer_entries(shape)):
        if not entry.is_copy and not (keeps_tower(cfg, tuning, shape) and entry.megatron.startswith(MEGATRON)):
            is_first = entry.megatron.startswith(("embedding.", MEGATRON))
            stage, layer = (0, -1) if is_first else (sizes.layout.pp - 1, shape.num_layers)
            num_rows = padded_vocab(shape, sizes, cfg) // sizes.layout.tp if entry.cut is ShardSplit.VOCAB else _num_rows(entry, sizes)
            numel = num_rows * shape.hidden_size if entry.cut is ShardSplit.VOCAB else count_elements(entry, sizes)
            yield _owned(entry, (layer, index, 0), stage, numel * tuning.size, units=num_units(entry, num_rows, shape, sizes.layout.tp))
    for stage, rows in _layers(shape, sizes, cfg, tuning):
        for number, row in enumerate(rows):
            num_bytes = count_elements(row.entry, sizes) * (FP32 if row.entry.is_float32 else tuning.size)
            num_ranks = sizes.layout.etp if row.entry.is_expert else sizes.layout.tp
            units = num_units(row.entry, _num_rows(row.entry, sizes), shape, num_ranks)
            for expert in range(shape.num_experts // sizes.layout.ep) if row.entry.is_expert else (0,):
                yield _owned(row.entry, (row.layer, number, expert), stage, num_bytes, units=units)


def keeps_tower(cfg: Config, tuning: TrainableSpec, shape: ModelShape) -> bool:
    """Return whether the sampler keeps the vision tower that it loaded, so that no sync sends it.

    That holds if the tower is frozen, no adapters train, and the sampler never drops its weights.
    """
    forgets = cfg.rollout.sleep_level == 2 and cfg.rollout.vllm_mode == "colocate"
    return not tuning.adapter_size and not forgets and not any(map(tuning.trains_outer, tower_entries(shape)))


def adapters(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> Iterator[ParameterPlacement]:
    """Yield the parameters that a sync of adapters sends, as `weights` does. Matrices are padded to the widest rank of the run."""
    rank = tuning.rank
    for stage, rows in _layers(shape, sizes, cfg, tuning):
        for number, row in enumerate(row for row in rows if is_linear(row.entry)):
            count = shape.num_experts // sizes.layout.ep if row.entry.is_expert else 1
            for expert in range(count):
                if any(any(ranks) for ranks in row.adapters[expert::count]):  # experts at the same position on all expert ranks
                    for matrix, entry in enumerate(adapter_entries(row.entry, rank)):
                        num_bytes = count_elements(entry, sizes) * tuning.adapter_size
                        yield _owned(entry, (row.layer, 2 * number + matrix, expert), stage, num_bytes)


def _layers(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> Iterator[tuple[int, Sequence[WeightRow]]]:
    """Yield (stage, rows of the weights) of each layer."""
    return ((stage, tuning.layers[layer]) for stage in range(sizes.layout.pp) for layer in layers_of_stage(shape.num_layers, cfg, stage))


def _num_rows(entry: WeightEntry, sizes: BatchSizes) -> int:
    """Return the rows of a rank's shard of a weight."""
    ranks = sizes.layout.etp if entry.is_expert else sizes.layout.tp
    return sum(size[0] for _, size in entry.hf) // (1 if entry.cut in (ShardSplit.REPLICATED, ShardSplit.ROW) else ranks)


def _owned(entry: WeightEntry, position: tuple[int, int, int], stage: int, num_bytes: int, *, units: int = 0) -> ParameterPlacement:
    return ParameterPlacement(
        entry.megatron, (), None, num_bytes, BucketPart.from_cut(entry.cut, entry.is_expert), position, stage, units=units
    )
