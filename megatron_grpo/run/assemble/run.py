"""Assemble the objects of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_grpo.core import train
from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.memory_offload import Role
from megatron_grpo.core.policy.policy import Policy
from megatron_grpo.core.rollout.engine import Sampler, SamplingSettings, WeightReceiver
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.trainer.generation import RolloutGenerator
from megatron_grpo.core.trainer.rollouts import KlPenalty, Rollouts
from megatron_grpo.core.trainer.step_monitor import StepMonitor
from megatron_grpo.core.trainer.weight_sync import WeightSyncManager
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run import plug_ins
from megatron_grpo.run.assemble import AnalysisHooks, Listener, Planner, RunParts, RunPlan
from megatron_grpo.run.assemble.engines import (
    adapter_sync_mode,
    build_teacher,
    choose_engine_factory,
    replayed_experts,
    sampler_of_run,
    start_engine,
    with_cancellation,
)
from megatron_grpo.run.assemble.output import build_metrics_logger, mismatch_hint, open_output, version_check
from megatron_grpo.run.assemble.policy import build_policy
from megatron_grpo.run.checkpoint.output_files import BestCheckpoint
from megatron_grpo.run.checkpoint.saving import Checkpoints
from megatron_grpo.run.config.evaluation import describe_rules, eval_sampling, find_pass_reward, find_score, list_reward_maxima
from megatron_grpo.run.config.rules.policy import sampler_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.inputs import ValidatedInputs, settings_of_sampler
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.rewards.reward_manager import RewardManager

if TYPE_CHECKING:
    from megatron_grpo.run.evaluate import Evaluator
    from megatron_grpo.run.schedule import ScheduledRun

logger = logging.getLogger(__name__)


def build_run(
    run: ScheduledRun,
    plan: RunPlan | None,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    parts: RunParts,
) -> train.Run:
    """Build everything that `train.train` needs. Collective.

    Args:
        plan: Plan of the run; None on ranks above 0.

    Raises:
        ConfigError: If vLLM cannot sample the model on this machine, or if a part refuses the settings.
    """
    cfg, schedule = run.checked.config, run.schedule
    assert schedule.num_steps is not None  # the data have been read, so the length of the run is known
    on_cpu = parts.engine is None and cfg.rollout.vllm_mode == "colocate" and parallel.device.type == "cpu"
    ranks = cfg.rollout.vllm_tensor_parallel_size
    if on_cpu and (problems := sampler_problems(inputs.shape, on_cpu=True, ranks=ranks)):  # `plan` does not know the machine
        raise ConfigError(problems)
    printed: list[str] = []  # before warnings can be recorded

    def print_line(line: str) -> None:
        printed.append(line)
        print(line, flush=True)

    checkpoints = open_output(cfg, plan, inputs, parallel, print_line=print_line)
    reward_manager = RewardManager(
        inputs.rewards, cfg.rewards.reward_weights, should_cancel=stop.should_cancel, most_failed_episodes=cfg.turns.max_failed_episodes
    )
    timers = Timers()
    on_metrics = partial(_pass_metrics, checkpoints.best, parts.listener, stop)
    # Opened before any model loads: a tracking service that is not installed is an error.
    logger = build_metrics_logger(run, reward_manager, parallel, timers, on_metrics=on_metrics)
    logger.open()
    checkpoints.logger, checkpoints.print_line = logger, logger.print_line
    if checkpoints.best:
        checkpoints.best.print_line = logger.print_line
    try:
        for line in printed:
            logger.record_warning(line)
        for note in inputs.notes:
            logger.print_line(note)
        inputs.prompts.agree_by(collectives.all_gather_object)
        return assemble_run(run, inputs, parallel, stop, checkpoints, reward_manager, logger, parts)
    except BaseException:
        logger.close(summary=False)
        raise


def _pass_metrics(
    best: BestCheckpoint | None, listener: Listener | None, stop: train.StopRequest, step: int, numbers: Mapping[str, Any]
) -> None:
    """Pass the metrics of a step or an evaluation to what compares checkpoints and to the listener, which may ask for a stop."""
    if best is not None:
        best.record(step, numbers)
    if listener is not None and listener(step, numbers):
        stop.request("a callback")


def assemble_run(
    run: ScheduledRun,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    checkpoints: Checkpoints,
    reward_manager: RewardManager,
    logger: MetricsLogger,
    parts: RunParts,
) -> train.Run:
    """Build the parts that load models, once the output is open. Collective."""
    cfg, schedule, timers = run.checked.config, run.schedule, logger.timers
    assert schedule.num_steps is not None
    for_teacher = {"stop": stop, "checkpoints": checkpoints, "timers": timers}
    teacher = build_teacher("teacher_model_server", cfg, inputs, parallel, **for_teacher)  # before a model loads: it may be refused
    lora = adapter_sync_mode(cfg, inputs, parallel, logger, sampler_is_known=parts.engine is None)
    offload = offloaded_roles(run, parallel, parts.planner)
    if cfg.rollout.bitwise_parity:
        parts.analysis.bitwise_parity()
    policy = build_policy(
        cfg, parallel, model_path=inputs.model_path, num_steps=schedule.num_steps, timers=timers, parts=parts,
        adapter_sync=lora.kind if lora else None, offload=offload, ref_model_path=inputs.ref_model_path,
    )  # fmt: skip
    teacher = teacher or build_teacher("teacher_model", cfg, inputs, parallel, **for_teacher, offload=offload)
    make = parts.engine or choose_engine_factory(cfg, checkpoints, lora=lora, bitwise_parity=parts.analysis.vllm_bitwise_parity)
    sampler = with_cancellation(start_engine(make, cfg, inputs, parallel, policy, checkpoints), stop)
    weight_sync = build_weight_sync(cfg, policy, sampler, print_line=logger.print_line, shape=inputs.shape)
    partial_rollouts = plug_ins.PARTIAL_ROLLOUTS.load()(cfg, policy, sampler) if cfg.rollout.partial_rollouts else None
    sampled_cfg = settings_of_sampler(cfg, inputs.tokenizer)
    generator = build_generator(
        sampled_cfg, inputs, partial_rollouts or sampler_of_run(sampled_cfg, inputs, sampler), reward_manager, timers,
        sync_again=partial(sync_weights_again, policy, weight_sync, timers),
        before_sampling=policy.free_memory,
    )  # fmt: skip
    rollouts = Rollouts(
        generator,
        inputs.prompts,
        cfg=cfg.grpo,
        schedule=schedule,
        policy=policy,
        logger=logger,
        penalty=build_kl_penalty(cfg.grpo, policy),
        teacher=teacher,
    )
    checkpoints.partial = rollouts.partial = partial_rollouts
    return train.Run(
        schedule=schedule,
        parallel=parallel,
        policy=policy,
        engine=sampler,
        weight_sync=weight_sync,
        rollouts=rollouts,
        prompts=inputs.prompts,
        checkpoints=checkpoints,
        evaluator=build_evaluator(sampled_cfg, inputs, generator, reward_manager, last_step=schedule.num_steps),
        logger=logger,
        stop=stop,
        stop_drain_seconds=cfg.run.stop_drain_seconds,
        max_skipped_steps=cfg.optimizer.max_skipped_steps,
        step_callback=build_monitor(cfg, inputs, policy, checkpoints, parts.analysis, print_line=logger.print_line),
    )


def build_generator(
    cfg: Config, inputs: ValidatedInputs, sampler: Sampler, reward_manager: RewardManager, timers: Timers, *, sync_again: Callable[[],
    object], before_sampling: Callable[[], object] = lambda: None,
) -> RolloutGenerator:  # fmt: skip
    """Build the generator that samples and scores completions.

    Args:
        inputs: Validated inputs: the model's shape.
        sync_again: Gives the sampler the policy's weights after it has lost them. Collective.
        before_sampling: Called each time before the sampler wakes, to offload the policy. Collective.
    """
    return RolloutGenerator(
        sampler,
        reward_manager,
        sampling=SamplingSettings.from_config(cfg.rollout, num_generations=cfg.batch.num_generations),
        seed=cfg.run.seed,
        timers=timers,
        sync_again=sync_again,
        before_sampling=before_sampling,
        experts=replayed_experts(cfg, inputs.shape),
    )


def build_monitor(
    cfg: Config,
    inputs: ValidatedInputs,
    policy: Policy,
    checkpoints: Checkpoints,
    analysis: AnalysisHooks,
    *,
    print_line: Callable[[str], None],
) -> StepMonitor:
    """Build the monitor that checks steps as they are trained, and dumps those that fail.

    Args:
        inputs: Validated inputs: the model's path.
    """
    step_dumps = partial(
        analysis.step_dumps, folder=Path(cfg.run.output_dir) / "debug_dump", cfg=cfg, model_path=inputs.model_path,
        last_checkpoint=checkpoints.folder.newest, print_line=print_line,
    )  # fmt: skip
    check = analysis.replica_check(cfg.run.check_replicas_interval) if cfg.run.check_replicas else None
    return StepMonitor(
        policy,
        step_dumps,
        replica_check=check,
        ends_run=cfg.run.check_replicas_action == "stop",
        gap=version_check(cfg, inputs.shape),
        print_line=print_line,
    )


def build_evaluator(cfg: Config, inputs: ValidatedInputs, sampler: Sampler, reward_manager: RewardManager, *, last_step: int) -> Evaluator:
    """Build the evaluator of the held-out sets.

    Args:
        inputs: Validated inputs: the held-out sets.
    """
    from megatron_grpo.run.evaluate import EvaluationSpec, Evaluator, make_eval_sampling

    training = SamplingSettings.from_config(cfg.rollout, num_generations=cfg.batch.num_generations)
    question = EvaluationSpec(
        sets={name: stream.take(min(len(stream), cfg.eval.eval_num_prompts or len(stream))) for name, stream in inputs.held_out.items()},
        sampling=make_eval_sampling(training, eval_sampling(cfg)), score=find_score(cfg, reward_manager.names),
        pass_threshold=cfg.eval.eval_pass_threshold,
        most=list_reward_maxima(cfg), pass_reward=find_pass_reward(cfg, reward_manager.names), seed=cfg.eval.eval_seed,
        episodes=describe_rules(cfg),
    )  # fmt: skip
    return Evaluator(question, sampler, reward_manager, eval_steps=cfg.eval.eval_steps, last_step=last_step)


def offloaded_roles(run: ScheduledRun, parallel: ParallelState, planner: Planner) -> tuple[Role, ...]:
    """Return the roles of the policy that leave the device while the sampler works. Collective.

    On a CPU these are the ones that the settings ask for; on a GPU the plan decides, by the smallest GPU of the job.

    Args:
        planner: Estimates memory, on rank 0.
    """
    cfg = run.checked.config
    if cfg.rollout.vllm_mode != "colocate":
        model = optimizer = False
    elif parallel.device.type == "cpu":
        model, optimizer = cfg.rollout.offload_model == "true", cfg.rollout.offload_optimizer == "true"
    else:
        smallest = -collectives.all_reduce_max(-torch.cuda.mem_get_info(parallel.device)[1])
        cfg_here = cfg.with_values({"gpu_memory_gb": cfg.plan.gpu_memory_gb or smallest / 1e9})
        offload = None
        if parallel.is_rank_zero:
            offload = planner.choose_offload(replace(run, checked=replace(run.checked, config=cfg_here)))
            if cfg.plan.gpu_memory_gb is None:  # otherwise the plan has printed it
                logger.warning(planner.describe_offload(offload))
        offload = collectives.broadcast_object(offload)
        model, optimizer = offload["model"], offload["optimizer"]
    return (("weights", "reference", "gradients") if model else ()) + (("optimizer",) if optimizer else ())


def build_weight_sync(
    cfg: Config, policy: Policy, receiver: WeightReceiver, *, print_line: Callable[[str], None] | None = None,
    shape: ModelShape | None = None,
) -> WeightSyncManager:  # fmt: skip
    """Build the manager that syncs the policy's weights to the sampler."""
    return WeightSyncManager(
        policy,
        receiver,
        verify=cfg.rollout.verify_weight_sync,
        is_low_precision=cfg.model.torch_dtype != "float32",
        starts_as_checkpoint=not (cfg.tuner.adapters or cfg.run.mcore_model),
        print_line=print_line,
        hint=mismatch_hint(cfg, shape),
    )


def sync_weights_again(policy: Policy, weight_sync: WeightSyncManager, timers: Timers) -> None:
    """Sync weights as `train.sync_weights` does, after the sampler has lost them during a request.

    Args:
        timers: Timers that record it as `weight_sync`.
    """
    with timers("weight_sync"):
        weight_sync.sync_weights(policy.version)


def build_kl_penalty(cfg: GrpoConfig, policy: Policy) -> KlPenalty | None:
    """Return the KL penalty that is subtracted from rewards; None if the KL is in the loss, or without a reference."""
    if not cfg.kl_in_reward or policy.reference is None:
        return None
    return KlPenalty(policy=policy, reference=policy.reference, beta=cfg.beta)
