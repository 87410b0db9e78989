"""THE LOOP. Read this first: everything else is a part that it names."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_grpo.base.errors import CancelledError, NoRolloutServerError, RowsError, RunError, RunInterruptedError
from megatron_grpo.parallel import collectives
from megatron_grpo.trainer.sample_buffer import SampleBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from megatron_grpo.batching.schedule import ScheduledStep, TrainingSchedule
    from megatron_grpo.checkpoint.saving import Checkpoints
    from megatron_grpo.data.prompts import PromptStream
    from megatron_grpo.metrics.metrics_logger import MetricsLogger
    from megatron_grpo.parallel.state import ParallelState
    from megatron_grpo.policy.guard import SkippedStep
    from megatron_grpo.policy.policy import GradientHooks, Policy, TrainedStep
    from megatron_grpo.rollout.engine import Engine
    from megatron_grpo.trainer.evaluate import Evaluator
    from megatron_grpo.trainer.rollouts import Rollouts
    from megatron_grpo.trainer.weight_sync import WeightSyncManager
    from megatron_grpo.types import GlobalBatch, Progress, Rollout, RowKey, TrainingRow


class StopRequest(Protocol):
    """Tells whether this run is to stop. The loop knows nothing else of signals and time limits."""

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool: ...

    def should_cancel(self) -> bool:
        """For whoever samples or judges: whether there is no time left to wait for it."""

    def why(self, from_all: Callable[[Any], list[Any]]) -> str:
        """What asked for it, in the same words on every rank. Collective."""


class StepCallback(Protocol):
    """Looks on while steps are taken: it may end the run, and keeps what somebody will want to look at."""

    def __call__(self, step: ScheduledStep, pending: SampleBuffer) -> AbstractContextManager[GradientHooks | None]:
        """Around a step. pending: with its rows, where they are trained."""

    def dump_on_hang(self, words: str) -> None:
        """Ranks hang, as `words` say: from another thread, without a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run is made of; put together in `build`."""

    timetable: TrainingSchedule
    parallel: ParallelState
    policy: Policy
    engine: Engine
    publisher: WeightSyncManager
    rollouts: Rollouts
    prompts: PromptStream
    checkpoints: Checkpoints
    evaluator: Evaluator
    journal: MetricsLogger
    stop: StopRequest
    stop_drain_seconds: float  # once the run is to stop, how long what is being sampled is waited for
    max_skipped_steps: int  # so many steps in a row that the guard refuses end the run
    witness: StepCallback


def train(run: Run) -> Progress:
    """One GRPO run. Every rank executes this same function; no rank is special in it.

    Returns where it ended. Raises `RunInterruptedError` where it was asked to stop, once the state is on disk.
    """
    policy, rollouts, clock = run.policy, run.rollouts, run.journal.clock
    progress, pending = run.checkpoints.restore(policy, run.prompts, SampleBuffer(parallel=run.parallel, cut=policy.cut))
    run.journal.start(progress)

    for step in run.timetable.from_step(progress.step, progress.num_rollouts):  # one row of the timetable per optimizer step
        # SAMPLE   what an earlier step launched comes in; the engine gets this step's weights; new sampling begins.
        with saved_if_sampling_ends(run, progress, pending):
            found = rollouts.collect(step.arriving)
            evaluate_if_due(run, progress, step.evaluates)
            if step.immediate or step.launches:
                publish(run, progress.step)
            found += rollouts.sample(step.immediate)
            for number in step.launches:
                rollouts.launch(number)
        pending, progress = pending.add(found), progress.add(found)
        stop_if_asked(run, progress, pending, found)  # the optimizer step may take longer than whoever asks can wait
        # ANCHOR   log-probs that must stay still while the weights move: only where the timetable says so.
        with policy.resident("weights"), clock("old_logprobs"):
            pending = pending.anchored(policy.scorer, step)
        # LEARN    this step's global batch, cut for this rank: the only place where data is cut.
        pending, batch = pending.batch(step, weigh=policy.loss.token_weights)
        run.checkpoints.record(step, pending)
        with policy.resident("all"), clock("train"), run.witness(step, pending) as beside:
            trained = policy.train_step(batch, beside)
        rows = pending.rows
        if trained.refusal:  # its weights are still there
            with policy.resident("weights"), clock("old_logprobs"):
                pending = pending.after_refusal(policy.scorer, step)
        pending, progress = pending.after(step, trained.logprobs), progress.after(batch)
        # KEEP     a checkpoint holds what is being sampled too, so it waits for that.
        with clock("checkpoint"):
            run.checkpoints.advance()  # one that is being written beside the steps
        stops, is_time = agreed(run)
        saves = stops or is_time or run.checkpoints.are_due(progress.step)
        if saves:
            with saved_if_sampling_ends(run, progress, pending, told=(batch, trained, rows)):
                found = rollouts.drain(progress.step, at_most=run.stop_drain_seconds if stops else None)
            pending, progress = pending.add(found), progress.add(found)
        tell(run, progress, batch, trained, rows)
        end_if_skipped_too_often(run, progress, trained.refusal)
        if not trained.skipped:
            run.checkpoints.has_trained(batch.newest_version, progress.step)
        if saves:
            save(run, progress, pending, completely=stops)
        if stops:
            raise stopped(run, progress)
    with saved_if_sampling_ends(run, progress, pending):
        evaluate_if_due(run, progress, [progress.step])
    save(run, progress, pending, completely=True)
    return progress


def agreed(run: Run) -> tuple[bool, bool]:
    """Whether what asks any rank to stop stops all of them here; and whether it is time for a checkpoint, by the main rank's clock.

    Both are one number: 2 to stop, 1 for the clock. A run that stops saves anyway.
    """
    is_time, largest = run.parallel.is_main and run.checkpoints.is_time(), 0.0

    def all_reduce_max(stop: float) -> float:
        nonlocal largest
        largest = collectives.all_reduce_max(2.0 * stop + is_time)
        return float(largest >= 2.0)

    return run.stop.agreed(all_reduce_max), largest == 1.0


def tell(run: Run, progress: Progress, batch: GlobalBatch, trained: TrainedStep, rows: Mapping[RowKey, TrainingRow]) -> None:
    """What a step says of itself; of one that the guard refused, who made its gradient. rows: those that waited before it."""
    run.journal.step(progress, batch, trained.metrics, skipped=trained.skipped)
    if trained.refusal:
        numbers = {key: rows[key].prompt_number for key in trained.refusal.rows}
        places = {
            (rollout, row): dict(rollout=rollout, row=row, prompt_number=number, dataset_row=run.prompts.row_of(number))
            for (rollout, row), number in numbers.items()
        }
        run.journal.refusal(progress, trained.refusal.record(places), trained.refusal.lines(places))


def end_if_skipped_too_often(run: Run, progress: Progress, refusal: SkippedStep | None) -> None:
    """Raises RunError after `max_skipped_steps` refusals in a row."""
    if refusal is None or refusal.skips.in_a_row < run.max_skipped_steps:
        return
    good = run.checkpoints.last_good(progress.step)
    raise RunError(
        f"{refusal.skips.in_a_row} optimizer steps in a row were skipped (max_skipped_steps {run.max_skipped_steps}), and the run ends. "
        f"Of the last one, step {progress.step}, {refusal.why}; who made it is said above, and in skipped.jsonl. "
        + (f"The last good checkpoint is {good}: --resume {good} goes on from it. " if good else "No checkpoint is known to be good yet. ")
        + "The same settings come to the same gradients: change them (--lr, --clip_grad), or the rows that were named."
    )


def publish(run: Run, version: int) -> None:
    """Pushes the policy's weights to the engine, which proves that it has them. Does nothing if it has them already."""
    with run.journal.clock("weight_sync"):
        run.publisher.publish(version)


