"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from megatron_grpo import train
from megatron_grpo.analysis.audit import Audit
from megatron_grpo.analysis.capsule import Capsules
from megatron_grpo.analysis.witness import Witness
from megatron_grpo.base.clock import Clock
from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.checkpoint.best import Best
from megatron_grpo.checkpoint.content import TEACHER
from megatron_grpo.checkpoint.facts import facts_of
from megatron_grpo.checkpoint.resume import settings_of
from megatron_grpo.checkpoint.saving import Checkpoints
from megatron_grpo.checkpoint.written import claim, start_afresh, still_there
from megatron_grpo.config.best import is_greater_better, metric_of
from megatron_grpo.config.config import Config, GrpoConfig
from megatron_grpo.config.evaluation import how_evaluated, longest_completion, most_of, score_of
from megatron_grpo.config.turns import rules_in_words
from megatron_grpo.config.write import write_config
from megatron_grpo.data.chat import PromptEncoder
from megatron_grpo.data.prompts import PromptStream
from megatron_grpo.data.streamed import StreamedPrompts
from megatron_grpo.environments.episodes import Episodes
from megatron_grpo.environments.loading import Stage, end_ids_of
from megatron_grpo.environments.own import OwnRollout, OwnRollouts
from megatron_grpo.environments.own_answers import Limits
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.metrics import Metrics
from megatron_grpo.metrics.drift import DriftWatch
from megatron_grpo.metrics.journal import Journal
from megatron_grpo.metrics.rollout import Completions
from megatron_grpo.metrics.schedule import ScheduleLog
from megatron_grpo.parallel import collectives, state
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.planning.command import Plan, make_plan
from megatron_grpo.planning.report import room_in_words
from megatron_grpo.planning.sharing import Sharing, decide
from megatron_grpo.planning.teacher import config_of_teacher
from megatron_grpo.policy.attention import gpu_kernel
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.policy.fp8 import rank_multiple
from megatron_grpo.policy.guard import Guard, PlausibleGuard
from megatron_grpo.policy.loaded import LoadedModel
from megatron_grpo.policy.lora import Adapters
from megatron_grpo.policy.model import PolicyModel, build_chunks
from megatron_grpo.policy.optimizer import Trainable
from megatron_grpo.policy.policy import Policy, cut_for
from megatron_grpo.policy.reference import FollowingReference, FrozenReference, Reference
from megatron_grpo.policy.room import Role
from megatron_grpo.policy.scorer import ModelScorer
from megatron_grpo.policy.trains import choose_what_trains
from megatron_grpo.policy.validation import attention_channels, machine_problems, needs_local_layers, sampler_problems, sharing_problems
from megatron_grpo.policy.vision import build_tower, keep_outputs
from megatron_grpo.rollout.adapters import LoraPush, lora_push
from megatron_grpo.rollout.engine import Engine, Sampler, SamplingSettings, WeightHolder
from megatron_grpo.rollout.experts import ExpertLayers
from megatron_grpo.rollout.turns import TurnEngine
from megatron_grpo.run.inputs import Inputs, Looked
from megatron_grpo.run.opened import begin_with, copy_weights, load_weights
from megatron_grpo.servers.fleet import needs_of
from megatron_grpo.trainer.evaluate import Evaluator, Question, sampling_of
from megatron_grpo.trainer.generation import RolloutGenerator
from megatron_grpo.trainer.judge import Judge
from megatron_grpo.trainer.rollouts import KlPenalty, Rollouts, Teacher
from megatron_grpo.trainer.sync import Publisher
from megatron_grpo.types import Prompt
from megatron_grpo.weights.adapters import drawn, from_file
from megatron_grpo.weights.buckets import MIB
from megatron_grpo.weights.lora import AdapterPush, LoraSettings, lora_of, own_sizes
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader, check_tied_head
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.trains import trains_tower

logger = logging.getLogger(__name__)


