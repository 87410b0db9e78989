"""One packed stream: what lies where, and that there always is one."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.batching.alignment import Alignment
from megatron_grpo.batching.collate import collate
from megatron_grpo.types import Segment, Sequence


def sequence(*token_ids: int, prompt: int = 1, starts: tuple[int, ...] = (0,)) -> Sequence:
    return Sequence(token_ids=np.array(token_ids), mask=np.arange(len(token_ids)) >= prompt, starts=starts)


def test_sequences_lie_end_to_end_without_their_last_tokens():
    batch = collate([sequence(4, 5, 6), sequence(7, 8, 9, 4, prompt=2)])
    assert batch.token_ids.tolist() == [4, 5, 7, 8, 9] and batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.segments == (Segment(start=0, end=2, length=2), Segment(start=2, end=5, length=3))
    assert batch.predict_at.tolist() == [0, 1, 3, 4] and batch.targets.tolist() == [5, 6, 9, 4]


def test_a_sequence_of_one_token_is_a_row_and_no_segment():
    batch = collate([sequence(4), sequence(7, 8), sequence(5)])
    assert batch.num_sequences == 3 and batch.sequence.tolist() == [1]
    assert batch.segments == (Segment(start=0, end=1, length=1),)


@pytest.mark.parametrize("alignment", [Alignment(), Alignment(sequence=4, stream=6)])
def test_where_nothing_is_to_be_computed_the_stream_is_padding_and_is_never_empty(alignment):
    batch = collate([sequence(4), sequence(5)], alignment=alignment)
    length = alignment.grain
    assert alignment.of_stream(0) == batch.num_tokens == batch.num_padding_tokens == length
    assert batch.segments == (Segment(start=0, end=length, length=0),) and len(batch.targets) == 0 and batch.num_sequences == 2


def test_every_context_begins_anew_and_trained_tokens_stay_in_the_order_of_rows():
    """Two contexts, (1 2 3) and (1 2 9 4), then a row of one. The last token of each predicts nothing; the shortest lie first."""
    two = Sequence(token_ids=np.array([1, 2, 3, 1, 2, 9, 4]), mask=np.array([0, 0, 1, 0, 0, 0, 1], bool), starts=(0, 3))
    batch = collate([two, sequence(7, 8)], alignment=Alignment(sequence=2))
    assert batch.token_ids.tolist() == [7, 0, 1, 2, 1, 2, 9, 0] and batch.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert batch.multiplicity.tolist() == [1, 0, 1, 1, 1, 1, 1, 0]
    assert batch.predict_at.tolist() == [3, 6, 0] and batch.targets.tolist() == [3, 4, 8] and batch.sequence.tolist() == [0, 0, 1]
    assert (batch.num_sequences, batch.num_contexts) == (2, 3)
    assert [segment.length for segment in batch.segments] == [1, 2, 3]
