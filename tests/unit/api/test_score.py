"""`score` on recorded completions, against the scores of a run."""

from __future__ import annotations

import pytest

from megatron_grpo import score
from megatron_grpo.core.base.errors import ConfigError, RewardError

ROWS = [{"prompt": "2+2", "completion": "4", "answer": "4"}, {"prompt": "2+3", "completion": "<b>6</b>", "answer": "5"}]


def correct(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]


def short(completions):
    return [None if len(text) > 3 else 1.0 for text in completions]


def test_each_row_has_the_score_of_each_function_and_their_weighted_sum():
    table = score([correct, short], ROWS, {"reward_weights": [2.0, 1.0]})
    assert table.names == ("correct", "short") and len(table) == 2
    assert [*table] == [{**ROWS[0], "correct": 1.0, "short": 1.0, "reward": 3.0}, {**ROWS[1], "correct": 0.0, "short": None, "reward": 0.0}]


def test_built_in_rewards_and_lambdas_work():
    assert score("accuracy", [{"completion": "<answer>4</answer>", "solution": "4"}])[0]["accuracy"] == 1.0
    assert score(lambda completions: [2.0 for _ in completions], ROWS)[0]["reward"] == 2.0


def test_score_failure_equals_failure_of_a_run():
    def fails(completions):
        return [1 / (len(text) - 1) for text in completions]

    with pytest.raises(RewardError, match="Reward `fails` raised ZeroDivisionError.* on row 0"):
        score(fails, ROWS)
    assert [row["fails"] for row in score(fails, ROWS, {"reward_on_error": "none"})] == [None, 1 / 7]


@pytest.mark.parametrize(
    ("rewards", "rows", "why"),
    [
        (correct, [{"completion": "4"}], "needs the column `answer`"),
        (correct, [ROWS[0], {"answer": "4"}], "row 1 has no `completion` \\(1 of 2 rows have none\\)"),
        ([], ROWS, "reward_funcs is empty"),
    ],
)
def test_score_with_wrong_arguments_raises_config_error(rewards, rows, why):
    with pytest.raises(ConfigError, match=why):
        score(rewards, rows)


def test_score_html_table_escapes_completions():
    page = score(correct, ROWS)._repr_html_()
    assert "&lt;b&gt;6&lt;/b&gt;" in page and "<b>" not in page and "Scores of 2 completions" in page
