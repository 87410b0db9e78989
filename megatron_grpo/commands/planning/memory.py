"""Estimate the memory of one rank by pipeline stage and phase: a pure function of the model's shape, the sizes and the settings.

Weights and gradients are exact. The rest are estimates, which state their assumptions.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_grpo.commands.planning.activations import (
    Activations,
    TowerCost,
    estimate_tower,
    fewer_layers,
    logits_bytes,
    make_activation_estimate,
)
from megatron_grpo.commands.planning.cost import checkpoint_bytes
from megatron_grpo.commands.planning.parameters import StaticMemory, TrainableSpec, count_parameters, layers_of_stage, static_memory
from megatron_grpo.commands.planning.sampler import bucket_bytes, sampler_memory, sync_memory
from megatron_grpo.commands.planning.token_counts import sequence_tokens
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.policy.requirements import BLOCK
from megatron_grpo.core.weights.buckets import MIB
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.check import CheckedConfig
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.models import config_of_teacher
from megatron_grpo.run.sharing import Lengths

TOWER = "vision tower: on the first stage, complete on each rank; activations as if every prompt token were an image token"
LINK = 50e9  # bytes per second between a GPU and its host, in each direction: PCIe 5.0 x16
UNCOUNTED = 6e9  # bytes that `auto` reserves for what the estimates omit: CUDA context, NCCL buffers, CUDA graphs, fragmentation
MOST_TOKENS = 2**20  # upper limit of the search for a micro-batch size, in tokens on one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Choice of what the policy moves off the GPU while the sampler works.

    Args:
        model: Whether weights, gradients and the reference are offloaded.
        optimizer: Whether main weights and Adam's moments are offloaded.
        why: Reason for the choice, a phrase.
    """

    model: bool
    optimizer: bool
    why: str = ""

    def copied(self, static: StaticMemory) -> int:
        """Return the bytes of a rank that are copied to the host and back. Gradients are not copied: they return as zeros."""
        model = static.weights_bytes + static.adapters_bytes + static.reference_bytes
        return model * self.model + static.optimizer_bytes * self.optimizer

    def freed(self, static: StaticMemory, *, during_sync: bool = False) -> int:
        """Return the bytes of a rank that the sampler can use."""
        kept_bytes = (static.weights_bytes + static.adapters_bytes) * self.model if during_sync else 0
        return self.copied(static) - kept_bytes + static.gradients_bytes * self.model


