"""Token weights: by hand, and with each filter."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.core.grpo.loss import NORMALISATIONS, token_weights

# Trained tokens of three completions.
NUM_MASKED = [2, 1, 4]


def compute_weights(loss_type, *, is_truncated=(False,) * 3, is_zero_std=(False,) * 3, **settings):
    return token_weights(
        NUM_MASKED, loss_type=loss_type, is_truncated=is_truncated, is_zero_std=is_zero_std, max_completion_length=10, **settings
    )


def list_token_weights(result):
    """The weight of a trained token of each completion."""
    assert result.row_weights.dtype == np.float64
    return result.row_weights.tolist()


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", [1 / 6, 1 / 3, 1 / 12]),
        ("sapo", [1 / 6, 1 / 3, 1 / 12]),
        ("dapo", [1 / 7] * 3),
        ("bnpo", [1 / 7] * 3),
        ("cispo", [1 / 7] * 3),
        ("dr_grpo", [1 / 30] * 3),
        ("sequence_sum", [1 / 3] * 3),
    ],
)
def test_token_weights_by_hand(loss_type, expected):
    result = compute_weights(loss_type)
    assert list_token_weights(result) == pytest.approx(expected, rel=1e-15)
    assert (result.num_sequences, result.num_loss_tokens) == (3, 7)


def test_token_weights_with_overlong_filter_keep_row_count():
    result = compute_weights("grpo", is_truncated=(False, False, True), overlong_filter=True)
    assert list_token_weights(result) == pytest.approx([1 / 6, 1 / 3, 0.0])
    assert (result.num_sequences, result.num_loss_tokens) == (3, 3)
    assert list_token_weights(compute_weights("dapo", is_truncated=(False, False, True), overlong_filter=True)) == pytest.approx(
        [1 / 3, 1 / 3, 0.0]
    )


def test_token_weights_exclude_zero_std_groups_from_count():
    result = compute_weights("grpo", is_zero_std=(False, False, True), exclude_zero_std_groups=True)
    assert list_token_weights(result) == pytest.approx([1 / 4, 1 / 2, 0.0])
    assert (result.num_sequences, result.num_loss_tokens) == (2, 3)


def test_token_weights_ignore_flags_without_filter():
    result = compute_weights("grpo", is_truncated=(True,) * 3, is_zero_std=(True,) * 3)
    assert list_token_weights(result) == list_token_weights(compute_weights("grpo"))


@pytest.mark.parametrize("loss_type", NORMALISATIONS)
def test_token_weights_of_fully_filtered_batch_are_zero(loss_type):
    for settings in (
        {"is_zero_std": (True,) * 3, "exclude_zero_std_groups": True},
        {"is_truncated": (True,) * 3, "overlong_filter": True},
    ):
        result = compute_weights(loss_type, **settings)
        assert result.num_loss_tokens == 0
        assert (result.row_weights == 0).all()


def test_token_weights_count_completions_without_trained_tokens():
    result = token_weights([2, 0], loss_type="grpo", is_truncated=(False, False), is_zero_std=(False, False), max_completion_length=2)
    assert result.row_weights.tolist() == [0.25, 0.0] and result.num_sequences == 2


@pytest.mark.parametrize("loss_type", NORMALISATIONS)
def test_token_weights_of_single_token_by_hand(loss_type):
    result = token_weights([1], loss_type=loss_type, is_truncated=[False], is_zero_std=[False], max_completion_length=8)
    assert result.row_weights.tolist() == [1 / 8 if loss_type == "dr_grpo" else 1.0]
