"""The metric by which checkpoints are compared, known before the run."""

from __future__ import annotations

import pytest

from megatron_grpo.run.config.evaluation import find_best_metric, is_greater_better
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.config.rules.settings import validate

EVAL = "--eval_dataset x --eval_steps 5 --save_steps 10"


@pytest.mark.parametrize(
    ("words", "metric", "greater"),
    [
        (f"{EVAL} --metric_for_best_model eval", "eval/mean@1", True),
        (f"{EVAL} --metric_for_best_model eval/pass@4 --num_generations_eval 8", "eval/pass@4", True),
        ("--save_steps 10 --eval_steps 10 --eval_datasets a=x --metric_for_best_model eval/a", "eval/a/mean@8", True),
        ("--save_steps 10 --metric_for_best_model loss", "loss", False),
        ("--save_interval_seconds 10 --metric_for_best_model kl --beta 0.1 --greater_is_better false", "kl", False),
        ("--save_steps 10 --metric_for_best_model rewards/fn/mean --reward_funcs a.py:fn", "rewards/fn/mean", True),
        ("", None, True),
    ],
)
def test_metric_for_best_model_name_and_direction(words, metric, greater):
    cfg = resolve(words.split())
    assert validate(cfg) == []
    assert (find_best_metric(cfg), is_greater_better(cfg)) == (metric, greater)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--greater_is_better true", "has no effect without metric_for_best_model"),
        ("--save_steps 5 --metric_for_best_model rewrad", "is not a metric of this run. Supported: reward,"),
        ("--save_steps 5 --metric_for_best_model kl", "is not a metric of this run"),
        ("--save_steps 5 --metric_for_best_model eval", "requires held-out prompts, and eval_dataset is not set"),
        (f"{EVAL} --metric_for_best_model eval/pass@3", "is not a metric of this run. Supported: eval, eval/mean@1, eval/pass@1"),
        ("--eval_dataset x --eval_steps 4 --save_steps 10 --metric_for_best_model eval", "must be a multiple of eval_steps (4)"),
        ("--eval_dataset x --eval_steps 4 --metric_for_best_model eval", "save_steps (0) must be a multiple"),
        ("--metric_for_best_model reward", "save_steps 0 writes only one"),
    ],
)
def test_metric_for_best_model_that_is_not_logged_is_rejected(words, said):
    [problem] = validate(resolve(words.split()))
    assert said in problem.message
