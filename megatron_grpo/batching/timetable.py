"""Timetable: which rows are trained when, by which version they were sampled, and where their old log-probs come from.

`plan` prints it and `train` obeys it: the same object. Each optimizer step is worked out on its own from the batch sizes
(docs/batching.md sections 2 and 3), so a run of a million steps costs no memory and resuming costs nothing.

A *micro-step* trains `micro_batch_size` completions on each DP rank. A *slice* is the part of a rollout that one micro-step trains.
With A micro-steps an optimizer step, W slices a rollout and mu passes: micro-step s belongs to optimizer step s // A and to rollout
s // (W * mu); rollout r is sampled by version (r * W * mu) // A. All integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    staleness: int  # optimizer steps between sampling and training; 0 is exactly on-policy
    old_logprobs: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step: what is sampled just before it, what it trains, and which log-probs must be made or kept.

    A slice is named (rollout, slice index).
    """

    index: int  # optimizer steps done before it; also the version of the weights that it starts from
    launches: range  # rollouts that begin to be sampled just before it
    arriving: range  # rollouts that an earlier step launched and that come in before this one
    immediate: range  # rollouts that come in before the very step that launches them
    num_prompts: int  # to draw for what is launched
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
        sampled_by = self.version_of(rollout)
        size = sizes.completions_per_micro_step
        return MicroStep(
            micro_step=s,
            optimizer_step=step,
            rollout=rollout,
            pass_index=pass_index,
            slice_index=slice_index,
            rows=(slice_index * size, (slice_index + 1) * size),
            sampled_by_version=sampled_by,
            staleness=step - sampled_by,
            old_logprobs=self._label(step - sampled_by, pass_index),
        )

    def _label(self, staleness: int, pass_index: int) -> Label:
        if staleness == 0:
            return "on_policy"
        if self.sizes.old_logprobs == "rollout":
            return "rollout"
        return "recompute" if pass_index == 0 else "cached"

    def version_of(self, rollout: int) -> int:
        """The number of optimizer steps done before a rollout is sampled."""
        sizes = self.sizes
        return rollout * sizes.micro_steps_per_rollout * sizes.num_iterations // sizes.gradient_accumulation_steps

    def _step_of_use(self, rollout: int, pass_index: int, slice_index: int) -> int:
        sizes = self.sizes
        w, mu = sizes.micro_steps_per_rollout, sizes.num_iterations
        return (rollout * w * mu + pass_index * w + slice_index) // sizes.gradient_accumulation_steps

    def new_rollouts(self, k: int) -> range:
        """The rollouts whose first micro-step falls inside optimizer step k: they are sampled just before it."""
        sizes = self.sizes
        a, length = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout * sizes.num_iterations
        return range(-(-k * a // length), -(-(k + 1) * a // length))

    def needs_anchor(self, rollout: int, slice_index: int) -> bool:
        """Its first use is stale, so only a forward-only pass at the version that sampled it can give its log-probs.

        Not where the sampler's own log-probs are taken instead. A use beyond the end of the run counts: that run may be made longer.
        """
        return self.sizes.old_logprobs != "rollout" and self._step_of_use(rollout, 0, slice_index) > self.version_of(rollout)

    def step(self, k: int) -> Step:
        """Optimizer step k, from 0."""
        sizes = self.sizes
        a, w, mu = sizes.gradient_accumulation_steps, sizes.micro_steps_per_rollout, sizes.num_iterations
        new = self.new_rollouts(k)
        micro_steps = tuple(self.micro_step(s) for s in range(k * a, (k + 1) * a))
        trained = tuple(dict.fromkeys((m.rollout, m.slice_index) for m in micro_steps))
        anchors = tuple((r, j) for r in new for j in range(w) if self.needs_anchor(r, j))
        last_use = tuple((r, j) for r, j in trained if self._step_of_use(r, mu - 1, j) == k)
        keeps = tuple(
            (m.rollout, m.slice_index)
            for m in micro_steps
            if m.pass_index == 0 and m.staleness == 0 and sizes.old_logprobs != "rollout" and (m.rollout, m.slice_index) not in last_use
        )
        return Step(
            index=k,
            launches=new,
            arriving=range(new.start, new.start),
            immediate=new,
            num_prompts=len(new) * sizes.num_rollout_prompts,
            micro_steps=micro_steps,
            anchors=anchors,
            keeps=keeps,
            last_use=last_use,
        )

    def is_between_rollouts(self, k: int, num_rollouts: int) -> bool:
        """Whether k optimizer steps are the whole of so many rollouts, all of their passes."""
        sizes = self.sizes
        return k * sizes.gradient_accumulation_steps == num_rollouts * sizes.micro_steps_per_rollout * sizes.num_iterations

    def from_step(self, k: int) -> Iterator[Step]:
        """Optimizer steps k, k+1, ... to the end of the run; without end where its length is not known."""
        while self.num_steps is None or k < self.num_steps:
            yield self.step(k)
            k += 1


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
