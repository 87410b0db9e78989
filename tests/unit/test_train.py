"""The training loop with a policy whose weights are one number: samplers, old log-probs and training of each row, with saves and kills.

The reference loop counts micro-steps one by one and requests every prompt when its answer is needed. Only the policy, the weight sync and
the disk are replaced.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import NoRolloutServerError, RunError, RunInterruptedError, WeightsNotFiniteError
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.batching.split import BatchPartitioner
from megatron_grpo.core.grpo.advantages import advantages
from megatron_grpo.core.grpo.loss import token_weights
from megatron_grpo.core.metadata import GroupMetadata, Progress
from megatron_grpo.core.policy.gradient_check import BadMicroBatch, SkipCounter, SkippedStep
from megatron_grpo.core.rollout.engine import SamplingSettings, make_completion
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.train import Run, sync_stop_flags, train
from megatron_grpo.core.trainer.generation import RolloutGenerator
from megatron_grpo.core.trainer.rollouts import Rollouts, dynamic_sampling
from megatron_grpo.core.types import ScoredGroup
from megatron_grpo.core.weights.buckets import WeightUpdate
from megatron_grpo.run.evaluate import EvaluationSpec, Evaluator
from tests.scripted_engine import ScriptedEngine
from tests.unit.batching.test_schedule import NaiveSchedule, make_schedule
from tests.unit.trainer.test_rollouts import NumberedPrompts, SingleRankState

SAMPLING = SamplingSettings(n=2, max_completion_length=2)


def compute_logprob(version: int, refused: Collection[int] = ()) -> float:
    """Of every token, by the weights of a version, which steps that were refused have not moved; the sampler's differ by 0.5."""
    return -1.0 - (version - sum(step < version for step in refused)) / 64


def answer(prompt, place, version, refused=()):
    logprobs = [compute_logprob(version, refused) - 0.5] * 2
    return make_completion(prompt.token_ids, (10 + place, 20 + version), logprobs, text="", finish_reason="stop", version=version)


def reward(number: int, place: int, version: int) -> float:
    """Of three prompts one teaches nothing; which one it is differs by version."""
    return float(place) if (number + version) % 3 else 1.0


class ConstantRewards:
    names, reward_weights, most_failed_episodes = ["r"], [1.0], 1.0

    def __call__(self, groups, *, positions):
        return [
            ScoredGroup(group=g, rewards=tuple((reward(g.prompt.number, i, g.version),) for i in range(len(g.completions)))) for g in groups
        ]

    def warn_of_sameness(self, rows):
        pass


class Killed(Exception):
    pass


@dataclass
class CountingPolicy:
    """A policy whose weights are the number of applied optimizer steps. refuses: steps that the gradient check skips."""

    cut: BatchPartitioner
    version: int = 0
    ends: dict[int, str] = field(default_factory=dict)  # step -> how the process ends in it
    refuses: Collection[int] = ()
    weights: int = 0
    skips: SkipCounter = SkipCounter()
    has_trained: bool = False  # since somebody asked whether the run is to stop
    trained: dict[int, dict] = field(default_factory=dict)

    loss = SimpleNamespace(
        zero_gradient=frozenset(),
        token_weights=lambda num_masked, **flags: token_weights(num_masked, loss_type="dapo", max_completion_length=2, **flags),
    )

    parallel = SingleRankState()

    @property
    def scorer(self):
        return self

    def on_device(self, part):
        return nullcontext()

    def logprobs(self, micro_batches):
        return [np.full(len(micro.targets), compute_logprob(self.weights), dtype=np.float32) for micro in micro_batches]

    def old_logprobs(self, micro_batches):
        return self.logprobs(micro_batches), None

    def train_step(self, batch, beside=None):
        assert batch.step == self.version
        if self.ends.get(batch.step) == "kill":
            raise Killed
        found = {}
        for micro in batch.micro_batches:
            for place, row in enumerate(micro.rows):
                [at, _] = np.flatnonzero(micro.sequence == place)
                old = float(micro.old_logprobs[at])
                values = (int(micro.targets[at + 1]) - 20, round(float(micro.sampler_logprobs[at]) + 0.5, 6))
                found.setdefault(row, []).append(
                    (*values, None if math.isnan(old) else round(old, 6), float(micro.token_weights[at]), float(micro.advantages[at]))
                )
        self.trained[batch.step] = found
        self.version += 1
        self.has_trained = True
        refused = batch.step in self.refuses
        self.skips = self.skips.after(is_skipped=refused)
        if refused:
            skipped_step = SkippedStep(why="this is a test", skips=self.skips, bad_micro_batches=(find_bad_micro_batch(batch),))
            return SimpleNamespace(metrics={}, logprobs={}, skipped=skipped_step.why, skipped_step=skipped_step)
        logprobs = {row: np.full(2, compute_logprob(self.weights)) for micro in batch.micro_batches for row in micro.rows}
        self.weights += 1
        return SimpleNamespace(metrics={}, logprobs=logprobs, skipped=None, skipped_step=None)


