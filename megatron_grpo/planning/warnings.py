"""Legal, but probably not meant: one sentence each. Also what a dialect changes in the reading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.config.config import Config
from megatron_grpo.config.optimizer import course_of, lost
from megatron_grpo.config.servers import addresses_of
from megatron_grpo.data.eyes import said_of_bounds
from megatron_grpo.grpo import validation as grpo_validation
from megatron_grpo.planning.check import Checked
from megatron_grpo.planning.sharing import wanted_micro_batches
from megatron_grpo.planning.summary import bubble_fraction, staleness
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.weights.lora import lora_of, peft_leaves_out
from megatron_grpo.weights.shape import ModelShape

BUBBLE = 0.3


def warnings_of(
    checked: Checked, timetable: Timetable, memory: dict[str, Any] | None, cost: dict[str, Any] | None, push: LoraPush | None = None
) -> list[str]:
    """All warnings of a configuration that passes. push: how its adapters reach the sampler, where that is known."""
    cfg, sizes = checked.config, checked.sizes
    return [
        *_dialect(checked),
        *checked.parsed.repeated,
        *_groups(sizes),
        *_staleness(cfg, timetable),
        *_ahead(cfg, sizes),
        *_idle(checked),
        *_bubble(cfg, sizes, cost["sharing"] if cost else None),
        *_swift(cfg, sizes),
        *_run(cfg, timetable),
        *grpo_validation.warnings(cfg),
        *lost(cfg.optimizer),
        *_lora(cfg, checked.shape, push),
        *_servers(cfg),
        *_memory(memory),
        *_room(cfg),
        *_watch(cfg, sizes),
        *_pictures(cfg, checked.shape),
    ]


def _pictures(cfg: Config, shape: ModelShape | None) -> Iterator[str]:
    if shape is None:
        return
    if shape.vision is not None:
        yield from (f"Note: {sentence}" for sentence in said_of_bounds(cfg.data))
        return
    typed = [name for name in ("data_root", "max_pixels", "min_pixels", "limit_images") if getattr(cfg.data, name) is not None]
    if typed:
        does = "do" if len(typed) > 1 else "does"
        yield f"{' and '.join(typed)} {does} nothing: {shape.architecture} is a model of text and sees no pictures."


def _watch(cfg: Config, sizes: BatchSizes) -> Iterator[str]:
    seconds, minutes = cfg.parallel.rank_heartbeat_timeout, cfg.parallel.distributed_timeout_minutes
    if sizes.layout.world_size > 1 and seconds >= 60 * minutes:
        yield (
            f"A rank that hangs would not be named: rank_heartbeat_timeout ({seconds:g} s) is no shorter than distributed_timeout_minutes "
            f"({minutes:g} = {60 * minutes:g} s), after which a collective ends the run, and names a rank only if it is stopped."
        )


def _dialect(checked: Checked) -> Iterator[str]:
    cfg, parsed = checked.config, checked.parsed
    if parsed.system is None:
        return
    yield from parsed.system.explain(checked.sizes, cfg.run.max_steps)
    yield from parsed.notes
    for source, names in parsed.aside.items():
        why = "as they are set, they change neither what is sampled nor what is trained here"
        yield f"Note: names of {source} were set aside, for {why}: {', '.join(names)}."


def defaults_of(checked: Checked) -> list[str]:
    """The defaults of a dialect that nobody typed and that are not ours, for programs; people get a table."""
    return [f"{row.name} is {row.ours} by default here and {row.theirs} there; {row.used} is used." for row in checked.parsed.defaults]


def _groups(sizes: BatchSizes) -> Iterator[str]:
    size, group = sizes.global_batch_size, sizes.num_generations
    if size % group:
        yield (
            f"A prompt's group is split over optimizer steps: global_batch_size ({size}) / num_generations ({group}) = "
            f"{sizes.num_train_prompts:g} prompts. Its advantages are still computed over the whole group; use a multiple of "
            f"{group} to train "
            "groups together."
        )


def _worst_staleness(timetable: Timetable) -> int:
    """In optimizer steps, over every row that the run trains."""
    sizes, last = timetable.sizes, math.inf if timetable.num_steps is None else timetable.num_steps - 1
    # Staleness repeats after lcm(A, W * mu) micro-steps; the first rollouts show the worst case.
    length = sizes.micro_steps_per_rollout * sizes.num_iterations
    # Three times as many where sampling runs ahead: the beginning of a run is fresher.
    num_rollouts = min(sizes.gradient_accumulation_steps, 1000) * (3 if sizes.async_rollout_depth else 1)
    reached = (r for r in range(num_rollouts) if timetable.version_of(r) <= last)
    return int(max(min(timetable.step_of((r + 1) * length - 1), last) - timetable.sampled_by(r) for r in reached))


def _staleness(cfg: Config, timetable: Timetable) -> Iterator[str]:
    sizes, worst = timetable.sizes, _worst_staleness(timetable)
    corrected = cfg.grpo.rollout_importance_sampling_mode != "none" or cfg.grpo.off_policy_sequence_mask_delta is not None
    if worst > 0 and sizes.old_logprobs == "rollout" and not corrected:
        yield (
            "old_logprobs rollout takes the sampler's own log-probs for stale rows, without a correction for the mismatch "
            "between sampler and "
            "trainer. Consider --rollout_importance_sampling_mode token_truncate."
        )
    elif sizes.old_logprobs == "rollout" and worst == 0:
        yield (
            "old_logprobs rollout changes nothing: no row of this run is stale when it is trained, and a fresh row takes its ratio "
            "against the weights themselves. Rows become stale with steps_per_generation or num_iterations above 1."
        )
    elif worst == 0 and cfg.grpo.router_replay_mode == "R2":
        yield (
            "router_replay_mode R2 changes nothing: no row of this run is stale when it is trained, and a fresh row's own choice of "
            "experts is the one that would be replayed. Rows become stale with steps_per_generation or num_iterations above 1."
        )
    elif worst > 0 and not corrected:
        yield (
            f"Rows are up to {worst} optimizer step{'s' if worst > 1 else ''} stale, and nothing but the clip corrects for it. Consider "
            "--rollout_importance_sampling_mode token_truncate, or a rollout of one optimizer step (steps_per_generation 1, "
            "num_iterations 1)."
        )


def _ahead(cfg: Config, sizes: BatchSizes) -> Iterator[str]:
    if not sizes.async_rollout_depth:
        return
    steps = sizes.steps_per_generation * sizes.num_iterations
    if steps > 1:
        mean, most = staleness(sizes)
        yield (
            f"One rollout ahead, rows are up to {most} optimizer steps stale when they are trained ({mean:.3g} on average), since a "
            f"rollout is trained for {steps:g} of them. A rollout of one optimizer step (steps_per_generation 1, num_iterations 1) is 1 "
            "step stale."
        )
    if cfg.grpo.kl_in_reward and steps > 1:
        yield (
            "Note: a checkpoint between two sampling steps takes in the rollout that is being sampled, and its KL in the reward is then "
            "measured by the weights of that moment"
            + (f"; with save_steps a multiple of {steps} by those of its own step." if isinstance(steps, int) else ".")
        )


def _idle(checked: Checked) -> Iterator[str]:
    cfg, sizes = checked.config, checked.sizes
    if cfg.rollout.vllm_mode == "server":
        return
    engines = sizes.layout.world_size // cfg.rollout.vllm_tensor_parallel_size
    if sizes.num_rollout_prompts < engines:
        idle = (engines - sizes.num_rollout_prompts) * cfg.rollout.vllm_tensor_parallel_size
        yield (
            f"{idle} of {sizes.layout.world_size} ranks are idle while sampling: a rollout has {sizes.num_rollout_prompts} prompts "
            f"for {engines} engines. "
            "Raise generation_batch_size, or vllm_tensor_parallel_size."
        )


def _bubble(cfg: Config, sizes: BatchSizes, sharing: dict[str, Any] | None) -> Iterator[str]:
    """sharing: the `sharing` object, where it is known how many micro-batches a token budget makes."""
    pp, vpp, budget = sizes.layout.pp, sizes.layout.num_chunks, cfg.batch.max_tokens_per_micro_batch
    m = sharing["micro_batches_of_rank_shared"] if sharing else sizes.gradient_accumulation_steps
    fraction = bubble_fraction(sizes, m)
    if sharing and m < min(sharing["micro_batches_of_rank_apart"], wanted_micro_batches(sizes)):
        smaller = sharing["budget"]
        way = (
            f"a smaller max_tokens_per_micro_batch ({smaller['max_tokens_per_micro_batch']} in place of {budget}), which leaves "
            f"{smaller['micro_batches_of_rank']} and a wait of {smaller['bubble']:.0%}"
            if smaller
            else f"a larger global_batch_size: its rows are too few for {wanted_micro_batches(sizes)} micro-batches a rank"
        )
        yield (
            f"With each prompt computed once a rank has {m} micro-batches in place of {sharing['micro_batches_of_rank_apart']}, and "
            f"pipeline stages wait {fraction:.0%} of a training step in place of {sharing['bubble_apart']:.0%}: (pp - 1) / (vpp x m + pp - "
            f"1) = {pp - 1} / ({vpp} x {m} + {pp - 1}). Use {way}."
        )
    elif fraction > BUBBLE:
        name, smaller_size = ("m", "max_tokens_per_micro_batch") if sharing and budget else ("A", "micro_batch_size")
        yield (
            f"Pipeline stages wait {fraction:.0%} of a training step: (pp - 1) / (vpp x {name} + pp - 1) = {pp - 1} / ({vpp} x "
            f"{m} + {pp - 1}). "
            f"Use more micro-steps (a larger global_batch_size or a smaller {smaller_size}), fewer stages, or interleaved ones."
        )


def _swift(cfg: Config, sizes: BatchSizes) -> Iterator[str]:
    """Megatron-SWIFT's own rules about prompts, stricter than the mathematics need; nothing to who comes from another system."""
    if cfg.plan.dialect not in (None, "swift-megatron"):
        return
    prompts, dp, size = sizes.num_rollout_prompts, sizes.dp_size, sizes.micro_batch_size
    if prompts % dp:
        yield (
            f"Megatron-SWIFT would refuse this configuration: its code wants generation_batch_size / num_generations "
            f"({prompts}) to be a multiple "
            f"of dp_size ({dp}). Nothing here needs that."
        )
    elif prompts // dp % size:
        yield (
            f"Megatron-SWIFT would refuse this configuration: its code wants generation_batch_size / num_generations / "
            f"dp_size ({prompts // dp}) "
            f"to be a multiple of micro_batch_size ({size}). Nothing here needs that."
        )
    if sizes.global_batch_size % (sizes.num_generations * dp * size):
        yield (
            f"Note: the Megatron-SWIFT guide asks that global_batch_size / num_generations / dp_size "
            f"({sizes.num_prompts_per_dp_group:g}) be a "
            f"multiple of micro_batch_size ({size}). Its code does not check this, and nothing here needs it."
        )


