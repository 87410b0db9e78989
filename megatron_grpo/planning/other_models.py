"""What others than the policy hold on one rank: vLLM, whose KV cache is an estimate, and a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import activations_of, logits_bytes
from megatron_grpo.planning.parameters import BYTES, Place, Tuning, held_by
from megatron_grpo.planning.teacher import config_of_teacher
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """On a rank of one pipeline stage. weights_bytes: exact. scoring: bytes besides them, by the tokens of a micro-batch on the rank."""

    weights_bytes: int = 0
    scoring: Callable[[int], int] = lambda tokens: 0


def held_stages(teacher: ModelShape | None, student: ModelShape, sizes: BatchSizes, cfg: Config, completion: int) -> list[HeldStage]:
    """Of each stage; nothing without a teacher. completion: tokens."""
    stages = range(sizes.layout.pp)
    if teacher is None:
        return [HeldStage() for _ in stages]
    own = config_of_teacher(cfg, teacher, student)
    tuning = Tuning.of(own, teacher)

    def of(stage: int) -> HeldStage:
        numel = held_by(teacher, sizes, own, tuning, Place(stage=stage)).weights
        activations = activations_of(teacher, sizes, own, tuning, stage)
        logits = logits_bytes(teacher, sizes, own, completion) // 2 if stage == sizes.layout.pp - 1 else 0
        return HeldStage(weights_bytes=numel * tuning.size, scoring=lambda tokens: activations(tokens).forward + logits)

    return [of(stage) for stage in stages]
