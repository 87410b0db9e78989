"""The sample buffer on real ranks: which rank holds which rows, what is sent, and what is left after a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from tests.ranks import run_ranks

ROWS = 16


def make_samples(num_rows: int = ROWS):
    """Return rows of 3 to 10 tokens; row i begins with token 100 + i, and its log-probs are -i / 100."""
    from megatron_grpo.core.types import Sample

    made = []
    for row in range(num_rows):
        length = 3 + 5 * row % 8
        mask = np.arange(length) >= 2
        made.append(
            Sample(
                rollout=0, row=row, prompt_number=row // 4, version=0, on_policy_version=0,
                token_ids=np.arange(length) + 100 + row, mask=mask,
                sampler_logprobs=np.where(mask, -row / 100, 0).astype(np.float32), advantage=float(row), is_zero_std=row < 4,
                is_truncated=row == 5,
            )
        )  # fmt: skip
    return made


def token_weight_fn(num_masked, *, is_truncated, is_zero_std):
    """Return weights that encode their row, and integer and flag columns as filters."""
    weights = np.array([num / 1000 for num in num_masked])
    return SimpleNamespace(row_weights=weights, num_sequences=len(num_masked) - sum(is_zero_std), num_loss_tokens=sum(num_masked))


class RecordingScorer:
    """A policy whose log-probs are targets / -1000; it records which rows it scored."""

    def __init__(self):
        self.asked = []

    def old_logprobs(self, micro_batches):
        self.asked += [micro.targets.tolist() for micro in micro_batches]
        return [(micro.targets / -1000).astype(np.float32) for micro in micro_batches], None


def find_home(pending, key) -> int:
    return int(pending.rows.dp_rank[pending.rows.find_indices(*key)])


def make_step(index: int, slices, cut, *, old_logprob_slices=(), keeps=(), last_use=(), staleness=0):
    size = cut.rows_per_slice
    micro_steps = [SimpleNamespace(rollout=0, rows=(j * size, (j + 1) * size), on_policy_version=index - staleness) for j in slices]
    return SimpleNamespace(index=index, micro_steps=micro_steps, old_logprob_slices=old_logprob_slices, keeps=keeps, last_use=last_use)


def start(rank, world, *, tp: int = 1, pp: int = 1, micro_batch_size: int = 2, max_tokens: int | None = None):
    from megatron_grpo.core.batching.split import BatchPartitioner
    from megatron_grpo.core.parallel.layout import Layout
    from megatron_grpo.core.parallel.state import start
    from megatron_grpo.core.trainer.sample_buffer import SampleBuffer

    parallel = start(Layout(world_size=world, tp=tp, pp=pp))
    cut = BatchPartitioner(dp_size=parallel.dp_size, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    mine = make_samples()[rank::world]  # as ranks read them from files
    return SampleBuffer(parallel=parallel, cut=cut).restored(mine), cut


def list_rows(pending) -> list[int]:
    return sorted(row for _, row in pending.samples)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {}), (2, {"tp": 2}), (4, {"tp": 2}), (4, {"pp": 2})])
def test_sample_buffer_row_is_on_all_ranks_of_one_dp_rank_only(world, layout):
    def body(rank, world_size):
        pending, _ = start(rank, world_size, **layout)
        assert pending.rows.keys == [(0, row) for row in range(ROWS)]
        assert all(find_home(pending, key) == pending.parallel.dp_rank for key in pending.samples)
        for sample in pending.samples.values():
            assert sample.token_ids[0] == 100 + sample.row
        return pending.parallel.dp_rank, list_rows(pending), [sample.row for sample in pending.to_save()]

    found = run_ranks(body, world, timeout=120)
    by_share = {share: rows for share, rows, _ in found}
    assert all(rows == by_share[share] for share, rows, _ in found)
    assert sorted(row for rows in by_share.values() for row in rows) == list(range(ROWS))
    assert sorted(row for *_, rows in found for row in rows) == list(range(ROWS)), "a checkpoint has every row once"


@pytest.mark.parametrize("max_tokens", [None, 14])
def test_sample_buffer_batch_has_local_rows_with_weights_of_the_whole_step(max_tokens):
    def body(rank, world_size):
        from megatron_grpo.core.parallel import collectives

        pending, cut = start(rank, world_size, max_tokens=max_tokens)
        whole = {sample.row: sample for sample in make_samples()}
        before = list_rows(pending)
        pending, batch = pending.batch(make_step(0, range(4), cut), token_weight_fn=token_weight_fn)
        trained = [row for micro in batch.micro_batches for _, row in micro.rows]
        assert sorted(trained) == list_rows(pending), "a row stays where it was trained"
        for number, micro in enumerate(batch.micro_batches):
            assert micro.number == number
            for place, (_, row) in enumerate(micro.rows):
                at = micro.sequence == place
                assert micro.targets[at].tolist() == whole[row].token_ids[whole[row].mask].tolist()
                assert set(micro.token_weights[at]) == {whole[row].num_masked / 1000} and set(micro.advantages[at]) == {row}
        by_rank = collectives.all_gather_object([[list(key) for key in micro.rows] for micro in batch.micro_batches])
        assert batch.rows_by_micro_batch() == [list(rank_outcome) for rank_outcome in zip(*by_rank, strict=True)], (
            "known without asking them"
        )
        assert (batch.num_sequences, batch.num_contexts) == (ROWS - 4, ROWS)
        assert batch.num_tokens == sum(len(sample.token_ids) for sample in whole.values())
        return before, trained

    (before, first), (_, second) = run_ranks(body, 2, timeout=120)
    assert sorted(first + second) == list(range(ROWS))
    assert (sorted(first) == before) == (max_tokens is None), "a token budget sends rows to other shares, and nothing else does"


def test_sample_buffer_reports_token_staleness_with_partial_rollouts():
    def body(rank, world_size):
        pending, cut = start(rank, world_size)
        pending = pending.with_old_logprobs(
            RecordingScorer(), make_step(2, (), cut, old_logprob_slices=[(0, number) for number in range(8)])
        )
        batches = [
            dataclasses.replace(pending, partial_rollouts=partial).batch(make_step(2, range(8), cut), token_weight_fn=token_weight_fn)[1]
            for partial in (True, False)
        ]
        return [(batch.by_token, batch.tokens_by_version) for batch in batches]

    [found] = run_ranks(body, 1, timeout=120)
    whole = [[[0, sample.num_masked]] for sample in make_samples()]
    assert found == [({"staleness/tokens/mean": 2.0, "staleness/tokens/max": 2, "staleness/versions_per_row": 1.0}, whole), ({}, [])]


def test_sample_buffer_row_of_two_passes_is_on_each_training_rank_and_pending_on_one():
    def body(rank, world_size):
        pending, cut = start(rank, world_size, max_tokens=14)
        pending, batch = pending.batch(make_step(0, (0, 1, 2, 3, 0), cut), token_weight_fn=token_weight_fn)
        return list_rows(pending), [row for micro in batch.micro_batches for _, row in micro.rows]

    found = run_ranks(body, 2, timeout=120)
    assert sorted(row for _, trained in found for row in trained) == sorted([*range(ROWS), *range(ROWS // 4)])
    assert sorted(row for waiting, _ in found for row in waiting) == list(range(ROWS))


def test_sample_buffer_old_logprobs_reach_all_ranks_of_the_dp_rank():
    def body(rank, world_size):
        from megatron_grpo.core.types import SampleWithOldLogprobs

        pending, cut = start(rank, world_size, pp=2, micro_batch_size=4, max_tokens=20)
        scorer = RecordingScorer()
        pending = pending.with_old_logprobs(scorer, make_step(0, (), cut, old_logprob_slices=((0, 1),)))
        due = {(0, row) for row in range(8, 16)}
        for key, sample in pending.samples.items():
            assert isinstance(sample, SampleWithOldLogprobs) == (key in due)
            if key in due:
                assert sample.old_logprobs_from == "recompute"
                assert np.array_equal(sample.old_logprobs[sample.mask], (sample.token_ids[sample.mask] / -1000).astype(np.float32))
        pending, batch = pending.batch(make_step(0, (0,), cut), token_weight_fn=token_weight_fn)
        is_last = pending.parallel.is_last_stage
        mine = [key for micro in batch.micro_batches for key in micro.rows] if is_last else []
        values = {key: np.full(pending.samples[key].num_masked, -0.5, np.float32) for key in mine}
        pending = pending.after(make_step(0, (0,), cut, keeps=((0, 0),), last_use=((0, 1),)), values)
        assert {sample.old_logprobs_from for sample in pending.samples.values()} <= {"cached"}
        assert pending.rows.keys == [(0, row) for row in range(8)]
        return list_rows(pending)

    found = run_ranks(body, 4, timeout=120)
    assert sorted(row for rows in {tuple(rows) for rows in found} for row in rows) == list(range(8))


LEFT_OUT = {"row 0 to 3": frozenset({"zero_std"}), "those and row 5": frozenset({"zero_std", "truncated"}), "all": None}


@pytest.mark.parametrize("max_tokens", [None, 14])
@pytest.mark.parametrize("which", LEFT_OUT)
def test_sample_buffer_rows_without_a_gradient_are_counted_but_not_computed(which, max_tokens):
    """On two ranks. A row that fills a micro-batch has no trained token."""

    def body(rank, world_size):
        pending, cut = start(rank, world_size, max_tokens=max_tokens)
        kinds = LEFT_OUT[which]
        if kinds is None:
            kinds = frozenset({"zero_advantage"})
            pending = dataclasses.replace(pending, rows=dataclasses.replace(pending.rows, is_zero_advantage=np.ones(ROWS, dtype=bool)))
        everything = pending.batch(make_step(0, range(4), cut), token_weight_fn=token_weight_fn)[1]
        pending, scorer = dataclasses.replace(pending, zero_gradient=kinds), RecordingScorer()
        slices = tuple((0, number) for number in range(4))
        pending = pending.with_old_logprobs(scorer, make_step(0, (), cut, old_logprob_slices=slices))
        scored = [row for (_, row), sample in pending.samples.items() if hasattr(sample, "old_logprobs")]
        pending, batch = pending.batch(make_step(0, range(4), cut), token_weight_fn=token_weight_fn)
        trained = {
            row: set(micro.token_weights[micro.sequence == place])
            for micro in batch.micro_batches
            for place, (_, row) in enumerate(micro.rows)
        }
        for name in ("num_sequences", "num_loss_tokens", "num_tokens", "num_contexts", "staleness", "lag"):
            assert np.array_equal(getattr(batch, name), getattr(everything, name))
        values = {key: np.full(int((m.sequence == i).sum()), -0.5, np.float32) for m in batch.micro_batches for i, key in enumerate(m.rows)}
        after = pending.after(make_step(0, range(4), cut, keeps=slices), values)
        kept = [row for (_, row), sample in after.samples.items() if getattr(sample, "old_logprobs_from", "") == "cached"]
        assert after.rows.keys == pending.rows.keys == [(0, row) for row in range(ROWS)]
        return sorted(scored), trained, sorted(kept), [sample.row for sample in after.to_save()], batch.num_left_out, batch.metrics

    found = run_ranks(body, 2, timeout=120)
    gone = {"row 0 to 3": {0, 1, 2, 3}, "those and row 5": {0, 1, 2, 3, 5}, "all": set(range(ROWS))}[which]
    expected, trained = sorted(set(range(ROWS)) - gone), found[0][1] | found[1][1]
    assert sorted(found[0][0] + found[1][0]) == sorted(found[0][2] + found[1][2]) == expected
    assert sorted(found[0][3] + found[1][3]) == list(range(ROWS)), "each is saved once"
    filling = {row for row, weights in trained.items() if not weights}
    assert filling <= gone and len(filling) == {4: 0, 5: 1, 16: 2}[len(gone)]
    lengths = {sample.row: len(sample.token_ids) for sample in make_samples()}
    assert sorted(lengths[row] for row in filling) == sorted(lengths[row] for row in gone)[: len(filling)], "the shortest"
    assert {row: weights for row, weights in trained.items() if weights} == {
        sample.row: {sample.num_masked / 1000} for sample in make_samples() if sample.row in expected
    }
    assert all(one[4] == len(gone) and one[5]["packing/computed_rows"] == 1 - len(gone) / ROWS for one in found)
    counts = {(one[5]["packing/completions"], one[5]["packing/computed_completions"]) for one in found}
    assert counts == {(ROWS, ROWS - len(gone))}, "of the whole step, without what fills a micro-batch"


def test_sample_buffer_shared_prefix_uses_experts_of_the_first_row():
    """Each micro-batch has other experts; both ranks score rows of one group."""

    def body(rank, world_size):
        pending, cut = start(rank, world_size)
        rows = dataclasses.replace(pending.rows, prefix=np.full(ROWS, 2), prompt_number=np.zeros(ROWS, dtype=np.int64))
        pending = dataclasses.replace(pending, rows=rows)

        def old_logprobs(micro_batches):
            experts = [np.full((micro.num_tokens, 3, 1), 10 * rank + micro.number, np.int16) for micro in micro_batches]
            return [np.zeros(len(micro.targets), np.float32) for micro in micro_batches], experts

        slices = tuple((0, number) for number in range(4))
        pending = pending.with_old_logprobs(SimpleNamespace(old_logprobs=old_logprobs), make_step(0, (), cut, old_logprob_slices=slices))
        return {row: sample.experts[:, 0, 0].tolist() for (_, row), sample in pending.samples.items()}

    by_rank = run_ranks(body, 2, timeout=120)
    assert all(by_rank) and sorted([*by_rank[0], *by_rank[1]]) == list(range(ROWS))
    for rank, rows in enumerate(by_rank):
        for experts in rows.values():
            assert experts[:2] == [0, 0], "what the first row has, in the first micro-batch of the first rank"
            assert all(expert // 10 == rank for expert in experts[2:-1]) and experts[-1] == -1


def test_sample_buffer_contradiction_to_schedule_is_an_error():
    def body(rank, world_size):
        pending, cut = start(rank, world_size)
        with pytest.raises(
            ValueError, match="row 0 of rollout 0 was sampled by version 0 .* the training schedule collects its rollout at version -1"
        ):
            pending.batch(make_step(3, (0,), cut, staleness=4), token_weight_fn=token_weight_fn)
        early = dataclasses.replace(pending, rows=dataclasses.replace(pending.rows, on_policy_version=np.ones(ROWS, dtype=np.int64)))
        with pytest.raises(ValueError, match="by version 0 and is on-policy at 1; the training schedule"):
            early.batch(make_step(2, (0,), cut), token_weight_fn=token_weight_fn)
        with pytest.raises(KeyError):
            pending.batch(make_step(0, (99,), cut), token_weight_fn=token_weight_fn)
        with pytest.raises(ValueError, match="trained at version 3 without old log-probs"):
            pending.batch(make_step(3, (0,), cut, staleness=3), token_weight_fn=token_weight_fn)

    run_ranks(body, 1)