def _run(cfg: Config, timetable: Timetable) -> Iterator[str]:
    sizes, steps = timetable.sizes, timetable.num_steps
    if cfg.grpo.sync_ref_model and steps is not None and steps < cfg.grpo.ref_model_sync_steps:
        every = cfg.grpo.ref_model_sync_steps
        yield f"sync_ref_model never moves the reference: ref_model_sync_steps ({every}) is more than the run's {steps} optimizer steps."
    if steps is not None and (warmup := course_of(cfg.optimizer, steps).warmup) >= steps:
        yield f"The learning rate never reaches lr ({cfg.optimizer.lr:g}): the warm-up takes {warmup} optimizer steps, and the run {steps}."
    if cfg.run.max_steps is not None and cfg.run.num_train_epochs is not None:
        yield f"max_steps ({cfg.run.max_steps}) decides the length of the run; num_train_epochs ({cfg.run.num_train_epochs:g}) is not used."
    shown = cfg.plan.plan_rollouts * sizes.micro_steps_per_rollout * sizes.num_iterations
    if steps is not None and timetable.first_of(steps) < shown:
        yield (
            f"The run ends after {steps} optimizer step{'s' if steps > 1 else ''}: later rows of the timetable, of the "
            f"{cfg.plan.plan_rollouts} "
            "rollouts shown, are not reached."
        )


