"""Log-probs that no distribution has."""

from __future__ import annotations

import math

import pytest

from megatron_grpo.rollout.logprobs import ImpossibleLogprobs, first_impossible, is_refused, refuse_impossible
from megatron_grpo.types import Completion, Group, Prompt

NAN, INF = math.nan, math.inf


def group(number: int, *logprobs: tuple[float, ...]) -> Group:
    completions = tuple(
        Completion(token_ids=tuple(range(4, 4 + len(one))), logprobs=one, text="", finish_reason="stop") for one in logprobs
    )
    return Group(prompt=Prompt(number=number, row=10 + number, raw="", token_ids=(4,), columns={}), completions=completions, version=0)


@pytest.mark.parametrize(
    ("logprobs", "place"),
    [((-1.0, NAN), 1), ((-INF, -1.0), 0), ((-1.0, -2.0, 0.01), 2), ((INF,), 0), ((0.0, -0.0, -1e4, 1e-6), None), ((), None)],
)
def test_the_first_log_prob_that_no_distribution_has_is_found(logprobs, place):
    assert first_impossible(logprobs) == place


def test_one_such_log_prob_costs_its_completion_all_of_them_and_is_named():
    good = group(3, (-1.0, -2.0), (-0.5,))
    kept, said = refuse_impossible([good, group(4, (-1.0,), (-0.5, -INF, -1.0), (0.5,))])
    assert kept[0] == good and kept[1].completions[0].logprobs == (-1.0,)
    assert [is_refused(one) for each in kept for one in each.completions] == [False, False, False, True, True]
    refused = kept[1].completions[1]
    assert refused.token_ids == (4, 5, 6) and len(refused.logprobs) == 3 and all(map(math.isnan, refused.logprobs))
    assert said == (
        "2 of 5 completions have a log-prob that no distribution has (the first: completion 1 of prompt 4 (row 14 of the data), "
        "token 2 of 3: -inf): nothing of them is trained"
    )


def test_good_groups_pass_in_silence():
    groups = [group(0, (-1.0,), ()), group(1, (0.0,))]
    assert refuse_impossible(groups) == (groups, None) and refuse_impossible([]) == ([], None)


def test_where_every_completion_is_refused_the_run_ends():
    with pytest.raises(ImpossibleLogprobs, match="2 of 2 completions .*prompt 0 .*token 1 of 1: nan.*weights or its arithmetic are broken"):
        refuse_impossible([group(0, (NAN,), (1.0,))])