def find_bad_micro_batch(batch) -> BadMicroBatch:
    return BadMicroBatch(micro_batch=0, ranks=(0,), norm=math.inf, rows=batch.micro_batches[0].rows)


class VersionSync:
    def __init__(self, engine):
        self.engine = engine

    def sync_weights(self, version):
        if self.engine.version != version:
            self.engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=()))


class RecordingLogger:
    def __init__(self):
        self.timers, self.evaluated, self.batches, self.refused = Timers(), {}, [], {}

    def start(self, progress):
        pass

    rollout = start

    def step(self, progress, batch, metrics, *, skipped):
        self.batches.append(batch)

    def skipped_step(self, progress, record, lines):
        self.refused[progress.step] = record, lines

    def evaluation(self, progress, evaluated):
        [found] = evaluated
        self.evaluated[progress.step] = found.others["r"]


@dataclass
class MemoryDisk:
    """The last checkpoint: progress, prompts and serialized samples."""

    every: int
    saved: tuple | None = None
    stuck: int = -1  # what is launched at this step does not end before `opened`
    opened: threading.Event | None = None
    resume = SimpleNamespace(output_dir=Path("out"))
    is_time = staticmethod(lambda: False)
    good: int = 0

    def record(self, step, buffer):
        pass

    def has_trained(self, version, step):
        self.good = version

    def last_good(self, step):
        return Path(f"checkpoint {self.good}") if self.good else None

    def are_due(self, step):
        is_due = self.every > 0 and step % self.every == 0
        if is_due and step > self.stuck:  # no signal has come: then a save waits as long as it takes
            self.opened.set()
        return is_due

    def save(self, progress, buffer, policy, prompts):
        self.saved = (progress, buffer.to_save(), (policy.version, policy.weights, policy.skips), prompts.state())

    def advance(self):
        pass

    finish = advance

    def restore(self, policy, prompts, nothing):
        if self.saved is None:
            return Progress(), nothing
        progress, samples, (policy.version, policy.weights, policy.skips), state = self.saved
        prompts.restore(state)
        return progress, nothing.restored(samples)