def decide(cfg: Config, peak: Callable[[OffloadPlan], int], gpu: int | None) -> OffloadPlan:
    """Choose what is offloaded while the sampler works.

    `auto` is on where the run does not fit otherwise, UNCOUNTED included. The optimizer is offloaded first, because no weight sync needs
    it.

    Args:
        peak: Returns the bytes of the fullest rank in its fullest phase.
        gpu: Memory of a GPU in bytes; None if unknown.
    """
    model, optimizer = cfg.rollout.offload_model, cfg.rollout.offload_optimizer
    ways = [
        OffloadPlan(model=on_model, optimizer=on_optimizer)
        for on_model in (False, True)
        for on_optimizer in (False, True)
        if model in ("auto", str(on_model).lower()) and optimizer in ("auto", str(on_optimizer).lower())
    ]
    first = ways[0]
    if cfg.rollout.vllm_mode != "colocate":
        return OffloadPlan(model=False, optimizer=False, why="the sampler has separate memory")
    if len(ways) == 1:
        return replace(first, why="as configured")
    if gpu is None:
        return replace(first, why="auto depends on the memory of the GPU; set gpu_memory_gb")
    peaks = {way: peak(way) for way in ways}
    chosen = next((way for way in ways if peaks[way] + UNCOUNTED <= gpu), None) or min(ways, key=lambda way: peaks[way])
    verdict = "" if peaks[chosen] + UNCOUNTED <= gpu else ", which does not fit even with offloading"
    peaks_text = (
        f"{peaks[first] / 1e9:.1f} GB" if chosen is first else f"{peaks[first] / 1e9:.1f} GB without it, {peaks[chosen] / 1e9:.1f} with it"
    )
    return replace(chosen, why=f"of {gpu / 1e9:g} GB: {peaks_text}, plus {UNCOUNTED / 1e9:g} GB that is not counted{verdict}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStageMemory:
    """Memory of a frozen teacher on a rank of one pipeline stage.

    Args:
        weights_bytes: Bytes of weights, exact.
        scoring: Further bytes that a forward needs, by the tokens of a micro-batch on the rank.
    """

    weights_bytes: int = 0
    scoring: Callable[[int], int] = lambda tokens: 0


def teacher_stages(
    teacher: ModelShape | None, student: ModelShape, sizes: BatchSizes, cfg: Config, completion: int
) -> list[TeacherStageMemory]:
    """Return the teacher's memory of each pipeline stage; zeros without a teacher.

    Args:
        teacher: Shape of the teacher; None without one.
        student: Shape of the policy's model.
    """
    stages = range(sizes.layout.pp)
    if teacher is None:
        return [TeacherStageMemory() for _ in stages]
    teacher_cfg = config_of_teacher(cfg, teacher, student)
    tuning = TrainableSpec.from_config(teacher_cfg, teacher)

    def held_stage(stage: int) -> TeacherStageMemory:
        weights = count_parameters(teacher, sizes, teacher_cfg, tuning, stage).weights_bytes(tuning.size)
        activations = make_activation_estimate(teacher, sizes, teacher_cfg, tuning, stage)
        logits = logits_bytes(teacher, sizes, teacher_cfg, completion) // 2 if stage == sizes.layout.pp - 1 else 0
        return TeacherStageMemory(weights_bytes=weights, scoring=lambda tokens: activations(tokens).forward + logits)

    return [held_stage(stage) for stage in stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of a rank of one pipeline stage while the policy works, by the tokens of a micro-batch on the rank.

    Args:
        static: Bytes held for the whole run.
        logits: Bytes of the logits and their gradient; 0 except on the last stage.
        activations: Returns the activations for a number of tokens.
        teacher: Memory of the teacher.
    """

    static: StaticMemory
    logits: int
    activations: Callable[[int], Activations]
    teacher: TeacherStageMemory

    def holds(self, tokens: int, tokens_apart: int) -> dict[str, int]:
        """Return the bytes of each part by name.

        Args:
            tokens: Tokens of a micro-batch on one rank.
            tokens_apart: The same without prompt sharing.
        """
        training = self.activations(tokens).training
        return {
            **asdict(self.static),
            "teacher_bytes": self.teacher.weights_bytes,
            "activations_bytes": training,
            "activations_saved_bytes": self.activations(tokens_apart).training - training,
            "logits_bytes": self.logits,
        }

    def needs(self, tokens: int, asleep: int, *, teacher_leaves: bool) -> int:
        """Return the peak bytes of training and scoring.

        Args:
            tokens: Tokens of a micro-batch on one rank.
            asleep: Bytes that the sleeping sampler keeps.
            teacher_leaves: Whether the teacher is on the host except while it scores.
        """
        activations, teacher = self.activations(tokens), self.teacher.weights_bytes
        policy_bytes = max(activations.training + self.logits, activations.forward + self.logits // 2) + teacher * (not teacher_leaves)
        return self.static.total() + asleep + max(policy_bytes, teacher + self.teacher.scoring(tokens))


def estimate_memory(checked: CheckedConfig, tuning: TrainableSpec, lengths: Lengths | None, *, shares: bool) -> dict[str, Any]:
    """Return the `memory` object of `plan --json`: all pipeline stages and phases, the peak, and whether it fits in `gpu_memory_gb`.

    Args:
        checked: Validated configuration with a model shape.
        shares: Whether each prompt is computed once.
    """
    shape, sizes, cfg = checked.shape, checked.sizes, checked.config
    assert shape is not None
    prompt, completion = sequence_tokens(cfg, lengths, longest=True)
    tokens_apart, tokens = (
        -(-stream_tokens(sizes, cfg, prompt, completion, shares=is_shared) // sizes.layout.cp) for is_shared in (False, shares)
    )
    sampler = sampler_memory(shape, sizes, cfg, tuning, prompt + completion)
    stages, rows, synced = list[StageMemory](), list[dict[str, Any]](), sync_memory(shape, sizes, cfg, tuning)
    tower = estimate_tower(shape, sizes, cfg, tuning, min(tokens, prompt * sizes.micro_batch_size))
    teacher_memory = teacher_stages(checked.teacher, shape, sizes, cfg, completion)
    for number in range(sizes.layout.pp):
        stage = StageMemory(
            teacher=teacher_memory[number],
            static=static_memory(shape, sizes, cfg, tuning, number),
            logits=logits_bytes(shape, sizes, cfg, completion) if number == sizes.layout.pp - 1 else 0,
            activations=_with_tower(make_activation_estimate(shape, sizes, cfg, tuning, number), tower if number == 0 else None),
        )
        stages.append(stage)
        layers = len(layers_of_stage(shape.num_layers, cfg, number))
        rows.append({"stage": number, "num_layers": layers, **stage.holds(tokens, tokens_apart)})

    def phases(offload: OffloadPlan) -> list[dict[str, int]]:
        return [_phases(cfg, tuning, stage, tokens, offload, sampler, synced) for stage in stages]

    gpu = round(cfg.plan.gpu_memory_gb * 1e9) if cfg.plan.gpu_memory_gb else None
    offload = decide(cfg, lambda way: max(max(bytes_of_phases.values()) for bytes_of_phases in phases(way)), gpu)
    for row, stage, bytes_of_phases in zip(rows, stages, phases(offload), strict=True):
        row |= {"freed_bytes": offload.freed(stage.static), "phases": bytes_of_phases}
    peak, peak_stage, phase = max((bytes_, row["stage"], phase) for row in rows for phase, bytes_ in row["phases"].items())
    holds_one = cfg.rollout.vllm_mode != "colocate" or sampler["kv_cache_tokens"] >= prompt + completion
    max_tokens = _most_tokens(stages, gpu, _asleep(cfg, sampler), teacher_leaves=_teacher_leaves(cfg, offload)) if gpu else 0
    if max_tokens * sizes.layout.cp < prompt + completion:
        max_tokens = 0  # the longest sequence is a micro-batch by itself under any budget
    return {
        "peak_bytes": peak,
        "peak_stage": peak_stage,
        "peak_phase": phase,
        "gpu_memory_bytes": gpu,
        "fits": None if gpu is None else peak <= gpu and holds_one,
        "longest_sequence": prompt + completion,
        "tokens_per_micro_batch": tokens,
        "tokens_per_micro_batch_apart": tokens_apart,
        "most_tokens_per_micro_batch": None if gpu is None else max_tokens,
        "sampler": sampler,
        "offload": _offload(cfg, offload, sampler, stages),
        "staged_bytes": _staged(shape, sizes, cfg, tuning, [stage.static for stage in stages]) if cfg.run.async_save else 0,
        "stages": rows,
        **({} if tower is None else {"tower": _tower(shape, sizes, tuning.size, tower, rows)}),
        "assumptions": [*_assumptions(cfg, tuning, prompt, completion, lengths), *([TOWER] if tower else [])],
    }


def _with_tower(activations_at: Callable[[int], Activations], tower: TowerCost | None) -> Callable[[int], Activations]:
    return activations_at if tower is None else lambda tokens: activations_at(tokens) + tower.activations


def _tower(shape: ModelShape, sizes: BatchSizes, size: int, tower: TowerCost, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `tower` object. Bytes per parameter are those of the first stage's own frozen and trained parameters."""
    first_stage, activations = rows[0], tower.activations.training
    per_trained = (first_stage["gradients_bytes"] + first_stage["optimizer_bytes"]) / max(first_stage["num_trainable_parameters"], 1)
    static = round(tower.parameters * size + tower.trainable_parameters * per_trained)
    return {
        "parameters": tower.parameters,
        "trainable_parameters": tower.trainable_parameters,
        "static_bytes": static,
        "patches_per_micro_batch": tower.patches,
        "activations_bytes": activations,
        "outweighs": fewer_layers(shape, sizes, rows, static + activations),
    }


def stream_tokens(sizes: BatchSizes, cfg: Config, prompt: int, completion: int, *, shares: bool) -> int:
    """Return the tokens of the fullest micro-batch if every sequence has the given lengths. A token budget limits them, shared or not.

    Args:
        prompt: Prompt length in tokens.
        shares: Whether each prompt is computed once.
    """
    budget, rows, group = cfg.batch.max_tokens_per_micro_batch, sizes.micro_batch_size, sizes.num_generations
    if budget:
        return max(budget, prompt + completion)
    # The first group of a micro-batch may begin before it, by a multiple of gcd(rows, group).
    prompts = -(-(group - math.gcd(rows, group) + rows) // group) if shares else rows
    return min(prompts, rows) * prompt + rows * completion


def _most_tokens(stages: Sequence[StageMemory], gpu: int, asleep: int, *, teacher_leaves: bool) -> int:
    """Return the maximum tokens of a micro-batch on one rank with which training and scoring fit on every stage; 0 if none does."""

    def is_enough(tokens: int) -> bool:
        return all(stage.needs(tokens, asleep, teacher_leaves=teacher_leaves) <= gpu for stage in stages)

    return bisect.bisect_left(range(1, MOST_TOKENS + 1), True, key=lambda tokens: not is_enough(tokens))


def _asleep(cfg: Config, sampler: Mapping[str, int]) -> int:
    """Return the bytes that the sampler keeps on the GPU while it sleeps."""
    wake_up = sampler["weights_bytes"] + sampler["adapters_bytes"] + sampler["kv_cache_bytes"]
    return {0: wake_up, 1: 0, 2: 0}[cfg.rollout.sleep_level]


def _teacher_leaves(cfg: Config, offload: OffloadPlan) -> bool:
    """Return whether the teacher is on the host except while it scores."""
    return cfg.grpo.offload_teacher_model or offload.model


def _offload(cfg: Config, chosen: OffloadPlan, sampler: Mapping[str, int], stages: Sequence[StageMemory]) -> dict[str, Any]:
    """Return the `offload` object: what is offloaded on the rank that offloads most, and the maximum if everything were."""
    on_host = sampler["weights_bytes"] + sampler["adapters_bytes"] if cfg.rollout.sleep_level == 1 else 0

    def fields(way: OffloadPlan, prefix: str = "") -> dict[str, Any]:
        copied = max(way.copied(stage.static) + stage.teacher.weights_bytes * _teacher_leaves(cfg, way) for stage in stages)
        return {
            f"{prefix}freed_bytes": max(way.freed(stage.static) for stage in stages),
            f"{prefix}host_bytes": copied + on_host,
            f"{prefix}seconds_per_rollout": 2 * copied / LINK,
        }

    all_offloaded = OffloadPlan(model=True, optimizer=True)
    return {"model": chosen.model, "optimizer": chosen.optimizer, "why": chosen.why, **fields(chosen), **fields(all_offloaded, "most_")}


def _staged(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, statics: Sequence[StaticMemory]) -> int:
    """Return the host memory of a checkpoint copy on a rank of the widest stage, averaged over its ranks.

    A stage's share of the checkpoint is its share of the trainable parameters; its ranks split that share.
    """
    widest, all_stages = (combine(static.num_trainable_parameters for static in statics) for combine in (max, sum))
    ranks = sizes.layout.world_size // sizes.layout.pp
    return -(-checkpoint_bytes(shape, sizes, cfg, tuning) * widest // max(1, all_stages * ranks))


def _phases(
    cfg: Config, tuning: TrainableSpec, stage: StageMemory, tokens: int, offload: OffloadPlan, sampler: Mapping[str, int], synced: int
) -> dict[str, int]:
    """Return the peak bytes of each phase.

    While the sampler works, the parts of the policy that are not offloaded stay on the GPU. Log-probs of later steps of a rollout are
    computed with everything on the GPU. A teacher scores before the policy is loaded back, unless the KL in the reward needed the policy
    just before.

    Args:
        synced: Bytes in transit during a weight sync.
    """
    teacher, leaves, asleep = stage.teacher, _teacher_leaves(cfg, offload), _asleep(cfg, sampler)
    base, activations = stage.static.total() + teacher.weights_bytes * (not leaves), stage.activations(tokens)
    freed_for_scoring = 0 if cfg.grpo.kl_in_reward and cfg.grpo.beta else offload.freed(stage.static)
    scoring = base - freed_for_scoring + teacher.weights_bytes * leaves + asleep + teacher.scoring(tokens)
    sampler_bytes = sampler["weights_bytes"] + sampler["adapters_bytes"]
    wake_up = sampler_bytes + sampler["kv_cache_bytes"]
    # The verification of the first adapter sync has woken the KV cache.
    is_awake = cfg.rollout.sleep_level == 0 or (tuning.adapter_size and cfg.rollout.verify_weight_sync)
    return {
        "rollout": base - offload.freed(stage.static) + wake_up,
        "logprobs": base + asleep + activations.forward + stage.logits // 2,
        "training": base + asleep + activations.training + stage.logits,
        **({"teacher": scoring} if teacher.weights_bytes else {}),
        "weight_push": base - offload.freed(stage.static, during_sync=True) + (wake_up if is_awake else sampler_bytes) + synced,
    }


def _assumptions(cfg: Config, tuning: TrainableSpec, prompt: int, completion: int, lengths: Lengths | None) -> list[str]:
    lengths_source = (
        f"the longest of {cfg.plan.lengths}"
        if lengths
        else f"max_prompt_length {'set' if cfg.data.max_prompt_length else 'not set, assumed ' + str(prompt)}, max_completion_length"
    )
    kv = "the rest of vllm_gpu_memory_utilization after its weights" if cfg.plan.gpu_memory_gb else "all its sequences at full length"
    sleeping = {
        0: "vLLM keeps its memory during training",
        1: "vLLM's weights are on the host during training",
        2: "vLLM drops its weights during training",
    }
    reference = []
    if tuning.adapter_size and cfg.grpo.beta > 0 and not cfg.grpo.ref_model:
        reference_text = (
            f"the reference adapter ({cfg.tuner.ref_adapters or cfg.tuner.adapters})" if tuning.reference_rank else "adapters off"
        )
        reference = [f"reference: the same model with {reference_text}"]
    scaled = {"fp16", "fp8"} & {cfg.optimizer.main_params_dtype, cfg.optimizer.exp_avg_dtype, cfg.optimizer.exp_avg_sq_dtype}
    scales = [f"scales of {' and '.join(sorted(scaled))}, 4 bytes per {BLOCK:,} numbers, not counted"] if scaled else []
    return [
        "weights and gradients are exact; optimizer state is an equal share per rank; alignment and Adam's step counters are not counted",
        *scales,
        *reference,
        f"every sequence has {prompt} + {completion} tokens ({lengths_source})",
        "activations: flash attention, fused norms, no dropout; saved for the backward pass of all micro-batches in flight",
        f"logits: {cfg.model.logprob_chunk_size} positions at a time in float32, and their gradient",
        *([] if cfg.rollout.vllm_mode == "server" else [f"KV cache: {kv}"]),
        f"weight sync: two buckets of {bucket_bytes(cfg) // MIB} MiB (weight_sync_bucket_mb), or the largest parameter; vLLM's buffers for "
        "incomplete layers are not counted",
        "vLLM is on rollout servers and takes no memory here"
        if cfg.rollout.vllm_mode == "server"
        else sleeping[cfg.rollout.sleep_level] + f" (sleep_level {cfg.rollout.sleep_level})",
        "not counted: CUDA context, NCCL buffers, CUDA graphs, fragmentation (typically 3 to 6 GB per GPU)",
    ]