def _lora(cfg: Config, shape: ModelShape | None, push: LoraPush | None) -> Iterator[str]:
    if cfg.tuner.tuner_type == "lora" and cfg.sources.get("lr", "default") == "default":
        yield (
            f"Note: lr is its default, {cfg.optimizer.lr:g}, which suits the training of all weights. Adapters commonly take ten times as "
            "much or more: Megatron-SWIFT's defaults are 1e-5 for all weights and 1e-4 for LoRA."
        )
    for note in push.notes if push else ():
        said = note.removeprefix("WARNING: ")
        yield said[0].upper() + said[1:]
    if cfg.tuner.tuner_type == "lora" and cfg.rollout.sleep_level == 2 and push and push.kind == "adapter":
        yield "sleep_level 2 drops vLLM's copy of the base, so each push sends the whole model before the adapter. sleep_level 1 keeps it."
    if shape and (settings := lora_of(cfg.tuner, shape)) and (lost := peft_leaves_out(settings, shape)):
        yield lost


def _servers(cfg: Config) -> Iterator[str]:
    """What travels for all to read."""
    if cfg.rollout.vllm_mode != "server":
        return
    clear = [str(address) for address in addresses_of(cfg.rollout) if not address.is_https and not address.is_here]
    if clear:
        yield (
            f"Prompts, completions and the token travel in the clear to {', '.join(clear[:4])}: use https (megatron-grpo serve "
            "--ssl_certfile, and vllm_server_ca here) where others can listen. Weights travel in the clear in any case."
        )


