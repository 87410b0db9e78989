"""Looks on while a step is taken: audits its copies, and keeps a capsule of a step with which something is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_grpo.base.errors import RunError
from megatron_grpo.batching.schedule import ScheduledStep
from megatron_grpo.parallel import collectives
from megatron_grpo.policy.guard import SkippedStep
from megatron_grpo.policy.policy import Policy, SummedGradient
from megatron_grpo.trainer.sample_buffer import SampleBuffer

# Metrics of a step -> what is wrong with its log-probs, if anything; it may remember what it has said.
Gap = Callable[[Mapping[str, float]], "str | None"]


class ReplicaMismatchError(RunError):
    """What must be the same on several ranks is not. Raised on every rank, before the optimizer acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReason:
    """Why a step is kept. kind: "not_finite", "spike", "logp_gap", "parted" or "time_out". finding: of an audit."""

    kind: str
    words: str
    step: ScheduledStep
    refusal: SkippedStep | None = None
    finding: Any = None


class StepMonitor:
    """One a run; a `policy.GradientHooks`. `with monitor(step, pending) as beside: policy.train_step(batch, beside)`.

    capsules: gives the `analysis.step_dump.StepDumps` of the run, and is asked for them when a step is kept. audit: an
    `analysis.audit.Audit`, None for none. ends_run: what an audit finds ends the run; else it is said. gap: see `Gap`.
    """

    def __init__(self, policy: Policy, capsules: Callable[[], Any], *, audit: Any, ends_run: bool, gap: Gap, say: Callable[[str], None]):
        self.policy, self.capsules, self.audit, self.ends_run = policy, capsules, audit, ends_run
        self._gap, self._say = gap, say
        self._now: tuple[ScheduledStep, SampleBuffer] | None = None  # the step that is being taken

    @contextmanager
    def __call__(self, step: ScheduledStep, pending: SampleBuffer) -> Iterator[StepMonitor]:
        """pending: with the step's rows, where they are trained."""
        self._now = step, pending
        try:
            yield self
        finally:
            self._now = None

    def dump_on_hang(self, words: str) -> None:
        """From the watchdog's thread, when ranks hang in a step: what this rank has of it. No collective."""
        now = self._now
        if now is not None:
            step, pending = now
            self.capsules().dump_on_hang(DumpReason(kind="time_out", words=words, step=step), pending, self.policy)

    def summed(self, seen: SummedGradient) -> None:
        if self.audit is None or not self.audit.is_due(seen.batch.step):
            return
        finding = self.audit.look(self.policy, seen.batch, seen.metrics, seen.logprobs)
        if finding is None:
            return
        self._keep(seen, kind="parted", words=str(finding), finding=finding)
        if self.ends_run:
            raise ReplicaMismatchError(
                f"{finding}. The run ends before the optimizer acts on it, and no checkpoint is written (audit_action stop). "
                "What was saved before the last audit in which all was equal is sound: --resume goes on from there."
            )
        if collectives.rank() == 0:
            self._say(f"WARNING: {finding}")

    def judged(self, seen: SummedGradient, refusal: SkippedStep | None) -> None:
        if refusal is not None:
            kind = "spike" if math.isfinite(seen.metrics["grad_norm"]) else "not_finite"
            self._keep(seen, kind=kind, words=refusal.why, refusal=refusal)
        elif words := self._gap(seen.metrics):
            self._keep(seen, kind="logp_gap", words=words)

    def _keep(self, seen: SummedGradient, **facts: Any) -> None:
        """facts: of its `DumpReason`."""
        assert self._now is not None, "a step is looked at inside `with monitor(step, pending)`"
        step, pending = self._now
        self.capsules().write(DumpReason(step=step, **facts), pending, self.policy, seen)
