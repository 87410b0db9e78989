"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_grpo import train
from megatron_grpo.checkpoint import Checkpoints, start_afresh
from megatron_grpo.errors import ConfigError, Interrupted, RewardError
from megatron_grpo.evaluate import Evaluator
from megatron_grpo.experience import Sampler
from megatron_grpo.export import export_hf
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.inputs import Inputs
from megatron_grpo.judge import judge
from megatron_grpo.metrics import Clock, Completions, Metrics
from megatron_grpo.metrics.drift import DriftWatch
from megatron_grpo.metrics.schedule import ScheduleLog
from megatron_grpo.parallel import state
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.planning.command import Plan
from megatron_grpo.planning.report import print_report
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.policy.model import build_chunks
from megatron_grpo.policy.optimizer import build_optimizer, build_scheduler, wrap_for_training
from megatron_grpo.policy.policy import Policy
from megatron_grpo.policy.refused import machine_problems
from megatron_grpo.rewards.loading import close_rewards
from megatron_grpo.rollout.engine import RolloutEngine, SamplingSettings
from megatron_grpo.run.signals import FailureBoard, StopSignal, die_with_parent
from megatron_grpo.settings.config import Config
from megatron_grpo.settings.write import write_config
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader, check_tied_head
from megatron_grpo.weights.shape import ModelShape


def run_training(made: Plan, inputs: Inputs) -> int:
    """`megatron-grpo train`, on this rank, with settings and inputs that have been checked. Returns the exit code."""
    cfg = made.checked.config
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    parallel = start_parallel(cfg, made.checked.plan)
    board = FailureBoard(dist.distributed_c10d._get_default_store())
    signal = StopSignal(board.any_failed)
    run = None
    try:
        if parallel.is_main:
            print_report(made, is_short=True)
        run = build_run(made, inputs, parallel, signal)
        train.train(run)
        if cfg.run.export_hf:
            export_hf(run.policy, Path(cfg.run.output_dir) / "hf", source=inputs.model_path,
                      dtype=getattr(torch, cfg.model.torch_dtype), parallel=parallel)  # fmt: skip
    except Interrupted:
        raise
    except RewardError as error:
        # Every rank has it, so none waits for another and nothing is reported: the first to leave makes the launcher end the others, and
        # until `signal.restore` that is only noted. What it says must not come later.
        if run is not None:
            run.metrics.close()
        if parallel.is_main:
            print(f"megatron-grpo: a reward function failed, and the run ends.\n{error}", file=sys.stderr, flush=True)
        raise
    except BaseException:
        board.report()  # before any clean-up: the others may be waiting in a collective that this rank will never enter
        raise
    finally:
        if run is not None:
            run.metrics.close()
            run.rollout.close()
        close_rewards(inputs.rewards)
        signal.restore()
    if parallel.is_main:
        print(f"Done: {Path(cfg.run.output_dir).resolve()}" + (" (model in hf/)" if cfg.run.export_hf else ""), flush=True)
    state.stop()
    return 0


def start_parallel(cfg: Config, plan: BatchSizes) -> ParallelState:
    """Joins the job, on the grid that the plan describes. Collective."""
    layout = Layout(world_size=plan.world_size, tp=plan.tp, pp=plan.pp, vpp=plan.vpp, cp=plan.cp, ep=plan.ep, etp=plan.etp)
    return state.start(
        layout,
        sequence_parallel=cfg.parallel.sequence_parallel,
        seed=cfg.run.seed,
        timeout_minutes=cfg.parallel.distributed_timeout_minutes,
    )