@dataclass(frozen=True)
class Case:
    """ends: step -> "stop" (a signal while it trains), "drop" (the same, and what is under way takes too long), "rest" (a signal while it
    samples, which ends in time), "give up" (the same, too late) or "kill"."""

    sizes: tuple[int, int, int]
    num_steps: int
    depth: int = 1
    old_logprobs: str = "auto"
    dynamic: bool = False
    ratio: float = 1.0
    eval_every: int = 0
    save_every: int = 0
    ends: tuple[tuple[int, str], ...] = ()
    refused: frozenset[int] = frozenset()
    max_skipped_steps: int = 99
    epoch: int = 0  # rollouts of an epoch, with whose last one an optimizer step ends

    @property
    def table(self) -> TrainingSchedule:
        table = make_schedule(self.sizes, self.num_steps, epoch=self.epoch, old_logprobs=self.old_logprobs)
        return replace(table, sizes=replace(table.sizes, async_rollout_depth=self.depth))

    @property
    def grpo(self) -> GrpoConfig:
        return GrpoConfig(dynamic_sample=self.dynamic, oversample_ratio=self.ratio)

    @property
    def comes_in(self) -> dict[int, list[int]]:
        """Sampling step -> rollouts."""
        found: dict[int, list[int]] = {}
        a, w, mu = self.sizes
        for rollout, step in NaiveSchedule(a, w, mu, self.num_steps * a // (w * mu) + 2, self.epoch).sampled_at.items():
            if step < self.num_steps:
                found.setdefault(step, []).append(rollout)
        return found


def run_to_its_end(case: Case) -> tuple[dict, dict, list]:
    """({step: rows as they were trained}, {step: score of its evaluation}, batches), over all processes that it took."""
    disk, ends = MemoryDisk(every=case.save_every), dict(case.ends)
    trained, evaluated, batches = {}, {}, []
    for _ in range(len(ends) + 1):
        last, how = min(ends.items(), default=(case.num_steps, ""))
        policy, logger = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2), ends=ends, refuses=case.refused), RecordingLogger()
        try:
            train(make_run(case, policy, logger, disk, is_dropped_at=last if how == "drop" else None,
                         is_given_up_at=last if how == "give up" and last in case.comes_in else None))  # fmt: skip
        except (RunInterruptedError, Killed):
            del ends[last]
        disk.opened.set()
        for step, rows in policy.trained.items():
            assert trained.setdefault(step, rows) == rows, f"step {step} was trained again, on something else"
        evaluated |= logger.evaluated
        batches += logger.batches
    assert disk.saved[0].step == case.num_steps and not ends
    assert disk.saved[0].num_prompts == disk.saved[3]["taken"], "where it is in the stream is what its rollouts have used"
    return trained, evaluated, batches


@dataclass
class ScriptedStop:
    policy: CountingPolicy
    logger: RecordingLogger

    def is_requested(self, all_reduce_max) -> bool:
        has_trained, self.policy.has_trained = self.policy.has_trained, False
        return self.policy.ends.get(self.policy.version - has_trained) in (("stop", "drop") * has_trained + ("rest", "give up"))

    def should_cancel(self) -> bool:
        is_sampling = len(self.logger.batches) == len(self.policy.trained)  # and not saving the step before
        return is_sampling and self.policy.ends.get(self.policy.version) == "give up"

    def why(self, all_gather) -> str:
        return "SIGTERM"


def make_run(
    case: Case,
    policy: CountingPolicy,
    logger: RecordingLogger,
    disk: MemoryDisk,
    *,
    is_dropped_at: int | None,
    is_given_up_at: int | None = None,
) -> Run:
    """A process. is_dropped_at, is_given_up_at: the step whose signal finds something under way that does not end by itself."""
    launched_before = is_given_up_at if is_dropped_at is None else is_dropped_at + 1
    stuck = max((step for step in case.comes_in if launched_before is not None and step < launched_before), default=-1)

    def slow(prompt, place, version):
        if version == stuck and threading.current_thread() is not threading.main_thread():
            disk.opened.wait()
        return answer(prompt, place, version, case.refused)

    disk.stuck, disk.opened = stuck, threading.Event()
    engine, stream, stop = ScriptedEngine(slow), NumberedPrompts(), ScriptedStop(policy, logger)
    engine.should_cancel = stop.should_cancel
    generator = RolloutGenerator(
        engine, ConstantRewards(), sampling=SAMPLING, seed=0, timers=logger.timers, sync_again=lambda: pytest.fail("pushed again")
    )
    return Run(
        schedule=case.table, parallel=SingleRankState(), policy=policy, engine=engine, weight_sync=VersionSync(engine), prompts=stream,
        rollouts=Rollouts(generator, stream, cfg=case.grpo, schedule=case.table, policy=policy, logger=logger),
        checkpoints=disk, logger=logger, stop_drain_seconds=600.0 if is_dropped_at is None else 0.0,
        max_skipped_steps=case.max_skipped_steps, stop=stop, step_callback=lambda step, buffer: nullcontext(),
        evaluator=Evaluator(EvaluationSpec(sets={"eval": NumberedPrompts().take(3)} if case.eval_every else {},
                                           sampling=SAMPLING.greedy(), score="r"), engine, ConstantRewards(),
                            eval_steps=case.eval_every, last_step=case.num_steps),
    )  # fmt: skip


