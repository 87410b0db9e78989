"""Prefix groups: a shared beginning is computed once, and each trained token sees the same tokens as without sharing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.arrays import SequenceLengths
from megatron_grpo.core.batching.collate import collate
from megatron_grpo.core.batching.prefix_groups import Alignment, ContextSpan, PrefixGroup, common_prefix, find_prefix, list_contexts
from megatron_grpo.core.batching.split import BatchPartitioner, MicroBatchSpec, partition, partition_for_scoring, partition_padded
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.types import MicroBatch, Segment, TokenSequence

ANY_SAVING = 0.0


def make_sequence(*token_ids: int, prompt: int = 1) -> TokenSequence:
    return TokenSequence(token_ids=np.array(token_ids), mask=np.arange(len(token_ids)) >= prompt)


def collate_shared(*sequences: TokenSequence, prefix: int = 0, min_saving_ratio: float = ANY_SAVING, **more) -> MicroBatch:
    return collate(sequences, prefix_groups=[PrefixGroup(tuple(range(len(sequences))), prefix, min_saving_ratio)], **more)


def test_prefix_group_computes_prompt_once_and_predicts_all_first_tokens_from_it():
    """Prompt (1 2 3); completions (4 5 6), (7 8) and (9)."""
    batch = collate_shared(
        make_sequence(1, 2, 3, 4, 5, 6, prompt=3), make_sequence(1, 2, 3, 7, 8, prompt=3), make_sequence(1, 2, 3, 9, prompt=3)
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 7, 4, 5] and batch.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert batch.num_references.tolist() == [3, 3, 3, 1, 1, 1]
    shared_prefix, short, long = batch.segments
    assert shared_prefix == Segment(start=0, end=3, length=3) and (short.parent, long.parent) == (0, 0)
    assert batch.logit_positions.tolist() == [2, 4, 5, 2, 3, 2] and batch.targets.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1, 2]


def test_prefix_group_shares_equal_beginnings_of_completions():
    batch = collate_shared(make_sequence(1, 2, 7, 7, 4), make_sequence(1, 2, 7, 7, 5))
    assert batch.segments == (Segment(start=0, end=4, length=4),) and batch.logit_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_shared_prefix_ends_at_first_differing_token():
    """A date, a picture, a turn that was cut: the number of the group says nothing of it."""
    batch = collate_shared(make_sequence(1, 2, 3, 4, 5, 6), make_sequence(1, 9, 3, 4, 5, 6))
    assert [segment.length for segment in batch.segments] == [1, 4, 4]
    assert (
        collate_shared(make_sequence(1, 2, 3), make_sequence(9, 2, 3)).segments
        == collate([make_sequence(1, 2, 3), make_sequence(9, 2, 3)]).segments
    )


def test_prefix_group_with_differing_tokens_in_prefix_raises():
    with pytest.raises(ValueError, match=r"rows \(0, 1\) must share a prefix of 3 tokens; only 1 are equal"):
        collate_shared(make_sequence(1, 2, 3, 4, 5), make_sequence(1, 9, 3, 4, 5), prefix=3)


def test_shared_prefix_ends_at_differing_images_or_experts():
    def with_picture(key):
        return dataclasses.replace(make_sequence(1, 2, 3, 4, 5), images=((2, SimpleNamespace(key=key)),))

    def routed(*experts):
        return dataclasses.replace(make_sequence(1, 2, 3, 4, 5), experts=np.array(experts, dtype=np.int16).reshape(5, 1, 1))

    both = [ContextSpan(0, 0, 5, 4), ContextSpan(1, 0, 5, 4)]
    assert common_prefix([with_picture("a"), with_picture("a")], both) == 4
    assert (
        common_prefix([with_picture("a"), with_picture("b")], both)
        == common_prefix([with_picture("a"), make_sequence(1, 2, 3, 4, 5)], both)
        == 2
    )
    assert common_prefix([routed(0, 1, 0, 1, 0), routed(0, 1, 0, 0, 0)], both) == 3
    assert common_prefix([routed(-1, 1, 0, 1, 0), make_sequence(1, 2, 3, 4, 5)], both) == 1  # the first token routes freely in both


def test_prefix_group_below_min_saving_ratio_is_not_shared():
    rows = [make_sequence(1, *range(10, 30)), make_sequence(1, *range(40, 60))]
    assert len(collate_shared(*rows, min_saving_ratio=1 / 16).segments) == 2  # 39 tokens for 40
    assert len(collate_shared(*rows).segments) == 3
    aligned = collate_shared(make_sequence(1, 2, 3, 4), make_sequence(1, 2, 5, 6), alignment=Alignment(sequence=4))
    assert [segment.parent for segment in aligned.segments] == [-1, -1]  # 4 + 4 + 4 for 4 + 4


def test_find_prefix_returns_common_length_of_all_contexts():
    def completion(*token_ids: int):
        return make_completion((1, 2, 3), token_ids, [0.0] * len(token_ids), text="", finish_reason="stop", version=0)

    assert find_prefix([completion(4, 5), completion(6)]) == 3
    assert find_prefix([completion(4, 5), completion(4, 6)]) == 4
    assert find_prefix([completion(), completion(6, 7)]) == 2  # the last token of a context is not computed
    assert find_prefix([make_completion((1,), (), [], text="", finish_reason="stop", version=0)]) == 0


# ---- properties --------------------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Rows of up to three groups, each of one to three contexts that begin with the group's opening."""
    words = st.integers(1, 3)
    rows, lengths = [], []
    for group in range(draw(st.integers(1, 3))):
        opening = draw(st.lists(words, min_size=1, max_size=9))
        members = []
        for _ in range(draw(st.integers(1, 5))):
            tokens, mask, starts = [], [], []
            for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
                tail = draw(st.lists(words, min_size=0, max_size=7))
                starts.append(len(tokens))
                tokens += opening + tail
                mask += [False] * len(opening) + [True] * len(tail)
            members.append(TokenSequence(token_ids=np.array(tokens), mask=np.array(mask), starts=tuple(starts)))
        prefix = common_prefix(members, list_contexts(members))
        prefix *= draw(st.booleans())  # 0 where nobody knows it
        rows += members
        lengths += [SequenceLengths(tuple(end - begin for begin, end in one.contexts), (0, group), prefix) for one in members]
    return rows, lengths