def evaluate_if_due(run: Run, progress: Progress, steps: Iterable[int]) -> None:
    """steps: numbers of optimizer steps done, after which an evaluation that is due falls here."""
    if run.evaluator.is_due(steps):
        publish(run, progress.step)
        with run.journal.clock("eval"):
            evaluated = run.evaluator.run()
        run.journal.evaluation(progress, evaluated)


def save(run: Run, progress: Progress, pending: SampleBuffer, *, completely: bool) -> None:
    """completely: it is on the disk when this returns, also where checkpoints are written beside the steps."""
    with run.journal.clock("checkpoint"):
        run.checkpoints.save(progress, pending, run.policy, run.prompts)
        if completely:
            run.checkpoints.finish()


def stop_if_asked(run: Run, progress: Progress, pending: SampleBuffer, found: Collection[Rollout]) -> None:
    """Between sampling and the optimizer step, if anything was found: it waits in the checkpoint."""
    if found and run.stop.agreed(collectives.all_reduce_max):
        if progress.step:
            run.journal.keep(progress)
            save(run, progress, pending, completely=True)
        raise stopped(run, progress)


@contextmanager
def saved_if_sampling_ends(
    run: Run, progress: Progress, pending: SampleBuffer, told: tuple[GlobalBatch, TrainedStep, Mapping[RowKey, TrainingRow]] | None = None
) -> Iterator[None]:
    """Around sampling: if it ends because all rollout servers have gone for good, because the run is to stop and cannot wait for it, or
    because of rows that are read as the run goes, the run is saved as it was before, and ends. It can be resumed.

    told: of the step that was just taken, where the journal has not heard of it.
    """
    before = run.prompts.state()
    try:
        yield
    except (NoRolloutServerError, CancelledError, RowsError) as end:
        if told:
            tell(run, progress, *told)
        if progress.step:
            run.prompts.restore(before)
            save(run, progress, pending, completely=True)
        if isinstance(end, CancelledError):
            raise stopped(run, progress, f", and {end}") from end
        raise type(end)(f"{end}; {where_it_is_saved(run, progress)}") from end


def stopped(run: Run, progress: Progress, more: str = "") -> RunInterruptedError:
    """What a wish to stop ends in, once the state is on disk. Collective."""
    return RunInterruptedError(f"stopped by {run.stop.why(collectives.all_gather_object)}{more}; {where_it_is_saved(run, progress)}")


def where_it_is_saved(run: Run, progress: Progress) -> str:
    if not progress.step:
        return "nothing was trained yet"
    return f"saved after optimizer step {progress.step} in {run.checkpoints.resume.output_dir}"
