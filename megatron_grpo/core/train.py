"""The training loop of a GRPO run.

Start reading here: every other module is a part that this one names.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_grpo.core.base.errors import (
    CancelledError,
    NoRolloutServerError,
    RowsError,
    RunError,
    RunInterruptedError,
    WeightsNotFiniteError,
)
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from megatron_grpo.core.batching.schedule import ScheduledStep, TrainingSchedule
    from megatron_grpo.core.metadata import Progress, Rollout, TrainingRows
    from megatron_grpo.core.parallel.state import ParallelState
    from megatron_grpo.core.policy.gradient_check import SkippedStep
    from megatron_grpo.core.policy.policy import Policy, TrainedStep
    from megatron_grpo.core.rollout.engine import Engine
    from megatron_grpo.core.trainer.rollouts import MetricsProcessor, PromptSource, Rollouts
    from megatron_grpo.core.trainer.step_monitor import StepMonitor
    from megatron_grpo.core.trainer.weight_sync import WeightSyncManager
    from megatron_grpo.core.types import GlobalBatch


class StopRequest(Protocol):
    """Stop request of a run.

    The loop knows nothing else of signals and time limits.
    """

    def is_requested(self, all_reduce_max: Callable[[float], float]) -> bool:
        """Return whether any rank asks to stop, the same on every rank. Collective.

        Args:
            all_reduce_max: Returns the maximum of a number over all ranks.
        """

    def should_cancel(self) -> bool:
        """Return whether sampling or reward scoring must be abandoned now, because no time is left to wait for it."""

    def why(self, all_gather: Callable[[Any], list[Any]]) -> str:
        """Return the reason for the stop, in the same words on every rank. Collective.

        Args:
            all_gather: Gathers a value from all ranks.
        """

    def request(self, reason: str) -> None:
        """Request a stop. One rank alone may call it.

        Args:
            reason: End of the sentence "stopped by ...".
        """


class CheckpointManager(Protocol):
    """Checkpoints of a run. `run.checkpoint.saving.Checkpoints` documents its methods.

    Attributes:
        resume: Its `output_dir` is the folder that messages name.
    """

    resume: Any

    def restore(self, policy: Policy, prompts: Any, empty: SampleBuffer) -> tuple[Progress, SampleBuffer]: ...

    def record(self, step: ScheduledStep, buffer: SampleBuffer) -> None: ...

    def advance(self) -> None: ...

    def is_time(self) -> bool: ...

    def are_due(self, step: int) -> bool: ...

    def has_trained(self, version: int, step: int) -> None: ...

    def last_good(self, step: int) -> Path | None: ...

    def save(self, progress: Progress, buffer: SampleBuffer, policy: Policy, prompts: Any) -> bool: ...

    def finish(self) -> None: ...


class Validator(Protocol):
    """Evaluations of a run on held-out prompts. `run.evaluate.Evaluator` documents its methods."""

    def is_due(self, steps: Iterable[int]) -> bool: ...

    def run(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Components of one training run, assembled by `build`.

    Args:
        stop_drain_seconds: How long to wait for running generations once the run must stop.
        max_skipped_steps: Consecutive steps refused by the gradient check after which the run ends.
    """

    schedule: TrainingSchedule
    parallel: ParallelState
    policy: Policy
    engine: Engine
    weight_sync: WeightSyncManager
    rollouts: Rollouts
    prompts: PromptSource
    checkpoints: CheckpointManager
    evaluator: Validator
    logger: MetricsProcessor
    stop: StopRequest
    stop_drain_seconds: float
    max_skipped_steps: int
    step_callback: StepMonitor


