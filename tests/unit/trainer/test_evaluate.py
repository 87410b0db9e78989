"""Evaluations: prompts, seeds and results on one rank and on two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_grpo.core.rollout.engine import SamplingSettings, make_completion, prompt_seed
from megatron_grpo.core.types import Prompt
from megatron_grpo.run.config.evaluation import (
    SUM,
    EvalSampling,
    describe_rules,
    eval_sampling,
    find_pass_reward,
    find_score,
    list_reward_maxima,
    list_sets,
)
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.evaluate import EvaluationSpec, Evaluator, make_eval_sampling
from megatron_grpo.run.metrics.evaluations import describe
from megatron_grpo.run.rewards.protocol import RewardFunction
from megatron_grpo.run.rewards.reward_manager import RewardManager
from tests.ranks import run_ranks
from tests.scripted_engine import ScriptedEngine

TRAINING = SamplingSettings(n=16, max_completion_length=8, temperature=0.9, top_p=0.8, stop=("END",))


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(number=i, row=10 + i, raw=f"question {i}", token_ids=(4, 5 + i), columns={}) for i in range(count)]


def answer(prompt: Prompt, place: int, version: int):
    length = 1 + (prompt.number + place) % 3
    return make_completion(
        prompt.token_ids, [7] * length, [-1.0] * length, text=f"{prompt.number}.{place}", finish_reason="length" if length == 3 else "stop",
        version=version,
    )  # fmt: skip


def right(completions, **rest):
    """Of prompt p the first p of its completions; the second completion of prompt 2 has no score."""
    numbers = [tuple(map(int, text.split("."))) for text in completions]
    return [None if (p, i) == (2, 1) else float(i < p) for p, i in numbers]


def words(completions, **rest):
    return [2.0] * len(completions)


def make_evaluator(engine=None, **sets):
    reward_manager = RewardManager(
        [RewardFunction(name="words", function=words, timeout=60.0), RewardFunction(name="right", function=right, timeout=60.0)]
    )
    sampling = make_eval_sampling(TRAINING, EvalSampling(n=4, temperature=1.0))
    return Evaluator(EvaluationSpec(sets=sets, sampling=sampling, score="right"), engine or ScriptedEngine(answer), reward_manager)


def evaluate(rank: int, world_size: int):
    return [(one.numbers(), one.means.tolist(), one.table) for one in make_evaluator(some=make_prompts(5), few=make_prompts(2)).run()]


def test_evaluation_on_two_ranks_equals_one_rank():
    [alone] = run_ranks(evaluate, 1)
    first, second = run_ranks(evaluate, 2)
    assert repr(first) == repr(alone) and [one[:2] for one in map(repr, second)] == [one[:2] for one in map(repr, first)]
    assert not second[0][2]
    (some, means, table), (few, _, _) = alone
    assert (some["name"], few["name"], some["num_prompts"], few["num_prompts"]) == ("some", "few", 5, 2)
    assert means == [0.0, 0.25, pytest.approx(1 / 3), 0.75, 1.0] and some["unscored"] == 1
    assert some["mean@4"] == pytest.approx(np.mean(means)) and some["words"] == 2.0
    assert some["pass@4"] == pytest.approx(3 / 4), "prompt 2 was not scored four times"
    assert table["completion"] == [f"{p}.{i}" for p in range(5) for i in range(4)] and table["dataset_row"][::4] == [10, 11, 12, 13, 14]
    assert table["rewards/right"][8:12] == [1.0, None, 0.0, 0.0]
    assert some["mean_length"] == pytest.approx(np.mean([1 + (p + i) % 3 for p in range(5) for i in range(4)]))


class RecordingEngine(ScriptedEngine):
    def generate(self, prompts, sampling, *, seed):
        self.heard = [*getattr(self, "heard", []), (len(prompts), sampling, seed)]
        return super().generate(prompts, sampling, seed=seed)


def test_evaluation_seeds_are_equal_each_time_and_differ_from_training():
    engine = RecordingEngine(answer)
    asks = make_evaluator(engine, a=make_prompts(3), b=make_prompts(3))
    for _ in range(2):
        asks.run()
    seeds = [seed for _, _, seed in engine.heard]
    assert seeds[:2] == seeds[2:] and len(set(seeds)) == 2, "each set has its own"
    training = {prompt_seed(run, number, 16) for run in range(50) for number in range(50)}
    assert not training & {prompt_seed(seed, number, 4) for seed in seeds for number in range(3)}


def test_eval_sampling_equals_training_except_n_and_temperature():
    assert make_eval_sampling(TRAINING, EvalSampling(n=4, temperature=0.5)) == SamplingSettings(
        n=4, max_completion_length=8, temperature=0.5, top_p=0.8, stop=("END",)
    )
    greedy = make_eval_sampling(TRAINING, EvalSampling(n=1, temperature=0.0))
    assert (greedy.n, greedy.temperature, greedy.top_p, greedy.stop) == (1, 0.0, 1.0, ("END",))


def test_evaluation_digest_changes_with_every_input():
    asks = make_evaluator(a=make_prompts(3)).question
    digests = {
        asks.digest("a"),
        make_evaluator(a=make_prompts(4)).question.digest("a"),
        make_evaluator(b=make_prompts(3)).question.digest("b"),
        EvaluationSpec(sets=asks.sets, sampling=asks.sampling, score="words").digest("a"),
        EvaluationSpec(sets=asks.sets, sampling=asks.sampling, score="right", seed=1).digest("a"),
        EvaluationSpec(
            sets=asks.sets, sampling=make_eval_sampling(TRAINING, EvalSampling(n=8, temperature=1.0)), score="right"
        ).digest("a"),
        *(replace(asks, episodes=describe_rules(resolve(words.split()))).digest("a") for words in
          ("--tools a.py:f", "--tools a.py:f --max_turns 3", "--environment b.py:C", "--rollout_func c.py:g")),
    }  # fmt: skip
    assert len(digests) == 10 and make_evaluator(a=make_prompts(3)).question.digest("a") in digests


@pytest.mark.parametrize(
    ("words", "sets", "n", "temperature"),
    [
        ("--eval_dataset x.jsonl", {"eval": "x.jsonl"}, 1, 0.0),
        ("--eval_dataset x.jsonl --num_generations_eval 4", {"eval": "x.jsonl"}, 4, 0.7),
        ("--eval_dataset x.jsonl --tools a.py:f", {"eval": "x.jsonl"}, 8, 0.7),  # trap 18: greedily a model may look trained at the start
        ("--eval_dataset x.jsonl --eval_temperature 1", {"eval": "x.jsonl"}, 8, 1.0),
        ("--eval_datasets a=x.jsonl b=y=1.jsonl", {"a": "x.jsonl", "b": "y=1.jsonl"}, 8, 0.7),
        ("--eval_datasets a=x.jsonl --eval_temperature 0", {"a": "x.jsonl"}, 1, 0.0),
        ("--eval_dataset z --eval_datasets a=x.jsonl", {"eval": "z", "a": "x.jsonl"}, 8, 0.7),
    ],
)
def test_eval_sampling_settings_from_flags(words, sets, n, temperature):
    cfg = resolve(["--temperature", "0.7", *words.split()])
    assert list_sets(cfg) == sets and eval_sampling(cfg) == EvalSampling(n=n, temperature=temperature)


def test_eval_reward_accepts_function_name_or_reward_funcs_entry():
    names = ["format", "good"]
    for asked, expected in (("format", "format"), ("good", "good"), ("mine.py:good", "good")):
        cfg = resolve(["--reward_funcs", "format", "mine.py:good", "--eval_reward", asked])
        assert find_score(cfg, names) == expected


@pytest.mark.parametrize(("weights", "expected"), [("", SUM), ("1 1", SUM), ("0 1", "good"), ("0.1 0", "format"), ("0 0", "format")])
def test_eval_score_defaults_to_trained_rewards(weights, expected):
    cfg = resolve(["--reward_funcs", "format", "mine.py:good", *(["--reward_weights", *weights.split()] if weights else [])])
    assert find_score(cfg, ["format", "good"]) == expected


def test_list_reward_maxima_of_weighted_rewards():
    cfg = resolve("--reward_funcs math soft_overlong mine.py:length --reward_weights 2 1 0.5 --soft_cache_length 8".split())
    assert list_reward_maxima(cfg) == [2.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", "math"), ("--eval_reward bonus", ""), ("--eval_pass_threshold 0.9", ""), ("--reward_weights 1 0", "")],
)
def test_pass_at_k_of_reward_sum_uses_the_task_reward(flags, expected):
    assert find_pass_reward(resolve(f"--reward_funcs mine.py:bonus math {flags}".split()), ["bonus", "math"]) == expected


def test_pass_at_k_ignores_bonus_reward_below_1():
    reward_manager = RewardManager([RewardFunction(name="bonus", function=lambda completions, **_: [0.2] * len(completions), timeout=60.0),
                   RewardFunction(name="math", function=of_the_task, timeout=60.0)])  # fmt: skip
    question = EvaluationSpec(
        sets={"a": make_prompts(3)}, sampling=make_eval_sampling(TRAINING, EvalSampling(n=4, temperature=1.0)), score=SUM, most=(1.0, 1.0),
        pass_reward="math",
    )  # fmt: skip
    [found] = Evaluator(question, ScriptedEngine(answer), reward_manager).run()
    told = found.numbers()
    assert told["pass@1"] == 0.5 and told["pass_of"] == "math", "prompt 0, to which it does not apply, is left out"
    assert "pass@1 (math)" in [figure for figure, *_ in describe([told])[2]]


def of_the_task(completions, **rest):
    """Does not apply to prompt 0, and is right twice out of four times elsewhere; what is asked first is always right."""
    return [None if text.startswith("0.") else float(text.endswith(("0", "1"))) for text in completions]


def test_evaluation_of_several_rewards_reports_weighted_sum_and_each():
    reward_manager = RewardManager([RewardFunction(name="format", function=lambda completions, **_: [1.0] * len(completions), timeout=60.0),
                   RewardFunction(name="task", function=of_the_task, timeout=60.0)], [0.5, 2.0])  # fmt: skip
    question = EvaluationSpec(
        sets={"a": make_prompts(3)}, sampling=make_eval_sampling(TRAINING, EvalSampling(n=4, temperature=1.0)), score=SUM, most=(0.5, 2.0)
    )
    [found] = Evaluator(question, ScriptedEngine(answer), reward_manager).run()
    told = found.numbers()
    assert (told["score"], told["mean@4"]) == (SUM, pytest.approx((0.5 + 1.5 + 1.5) / 3))
    assert told["pass@1"] == pytest.approx((1 + 0.5 + 0.5) / 3), "prompt 0 is right by the one reward that applies"
    assert (told["format"], told["task"], told["pass@1/format"], told["pass@1/task"]) == (1.0, 0.5, 1.0, 0.5)
    assert {figure: cells for figure, *cells in describe([told])[2]}["task"] == ["0.500, pass@1 0.500"]
    assert told["pass_of"] == "weighted sum >= 2.5" and "pass@1 (weighted sum >= 2.5)" in [figure for figure, *_ in describe([told])[2]]
    [stricter] = Evaluator(replace(question, pass_threshold=3.0), ScriptedEngine(answer), reward_manager).run()
    reward_manager.reward_weights = [1.0, 1.0]
    [other] = Evaluator(question, ScriptedEngine(answer), reward_manager).run()
    assert stricter.numbers()["pass@1"] == 0.0 and other.question != found.question == stricter.question, "other weights are not paired"
