"""Partial rollouts on an engine that samples one token per step: prompts and versions across saves, kills and returned prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.batching.split import BatchPartitioner
from megatron_grpo.core.metadata import Progress
from megatron_grpo.core.rollout.engine import PartialCompletion, SampledTurn, SamplingSettings, WeightSyncError
from megatron_grpo.core.rollout.turns import EngineAssignment
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.trainer.rollouts import Rollouts
from megatron_grpo.plugins.partial_rollouts import engine as partial_rollouts
from megatron_grpo.plugins.partial_rollouts.engine import PartialGeneration, join_versions, part_seed
from megatron_grpo.plugins.partial_rollouts.trainer import PartialRollouts, VersionCheck
from megatron_grpo.run.checkpoint.samples import read_samples, serialize_samples
from tests.unit.batching.test_schedule import make_schedule
from tests.unit.trainer.test_rollouts import NumberedPrompts, RecordingLogger, SingleRankState, build_generator, make_rewards

LIMIT, SEED, BETWEEN = 12, 7, 3
SAMPLING = SamplingSettings(n=2, max_completion_length=LIMIT)


class Killed(Exception):
    pass


def compute_token(seed: int, place: int, version: int) -> int:
    """The token at this place of a part."""
    return (seed * 1009 + place * 31 + version * 7) % 100_003


@dataclass
class SlotScheduler:
    """A scheduler in which as many requests as there are slots advance by one token per step, in order of arrival.

    lengths: length of each completion.
    """

    lengths: dict[tuple[int, int], int]
    num_slots: int
    version: int
    budget: list[int]  # steps that are left before the process is killed
    drawn: list[tuple[int, int, int]]  # (prompt, place, index in the completion) of every token that was ever sampled
    open: dict[tuple[int, int], SimpleNamespace] = field(default_factory=dict)

    def submit(self, key, token_ids, *, seed, max_tokens, num_sampled=None):
        assert key not in self.open and max_tokens > 0 and num_sampled == len(token_ids) - 2
        self.open[key] = SimpleNamespace(begin=len(token_ids) - 2, seed=seed, most=max_tokens, tokens=[])

    def _turn(self, one, *, is_cut):
        return SampledTurn(token_ids=tuple(one.tokens), logprobs=(-0.5 - self.version,) * len(one.tokens), is_cut=is_cut,
                           version=self.version)  # fmt: skip

    def poll(self):
        self.budget[0] -= 1
        if self.budget[0] == 0:
            raise Killed
        ended = []
        for key, one in list(self.open.items())[: self.num_slots]:
            self.drawn.append((*key, one.begin + len(one.tokens)))
            one.tokens.append(compute_token(one.seed, len(one.tokens), self.version))
            is_whole = one.begin + len(one.tokens) == self.lengths[key]
            if is_whole or len(one.tokens) == one.most:
                ended.append((key, self._turn(self.open.pop(key), is_cut=not is_whole)))
        return ended

    def interrupt(self):
        found = [(key, self._turn(one, is_cut=True)) for key, one in self.open.items() if one.tokens]
        self.open = {}
        return found

    def abort(self):
        self.open = {}


@dataclass
class Engine:
    lengths: dict[tuple[int, int], int]
    num_slots: int
    budget: list[int]
    version: int = 0
    drawn: list = field(default_factory=list)
    should_cancel: Callable[[], bool] = lambda: False

    @contextmanager
    def wake_up(self):
        yield

    def resume(self, prompts, sampling, *, seed, partial):
        parts = SlotScheduler(self.lengths, self.num_slots, self.version, self.budget, self.drawn)
        share = EngineAssignment(rank=0, num_engines=1, ranks_per_engine=1)
        generation = PartialGeneration(parts, sampling, seed=seed, version=self.version, share=share, decode_text=lambda prompt, one: "",
                                       should_cancel=self.should_cancel)  # fmt: skip
        return generation.begin(prompts, partial)

    def generate(self, prompts, sampling, *, seed):
        return self.resume(prompts, sampling, seed=seed, partial=[]).groups(prompts)


@dataclass(frozen=True)
class Case:
    size: tuple[int, int, int]
    num_steps: int
    depth: int
    num_slots: int
    lengths: int  # seed of them
    dynamic: bool = False
    ratio: float = 1.0
    save_every: int = 1
    rewards: str = "L..LL.L" * 30

    @property
    def table(self):
        table = make_schedule(self.size, self.num_steps)
        return replace(table, sizes=replace(table.sizes, async_rollout_depth=self.depth, partial_rollouts=self.depth > 0))

    @property
    def convert_lengths(self):
        rng = np.random.default_rng(self.lengths)
        return {(number, place): int(rng.choice([1, 2, 5, LIMIT, LIMIT + 5])) for number in range(400) for place in range(2)}


@dataclass
class MemoryDisk:
    """The last checkpoint, with the partial completions as a file."""

    saved: tuple = (Progress(), 0, None)


def run_process(
    case: Case, disk: MemoryDisk, tmp_path, budget: int = -1, depth: int | None = None, until: int | None = None
) -> tuple[dict, Engine, PartialRollouts]:
    """({rollout: its rows}, engine, what is left) of a process that is killed after so many engine steps, or ends after `until` steps."""
    case = case if depth is None else replace(case, depth=depth)
    progress, taken, file = disk.saved
    engine, stream, found = Engine(case.convert_lengths, case.num_slots, [budget]), NumberedPrompts(taken), {}
    partial = PartialRollouts(engine) if case.depth else None
    if partial is not None and file is not None:
        partial.restore(read_samples(file, PartialCompletion))
    generator = build_generator(partial or engine, make_rewards(case.rewards), SAMPLING)
    generator.seed = SEED
    policy = SimpleNamespace(cut=BatchPartitioner(dp_size=1, micro_batch_size=1), parallel=SingleRankState())
    cfg, heard = GrpoConfig(dynamic_sample=case.dynamic, oversample_ratio=case.ratio), RecordingLogger()
    rollouts = Rollouts(generator, stream, cfg=cfg, schedule=case.table, policy=policy, logger=heard)
    rollouts.partial = partial
    for step in case.table.from_step(progress.step, progress.num_rollouts):
        engine.version = step.index
        for one in rollouts.sample(step.immediate, ahead=step.ahead):
            rows = list(one.samples.values())
            found[one.number] = [
                (row.prompt_number, row.token_ids[2:].tolist(), row.spans or (row.version, 2, len(row.token_ids)),
                 row.sampler_logprobs[2:].tolist(), row.is_truncated) for row in rows
            ]  # fmt: skip
            assert one.rows.version.tolist() == [min(spans[::3]) for _, _, spans, *_ in found[one.number]]
            assert one.rows.num_stretches.tolist() == [len(row.spans) // 3 for row in rows]
            assert one.rows.stretches.tolist() == [
                [row.spans[i], row.spans[i + 2] - row.spans[i + 1]] for row in rows for i in range(0, len(row.spans), 3)
            ]
            progress = progress.add([one])
        progress = replace(progress, step=step.index + 1)
        if case.save_every and progress.step % case.save_every == 0:
            path = tmp_path / f"{progress.step}.npz"
            if partial is not None and partial.to_save():
                path.write_bytes(serialize_samples(partial.to_save()))
            disk.saved = progress, stream.taken, path if path.exists() else None
        if progress.step == until:
            return found, engine, partial
    assert progress.num_prompts == stream.taken
    for one in heard if partial is not None else ():
        assert set(one.partial.metrics) == {
            "rollout/partial_rows", "rollout/partial_tokens", "rollout/recomputed_tokens", "rollout/ahead_share"
        }  # fmt: skip
    return found, engine, partial


def assert_tokens_are_those_of_their_parts(number: int, place: int, tokens, spans, logprobs) -> None:
    """Each token is that of its part's seed, place and version, of as many tokens as went before."""
    for version, begin, end in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        seed = part_seed(SEED, number, place, begin - 2, n=2)
        for at in range(begin - 2, end - 2):
            assert tokens[at] == compute_token(seed, at - begin + 2, version) and logprobs[at] == np.float32(-0.5 - version)


