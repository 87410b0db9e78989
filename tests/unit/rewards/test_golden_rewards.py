"""A golden table of completions and right answers for every built-in reward that needs no model.

It has false positives (a wrong completion that looks right) and false negatives (a right one in another notation).
"""

from __future__ import annotations

import pytest

from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.loading import close_rewards, load_rewards
from megatron_grpo.run.rewards.protocol import RowFailure

BOTH = [  # completion, right answer, score of `accuracy` and of `math`
    ("The answer is 42.\nI hope this answer helps!", "42", 1),
    ("Answer: 42\nAsk me if you need another answer or more detail.", "42", 1),
    ("The final answer is: $42$.", "42", 1),
    ("**Answer:** 42", "42", 1),
    ("**Answer**: **42**.", "42", 1),
    ("The answer is **42**.", "42", 1),
    ("The answer is:\n\n42", "42", 1),
    ("ANSWER IS 42", "42", 1),
    ("The answer is 42. I hope this answer helps!", "42", 1),
    ("The answer is **42**. I hope this answer helps!", "42", 1),
    ("The answer is J. K. Rowling.", "J. K. Rowling", 1),
    ("The answer is 42. I hope this answer helps!", "4", 0),
    ("The answer is 3.14. That is pi.", "3", 0),
    ("Answer:42", "42", 1),
    ("**Answer:**42", "42", 1),
    ("**Answer:** **42**", "42", 1),
    ("Answer:**42**", "42", 1),
    ("Answer\uff1a42", "42", 1),  # the colon of Chinese and Japanese
    ("answer:", "42", 0),
    ("The answer is $42", "42", 1),
    ("The answer is \u22123", "-3", 1),
    ("The answer is 1,042.", "1042", 1),
    ("So 6 * 7\n#### 42", "6 * 7 = 42\n#### 42", 1),
    ("Final Answer: \\boxed{42}", "42", 1),
    ("<think>The answer is 41.</think>The answer is 42.", "42", 1),
    ("<answer>The answer is 42</answer>\nDoes this answer help?", "42", 1),
    ("no answer possible", "no answer possible", 1),
    ("The answer is: no answer possible.", "No answer possible", 1),
    ("I cannot answer the question", "I cannot answer the question", 1),
    ("\\boxed{no answer possible}", "no answer possible", 1),
    ("possible", "no answer possible", 0),
    ("the question", "I cannot answer the question", 0),
    ("key", "answer key", 0),
    ("sheet B", "The answer sheet B", 0),
    ("Answering 42", "42 questions", 0),
    ("The answer is 41", "42", 0),
    ("The answer is 42, or else 43", "43", 0),
    ("I hope this answer helps!", "42", 0),
    ("unanswered: Rome", "Paris", 0),
    ("<think>The answer is 42.</think>The answer is 41.", "42", 0),
    ("...", "42", 0),
    ("", "$", 0),
]
OF_MATH = [
    ("The answer is \\frac{1}{2}", "0.5", 1),
    ("x = 42", "42", 1),
    ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1),
    ("\\boxed{1/3}", "0.33", 0),
]


@pytest.fixture(scope="module")
def rewards():
    """Functions by name, closed at the end: `math` and `code` keep processes."""
    cfg = Config().with_values({
        "reward_funcs": ["accuracy", "math", "code", "format", "length", "soft_overlong", "cosine", "repetition", "environment"],
        "max_completion_length": 10, "length_target": 4, "soft_cache_length": 5, "repetition_n_grams": 2, "code_timeout": 5.0,
        "turn_discount": 0.5,
    })  # fmt: skip
    functions = load_rewards(cfg)
    yield {function.name: function.function for function in functions}
    close_rewards(functions)


def list_scores(function, rows, **columns):
    found = function(completions=[row[0] for row in rows], answer=[row[1] for row in rows], **columns)
    return [(row[0], row[1], score) for row, score in zip(rows, found)]


def test_accuracy_and_math_agree_with_the_table(rewards):
    assert list_scores(rewards["accuracy"], BOTH) == BOTH
    assert list_scores(rewards["math"], BOTH) == BOTH
    assert list_scores(rewards["math"], OF_MATH) == OF_MATH
    assert list_scores(rewards["accuracy"], OF_MATH) == [(*row[:2], 0) for row in OF_MATH]


