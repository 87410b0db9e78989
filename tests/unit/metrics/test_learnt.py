"""Detection of a run that learns nothing: warnings during the run, and its result at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.metrics.summary import GradientSummary
from tests.loggers import logger_in

ALIKE = {"grad_norm": 0.0, "frac_reward_zero_std": 1.0, "reward": 1.0, "rewards/one/mean": 1.0}
NONE = {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
APART = {"grad_norm": 0.5, "frac_reward_zero_std": 0.75, "reward": 0.5, "rewards/one/mean": 0.5}
BY_THE_KL = ALIKE | {"grad_norm": 0.1}
REFUSED = {"grad_norm": None, "frac_reward_zero_std": 0.0, "reward": 0.5, "skipped_iterations": 1}


def summarize_gradients(*records, **how) -> GradientSummary:
    found = GradientSummary(**how)
    for record in records:
        found.take(record)
    return found


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([ALIKE, ALIKE], "Nothing was trained: no group's rewards differed in 2 of 2 steps."),
        ([NONE, NONE], "Nothing was trained: no group's rewards differed in 2 of 2 steps."),
        ([REFUSED, REFUSED | {"skipped_iterations": 2}], "Nothing was trained: every gradient of 2 steps was refused (skipped.jsonl)."),
        ([ALIKE], ""),  # a first try of one step, whose rewards may have been alike by chance
        ([{"frac_reward_zero_std": 0.5}] * 3, "Nothing was trained: no gradient in 3 steps."),  # all completions filtered
        ([ALIKE, {"grad_norm": 0.0}], "Nothing was trained: no group's rewards differed in 1 of 1 steps."),  # the second had no rollout
        ([ALIKE, APART], ""),
        ([REFUSED, APART | {"skipped_iterations": 1}], ""),
        ([BY_THE_KL, BY_THE_KL], ""),
        ([], ""),
    ],
)
def test_learning_check_reports_run_without_weight_updates(records, sentence):
    assert summarize_gradients(*records).nothing(len(records)) == sentence


def test_learning_check_ignores_steps_without_records():
    assert summarize_gradients(ALIKE, ALIKE).nothing(3) == "", "the first may have learned"


def test_learning_check_reports_equal_rewards_for_group_relative_advantages_only():
    assert summarize_gradients(BY_THE_KL).alike() == "no group's rewards differed in 1 of 1 steps"
    assert summarize_gradients(BY_THE_KL, compares_groups=False).alike() == summarize_gradients(BY_THE_KL, APART).alike() == ""


@pytest.mark.parametrize(("config", "is_said"), [({"reward_funcs": ["one"]}, True), ({"reward_funcs": []}, False)])  # a teacher alone
def test_learning_check_warns_of_equal_rewards_after_two_steps_and_at_end(tmp_path, config, is_said):
    def metrics(*steps):
        found = logger_in(tmp_path, config=config, console=Console(file=io.StringIO(), width=200))
        found.start(Progress(step=steps[0] - 1))
        for step in steps:
            found.log(Progress(step=step, num_tokens=step), BY_THE_KL | {"time/step": 1.0})
        found.close()
        return found.learnt, found._display.console.file.getvalue()

    _, told = metrics(1)
    assert "the rewards give no gradient" not in told
    counted, told = metrics(2, 3)
    assert counted.num_steps == 3
    assert ("WARNING: no group's rewards differed in 2 of 2 steps: the rewards give no gradient." in told) is is_said
    assert ("WARNING: no group's rewards differed in 3 of 3 steps: other terms of the loss" in told) is is_said
