"""THE LOOP. Read this first: everything else is a part that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_grpo.batching.split import in_slices, split
from megatron_grpo.errors import Interrupted
from megatron_grpo.grpo.refused import is_truncated_sampling, truncated_sampling_warning
from megatron_grpo.sync import check_weights, sync_weights

if TYPE_CHECKING:
    from megatron_grpo.batching.timetable import Step, Timetable
    from megatron_grpo.checkpoint.saving import Checkpoints
    from megatron_grpo.data.prompts import PromptStream
    from megatron_grpo.evaluate import Evaluator
    from megatron_grpo.experience import Sampler
    from megatron_grpo.metrics import Clock, Metrics
    from megatron_grpo.metrics.drift import DriftWatch
    from megatron_grpo.metrics.schedule import ScheduleLog
    from megatron_grpo.parallel.state import ParallelState
    from megatron_grpo.policy.policy import Policy, TrainedStep
    from megatron_grpo.rollout.engine import RolloutEngine
    from megatron_grpo.run.signals import StopSignal
    from megatron_grpo.settings.config import Config
    from megatron_grpo.types import GlobalBatch, Progress, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run is made of; put together in `build`."""

    config: Config
    timetable: Timetable
    parallel: ParallelState
    policy: Policy
    rollout: RolloutEngine
    sampler: Sampler
    prompts: PromptStream
    checkpoints: Checkpoints
    evaluator: Evaluator
    metrics: Metrics
    schedule_log: ScheduleLog
    drift: DriftWatch
    clock: Clock
    signal: StopSignal


def train(run: Run) -> Progress:
    """One GRPO run. Every rank executes this same function; no rank is special in it.

    Returns where it ended. Raises `Interrupted` after a signal, once the state is on disk.
    """
    policy, clock = run.policy, run.clock
    progress, pending = run.checkpoints.restore(policy, run.prompts)  # a fresh run: step 0, nothing pending
    run.metrics.start(progress)
    run.sampler.completions.start(progress)
    run.schedule_log.start(progress)
    publish(run, progress)
    evaluate_if_due(run, progress)

    for step in run.timetable.from_step(progress.step):  # one row of the timetable per optimizer step
        stats, drawn = {}, run.prompts.taken
        if step.new_rollouts:
            # SAMPLE and JUDGE   prompts -> groups -> scored groups -> samples. Afterwards every rank holds the same list.
            with run.rollout.awake():
                for number in step.new_rollouts:
                    samples, stats = run.sampler.rollout(number)
                    pending = pending + samples

        with policy.resident():
            # ANCHOR   log-probs that must stay still while the weights move: only where the timetable says so.
            with clock("old_logprobs"):
                pending = anchor(pending, step, run)
            # LEARN    this step's global batch, cut for this rank: the only place where data is sharded.
            batch, rest = split(pending, step, policy.loss.token_weights, policy.cut)
            with clock("train"):
                trained = policy.train_step(batch)
            pending = keep(rest, step, trained.logprobs, run)
            progress = progress.after(
                num_rollouts=len(step.new_rollouts), num_prompts=run.prompts.taken - drawn, num_tokens=batch.num_tokens
            )
            move_reference_if_due(run, progress)
            # PUBLISH  the next rollout is sampled from these weights.
            if step.next_samples or run.evaluator.is_due(progress):
                publish(run, progress)
            report(run, progress, batch, trained, stats)
            run.checkpoints.save_if_due(progress, pending, policy, run.prompts)
        evaluate_if_due(run, progress)
        stop_if_asked(run, progress, pending)
    run.checkpoints.save(progress, pending, policy, run.prompts)
    return progress


def publish(run: Run, progress: Progress) -> None:
    """The engine samples from the policy's weights from now on, and has shown that it does."""
    verify = run.config.rollout.verify_weight_push
    with run.clock("weight_sync"):
        stats = sync_weights(run.policy, run.rollout, version=progress.step, verify=verify)
        if verify and not stats.was_pushed:
            # The engine read the checkpoint by itself: the two readings of it must agree.
            check_weights(run.policy, run.rollout, version=progress.step)


def anchor(pending: list[Sample], step: Step, run: Run) -> list[Sample]:
    """Forward-only log-probs, by the version that sampled them, for the slices whose first use will be stale."""
    due = in_slices(pending, step.anchors, run.policy.cut.rows_per_slice)
    if not due:
        return pending
    by_row = {(sample.rollout, sample.row): sample for sample in run.policy.anchor(due)}
    return [by_row.get((sample.rollout, sample.row), sample) for sample in pending]


def keep(pending: list[Sample], step: Step, logprobs, run: Run) -> list[Sample]:
    """The log-probs of an on-policy training forward, kept for the later passes over the same rows."""
    wanted = {(sample.rollout, sample.row) for sample in in_slices(pending, step.keeps, run.policy.cut.rows_per_slice)}
    if not wanted:
        return pending
    mine = {row: values for row, values in logprobs.items() if row in wanted}
    found = {row: values for some in run.parallel.all_gather_objects(mine) for row, values in some.items()}
    return [
        sample.anchored(sample.spread(found[row]), "cached") if (row := (sample.rollout, sample.row)) in wanted else sample
        for sample in pending
    ]


def move_reference_if_due(run: Run, progress: Progress) -> None:
    """The reference follows the policy, every so many optimizer steps (`--sync_ref_model`)."""
    cfg = run.config.grpo
    if cfg.sync_ref_model and progress.step % cfg.ref_model_sync_steps == 0:
        run.policy.move_reference(cfg.ref_model_mixup_alpha)


def report(run: Run, progress: Progress, batch: GlobalBatch, trained: TrainedStep, stats: dict[str, float]) -> None:
    """Metrics of one optimizer step, which rows it trained, and what a person should be told."""
    rows = [micro_batch.rows for micro_batch in batch.micro_batches]
    run.schedule_log.record(progress, batch, run.parallel.all_gather_objects(rows, run.parallel.dp_group))
    warning = run.drift.warning(trained.metrics)
    if warning:
        run.metrics.say(f"WARNING: {warning}")
    sampling = run.config.rollout
    if progress.step == 1 and is_truncated_sampling(sampling):
        run.metrics.say(f"WARNING: {truncated_sampling_warning(sampling, trained.metrics)}")
    if trained.was_skipped:
        run.metrics.say(f"optimizer step {progress.step}: all completions were filtered, nothing was left to train")
    run.metrics.log(progress, stats | trained.metrics | batch.metrics | run.clock.take())


def evaluate_if_due(run: Run, progress: Progress) -> None:
    if run.evaluator.is_due(progress):
        with run.clock("eval"):
            run.metrics.log_evaluation(progress, run.evaluator.run(run.rollout))
        if run.rollout.version != progress.step:
            publish(run, progress)  # an engine that drops its weights when it sleeps (sleep_level 2)


def stop_if_asked(run: Run, progress: Progress, pending: list[Sample]) -> None:
    """A signal to any rank stops all of them here, where the state is whole."""
    if run.signal.agreed(run.parallel.all_reduce_max):
        run.checkpoints.save(progress, pending, run.policy, run.prompts)
        raise Interrupted(f"stopped by a signal after optimizer step {progress.step}; saved in {run.config.run.output_dir}")
