"""Sampling masks from vLLM's log-probs, and invalid ones."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.rollout.sampling_mask import TIES
from megatron_grpo.core.rollout.vllm_requests import logprobs_and_mask, num_asked
from megatron_grpo.core.trainer.generation import InvalidSamplingMaskError, check_sampling_mask
from megatron_grpo.core.types import TokenSequence

INF = -np.inf


def make_vllm_lists(*rows):
    """(id, probability) of the drawn token and of words told besides -> what vLLM's lists say."""
    ids = np.array([[word for word, _ in row] for row in rows], dtype=np.int32)
    with np.errstate(divide="ignore"):
        return ids, np.log(np.array([[p for _, p in row] for row in rows], dtype=np.float32))


def list_parts(kept: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in np.split(kept.ids, kept.at[1:-1])]


def test_sampling_mask_omits_excluded_tokens_and_contains_sampled_token_once():
    ids, logprobs = make_vllm_lists(
        [(7, 0.25), (3, 0.75), (7, 0.25), (1, 0.0), (2, 0.0)], [(3, 1.0), (3, 1.0), (9, 0.0), (1, 0.0), (4, 0.0)]
    )
    found, kept = logprobs_and_mask(ids, logprobs, 100)
    assert np.exp(found).tolist() == pytest.approx([0.25, 1.0]) and found.dtype == np.float32
    assert list_parts(kept) == [[7, 3], [3]] and kept.at.dtype == np.int64 and kept.ids.dtype == np.int32


def test_sampling_mask_with_ties_beyond_reported_tokens_uses_reported_ones():
    """Words as likely as the last one stay in vLLM's set; here it told of two of four, and the drawn token is a third."""
    ids, logprobs = make_vllm_lists([(5, 0.2), (1, 0.4), (2, 0.2)])
    (found,), kept = logprobs_and_mask(ids, logprobs, 100)
    assert list_parts(kept) == [[5, 1, 2]] and np.exp(found) == pytest.approx(0.2 / 0.8)
    (found,), kept = logprobs_and_mask(*make_vllm_lists([(1, 0.6), (1, 0.6), (0, 0.4)]), 2)  # all the words there are
    assert np.exp(found) == pytest.approx(0.6)
    assert (num_asked(5, 100), num_asked(5, 7)) == (5 + TIES, 7)


def make_sequence(kept: list[list[int]] | None) -> TokenSequence:
    whole = (
        SamplingMask.joined([SamplingMask(np.array([0, len(words)]), np.array(words, dtype=np.int32)) for words in kept])
        if kept is not None
        else None
    )
    return TokenSequence(
        token_ids=np.array([1, 2, 3, 4]), mask=np.array([False, False, True, True]),
        mask_offsets=whole and whole.at, mask_ids=whole and whole.ids,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([[3, 9], [4]], None),
        (None, "returned no sampling mask for the 2 tokens"),
        (
            [[3, 9], [5, 6]],
            "sampling mask of 2 token IDs for token 1 of a completion (4): the IDs must be distinct, include the token itself",
        ),
        ([[3, 9, 9], [4]], "sampling mask of 3 token IDs for token 0 of a completion (3)"),
        ([[3, *range(10, 20 + TIES)], [4]], f"be at most {1 + 8 + TIES} with top_k 8"),
    ],
)
def test_check_sampling_mask_requires_distinct_ids_with_sampled_token(kept, said):
    if said is None:
        return check_sampling_mask(make_sequence(kept), 8)
    with pytest.raises(InvalidSamplingMaskError, match=re.escape(said)):
        check_sampling_mask(make_sequence(kept), 8)


def test_sampling_mask_with_wrong_number_of_rows_raises():
    one = make_sequence([[3], [4], [5]])
    with pytest.raises(ValueError, match="the sampling mask has 3 rows and 3 token IDs; 2 rows are needed"):
        _ = one.sampling_mask
    with pytest.raises(InvalidSamplingMaskError, match="returned an incomplete sampling mask: the sampling mask has 3 rows") as caught:
        check_sampling_mask(one, 8)
    assert isinstance(caught.value, RunError), "of a sampler of one's own: a sentence, and no traceback"
    check_sampling_mask(TokenSequence(token_ids=np.array([1]), mask=np.array([False])), 8)  # an episode in which nothing was drawn


def test_sampling_mask_take_selects_rows():
    kept = SamplingMask(np.array([0, 2, 2, 3]), np.array([7, 8, 9], dtype=np.int32))
    taken = kept.take(np.array([2, 0, 1, 2]))
    assert taken.at.tolist() == [0, 1, 3, 3, 4] and taken.ids.tolist() == [9, 7, 8, 9]
    joined = SamplingMask.joined([kept, SamplingMask.unfiltered(2), taken])
    assert joined.counts.tolist() == [2, 0, 1, 0, 0, 1, 2, 0, 1] and joined.ids.tolist() == [7, 8, 9, 9, 7, 8, 9]
