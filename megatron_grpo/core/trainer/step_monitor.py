"""Monitor of training steps: compares replicas across ranks, and saves a step that looks wrong for later inspection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.batching.schedule import ScheduledStep
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.gradient_check import SkippedStep
from megatron_grpo.core.policy.policy import Policy, ReducedGradient
from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

# Metrics of a step -> description of a problem with its log-probs, or None; it may keep state between calls.
Gap = Callable[[Mapping[str, float]], "str | None"]


class ReplicaMismatchError(RunError):
    """Error raised on every rank, before the optimizer step, if state that must be equal on several ranks differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReason:
    """Reason why a step is saved.

    Args:
        kind: "not_finite", "spike", "logp_gap", "replica_mismatch" or "time_out".
        words: Description of the problem.
        step: The step from the training schedule.
        skipped_step: Refusal by the gradient check, if any.
        finding: The finding of a replica check, if any.
    """

    kind: str
    words: str
    step: ScheduledStep
    skipped_step: SkippedStep | None = None
    finding: Any = None


class StepMonitor:
    """Monitor of all steps of a run; an implementation of `policy.GradientHooks`.

    Usage: `with monitor(step, pending) as beside: policy.train_step(batch, beside)`.

    Args:
        step_dumps: Returns the `analysis.step_dump.StepDumps` of the run; called when a step is saved.
        replica_check: An `analysis.replica_check.ReplicaCheck`; None if replicas are not compared.
        ends_run: Whether a finding of the replica check ends the run; otherwise it is logged.
        gap: See `Gap`.
    """

    def __init__(
        self,
        policy: Policy,
        step_dumps: Callable[[], Any],
        *,
        replica_check: Any,
        ends_run: bool,
        gap: Gap,
        print_line: Callable[[str], None],
    ):
        self.policy, self.step_dumps, self.replica_check, self.ends_run = policy, step_dumps, replica_check, ends_run
        self._gap, self._print_line = gap, print_line
        self._now: tuple[ScheduledStep, SampleBuffer] | None = None  # the step that is being taken

    @contextmanager
    def __call__(self, step: ScheduledStep, buffer: SampleBuffer) -> Iterator[StepMonitor]:
        """Monitor the step taken inside the block."""
        self._now = step, buffer
        try:
            yield self
        finally:
            self._now = None

    def dump_on_hang(self, words: str) -> None:
        """Save what this rank has of the current step when ranks hang. Called by the watchdog's thread; uses no collective."""
        current = self._now
        if current is not None:
            step, buffer = current
            self.step_dumps().dump_on_hang(DumpReason(kind="time_out", words=words, step=step), buffer, self.policy)

    def on_gradients_reduced(self, gradient: ReducedGradient) -> None:
        if self.replica_check is None or not self.replica_check.is_due(gradient.batch.step):
            return
        finding = self.replica_check.compare(self.policy, gradient.batch, gradient.metrics, gradient.logprobs)
        if finding is None:
            return
        self._keep(gradient, kind="replica_mismatch", words=str(finding), finding=finding)
        if self.ends_run:
            raise ReplicaMismatchError(
                f"{finding}. The run stops before the optimizer step, and no checkpoint is written (check_replicas_action stop). "
                "Checkpoints saved up to the last check without a difference are valid; continue from one of them with --resume."
            )
        if collectives.rank() == 0:
            self._print_line(f"WARNING: {finding}")

    def on_pre_optimizer_step(self, gradient: ReducedGradient, skipped_step: SkippedStep | None) -> None:
        if skipped_step is not None:
            kind = "spike" if math.isfinite(gradient.metrics["grad_norm"]) else "not_finite"
            self._keep(gradient, kind=kind, words=skipped_step.why, skipped_step=skipped_step)
        elif words := self._gap(gradient.metrics):
            self._keep(gradient, kind="logp_gap", words=words)

    def _keep(self, gradient: ReducedGradient, **facts: Any) -> None:
        """Save the current step. `facts` are fields of `DumpReason`."""
        assert self._now is not None, "a step is monitored inside `with monitor(step, buffer)`"
        step, buffer = self._now
        self.step_dumps().write(DumpReason(step=step, **facts), buffer, self.policy, gradient)
