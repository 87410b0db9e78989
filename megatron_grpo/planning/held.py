"""What a teacher that the training ranks hold takes of them: bytes of a rank, and work. Pure functions of shapes, sizes and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.activations import activations_of, logits_bytes
from megatron_grpo.planning.parameters import Place, parameters_of_chunk
from megatron_grpo.planning.teacher import config_of_teacher
from megatron_grpo.planning.tuning import Tuning
from megatron_grpo.weights.shape import ModelShape


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
        chunks = (parameters_of_chunk(teacher, sizes, own, tuning, Place(stage=stage), chunk) for chunk in range(sizes.layout.num_chunks))
        numel = sum(parameter.numel for chunk in chunks for parameter in chunk)
        activations = activations_of(teacher, sizes, own, tuning, stage)
        logits = logits_bytes(teacher, sizes, own, completion) // 2 if stage == sizes.layout.pp - 1 else 0
        return HeldStage(weights_bytes=numel * tuning.size, scoring=lambda tokens: activations(tokens).forward + logits)

    return [of(stage) for stage in stages]
