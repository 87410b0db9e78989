"""THE LOOP. Read this first: everything else is a part that it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_grpo.errors import Interrupted
from megatron_grpo.parallel import collectives
from megatron_grpo.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_grpo.batching.timetable import Timetable
    from megatron_grpo.checkpoint.saving import Checkpoints
    from megatron_grpo.data.prompts import PromptStream
    from megatron_grpo.evaluate import Evaluator
    from megatron_grpo.metrics.journal import Journal
    from megatron_grpo.parallel.state import ParallelState
    from megatron_grpo.policy.policy import Policy
    from megatron_grpo.rollout.engine import Engine
    from megatron_grpo.rollouts import Rollouts
    from megatron_grpo.sync import Publisher
    from megatron_grpo.types import Progress


class StopRequest(Protocol):
    """Tells whether somebody asked this run to stop. The loop knows nothing else of signals."""

    def agreed(self, all_reduce_max: Callable[[float], float]) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run is made of; put together in `build`."""

    timetable: Timetable
    parallel: ParallelState
    policy: Policy
    engine: Engine
    publisher: Publisher
    rollouts: Rollouts
    prompts: PromptStream
    checkpoints: Checkpoints
    evaluator: Evaluator
    journal: Journal
    stop: StopRequest


def train(run: Run) -> Progress:
    """One GRPO run. Every rank executes this same function; no rank is special in it.

    Returns where it ended. Raises `Interrupted` after a signal, once the state is on disk.
    """
    policy, rollouts, clock, cut = run.policy, run.rollouts, run.journal.clock, run.policy.cut
    progress, pending = run.checkpoints.restore(
        policy, run.prompts, Pending(parallel=run.parallel), cut
    )  # a fresh run: step 0, nothing pending
    run.journal.start(progress)

    for step in run.timetable.from_step(progress.step):  # one row of the timetable per optimizer step
        # SAMPLE   what an earlier step launched comes in; the engine gets this step's weights; new sampling begins.
        found = rollouts.collect(step.arriving)
        evaluate_if_due(run, progress)
        if step.launches:
            publish(run, progress.step)
        for number in step.launches:
            rollouts.launch(number)
        found += rollouts.collect(step.immediate)
        pending = pending.add(found)

        with policy.resident("all"):
            # ANCHOR   log-probs that must stay still while the weights move: only where the timetable says so.
            with clock("old_logprobs"):
                pending = pending.anchored(policy, step, cut)
            # LEARN    this step's global batch, cut for this rank: the only place where data is cut.
            pending, batch = pending.batch(step, weigh=policy.loss.token_weights, cut=cut)
            with clock("train"):
                trained = policy.train_step(batch)
            pending, progress = pending.after(step, trained.logprobs, cut), progress.after(found, batch)
            run.journal.step(progress, batch, trained)
            with clock("checkpoint"):
                run.checkpoints.save_if_due(progress, pending, policy, run.prompts)
        stop_if_asked(run, progress, pending)
    evaluate_if_due(run, progress)
    run.checkpoints.save(progress, pending, policy, run.prompts)
    return progress


def publish(run: Run, version: int) -> None:
    """Pushes the policy's weights to the engine, which proves that it has them. Does nothing if it has them already."""
    with run.journal.clock("weight_sync"), run.policy.resident("weights"):
        run.publisher.publish(version)


def evaluate_if_due(run: Run, progress: Progress) -> None:
    if run.evaluator.is_due(progress):
        publish(run, progress.step)
        with run.journal.clock("eval"):
            results = run.evaluator.run()
        run.journal.evaluation(progress, results)


def stop_if_asked(run: Run, progress: Progress, pending: Pending) -> None:
    """A signal to any rank stops all of them here, where the state is whole."""
    if run.stop.agreed(collectives.largest):
        run.checkpoints.save(progress, pending, run.policy, run.prompts)
        raise Interrupted(f"stopped by a signal after optimizer step {progress.step}; saved in {run.checkpoints.resume.output_dir}")
