"""What vLLM holds on one rank: weights, room for an adapter, and the KV cache, which is an estimate."""

from __future__ import annotations

from megatron_grpo.planning.tuning import BYTES, Adapters, Tuning
from megatron_grpo.settings.config import Config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.lora import is_linear
from megatron_grpo.weights.names import ShardCut, layer_entries, num_parameters
from megatron_grpo.weights.shape import ModelShape

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


def sampler_memory(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: Tuning, sequence: int) -> dict[str, int]:
    """vLLM's share on one rank. The KV cache is what vllm_gpu_memory_utilization leaves, or else what its sequences can need at most."""
    size = BYTES[cfg.rollout.vllm_dtype or cfg.model.torch_dtype]
    tp = cfg.rollout.vllm_tensor_parallel_size
    weights = -(-num_parameters(shape) * size // tp)
    adapters = _adapter_room(shape, tuning.adapters, tp) * size if tuning.adapters and tuning.pushes_adapters else 0
    per_token = 2 * shape.num_layers * max(1, shape.num_query_groups // tp) * shape.head_dim * size
    if shape.mla:
        per_token = shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim) * size
    engines = max(1, sizes.layout.world_size // tp)
    sequences = min(cfg.rollout.vllm_max_num_seqs, -(-sizes.num_rollout_prompts // engines) * sizes.num_generations)
    kv = sequences * sequence * per_token
    if cfg.plan.gpu_memory_gb:
        kv = max(0, round(cfg.plan.gpu_memory_gb * 1e9 * cfg.rollout.vllm_gpu_memory_utilization) - weights - adapters)
    return {
        "weights_bytes": weights,
        "adapters_bytes": adapters,
        "kv_cache_bytes": kv,
        "kv_bytes_per_token": per_token,
        "kv_cache_tokens": kv // per_token,
        "sequences_at_once": sequences,
    }


def _adapter_room(shape: ModelShape, adapters: Adapters, tp: int) -> int:
    """Elements of the room for one adapter that vLLM makes in every module with a targeted name, whatever its layer."""
    rank = next((slot for slot in SLOT_RANKS if slot >= adapters.rank), adapters.rank)
    words = {
        name.rsplit(".", 2)[1] for linear in adapters.linears for (name, _), rank in zip(linear.entry.hf, linear.ranks, strict=True) if rank
    }
    total = 0
    for moe in {shape.is_moe_layer(layer) for layer in range(shape.num_layers)}:
        layers = sum(shape.is_moe_layer(layer) == moe for layer in range(shape.num_layers))
        for entry in filter(is_linear, layer_entries(shape, moe=moe)):
            sizes = [size for name, size in entry.hf if name.rsplit(".", 2)[1] in words]
            cut_row = entry.cut is ShardCut.ROW
            here = sum((out if cut_row else -(-out // tp)) + (-(-inner // tp) if cut_row else inner) for out, inner in sizes)
            total += layers * rank * here * (shape.num_experts if entry.is_expert else 1)
    return total
