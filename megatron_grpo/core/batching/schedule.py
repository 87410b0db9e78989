"""Training schedule: which rows are trained when, which version sampled them, and where their old log-probs come from.

`plan` prints it and `train` follows it: the same object. Each optimizer step is computed independently from the batch sizes
(docs/batching.md, Training schedule and Old log-probs), so a run of a million steps costs no memory and resuming costs nothing.

A *micro-step* trains `micro_batch_size` completions on each DP rank. A *slice* is the part of a rollout that one micro-step trains. With A
micro-steps per optimizer step, W slices per rollout and mu passes: micro-step s belongs to optimizer step s // A and to rollout s // (W *
mu); rollout r arrives before optimizer step (r * W * mu) // A, which is a *sampling step*. All arithmetic is on integers. Where an epoch
ends with a complete rollout (`drops_last`), s // A restarts in each epoch, so that its last optimizer step may have fewer micro-steps.

A rollout is sampled by the version that is current when sampling begins. That is the version of the sampling step itself; or, if sampling
runs one rollout ahead, that of the previous sampling step, so that the rollout is sampled while the steps between the two are trained.

With partial rollouts (`BatchSizes.partial_rollouts`) a rollout arrives at its own sampling step, and its prompts may begin up to
`async_rollout_depth` sampling steps earlier. At each of these steps its unfinished completions continue with the weights of that step, so a
completion may have tokens of several versions. Its rows count as sampled by the oldest version that they may have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from megatron_grpo.core.batching.batch_sizes import BatchSizes

Label = Literal["on_policy", "recompute", "cached", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One forward and backward pass on every DP rank. `rows` is (first, last_exclusive) inside the rollout, over all DP ranks.

    Args:
        sampled_by_version: With partial rollouts, the oldest version that may have sampled a token.
        on_policy_version: The version at which its rollout arrives: old log-probs are those of this version.
        staleness: Optimizer steps between sampling and training; 0 is exactly on-policy.
    """

    micro_step: int
    optimizer_step: int
    rollout: int
    pass_index: int
    slice_index: int
    rows: tuple[int, int]
    sampled_by_version: int
    on_policy_version: int
    staleness: int
    old_logprobs: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """One optimizer step: what is sampled just before it, what it trains, and which log-probs must be computed or kept.

    A slice is identified by (rollout, slice index).

    Args:
        index: Optimizer steps done before it; also the version of the weights that it starts from.
        arriving: Rollouts that an earlier step launched: they arrive before this one.
        immediate: Rollouts that are sampled just before it, while training waits.
        launches: Rollouts that begin to be sampled just before it, and arrive before a later one.
        ahead: Rollouts whose prompts may be sampled beside `immediate`; interrupted, they continue at the next step.
        evaluates: Evaluations due at it, by steps done: also those that waited until nothing was being sampled.
        old_logprob_slices: Slices for a forward-only pass before this step, at its version: their first use will be stale.
        keeps: Slices whose log-probs of this step's training forward are kept, because stale uses follow.
        last_use: Slices that are not needed after this step.
    """

    index: int
    arriving: range
    immediate: range
    launches: range
    ahead: range = range(0)
    evaluates: range
    micro_steps: tuple[MicroStep, ...]
    old_logprob_slices: tuple[tuple[int, int], ...]
    keeps: tuple[tuple[int, int], ...]
    last_use: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """Training schedule of a run, as rows of optimizer steps and micro-steps.

    Args:
        sizes: Batch sizes.
        num_steps: Length of the run in optimizer steps; None if it is unknown or unlimited.
        num_prompts: Prompts of the data set, where their number is known.
        drops_last: Whether an epoch leaves out the prompts that do not fill a rollout, so that its last optimizer step has the remaining
            micro-steps. Otherwise rollouts and optimizer steps continue into the next epoch.
    """

    sizes: BatchSizes
    num_steps: int | None = None
    num_prompts: int | None = None
    drops_last: bool = False

    @classmethod
    def from_length(
        cls, sizes: BatchSizes, *, max_steps: int | None = None, num_train_epochs: float | None = None,
        num_prompts: int | None = None, drops_last: bool = False,
    ) -> TrainingSchedule:  # fmt: skip
        """Build the schedule of `max_steps` optimizer steps, or else of `num_train_epochs` epochs over `num_prompts` prompts.

        Args:
            max_steps: Optimizer steps; takes precedence over `num_train_epochs`.
            num_train_epochs: Epochs; None is 1.
            num_prompts: Prompts of the data set. None, without `max_steps`: the schedule has no end.
            drops_last: See `TrainingSchedule`.
        """
        table = cls(sizes, max_steps, num_prompts, drops_last)
        if max_steps is not None or num_prompts is None:
            return table
        return replace(table, num_steps=table.steps_of_epochs(num_train_epochs if num_train_epochs is not None else 1))

    @property
    def prompts_per_epoch(self) -> int:
        """Prompts that an epoch samples, without those that dynamic sampling adds; 0 if the size of the data set is unknown."""
        multiple = self.sizes.num_rollout_prompts if self.drops_last else 1
        return (self.num_prompts or 0) // multiple * multiple

    @property
    def whole_epoch(self) -> tuple[int, int] | None:
        """(micro-steps, optimizer steps) of an epoch that ends with a complete rollout; None if rollouts continue across epochs."""
        if not self.drops_last or not (prompts := self.prompts_per_epoch):
            return None
        micro_steps = prompts // self.sizes.num_rollout_prompts * self.sizes.micro_steps_per_rollout * self.sizes.num_iterations
        return micro_steps, -(-micro_steps // self.sizes.gradient_accumulation_steps)

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the optimizer steps until the last prompt of `epochs` epochs has been trained `num_iterations` times.

        Args:
            epochs: Number of epochs; may be a fraction.
        """
        if self.whole_epoch:
            return math.ceil(epochs * self.whole_epoch[1])  # in floats, as transformers' Trainer rounds a part of an epoch
        prompts = math.ceil(Fraction(str(epochs)) * (self.num_prompts or 0))  # exact in decimals: 0.1 epochs of 30 prompts are 3, not 4
        rollout, row = divmod(prompts * self.sizes.num_generations - 1, self.sizes.generation_batch_size)
        return self._step_of_use(rollout, self.sizes.num_iterations - 1, row // self.sizes.completions_per_micro_step) + 1

    def ends_epoch(self, row: MicroStep) -> int | None:
        """Return the epoch, from 0, whose last completion is trained for the last time in a micro-step; None if no epoch ends in it."""
        completions = self.prompts_per_epoch * self.sizes.num_generations
        if not completions or row.pass_index + 1 < self.sizes.num_iterations:
            return None
        first_epoch, last_epoch = ((row.rollout * self.sizes.generation_batch_size + index) // completions for index in row.rows)
        return last_epoch - 1 if last_epoch > first_epoch else None

    def find_step(self, s: int) -> int:
        """Return the optimizer step of a micro-step.

        Args:
            s: Number of the micro-step in the run, from 0.
        """
        length, steps = self.whole_epoch or (s + 1, 0)
        return s // length * steps + s % length // self.sizes.gradient_accumulation_steps

    def find_first_micro_step(self, k: int) -> int:
        """Return the first micro-step of an optimizer step."""
        length, steps = self.whole_epoch or (0, k + 1)
        return k // steps * length + k % steps * self.sizes.gradient_accumulation_steps

    def micro_step(self, s: int) -> MicroStep:
        """Return a micro-step of the run, whether or not the run is that long.

        Args:
            s: Number of the micro-step in the run, from 0.
        """
        sizes = self.sizes
        w, mu = sizes.micro_steps_per_rollout, sizes.num_iterations
        step, rollout = self.find_step(s), s // (w * mu)
        pass_index, slice_index = divmod(s % (w * mu), w)
        oldest_version, on_policy_version = self.oldest_version(rollout), self.find_version(rollout)
        size = sizes.completions_per_micro_step
        return MicroStep(
            micro_step=s,
            optimizer_step=step,
            rollout=rollout,
            pass_index=pass_index,
            slice_index=slice_index,
            rows=(slice_index * size, (slice_index + 1) * size),
            sampled_by_version=oldest_version,
            on_policy_version=on_policy_version,
            staleness=step - oldest_version,
            old_logprobs=self._label(step, pass_index, oldest_version, on_policy_version),
        )

    def _label(self, step: int, pass_index: int, oldest_version: int, on_policy_version: int) -> Label:
        if self.sizes.old_logprobs == "rollout":
            return "on_policy" if step == oldest_version else "rollout"
        if step == on_policy_version:
            return "on_policy"
        return "recompute" if pass_index == 0 or self.sizes.old_logprobs == "always" else "cached"

    def oldest_version(self, rollout: int) -> int:
        """Return the oldest version that may sample a rollout: that of the sampling step `async_rollout_depth` before its own, or 0.

        Args:
            rollout: Number of the rollout, from 0.
        """
        version = self.find_version(rollout)
        for _ in range(self.sizes.async_rollout_depth):
            first = self.new_rollouts(version).start
            version = self.find_version(first - 1) if first else 0
        return version

    def find_version(self, rollout: int) -> int:
        """Return the number of optimizer steps done before a rollout arrives. It is trained from then on.

        Args:
            rollout: Number of the rollout, from 0.
        """
        return self.find_step(rollout * self.sizes.micro_steps_per_rollout * self.sizes.num_iterations)

    def _step_of_use(self, rollout: int, pass_index: int, slice_index: int) -> int:
        w, mu = self.sizes.micro_steps_per_rollout, self.sizes.num_iterations
        return self.find_step(rollout * w * mu + pass_index * w + slice_index)

    def new_rollouts(self, k: int) -> range:
        """Return the rollouts that arrive just before an optimizer step: those with their first micro-step in it."""
        length = self.sizes.micro_steps_per_rollout * self.sizes.num_iterations
        return range(-(-self.find_first_micro_step(k) // length), -(-self.find_first_micro_step(k + 1) // length))

    def needs_old_logprobs(self, rollout: int, slice_index: int) -> bool:
        """Return whether the old log-probs of a slice need a forward-only pass at the version at which its rollout arrives.

        They do if the first use of the slice is later than that version. They do not if the sampler's log-probs are used instead
        (`old_logprobs` "rollout"). With "always", a stale use in any pass suffices. A use beyond the end of the run counts: the run may be
        extended.

        Args:
            rollout: Number of the rollout.
            slice_index: Index of the slice in the rollout.
        """
        old_logprobs = self.sizes.old_logprobs
        decides = self.sizes.num_iterations - 1 if old_logprobs == "always" else 0
        return old_logprobs != "rollout" and self._step_of_use(rollout, decides, slice_index) > self.find_version(rollout)

    def step(self, k: int) -> ScheduledStep:
        """Return an optimizer step of the run."""
        sizes = self.sizes
        w, mu = sizes.micro_steps_per_rollout, sizes.num_iterations
        new, is_ahead = self.new_rollouts(k), sizes.async_rollout_depth > 0 and not sizes.partial_rollouts
        empty = range(new.stop, new.stop)
        micro_steps = tuple(self.micro_step(s) for s in range(self.find_first_micro_step(k), self.find_first_micro_step(k + 1)))
        trained = tuple(dict.fromkeys((m.rollout, m.slice_index) for m in micro_steps))
        old_logprob_slices = tuple((r, j) for r in new for j in range(w) if self.needs_old_logprobs(r, j))
        last_use = tuple((r, j) for r, j in trained if self._step_of_use(r, mu - 1, j) == k)
        keeps = tuple(
            (m.rollout, m.slice_index)
            for m in micro_steps
            if m.pass_index == 0
            and m.on_policy_version == k
            and sizes.old_logprobs == "auto"
            and (m.rollout, m.slice_index) not in last_use
        )
        return ScheduledStep(
            index=k,
            arriving=new if is_ahead and k else empty,
            immediate=empty if is_ahead and k else new,
            launches=self._following(new) if is_ahead and new else empty,
            ahead=self._ahead(new) if sizes.partial_rollouts and new else empty,
            evaluates=self._evaluates(k),
            micro_steps=micro_steps,
            old_logprob_slices=old_logprob_slices,
            keeps=keeps,
            last_use=last_use,
        )

    def _following(self, new: range) -> range:
        """Return the rollouts of the next sampling step; none if the run ends before it."""
        rollouts = self.new_rollouts(self.find_version(new.stop))
        return rollouts if self.num_steps is None or self.find_version(new.stop) < self.num_steps else range(new.stop, new.stop)

    def _ahead(self, new: range) -> range:
        """Return the rollouts of the next `async_rollout_depth` sampling steps, as far as the run reaches."""
        last = new
        for _ in range(self.sizes.async_rollout_depth):
            last = self._following(last)
        return range(new.stop, last.stop)

    def _evaluates(self, k: int) -> range:
        """Return the evaluations that run at step k, by the steps done.

        An evaluation needs the weights of its step in the sampler, so it waits while anything is being sampled. With partial rollouts
        in the trainer's ranks nothing is between two steps.
        """
        sizes = self.sizes
        new, is_ahead = self.new_rollouts(k), sizes.async_rollout_depth > 0 and (sizes.has_servers or not sizes.partial_rollouts)
        if new and is_ahead:
            return range(self.find_version(new.start - 1) + 1 if new.start else 0, k + 1)
        is_sampling = is_ahead and len(self._following(new)) > 0
        return range(k, k) if is_sampling else range(k, k + 1)

    def is_between_rollouts(self, k: int, num_rollouts: int) -> bool:
        """Return whether the first optimizer steps are exactly all passes over the first rollouts.

        Args:
            k: Number of optimizer steps.
            num_rollouts: Number of rollouts.
        """
        return self.find_first_micro_step(k) == num_rollouts * self.sizes.micro_steps_per_rollout * self.sizes.num_iterations

    def from_step(self, k: int, num_rollouts: int | None = None) -> Iterator[ScheduledStep]:
        """Yield optimizer steps k, k+1, ... to the end of the run, as a process that starts at step k executes them.

        Without a known end, the iterator is infinite. What an earlier process launched and never collected is sampled again when it is
        needed.

        Args:
            num_rollouts: Rollouts that have arrived by then. None: those that are trained before step k. More have arrived if a checkpoint
                waited for what was being sampled.
        """
        start, has_launched = num_rollouts or 0, False
        while self.num_steps is None or k < self.num_steps:
            step = self.step(k)
            if not has_launched:
                step = replace(step, arriving=step.arriving[:0], immediate=step.arriving or step.immediate)
            step = replace(
                step,
                arriving=_range_from(start, step.arriving),
                immediate=_range_from(start, step.immediate),
                ahead=_range_from(start, step.ahead),
            )
            has_launched = has_launched or len(step.launches) > 0
            yield step
            k += 1


def _range_from(first: int, rollouts: range) -> range:
    return range(max(first, rollouts.start), max(first, rollouts.stop))
