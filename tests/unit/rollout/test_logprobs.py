"""Log-probs that no distribution has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_grpo.rollout.logprobs import ImpossibleLogprobs, first_impossible, refuse_impossible, warning_of
from megatron_grpo.types import Group, Prompt, answered

NAN, INF = math.nan, math.inf


def group(number: int, *logprobs: tuple[float, ...]) -> Group:
    completions = tuple(answered((4,), range(4, 4 + len(one)), one, text="", ended="stop", version=0) for one in logprobs)
    return Group(prompt=Prompt(number=number, row=10 + number, raw="", token_ids=(4,), columns={}), completions=completions)


@pytest.mark.parametrize(
    ("logprobs", "place"),
    [((-1.0, NAN), 1), ((-INF, -1.0), 0), ((-1.0, -2.0, 0.01), 2), ((INF,), 0), ((0.0, -0.0, -1e4, 1e-6), None), ((), None)],
)
def test_the_first_log_prob_that_no_distribution_has_is_found(logprobs, place):
    assert first_impossible(np.float32(logprobs)) == place


def test_one_such_log_prob_costs_its_completion_all_of_them_and_is_named():
    good = group(3, (-1.0, -2.0), (-0.5,))
    kept, found = refuse_impossible([good, group(4, (-1.0,), (-0.5, -INF, -1.0), (0.5,))])
    assert kept[0].completions == good.completions and kept[1].completions[0].logprobs.tolist() == [0.0, -1.0]
    assert [one.is_refused for each in kept for one in each.completions] == [False, False, False, True, True]
    refused = kept[1].completions[1]
    assert refused.answer_ids == (4, 5, 6) and refused.logprobs.dtype == np.float32
    assert np.isnan(refused.logprobs).tolist() == [False, True, True, True]
    assert warning_of(found, 5) == (
        "2 of 5 completions have a log-prob that no distribution has (the first: completion 1 of prompt 4 (row 14 of the data), "
        "token 2 of 3: -inf): nothing of them is trained"
    )


def test_good_groups_pass_in_silence():
    groups = [group(0, (-1.0,), ()), group(1, (0.0,))]
    kept, found = refuse_impossible(groups)
    assert [one.completions for one in kept] == [one.completions for one in groups] and warning_of(found, 3) is None


def test_where_every_completion_is_refused_the_run_ends():
    _, found = refuse_impossible([group(0, (NAN,), (1.0,))])
    with pytest.raises(ImpossibleLogprobs, match="2 of 2 completions .*prompt 0 .*token 1 of 1: nan.*weights or its arithmetic are broken"):
        warning_of(found, 2)