def build_run(
    made: Plan,
    inputs: Inputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    *,
    engine: MakeEngine | None = None,
    reference: MakeReference | None = None,
    guard: Guard | None = None,
) -> train.Run:
    """Everything that `train.train` needs. Collective.

    engine, reference, guard: parts written elsewhere, instead of those that the settings name.
    """
    cfg, timetable = made.checked.config, made.timetable
    assert timetable.num_steps is not None  # the data are here, so the length of the run is known
    if engine is None and (lacking := sampler_problems(inputs.shape)):
        raise ConfigError(lacking)
    checkpoints = open_output(made, inputs, parallel)
    judge = Judge(inputs.rewards, cfg.rewards.reward_weights, gives_up=stop.gives_up, most_failed_episodes=cfg.turns.max_failed_episodes)
    clock = Clock()
    heard = checkpoints.best.hear if checkpoints.best else None
    # Before any model loads: a service that is not installed is an error.
    journal = build_journal(made, judge, parallel, clock, heard=heard)
    journal.open()
    try:
        for note in inputs.notes:
            journal.metrics.say(note)
        if isinstance(inputs.prompts, StreamedPrompts):
            inputs.prompts.agree_by(collectives.from_all)
        return put_together(made, inputs, parallel, stop, checkpoints, judge, journal, engine=engine, reference=reference, guard=guard)
    except BaseException:
        journal.close(summary=False)
        raise


def put_together(
    made: Plan,
    inputs: Inputs,
    parallel: ParallelState,
    stop: train.StopRequest,
    checkpoints: Checkpoints,
    judge: Judge,
    journal: Journal,
    *,
    engine: MakeEngine | None,
    reference: MakeReference | None,
    guard: Guard | None,
) -> train.Run:
    """As `build_run`, once the output is open: what loads models. Collective."""
    cfg, timetable, clock = made.checked.config, made.timetable, journal.clock
    assert timetable.num_steps is not None
    teacher = build_served_teacher(cfg, inputs, parallel, stop, checkpoints)  # which may be refused: before a model loads
    lora = how_adapters_travel(cfg, inputs, parallel, journal, sampler_is_known=engine is None)
    offload = what_makes_room(made, parallel)
    policy = build_policy(
        cfg, inputs.shape, parallel,
        model_path=inputs.model_path, num_steps=timetable.num_steps, clock=clock, reference=reference, guard=guard,
        push=lora.kind if lora else None, offload=offload, ref_model_path=inputs.ref_model_path,
    )  # fmt: skip
    if inputs.teacher_path is not None:
        teacher = build_held_teacher(cfg, inputs.shape, parallel, teacher_path=inputs.teacher_path, clock=clock, offload=offload)
    sampler = patient(started(engine or partial(ENGINES[cfg.rollout.vllm_mode], lora=lora), cfg, inputs, parallel, policy), stop)
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
        witness=build_witness(cfg, inputs, policy, checkpoints, say=journal.metrics.say),
    )