def train(run: Run) -> Progress:
    """Run the GRPO training loop and return the final progress. Every rank executes this function; no rank is special.

    Raises:
        RunInterruptedError: The run was asked to stop. Its state is saved on disk.
        RunError: `max_skipped_steps` optimizer steps in a row were skipped.
    """
    policy, rollouts, timers = run.policy, run.rollouts, run.logger.timers
    empty = SampleBuffer(
        parallel=run.parallel, cut=policy.cut, zero_gradient=policy.loss.zero_gradient, partial_rollouts=rollouts.partial is not None
    )
    progress, buffer = run.checkpoints.restore(policy, run.prompts, empty)
    run.logger.start(progress)

    for step in run.schedule.from_step(progress.step, progress.num_rollouts):  # one row of the schedule per optimizer step
        # SAMPLE   collect rollouts launched by earlier steps; sync this step's weights to the engine; start new sampling.
        with saved_if_sampling_ends(run, progress, buffer):
            new_rollouts = rollouts.collect(step.arriving)
            evaluate_if_due(run, progress, step.evaluates)
            if step.immediate or step.launches:
                sync_weights(run, progress.step)
            new_rollouts += rollouts.sample(step.immediate, ahead=step.ahead)
            for number in step.launches:
                rollouts.launch(number)
        buffer, progress = buffer.add(new_rollouts), progress.add(new_rollouts)
        stop_if_requested(run, progress, buffer, new_rollouts)  # before the optimizer step, which may take longer than the time left
        # SCORE    compute old log-probs, which stay fixed while the weights change: only for the slices that the schedule names.
        with policy.on_device("weights"), timers("old_logprobs"):
            buffer = buffer.with_old_logprobs(policy.scorer, step)
        # TRAIN    build this rank's share of the global batch: the only place where data is partitioned.
        buffer, batch = buffer.batch(step, token_weight_fn=policy.loss.token_weights)
        run.checkpoints.record(step, buffer)
        with policy.on_device("all"), timers("train"), run.step_callback(step, buffer) as hooks:
            trained = policy.train_step(batch, hooks)
        rows = buffer.rows
        if trained.skipped_step:  # the weights from before the step are unchanged
            with policy.on_device("weights"), timers("old_logprobs"):
                buffer = buffer.after_skipped_step(policy.scorer, step)
        buffer, progress = buffer.after(step, trained.logprobs), progress.after(batch)
        # SAVE     save a checkpoint. It includes running generations, so it waits for them.
        with timers("checkpoint"):
            run.checkpoints.advance()  # continues a checkpoint that is written in the background
        stops, is_time = sync_stop_flags(run)
        saves = stops or is_time or run.checkpoints.are_due(progress.step)
        if saves:
            with saved_if_sampling_ends(run, progress, buffer, unlogged=(batch, trained, rows)):
                new_rollouts = rollouts.drain(progress.step, at_most=run.stop_drain_seconds if stops else None)
            buffer, progress = buffer.add(new_rollouts), progress.add(new_rollouts)
        log_step(run, progress, batch, trained, rows)
        end_if_skipped_too_often(run, progress, trained.skipped_step)
        if not trained.skipped:
            run.checkpoints.has_trained(batch.newest_version, progress.step)
        if saves:
            save(run, progress, buffer, completely=stops)
        if stops:
            raise make_interrupted(run, progress)
    with saved_if_sampling_ends(run, progress, buffer):
        evaluate_if_due(run, progress, [progress.step])
    save(run, progress, buffer, completely=True)
    return progress


def sync_stop_flags(run: Run) -> tuple[bool, bool]:
    """Return whether all ranks stop now, and whether a checkpoint is due by the clock of the main rank. Collective.

    A stop request on any rank stops all of them. Both flags are reduced at once.
    """
    is_time = run.parallel.is_rank_zero and run.checkpoints.is_time()

    def all_reduce_max(stop: float) -> float:
        nonlocal is_time
        stops, is_time = collectives.all_reduce_any([stop > 0, is_time])
        return float(stops)

    return run.stop.is_requested(all_reduce_max), is_time


def log_step(run: Run, progress: Progress, batch: GlobalBatch, trained: TrainedStep, rows: TrainingRows) -> None:
    """Log the metrics of a step and, if the gradient check refused it, the rows that caused its gradient.

    Args:
        progress: The progress after the step.
        rows: The rows that were waiting before the step.
    """
    run.logger.step(progress, batch, trained.metrics, skipped=trained.skipped)
    if trained.skipped_step:
        row_info = {}
        for rollout, row in trained.skipped_step.rows:
            number = int(rows.prompt_number[rows.find_indices(rollout, row)])
            row_info[rollout, row] = dict(rollout=rollout, row=row, prompt_number=number, dataset_row=run.prompts.find_row(number))
        run.logger.skipped_step(progress, trained.skipped_step.record(row_info), trained.skipped_step.lines(row_info))


def end_if_skipped_too_often(run: Run, progress: Progress, skipped_step: SkippedStep | None) -> None:
    """End the run after too many skipped optimizer steps in a row, or if no further step can succeed.

    Args:
        progress: The progress after the step.
        skipped_step: Refusal of the step by the gradient check; None if the step was taken.

    Raises:
        RunError: `max_skipped_steps` steps in a row were refused by the gradient check, or weights are not finite.
    """
    if skipped_step is not None and skipped_step.weights:
        [sentence] = skipped_step.lines({})
        raise WeightsNotFiniteError(f"The run ends at optimizer step {progress.step}: {sentence}. {last_good_hint(run, progress.step)}")
    if skipped_step is None or skipped_step.skips.in_a_row < run.max_skipped_steps:
        return
    raise RunError(
        f"{skipped_step.skips.in_a_row} optimizer steps in a row were skipped (max_skipped_steps {run.max_skipped_steps}); the run "
        f"stops. At the last one, step {progress.step}, {skipped_step.why}; the rows are listed above and in skipped.jsonl. "
        f"{last_good_hint(run, progress.step)} The same settings reproduce the same gradients: change them (--lr, --clip_grad) or the "
        "listed rows."
    )