def run_naively(case: Case) -> dict:
    """{step: {row: [(version by its tokens, by its log-probs, old log-prob, token weight, advantage) for each time it is trained]}}."""
    a, w, mu = case.sizes
    stream, engine, rows, fresh, by = NumberedPrompts(), ScriptedEngine(partial(answer, refused=case.refused)), {}, {}, {}

    def ask(prompts):
        return [GroupMetadata.from_group(one) for one in ConstantRewards()(engine.generate(prompts, SAMPLING, seed=0), positions=[])]

    def are_zero_std(verdicts):  # one by one; the run itself asks for all of a round at once
        return [bool(advantages([verdict.rewards], case.grpo, [1.0]).is_zero_std[0]) for verdict in verdicts]

    before = 0
    for step, numbers in case.comes_in.items():
        version, before = before if case.depth and not is_sampled_anew(case, before, step) else step, step
        engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=()))
        for number in numbers:
            found = dynamic_sampling(stream.take, stream.give_back, ask, are_zero_std, num_groups=w, oversample_ratio=case.ratio,
                            dynamic_sample=case.dynamic)  # fmt: skip
            worth = advantages([verdict.rewards for verdict in found.kept], case.grpo, [1.0]).advantages
            rows |= {(number, 2 * place + i): worth[place, i] for place in range(w) for i in range(2)}
            fresh[number], by[number] = step, version
    trained: dict[int, dict] = {}
    walk = NaiveSchedule(a, w, mu, case.num_steps * a // (w * mu) + 2, case.epoch).rows
    for number, _, j, _, step in walk:
        if step >= case.num_steps:
            break
        of_sampler = case.old_logprobs == "rollout"
        anchor = by[number] if of_sampler else fresh[number]
        old = None if step == anchor else round(compute_logprob(anchor, case.refused) - 0.5 * of_sampler, 6)
        for row in (2 * j, 2 * j + 1):
            weight = 1 / (4 * sum(row[-1] == step for row in walk))  # two tokens of two rows a micro-step, of those that it has
            values = (by[number], compute_logprob(by[number], case.refused), old, weight, float(np.float32(rows[number, row])))
            trained.setdefault(step, {}).setdefault((number, row), []).append(values)
    return trained


def is_sampled_anew(case: Case, before: int, step: int) -> bool:
    """What was launched at one sampling step is not there at the next: it was dropped, and neither a save nor a signal had come first."""
    ends = dict(case.ends)
    for at in range(before, step):
        how = ends.get(at)
        is_launched_again = at == before and how in ("rest", "give up")
        if (how not in (None, "kill") and not is_launched_again) or (case.save_every and (at + 1) % case.save_every == 0):
            return how == "drop"
    return ends.get(step) == "give up"


def evaluate_naively(case: Case) -> dict[int, float]:
    """An evaluation waits for a step before which nothing is being sampled."""
    due = {0, case.num_steps, *range(0, case.num_steps, case.eval_every)}
    steps = [step for step in range(case.num_steps) if not case.depth or step in case.comes_in or step > max(case.comes_in)]
    steps.append(case.num_steps)
    times = {min(step for step in steps if step >= one) for one in due}
    return {step: float(np.mean([reward(number, 0, step) for number in range(3)])) for step in times}


sizes = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
ends = st.dictionaries(st.integers(0, 7), st.sampled_from(["stop", "drop", "rest", "give up", "kill"]), max_size=3)
modes = st.fixed_dictionaries({
    "old_logprobs": st.sampled_from(["auto", "rollout", "always"]), "dynamic": st.booleans(), "ratio": st.sampled_from([1.0, 1.5, 2.5]),
    "depth": st.sampled_from([0, 1, 1]), "save_every": st.integers(0, 3), "eval_every": st.integers(0, 3),
    "refused": st.frozensets(st.integers(0, 7), max_size=3), "epoch": st.integers(0, 3)})  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 8), modes, ends)
