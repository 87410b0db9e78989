"""Which gradients the optimizer may use."""

from __future__ import annotations

import math

import pytest

from megatron_grpo.policy.guard import FiniteGuard, Gradient


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_no_number_ends_the_run_and_says_which_weights_are_left(norm):
    with pytest.raises(FloatingPointError, match=f"optimizer step 8 is {norm}.*not used it: the weights are those after step 7"):
        FiniteGuard().allows(Gradient(step=7, norm=norm))


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e30])
def test_any_other_norm_may_be_used(norm):
    assert FiniteGuard().allows(Gradient(step=0, norm=norm)) is True