def last_good_hint(run: Run, step: int) -> str:
    """Return the sentence about the checkpoint from which a run may go on."""
    last_good = run.checkpoints.last_good(step)
    if not last_good:
        return "No checkpoint is known to be good yet."
    return f"The last good checkpoint is {last_good}; continue with --resume {last_good}."


def sync_weights(run: Run, version: int) -> None:
    """Interrupt partial rollouts, sync the policy's weights to the engine, and verify that the engine uses them.

    Nothing is synced if the engine already has this version.

    Args:
        version: The version of the weights, which is the number of optimizer steps done.
    """
    with run.logger.timers("weight_sync"):
        run.rollouts.interrupt()
        try:
            run.weight_sync.sync_weights(version)
        except WeightsNotFiniteError as error:
            raise WeightsNotFiniteError(f"{error} {last_good_hint(run, version)}") from error


def evaluate_if_due(run: Run, progress: Progress, steps: Iterable[int]) -> None:
    """Evaluate if an evaluation is due after one of the given steps.

    Args:
        steps: Numbers of completed optimizer steps whose evaluation, if due, happens now.
    """
    if run.evaluator.is_due(steps):
        sync_weights(run, progress.step)
        with run.logger.timers("eval"):
            evaluated = run.evaluator.run()
        run.logger.evaluation(progress, evaluated)


def save(run: Run, progress: Progress, buffer: SampleBuffer, *, completely: bool) -> None:
    """Save a checkpoint.

    Args:
        completely: Wait until the checkpoint is on disk, even if checkpoints are written in the background.
    """
    with run.logger.timers("checkpoint"):
        run.checkpoints.save(progress, buffer, run.policy, run.prompts)
        if completely:
            run.checkpoints.finish()


def stop_if_requested(run: Run, progress: Progress, buffer: SampleBuffer, new_rollouts: Collection[Rollout]) -> None:
    """Stop between sampling and the optimizer step, if rollouts arrived and a stop was requested.

    The new rollouts are saved in the checkpoint, if at least one optimizer step was done.

    Raises:
        RunInterruptedError: The run was asked to stop.
    """
    if new_rollouts and run.stop.is_requested(collectives.all_reduce_max):
        if progress.step:
            run.rollouts.interrupt()
            save(run, progress, buffer, completely=True)
        raise make_interrupted(run, progress)


@contextmanager
def saved_if_sampling_ends(
    run: Run,
    progress: Progress,
    buffer: SampleBuffer,
    unlogged: tuple[GlobalBatch, TrainedStep, TrainingRows] | None = None,
) -> Iterator[None]:
    """Save the state from before the block if sampling fails inside it, then end the run.

    This applies if all rollout servers are permanently gone, if the run must stop and cannot wait for sampling, or if rows of a streamed
    data set cannot be read. The run can be resumed. Nothing is saved before the first optimizer step.

    Args:
        progress: The progress before the block.
        buffer: The sample buffer before the block.
        unlogged: The step that was just taken, if it is not logged yet.

    Raises:
        RunInterruptedError: Sampling was cancelled because the run must stop.
        NoRolloutServerError: No rollout server is left.
        RowsError: Rows of a streamed data set cannot be read.
    """
    prompts_state = run.prompts.state()
    try:
        yield
    except (NoRolloutServerError, CancelledError, RowsError) as end:
        if unlogged:
            log_step(run, progress, *unlogged)
        if progress.step:
            run.prompts.restore(prompts_state)
            run.rollouts.interrupt()  # what servers have sampled for these prompts is saved too
            save(run, progress, buffer, completely=True)
        if isinstance(end, CancelledError):
            raise make_interrupted(run, progress, f", and {end}") from end
        raise type(end)(f"{end}; {saved_hint(run, progress)}") from end


def make_interrupted(run: Run, progress: Progress, detail: str = "") -> RunInterruptedError:
    """Return the error that ends a stopped run, once its state is on disk. Collective.

    Args:
        detail: Text added after the reason for the stop.
    """
    return RunInterruptedError(f"stopped by {run.stop.why(collectives.all_gather_object)}{detail}; {saved_hint(run, progress)}")


def saved_hint(run: Run, progress: Progress) -> str:
    """Return where the state of a run is saved, as the end of a message."""
    if not progress.step:
        return "no optimizer step was completed"
    return f"saved after optimizer step {progress.step} in {run.checkpoints.resume.output_dir}"
