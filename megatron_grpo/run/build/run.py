"""Configuration -> the objects of a run: what it is told by and looked on by, and its parts put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_grpo import train
from megatron_grpo.base.activity import Timers
from megatron_grpo.base.errors import ConfigError
from megatron_grpo.checkpoint.saving import Checkpoints
from megatron_grpo.config.config import Config, GrpoConfig
from megatron_grpo.config.evaluation import how_evaluated, most_of, rules_in_words, score_of
from megatron_grpo.data.prompts import PromptStream
from megatron_grpo.data.streamed import StreamedPrompts
from megatron_grpo.metrics.metrics_logger import MetricsLogger
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.planning.report import room_in_words
from megatron_grpo.policy.memory_offload import Role
from megatron_grpo.policy.policy import Policy
from megatron_grpo.policy.validation import sampler_problems
from megatron_grpo.rollout.engine import Sampler, SamplingSettings, WeightReceiver
from megatron_grpo.run.build import AnalysisHooks, Parts
from megatron_grpo.run.build.engines import (
    ENGINES,
    answering,
    build_held_teacher,
    build_served_teacher,
    how_adapters_travel,
    patient,
    replayed_experts,
    started,
)
from megatron_grpo.run.build.output import build_journal, gap_of, open_output, where_they_part
from megatron_grpo.run.build.policy import build_policy
from megatron_grpo.run.inputs import ValidatedInputs
from megatron_grpo.trainer.evaluate import EvaluationSpec, Evaluator, sampling_of
from megatron_grpo.trainer.generation import RolloutGenerator
from megatron_grpo.trainer.reward_manager import RewardManager
from megatron_grpo.trainer.rollouts import KlPenalty, Rollouts
from megatron_grpo.trainer.step_monitor import StepMonitor
from megatron_grpo.trainer.weight_sync import WeightSyncManager
from megatron_grpo.types import Prompt

logger = logging.getLogger(__name__)


def build_run(
    made: Plan,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    parts: Parts,
) -> train.Run:
    """Everything that `train.train` needs. Collective."""
    cfg, timetable = made.checked.config, made.timetable
    assert timetable.num_steps is not None  # the data are here, so the length of the run is known
    if parts.engine is None and (lacking := sampler_problems(inputs.shape)):
        raise ConfigError(lacking)
    checkpoints = open_output(made, inputs, parallel)
    judge = RewardManager(
        inputs.rewards, cfg.rewards.reward_weights, should_cancel=stop.should_cancel, most_failed_episodes=cfg.turns.max_failed_episodes
    )
    clock = Timers()
    heard = checkpoints.best.hear if checkpoints.best else None
    # Before any model loads: a service that is not installed is an error.
    journal = build_journal(made, judge, parallel, clock, heard=heard)
    journal.metrics.open()
    try:
        for note in inputs.notes:
            journal.metrics.say(note)
        if isinstance(inputs.prompts, StreamedPrompts):
            inputs.prompts.agree_by(collectives.all_gather_object)
        return put_together(made, inputs, parallel, stop, checkpoints, judge, journal, parts)
    except BaseException:
        journal.close(summary=False)
        raise


def put_together(
    made: Plan,
    inputs: ValidatedInputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    checkpoints: Checkpoints,
    judge: RewardManager,
    journal: MetricsLogger,
    parts: Parts,
) -> train.Run:
    """As `build_run`, once the output is open: what loads models. Collective."""
    cfg, timetable, clock = made.checked.config, made.timetable, journal.clock
    assert timetable.num_steps is not None
    teacher = build_served_teacher(cfg, inputs, parallel, stop, checkpoints)  # which may be refused: before a model loads
    lora = how_adapters_travel(cfg, inputs, parallel, journal, sampler_is_known=parts.engine is None)
    offload = what_makes_room(made, parallel)
    if cfg.rollout.same_bits:
        parts.analysis.same_bits()
    policy = build_policy(
        cfg, parallel, model_path=inputs.model_path, num_steps=timetable.num_steps, clock=clock, parts=parts,
        push=lora.kind if lora else None, offload=offload, ref_model_path=inputs.ref_model_path,
    )  # fmt: skip
    if inputs.teacher_path is not None:
        teacher = build_held_teacher(cfg, inputs.shape, parallel, teacher_path=inputs.teacher_path, clock=clock, offload=offload)
    make = parts.engine or partial(ENGINES[cfg.rollout.vllm_mode], lora=lora, same_bits=parts.analysis.same_bits_of_vllm)
    sampler = patient(started(make, cfg, inputs, parallel, policy), stop)
    publisher = build_publisher(cfg, policy, sampler, say=journal.metrics.say)
    generator = generator_of(
        cfg, inputs, answering(cfg, inputs, sampler), judge, clock, again=partial(publish_again, policy, publisher, clock),
        before=policy.make_room,
    )  # fmt: skip
    return train.Run(
        timetable=timetable,
        parallel=parallel,
        policy=policy,
        engine=sampler,
        publisher=publisher,
        rollouts=Rollouts(
            generator,
            inputs.prompts,
            cfg=cfg.grpo,
            timetable=timetable,
            policy=policy,
            journal=journal,
            penalty=penalty_of(cfg.grpo, policy),
            teacher=teacher,
        ),
        prompts=inputs.prompts,
        checkpoints=checkpoints,
        evaluator=build_evaluator(cfg, inputs, generator, judge, last_step=timetable.num_steps),
        journal=journal,
        stop=stop,
        stop_drain_seconds=cfg.run.stop_drain_seconds,
        max_skipped_steps=cfg.optimizer.max_skipped_steps,
        witness=build_monitor(cfg, inputs, policy, checkpoints, parts.analysis, say=journal.metrics.say),
    )


def generator_of(
    cfg: Config, inputs: ValidatedInputs, sampler: Sampler, judge: RewardManager, clock: Timers, *, again: Callable[[], object],
    before: Callable[[], object] = lambda: None,
) -> RolloutGenerator:  # fmt: skip
    """What asks the sampler. again, before: see `RolloutGenerator`."""
    return RolloutGenerator(
        sampler,
        judge,
        sampling=SamplingSettings.of(cfg.rollout, num_generations=cfg.batch.num_generations),
        seed=cfg.run.seed,
        clock=clock,
        again=again,
        before=before,
        experts=replayed_experts(cfg, inputs.shape),
    )


def build_monitor(
    cfg: Config, inputs: ValidatedInputs, policy: Policy, checkpoints: Checkpoints, analysis: AnalysisHooks, *, say: Callable[[str], None]
) -> StepMonitor:
    """Who looks on while steps are taken. say: heard on the main rank."""
    capsules = partial(
        analysis.capsules, folder=Path(cfg.run.output_dir) / "capsules", cfg=cfg, model_path=inputs.model_path,
        last_checkpoint=checkpoints.folder.newest, say=say,
    )  # fmt: skip
    audit = analysis.audit(cfg.run.audit_steps) if cfg.run.audit else None
    return StepMonitor(policy, capsules, audit=audit, ends_run=cfg.run.audit_action == "stop", gap=gap_of(cfg), say=say)


def build_evaluator(cfg: Config, inputs: ValidatedInputs, sampler: Sampler, judge: RewardManager, *, last_step: int) -> Evaluator:
    """sampler: that of training's prompts, or one that stands for it."""
    training = SamplingSettings.of(cfg.rollout, num_generations=cfg.batch.num_generations)
    question = EvaluationSpec(
        sets={name: held_out_prompts(stream, cfg.eval.eval_num_prompts) for name, stream in inputs.held_out.items()},
        sampling=sampling_of(training, how_evaluated(cfg)), score=score_of(cfg, judge.names), pass_threshold=cfg.eval.eval_pass_threshold,
        most=most_of(cfg), seed=cfg.eval.eval_seed, episodes=rules_in_words(cfg),
    )  # fmt: skip
    return Evaluator(question, sampler, judge, every=cfg.eval.eval_steps, last_step=last_step)


