"""The training schedule against a naive walk that counts micro-steps and optimizer steps one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.commands.planning.summary import most_waiting_rows, old_logprobs_summary
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.parallel.layout import Layout


def make_sizes(accumulation: int, window: int, passes: int, *, unit: int = 2, dp: int = 1, old_logprobs: str = "auto") -> BatchSizes:
    """A micro-steps an optimizer step, W slices a rollout, mu passes; `unit` completions a micro-step on each of `dp` ranks."""
    return BatchSizes(
        layout=Layout(world_size=dp),
        micro_batch_size=unit,
        global_batch_size=accumulation * unit * dp,
        old_logprobs=old_logprobs,
        generation_batch_size=window * unit * dp,
        num_generations=2,
        num_iterations=passes,
    )


def make_schedule(size: tuple[int, int, int], num_steps: int | None = None, *, epoch: int = 0, **others) -> TrainingSchedule:
    """epoch: rollouts that the data set fills, with some prompts more, which are left out; 0: nothing is known of it."""
    sizes = make_sizes(*size, **others)
    num_prompts = epoch * sizes.num_rollout_prompts + sizes.num_rollout_prompts // 2
    return TrainingSchedule(sizes, num_steps, num_prompts, drops_last=True) if epoch else TrainingSchedule(sizes, num_steps)


class NaiveSchedule:
    """A naive simulation: sample when no samples are pending, train, and step every A micro-steps.

    With `epoch` rollouts per epoch, it also tracks where epochs end.
    """

    def __init__(self, accumulation: int, window: int, passes: int, num_rollouts: int, epoch: int = 0):
        self.rows, version, done = [], 0, 0
        self.sampled_at: dict[int, int] = {}
        for rollout in range(num_rollouts):
            self.sampled_at[rollout] = version
            for pass_index in range(passes):
                for slice_index in range(window):
                    self.rows.append((rollout, pass_index, slice_index, self.sampled_at[rollout], version))
                    done += 1
                    if done == accumulation:
                        version, done = version + 1, 0
            if epoch and done and (rollout + 1) % epoch == 0:
                version, done = version + 1, 0

    def straddling(self) -> list[int]:
        return sorted({r for r, _, _, sampled, trained in self.rows if sampled != trained})

    def forwards_needed(self, num_steps: int) -> set[tuple[int, int]]:
        """Slices, of rollouts sampled in so many steps, for which no training forward at the sampling version exists before they are
        trained by another version."""
        image_tokens, needed = set(), set()
        for r, _, j, sampled, trained in self.rows:
            if sampled >= num_steps:
                break
            if sampled == trained:
                image_tokens.add((r, j))
            elif (r, j) not in image_tokens:
                needed.add((r, j))
        return needed


@pytest.mark.parametrize(
    ("a", "w", "mu", "num_rollouts", "expected"),
    [
        (4, 4, 1, 4, []),
        (3, 2, 1, 6, [1, 4]),
        (4, 3, 1, 8, [1, 2, 5, 6]),
        (3, 4, 1, 6, [0, 1, 2, 3, 4, 5]),
        (4, 1, 2, 4, []),
        (4, 4, 2, 4, [0, 1, 2, 3]),
        (6, 4, 1, 6, [1, 4]),
    ],
)
def test_schedule_rollouts_that_straddle_steps_equal_published_example(a, w, mu, num_rollouts, expected):
    table = TrainingSchedule(make_sizes(a, w, mu))
    rows = [table.micro_step(s) for s in range(num_rollouts * w * mu)]
    assert sorted({row.rollout for row in rows if row.staleness}) == expected == NaiveSchedule(a, w, mu, num_rollouts).straddling()


def test_schedule_needs_2_forward_only_passes_instead_of_12_or_4():
    a, w, mu, num_rollouts = 3, 2, 1, 6
    table = TrainingSchedule(make_sizes(a, w, mu))
    static = num_rollouts * w if a % (w * mu) else 0
    rows = [table.micro_step(s) for s in range(num_rollouts * w * mu)]
    per_rollout = len({row.rollout for row in rows if row.staleness}) * w
    ours = sum(row.old_logprobs == "recompute" for row in rows)
    assert (static, per_rollout, ours) == (12, 4, 2)


def test_schedule_worked_example_recomputes_two_stale_slices():
    table = TrainingSchedule(make_sizes(4, 3, 1))
    first = table.step(0)
    assert first.immediate == range(0, 2) and not first.arriving and not first.launches
    assert first.old_logprob_slices == ((1, 1), (1, 2))
    assert [(m.rollout, m.slice_index, m.staleness) for m in table.step(1).micro_steps][:2] == [(1, 1, 1), (1, 2, 1)]


sizes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
epochs = st.integers(0, 5)


@settings(max_examples=400)
@given(sizes, st.integers(1, 12), epochs)
def test_schedule_micro_steps_equal_naive_walk(size, num_rollouts, epoch):
    table, walk = make_schedule(size, epoch=epoch), NaiveSchedule(*size, num_rollouts, epoch)
    for s, (rollout, pass_index, slice_index, sampled, trained) in enumerate(walk.rows):
        row = table.micro_step(s)
        assert (row.rollout, row.pass_index, row.slice_index) == (rollout, pass_index, slice_index)
        assert (row.sampled_by_version, row.optimizer_step, row.staleness) == (sampled, trained, trained - sampled)
        assert row.rows == (slice_index * 2, slice_index * 2 + 2)
        assert table.find_first_micro_step(trained) <= s < table.find_first_micro_step(trained + 1)


@settings(max_examples=300)
@given(sizes, st.integers(1, 12), epochs)
def test_schedule_forward_only_passes_equal_those_of_naive_walk(size, num_steps, epoch):
    a, w, mu = size
    table = make_schedule(size, num_steps, epoch=epoch)
    walk = NaiveSchedule(a, w, mu, num_steps * a // (w * mu) + 2, epoch)
    old_logprob_slices = [anchor for step in table.from_step(0) for anchor in step.old_logprob_slices]
    assert len(old_logprob_slices) == len(set(old_logprob_slices))
    assert set(old_logprob_slices) == walk.forwards_needed(num_steps)
    num_rollouts = max(len(walk.sampled_at) - 1, 1)
    summary = old_logprobs_summary(table, num_rollouts)
    every = walk.forwards_needed(num_steps + len(walk.rows))
    assert summary["slices_recomputed"] == len([one for one in every if one[0] < num_rollouts])
    assert [r for r, is_stale in enumerate(summary["rollouts"]) if is_stale] == [r for r in walk.straddling() if r < num_rollouts]


@settings(max_examples=200)
@given(sizes, st.integers(1, 12), epochs)
def test_schedule_with_old_logprobs_always_recomputes_every_stale_slice_and_keeps_none(size, num_rollouts, epoch):
    timed, walk = make_schedule(size, epoch=epoch, old_logprobs="always"), NaiveSchedule(*size, num_rollouts, epoch)
    steps = list(replace(timed, num_steps=walk.rows[-1][-1] + 1).from_step(0))
    stale = {(r, j) for r, _, j, sampled, trained in walk.rows if sampled != trained}
    assert {anchor for step in steps for anchor in step.old_logprob_slices if anchor[0] < num_rollouts} == stale
    assert not any(step.keeps for step in steps)
    assert all(m.old_logprobs == ("recompute" if m.staleness else "on_policy") for step in steps for m in step.micro_steps)
    assert old_logprobs_summary(timed, num_rollouts)["slices_recomputed"] == len(stale)


@settings(max_examples=200)
@given(sizes)
def test_schedule_maximum_of_pending_rows_equals_naive_walk(size):
    a, w, mu = size
    waiting, found = set(), 0
    for step in TrainingSchedule(make_sizes(a, w, mu), w * mu).from_step(0):
        waiting |= {(r, j) for r in (*step.arriving, *step.immediate) for j in range(w)}
        waiting -= set(step.last_use)
        found = max(found, len(waiting))
    assert most_waiting_rows(make_sizes(a, w, mu)) == 2 * found


@settings(max_examples=300)
@given(sizes, st.integers(1, 10), epochs)
def test_schedule_last_step_equals_same_step_of_longer_run(size, num_steps, epoch):
    shorter, longer = (make_schedule(size, num_steps + more, epoch=epoch) for more in (0, 3))
    for one, other in zip(shorter.from_step(0), longer.from_step(0)):
        assert one == other


@settings(max_examples=300)
@given(sizes, st.integers(1, 10), st.sampled_from(["auto", "rollout"]), epochs)
def test_schedule_provides_every_old_logprob_and_drops_it_after_last_use(size, num_steps, old_logprobs, epoch):
    """Executes the steps: samples, anchors, keeps, frees; a stale row without stored log-probs fails the walk."""
    a, w, mu = size
    table = make_schedule(size, num_steps, epoch=epoch, old_logprobs=old_logprobs)
    pending: dict[tuple[int, int], int] = {}  # slice -> version that sampled it
    stored: dict[tuple[int, int], int] = {}  # slice -> version of its log-probs
    walk = NaiveSchedule(
        a, w, mu, num_steps * a // (w * mu) + 2, epoch
    )  # to the last use of every rollout that the run samples, and beyond
    uses = [(r, j, trained) for r, _, j, _, trained in walk.rows]
    sampled_rollouts = 0
    for step in table.from_step(0):
        assert step.immediate.start == sampled_rollouts and not step.arriving and not step.launches
        assert list(step.evaluates) == [step.index]
        sampled_rollouts = step.immediate.stop
        pending |= {(r, j): step.index for r in step.immediate for j in range(w)}
        for anchor in step.old_logprob_slices:
            assert pending[anchor] == step.index, "a forward-only pass runs at the version that sampled its rollout"
            stored[anchor] = step.index
        assert set(step.keeps) <= {(m.rollout, m.slice_index) for m in step.micro_steps if m.staleness == 0}
        for m in step.micro_steps:
            key = (m.rollout, m.slice_index)
            assert pending[key] == m.sampled_by_version
            if m.staleness == 0:
                assert m.old_logprobs == "on_policy" and m.sampled_by_version == step.index
            elif old_logprobs == "rollout":
                assert m.old_logprobs == "rollout" and key not in stored
            else:
                assert stored[key] == m.sampled_by_version
                assert m.old_logprobs == ("recompute" if m.pass_index == 0 else "cached")
        stored |= {key: step.index for key in step.keeps}
        for key in step.last_use:
            assert not any((r, j) == key and k > step.index for r, j, k in uses)
            del pending[key]
            stored.pop(key, None)
        later = {(r, j) for r, j, k in uses if k > step.index}
        assert set(stored) <= later, "log-probs are kept for later uses alone, be they in a run made longer"
    assert sampled_rollouts <= -(-num_steps * a // (w * mu)), "nothing is sampled that the run does not reach"


@settings(max_examples=200)
@given(sizes, st.integers(0, 40), st.sampled_from(["auto", "always", "rollout"]), epochs)
def test_schedule_one_rollout_ahead_changes_only_the_sampling_version(size, s, old_logprobs, epoch):
    """Where old log-probs come from stays, unless they are the sampler's own: then a row is fresh only to who sampled it."""
    once = make_schedule(size, epoch=epoch, old_logprobs=old_logprobs)
    ahead = replace(once, sizes=replace(once.sizes, async_rollout_depth=1))
    one, row = once.micro_step(s), ahead.micro_step(s)
    before = [step for step in sorted({once.find_version(r) for r in range(row.rollout + 1)}) if step < one.sampled_by_version]
    by = before[-1] if before else 0
    label = one.old_logprobs if old_logprobs != "rollout" else "on_policy" if by == row.optimizer_step else "rollout"
    assert row == replace(one, sampled_by_version=by, staleness=row.optimizer_step - by, old_logprobs=label)
    step, other = once.step(row.optimizer_step), ahead.step(row.optimizer_step)
    assert (other.old_logprob_slices, other.keeps, other.last_use) == (step.old_logprob_slices, step.keeps, step.last_use)
    assert list(other.arriving) + list(other.immediate) == list(step.immediate)