def test_training_loop_equals_naive_loop_for_any_save_and_stop(size, num_steps, modes, how):
    """One rollout ahead and at once: who sampled each row, its old log-prob, weight and advantage; and the weights that are evaluated.
    Also where steps are refused: their rows count as used, versions go on, and weights and old log-probs are what they were."""
    case = Case(size, num_steps, ends=tuple((step, one) for step, one in sorted(how.items()) if step < num_steps), **modes)
    trained, evaluated, batches = run_to_its_end(case)
    assert trained == run_naively(case)
    assert evaluated == (evaluate_naively(case) if case.eval_every else {})
    if not {"drop", "give up"} & set(how.values()):  # it is as old as the timetable says
        for batch in batches:
            rows = [row for row in case.table.step(batch.step).micro_steps for _ in range(*row.rows)]
            assert batch.staleness.tolist() == [row.staleness for row in rows]
            assert batch.lag.tolist() == [row.on_policy_version - row.sampled_by_version for row in rows]


@settings(max_examples=30, deadline=None)
@given(sizes, st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3)), min_size=2, max_size=4), st.sampled_from(["auto", "rollout"]))
def test_training_loop_resumes_with_other_depth_and_more_steps(size, parts, old):
    """parts: (depth, further steps). Every row is trained as often as it is to be, by weights that its rollout's step may have."""
    disk, trained, end = MemoryDisk(every=0), {}, 0
    for depth, steps in parts:
        end += steps
        case = Case(size, end, depth=depth, old_logprobs=old)
        policy = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2))
        train(make_run(case, policy, RecordingLogger(), disk, is_dropped_at=None))
        trained |= policy.trained
    once = run_naively(Case(size, end, depth=0, old_logprobs=old))
    assert {step: {row: len(times) for row, times in rows.items()} for step, rows in trained.items()} == {
        step: {row: len(times) for row, times in rows.items()} for step, rows in once.items()
    }
    oldest = {
        number: case.table.find_version(max(0, case.table.new_rollouts(case.table.find_version(number)).start - 1)) for number in range(99)
    }
    for rows in trained.values():
        for (number, _), times in rows.items():
            assert all(oldest[number] <= version <= case.table.find_version(number) for version, *_ in times)
    if old == "auto":  # what the ratio is taken against does not know who sampled
        assert {step: {row: [one[2] for one in times] for row, times in rows.items()} for step, rows in trained.items()} == {
            step: {row: [one[2] for one in times] for row, times in rows.items()} for step, rows in once.items()
        }


@pytest.mark.parametrize("save_every", [0, 1], ids=["at its step", "at a save"])
def test_training_loop_without_servers_saves_without_pending_samples(save_every):
    """The flight that was launched at step 2 finds no servers; the next process samples its rollout anew."""
    case, disk = Case((2, 4, 1), 8, save_every=save_every), MemoryDisk(every=save_every)
    policy, logger = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2)), RecordingLogger()
    run = make_run(case, policy, logger, disk, is_dropped_at=None)
    answers, run.engine._answer = run.engine._answer, lambda *asked: lost(*asked)

    def lost(prompt, place, version):
        if version == 2:
            raise NoRolloutServerError("No rollout server responded")
        return answers(prompt, place, version)

    with pytest.raises(NoRolloutServerError, match=f"No rollout server responded; saved after optimizer step {4 - save_every} in out"):
        train(run)
    assert len(logger.batches) == disk.saved[0].step == 4 - save_every
    assert disk.saved[0].num_prompts == disk.saved[3]["taken"] == 8
    again = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2))
    train(make_run(case, again, RecordingLogger(), disk, is_dropped_at=None))
    assert policy.trained | again.trained == run_naively(replace(case, ends=((2, "drop"),), save_every=0))


