"""One packed stream: what lies where, and that there always is one."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.batching.collate import collate, stream_length
from megatron_grpo.types import Sample, Segment


def sample(row: int, *token_ids: int, prompt: int = 1) -> Sample:
    mask = np.arange(len(token_ids)) >= prompt
    return Sample(row=row, rollout=0, prompt_number=0, version=0, token_ids=np.array(token_ids), loss_mask=mask,
                  sampler_logprobs=np.zeros(len(token_ids), np.float32), advantage=1.0, is_dead=False, is_truncated=False)  # fmt: skip


def packed(*samples: Sample, **align: int):
    return collate(samples, [np.ones(len(one.token_ids)) for one in samples], trained_at=0, **align)


def test_sequences_lie_end_to_end_without_their_last_tokens():
    batch = packed(sample(0, 4, 5, 6), sample(1, 7, 8, 9, 4, prompt=2))
    assert batch.token_ids.tolist() == [4, 5, 7, 8, 9] and batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.segments == (Segment(start=0, end=2), Segment(start=2, end=5))
    assert batch.predict_at.tolist() == [0, 1, 3, 4] and batch.targets.tolist() == [5, 6, 9, 4]


def test_a_sequence_of_one_token_is_a_row_and_no_segment():
    batch = packed(sample(0, 4), sample(1, 7, 8), sample(2, 5))
    assert batch.rows == ((0, 0), (0, 1), (0, 2)) and batch.sequence.tolist() == [1]
    assert batch.segments == (Segment(start=0, end=1),)


@pytest.mark.parametrize("align", [{}, {"align_sequence": 4, "align_stream": 6}])
def test_where_nothing_is_to_be_computed_the_stream_is_padding_and_is_never_empty(align):
    batch = packed(sample(0, 4), sample(1, 5), **align)
    length = 12 if align else 1
    assert stream_length([sample(0, 4)], **align) == batch.num_tokens == batch.num_padding_tokens == length
    assert batch.segments == (Segment(start=0, end=length),) and len(batch.targets) == 0 and batch.num_sequences == 2
