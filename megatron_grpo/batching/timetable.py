"""Timetable: which rows are trained when, by which version they were sampled, and where their old log-probs come from.

`plan` prints it and `train` obeys it: the same object. Each optimizer step is worked out on its own from the batch sizes
(docs/batching.md sections 2 and 3), so a run of a million steps costs no memory and resuming costs nothing.

A *micro-step* trains `micro_batch_size` completions on each DP rank. A *slice* is the part of a rollout that one micro-step trains.
With A micro-steps an optimizer step, W slices a rollout and mu passes: micro-step s belongs to optimizer step s // A and to rollout
s // (W * mu); rollout r comes in before optimizer step (r * W * mu) // A, which is a *sampling step*. All integer arithmetic.

A rollout is sampled by the version that is there when it begins. That is the sampling step itself; or, if sampling runs one rollout ahead,
the sampling step before it, so that it is sampled while the steps between the two are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_grpo.sizing.batch_sizes import BatchSizes

Label = Literal["on_policy", "recompute", "cached", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One forward and backward on every DP rank. `rows`: (first, last_exclusive) inside the rollout, over all DP ranks."""

    micro_step: int
    optimizer_step: int
    rollout: int
    pass_index: int
    slice_index: int
    rows: tuple[int, int]
    sampled_by_version: int
    fresh_at: int  # the version at which its rollout comes in: old log-probs are those of this version
    staleness: int  # optimizer steps between sampling and training; 0 is exactly on-policy
    old_logprobs: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: what is sampled just before it, what it trains, and which log-probs must be made or kept.

    A slice is named (rollout, slice index).
    """

    index: int  # optimizer steps done before it; also the version of the weights that it starts from
    arriving: range  # rollouts that an earlier step launched: they come in before this one
    immediate: range  # rollouts that are sampled just before it, while training waits
    launches: range  # rollouts that begin to be sampled just before it, and come in before a later one
    evaluates: range  # evaluations that fall on it, by the steps done: those too that waited until nothing was being sampled
    micro_steps: tuple[MicroStep, ...]
    anchors: tuple[tuple[int, int], ...]  # forward-only pass before this step, at its version: slices whose first use will be stale
    keeps: tuple[tuple[int, int], ...]  # log-probs of this step's training forward are kept: stale uses follow
    last_use: tuple[tuple[int, int], ...]  # not needed after this step


@dataclass(frozen=True, slots=True)
class Timetable:
    """The run as rows. `num_steps` is its length in optimizer steps, None where it is not known (or not limited)."""

    sizes: BatchSizes
    num_steps: int | None = None

    @classmethod
    def of_length(
        cls, sizes: BatchSizes, *, max_steps: int | None = None, num_train_epochs: float | None = None, num_prompts: int | None = None
    ) -> Timetable:
        """The timetable of a run: `max_steps` optimizer steps, or else so many passes (default 1) over `num_prompts` prompts.

        Epochs are rounded up to whole optimizer steps: the run ends with the step in which the last of those prompts has been trained
        `num_iterations` times.
        """
        if max_steps is not None:
            return cls(sizes, max_steps)
        if num_prompts is None:
            return cls(sizes)
        return cls(sizes, steps_for_prompts(sizes, epochs_of_prompts(num_train_epochs if num_train_epochs is not None else 1, num_prompts)))

    def micro_step(self, s: int) -> MicroStep:
        """Micro-step s of the run, from 0, whether or not the run is that long."""
        sizes = self.sizes
        a, w, mu = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
        step, rollout = s // a, s // (w * mu)
        pass_index, slice_index = divmod(s % (w * mu), w)
        sampled_by, fresh_at = self.sampled_by(rollout), self.version_of(rollout)
        size = sizes.completions_per_micro_step
        return MicroStep(
            micro_step=s,
            optimizer_step=step,
            rollout=rollout,
            pass_index=pass_index,
            slice_index=slice_index,
            rows=(slice_index * size, (slice_index + 1) * size),
            sampled_by_version=sampled_by,
            fresh_at=fresh_at,
            staleness=step - sampled_by,
            old_logprobs=self._label(step, rollout, pass_index),
        )

    def _label(self, step: int, rollout: int, pass_index: int) -> Label:
        if self.sizes.old_logprobs == "rollout":
            return "on_policy" if step == self.sampled_by(rollout) else "rollout"
        if step == self.version_of(rollout):
            return "on_policy"
        return "recompute" if pass_index == 0 or self.sizes.old_logprobs == "always" else "cached"

    def sampled_by(self, rollout: int) -> int:
        """The version that samples it: that of its own sampling step, or of the one before where sampling runs ahead."""
        if not self.sizes.async_rollout_depth:
            return self.version_of(rollout)
        first = self.new_rollouts(self.version_of(rollout)).start
        return self.version_of(first - 1) if first else 0

    def version_of(self, rollout: int) -> int:
        """The number of optimizer steps done before a rollout comes in, to be trained from then on."""
        sizes = self.sizes
        return rollout * sizes.micro_steps_per_rollout * sizes.num_iterations // sizes.gradient_accumulation_steps

    def _step_of_use(self, rollout: int, pass_index: int, slice_index: int) -> int:
        sizes = self.sizes
        w, mu = sizes.micro_steps_per_rollout, sizes.num_iterations
        return (rollout * w * mu + pass_index * w + slice_index) // sizes.gradient_accumulation_steps

    def new_rollouts(self, k: int) -> range:
        """The rollouts whose first micro-step falls inside optimizer step k: they come in just before it."""
        sizes = self.sizes
        a, length = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout * sizes.num_iterations
        return range(-(-k * a // length), -(-(k + 1) * a // length))

    def needs_anchor(self, rollout: int, slice_index: int) -> bool:
        """Its first use is later than its coming in, so only a forward-only pass at that version can give its log-probs.

        Not where the sampler's own log-probs are taken instead; where old log-probs are always made so, any stale use will do. A use
        beyond the end of the run counts: that run may be made longer.
        """
        old_logprobs = self.sizes.old_logprobs
        decides = self.sizes.num_iterations - 1 if old_logprobs == "always" else 0
        return old_logprobs != "rollout" and self._step_of_use(rollout, decides, slice_index) > self.version_of(rollout)

    def step(self, k: int) -> Step:
        """Optimizer step k, from 0."""
        sizes = self.sizes
        a, w, mu = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
        new, is_ahead = self.new_rollouts(k), sizes.async_rollout_depth > 0
        none = range(new.stop, new.stop)
        micro_steps = tuple(self.micro_step(s) for s in range(k * a, (k + 1) * a))
        trained = tuple(dict.fromkeys((m.rollout, m.slice_index) for m in micro_steps))
        anchors = tuple((r, j) for r in new for j in range(w) if self.needs_anchor(r, j))
        last_use = tuple((r, j) for r, j in trained if self._step_of_use(r, mu - 1, j) == k)
        keeps = tuple(
            (m.rollout, m.slice_index)
            for m in micro_steps
            if m.pass_index == 0 and m.fresh_at == k and sizes.old_logprobs == "auto" and (m.rollout, m.slice_index) not in last_use
        )
        return Step(
            index=k,
            arriving=new if is_ahead and k else none,
            immediate=none if is_ahead and k else new,
            launches=self._following(new) if is_ahead and new else none,
            evaluates=self._evaluates(k),
            micro_steps=micro_steps,
            anchors=anchors,
            keeps=keeps,
            last_use=last_use,
        )

    def _following(self, new: range) -> range:
        """The rollouts of the next sampling step; none if the run ends before it."""
        found = self.new_rollouts(self.version_of(new.stop))
        return found if self.num_steps is None or self.version_of(new.stop) < self.num_steps else range(new.stop, new.stop)

    def _evaluates(self, k: int) -> range:
        """An evaluation needs the weights of its own step in the sampler: it waits while anything is being sampled."""
        new = self.new_rollouts(k)
        if new and self.sizes.async_rollout_depth:
            return range(self.version_of(new.start - 1) + 1 if new.start else 0, k + 1)
        is_sampling = self.sizes.async_rollout_depth and len(self._following(new)) > 0
        return range(k, k) if is_sampling else range(k, k + 1)

    def is_between_rollouts(self, k: int, num_rollouts: int) -> bool:
        """Whether k optimizer steps are the whole of so many rollouts, all of their passes."""
        sizes = self.sizes
        return k * sizes.gradient_accumulation_steps == num_rollouts * sizes.micro_steps_per_rollout * sizes.num_iterations

    def from_step(self, k: int, num_rollouts: int | None = None) -> Iterator[Step]:
        """Optimizer steps k, k+1, ... to the end of the run, as a process that begins there takes them; without end if that is not known.

        num_rollouts: that have come in by then. None: those that are trained before step k. More came in if a save waited for what was
        being sampled. What somebody else launched and never collected is sampled anew when it is needed.
        """
        there, has_launched = num_rollouts or 0, False
        while self.num_steps is None or k < self.num_steps:
            step = self.step(k)
            if not has_launched:
                step = replace(step, arriving=step.arriving[:0], immediate=step.arriving or step.immediate)
            step = replace(step, arriving=_from(there, step.arriving), immediate=_from(there, step.immediate))
            has_launched = has_launched or len(step.launches) > 0
            yield step
            k += 1


def _from(first: int, rollouts: range) -> range:
    return range(max(first, rollouts.start), max(first, rollouts.stop))


def epochs_of_prompts(num_train_epochs: float, num_prompts: int) -> int:
    """Prompts in so many epochs, rounded up. Exact in decimals: 0.1 epochs of 30 prompts are 3, not 4."""
    from fractions import Fraction

    prompts = Fraction(str(num_train_epochs)) * num_prompts
    return -(-prompts.numerator // prompts.denominator)


def steps_for_prompts(sizes: BatchSizes, num_prompts: int) -> int:
    """Optimizer steps until each of the first `num_prompts` prompts of the run has been trained `num_iterations` times."""
    a, w, mu = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
    full, rest = divmod(num_prompts, sizes.num_rollout_prompts)
    micro_steps = full * w * mu
    if rest:
        micro_steps += (mu - 1) * w + -(-rest * sizes.num_generations // sizes.completions_per_micro_step)
    return -(-micro_steps // a)