def test_training_loop_launches_all_rollouts_of_a_sampling_step():
    """Three rollouts to two steps: sometimes two come in together, and neither asks a prompt when it does."""
    case, logger = Case((3, 2, 1), 8), RecordingLogger()
    run = make_run(case, CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2)), logger, MemoryDisk(every=0), is_dropped_at=None)
    asked, generate = [], run.engine.generate
    run.engine.generate = lambda prompts, *rest, **more: asked.append(len(prompts)) or generate(prompts, *rest, **more)
    train(run)
    assert max(map(len, case.comes_in.values())) == 2 and asked == [2] * len(case.comes_in[0])
    run.rollouts.generator(NumberedPrompts(4).take(4))  # prompts of an earlier flight, as after a round that gave some back
    assert asked[-1] == 4


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("refused", [{0}, {1}, {0, 1}, {2, 3, 5}], ids=str)
@pytest.mark.parametrize("size", [(1, 1, 2), (3, 2, 2), (2, 3, 3)], ids=str)
def test_training_loop_retrains_skipped_rows_against_their_start_version(size, refused, depth):
    case = Case(size, 8, depth=depth, refused=frozenset(refused), save_every=3, ends=((4, "stop"), (6, "kill")))
    trained, _, _ = run_to_its_end(case)
    assert trained == run_naively(case)


def test_training_loop_raises_after_consecutive_skips_with_last_good_checkpoint():
    """Steps 2, 4, 5 and 6 are refused: the third in a row is step 6, the seventh. Rollout r has prompts 2r and 2r + 1, two rows each."""
    case, disk, logger = (
        Case((1, 2, 1), 9, depth=0, refused=frozenset({2, 4, 5, 6}), max_skipped_steps=3),
        MemoryDisk(every=1),
        RecordingLogger(),
    )
    policy = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2), refuses=case.refused)
    with pytest.raises(
        RunError,
        match=r"3 optimizer steps in a row were skipped .*step 7, this is a test.*2; continue with --resume checkpoint 2",
    ):
        train(make_run(case, policy, logger, disk, is_dropped_at=None))
    assert disk.saved[0].step == 6 and policy.weights == 3 and sorted(logger.refused) == [3, 5, 6, 7]
    record, lines = logger.refused[7]
    assert (record["in_a_row"], record["skipped_iterations"]) == (3, 4)
    named = [(row["rollout"], row["row"], row["prompt_number"], row["dataset_row"]) for row in record["bad_micro_batches"][0]["rows"]]
    assert named == [(3, 0, 6, 106), (3, 1, 6, 106)]
    assert "rank 0, micro-batch 0: row 0 of rollout 3 (prompt 6, row 106 of the data set)" in lines[0]


def test_training_loop_raises_on_non_finite_weights_with_last_good_checkpoint():
    """Not after `max_skipped_steps`, nor at the next push: the weights of every later step would be the same."""
    case, disk, logger = Case((1, 2, 1), 9, depth=0, refused=frozenset({4}), max_skipped_steps=3), MemoryDisk(every=1), RecordingLogger()
    policy = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2), refuses=case.refused)
    step = policy.train_step

    def train_step(batch, beside=None):
        trained = step(batch, beside)
        if trained.skipped_step is not None:
            trained.skipped_step = replace(trained.skipped_step, weights=((1, "decoder.w"),))
        return trained

    policy.train_step = train_step
    with pytest.raises(WeightsNotFiniteError) as error:
        train(make_run(case, policy, logger, disk, is_dropped_at=None))
    assert str(error.value) == (
        "The run ends at optimizer step 5: the weights are not finite (rank 1: decoder.w), so no further step can succeed. "
        "The last good checkpoint is checkpoint 2; continue with --resume checkpoint 2."
    )
    assert max(policy.trained) == 4 and logger.refused[5][1] == [
        "the weights are not finite (rank 1: decoder.w), so no further step can succeed"
    ]


