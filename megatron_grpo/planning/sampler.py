"""What vLLM holds on one rank: weights, room for an adapter, and the KV cache, which is an estimate."""

from __future__ import annotations

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.tuning import BYTES, Tuning
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.weights.lora import linear_modules
from megatron_grpo.weights.names import num_parameters
from megatron_grpo.weights.shape import ModelShape


def sampler_memory(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: Tuning, sequence: int) -> dict[str, int]:
    """vLLM's share on one rank, which is nothing where servers sample.

    The KV cache is what vllm_gpu_memory_utilization leaves, or else what its sequences can need at most.
    """
    if cfg.rollout.vllm_mode == "server":
        nothing = ("weights_bytes", "adapters_bytes", "kv_cache_bytes", "kv_bytes_per_token", "kv_cache_tokens", "sequences_at_once")
        return dict.fromkeys(nothing, 0)
    size = BYTES[cfg.rollout.vllm_dtype or cfg.model.torch_dtype]
    tp = cfg.rollout.vllm_tensor_parallel_size
    weights = -(-num_parameters(shape) * size // tp)
    adapters = _adapter_room(shape, tuning.push, tp) * size if tuning.push and tuning.pushes_adapters else 0
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


def _adapter_room(shape: ModelShape, push: LoraPush, tp: int) -> int:
    """Elements on one rank of the room that vLLM makes for one adapter: in every module with a targeted name, whatever its layer."""
    total, words = 0, set(push.last_words)
    for module in linear_modules(shape):
        if module.name.rsplit(".", 1)[1] in words:
            total += -(-module.inner // tp) + module.out if module.is_row else module.inner + -(-module.out // tp)
    return push.slot_rank * total
