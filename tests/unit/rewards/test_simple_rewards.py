"""accuracy, format, length, soft_overlong, repetition and cosine, by hand and against TRL."""

from __future__ import annotations

import math
import random

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.plugins.rewards.answers import final_answer, last_boxed, same_answer
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import close_rewards, load_rewards


def load_built_in(name, **settings):
    return load_rewards(Config().with_values({"reward_funcs": [name], **settings}))[0].function


@pytest.mark.parametrize(
    ("text", "answer"),
    [("42", "42"), ("  42\n", "42"), ("first \\boxed{1}, then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("so 6*7\n#### 42", "42"),
     ("The answer is 42.", "42."), ("Answer: Paris", "Paris"), ("<think>\\boxed{1}</think>\\boxed{2}", "2"),
     ("<think>no</think><answer> yes </answer>", "yes"), ("\\boxed{cut", "\\boxed{cut"), ("", "")],
)  # fmt: skip
def test_final_answer_is_extracted_from_text(text, answer):
    assert final_answer(text) == answer


def test_last_boxed_matches_braces():
    assert last_boxed("\\boxed{a{b}c} d}") == "a{b}c"
    assert last_boxed("\\boxed{a{b}") is None


@pytest.mark.parametrize(
    ("left", "right"),
    [("42", "42.0"), ("1,000", "1000"), ("Paris.", "paris"), ("$x^2$", "x^2"), ("007", "7"), ("a  b", "a b"), ("+3", "3")],
)
def test_equal_answers_in_different_notation_match(left, right):
    assert same_answer(left, right) and same_answer(right, left)


@pytest.mark.parametrize(("left", "right"), [("42", "43"), ("4.2", "42"), ("-3", "3"), ("1,00", "100"), ("", "0"), ("x", "X y")])
def test_different_answers_do_not_match(left, right):
    assert not same_answer(left, right)


def test_accuracy_is_one_for_the_right_final_answer_and_none_without_one():
    accuracy = load_built_in("accuracy")
    texts = ["7", "it is 7", "\\boxed{7}", "the answer is 7.", "8", "7", "lyon"]
    assert accuracy(completions=texts, answer=[7, 7, "7", "6+1 #### 7\n#### 7", 7, None, ["Paris", "Lyon"]]) == [1, 0, 1, 1, 0, None, 1]


def test_accuracy_uses_answer_or_solution_column_per_row():
    assert load_built_in("accuracy")(completions=["1", "2", "3"], answer=["1", None, None], solution=[None, "2", None]) == [1, 1, None]


def test_accuracy_prefers_answer_to_solution_and_obeys_answer_column():
    columns = {"answer": ["1"], "solution": ["2"], "label": ["3"]}
    assert load_built_in("accuracy")(completions=["1"], **columns) == [1]
    assert load_built_in("accuracy", answer_column="label")(completions=["3"], **columns) == [1]
    assert load_built_in("accuracy")(completions=[[{"role": "assistant", "content": "2"}]], solution=["2"]) == [1]


def test_exact_accuracy_compares_character_by_character():
    assert load_built_in("accuracy", accuracy_exact=True)(completions=["7", "7 ", "\\boxed{7}"], answer=["7"] * 3) == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "score"),
    [("<think>a</think><answer>b</answer>", 1), (" <think>\na\n</think>\n<answer>b</answer>\n", 1), ("<think>a</think>b", 0),
     ("x<think>a</think><answer>b</answer>", 0), ("<think>a</think><answer>b</answer> and more", 0),
     ("<think>a<think>b</think><answer>c</answer>", 0), ("<answer>b</answer><think>a</think>", 0),
     ("<think>a</think><answer>b</answer><answer>c</answer>", 0), ("<think></think><answer></answer>", 1)],
)  # fmt: skip
def test_format_requires_each_tag_once_in_order(text, score):
    assert load_built_in("format")(completions=[text]) == [score]


ASKED = [{"role": "user", "content": "What is 1+2? Use <think></think> and <answer></answer>."}]


@pytest.mark.parametrize(
    ("prompt", "opening", "text", "score"),
    [
        (ASKED, "user\nhi\nassistant\n<think>\n", "so\n</think>\n<answer>3</answer>", 1.0),
        (ASKED, "user\nhi\nassistant\n<think>\n", "<think>so</think><answer>3</answer>", 0.0),  # a second one
        (ASKED, "user\nhi\nassistant\n<think>\n", "so <answer>3</answer>", 0.0),
        (ASKED, "assistant\n<think>\n\n</think>\n\n", "<think>so</think><answer>3</answer>", 1.0),  # thinking switched off
        (ASKED, "assistant\n<think>\n\n</think>\n\n", "<answer>3</answer>", 0.0),
        (ASKED, "user\nhi\nassistant\n", "<think>so</think><answer>3</answer>", 1.0),
        (ASKED, "assistant\n<other>", "<think>so</think><answer>3</answer>", 1.0),
        ([*ASKED, {"role": "assistant", "content": "<think>\nFirst"}], "assistant\n", ", add.</think><answer>3</answer>", 1.0),
        ([*ASKED, {"role": "assistant", "content": "Well: "}], "assistant\n<think>", "<think>so</think><answer>3</answer>", 1.0),
        ("1+2=? <think>", "", "so</think><answer>3</answer>", 1.0),
        ("1+2=? Use <think></think>", "", "<think>so</think><answer>3</answer>", 1.0),  # an example, not the beginning
    ],
)
def test_format_counts_the_tag_that_the_prompt_has_opened(prompt, opening, text, score):
    [function] = load_rewards(Config().with_values({"reward_funcs": ["format"]}), opening=opening)
    completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    assert function.function(prompts=[prompt], completions=[completion]) == [score]


