"""Build the sampling engine, the episodes that run on it, and the teacher from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_grpo.core import train
from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.memory_offload import Role
from megatron_grpo.core.policy.passes import ModelScorer
from megatron_grpo.core.policy.policy import Policy, batch_partitioner
from megatron_grpo.core.rollout.engine import Engine, InterruptibleSampler, Sampler
from megatron_grpo.core.settings import Config
from megatron_grpo.core.trainer.rollouts import Teacher
from megatron_grpo.core.weights.lora import LoraSync
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.adapters import lora_sync
from megatron_grpo.run.assemble.policy import frozen, model_of, sharing_of
from megatron_grpo.run.checkpoint.fingerprints import MODEL_RUNNER, TEACHER
from megatron_grpo.run.checkpoint.saving import Checkpoints
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.data.chat import PromptEncoder, read_end_ids
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.models import config_of_teacher

if TYPE_CHECKING:
    from megatron_grpo.core.rollout.experts import ExpertLayers
    from megatron_grpo.core.rollout.turns import TurnEngine
    from megatron_grpo.plugins.environments.rollout_func import RolloutFunc
    from megatron_grpo.plugins.partial_rollouts.trainer import PartialRollouts

MakeEngine = Callable[[Config, ValidatedInputs, ParallelState], Engine]


def build_colocated(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, bitwise_parity: Callable[[], None], lora: LoraSync | None = None,
    runner: str | None = None,
) -> Engine:  # fmt: skip
    """Build a vLLM engine inside the training ranks. Collective.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: model path, shape, prompts and image processor.
        parallel: Process groups of this rank.
        bitwise_parity: Called to make vLLM batch invariant, if `bitwise_parity` is set.
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


def build_servers(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, bitwise_parity: Callable[[], None], lora: LoraSync | None = None,
    runner: str | None = None,
) -> Engine:  # fmt: skip
    """Connect to the rollout servers, waiting until they answer. Collective.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: model path, shape, prompts and image processor.
        parallel: Process groups of this rank.
        bitwise_parity: Unused: servers refuse the setting `bitwise_parity`.
        lora: How adapters are synced; None if merged or full weights are synced.
        runner: Unused: a server chooses its model runner.
    """
    from megatron_grpo.plugins.servers.server_group import needs_of
    from megatron_grpo.plugins.servers.servers import ServerEngine

    return ServerEngine.build(
        cfg.rollout, model_path=inputs.model_path, shape=inputs.shape, output_dir=Path(cfg.run.output_dir),
        requirements=needs_of(cfg, inputs.shape, inputs.longest_prompt, lora, image_spec=inputs.image_spec, max_images=inputs.max_images),
        device=parallel.device, lora=lora, image_spec=inputs.image_spec, trust_remote_code=cfg.model.trust_remote_code,
    )  # fmt: skip


ENGINES: dict[str, Callable[..., Engine]] = {"colocate": build_colocated, "server": build_servers}  # by vllm_mode


def choose_engine_factory(cfg: Config, checkpoints: Checkpoints, **parts: Any) -> MakeEngine:
    """Return the factory of the engine of `vllm_mode`. One in the ranks keeps the model runner of the checkpoint.

    Args:
        cfg: Settings of the run.
        checkpoints: Checkpoints of the run, one of which may have been chosen.
        **parts: Further arguments of the factory.
    """
    return partial(ENGINES[cfg.rollout.vllm_mode], runner=checkpoints.recorded(MODEL_RUNNER), **parts)


def start_engine(
    make: MakeEngine, cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, policy: Policy, checkpoints: Checkpoints
) -> Engine:
    """Start the engine, which allocates its memory, and record its model runner for the checkpoints. Collective.

    If the policy offloads memory for the engine, the engine is put to sleep until it is first used: reading a checkpoint may come first,
    and that needs the policy on the device.

    Args:
        make: Factory of the engine.
        cfg: Settings of the run.
        inputs: Validated inputs.
        parallel: Process groups of this rank.
        policy: The policy that shares the device with the engine.
        checkpoints: Checkpoints of the run.

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
        stop: Tells whether the run is to stop.

    Returns:
        The same engine.
    """
    if hasattr(sampler, "should_cancel"):
        sampler.should_cancel = stop.should_cancel
    return sampler


