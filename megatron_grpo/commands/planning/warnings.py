"""Warnings about settings that are valid but probably not intended, as rules that `config.rules` evaluates, and notes about a dialect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo import name_adam
from megatron_grpo.commands.planning.summary import bubble_fraction, staleness, wanted_micro_batches
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.policy.requirements import make_lr_schedule
from megatron_grpo.core.settings import OptimizerConfig
from megatron_grpo.core.weights.lora import LoraSync, make_lora_settings
from megatron_grpo.run.adapters import peft_leaves_out
from megatron_grpo.run.check import CheckedConfig
from megatron_grpo.run.config.rules import PLUG_INS, Rule, Rules, broken_rules, make_namespace
from megatron_grpo.run.config.rules import grpo as grpo_validation
from megatron_grpo.run.models import bound_notes

BUBBLE = 0.3
GPU_DRIVER = Path("/dev/nvidiactl")
_BITS = {"bf16": 7, "fp16": 10, "fp8": 3}  # bits of the mantissa


def list_warnings(
    checked: CheckedConfig,
    schedule: TrainingSchedule,
    memory: dict[str, Any] | None,
    cost: dict[str, Any] | None,
    adapter_sync: LoraSync | None = None,
) -> list[str]:
    """Return all warnings of a valid configuration, one sentence each.

    Args:
        memory: `memory` object of the plan; None if unknown.
        cost: `cost` object of the plan; None if unknown.
        adapter_sync: How adapters reach the sampler; None without adapters or if unknown.
    """
    cfg, shape = checked.config, checked.shape
    c = make_namespace(
        cfg, sizes=checked.sizes, layout=checked.sizes.layout, schedule=schedule, steps=schedule.num_steps, memory=memory,
        adapter_sync=adapter_sync, sharing=cost["sharing"] if cost else None, shape=shape, worst=_max_staleness(schedule),
        corrected=cfg.grpo.rollout_importance_sampling_mode != "none" or cfg.grpo.off_policy_sequence_mask_delta is not None,
    )  # fmt: skip

    def sentences(rules: Rules) -> Iterator[str]:
        return (problem.message for problem in broken_rules(rules, c))

    is_multimodal = shape is not None and shape.vision is not None
    return [
        *_dialect(checked), *checked.parsed.repeated, *sentences(SIZE_WARNINGS), *sentences(RUN_WARNINGS), *grpo_validation.warnings(cfg),
        *lost_update_warnings(cfg.optimizer),
        *sentences(ADAPTER_WARNINGS), *sentences(MACHINE_WARNINGS),
        *(f"Note: {sentence}" for sentence in (bound_notes(cfg.data) if is_multimodal else ())),
    ]  # fmt: skip


def lost_update_warnings(opt: OptimizerConfig) -> Iterator[str]:
    """Yield warnings about updates that rounding to nearest always discards with the chosen dtypes."""
    for name, beta in (("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")):
        dtype, moves = getattr(opt, f"{name}_dtype"), 1 - getattr(opt, beta)
        half = 2.0 ** -(_BITS[dtype] + 1) if dtype in _BITS else 0.0
        # The worst case is the smallest number above a power of two, 1 + 2 half.
        if moves <= half / (1 + 2 * half):
            yield (
                f"{name}_dtype {dtype} with {beta} {getattr(opt, beta):g}: a step decreases the average by at most {moves:.3g} of its "
                f"value, but {dtype} rounds by up to {half / (1 + 2 * half):.3g}, so a high average may never decrease. Use fp32, or "
                f"{beta} below {1 - half / (1 + 2 * half):.3g}."
            )
    if opt.main_params_dtype == "fp16" and opt.lr > 0:
        yield (
            f"main_params_dtype fp16 with lr {opt.lr:g}: a step of Adam changes a weight by about lr, but fp16 rounds a weight w by up to "
            f"w / 2,048, so weights above {opt.lr * 2048:.3g} mostly do not change. Use fp32."
        )


def _dialect(checked: CheckedConfig) -> Iterator[str]:
    cfg, parsed = checked.config, checked.parsed
    if parsed.system is None:
        return
    yield from parsed.system.explain(checked.sizes, cfg.run.max_steps)
    yield from parsed.notes
    for source, names in parsed.aside.items():
        reason = "with these values they affect neither sampling nor training here"
        yield f"Note: ignored settings of {source} ({reason}): {', '.join(names)}."


# ---- conditions of the rules: the values that a sentence needs; None or empty if the rule does not apply --------------------------------


def _max_staleness(schedule: TrainingSchedule) -> int:
    """Return the maximum staleness of the rows that the run trains, in optimizer steps."""
    sizes, last = schedule.sizes, math.inf if schedule.num_steps is None else schedule.num_steps - 1
    # Staleness repeats after lcm(A, W * mu) micro-steps; the first rollouts show the worst case.
    length = sizes.micro_steps_per_rollout * sizes.num_iterations
    # More with asynchronous rollouts, because the first rollouts of a run are less stale.
    num_rollouts = min(sizes.gradient_accumulation_steps, 1000) * (2 + sizes.async_rollout_depth if sizes.async_rollout_depth else 1)
    reached = (r for r in range(num_rollouts) if schedule.find_version(r) <= last)
    return int(max(min(schedule.find_step((r + 1) * length - 1), last) - schedule.oldest_version(r) for r in reached))


def _ahead(c: SimpleNamespace) -> dict[str, Any] | None:
    """Check for a rollout that is sampled ahead and trained for more than one optimizer step."""
    steps_per_rollout = c.sizes.steps_per_generation * c.sizes.num_iterations
    if not c.sizes.async_rollout_depth or steps_per_rollout <= 1:
        return None
    mean, max_staleness = staleness(c.sizes)
    return {
        "each": steps_per_rollout,
        "mean": mean,
        "most": max_staleness,
        "steps": f"{c.sizes.async_rollout_depth} step{'s' * (c.sizes.async_rollout_depth > 1)}",
        "of_own_step": f"; with save_steps a multiple of {steps_per_rollout}, by the weights of its own step",
    }


def _idle(c: SimpleNamespace) -> dict[str, Any] | None:
    engines = c.layout.world_size // c.vllm_tensor_parallel_size
    idle = (engines - c.sizes.num_rollout_prompts) * c.vllm_tensor_parallel_size
    return {"engines": engines, "idle": idle} if idle > 0 and c.vllm_mode != "server" else None


def _waits(c: SimpleNamespace) -> dict[str, Any]:
    """Return the pipeline idle time, with the micro-batches of the token budget if known."""
    m = c.sharing["micro_batches_of_rank_shared"] if c.sharing else c.sizes.gradient_accumulation_steps
    waits = c.layout.pp - 1
    return {"m": m, "waits": waits, "vpp": c.layout.num_chunks, "fraction": bubble_fraction(c.sizes, m)}


def _fewer_micro_batches(c: SimpleNamespace) -> dict[str, Any] | None:
    """Check for prompt sharing that leaves too few micro-batches."""
    waits, num_wanted = _waits(c), wanted_micro_batches(c.sizes)
    if not c.sharing or waits["m"] >= min(c.sharing["micro_batches_of_rank_apart"], num_wanted):
        return None
    smaller = c.sharing["budget"]
    way = (
        f"a smaller max_tokens_per_micro_batch ({smaller['max_tokens_per_micro_batch']} instead of {c.max_tokens_per_micro_batch}), which "
        f"gives {smaller['micro_batches_of_rank']} micro-batches and a bubble of {smaller['bubble']:.0%}"
        if smaller
        else f"a larger global_batch_size: it has too few rows for {num_wanted} micro-batches per rank"
    )
    return waits | {"way": way}


def _long_waits(c: SimpleNamespace) -> dict[str, Any] | None:
    waits = _waits(c)
    budget = c.sharing and c.max_tokens_per_micro_batch
    name, smaller = ("m", "max_tokens_per_micro_batch") if budget else ("A", "micro_batch_size")
    return waits | {"name": name, "smaller": smaller} if waits["fraction"] > BUBBLE else None


def _warmup(c: SimpleNamespace) -> dict[str, Any] | None:
    warmup = make_lr_schedule(c.cfg.optimizer, c.steps).warmup if c.steps is not None else 0
    return {"warmup": warmup} if c.steps is not None and warmup >= c.steps else None


def _shown_beyond_the_end(c: SimpleNamespace) -> dict[str, Any] | None:
    num_micro_steps = c.plan_rollouts * c.sizes.micro_steps_per_rollout * c.sizes.num_iterations
    is_beyond = c.steps is not None and c.schedule.find_first_micro_step(c.steps) < num_micro_steps
    return {"s": "s" * (c.steps > 1)} if is_beyond else None


def _weight_sync_notes(c: SimpleNamespace) -> list[dict[str, Any]]:
    notes = [note.removeprefix("WARNING: ") for note in (c.adapter_sync.notes if c.adapter_sync else ())]
    return [{"note": note[0].upper() + note[1:]} for note in notes]


def _unread_by_peft(c: SimpleNamespace) -> dict[str, Any] | None:
    settings = make_lora_settings(c.cfg.tuner, c.shape) if c.shape else None
    unread = peft_leaves_out(settings, c.shape) if settings else None
    return {"lost": unread} if unread else None


def _peak(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the peak of an estimate that does not fit in GPU memory, in GB."""
    if not c.memory or not c.memory.get("gpu_memory_bytes") or c.memory["fits"]:
        return None
    peak, gpu = c.memory["peak_bytes"], c.memory["gpu_memory_bytes"]
    return {"peak": peak / 1e9, "gpu": gpu / 1e9, "is_over": peak > gpu}