@given(sizes, st.integers(1, 30), epochs)
def test_schedule_step_is_between_rollouts_if_next_step_starts_a_rollout(size, steps, epoch):
    table = make_schedule(size, epoch=epoch)
    row = table.micro_step(table.find_first_micro_step(steps))
    begins = (row.pass_index, row.slice_index) == (0, 0)
    assert [n for n in range(300) if table.is_between_rollouts(steps, n)] == ([row.rollout] if begins and row.rollout < 300 else [])


def test_schedule_late_step_takes_no_longer_than_first():
    table = TrainingSchedule(make_sizes(3, 2, 1))
    far = next(table.from_step(10**9))
    assert far.index == 10**9 and [s.index for s in islice(table.from_step(10**9 + 1), 2)] == [10**9 + 1, 10**9 + 2]


@settings(max_examples=200)
@given(sizes, st.integers(1, 40))
def test_schedule_epoch_ends_with_last_training_of_its_last_prompt(size, num_prompts):
    a, w, mu = size
    sizes = make_sizes(a, w, mu)
    walk = NaiveSchedule(a, w, mu, num_prompts // sizes.num_rollout_prompts + 2)
    last = max(
        s
        for s, (r, i, j, *_) in enumerate(walk.rows)
        for row in (2 * j, 2 * j + 1)
        if r * sizes.num_rollout_prompts + row // 2 < num_prompts
    )
    table = TrainingSchedule(sizes, num_prompts=num_prompts)
    assert table.steps_of_epochs(1) == last // a + 1
    assert [s for s in range(last + 1) if table.ends_epoch(table.micro_step(s)) == 0] == [last]


def test_schedule_fraction_of_prompts_is_rounded_exactly():
    assert TrainingSchedule.from_length(make_sizes(1, 1, 1), num_prompts=30, num_train_epochs=0.1).num_steps == 3
    assert TrainingSchedule.from_length(make_sizes(1, 1, 1), num_prompts=30, max_steps=7).num_steps == 7
    assert TrainingSchedule.from_length(make_sizes(1, 1, 1)).num_steps is None
