"""Rollouts with dynamic sampling and oversampling: requested, used and returned prompts, and the resulting samples."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import NoRolloutServerError
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.batching.split import BatchPartitioner
from megatron_grpo.core.grpo.advantages import zero_std_groups
from megatron_grpo.core.metadata import GroupMetadata
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.rollout.engine import SamplingSettings, make_completion
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.trainer.generation import InvalidLogprobsError, InvalidSamplingMaskError, RolloutGenerator
from megatron_grpo.core.trainer.rollouts import Rollouts
from megatron_grpo.core.trainer.rollouts import dynamic_sampling as collect
from megatron_grpo.core.trainer.sample_buffer import without_training
from megatron_grpo.core.types import Prompt, SampleWithOldLogprobs, ScoredGroup
from megatron_grpo.core.weights.buckets import WeightUpdate
from megatron_grpo.run.metrics.rollout import rollout_stats, selection_stats
from tests.scripted_engine import ScriptedEngine

LIVE, ZERO_STD = ((1.0,), (0.0,)), ((1.0,), (1.0,))


class NumberedPrompts:
    """Numbered prompts without end, with the interface that `dynamic_sampling` and `Rollouts` use."""

    def __init__(self, taken: int = 0):
        self.taken, self.asked = taken, []

    def take(self, count):
        self.asked.append(count)
        self.taken += count
        return [
            Prompt(number=number, row=number, raw="", token_ids=(4, 5 + number), columns={})
            for number in range(self.taken - count, self.taken)
        ]

    def give_back(self, count):
        self.taken -= count

    def find_row(self, number):
        return 100 + number

    def state(self):
        return {"taken": self.taken}

    def restore(self, state):
        self.taken = state["taken"]


def answer(prompt, place, version):
    """Prompt 7's completion 1 is the tokens 71, 72, each of log-prob -0.5; it ran into the limit."""
    tokens = (10 * prompt.number + place, 10 * prompt.number + place + 1)
    return make_completion(prompt.token_ids, tokens, (-0.5, -0.5), text="", finish_reason="length" if place else "stop", version=version)


SAMPLING = SamplingSettings(n=2, max_completion_length=2)


def make_scorer(rewards, groups):
    return [ScoredGroup(group=group, rewards=rewards[group.prompt.number]) for group in groups]


def run_dynamic_sampling(stream, rewards, *, num_groups, config=None, **settings):
    """`dynamic_sampling` on prompts whose groups get `rewards[number]`, by the package's own rule of zero-std groups."""
    engine, weights = ScriptedEngine(answer), [1.0] * len(rewards[0][0])
    return collect(
        stream.take,
        stream.give_back,
        lambda prompts: [GroupMetadata.from_group(one) for one in make_scorer(rewards, engine.generate(prompts, SAMPLING, seed=0))],
        lambda metas: zero_std_groups([meta.rewards for meta in metas], config or GrpoConfig(), weights),
        num_groups=num_groups,
        **settings,
    )


def list_numbers(metas):
    return [meta.prompt_number for meta in metas]


def make_rewards(pattern: str):
    """Rewards by prompt number, from a word such as "L..L": live or zero-std; zero-std for ever after."""
    return {number: LIVE if number < len(pattern) and pattern[number] == "L" else ZERO_STD for number in range(1000)}


def test_dynamic_sampling_replaces_zero_std_groups_only():
    stream = NumberedPrompts()
    found = run_dynamic_sampling(stream, make_rewards(".L.LLL..L"), num_groups=4, dynamic_sample=True)
    assert stream.asked == [4, 2]  # two of the first four are zero-std
    assert list_numbers(found.kept) == [1, 3, 4, 5]
    assert (found.num_rounds, found.num_zero_std_dropped, found.num_given_back, stream.taken) == (2, 2, 0, 6)


def test_dynamic_sampling_fills_rollout_with_oldest_zero_std_groups():
    stream = NumberedPrompts()
    found = run_dynamic_sampling(stream, make_rewards("...L"), num_groups=3, dynamic_sample=True, max_resample_times=2)
    assert stream.asked == [3, 3, 2]
    assert list_numbers(found.kept) == [0, 1, 3]
    assert (found.num_rounds, found.num_zero_std_dropped, stream.taken) == (3, 5, 8)


