"""The protocol of reward functions: arguments, return values and lookup by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import BUILT_IN, check_columns, load_rewards
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction, RewardStats, RowFailure, as_score, as_scores, read_text
from megatron_grpo.run.rewards.scoring import score


def make_batch(completions=("a", "b"), **columns):
    return RewardBatch(
        prompts=["p"] * len(completions),
        completions=completions,
        completion_ids=[(1, 2)] * len(completions),
        columns=columns,
        labels=[f"row {row}" for row in range(len(completions))],
        trainer_state={"step": 3},
    )


def load(*specs, **settings):
    return load_rewards(Config().with_values({"reward_funcs": list(specs), **settings}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (None, None), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array([2.0]), 2.0),
     (torch.tensor(0.25), 0.25), (torch.tensor([1]), 1.0)],
)  # fmt: skip
def test_reward_scores_accept_numbers_of_any_library(value, expected):
    assert as_score(value) == expected


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [("1.0", "type", "returned the str '1.0', expected a number or None,"), (float("nan"), "not finite", "returned nan"),
     (float("-inf"), "not finite", "returned -inf"), ([1.0], "type", "returned the list"), (np.nan, "not finite", "returned nan"),
     pytest.param(10**400, "not finite", "returned inf", id="a huge integer"), (-1e308, "too large", "returned -1e+308, which exceeds"),
     (1j, "type", "returned the complex"), (torch.zeros(2), "type", "returned the Tensor")],
)  # fmt: skip
def test_reward_score_that_is_not_a_number_is_a_row_failure(value, kind, reason):
    failure = as_score(value)
    assert isinstance(failure, RowFailure) and failure.kind == kind and failure.reason.startswith(reason)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [([1.0], "returned 1 value for 2 completions"), (1.0, "returned the float 1.0, expected a list of 2 numbers,"),
     (None, "returned the NoneType None, expected a list"),
     ("12", "returned the str '12', expected a list"), ({0: 1, 1: 2}, "returned the dict")],
)  # fmt: skip
def test_reward_return_of_wrong_length_is_a_call_failure(returned, reason):
    failure = as_scores(returned, 2)
    assert isinstance(failure, RowFailure) and failure.reason.startswith(reason)


@pytest.mark.parametrize("returned", [[1, None], (1, None), np.array([1.0, 0.5]), torch.tensor([1.0, 0.5])])
def test_lists_tuples_arrays_and_tensors_are_lists_of_scores(returned):
    assert as_scores(returned, 2)[0] == 1.0


def test_reward_function_receives_arguments_of_its_signature_only():
    seen = {}

    def everything(**kwargs):
        seen["everything"] = set(kwargs)
        return [0, 0]

    def some(completions, answer, trainer_state):
        seen["some"] = (completions, answer, trainer_state)
        return [0, 0]

    def optional(completions, completion_ids=None, absent="default"):
        seen["optional"] = (completion_ids, absent)
        return [0, 0]

    functions = [RewardFunction(name=f.__name__, function=f, timeout=5) for f in (everything, some, optional)]
    score(functions, make_batch(answer=[7, 8], note=["x", "y"]))
    assert seen["everything"] == {"prompts", "completions", "completion_ids", "trainer_state", "answer", "note"}
    assert seen["some"] == (["a", "b"], [7, 8], {"step": 3})
    assert seen["optional"] == ([[1, 2], [1, 2]], "default")


def test_reward_text_of_string_and_chat_completions():
    assert read_text("hello") == read_text([{"role": "assistant", "content": "hello"}]) == "hello"


def test_reward_functions_load_from_file_package_and_built_in_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import helper\n"
        "def plain(completions, **columns): return [helper.VALUE] * len(completions)\n"
        "async def later(completions): return [2] * len(completions)\n"
        "class Plugin:\n    def __call__(self, completions, **kwargs): return [3] * len(completions)\n"
    )
    (tmp_path / "helper.py").write_text("VALUE = 1\n")
    file = tmp_path / "mine.py"
    functions = load(f"{file}:plain", f"{file}:later", f"{file}:Plugin", "length", "format")
    assert [function.name for function in functions] == ["plain", "later", "Plugin", "length", "format"]
    assert [function.is_async for function in functions] == [False, True, False, False, False]
    assert score(functions[:3], make_batch()).rows == ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))


def test_functions_load_from_a_module_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "reward_package").mkdir()
    (tmp_path / "reward_package" / "rules.py").write_text("def constant(completions): return [4] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert score(load("reward_package.rules:constant"), make_batch()).rows == ((4.0,), (4.0,))


def test_reward_functions_with_equal_names_have_distinct_metric_names(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("def reward(completions): return [0] * len(completions)\n")
    functions = load(f"{tmp_path}/one.py:reward", f"{tmp_path}/two.py:reward", "length")
    assert [function.name for function in functions] == ["one.reward", "two.reward", "length"]


def test_an_unknown_name_suggests_the_nearest_built_in():
    with pytest.raises(ConfigError, match="Unknown built-in reward 'mth'. Did you mean math?") as error:
        load("mth")
    assert error.value.problems[0].nearest == {"reward_funcs": ["math"]}
    assert all(name in str(error.value) for name in BUILT_IN)


def test_reward_file_without_function_is_rejected_with_existing_ones(tmp_path):
    (tmp_path / "mine.py").write_text("from math import sqrt\ndef score_all(completions): ...\ndef other(completions): ...\n")
    with pytest.raises(ConfigError, match="has no function 'score'. Did you mean score_all\\? It has score_all, other.$"):
        load(f"{tmp_path}/mine.py:score")
    with pytest.raises(ConfigError, match="For a function of that file: .*mine.py:function"):
        load(f"{tmp_path}/mine.py")


def test_load_rewards_reports_all_problems_together(tmp_path):
    (tmp_path / "broken.py").write_text("1/0\n")
    with pytest.raises(ConfigError) as error:
        load("mth", f"{tmp_path}/broken.py:f", f"{tmp_path}/gone.py:f", "no.such.module:f", "length", "length")
    text = "\n".join(problem.message for problem in error.value.problems)
    for part in ("names length more than once", "'mth'", "ZeroDivisionError: division by zero",
                 "does not exist in", "No module named 'no'"):  # fmt: skip
        assert part in text


def test_load_rewards_without_functions_is_rejected():
    with pytest.raises(ConfigError, match="reward_funcs is empty"):
        load()


def test_reward_column_missing_in_dataset_is_rejected_before_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, difficulty, weight=1): ...\ndef g(completions, **columns): ...\n")
    functions = load(f"{tmp_path}/mine.py:f", f"{tmp_path}/mine.py:g", "accuracy", "length")
    with pytest.raises(ConfigError) as error:
        check_columns(functions, ["level"])
    assert [problem.message for problem in error.value.problems] == [
        "Reward `f` needs the column `difficulty`; the data set has `level`.",
        "Reward `accuracy` needs the column `answer` or `solution`; the data set has `level`.",
    ]
    check_columns(functions, ["difficulty", "solution"])
    with pytest.raises(ConfigError, match="Use --columns answer=reward_model.ground_truth for a value inside a column"):
        check_columns(functions[2:], ["reward_model"], nested=["reward_model.style", "reward_model.ground_truth"])


def test_reward_scores_equal_up_to_rounding_are_constant():
    constant, varied = RewardStats(), RewardStats()
    alike = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1] * 4
    assert constant.take(alike) is None and "has returned 0.6 for all 16 completions" in (constant.take(alike) or "")
    assert varied.take(alike) is None and varied.take([*alike, 0.6001]) is None
