"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_grpo import train
from megatron_grpo.batching.plan import BatchPlan
from megatron_grpo.batching.timetable import Timetable
from megatron_grpo.checkpoint import Checkpoints, holds_run, start_afresh
from megatron_grpo.config import Config
from megatron_grpo.data.chat import PromptEncoder, load_tokenizer
from megatron_grpo.data.prompts import PromptRows, PromptStream, check_lengths, load_rows
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.evaluate import Evaluator
from megatron_grpo.experience import Sampler
from megatron_grpo.export import export_hf
from megatron_grpo.flags.write import write_config
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.judge import judge
from megatron_grpo.metrics import Clock, Completions, Metrics
from megatron_grpo.metrics.drift import DriftWatch
from megatron_grpo.metrics.schedule import ScheduleLog
from megatron_grpo.parallel import state
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.policy.model import build_chunks
from megatron_grpo.policy.optimizer import build_optimizer, build_scheduler, wrap_for_training
from megatron_grpo.policy.policy import Policy
from megatron_grpo.rewards.loading import check_columns, close_rewards, load_rewards
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.rollout.engine import RolloutEngine, SamplingSettings
from megatron_grpo.signals import StopSignal, die_with_parent
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.reader import HfReader
from megatron_grpo.weights.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads before any model loads: everything that can be wrong with it has been looked at."""

    model_path: Path
    shape: ModelShape
    plan: BatchPlan
    timetable: Timetable
    encode: PromptEncoder
    rows: PromptRows
    eval_rows: PromptRows | None
    rewards: list[RewardFunction]


def run_training(cfg: Config) -> int:
    """`megatron-grpo train`, on this rank. Returns the exit code; raises ConfigError before any model loads."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    inputs = read_inputs(cfg)
    parallel = start_parallel(cfg, inputs.plan)
    signal = StopSignal()
    run = None
    try:
        run = build_run(cfg, inputs, parallel, signal)
        train.train(run)
        if cfg.run.export_hf:
            export_hf(run.policy, Path(cfg.run.output_dir) / "hf", source=inputs.model_path,
                      dtype=getattr(torch, cfg.model.torch_dtype), parallel=parallel)  # fmt: skip
    finally:
        if run is not None:
            run.metrics.close()
            run.rollout.close()
        close_rewards(inputs.rewards)
        signal.restore()
    state.stop()
    return 0