def test_rollout_without_dynamic_sampling_includes_zero_std_groups():
    stream = NumberedPrompts()
    assert list_numbers(run_dynamic_sampling(stream, make_rewards(".L"), num_groups=4).kept) == [0, 1, 2, 3]
    assert stream.asked == [4]


def test_oversampling_prefers_nonzero_std_groups_in_one_round():
    stream = NumberedPrompts()
    found = run_dynamic_sampling(stream, make_rewards(".L.L.."), num_groups=4, oversample_ratio=1.5)
    assert stream.asked == [6]
    assert list_numbers(found.kept) == [0, 1, 2, 3]  # both live ones, and the oldest zero-std ones
    assert (found.num_rounds, found.num_zero_std_dropped, stream.taken) == (1, 2, 6)


def test_oversampling_gives_back_prompts_from_first_unused_group():
    stream = NumberedPrompts()
    found = run_dynamic_sampling(stream, make_rewards("L.LLL.L."), num_groups=3, oversample_ratio=2.5)
    assert stream.asked == [8]
    assert list_numbers(found.kept) == [0, 2, 3]
    assert (found.num_given_back, found.num_zero_std_dropped, stream.taken) == (4, 1, 4)
    assert list_numbers(found.sampled) == list(range(8))


def test_oversample_ratio_is_exact_in_decimals():
    stream = NumberedPrompts()
    run_dynamic_sampling(stream, make_rewards("L" * 20), num_groups=10, oversample_ratio=1.1)
    assert stream.asked == [11]  # 10 * 1.1 is 11.000000000000002 in binary


def test_dynamic_sampling_treats_groups_with_at_most_one_score_as_zero_std():
    rewards = {0: ((None,), (None,)), 1: ((None,), (1.0,)), 2: LIVE, 3: LIVE, **{number: ZERO_STD for number in range(4, 9)}}
    assert list_numbers(run_dynamic_sampling(NumberedPrompts(), rewards, num_groups=2, dynamic_sample=True).kept) == [2, 3]


def test_dynamic_sampling_with_gdpo_accepts_group_if_one_reward_varies():
    """Equal totals, opposite rewards: nothing to learn for grpo, two things for gdpo."""
    opposite = ((1.0, 0.0), (0.0, 1.0))
    rewards = {0: opposite, 1: ((1.0, 0.0), (0.0, 0.0)), **{number: ((1.0, 1.0),) * 2 for number in range(2, 9)}}
    for estimator, kept in (("grpo", [1]), ("gdpo", [0])):
        config = GrpoConfig(advantage_estimator=estimator)
        assert list_numbers(run_dynamic_sampling(NumberedPrompts(), rewards, num_groups=1, config=config, dynamic_sample=True).kept) == kept


patterns = st.lists(st.booleans(), max_size=60)


@given(patterns, st.integers(1, 7), st.sampled_from([1.0, 1.1, 1.5, 2.0, 3.0]), st.booleans(), st.integers(1, 4), st.integers(1, 6))
def test_dynamic_sampling_trains_every_nonzero_std_group_once(alive, num_groups, ratio, dynamic, times, num_rollouts):
    """Of the prompts that count as used, the live ones are exactly those that were trained: none is lost, none comes twice."""
    rewards = make_rewards("".join("L" if one else "." for one in alive))
    stream, trained = NumberedPrompts(), []
    for _ in range(num_rollouts):
        stream.asked.clear()
        start = stream.taken
        found = run_dynamic_sampling(
            stream, rewards, num_groups=num_groups, oversample_ratio=ratio, dynamic_sample=dynamic, max_resample_times=times
        )
        kept = list_numbers(found.kept)
        assert len(kept) == num_groups and kept == sorted(kept) and set(kept) <= set(range(start, stream.taken))
        assert len(stream.asked) == found.num_rounds <= (1 + times if dynamic else 1)
        assert stream.asked[0] == math.ceil(num_groups * Fraction(str(ratio)))
        is_short = sum(rewards[number] is LIVE for number in kept) < num_groups
        assert not (is_short and dynamic and found.num_rounds <= times), "stopped before the rounds were used up"
        assert stream.taken - start == num_groups + found.num_zero_std_dropped
        trained += kept
    live = [number for number in range(stream.taken) if rewards[number] is LIVE]
    assert [number for number in trained if rewards[number] is LIVE] == live
    assert len(set(trained)) == len(trained)


# ---- samples ---------------------------------------------------------------------------------------------------------------------------