def check_async_sampler(cfg: Config, sampler: Sampler) -> None:
    """Raise ConfigError if `async_rollout_depth` is set and the sampler has not the methods for it.

    They are `begin` (`rollout.engine.BackgroundSampler`); with partial rollouts `resume` (`rollout.engine.InterruptibleSampler`).

    Args:
        cfg: Settings of the run.
        sampler: Sampler of the run.
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


def partial_rollouts_of(cfg: Config, policy: Policy, sampler: Engine) -> PartialRollouts | None:
    """Return the sampler whose completions continue over weight syncs; None without partial rollouts.

    Args:
        cfg: Settings of the run.
        policy: The policy, which checks the versions of interrupted completions.
        sampler: The engine.
    """
    if not cfg.rollout.partial_rollouts:
        return None
    from megatron_grpo.plugins.partial_rollouts.engine import PartialGeneration
    from megatron_grpo.plugins.partial_rollouts.trainer import PartialRollouts, VersionCheck

    if hasattr(sampler, "partial_generation"):
        sampler.partial_generation = PartialGeneration
    check = VersionCheck(
        policy=policy, count=cfg.rollout.verify_versions, temperature=cfg.rollout.temperature,
        is_coarse=cfg.model.torch_dtype != "float32" or sampler.dtype != "float32",
    )  # fmt: skip
    in_background = cfg.rollout.vllm_mode == "server"
    return PartialRollouts(cast(InterruptibleSampler, sampler), check=check if check.count else None, in_background=in_background)


def sampler_of_run(cfg: Config, inputs: ValidatedInputs, sampler: Engine) -> Sampler:
    """Return the sampler of the run: the engine itself, or the episodes or rollout function that use it.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: environment, rollout function and prompts.
        sampler: The engine.

    Raises:
        ConfigError: If episodes or a rollout function are configured and the engine has no `play` (`rollout.turns.TurnEngine`).
    """
    if inputs.environment is None and inputs.rollout_func is None:
        return sampler
    if not hasattr(sampler, "play"):
        flag = "rollout_func" if inputs.rollout_func else cfg.turns.player
        message = f"{flag}: {type(sampler).__name__} has no `play` (rollout.turns.TurnEngine), so it cannot sample turns. Leave {flag} out."
        raise config_error(flag, message)
    engine = cast("TurnEngine", sampler)
    tokenizer = cast(PromptEncoder, next(iter(inputs.streams)).encode).tokenizer
    max_model_len = longest_context(cfg, inputs.longest_prompt)
    if inputs.rollout_func is not None:
        from megatron_grpo.plugins.environments.rollout_func import RolloutFuncSampler

        return RolloutFuncSampler(engine, wrap_rollout_func(cfg, inputs, inputs.rollout_func, tokenizer, max_model_len=max_model_len))
    assert inputs.environment is not None
    if cfg.turns.has_agent:
        from megatron_grpo.plugins.environments.agent_programs import AgentEnvironment
        from megatron_grpo.plugins.environments.agents import AgentRunnerFactory, AgentSampler

        agent = cast("type[AgentEnvironment]", inputs.environment)
        stage = AgentRunnerFactory.of(cfg, agent, tokenizer, model_path=inputs.model_path, max_model_len=max_model_len)
        return AgentSampler(engine, stage)
    from megatron_grpo.plugins.environments.episode_runner import EpisodeRunnerFactory, EpisodeSampler

    return EpisodeSampler(
        engine, EpisodeRunnerFactory.of(cfg, inputs.environment, tokenizer, model_path=inputs.model_path, max_model_len=max_model_len)
    )


def wrap_rollout_func(
    cfg: Config, inputs: ValidatedInputs, function: Callable[..., Any], tokenizer: Any, *, max_model_len: int
) -> RolloutFunc:
    """Wrap the user's rollout function with its limits, tokenizer and timeout.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: model path and shape.
        function: The function that `rollout_func` names.
        tokenizer: The model's tokenizer.
        max_model_len: Tokens of prompt and completion together. `vllm_max_model_len` overrides it.
    """
    from megatron_grpo.plugins.environments.rollout_func import RolloutFunc
    from megatron_grpo.plugins.environments.rollout_func_output import TokenLimits

    limits = TokenLimits(
        vocab_size=inputs.shape.vocab_size,
        max_completion_length=cfg.rollout.max_completion_length,
        max_model_len=cfg.rollout.vllm_max_model_len or max_model_len,
        end_ids=read_end_ids(inputs.model_path, tokenizer, cfg.rollout.stop_token_ids),
    )
    return RolloutFunc(
        name=cfg.rollout.rollout_func or "", function=function, tokenizer=tokenizer, limits=limits,
        timeout=cfg.rollout.rollout_func_timeout, skip_special_tokens=cfg.rollout.generation_kwargs.get("skip_special_tokens", True),
    )  # fmt: skip


def adapter_sync_mode(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, logger: MetricsLogger, *, sampler_is_known: bool
) -> LoraSync | None:
    """Decide whether adapters are synced alone or merged into the weights.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: the model's shape.
        parallel: Process groups of this rank.
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
    """Return the expert layers whose routing the sampler reports, or None unless `router_replay_mode` is R3.

    Args:
        cfg: Settings of the run.
        shape: The model's shape.
    """
    if cfg.grpo.router_replay_mode != "R3":
        return None
    from megatron_grpo.core.rollout.experts import ExpertLayers

    return ExpertLayers.of(shape)