def test_format_of_episode_messages_includes_opened_tag():
    [function] = load_rewards(Config().with_values({"reward_funcs": ["format"]}), opening="assistant\n<think>\n")
    said = [{"role": "assistant", "content": "<think>\nso</think><answer>3</answer>"}]
    assert function.function(prompts=[ASKED], completions=[said], turn_rewards=[[]]) == [1.0]


def test_format_tags_can_be_chosen():
    assert load_built_in("format", format_tags=["plan", "code"])(completions=["<plan>a</plan> <code>b</code>", "<think>a</think>"]) == [
        1,
        0,
    ]
    with pytest.raises(ConfigError, match="format_tags"):
        load_built_in("format", format_tags=["<think>"])


def test_length_falls_by_one_per_max_completion_length():
    assert load_built_in("length", max_completion_length=100)(completion_ids=[[], [0] * 25, [0] * 100]) == [0, -0.25, -1]
    assert load_built_in("length", max_completion_length=100, length_target=50)(completion_ids=[[], [0] * 50, [0] * 60]) == [-0.5, 0, -0.1]
    with pytest.raises(ConfigError, match="length_target \\(300\\) must be between 0 and max_completion_length \\(100\\)"):
        load_built_in("length", max_completion_length=100, length_target=300)


def test_soft_overlong_is_a_ramp_before_the_limit():
    ramp = load_built_in("soft_overlong", max_completion_length=100, soft_cache_length=20)
    assert ramp(completion_ids=[[0] * size for size in (0, 80, 81, 90, 100)]) == [0, 0, -0.05, -0.5, -1]
    lower = load_built_in("soft_overlong", max_completion_length=100, soft_max_length=50, soft_cache_length=20)
    assert lower(completion_ids=[[0] * size for size in (30, 40, 50)]) == [0, -0.5, -1]


def test_soft_overlong_equals_trls():
    rewards = pytest.importorskip("trl.rewards")
    ids = [[0] * size for size in range(101)]
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=30)(ids)
    assert load_built_in("soft_overlong", max_completion_length=100, soft_cache_length=30)(completion_ids=ids) == pytest.approx(theirs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "needs soft_cache_length.*it is not given. A common value is a fifth of the limit, 20"),
     ({"soft_cache_length": 0}, "it is 0"), ({"soft_cache_length": 200}, "it is 200"),
     ({"soft_cache_length": 10, "soft_max_length": 300}, "exceeds max_completion_length \\(100\\)")],
)  # fmt: skip
def test_soft_overlong_with_invalid_settings_is_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_built_in("soft_overlong", max_completion_length=100, **settings)


def test_repetition_is_the_share_of_n_grams_that_come_again():
    repetition = load_built_in("repetition", repetition_n_grams=2, repetition_max_penalty=-2.0)
    # 1 2 1 2 1: four pairs, two of them different. One token has no pair.
    assert repetition(completion_ids=[[1, 2, 1, 2, 1], [1, 2, 3], [1], []]) == [-1, 0, 0, 0]


def test_repetition_equals_trls():
    rewards = pytest.importorskip("trl.rewards")
    if not hasattr(rewards, "get_repetition_penalty_reward"):
        pytest.skip("this TRL has no such reward")
    draw = random.Random(0)
    ids = [[draw.randrange(3) for _ in range(size)] for size in range(40)]
    theirs = rewards.get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)(ids)
    assert load_built_in("repetition")(completion_ids=ids) == pytest.approx(theirs)


def test_cosine_runs_from_short_to_long_for_right_and_wrong_answers():
    pytest.importorskip("math_verify")
    cosine = load_built_in("cosine", cosine_max_len=100)
    texts, ids = ["7", "7", "7", "7", "8", "8", "8"], [[0] * size for size in (0, 50, 100, 1000, 0, 100, 50)]
    scores = cosine(completions=texts, completion_ids=ids, answer=[7] * 7)
    cosine.close()
    assert scores == pytest.approx([1.0, 0.75, 0.5, 0.5, -0.5, 0.0, -0.25])


def test_cosine_equals_the_published_formula():
    pytest.importorskip("math_verify")
    cosine = load_built_in("cosine", cosine_max_len=64, cosine_min_len_value_correct=2.0, cosine_max_len_value_correct=1.0)
    scores = cosine(completions=["7"] * 65, completion_ids=[[0] * size for size in range(65)], answer=[7] * 65)
    # CosFn(t, T, min, max) = min + (max - min) (1 + cos(t pi / T)) / 2
    assert scores == pytest.approx([1.0 + (2.0 - 1.0) * (1 + math.cos(t * math.pi / 64)) / 2 for t in range(65)])


def test_built_in_rewards_load_with_required_settings(tmp_path):
    pytest.importorskip("math_verify")
    every = ["math", "accuracy", "format", "length", "soft_overlong", "cosine", "repetition", "code", "reward_model", "llm_judge"]
    nowhere = "http://127.0.0.1:9/"
    functions = load_rewards(Config().with_values({
        "reward_funcs": every, "soft_cache_length": 32, "reward_model_url": nowhere, "llm_judge_url": nowhere, "llm_judge_model": "judge"
    }))  # fmt: skip
    assert [function.name for function in functions] == every
    close_rewards(functions)