def held_out_prompts(stream: PromptStream, most: int | None) -> list[Prompt]:
    """What the evaluations ask of a set, the same every time. most: None for all there are."""
    return stream.take(min(len(stream), most or len(stream)))


def what_makes_room(made: Plan, parallel: ParallelState) -> tuple[Role, ...]:
    """What leaves the device while the sampler works: on a CPU what is asked for, on a GPU as the plan decides for it. Collective."""
    cfg = made.checked.config
    if cfg.rollout.vllm_mode != "colocate":
        model = optimizer = False
    elif parallel.device.type == "cpu":
        model, optimizer = cfg.rollout.offload_model == "true", cfg.rollout.offload_optimizer == "true"
    else:
        smallest = -collectives.all_reduce_max(-torch.cuda.mem_get_info(parallel.device)[1])
        here = cfg.with_values({"gpu_memory_gb": cfg.plan.gpu_memory_gb or smallest / 1e9})
        memory = make_plan(replace(made.checked, config=here)).memory
        assert memory is not None  # the model is here
        model, optimizer = memory["offload"]["model"], memory["offload"]["optimizer"]
        if parallel.is_main and cfg.plan.gpu_memory_gb is None:  # or else the plan has said it
            logger.warning(room_in_words(memory["offload"]))
    return (("weights", "reference", "gradients") if model else ()) + (("optimizer",) if optimizer else ())


def build_publisher(cfg: Config, policy: Policy, holder: WeightReceiver, *, say: Callable[[str], None] | None = None) -> WeightSyncManager:
    return WeightSyncManager(
        policy,
        holder,
        verify=cfg.rollout.verify_weight_push,
        is_coarse=cfg.model.torch_dtype != "float32",
        starts_as_checkpoint=not (cfg.tuner.adapters or cfg.run.mcore_model),
        say=say,
        hint=where_they_part(cfg),
    )


def publish_again(policy: Policy, publisher: WeightSyncManager, clock: Timers) -> None:
    """What `train.publish` does, in the middle of a question."""
    with clock("weight_sync"):
        publisher.publish(policy.version)


def penalty_of(cfg: GrpoConfig, policy: Policy) -> KlPenalty | None:
    """What is subtracted from rewards, where the KL is not in the loss."""
    if not cfg.kl_in_reward or policy.reference is None:
        return None
    return KlPenalty(policy=policy, reference=policy.reference, beta=cfg.beta)