def _room(cfg: Config) -> Iterator[str]:
    asked = [name for name in ("offload_model", "offload_optimizer") if getattr(cfg.rollout, name) == "true"]
    if asked and cfg.rollout.vllm_mode != "colocate":
        yield f"{' and '.join(asked)} true: no sampler shares these GPUs (vllm_mode {cfg.rollout.vllm_mode}), so nothing is given away."


def _memory(memory: dict[str, Any] | None) -> Iterator[str]:
    if not memory or not memory.get("gpu_memory_bytes") or memory["fits"]:
        return
    if memory["peak_bytes"] <= memory["gpu_memory_bytes"]:
        yield (
            f"vllm_gpu_memory_utilization leaves a KV cache of {memory['sampler']['kv_cache_tokens']:,} tokens beside vLLM's weights, "
            f"and a sequence has {memory['longest_sequence']:,}."
        )
    else:
        yield (
            f"The estimated peak ({memory['peak_bytes'] / 1e9:.1f} GB, pipeline stage {memory['peak_stage']}, "
            f"{memory['peak_phase']}) does not fit in "
            f"gpu_memory_gb ({memory['gpu_memory_bytes'] / 1e9:g})."
        )
    for way in memory["would_fit"]:
        changes = ", ".join(f"{name} {str(value).lower()}" for name, value in way["settings"].items())
        yield f"What would fit: {changes}: the peak would be {way['peak_bytes'] / 1e9:.1f} GB ({way['peak_phase'].replace('_', ' ')})."
    if not memory["would_fit"]:
        room = "sleep_level, offload_model, offload_optimizer, vllm_gpu_memory_utilization, " if memory["sampler"]["weights_bytes"] else ""
        yield f"Nothing that was tried makes it fit: {room}full recompute, layouts of twice and four times the parts."
