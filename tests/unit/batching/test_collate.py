"""The packed stream of a micro-batch: positions, segments, targets and padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.core.batching.collate import collate
from megatron_grpo.core.batching.prefix_groups import Alignment, PrefixGroup
from megatron_grpo.core.types import Segment, TokenSequence


def make_sequence(*token_ids: int, prompt: int = 1, starts: tuple[int, ...] = (0,)) -> TokenSequence:
    return TokenSequence(token_ids=np.array(token_ids), mask=np.arange(len(token_ids)) >= prompt, starts=starts)


def test_collate_concatenates_sequences_without_last_tokens():
    batch = collate([make_sequence(4, 5, 6), make_sequence(7, 8, 9, 4, prompt=2)])
    assert batch.token_ids.tolist() == [4, 5, 7, 8, 9] and batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.segments == (Segment(start=0, end=2, length=2), Segment(start=2, end=5, length=3))
    assert batch.logit_positions.tolist() == [0, 1, 3, 4] and batch.targets.tolist() == [5, 6, 9, 4]


def test_collate_sequence_of_one_token_makes_row_without_segment():
    batch = collate([make_sequence(4), make_sequence(7, 8), make_sequence(5)])
    assert batch.num_sequences == 3 and batch.sequence.tolist() == [1]
    assert batch.segments == (Segment(start=0, end=1, length=1),)


@pytest.mark.parametrize("alignment", [Alignment(), Alignment(sequence=4, stream=6)])
def test_collate_with_nothing_to_compute_returns_padding(alignment):
    batch = collate([make_sequence(4), make_sequence(5)], alignment=alignment)
    length = alignment.grain
    assert alignment.count_stream(0) == batch.num_tokens == batch.num_padding_tokens == length
    assert batch.segments == (Segment(start=0, end=length, length=0),) and len(batch.targets) == 0 and batch.num_sequences == 2


def test_collate_restarts_positions_per_context_and_keeps_row_order_of_targets():
    """Two contexts, (1 2 3) and (1 2 9 4), then a row of one. The last token of each predicts nothing; the shortest lie first."""
    two = TokenSequence(token_ids=np.array([1, 2, 3, 1, 2, 9, 4]), mask=np.array([0, 0, 1, 0, 0, 0, 1], bool), starts=(0, 3))
    batch = collate([two, make_sequence(7, 8)], alignment=Alignment(sequence=2))
    assert batch.token_ids.tolist() == [7, 0, 1, 2, 1, 2, 9, 0] and batch.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert batch.num_references.tolist() == [1, 0, 1, 1, 1, 1, 1, 0]
    assert batch.logit_positions.tolist() == [3, 6, 0] and batch.targets.tolist() == [3, 4, 8] and batch.sequence.tolist() == [0, 0, 1]
    assert (batch.num_sequences, batch.num_contexts) == (2, 3)
    assert [segment.length for segment in batch.segments] == [1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_collate_aligns_forced_experts_with_computed_tokens(data):
    """Rows of one or two contexts, some without experts; what they begin with is shared, as far as tokens and experts agree."""
    draw = data.draw
    rng, alignment = np.random.default_rng(draw(st.integers(0, 99))), Alignment(sequence=draw(st.sampled_from([1, 4])), stream=2)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
        tokens = np.concatenate([[1, 2, 3, *rng.integers(4, 6, 9)][:length] for length in lengths])
        experts = rng.integers(-1, 2, (len(tokens), 2, 1)).astype(np.int16)
        experts[: min(2, lengths[0])] = 0
        starts = (0, *np.cumsum(lengths)[:-1].tolist())
        rows.append(
            TokenSequence(token_ids=tokens, mask=np.zeros(len(tokens), bool), starts=starts, experts=draw(st.sampled_from([experts, None])))
        )
    batch = collate(rows, alignment=alignment, prefix_groups=[PrefixGroup(tuple(range(len(rows))), 0, 0.0)])
    of_rows = np.split(batch.places, np.cumsum([len(row.token_ids) for row in rows])[:-1])
    used = np.zeros(batch.num_tokens, dtype=int)
    for row, places in zip(rows, of_rows, strict=True):
        last = [end - 1 for _, end in row.contexts]
        assert np.flatnonzero(places < 0).tolist() == last, "the last token of a context is not computed"
        here = places >= 0
        assert (batch.token_ids[places[here]] == row.token_ids[here]).all()
        if row.experts is not None:
            assert (batch.experts[places[here]] == row.experts[here]).all()
        elif batch.experts is not None:
            assert (batch.experts[places[here]] == -1).all()
        np.add.at(used, places[here], 1)
    assert (used == batch.num_references).all()
    if all(row.experts is None for row in rows):
        assert batch.experts is None
    else:
        assert (batch.experts[batch.is_padding] == -1).all()