def test_training_loop_raises_on_sync_of_non_finite_weights():
    case, disk = Case((1, 2, 1), 9, depth=0), MemoryDisk(every=1)
    policy = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2))
    run = make_run(case, policy, RecordingLogger(), disk, is_dropped_at=None)
    push = run.weight_sync.sync_weights

    def sync_weights(version):
        if version >= 3:
            raise WeightsNotFiniteError("The run ends: the weights are not finite (rank 0: w), so no further step can succeed.")
        push(version)

    run.weight_sync.sync_weights = sync_weights
    with pytest.raises(
        WeightsNotFiniteError, match=r"\(rank 0: w\), .* succeed\. The last good checkpoint is checkpoint \d; continue with"
    ):
        train(run)


def test_training_loop_counts_consecutive_skips_across_resume():
    case = Case((1, 2, 1), 9, depth=0, refused=frozenset({2, 3, 4}), max_skipped_steps=3, ends=((3, "stop"),))
    with pytest.raises(RunError, match="3 optimizer steps in a row.* step 5"):
        run_to_its_end(case)


class CurrentWeightsPenalty:
    """A replacement of `rollouts.KlPenalty` that scores by the policy's current weights."""

    def __init__(self, policy):
        self.policy = policy

    def __call__(self, rows):
        return np.zeros(len(rows.rows)), {
            key: np.full(len(one.token_ids), compute_logprob(self.policy.version)) for key, one in rows.sequences.items()
        }


@pytest.mark.parametrize(("depth", "save_every"), [(0, 0), (1, 0), (1, 1), (1, 4)])
def test_training_loop_reuses_penalty_scores_as_old_logprobs_in_same_step(depth, save_every):
    case = Case((2, 8, 1), 12, depth=depth, save_every=save_every)
    policy = CountingPolicy(BatchPartitioner(dp_size=1, micro_batch_size=2))
    run = make_run(case, policy, RecordingLogger(), MemoryDisk(every=save_every), is_dropped_at=None)
    run.rollouts.penalty = CurrentWeightsPenalty(policy)
    scored = []
    policy.logprobs = lambda micro_batches: scored.append(policy.version) or CountingPolicy.logprobs(policy, micro_batches)
    train(run)
    assert policy.trained == run_naively(case)
    # A save after every step takes rollouts in at steps 1, 5 and 9, before their own: 4 and 8 score them again.
    assert scored == ([4, 8] if save_every == 1 else [])


@pytest.mark.parametrize(
    ("is_rank_zero", "is_time", "stops", "others", "found"),
    [
        (True, False, 0.0, [False, False], (False, False)),
        (True, True, 0.0, [False, False], (False, True)),
        (False, True, 0.0, [False, False], (False, False)),  # its own clock decides nothing
        (False, False, 0.0, [False, True], (False, True)),
        (True, True, 0.0, [True, False], (True, True)),  # another rank was asked to stop
        (True, True, 1.0, [False, False], (True, True)),
        (False, False, 1.0, [False, True], (True, True)),
        (False, False, 1.0, [False, False], (True, False)),
    ],
)
def test_sync_stop_flags_combines_signal_and_time_limit(monkeypatch, is_rank_zero, is_time, stops, others, found):
    """others: the flags of another rank."""
    said = []

    def all_reduce_any(flags):
        said.append(flags)
        return [a or b for a, b in zip(flags, others, strict=True)]

    monkeypatch.setattr("megatron_grpo.core.parallel.collectives.all_reduce_any", all_reduce_any)
    run = SimpleNamespace(
        parallel=SimpleNamespace(is_rank_zero=is_rank_zero),
        checkpoints=SimpleNamespace(is_time=lambda: is_time),
        stop=SimpleNamespace(is_requested=lambda all_reduce_max: all_reduce_max(stops) > 0),
    )
    assert sync_stop_flags(run) == found and len(said) == 1
