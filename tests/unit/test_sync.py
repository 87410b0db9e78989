"""What the check after a push says, from differences made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.sync import _problem, _Report
from megatron_grpo.weights.update import NO_VERSION


def report(fresh=0.0, cached=0.0, version=3):
    return _Report(version=version, fresh=np.full(10, fresh), cached=np.full(4, cached))


def test_small_differences_pass():
    assert _problem([report(fresh=1e-4, cached=1e-4)] * 2, 3, is_coarse=False) is None
    assert _problem([report(fresh=0.1, cached=0.3)] * 2, 3, is_coarse=True) is None


def test_float32_is_bounded_by_its_worst_token_and_bfloat16_by_means():
    one_bad = report()
    one_bad.fresh[3] = 0.6
    assert "max 0.6" in _problem([one_bad], 3, is_coarse=False)
    assert _problem([one_bad], 3, is_coarse=True) is None  # a router may flip one token
    assert _problem([report(fresh=0.3)], 3, is_coarse=True)
    assert _problem([report(cached=0.5)], 3, is_coarse=True)  # 4 of 14 tokens: an overall mean would hide them


@pytest.mark.parametrize("is_coarse", [False, True])
def test_nan_is_not_a_small_difference(is_coarse):
    assert _problem([report(fresh=float("nan"))], 3, is_coarse=is_coarse)
    assert _problem([report(cached=float("nan"))], 3, is_coarse=is_coarse)


def test_hint_follows_from_where_it_is_wrong():
    assert "prefix cache differ: it was not reset" in _problem([report(cached=2.0)] * 2, 3, is_coarse=False)
    assert "only some ranks are wrong" in _problem([report(), report(fresh=2.0)], 3, is_coarse=False)
    assert "every engine is wrong" in _problem([report(fresh=2.0)] * 2, 3, is_coarse=False)
    assert "{1: 2}" in _problem([report(), report(version=2)], 3, is_coarse=False)


def test_trial_is_called_by_its_name_and_its_hint_says_what_an_engine_may_have_done():
    assert _problem([report(version=NO_VERSION)], NO_VERSION, is_coarse=False) is None
    problem = _problem([report(fresh=2.0, version=NO_VERSION)] * 2, NO_VERSION, is_coarse=False)
    assert "does not sample from the trial adapter" in problem and problem.endswith("or the adapter is ignored.")
    assert "ignored" not in _problem([report(fresh=2.0)] * 2, 3, is_coarse=False)