def build_served_teacher(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, stop: train.StopRequest, checkpoints: Checkpoints
) -> Teacher | None:
    """Connect to the frozen servers that hold the teacher, waiting until they answer. Collective.

    Args:
        cfg: Settings of the run.
        inputs: Validated inputs: shape and prompts.
        parallel: Process groups of this rank.
        stop: Tells when to give up waiting.
        checkpoints: Receives the teacher's fingerprint.

    Returns:
        The teacher; None if `teacher_model_server` is empty.
    """
    if not cfg.grpo.teacher_model_server:
        return None
    from megatron_grpo.plugins.teacher import servers as teachers
    from megatron_grpo.plugins.teacher.trainer import ServedTeacher

    tokenizer = cast(PromptEncoder, next(iter(inputs.streams)).encode).tokenizer
    requirements = teachers.TeacherRequirements.of(cfg, inputs.shape, tokenizer, inputs.longest_prompt)
    servers = teachers.TeacherServerGroup.build(cfg, requirements, stop.should_cancel) if parallel.is_rank_zero else None
    facts = (servers.fingerprint, servers.logprobs) if servers else ()
    teacher = ServedTeacher(parallel, *facts)
    checkpoints.record_fingerprint(TEACHER, teacher.fingerprint)
    return teacher


def build_held_teacher(
    cfg: Config, student: ModelShape, parallel: ParallelState, *, teacher_path: Path, timers: Timers, offload: Collection[Role] = ()
) -> Teacher:
    """Load a frozen teacher of any shape into the training ranks, in the run's layout. Collective.

    Args:
        cfg: Settings of the run.
        student: Shape of the policy.
        parallel: Process groups of this rank.
        teacher_path: The teacher's checkpoint.
        timers: Timers of the run.
        offload: Roles of the policy that leave the device while the sampler works. If "reference" is among them, the teacher leaves too.
    """
    from megatron_grpo.plugins.teacher.trainer import LocalTeacher

    shape = ModelShape.from_pretrained(teacher_path)
    teacher_cfg = config_of_teacher(cfg, shape, student)
    _, loaded_chunks = model_of(teacher_cfg, shape, parallel, model_path=teacher_path)
    chunks = frozen(loaded_chunks())
    cut = batch_partitioner(
        parallel,
        chunks[0].config,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        min_saving_ratio=sharing_of(teacher_cfg, shape, parallel).min_saving_ratio,
    )
    leaves = cfg.grpo.offload_teacher_model or "reference" in offload
    return LocalTeacher(cfg.grpo.teacher_model or str(teacher_path), ModelScorer(chunks, parallel, cut), timers, leaves=leaves)