def _ways_to_fit(c: SimpleNamespace) -> list[dict[str, Any]]:
    return [
        {"changes": ", ".join(f"{name} {str(value).lower()}" for name, value in way["settings"].items()),
         "peak": way["peak_bytes"] / 1e9, "phase": way["peak_phase"].replace("push", "sync").replace("_", " ")}
        for way in (c.memory["would_fit"] if _peak(c) else ())
    ]  # fmt: skip


def _nothing_fits(c: SimpleNamespace) -> dict[str, Any] | None:
    if not _peak(c) or c.memory["would_fit"]:
        return None
    offload_flags = (
        "sleep_level, offload_model, offload_optimizer, vllm_gpu_memory_utilization, " if c.memory["sampler"]["weights_bytes"] else ""
    )
    return {"room": offload_flags}


def _needless_offload(c: SimpleNamespace) -> dict[str, Any] | None:
    flags = [name for name in ("offload_model", "offload_optimizer") if getattr(c, name) == "true"]
    return {"asked": " and ".join(flags)} if flags and c.vllm_mode != "colocate" else None


def _find_image_settings(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the image settings typed for a text model."""
    if c.shape is None or c.shape.vision is not None:
        return None
    flags = [name for name in ("data_root", "max_pixels", "min_pixels", "limit_images") if getattr(c, name) is not None]
    return {"typed": " and ".join(flags), "do": "have" if len(flags) > 1 else "has"} if flags else None


def _is_of_swift(c: SimpleNamespace) -> bool:
    """Return whether Megatron-SWIFT's stricter rules about prompts matter to the user, who typed its names."""
    return c.dialect == "swift-megatron"


# ---- the rules ---------------------------------------------------------------------------------------------------------------------------

# fmt: off
SIZE_WARNINGS: Rules = (
    Rule("global_batch_size num_generations", lambda c: c.sizes.global_batch_size % c.sizes.num_generations,
         "A prompt's group is split over optimizer steps: global_batch_size ({sizes.global_batch_size}) / num_generations "
         "({sizes.num_generations}) = {sizes.num_train_prompts:g} prompts. Advantages are still computed over the whole group. Use a "
         "multiple of {sizes.num_generations} to train groups together."),
    (
        Rule("old_logprobs", lambda c: c.worst > 0 and c.sizes.old_logprobs == "rollout" and not c.corrected,
             "old_logprobs rollout uses the sampler's log-probs for stale rows, without a correction for the mismatch between sampler and "
             "trainer. Consider --rollout_importance_sampling_mode token_truncate."),
        Rule("old_logprobs", lambda c: c.worst == 0 and c.sizes.old_logprobs == "rollout",
             "old_logprobs rollout has no effect: all rows of this run are trained on-policy, where the ratio is to the current weights. "
             "Rows become stale with steps_per_generation or num_iterations above 1."),
        Rule("router_replay_mode", lambda c: c.worst == 0 and c.router_replay_mode == "R2",
             "router_replay_mode R2 has no effect: all rows of this run are trained on-policy, where the replayed experts are the current "
             "choice. Rows become stale with steps_per_generation or num_iterations above 1."),
        Rule("steps_per_generation", lambda c: c.worst > 0 and not c.corrected and {"s": "s" * (c.worst > 1)},
             "Rows are up to {worst} optimizer step{s} stale, and only clipping corrects for it. Consider "
             "--rollout_importance_sampling_mode token_truncate, or a rollout of one optimizer step (steps_per_generation 1, "
             "num_iterations 1)."),
    ),
    Rule("async_rollout_depth", _ahead,
         "With async_rollout_depth {async_rollout_depth}, rows are up to {most} optimizer steps stale when they are trained ({mean:.3g} "
         "on average), because a rollout is trained for {each:g} steps. With rollouts of one optimizer step (steps_per_generation 1, "
         "num_iterations 1) rows are {steps} stale."),
    Rule("async_rollout_depth kl_in_reward",
         lambda c: c.kl_in_reward and not c.sizes.partial_rollouts and (values := _ahead(c))
         and values | {"rest": values["of_own_step"] * isinstance(values["each"], int)},
         "Note: a checkpoint between two sampling steps includes the rollout that is being sampled, and its KL in the reward is then "
         "computed with the weights at that time{rest}."),
    Rule("generation_batch_size vllm_tensor_parallel_size", _idle,
         "{idle} of {layout.world_size} ranks are idle while sampling: a rollout has {sizes.num_rollout_prompts} prompts for {engines} "
         "engines. Raise generation_batch_size, or vllm_tensor_parallel_size."),
    (
        Rule("max_tokens_per_micro_batch", _fewer_micro_batches,
             "With shared prefixes a rank has {m} micro-batches instead of {sharing[micro_batches_of_rank_apart]}, and the pipeline bubble "
             "is {fraction:.0%} of a training step instead of {sharing[bubble_apart]:.0%}: (pp - 1) / (vpp x m + pp - 1) = {waits} / "
             "({vpp} x {m} + {waits}). Use {way}."),
        Rule("micro_batch_size", _long_waits,
             "The pipeline bubble is {fraction:.0%} of a training step: (pp - 1) / (vpp x {name} + pp - 1) = {waits} / ({vpp} x {m} + "
             "{waits}). Use more micro-steps (a larger global_batch_size or a smaller {smaller}), fewer stages, or interleaved stages."),
    ),
    (
        Rule("generation_batch_size", lambda c: _is_of_swift(c) and c.sizes.num_rollout_prompts % c.sizes.dp_size,
             "Megatron-SWIFT rejects this configuration: its code requires generation_batch_size / num_generations "
             "({sizes.num_rollout_prompts}) to be a multiple of dp_size ({sizes.dp_size}). This package does not."),
        Rule("generation_batch_size", lambda c: _is_of_swift(c) and (each := c.sizes.num_rollout_prompts // c.sizes.dp_size)
             % c.sizes.micro_batch_size and {"each": each},
             "Megatron-SWIFT rejects this configuration: its code requires generation_batch_size / num_generations / dp_size ({each}) to "
             "be a multiple of micro_batch_size ({sizes.micro_batch_size}). This package does not."),
    ),
    Rule("global_batch_size", lambda c: _is_of_swift(c)
         and c.sizes.global_batch_size % (c.sizes.num_generations * c.sizes.dp_size * c.sizes.micro_batch_size),
         "Note: the Megatron-SWIFT guide requires global_batch_size / num_generations / dp_size ({sizes.num_prompts_per_dp_group:g}) to be "
         "a multiple of micro_batch_size ({sizes.micro_batch_size}). Neither its code nor this package does."),
)
RUN_WARNINGS: Rules = (
    Rule("sync_ref_model", lambda c: c.sync_ref_model and c.steps is not None and c.steps < c.ref_model_sync_steps,
         "sync_ref_model never updates the reference: ref_model_sync_steps ({ref_model_sync_steps}) exceeds the {steps} optimizer steps of "
         "the run."),
    Rule("lr_warmup_fraction", _warmup,
         "The learning rate never reaches lr ({lr:g}): the warm-up takes {warmup} optimizer steps, and the run has {steps}."),
    Rule("max_steps num_train_epochs", lambda c: c.max_steps is not None and c.num_train_epochs is not None,
         "max_steps ({max_steps}) sets the length of the run; num_train_epochs ({num_train_epochs:g}) is ignored."),
    Rule("plan_rollouts", _shown_beyond_the_end,
         "The run ends after {steps} optimizer step{s}: it does not reach all of the {plan_rollouts} rollouts shown in the schedule."),
)
ADAPTER_WARNINGS: Rules = (
    Rule("lr tuner_type", lambda c: c.tuner_type == "lora" and c.cfg.sources.get("lr", "default") == "default",
         "Note: lr has its default, {lr:g}, which is meant for training all weights. Adapters typically need at least ten times as much."),
    Rule("vllm_enable_lora", _weight_sync_notes, "{note}"),
    Rule("sleep_level", lambda c: c.tuner_type == "lora" and c.sleep_level == 2 and c.adapter_sync and c.adapter_sync.kind == "adapter",
         "sleep_level 2 drops vLLM's copy of the base model, so each weight sync sends the whole model before the adapter. Use sleep_level "
         "1 to keep it."),
    Rule("target_modules", _unread_by_peft, "{lost}"),
)
MACHINE_WARNINGS: Rules = (
    PLUG_INS["warnings of servers"], PLUG_INS["warnings of agents"],
    Rule("vllm_gpu_memory_utilization", lambda c: (values := _peak(c)) and not values["is_over"],
         "vllm_gpu_memory_utilization leaves a KV cache of {memory[sampler][kv_cache_tokens]:,} tokens after vLLM's weights, but a "
         "sequence has up to {memory[longest_sequence]:,}."),
    Rule("gpu_memory_gb", lambda c: (values := _peak(c)) and values["is_over"] and values,
         "The estimated peak ({peak:.1f} GB, pipeline stage {memory[peak_stage]}, {memory[peak_phase]}) does not fit in gpu_memory_gb "
         "({gpu:g})."),
    Rule("gpu_memory_gb", _ways_to_fit, "These settings would fit: {changes}; peak {peak:.1f} GB ({phase})."),
    Rule("gpu_memory_gb", _nothing_fits,
         "None of the tried changes makes it fit: {room}full recompute, and two and four times the parallel size."),
    Rule("offload_model offload_optimizer", _needless_offload,
         "{asked} true has no effect: no sampler shares these GPUs (vllm_mode {vllm_mode})."),
    Rule("rank_heartbeat_timeout distributed_timeout_minutes",
         lambda c: c.layout.world_size > 1 and (limit := 60 * c.distributed_timeout_minutes) <= c.rank_heartbeat_timeout
         and {"limit": limit},
         "A hanging rank would not be identified: rank_heartbeat_timeout ({rank_heartbeat_timeout:g} s) is not shorter than "
         "distributed_timeout_minutes ({distributed_timeout_minutes:g} = {limit:g} s), after which a collective ends the run and "
         "identifies a rank only if it is stopped."),
    Rule("model", lambda c: c.shape is not None and c.shape.delta_net is not None and (c.gpu_memory_gb or GPU_DRIVER.exists())
         and not find_spec("fla"),
         "Note: flash-linear-attention is not installed here. On a GPU without it a layer with the gated delta rule starts about 1,300 "
         "kernels per micro-batch (counted, not measured), and their launches bound the speed. pip install 'megatron-grpo[fla]'."),
    Rule("optimizer_kwargs", lambda c: GPU_DRIVER.exists() and {"adam": name_adam()},
         "Note: {adam} takes the optimizer's steps on this machine's GPUs."),
    Rule("max_pixels", _find_image_settings, "{typed} {do} no effect: {shape.architecture} is a text-only model."),
)
# fmt: on