class SingleRankState:
    """The parallel state of the only rank of a job."""

    layout = Layout(world_size=1)
    dp_rank, is_model_parallel_src, is_rank_zero = 0, True, True

    def from_last_stage(self, mine):
        return mine


class RecordingLogger(list):
    """A metrics logger that records its calls."""

    rollout = list.append


class TableRewards:
    """Rewards from a table."""

    names, reward_weights, most_failed_episodes = ["r"], [1.0], 1.0

    def __init__(self, rewards):
        self.rewards = rewards

    def __call__(self, groups, *, positions):
        return make_scorer(self.rewards, groups)

    def warn_of_sameness(self, rows):
        assert all(len(row) == 1 for row in rows)


def make_schedule(*, num_groups=2, steps=1, old_logprobs="auto", depth=0):
    """Groups of two; a rollout of `num_groups` groups is trained in so many steps, a completion a micro-step."""
    rows = 2 * num_groups
    return TrainingSchedule(BatchSizes(layout=SingleRankState.layout, global_batch_size=rows // steps, generation_batch_size=rows,
                                num_generations=2, old_logprobs=old_logprobs, async_rollout_depth=depth))  # fmt: skip


def make_rollouts(
    rewards, table, *, penalty=None, answer=answer, engine=None, stream=None, logger=None, sampling=SAMPLING, teacher=None, **config
):
    policy = SimpleNamespace(cut=BatchPartitioner(dp_size=1, micro_batch_size=1), parallel=SingleRankState())
    return Rollouts(
        build_generator(engine or ScriptedEngine(answer), rewards, sampling), stream or NumberedPrompts(), cfg=GrpoConfig(**config),
        schedule=table, policy=policy, logger=RecordingLogger() if logger is None else logger, penalty=penalty, teacher=teacher,
    )  # fmt: skip


def build_generator(engine, rewards=(), sampling=SAMPLING, sync_again=lambda: pytest.fail("pushed again")):
    return RolloutGenerator(engine, TableRewards(rewards), sampling=sampling, seed=0, timers=Timers(), sync_again=sync_again)


def run_rollout(rewards, *, penalty=None, old_logprobs="auto", number=0, answer=answer, **config):
    """(samples in row order, metrics, rows) of one rollout, by the weights of its step."""
    heard, engine = RecordingLogger(), ScriptedEngine(answer)
    engine.load_weights(WeightUpdate(kind="weights", version=number, tensors=()))
    rollouts = make_rollouts(rewards, make_schedule(old_logprobs=old_logprobs), penalty=penalty, engine=engine, logger=heard, **config)
    (found,) = rollouts.sample([number])
    assert rollouts.sample([]) == rollouts.collect([]) == rollouts.drain(number) == []
    cfg = rollouts.cfg
    stats = rollout_stats(heard, ["r"]) | (selection_stats(heard, [1.0]) if cfg.dynamic_sample else {})
    assert found.rows.keys == list(found.samples)
    return list(found.samples.values()), stats, found.rows


def test_rollout_samples_contain_prompt_completion_and_advantage():
    samples, stats, rows = run_rollout({0: LIVE, 1: ZERO_STD}, number=5)
    assert [(s.rollout, s.row, s.prompt_number) for s in samples] == [(5, 0, 0), (5, 1, 0), (5, 2, 1), (5, 3, 1)]
    second = samples[3]
    assert second.token_ids.tolist() == [4, 6, 11, 12] and second.mask.tolist() == [False, False, True, True]
    assert second.sampler_logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert [s.is_truncated for s in samples] == [False, True, False, True]
    assert [s.is_zero_std for s in samples] == [False, False, True, True]
    assert [s.advantage for s in samples] == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4), 0, 0])
    assert not any(isinstance(s, SampleWithOldLogprobs) for s in samples)
    assert (rows.contexts.tolist(), rows.num_contexts.tolist(), rows.num_masked.tolist()) == ([4] * 4, [1] * 4, [2] * 4)
    assert (rows.is_zero_std.tolist(), rows.is_truncated.tolist()) == ([False, False, True, True], [False, True, False, True])
    assert "dynamic_sample/rounds" not in stats


def test_rollout_small_advantage_is_not_treated_as_zero():
    """A row of advantage 0 is not computed: one of 0.01, or of a rounding error, is."""
    samples, _, rows = run_rollout({0: ((0.02,), (0.0,)), 1: ZERO_STD}, scale_rewards="none")
    assert [s.advantage for s in samples] == pytest.approx([0.01, -0.01, 0, 0])
    assert rows.is_zero_advantage.tolist() == [False, False, True, True]
    _, _, rows = run_rollout({0: ((1e-6,), (0.0,)), 1: ZERO_STD}, scale_rewards="none")
    assert rows.is_zero_advantage.tolist() == [False, False, True, True]