def find_visible_tokens(batch: MicroBatch, place: int) -> list[tuple[int, int]]:
    """(token, position) of all that the hidden state at this place depends on, in order."""
    segment = next(one for one in batch.segments if one.start <= place < one.end)
    places = list(range(segment.start, place + 1))
    if segment.parent >= 0:
        parent = batch.segments[segment.parent]
        assert parent.parent == -1
        places = [*range(parent.start, parent.start + parent.length), *places]
    return [(int(batch.token_ids[at]), int(batch.positions[at])) for at in places]


def draw_partitioner(data, **more) -> BatchPartitioner:
    cp, tp = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    alignment = Alignment(sequence=2 * cp if cp > 1 else 1, stream=cp * tp)
    min_saving_ratio = data.draw(st.sampled_from([ANY_SAVING, 1 / 16, 0.3]))
    return BatchPartitioner(alignment=alignment, min_saving_ratio=min_saving_ratio, **more)


@given(data=st.data(), batch=batches(), is_packed=st.booleans(), dp_size=st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_prefix_sharing_keeps_visible_tokens_and_token_budget(data, batch, is_packed, dp_size):
    rows, lengths = batch
    budget = data.draw(st.integers(4, 60)) if is_packed else None
    cut = draw_partitioner(data, dp_size=dp_size, micro_batch_size=data.draw(st.integers(1, 4)), max_tokens=budget)
    dealt = partition_padded(lengths, cut)
    filled = [*rows, *[rows[0]] * (sum(len(micro_spec.rows) for mine in dealt for micro_spec in mine) - len(rows))]
    assert sorted(i for mine in dealt for micro_spec in mine for i in micro_spec.rows) == list(range(len(filled)))
    for micro_spec in (micro_spec for mine in dealt for micro_spec in mine):
        mine = [filled[i] for i in micro_spec.rows]
        found = collate(mine, alignment=cut.alignment, prefix_groups=micro_spec.prefix_groups, at_least=micro_spec.at_least)
        alone = collate(mine, alignment=cut.alignment)
        _assert_same_trained_tokens(found, alone)
        assert found.num_tokens <= micro_spec.num_tokens <= alone.num_tokens
        if budget is not None:  # what the longest row takes by itself is needed anyhow
            longest = max(collate([one], alignment=cut.alignment).num_tokens for one in rows)
            assert found.num_tokens <= max(budget // cut.alignment.grain * cut.alignment.grain, longest)


def _assert_same_trained_tokens(found: MicroBatch, alone: MicroBatch) -> None:
    assert (found.targets == alone.targets).all() and (found.sequence == alone.sequence).all()
    assert [find_visible_tokens(found, place) for place in found.logit_positions] == [
        find_visible_tokens(alone, place) for place in alone.logit_positions
    ]
    assert found.num_references.sum() == alone.num_references.sum() and found.num_contexts == alone.num_contexts
    order = [segment.parent for segment in found.segments if segment.length]
    children = [parent for parent in order if parent >= 0]
    assert children == sorted(children) and all(parent < len(order) for parent in order)
    assert [segment.start for segment in found.segments[1:]] == [segment.end for segment in found.segments[:-1]]


# ---- groups in micro-batches -------------------------------------------------------------------------------------------------------------


def convert_lengths(groups, prompt: int) -> list[SequenceLengths]:
    return [SequenceLengths((prompt + tokens,), (0, number), prompt) for number, group in enumerate(groups) for tokens in group]


def count_pieces(dealt: list[list[MicroBatchSpec]], lengths: list[SequenceLengths]) -> dict[object, int]:
    """group -> in how many micro-batches it is."""
    counts: dict[object, int] = {}
    for micro_spec in (micro_spec for mine in dealt for micro_spec in mine):
        for group in {lengths[i].group for i in micro_spec.rows}:
            counts[group] = counts.get(group, 0) + 1
    return counts


def test_partition_keeps_group_in_one_micro_batch_within_budget():
    lengths = convert_lengths([[20, 30, 10, 40]] * 6, prompt=100)  # 200 - 4 tokens and alignment each; 500 unshared
    dealt = partition(lengths, BatchPartitioner(dp_size=1, micro_batch_size=1, max_tokens=420, min_saving_ratio=1 / 16))
    assert set(count_pieces(dealt, lengths).values()) == {1} and [micro_spec.num_tokens for micro_spec in dealt[0]] == [392] * 3


def test_partition_splits_group_above_budget_into_fewest_pieces():
    lengths = convert_lengths([[50] * 8], prompt=100)
    dealt = partition(lengths, BatchPartitioner(dp_size=1, micro_batch_size=1, max_tokens=300, min_saving_ratio=1 / 16))
    assert (
        sorted(len(micro_spec.rows) for micro_spec in dealt[0]) == [4, 4] and max(micro_spec.num_tokens for micro_spec in dealt[0]) == 296
    )
    long = convert_lengths([[5, 40, 5, 5]], prompt=100)
    dealt = partition(long, BatchPartitioner(dp_size=1, micro_batch_size=1, max_tokens=30, min_saving_ratio=1 / 16))
    assert max(micro_spec.num_tokens for micro_spec in dealt[0]) == 139  # 100 + 40 - 1, what the longest takes by itself


def test_partition_splits_groups_that_would_leave_ranks_idle():
    lengths = convert_lengths([[400] * 8, [100] * 8], prompt=100)
    cut = BatchPartitioner(dp_size=4, micro_batch_size=1, max_tokens=8192, min_saving_ratio=1 / 16)
    loads = [sum(micro_spec.num_tokens for micro_spec in mine) for mine in partition(lengths, cut)]
    assert min(loads) > 0.8 * max(loads)
    few = convert_lengths([[5, 5]], prompt=100)
    dealt = partition(few, BatchPartitioner(dp_size=2, micro_batch_size=1, max_tokens=8192, min_saving_ratio=1 / 16))
    assert [[micro_spec.rows for micro_spec in mine] for mine in dealt] in ([[(0,)], [(1,)]], [[(1,)], [(0,)]])


def test_partition_without_sharing_treats_groups_as_rows():
    lengths = convert_lengths([[20, 30, 10, 40], [7, 8, 9, 50]], prompt=100)
    cut = BatchPartitioner(dp_size=2, micro_batch_size=1, max_tokens=300)
    alone = [row._replace(group=None, prefix=0) for row in lengths]
    sharing = dataclasses.replace(cut, min_saving_ratio=1 / 16)
    rows = [
        [[micro_spec.rows for micro_spec in mine] for mine in dealt]
        for dealt in (partition(lengths, cut), partition(alone, cut), partition(alone, sharing))
    ]
    assert rows[0] == rows[1] == rows[2]


def test_partition_spreads_incomplete_micro_batches_evenly_in_order():
    def rows_of(num_rows: int, **cut):
        cut = BatchPartitioner(dp_size=2, micro_batch_size=4, **cut)
        dealt = partition([SequenceLengths((3,))] * num_rows, cut)
        return [[micro_spec.rows for micro_spec in mine] for mine in dealt]

    assert rows_of(16) == [[(0, 1, 2, 3), (8, 9, 10, 11)], [(4, 5, 6, 7), (12, 13, 14, 15)]]
    assert rows_of(10) == [[(0, 1, 2), (6, 7)], [(3, 4, 5), (8, 9)]]
    assert rows_of(4, multiple=2) == [[(0,), (2,)], [(1,), (3,)]]
    with pytest.raises(ValueError, match="3 sequences cannot fill 2 ranks x 2 micro-batches"):
        rows_of(3, multiple=2)


@given(num_rows=st.integers(0, 40), dp_size=st.integers(1, 3), multiple=st.integers(1, 3), size=st.integers(1, 5), is_packed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_partition_with_missing_rows_leaves_no_micro_batch_empty(num_rows, dp_size, multiple, size, is_packed):
    cut = BatchPartitioner(dp_size=dp_size, micro_batch_size=size, multiple=multiple, max_tokens=7 if is_packed else None)
    missing = cut.num_missing(num_rows)
    assert missing < dp_size * multiple or not num_rows
    dealt = partition([SequenceLengths((5 + row % 4,)) for row in range(num_rows + missing)], cut)
    assert sorted(i for mine in dealt for micro_spec in mine for i in micro_spec.rows) == list(range(num_rows + missing))
    assert {len(mine) for mine in dealt} == {len(dealt[0])} and len(dealt[0]) % multiple == 0
    assert all(micro_spec.rows and (is_packed or len(micro_spec.rows) <= size) for mine in dealt for micro_spec in mine)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_partition_for_scoring_includes_each_probe_once(dp_size):
    probes = [SequenceLengths((66,))] * 4
    dealt = partition_for_scoring(probes, BatchPartitioner(dp_size=dp_size, micro_batch_size=64))
    assert sorted(i for mine in dealt for micro_spec in mine for i in micro_spec.rows) == [0, 1, 2, 3]


def test_partition_for_scoring_packs_larger_than_training():
    rows = [SequenceLengths((31,))] * 12  # the last token is a target alone

    def streams(**cut):
        return [
            [micro_spec.num_tokens for micro_spec in mine]
            for mine in partition_for_scoring(rows, BatchPartitioner(dp_size=2, scored_tokens=100, **cut))
        ]

    assert streams(micro_batch_size=1) == [[90, 90], [90, 90]]
    assert streams(micro_batch_size=2, max_tokens=60) == [[90, 90], [90, 90]]
    assert streams(micro_batch_size=1, max_tokens=120) == [[90, 90], [90, 90]] == streams(micro_batch_size=3)
    assert streams(micro_batch_size=6) == [[180], [180]], "never smaller than in training"
    assert streams(micro_batch_size=1, multiple=3) == [[60, 60, 60], [60, 60, 60]]