cases = st.builds(
    Case, st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2)), st.integers(1, 7), st.integers(0, 4), st.integers(1, 9),
    st.integers(0, 10**6), st.booleans(), st.sampled_from([1.0, 1.5, 2.5]), st.integers(0, 2),
)  # fmt: skip


@pytest.fixture(autouse=True)
def agreements(monkeypatch):
    monkeypatch.setattr(partial_rollouts, "STEPS_BETWEEN_AGREEMENTS", BETWEEN)


@settings(max_examples=40, deadline=None)
@given(cases, st.lists(st.integers(1, 60), max_size=3))
@example(Case((1, 2, 1), 6, 1, 3, 5), [20])
@example(Case((2, 3, 1), 6, 2, 4, 9, ratio=2.5), [15, 15])
def test_partial_rollouts_keep_prompts_and_version_bound_across_kills(tmp_path_factory, case, kills):
    tmp_path = tmp_path_factory.mktemp("disk")
    found, engine, partial = run_process(replace(case, save_every=0), MemoryDisk(), tmp_path)
    waiting, *_ = run_process(replace(case, save_every=0), MemoryDisk(), tmp_path, depth=0)
    assert {r: [row[0] for row in rows] for r, rows in found.items()} == {r: [row[0] for row in rows] for r, rows in waiting.items()}
    table = case.table
    for rollout, rows in found.items():
        for place, (number, tokens, spans, logprobs, is_truncated) in enumerate(rows):
            length = case.convert_lengths[number, place % 2]
            assert len(tokens) == min(length, LIMIT) and is_truncated == (length > LIMIT)
            assert table.oldest_version(rollout) <= min(spans[::3]) <= max(spans[::3]) <= table.find_version(rollout)
            assert_tokens_are_those_of_their_parts(number, place % 2, tokens, spans, logprobs)
    if case.depth and case.ratio == 1:  # nothing is given back, and so nothing is sampled twice or in vain
        left = sum(len(one.token_ids) for one in partial.to_save())
        trained = sum(len(tokens) for rows in found.values() for _, tokens, *_ in rows)
        assert len(engine.drawn) == len(set(engine.drawn)) and (case.dynamic or len(engine.drawn) == trained + left)
    # The same, killed so many engine steps after each start, and begun again from the last checkpoint.
    disk, together = MemoryDisk(), {}
    for budget in kills:
        with pytest.raises(Killed) if _is_killed(case, disk, tmp_path, budget) else nullcontext():
            run_process(case, disk, tmp_path, budget)
    done, *_ = run_process(case, disk, tmp_path)
    together |= done
    assert together == {rollout: rows for rollout, rows in found.items() if rollout in together} and set(together) == set(
        range(max(found) + 1 - len(done), max(found) + 1)
    )