def read_inputs(cfg: Config) -> Inputs:
    """Reads model shape, data and rewards. Raises ConfigError with the problems of all of them at once."""
    problems: list[Problem] = []

    def attempt(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    attempt(partial(check_output_dir, cfg))
    model_path = attempt(partial(find_model, cfg.model.model))
    shape = attempt(lambda: ModelShape.from_pretrained(model_path)) if model_path else None
    tokenizer = attempt(lambda: load_tokenizer(str(model_path))) if shape else None
    rows = attempt(lambda: load_rows(cfg.data))
    eval_rows = attempt(lambda: load_rows(cfg.data, dataset=cfg.eval.eval_dataset, flag="eval_dataset")) if cfg.eval.eval_dataset else None
    rewards = attempt(lambda: load_rewards(cfg))
    if rewards and rows:
        attempt(lambda: check_columns(rewards, rows.column_names()))
    encode = None
    if tokenizer:
        keep_last = cfg.data.max_prompt_length if cfg.data.truncation_strategy == "left" else None
        encode = PromptEncoder(tokenizer, system=cfg.data.system, enable_thinking=cfg.data.enable_thinking, keep_last=keep_last)
        rows = attempt(lambda: check_lengths(rows, encode, cfg.data)) if rows else None
        eval_rows = attempt(lambda: check_lengths(eval_rows, encode, cfg.data, flag="eval_dataset")) if eval_rows else None
    plan = None
    if shape:
        experts = shape.moe.num_experts if shape.moe else 0
        plan = attempt(lambda: BatchPlan.from_config(cfg, num_layers=shape.num_layers, num_experts=experts))
    if problems:
        close_rewards(rewards or [])
        raise ConfigError(problems)
    timetable = Timetable.of_length(
        plan, max_steps=cfg.run.max_steps, num_train_epochs=cfg.run.num_train_epochs, num_prompts=len(rows)
    )
    return Inputs(model_path=model_path, shape=shape, plan=plan, timetable=timetable, encode=encode, rows=rows, eval_rows=eval_rows,
                  rewards=rewards)  # fmt: skip


def check_output_dir(cfg: Config) -> None:
    """An output_dir that holds a run is continued (`--resume auto`) or cleared (`--overwrite_output_dir`), never mixed."""
    out = cfg.run.output_dir
    if cfg.run.overwrite_output_dir and cfg.run.resume not in ("auto", "never"):
        raise ConfigError([Problem(
            flags=("overwrite_output_dir", "resume"),
            message=f"overwrite_output_dir starts afresh and resume ({cfg.run.resume}) continues. Leave one of them out.")])  # fmt: skip
    if holds_run(out) and cfg.run.resume == "never" and not cfg.run.overwrite_output_dir:
        raise ConfigError([Problem(
            flags=("output_dir", "resume"),
            message=f"output_dir ({out}) holds an earlier run and resume is never. Use --resume auto to continue it, "
                    "--overwrite_output_dir to replace it, or another output_dir.")])  # fmt: skip


def find_model(name: str) -> Path:
    """The directory of a Hugging Face checkpoint; a Hub name is fetched first."""
    if not name:
        raise ConfigError([Problem(flags=("model",), message="model is missing: give a Hugging Face checkpoint directory or a Hub name.")])
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError([Problem(
            flags=("model",), message=f"model ({name}) is neither a directory here nor a model that can be fetched from the Hub: {reason}"
        )]) from error  # fmt: skip


def start_parallel(cfg: Config, plan: BatchPlan) -> ParallelState:
    layout = Layout(world_size=plan.world_size, tp=plan.tp, pp=plan.pp, vpp=plan.vpp, cp=plan.cp, ep=plan.ep, etp=plan.etp)
    return state.start(
        layout,
        sequence_parallel=cfg.parallel.sequence_parallel,
        seed=cfg.run.seed,
        timeout_minutes=cfg.parallel.distributed_timeout_minutes,
    )


def build_run(cfg: Config, inputs: Inputs, parallel: ParallelState, signal: StopSignal) -> train.Run:
    """Everything that `train.train` needs. Collective."""
    out, run_cfg = Path(cfg.run.output_dir), cfg.run
    if parallel.is_main:
        if run_cfg.overwrite_output_dir:
            start_afresh(out)
        out.mkdir(parents=True, exist_ok=True)
        write_config(cfg, out / "config.yaml")
    parallel.barrier()
    timetable = inputs.timetable
    metrics = Metrics(out, report_to=run_cfg.report_to, rank=parallel.rank, total_steps=timetable.num_steps, plot_steps=run_cfg.save_steps)
    policy = build_policy(cfg, inputs.shape, parallel, model_path=inputs.model_path, num_steps=timetable.num_steps)
    sampling = SamplingSettings.of(cfg.rollout, num_generations=cfg.batch.num_generations)
    engine = build_engine(cfg, inputs, parallel)
    clock = Clock()
    names = [function.name for function in inputs.rewards]

    def score(groups):
        return judge(groups, inputs.rewards, rank=parallel.rank, world_size=parallel.world_size, share=parallel.all_gather_objects)

    prompts = PromptStream(inputs.rows, inputs.encode, seed=run_cfg.seed, shuffle=cfg.data.dataset_shuffle)
    held_out = []
    if inputs.eval_rows is not None:
        stream = PromptStream(inputs.eval_rows, inputs.encode, seed=0, shuffle=False)
        held_out = stream.take(min(len(stream), cfg.eval.eval_num_prompts or len(stream)))
    sampler = Sampler(
        engine=engine,
        sampling=sampling,
        prompts=prompts,
        judge=score,
        reward_names=names,
        reward_weights=cfg.rewards.reward_weights or [1.0] * len(names),
        kl_penalty=policy.kl_to_reference if cfg.grpo.kl_in_reward and cfg.grpo.beta else None,
        completions=Completions(out, reward_names=names, every=run_cfg.log_completions_steps, rank=parallel.rank),
        clock=clock,
        cfg=cfg.grpo,
        num_groups=inputs.plan.num_rollout_prompts,
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
        prompts=prompts,
        checkpoints=Checkpoints(out, save_steps=run_cfg.save_steps, save_total_limit=run_cfg.save_total_limit, resume=run_cfg.resume),
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

    longest = max(rows.longest_prompt for rows in (inputs.rows, inputs.eval_rows) if rows is not None)
    return ColocatedEngine.build(
        cfg.rollout,
        model_path=inputs.model_path,
        dtype=cfg.model.torch_dtype,
        max_model_len=longest + cfg.rollout.max_completion_length,
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
    use_te = uses_transformer_engine(cfg.model.transformer_impl) and shape.mla is None  # policy.latent is for the local layers
    rows = padded_vocab_size(shape, cfg)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=rows, naming="transformer_engine" if use_te else "local")
    exchange = WeightExchange(weight_map, parallel)
    reader = HfReader(model_path)
    weight_map.check_complete(reader.names)
    loss = GrpoLoss.from_config(
        cfg.grpo, max_completion_length=cfg.rollout.max_completion_length, temperature=cfg.rollout.temperature
    )

    def loaded_chunks():
        chunks = build_chunks(
            shape, cfg.model, cfg.parallel, parallel, use_te=use_te, padded_vocab_size=rows, temperature=loss.temperature
        )
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
        beta=cfg.grpo.beta,
    )