def test_rollout_samples_have_teacher_logprobs_unless_untrained():
    """The teacher says the row's number at drawn tokens. Of one completion the sampler's log-probs are impossible."""

    def teacher(rows):
        assert rows.rows.keys == list(rows.sequences) and not rows.rows.dp_rank.any()
        return {key: np.where(one.mask, -key[1], 0).astype(np.float32) for key, one in rows.sequences.items()}

    def some_wrong(prompt, place, version):
        right = answer(prompt, place, version)
        return replace(right, logprobs=np.full_like(right.logprobs, np.inf)) if (prompt.number, place) == (1, 0) else right

    samples, _, _ = run_rollout({0: LIVE, 1: LIVE}, teacher=teacher, answer=some_wrong)
    assert [None if s.teacher_logprobs is None else s.teacher_logprobs.tolist() for s in samples] == [
        [0, 0, 0, 0], [0, 0, -1, -1], None, [0, 0, -3, -3]]  # fmt: skip
    assert all(s.teacher_logprobs is None for s in run_rollout({0: LIVE, 1: ZERO_STD})[0])


def test_rollout_with_lost_teacher_is_logged_once_after_retry():
    heard, rewards = RecordingLogger(), {number: LIVE for number in range(8)}

    def gone(rows):
        raise NoRolloutServerError("no server of the teacher answered")

    with pytest.raises(NoRolloutServerError):
        make_rollouts(rewards, make_schedule(), logger=heard, teacher=gone).sample([0])
    assert heard == []
    with pytest.raises(KeyError):  # and a row that a teacher forgot does not pass for one that was never to be taught
        make_rollouts(rewards, make_schedule(), logger=heard, teacher=lambda *asked: {}).sample([0])


def test_rollout_rows_have_group_and_prefix_for_training_and_penalty():
    def penalty(rows):
        assert are_right(rows.rows)
        return np.zeros(4), {}

    def are_right(rows):
        lengths = rows.lengths
        same_group = (lengths.group[:, None] == lengths.group).tolist()
        assert same_group == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
        return (lengths.prefix.tolist(), lengths.contexts.tolist(), rows.prompt_number.tolist()) == ([2] * 4, [4] * 4, [0, 0, 1, 1])

    samples, _, rows = run_rollout({0: LIVE, 1: ZERO_STD}, number=3, penalty=penalty, beta=1.0, kl_in_reward=True)
    assert are_right(rows)
    assert [sample.prefix for sample in samples] == [2] * 4


def test_rollout_unscored_completion_is_excluded_from_training_and_means():
    samples, stats, _ = run_rollout({0: ((None,), (None,)), 1: LIVE})
    assert [s.advantage for s in samples[:2]] == [0.0, 0.0] and samples[0].is_zero_std
    assert stats["reward"] == 0.5


def test_rollout_completion_with_invalid_logprob_is_excluded_and_counted(caplog):
    def broken(prompt, place, version):
        one = answer(prompt, place, version)
        return replace(one, logprobs=np.float32([0, 0, -0.5, [-math.inf, 0.3][prompt.number]])) if place else one

    for old_logprobs in ("auto", "rollout"):
        samples, stats, rows = run_rollout({0: LIVE, 1: LIVE}, old_logprobs=old_logprobs, answer=broken)
        assert [s.mask.tolist() for s in samples] == [[False, False, True, True], [False] * 4] * 2
        assert rows.num_masked.tolist() == [2, 0, 2, 0]
        assert all(np.isfinite(s.sampler_logprobs).all() for s in samples)
        assert stats["sampling/refused_completions"] == 2
    assert "2 of 4 completions have an invalid log-prob (NaN, infinite or above 0; the first: completion 1 of prompt 0" in caplog.text
    assert run_rollout({0: LIVE, 1: LIVE})[1]["sampling/refused_completions"] == 0


def answer_with_mask(prompt, place, version):
    """Completion 0 among two words and one; completion 1 among three and two."""
    one = answer(prompt, place, version)
    first, second = one.answer_ids
    words = [[first, 8, 9], [second, 8]] if place else [[first, 9], [second]]
    mask_ids = np.array(sum(words, []), dtype=np.int32)
    return replace(one, sequence=replace(one.sequence, mask_offsets=np.cumsum([0, *map(len, words)]), mask_ids=mask_ids))