def test_cosine_and_math_rewards_agree_on_correctness(rewards):
    found = rewards["cosine"](completions=[row[0] for row in BOTH], completion_ids=[[1] * 2] * len(BOTH), answer=[row[1] for row in BOTH])
    right, wrong = {score for score, row in zip(found, BOTH) if row[2]}, {score for score, row in zip(found, BOTH) if not row[2]}
    assert len(right) == len(wrong) == 1 and max(wrong) < min(right)


@pytest.mark.parametrize(
    ("name", "texts", "scores"),
    [
        ("format", ["<think>a</think><answer>b</answer>", "<think>a</think>\n<answer>an answer</answer>", "<answer>b</answer>",
                    "<think>a</think><answer>b</answer> so it is b", "<think>a</think><answer><answer>b</answer>"], [1, 1, 0, 0, 0]),
        ("length", ["a" * 4, "a" * 5, "", "a" * 10], [0, -0.1, -0.4, -0.6]),
        ("soft_overlong", ["", "a" * 5, "a" * 6, "a" * 10], [0, 0, -0.2, -1]),
        ("repetition", ["", "a", "ab", "abc", "aaaa"], [0, 0, 0, 0, -2 / 3]),
    ],
)  # fmt: skip
def test_format_rewards_agree_with_the_table(rewards, name, texts, scores):
    assert rewards[name](completions=texts, completion_ids=[[*map(ord, text)] for text in texts]) == pytest.approx(scores)


def test_environment_reward_is_discounted_sum_of_turn_rewards(rewards):
    turn_rewards = [[1.0, 1.0], [None, 2.0], [], [None]]
    assert rewards["environment"](completions=[""] * 4, turn_rewards=turn_rewards) == [1.5, 1.0, 0, 0]


# ---- code: names that a test does not bind

LIES = """
from collections import *
def f(x): return x
def zero(*_): return 0
Counter = OrderedDict = Decimal = deepcopy = same = key = zero
def __getattr__(name): return zero
"""
HONEST = "from collections import Counter\ndef same(x): return sorted(x)\ndef f(x): return x[::-1]\n"
UNUSABLE = "does not define `same`, by which the program would judge itself"


@pytest.mark.parametrize(
    ("test", "honest", "lies"),
    [
        ("assert Counter(f([1, 2])) == Counter([2, 1])", 1, 1),
        ("assert Counter(f([1, 2])) == Counter([3, 1])", 0, 0),
        ("expected = Counter([3, 1])\nassert Counter(f([1, 2])) == expected", 0, 0),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(Counter(f([1])), Counter([2]))", 0, 0),
        ("assert deepcopy(f([1, 2])) == deepcopy([2, 1])", 1, 0),
        ("assert Decimal(f('1')) == Decimal('1')", 1, 1),
        ("assert same(f([1, 2])) == same([3, 4])", UNUSABLE, UNUSABLE),
        ("got = f([1, 2])\nwanted = same([3, 4])\nassert wanted == same(got)", UNUSABLE, UNUSABLE),
        ("assert same(f([1, 2]), [3, 4])", UNUSABLE, UNUSABLE),
        ("assert not same(f([1, 2]))", UNUSABLE, UNUSABLE),
        ("assert f([1, 2])", 1, 1),
        ("def same(x): return sorted(x)\nassert same(f([1, 2])) == same([2, 1])", 1, 1),
        ("assert missing(f([1, 2])) == 0", 0, 0),
        ("assert f([1, 2]) == [2, 1]", 1, 0),
        ("assert f([1, 1]) == f([1, 1])", 1, 1),
        ("def check(candidate):\n    assert candidate([1, 2]) == [2, 1]\ncheck(f)", 1, 0),
        ("import collections\nassert collections.Counter(f([1])) == collections.Counter([2])", 0, 0),
        ("assert f(f([1, 2])) == [1, 2]", 1, 1),
    ],
)  # fmt: skip
def test_code_reward_unbound_names_are_builtins_or_the_tested_function(rewards, test, honest, lies):
    for program, expected in ((HONEST, honest), (LIES, lies)):
        [found] = rewards["code"](completions=[f"```python\n{program}\n```"], tests=[[test]])
        if isinstance(expected, str):
            assert isinstance(found, RowFailure) and expected in found.reason, program
        else:
            assert found == expected, program


def test_code_reward_program_class_may_shadow_library_class(rewards):
    program = "class Counter:\n    def __init__(self): self.n = 0\n    def add(self): self.n += 1; return self.n"
    assert rewards["code"](completions=[f"```python\n{program}\n```"], tests=[["c = Counter()\nc.add()\nassert c.add() == 2"]]) == [1.0]