def generator_of(
    cfg: Config, inputs: Looked, sampler: Sampler, judge: Judge, clock: Clock, *, again: Callable[[], object],
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


def build_witness(cfg: Config, inputs: Inputs, policy: Policy, checkpoints: Checkpoints, *, say: Callable[[str], None]) -> Witness:
    """Who looks on while steps are taken. say: heard on the main rank."""
    capsules = Capsules(
        folder=Path(cfg.run.output_dir) / "capsules",
        keep=cfg.run.capsules,
        weights_gb=cfg.run.capsule_weights_gb,
        settings=settings_of(cfg),
        model_path=inputs.model_path,
        last_checkpoint=checkpoints.folder.newest,
        say=say,
    )
    audit = Audit(cfg.run.audit_steps) if cfg.run.audit else None
    return Witness(policy, capsules, audit=audit, ends_run=cfg.run.audit_action == "stop", gap=gap_of(cfg), say=say)


def gap_of(cfg: Config) -> Callable[[Mapping[str, float]], str | None]:
    """Of the log-probs of trainer and sampler. One rollout ahead the difference is also what weights have moved: no bound is usual then."""
    if cfg.rollout.logp_difference_warn is None and cfg.rollout.async_rollout_depth:
        return lambda metrics: None
    bound = 0.0 if cfg.rollout.same_bits else cfg.rollout.logp_difference_warn
    return DriftWatch(bound=bound, dtype=cfg.model.torch_dtype, hint=where_they_part(cfg)).warning


def build_evaluator(cfg: Config, inputs: Looked, sampler: Sampler, judge: Judge, *, last_step: int) -> Evaluator:
    """sampler: that of training's prompts, or one that stands for it."""
    training = SamplingSettings.of(cfg.rollout, num_generations=cfg.batch.num_generations)
    question = Question(
        sets={name: held_out_prompts(stream, cfg.eval.eval_num_prompts) for name, stream in inputs.held_out.items()},
        sampling=sampling_of(training, how_evaluated(cfg)), score=score_of(cfg, judge.names), pass_threshold=cfg.eval.eval_pass_threshold,
        most=most_of(cfg), seed=cfg.eval.eval_seed, episodes=rules_in_words(cfg),
    )  # fmt: skip
    return Evaluator(question, sampler, judge, every=cfg.eval.eval_steps, last_step=last_step)


def what_makes_room(made: Plan, parallel: ParallelState) -> tuple[Role, ...]:
    """What leaves the device while the sampler works: on a CPU what is asked for, on a GPU as the plan decides for it. Collective."""
    cfg = made.checked.config
    if cfg.rollout.vllm_mode != "colocate":
        model = optimizer = False
    elif parallel.device.type == "cpu":
        model, optimizer = cfg.rollout.offload_model == "true", cfg.rollout.offload_optimizer == "true"
    else:
        smallest = -collectives.largest(-torch.cuda.mem_get_info(parallel.device)[1])
        here = cfg.with_values({"gpu_memory_gb": cfg.plan.gpu_memory_gb or smallest / 1e9})
        memory = make_plan(replace(made.checked, config=here)).memory
        assert memory is not None  # the model is here
        model, optimizer = memory["offload"]["model"], memory["offload"]["optimizer"]
        if parallel.is_main and cfg.plan.gpu_memory_gb is None:  # or else the plan has said it
            logger.warning(room_in_words(memory["offload"]))
    return (("weights", "reference", "gradients") if model else ()) + (("optimizer",) if optimizer else ())


def started(make: MakeEngine, cfg: Config, inputs: Inputs, parallel: ParallelState, policy: Policy) -> Engine:
    """The engine, which claims its memory as it starts. Collective.

    If the policy makes room for it, it sleeps until it is asked: a checkpoint may be read first, which needs the policy.
    """
    policy.make_room()
    sampler = make(cfg, inputs, parallel)
    refuse_if_it_cannot_run_ahead(cfg, sampler)
    if policy.room.movable:
        with sampler.awake():
            pass
    return sampler


def patient(sampler: Engine, stop: train.StopRequest) -> Engine:
    """The same one; if it is a `PatientSampler`, it hears that the run is to stop."""
    if hasattr(sampler, "gives_up"):
        sampler.gives_up = stop.gives_up
    return sampler


def answering(cfg: Config, inputs: Looked, sampler: Engine) -> Sampler:
    """The sampler; or what plays episodes over it, or runs a rollout function of the user's."""
    if inputs.environment is None and inputs.rollout_func is None:
        return sampler
    if not hasattr(sampler, "play"):
        flag = "rollout_func" if inputs.rollout_func else "environment" if cfg.turns.environment else "tools"
        message = f"{flag}: {type(sampler).__name__} has no `play` (rollout.turns.TurnEngine), and cannot draw turns. Leave {flag} out."
        raise ConfigError([Problem(flags=(flag,), message=message)])
    engine = cast(TurnEngine, sampler)
    tokenizer = cast(PromptEncoder, next(iter(inputs.streams)).encode).tokenizer
    max_model_len = inputs.longest_prompt + longest_completion(cfg)
    if inputs.rollout_func is not None:
        return OwnRollouts(engine, own_rollout(cfg, inputs, inputs.rollout_func, tokenizer, max_model_len=max_model_len))
    assert inputs.environment is not None
    return Episodes(engine, Stage.of(cfg, inputs.environment, tokenizer, model_path=inputs.model_path, max_model_len=max_model_len))


def own_rollout(cfg: Config, inputs: Looked, function: Callable[..., Any], tokenizer: Any, *, max_model_len: int) -> OwnRollout:
    """max_model_len: of prompt and completion, unless `vllm_max_model_len` says it."""
    limits = Limits(
        vocab_size=inputs.shape.vocab_size,
        max_completion_length=cfg.rollout.max_completion_length,
        max_model_len=cfg.rollout.vllm_max_model_len or max_model_len,
        end_ids=end_ids_of(inputs.model_path, tokenizer, cfg.rollout.stop_token_ids),
    )
    name, timeout = cfg.rollout.rollout_func or "", cfg.rollout.rollout_func_timeout
    return OwnRollout(name=name, function=function, tokenizer=tokenizer, limits=limits, timeout=timeout)


def refuse_if_it_cannot_run_ahead(cfg: Config, sampler: Sampler) -> None:
    if cfg.rollout.async_rollout_depth and not hasattr(sampler, "begin"):
        message = (
            f"async_rollout_depth {cfg.rollout.async_rollout_depth} needs a sampler that answers while training goes on, and "
            f"{type(sampler).__name__} has no `begin` (rollout.engine.BackgroundSampler). Use async_rollout_depth 0."
        )
        raise ConfigError([Problem(flags=("async_rollout_depth",), message=message)])


def build_publisher(cfg: Config, policy: Policy, holder: WeightHolder, *, say: Callable[[str], None] | None = None) -> Publisher:
    return Publisher(
        policy,
        holder,
        verify=cfg.rollout.verify_weight_push,
        is_coarse=cfg.model.torch_dtype != "float32",
        starts_as_checkpoint=not (cfg.tuner.adapters or cfg.run.mcore_model),
        say=say,
        hint=where_they_part(cfg),
    )


def where_they_part(cfg: Config) -> str:
    """What to type where trainer and sampler differ too much."""
    return f"To see at which operation they part: megatron-grpo mismatch {shlex.quote(cfg.run.output_dir)}"


def publish_again(policy: Policy, publisher: Publisher, clock: Clock) -> None:
    """What `train.publish` does, in the middle of a question."""
    with clock("weight_sync"):
        publisher.publish(policy.version)


def penalty_of(cfg: GrpoConfig, policy: Policy) -> KlPenalty | None:
    """What is subtracted from rewards, where the KL is not in the loss."""
    if not cfg.kl_in_reward or policy.reference is None:
        return None
    return KlPenalty(policy=policy, reference=policy.reference, beta=cfg.beta)


def open_output(made: Plan, inputs: Inputs, parallel: ParallelState) -> Checkpoints:
    """The checkpoints of a run, with the one to continue chosen; and output_dir as a run begins with it. Collective."""
    cfg, out = made.checked.config, Path(made.checked.config.run.output_dir)
    checkpoints = Checkpoints(
        inputs.resume, save_steps=cfg.run.save_steps, save_interval_seconds=cfg.run.save_interval_seconds,
        save_total_limit=cfg.run.save_total_limit, async_save=cfg.run.async_save, replicas=parallel.dp_cp_group,
        records=cfg.run.record_rows,
    )  # fmt: skip
    if metric := metric_of(cfg):
        checkpoints.best = Best(out / "checkpoints", metric, greater=is_greater_better(cfg))
    checkpoints.choose()  # before anything in output_dir is overwritten
    if parallel.is_main:
        if inputs.resume.wipes:
            start_afresh(out)
        claim(out)
        write_config(cfg, out / "config.yaml")
        made.save(out / "plan.json")
    collectives.wait_for_all()
    return checkpoints


def start_parallel(cfg: Config, layout: Layout, *, typed: Config | None = None, content: Mapping[str, str] | None = None) -> ParallelState:
    """Joins the job, on the grid that the plan describes. Collective. Raises ConfigError on all ranks where settings, versions or files
    differ between them.

    typed: the settings without those that follow from others; `cfg` where none do. content: fingerprints of what they name.
    """
    facts, p = facts_of(typed or cfg, content or {}), cfg.parallel
    minutes = p.distributed_timeout_minutes
    return state.start(layout, sequence_parallel=p.sequence_parallel, seed=cfg.run.seed, timeout_minutes=minutes, facts=facts)


def held_out_prompts(stream: PromptStream, most: int | None) -> list[Prompt]:
    """What the evaluations ask of a set, the same every time. most: None for all there are."""
    return stream.take(min(len(stream), most or len(stream)))


def build_journal(
    made: Plan, judge: Judge, parallel: ParallelState, clock: Clock, *, heard: Callable[[int, Mapping[str, Any]], None] | None
) -> Journal:
    """What the run tells, and to whom. heard: who else is given its numbers."""
    cfg, out, run_cfg = made.checked.config, Path(made.checked.config.run.output_dir), made.checked.config.run
    metrics = Metrics(
        out,
        report_to=run_cfg.report_to,
        rank=parallel.rank,
        total_steps=made.timetable.num_steps,
        plot_steps=run_cfg.save_steps,
        config={name: value for section in cfg.groups().values() for name, value in vars(section).items()},
        heard=heard,
    )
    gap = gap_of(cfg)
    return Journal(
        metrics,
        ScheduleLog(out, rank=parallel.rank),
        Completions(
            out,
            reward_names=judge.names,
            every=run_cfg.log_completions_steps,
            rank=parallel.rank,
            node=collectives.node(),
            most_nodes=run_cfg.log_completions_nodes,
            tell=metrics.completions,
        ),
        clock=clock,
        reward_weights=judge.reward_weights,
        tells_selection=cfg.grpo.dynamic_sample or cfg.grpo.oversample_ratio > 1,
        from_all=partial(collectives.from_all, group=parallel.dp_group),
        watches=[lambda progress, found: gap(found), *([lambda *_: still_there(out)] if parallel.is_main else [])],
    )


# ---- which sampler ---------------------------------------------------------------------------------------------------------------------

MakeEngine = Callable[[Config, Inputs, ParallelState], Engine]


def how_adapters_travel(
    cfg: Config, inputs: Inputs, parallel: ParallelState, journal: Journal, *, sampler_is_known: bool
) -> LoraPush | None:
    """Whether adapters are pushed alone or merged; None where weights train. Raises ConfigError where what was asked for cannot be.

    sampler_is_known: a sampler written elsewhere is given merged weights, unless the settings say that it takes adapters.
    """
    if cfg.tuner.tuner_type == "full":
        return None
    on_gpu = parallel.device.type == "cuda"
    if cfg.rollout.vllm_mode == "server" and sampler_is_known:
        obstacle = None  # servers say themselves whether they have room, and the trainer may have no vLLM
    elif not sampler_is_known:
        obstacle = None if cfg.tuner.vllm_enable_lora else "this sampler was written elsewhere, and vllm_enable_lora true is not set"
    else:
        from megatron_grpo.rollout.vllm_weights import sampler_obstacle

        obstacle = sampler_obstacle(inputs.shape.architecture, on_gpu=on_gpu)
    found = lora_push(cfg, inputs.shape, on_gpu=on_gpu, sampler_obstacle=obstacle)
    if found and found.notes:
        told = lora_push(cfg, inputs.shape, on_gpu=None)  # by the plan, which knows no machine and no sampler
        for note in found.notes:
            if told is None or note not in told.notes:
                journal.metrics.say(note)
    return found


def build_colocated(cfg: Config, inputs: Looked, parallel: ParallelState, *, lora: LoraPush | None = None) -> Engine:
    """vLLM inside the trainer's own ranks. Collective."""
    from megatron_grpo.rollout.colocated import ColocatedEngine

    more: dict[str, Any] = {}
    if cfg.rollout.same_bits:
        from megatron_grpo.analysis import vllm_same_bits

        more["patch"] = vllm_same_bits.prepare
    return ColocatedEngine.build(
        cfg.rollout,
        model_path=inputs.model_path,
        dtype=cfg.model.torch_dtype,
        max_model_len=inputs.longest_prompt + longest_completion(cfg),
        seed=cfg.run.seed,
        rank=parallel.rank,
        world_size=parallel.world_size,
        lora=lora,
        experts=replayed_experts(cfg, inputs.shape),
        eyes=inputs.eyes,
        most_pictures=cfg.data.limit_images or inputs.most_pictures,
        trust_remote_code=cfg.model.trust_remote_code,
        **more,
    )


def replayed_experts(cfg: Config, shape: ModelShape) -> ExpertLayers | None:
    """Where the sampler is to tell which experts it took."""
    return ExpertLayers.of(shape) if cfg.grpo.router_replay_mode == "R3" else None


def build_servers(cfg: Config, inputs: Looked, parallel: ParallelState, *, lora: LoraPush | None = None) -> Engine:
    """Rollout servers, which are waited for. Collective."""
    from megatron_grpo.servers.servers import ServerEngine

    return ServerEngine.build(
        cfg.rollout, model_path=inputs.model_path, shape=inputs.shape, output_dir=Path(cfg.run.output_dir),
        needs=needs_of(cfg, inputs.shape, inputs.longest_prompt, lora, eyes=inputs.eyes, most_pictures=inputs.most_pictures),
        device=parallel.device, lora=lora, eyes=inputs.eyes, trust_remote_code=cfg.model.trust_remote_code,
    )  # fmt: skip


ENGINES: dict[str, Callable[..., Engine]] = {"colocate": build_colocated, "server": build_servers}  # by vllm_mode


def build_served_teacher(
    cfg: Config, inputs: Inputs, parallel: ParallelState, stop: train.StopRequest, checkpoints: Checkpoints
) -> Teacher | None:
    """Frozen servers, which are waited for; None where none are named. Collective."""
    if not cfg.grpo.teacher_model_server:
        return None
    from megatron_grpo.run.sources import needs_of_teacher
    from megatron_grpo.servers import teachers
    from megatron_grpo.trainer.teacher import ServedTeacher

    tokenizer = cast(PromptEncoder, next(iter(inputs.streams)).encode).tokenizer
    needs = needs_of_teacher(cfg, inputs.shape, tokenizer, inputs.longest_prompt)
    servers = teachers.Teacher.build(cfg, needs, stop.gives_up) if parallel.is_main else None
    teacher = ServedTeacher(servers.fingerprint, servers.logprobs) if servers else ServedTeacher()
    checkpoints.learned(TEACHER, teacher.fingerprint)
    return teacher


def build_held_teacher(
    cfg: Config, student: ModelShape, parallel: ParallelState, *, teacher_path: Path, clock: Clock, offload: Collection[Role] = ()
) -> Teacher:
    """A frozen model of any shape in the run's layout. Collective.

    offload: what of the policy leaves the device while the sampler works.
    """
    from megatron_grpo.trainer.teacher import HeldTeacher

    shape = ModelShape.from_pretrained(teacher_path)
    own = config_of_teacher(cfg, shape, student)
    _, loaded_chunks = model_of(own, shape, parallel, model_path=teacher_path)
    chunks = [chunk.eval().requires_grad_(False) for chunk in loaded_chunks()]
    cut = cut_for(
        parallel,
        chunks[0].config,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        least_saving=sharing_of(own, shape, parallel).least_saving,
    )
    leaves = cfg.grpo.offload_teacher_model or "reference" in offload
    return HeldTeacher(cfg.grpo.teacher_model or str(teacher_path), ModelScorer(chunks, parallel, cut), clock, leaves=leaves)


# ---- which reference -------------------------------------------------------------------------------------------------------------------

Tensors = Callable[[], dict[str, torch.Tensor]]
MakeReference = Callable[[GrpoConfig, ModelScorer, Tensors], Reference]  # settings; the model that the run began with; its tensors


def build_frozen(cfg: GrpoConfig, initial: ModelScorer, tensors: Tensors) -> Reference:
    return FrozenReference(initial)


def build_following(cfg: GrpoConfig, initial: ModelScorer, tensors: Tensors) -> Reference:
    return FollowingReference(initial, tensors=tensors, every=cfg.ref_model_sync_steps, alpha=cfg.ref_model_mixup_alpha)


REFERENCES: dict[bool, MakeReference] = {False: build_frozen, True: build_following}  # by sync_ref_model

# ---- the policy ------------------------------------------------------------------------------------------------------------------------


def uses_transformer_engine(transformer_impl: str) -> bool:
    """`auto` takes Transformer Engine where it can be imported."""
    if transformer_impl != "auto":
        return transformer_impl == "transformer_engine"
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def sharing_here(cfg: Config, shape: ModelShape, parallel: ParallelState) -> Sharing:
    """Whether this machine computes each prompt once. Raises ConfigError with all that is asked of it and that it has not."""
    has_te, has_gpu = uses_transformer_engine("auto"), parallel.device.type == "cuda"
    capability = torch.cuda.get_device_capability(parallel.device) if has_gpu else None
    lacking = machine_problems(cfg, has_gpu=has_gpu, has_transformer_engine=has_te, capability=capability)
    if lacking := [*lacking, *sharing_problems(cfg, shape)]:
        raise ConfigError(lacking)
    sharing = sharing_of(cfg, shape, parallel)
    planned = decide(cfg, shape)  # `plan`, and the sizes shown at the start, know nothing of the machine
    if parallel.is_main and sharing != planned and (has_gpu or sharing.least_saving != planned.least_saving):
        logger.warning("Shared prompts are %s.", sharing)
    return sharing


def sharing_of(cfg: Config, shape: ModelShape, parallel: ParallelState) -> Sharing:
    """Of a model on this machine, which has all that is asked of it."""
    has_gpu = parallel.device.type == "cuda"
    lacks = gpu_kernel(getattr(torch, cfg.model.torch_dtype), attention_channels(shape)).lacks if has_gpu else None
    return decide(cfg, shape, has_gpu=has_gpu, gpu_lacks=lacks)


def padded_vocab_size(shape: ModelShape, cfg: Config) -> int:
    """Rows of the embedding: a multiple that TP divides evenly."""
    multiple = cfg.model.padded_vocab_multiple * cfg.parallel.tensor_model_parallel_size
    return -(-shape.vocab_size // multiple) * multiple


def choose_tuner(cfg: Config, chunks: Sequence[Any], exchange: WeightExchange, push: AdapterPush | None = None) -> Adapters | None:
    """Sets what trains: weights of `chunks`, or adapters that are put beside them, which are returned."""
    tuner, shape = cfg.tuner, exchange.map.shape
    settings = lora_of(tuner, shape)
    if settings is None:
        choose_what_trains(chunks, exchange, tuner)
        return None
    sizes = own_sizes(settings, shape)
    read = from_file(tuner.adapters, settings, shape) if tuner.adapters else drawn(sizes, cfg.run.seed)
    found = Adapters(chunks, exchange, settings, read, base_model=cfg.model.model, push=push or "adapter")
    start = tuner.ref_adapters or tuner.adapters
    if cfg.grpo.beta and start and not cfg.grpo.ref_model:
        flag = "ref_adapters" if tuner.ref_adapters else "adapters"
        theirs = LoraSettings.from_peft(start, flag=flag)
        found.keep_reference(theirs, from_file(start, theirs, shape, flag=flag))
    return found


def model_of(
    cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path
) -> tuple[WeightExchange, Callable[..., list[PolicyModel]]]:
    """Who exchanges the weights of this model in this layout; and a function that makes its chunks, with the checkpoint's weights or those
    of another checkpoint of the same shape.

    Raises ConfigError where the checkpoint is not this model. What is asked of the machine has been looked at (`sharing_here`).
    """
    use_te = uses_transformer_engine(cfg.model.transformer_impl) and needs_local_layers(shape) is None
    rows = padded_vocab_size(shape, cfg)
    plain_linears = cfg.tuner.tuner_type == "lora"  # an adapter needs the input of the layer that it stands beside
    naming = "transformer_engine" if use_te and not plain_linears else "local"
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=rows, naming=naming)
    bucket_bytes = (cfg.rollout.weight_sync_bucket_mb or 0) * MIB or None
    exchange = WeightExchange(weight_map, parallel, bucket_bytes=bucket_bytes, to_first=cfg.rollout.vllm_mode == "server")

    def reader_of(directory: str | Path) -> HfReader:
        reader = HfReader(directory)
        weight_map.check_complete(reader.names)
        check_tied_head(reader)
        return reader

    own = reader_of(model_path)

    def loaded_chunks(other: Path | None = None) -> list[PolicyModel]:
        reader = reader_of(other) if other is not None else own
        tower = tower_here(cfg, shape, parallel, other or model_path)
        chunks = build_chunks(
            shape, cfg.model, cfg.parallel, parallel,
            use_te=use_te, plain_linears=plain_linears, padded_vocab_size=rows, temperature=cfg.rollout.temperature, tower=tower,
            kernels=cfg.kernels,
        )  # fmt: skip
        exchange.load(chunks, reader)
        return chunks

    return exchange, loaded_chunks


def tower_here(cfg: Config, shape: ModelShape, parallel: ParallelState, model_path: str | Path) -> torch.nn.Module | None:
    """What sees, on ranks of the first stage; its weights are not set yet."""
    if not parallel.is_first_stage:
        return None
    dtype, checkpointing = getattr(torch, cfg.model.torch_dtype), cfg.model.vit_gradient_checkpointing
    return build_tower(shape, model_path, dtype=dtype, device=parallel.device, checkpointing=checkpointing)


def build_loaded(
    cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path, checkpoint: Path | None, micro_batch_size: int = 1
) -> LoadedModel:
    """A model that only answers and is pushed: of the files, or of a checkpoint of any layout. Collective."""
    sharing_here(cfg, shape, parallel)
    exchange, loaded_chunks = model_of(cfg, shape, parallel, model_path=model_path)
    chunks = loaded_chunks()
    adapters = choose_tuner(cfg, chunks, exchange)
    if checkpoint is not None:
        load_weights(chunks, checkpoint)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    cut = cut_for(parallel, chunks[0].config, micro_batch_size=micro_batch_size, max_tokens=None)
    return LoadedModel(chunks, ModelScorer(chunks, parallel, cut), exchange, adapters)


def frozen_copy(cfg: Config, chunks: Sequence[PolicyModel], model: Trainable, *, is_itself: bool) -> list[PolicyModel]:
    """A model that does not train. is_itself: of the one that trains, as the run begins."""
    if cfg.run.mcore_model and is_itself:
        copy_weights(chunks, of=model.chunks)
    return [chunk.eval().requires_grad_(False) for chunk in chunks]


def build_policy(
    cfg: Config,
    shape: ModelShape,
    parallel: ParallelState,
    *,
    model_path: str | Path,
    num_steps: int,
    clock: Clock | None = None,
    reference: MakeReference | None = None,
    guard: Guard | None = None,
    push: AdapterPush | None = None,
    offload: Collection[Role] = (),
    ref_model_path: Path | None = None,
) -> Policy:
    """The policy with the checkpoint's weights, ready to train; and its reference where one is asked for. Collective.

    push: how adapters reach the sampler; None where weights train, and for a policy that is not to be sampled from. offload: what leaves
    the device while the sampler works. ref_model_path: of the reference, where it is another checkpoint.
    """
    if cfg.rollout.same_bits:
        from megatron_grpo.analysis.same_bits_switch import switch_on

        switch_on()
    sharing = sharing_here(cfg, shape, parallel)
    loss = GrpoLoss.from_config(cfg.grpo, max_completion_length=cfg.rollout.max_completion_length, temperature=cfg.rollout.temperature)
    exchange, loaded_chunks = model_of(cfg, shape, parallel, model_path=model_path)
    chunks = loaded_chunks()
    adapters = choose_tuner(cfg, chunks, exchange, push)
    if cfg.run.mcore_model:
        begin_with(chunks, cfg.run.mcore_model)
    moves = trains_tower(cfg.tuner, shape)
    model = Trainable.of(chunks, cfg.optimizer, num_steps=num_steps, adapters=adapters, trains_tower=moves)
    keep_outputs([] if moves else chunks)
    cut = cut_for(
        parallel,
        model.chunks[0].config,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        least_saving=sharing.least_saving,
        rank_multiple=rank_multiple(cfg),
    )
    held_to = None
    if cfg.grpo.beta:
        if adapters is not None and ref_model_path is None:  # the same model without them, or with those it began with
            initial = ModelScorer(model.wrapped, parallel, cut, around=adapters.reference)
        else:
            initial = ModelScorer(frozen_copy(cfg, loaded_chunks(ref_model_path), model, is_itself=ref_model_path is None), parallel, cut)
            keep_outputs([] if moves else initial.model)
        held_to = (reference or REFERENCES[cfg.grpo.sync_ref_model])(cfg.grpo, initial, partial(exchange.tensors, initial.model))
    return Policy(
        model,
        ModelScorer(model.wrapped, parallel, cut, replay=cfg.grpo.router_replay_mode),
        loss=loss,
        reference=held_to,
        guard=guard or PlausibleGuard(above=cfg.optimizer.skip_grad_norm_above, factor=cfg.optimizer.skip_grad_norm_factor),
        exchange=exchange,
        clock=clock,
        offload=offload,
    )