def build_run(made: Plan, inputs: Inputs, parallel: ParallelState, signal: StopSignal) -> train.Run:
    """Everything that `train.train` needs. Collective."""
    cfg, timetable = made.checked.config, made.timetable
    out, run_cfg = Path(cfg.run.output_dir), cfg.run
    if parallel.is_main:
        if run_cfg.overwrite_output_dir:
            start_afresh(out)
        out.mkdir(parents=True, exist_ok=True)
        write_config(cfg, out / "config.yaml")
        made.save(out / "plan.json")
    parallel.barrier()
    metrics = Metrics(
        out,
        report_to=run_cfg.report_to,
        rank=parallel.rank,
        total_steps=timetable.num_steps,
        plot_steps=run_cfg.save_steps,
        config={name: value for section in cfg.groups().values() for name, value in vars(section).items()},
    )
    policy = build_policy(cfg, inputs.shape, parallel, model_path=inputs.model_path, num_steps=timetable.num_steps)
    sampling = SamplingSettings.of(cfg.rollout, num_generations=cfg.batch.num_generations)
    engine = build_engine(cfg, inputs, parallel)
    clock = Clock()
    names = [function.name for function in inputs.rewards]

    def score(groups):
        return judge(groups, inputs.rewards, rank=parallel.rank, world_size=parallel.world_size, share=parallel.all_gather_objects)

    held_out = []
    if inputs.held_out is not None:
        held_out = inputs.held_out.take(min(len(inputs.held_out), cfg.eval.eval_num_prompts or len(inputs.held_out)))
    sampler = Sampler(
        engine=engine,
        sampling=sampling,
        prompts=inputs.prompts,
        judge=score,
        reward_names=names,
        reward_weights=cfg.rewards.reward_weights or [1.0] * len(names),
        kl_penalty=policy.kl_to_reference if cfg.grpo.kl_in_reward and cfg.grpo.beta else None,
        completions=Completions(out, reward_names=names, every=run_cfg.log_completions_steps, rank=parallel.rank),
        clock=clock,
        cfg=cfg.grpo,
        num_groups=made.checked.plan.num_rollout_prompts,
        use_sampler_logprobs=cfg.batch.old_logprobs == "rollout",
        seed=run_cfg.seed,
    )
    return train.Run(
        config=cfg,
        timetable=timetable,
        parallel=parallel,
        policy=policy,
        rollout=engine,
        sampler=sampler,
        prompts=inputs.prompts,
        checkpoints=Checkpoints(out, save_steps=run_cfg.save_steps, save_total_limit=run_cfg.save_total_limit, resume=run_cfg.resume,
                                sizes=timetable.plan.stream_sizes),
        evaluator=Evaluator(held_out, score, names, sampling, score=cfg.eval.eval_reward or names[0], every=cfg.eval.eval_steps,
                            last_step=timetable.num_steps),
        metrics=metrics,
        schedule_log=ScheduleLog(out, rank=parallel.rank),
        drift=DriftWatch(bound=cfg.rollout.logp_difference_warn, dtype=cfg.model.torch_dtype),
        clock=clock,
        signal=signal,
    )  # fmt: skip


def build_engine(cfg: Config, inputs: Inputs, parallel: ParallelState) -> RolloutEngine:
    """The sampler that `vllm_mode` names. Collective."""
    from megatron_grpo.rollout.colocated import ColocatedEngine

    return ColocatedEngine.build(
        cfg.rollout,
        model_path=inputs.model_path,
        dtype=cfg.model.torch_dtype,
        max_model_len=inputs.longest_prompt + cfg.rollout.max_completion_length,
        seed=cfg.run.seed,
        rank=parallel.rank,
        world_size=parallel.world_size,
    )


def uses_transformer_engine(transformer_impl: str) -> bool:
    """`auto` takes Transformer Engine where it can be imported."""
    if transformer_impl != "auto":
        return transformer_impl == "transformer_engine"
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return HAVE_TE


def padded_vocab_size(shape: ModelShape, cfg: Config) -> int:
    """Rows of the embedding: a multiple that TP divides evenly."""
    multiple = cfg.model.padded_vocab_multiple * cfg.parallel.tensor_model_parallel_size
    return -(-shape.vocab_size // multiple) * multiple


def build_policy(cfg: Config, shape: ModelShape, parallel: ParallelState, *, model_path: str | Path, num_steps: int) -> Policy:
    """The policy with the checkpoint's weights, ready to train; and its frozen reference where the loss needs one. Collective."""
    has_te = uses_transformer_engine("auto")
    if lacking := machine_problems(cfg, has_gpu=parallel.device.type == "cuda", has_transformer_engine=has_te):
        raise ConfigError(lacking)
    use_te = uses_transformer_engine(cfg.model.transformer_impl) and shape.mla is None  # policy.latent is for the local layers
    rows = padded_vocab_size(shape, cfg)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=rows, naming="transformer_engine" if use_te else "local")
    exchange = WeightExchange(weight_map, parallel)
    reader = HfReader(model_path)
    weight_map.check_complete(reader.names)
    check_tied_head(reader)
    loss = GrpoLoss.from_config(cfg.grpo, max_completion_length=cfg.rollout.max_completion_length, temperature=cfg.rollout.temperature)

    def loaded_chunks():
        chunks = build_chunks(shape, cfg.model, cfg.parallel, parallel, use_te=use_te, padded_vocab_size=rows, temperature=loss.temperature)
        exchange.load(chunks, reader)
        return chunks

    chunks = loaded_chunks()
    wrapped = wrap_for_training(chunks, cfg.optimizer)
    optimizer = build_optimizer(wrapped, cfg.optimizer)
    reference = None
    if cfg.grpo.beta:
        reference = [chunk.eval().requires_grad_(False) for chunk in loaded_chunks()]
    return Policy(
        chunks=chunks,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, cfg.optimizer, num_steps=num_steps),
        loss=loss,
        reference=reference,
        exchange=exchange,
        parallel=parallel,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens_per_micro_batch=cfg.batch.max_tokens_per_micro_batch,
        beta=cfg.grpo.beta,
        reference_moves=cfg.grpo.sync_ref_model,
    )