def test_rollout_sampled_ahead_has_sampling_mask_and_teacher_logprobs():
    engine, asked = ScriptedEngine(answer_with_mask), []
    engine.load_weights(WeightUpdate(kind="weights", version=0, tensors=()))

    def teacher(rows):
        asked.append(len(rows.sequences))
        return {key: np.where(one.mask, -key[1], 0).astype(np.float32) for key, one in rows.sequences.items()}

    sampling = replace(SAMPLING, top_k=3, returns_sampling_mask=True)
    rollouts = make_rollouts({0: LIVE, 1: LIVE}, make_schedule(depth=1), engine=engine, sampling=sampling, teacher=teacher)
    rollouts.launch(1)
    assert asked == []
    [found] = rollouts.drain(0)  # a checkpoint asks for it before its own step does
    assert [sample.sampling_mask.ids.tolist() for sample in found.samples.values()] == [
        [0, 9, 1],
        [1, 8, 9, 2, 8],
        [10, 9, 11],
        [11, 8, 9, 12, 8],
    ]
    assert [sample.teacher_logprobs.tolist() for sample in found.samples.values()] == [[0, 0, -row, -row] for row in range(4)]
    assert rollouts.collect([1]) == [] and asked == [4]


@pytest.mark.parametrize("drained_at", [None, 1, 2])
def test_rollout_penalty_logprobs_are_reused_as_old_logprobs_in_same_step(drained_at):
    """Rollout 1 comes in at step 2 and its second half is trained at step 3. A checkpoint that took it in after step 1 scored it by
    weights that no ratio is against."""
    engine = ScriptedEngine(answer)
    engine.load_weights(WeightUpdate(kind="weights", version=0, tensors=()))

    def penalty(rows):
        return np.zeros(len(rows.rows)), {key: np.full(len(one.mask), -0.25 - key[1], np.float32) for key, one in rows.sequences.items()}

    table = make_schedule(steps=2, depth=1)
    assert (table.find_version(1), table.oldest_version(1)) == (2, 0) and table.step(2).old_logprob_slices == ((1, 2), (1, 3))
    rollouts = make_rollouts({0: LIVE, 1: LIVE}, table, engine=engine, penalty=penalty, beta=1.0, kl_in_reward=True)
    rollouts.launch(1)
    [found] = rollouts.collect([1]) if drained_at is None else rollouts.drain(drained_at)
    with_old_logprobs = [] if drained_at == 1 else [(1, 2), (1, 3)]
    assert found.rows.take(np.flatnonzero(found.rows.has_old_logprobs)).keys == with_old_logprobs
    assert [key for key, sample in found.samples.items() if isinstance(sample, SampleWithOldLogprobs)] == with_old_logprobs
    for key in with_old_logprobs:
        assert found.samples[key].old_logprobs.tolist() == [0, 0, -0.25 - key[1], -0.25 - key[1]]
    # And at once, as every rollout is without one ahead.
    at_once = make_rollouts({0: LIVE, 1: LIVE}, make_schedule(steps=2), penalty=penalty, answer=answer, beta=1.0, kl_in_reward=True)
    at_once.generator.sampler.load_weights(WeightUpdate(kind="weights", version=0, tensors=()))
    [found] = at_once.sample([0])
    assert found.rows.take(np.flatnonzero(found.rows.has_old_logprobs)).keys == [(0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("depth", "version", "said"),
    [
        (0, 1, "sampled by weight version 1; the training schedule expects version 2"),
        (0, 3, "sampled by weight version 3; the training schedule expects version 2"),
        (1, 1, "sampled by weight version 1; the training schedule expects version 2, or up to 4"),
        (1, 5, "sampled by weight version 5; the training schedule expects version 2, or up to 4"),
        (1, 2, ""), (1, 3, ""), (1, 4, ""), (0, 2, ""),
    ],
)  # fmt: skip
def test_rollout_with_version_outside_planned_range_raises(depth, version, said):
    """Of two steps each: rollout 1 comes in at step 2, and rollout 2, sampled from step 2 on, at step 4. Weights that were pushed late
    look like this."""
    engine, table = ScriptedEngine(answer), make_schedule(steps=2, depth=depth)
    engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=()))
    rollouts = make_rollouts({0: LIVE, 1: LIVE}, table, engine=engine)
    if not said:
        assert set(rollouts.sample([1 + depth])[0].rows.version.tolist()) == {version}
        return
    with pytest.raises(ValueError, match=f"prompt 0 of rollout {1 + depth} was {said}$"):
        rollouts.sample([1 + depth])