def _is_killed(case: Case, disk: MemoryDisk, tmp_path, budget: int) -> bool:
    """Whether a process that starts from this disk makes so many engine steps: asked of a copy of the disk."""
    try:
        run_process(case, MemoryDisk(disk.saved), tmp_path, budget)
    except Killed:
        return True
    return False


def test_partial_rollouts_with_smaller_depth_drop_only_older_completions(tmp_path, caplog):
    longer, disk = Case((1, 2, 1), 9, depth=3, num_slots=9, lengths=11), MemoryDisk()
    run_process(longer, disk, tmp_path, until=2)
    progress, taken, file = disk.saved
    kept = read_samples(file, PartialCompletion)
    found, engine, _ = run_process(longer, MemoryDisk(disk.saved), tmp_path, depth=1)
    table = replace(longer, depth=1).table
    due = {number: progress.num_rollouts + (number - taken) // 2 for number in {one.prompt_number for one in kept}}
    too_old = [one for one in kept if one.versions[0] < table.oldest_version(due[one.prompt_number])]
    assert 0 < len(too_old) < len(kept)
    dropped = sum(int(record.getMessage().split()[0]) for record in caplog.records if "are dropped" in record.getMessage())
    assert dropped == len(too_old)
    for rollout, rows in found.items():
        assert all(table.oldest_version(rollout) <= min(spans[::3]) for _, _, spans, *_ in rows)


def test_partial_rollouts_dynamic_sampling_after_smaller_depth_uses_no_older_completion(tmp_path):
    """The first steps give back what they began; a later one needs more prompts than its window of the smaller depth has."""
    case = Case((2, 2, 1), 5, depth=4, num_slots=60, lengths=596853, dynamic=True, ratio=2.5, rewards="L" * 4 + "." * 200)
    disk = MemoryDisk()
    run_process(case, disk, tmp_path, until=1)
    found, *_ = run_process(case, disk, tmp_path, depth=1)
    table = replace(case, depth=1).table
    assert all(table.oldest_version(rollout) <= min(spans[::3]) for rollout, rows in found.items() for _, _, spans, *_ in rows)


def test_partial_rollouts_after_error_keep_previous_state(tmp_path):
    case, disk = Case((1, 2, 1), 6, depth=2, num_slots=5, lengths=3), MemoryDisk()
    run_process(case, disk, tmp_path, until=2)
    before = read_samples(disk.saved[2], PartialCompletion)
    engine = Engine(case.convert_lengths, 5, [3], version=disk.saved[0].step)
    partial = PartialRollouts(engine)
    partial.restore(before)
    prompts = [(prompt, 0) for prompt in NumberedPrompts(disk.saved[1]).take(6)]
    with pytest.raises(Killed), partial.sampling(prompts, SAMPLING, seed=SEED):
        partial.generate([prompt for prompt, _ in prompts], SAMPLING, seed=SEED)
    assert partial.to_save() == before
    with pytest.raises(ValueError, match="mine"), partial.sampling(prompts, SAMPLING, seed=SEED):
        raise ValueError("mine")
    assert partial.to_save() == before and len(before) > 2
    assert partial.generate([prompts[0][0]], SAMPLING, seed=SEED)  # outside it is the engine itself
    # On servers a stop that does not wait keeps what was sampled, also of the rollout that was waited for.
    engine = Engine(case.convert_lengths, 5, [-1], version=disk.saved[0].step, should_cancel=lambda: len(engine.drawn) > 12)
    partial = PartialRollouts(engine, in_background=True)
    partial.restore(before)
    with pytest.raises(CancelledError), partial.sampling(prompts, SAMPLING, seed=SEED):
        partial.generate([prompt for prompt, _ in prompts], SAMPLING, seed=SEED)
    partial.interrupt()
    num_kept = [sum(len(one.token_ids) for one in kept) for kept in (before, partial.to_save())]
    assert num_kept[1] == num_kept[0] + len(engine.drawn) and len(engine.drawn) > 12


def test_partial_completion_parts_of_one_version_are_merged():
    assert join_versions([(1, 0, 4), (1, 4, 6), (2, 6, 7), (3, 7, 7), (3, 7, 9)]) == [(1, 0, 6), (2, 6, 7), (3, 7, 9)]
    assert join_versions([]) == []


@pytest.mark.parametrize(("num_engines", "ranks_per_engine"), [(1, 1), (3, 1), (1, 2), (2, 4)])
def test_engine_assignment_distributes_prompts_evenly(num_engines, ranks_per_engine):
    world_size = num_engines * ranks_per_engine
    shares = [EngineAssignment(rank=rank, num_engines=num_engines, ranks_per_engine=ranks_per_engine) for rank in range(world_size)]
    for number in range(40):
        rank = shares[0].find_leader(number)
        assert [one.find_leader(number) for one in shares] == [rank] * world_size
        samples = [one.rank for one in shares if one.is_sampled_here(number)]
        first = rank // ranks_per_engine * ranks_per_engine
        assert samples == list(range(first, first + ranks_per_engine)) and rank in samples
    counts = np.bincount([shares[0].find_leader(number) for number in range(8 * world_size)])
    assert counts.tolist() == [8] * world_size


def test_partial_completion_first_part_has_seed_of_whole_completion():
    from megatron_grpo.core.rollout.engine import prompt_seed

    assert part_seed(1, 5, 2, 0, n=4) == prompt_seed(1, 5, 4) + 2
    seeds = {part_seed(1, number, place, drawn, n=4) for number in range(8) for place in range(4) for drawn in range(40)}
    assert len(seeds) == 8 * 4 * 40


class OffsetScorer:
    """A policy whose log-probs are -0.5 - version, with an error at one token."""

    def __init__(self, version, error=0.0):
        self.version, self.error, self.asked = version, error, []

    @contextmanager
    def on_device(self, part):
        yield

    scorer = property(lambda self: self)

    def score(self, sequences):
        self.asked += sequences
        found = [np.where(one.mask, np.float32(-0.5 - self.version), np.float32(0)) for one in sequences]
        found[0][-1] += self.error
        return found


def make_partial(number, versions, starts, count):
    logprobs = np.concatenate([np.full(end - begin, -0.5 - version) for version, begin, end in zip(versions, starts, (*starts[1:], count))])
    return PartialCompletion(prompt_number=number, place=0, token_ids=np.arange(count) + 50, logprobs=logprobs.astype(np.float32),
                             versions=versions, starts=starts)  # fmt: skip


def test_partial_rollout_check_scores_tokens_of_current_version_only():
    prompts = {prompt.number: prompt for prompt in NumberedPrompts().take(5)}
    partial = [
        make_partial(4, (2, 3), (0, 5), 9),
        make_partial(1, (3,), (0,), 4),
        make_partial(2, (2,), (0,), 4),
        make_partial(3, (3,), (0,), 6),
    ]
    policy = OffsetScorer(3)
    check = VersionCheck(policy=policy, count=2, is_low_precision=False, temperature=1.0)
    assert check(partial, prompts, 3) == {"sampling/version_error/mean": 0.0, "sampling/version_error/max": 0.0}
    assert [(one.token_ids.tolist()[:2], one.num_masked) for one in policy.asked] == [([4, 6], 4), ([4, 8], 6)]
    assert check([partial[2]], prompts, 3) == {} and check([], prompts, 3) == {}
    every = replace(check, count=8)
    policy.asked.clear()
    every(partial, prompts, 3)
    assert [int(one.mask.argmax()) for one in policy.asked] == [2, 2, 7] and [one.num_masked for one in policy.asked] == [4, 6, 4]


@pytest.mark.parametrize(
    ("error", "is_low_precision", "temperature", "fails"),
    [(0.0009, False, 1.0, False), (0.0011, False, 1.0, True), (0.0015, False, 0.5, False), (0.7, True, 1.0, False), (0.9, True, 1.0, True),
     (float("nan"), False, 1.0, True), (float("nan"), True, 1.0, True)],
)  # fmt: skip
def test_partial_rollout_check_uses_bounds_of_weight_sync(error, is_low_precision, temperature, fails):
    """Of four tokens one is off: a mean of a quarter."""
    prompts = {prompt.number: prompt for prompt in NumberedPrompts().take(5)}
    check = VersionCheck(policy=OffsetScorer(3, error), count=2, is_low_precision=is_low_precision, temperature=temperature)
    if not fails:
        assert check([make_partial(1, (3,), (0,), 4)], prompts, 3)["sampling/version_error/max"] == pytest.approx(error, abs=1e-6)
        return
    with pytest.raises(WeightSyncError, match=r"do not come from the weights of version 3: .* over 4 tokens of 1 completions"):
        check([make_partial(1, (3,), (0,), 4)], prompts, 3)


def test_partial_rollout_metrics_by_hand():
    partial = PartialRollouts(SimpleNamespace())
    partial._version = 3
    partial._found = [make_partial(1, (2, 3), (0, 5), 9), make_partial(2, (3,), (0,), 4), make_partial(3, (2,), (0,), 6)]
    assert partial.stats(2) == {
        "rollout/partial_rows": 2, "rollout/partial_tokens": 10, "rollout/recomputed_tokens": 5, "rollout/ahead_share": 0.5
    }  # fmt: skip
    partial.commit(2)
    assert [one.prompt_number for one in partial.to_save()] == [2, 3]
