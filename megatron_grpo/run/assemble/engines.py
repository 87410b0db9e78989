"""Build the sampling engine, the episodes that run on it, and the teacher from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from megatron_grpo.core import train
from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.policy import Policy
from megatron_grpo.core.rollout.engine import Engine, Sampler
from megatron_grpo.core.weights.lora import LoraSync
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run import plug_ins
from megatron_grpo.run.adapters import lora_sync
from megatron_grpo.run.checkpoint.fingerprints import MODEL_RUNNER
from megatron_grpo.run.checkpoint.saving import Checkpoints
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger

if TYPE_CHECKING:
    from megatron_grpo.core.rollout.experts import ExpertLayers
    from megatron_grpo.core.rollout.turns import TurnEngine
    from megatron_grpo.core.trainer.rollouts import Teacher

MakeEngine = Callable[[Config, ValidatedInputs, ParallelState], Engine]


def build_colocated(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, bitwise_parity: Callable[[], None], lora: LoraSync | None = None,
    runner: str | None = None,
) -> Engine:  # fmt: skip
    """Build a vLLM engine inside the training ranks. Collective.

    Args:
        inputs: Validated inputs: model path, shape, prompts and image processor.
        lora: How adapters are synced; None if merged or full weights are synced.
        runner: vLLM's model runner in the checkpoint that the run continues; None if it has none.
    """
    from megatron_grpo.core.rollout.colocated import ColocatedEngine
    from megatron_grpo.core.rollout.vllm_patches import keep_runner

    keep_runner(runner, on_gpu=parallel.device.type == "cuda", returns_experts=cfg.grpo.router_replay_mode == "R3")
    return ColocatedEngine.build(
        cfg.rollout,
        model_path=inputs.model_path,
        dtype=cfg.model.torch_dtype,
        max_model_len=longest_context(cfg, inputs.longest_prompt),
        seed=cfg.run.seed,
        rank=parallel.rank,
        world_size=parallel.world_size,
        lora=lora,
        experts=replayed_experts(cfg, inputs.shape),
        image_spec=inputs.image_spec,
        max_images=cfg.data.limit_images or inputs.max_images,
        trust_remote_code=cfg.model.trust_remote_code,
        patch=bitwise_parity if cfg.rollout.bitwise_parity else lambda: None,
    )


def choose_engine_factory(cfg: Config, checkpoints: Checkpoints, **parts: Any) -> MakeEngine:
    """Return the factory of the engine of `vllm_mode`. One in the ranks keeps the model runner of the checkpoint."""
    return partial(plug_ins.ENGINES[cfg.rollout.vllm_mode].load(), runner=checkpoints.recorded(MODEL_RUNNER), **parts)


def start_engine(
    make: MakeEngine, cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, policy: Policy, checkpoints: Checkpoints
) -> Engine:
    """Start the engine, which allocates its memory, and record its model runner for the checkpoints. Collective.

    If the policy offloads memory for the engine, the engine is put to sleep until it is first used: reading a checkpoint may come first,
    and that needs the policy on the device.

    Raises:
        ConfigError: If `async_rollout_depth` is set and the engine cannot sample in the background.
    """
    policy.free_memory()
    sampler = make(cfg, inputs, parallel)
    check_async_sampler(cfg, sampler)
    if (runner := getattr(sampler, "model_runner", None)) is not None:
        checkpoints.record_fingerprint(MODEL_RUNNER, runner)
    if policy.offloader.movable:
        with sampler.wake_up():
            pass
    return sampler


def with_cancellation(sampler: Engine, stop: train.StopRequest) -> Engine:
    """Let the engine cancel a request in progress when the run is to stop, if it supports that.

    Args:
        sampler: The engine. It supports cancelling if it has the attribute `should_cancel`.

    Returns:
        The same engine.
    """
    if hasattr(sampler, "should_cancel"):
        sampler.should_cancel = stop.should_cancel
    return sampler


def check_async_sampler(cfg: Config, sampler: Sampler) -> None:
    """Raise ConfigError if `async_rollout_depth` is set and the sampler has not the methods for it.

    They are `begin` (`rollout.engine.BackgroundSampler`); with partial rollouts `resume` (`rollout.engine.InterruptibleSampler`).
    """
    if cfg.rollout.partial_rollouts and not hasattr(sampler, "resume"):
        message = (
            f"async_rollout_depth {cfg.rollout.async_rollout_depth} needs a sampler whose completions can be interrupted, and "
            f"{type(sampler).__name__} has no `resume` (rollout.engine.InterruptibleSampler). Use async_rollout_depth 0."
        )
        raise config_error("async_rollout_depth", message)
    if cfg.rollout.async_rollout_depth and not cfg.rollout.partial_rollouts and not hasattr(sampler, "begin"):
        message = (
            f"async_rollout_depth {cfg.rollout.async_rollout_depth} needs a sampler that answers while training goes on, and "
            f"{type(sampler).__name__} has no `begin` (rollout.engine.BackgroundSampler). Use async_rollout_depth 0."
        )
        raise config_error("async_rollout_depth", message)


def sampler_of_run(cfg: Config, inputs: ValidatedInputs, sampler: Engine) -> Sampler:
    """Return the sampler of the run: the engine itself, or the episodes or rollout function that use it.

    Args:
        inputs: Validated inputs: environment, rollout function and prompts.

    Raises:
        ConfigError: If episodes or a rollout function are configured and the engine has no `play` (`rollout.turns.TurnEngine`).
    """
    if inputs.environment is None and inputs.rollout_func is None:
        return sampler
    flag = "rollout_func" if inputs.rollout_func is not None else cfg.turns.player
    if not hasattr(sampler, "play"):
        message = f"{flag}: {type(sampler).__name__} has no `play` (rollout.turns.TurnEngine), so it cannot sample turns. Leave {flag} out."
        raise config_error(flag, message)
    return plug_ins.SAMPLERS[flag].load()(cfg, inputs, cast("TurnEngine", sampler))


def adapter_sync_mode(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, logger: MetricsLogger, *, sampler_is_known: bool
) -> LoraSync | None:
    """Decide whether adapters are synced alone or merged into the weights.

    Args:
        inputs: Validated inputs: the model's shape.
        logger: Logger for the notes that the plan could not know, because it sees neither machine nor sampler.
        sampler_is_known: Whether the sampler is built in. A custom sampler receives merged weights unless `vllm_enable_lora` is true.

    Returns:
        How adapters are synced; None if all weights train.

    Raises:
        ConfigError: If the requested way is not possible.
    """
    if cfg.tuner.tuner_type == "full":
        return None
    on_gpu, obstacle = parallel.device.type == "cuda", None
    if not sampler_is_known:
        obstacle = None if cfg.tuner.vllm_enable_lora else "the sampler is a custom one, and vllm_enable_lora true is not set"
    elif cfg.rollout.vllm_mode != "server":  # servers report their own capacity, and the trainer may have no vLLM installed
        from megatron_grpo.core.rollout.vllm_weights import sampler_obstacle

        obstacle = sampler_obstacle(inputs.shape.architecture, on_gpu=on_gpu)
    sync = lora_sync(cfg, inputs.shape, on_gpu=on_gpu, sampler_obstacle=obstacle)
    if sync and sync.notes:
        planned = lora_sync(cfg, inputs.shape, on_gpu=None)  # as the plan decides, without knowledge of machine and sampler
        for note in sync.notes:
            if planned is None or note not in planned.notes:
                logger.print_line(note)
    return sync


def replayed_experts(cfg: Config, shape: ModelShape) -> ExpertLayers | None:
    """Return the expert layers whose routing the sampler reports, or None unless `router_replay_mode` is R3."""
    if cfg.grpo.router_replay_mode != "R3":
        return None
    from megatron_grpo.core.rollout.experts import ExpertLayers

    return ExpertLayers.from_shape(shape)


def build_teacher(flag: str, cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, **parts: Any) -> Teacher | None:
    """Build the teacher if this setting names it; None otherwise. Collective.

    Args:
        flag: A setting that may name the teacher.
        **parts: Further arguments of `run.plug_ins.BuildTeacher`.
    """
    return plug_ins.TEACHERS[flag].load()(cfg, inputs, parallel, **parts) if cfg.grpo.teacher_flag == flag else None