def test_rollout_checks_version_of_each_part_of_a_completion():
    engine = ScriptedEngine(lambda *asked: replace(answer(*asked), versions=((2, 2, 3), (5, 3, 4))))
    engine.load_weights(WeightUpdate(kind="weights", version=2, tensors=()))
    with pytest.raises(ValueError, match="sampled by weight version 5; the training schedule expects version 2, or up to 4$"):
        make_rollouts({0: LIVE, 1: LIVE}, make_schedule(steps=2, depth=1), engine=engine).sample([2])


def test_rollout_samples_have_sampling_mask_unless_untrained(caplog):
    def told(prompt, place, version):
        """Completion 1 of prompt 1 is refused."""
        one = answer_with_mask(prompt, place, version)
        return replace(one, logprobs=np.float32([0, 0, -0.5, 0.3])) if place and prompt.number else one

    sampling = replace(SAMPLING, top_k=3, returns_sampling_mask=True)
    samples, stats, _ = run_rollout({0: LIVE, 1: LIVE}, answer=told, sampling=sampling)
    assert [sample.sampling_mask and sample.sampling_mask.ids.tolist() for sample in samples] == [
        [0, 9, 1],
        [1, 8, 9, 2, 8],
        [10, 9, 11],
        None,
    ]
    assert (stats["sampling/mask_size"], stats["sampling/mask_size_max"]) == ((3 + 5) * 2 / 8, 3)
    nothing = without_training(samples[1])
    assert nothing.sampling_mask is None and not nothing.mask.any()
    assert "sampling/mask_size" not in run_rollout({0: LIVE, 1: LIVE})[1]
    with pytest.raises(InvalidSamplingMaskError, match="returned no sampling mask for the 2 tokens"):
        run_rollout({0: LIVE, 1: LIVE}, sampling=sampling)


def test_rollout_with_all_completions_invalid_raises():
    def broken(prompt, place, version):
        return replace(answer(prompt, place, version), logprobs=np.float32([0, 0, math.nan, -1.0]))

    with pytest.raises(InvalidLogprobsError, match="4 of 4 completions .*completion 0 of prompt 0 .*token 1 of 2: nan.*are faulty"):
        run_rollout({0: LIVE, 1: LIVE}, answer=broken)


def test_rollout_with_old_logprobs_rollout_uses_sampler_logprobs():
    samples, *_ = run_rollout({0: LIVE, 1: ZERO_STD}, old_logprobs="rollout")
    assert all(s.old_logprobs_from == "rollout" and s.old_logprobs.tolist() == s.sampler_logprobs.tolist() for s in samples)


def test_rollout_kl_penalty_is_subtracted_before_baseline():
    def penalty(rows):
        assert [one.token_ids.tolist()[-1] for one in rows.sequences.values()] == [1, 2, 11, 12]
        return np.array([0.25, 0.0, 0.5, 0.0]), {}

    settings = dict(scale_rewards="none", beta=1.0, kl_in_reward=True)
    samples, stats, _ = run_rollout({0: LIVE, 1: ZERO_STD}, penalty=penalty, **settings)
    assert [s.advantage for s in samples] == pytest.approx([0.375, -0.375, -0.25, 0.25])
    assert [s.is_zero_std for s in samples] == [False, False, True, True], "by their rewards, before the penalty"
    assert stats["kl_in_reward"] == pytest.approx(0.1875) and stats["reward"] == 0.75


def test_rollout_metrics_include_mean_reward_of_all_sampled_groups():
    """Kept: prompts 2 and 3, reward 0.5 each. Sampled: those, and two zero-std groups of reward 1."""
    _, stats, _ = run_rollout({0: ZERO_STD, 1: ZERO_STD, 2: LIVE, 3: LIVE}, dynamic_sample=True)
    assert (stats["reward"], stats["dynamic_sample/reward"]) == (0.5, 0.75)
    assert [stats[f"dynamic_sample/{name}"] for name in ("rounds", "groups_sampled", "zero_std_groups_replaced")] == [2, 4, 2]
