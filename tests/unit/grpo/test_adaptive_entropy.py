"""The adaptive entropy coefficient, against TRL's formula written out here."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megatron_grpo.core.grpo.entropy import AdaptiveEntropy
from megatron_grpo.core.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.run.config.parse import resolve
from megatron_grpo.run.config.rules.grpo import problems


def make_control(**settings):
    cfg = dict(use_adaptive_entropy=True, entropy_coef=0.25, entropy_coef_delta=0.125, entropy_coef_max=0.5, entropy_target=2.0)
    return AdaptiveEntropy.from_config(GrpoConfig(**(cfg | settings)))


def test_adaptive_entropy_coef_moves_each_step_and_applies_at_or_below_target():
    assert AdaptiveEntropy.from_config(GrpoConfig(entropy_coef=0.1)) is None
    now, course = make_control(), []
    for entropy in (2.5, 2.0, 1.0, 1.0, 1.5, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0):
        applied, now = now.applied, now.after(entropy)
        course.append((applied, now.coef))
    assert course == [
        (0.0, 0.125), (0.0, 0.25), (0.25, 0.375), (0.375, 0.5), (0.5, 0.5), (0.5, 0.375), (0.0, 0.25), (0.0, 0.125), (0.0, 0.0), (0.0, 0.0),
        (0.0, 0.0),
    ]  # fmt: skip


def test_adaptive_entropy_state_is_restored_from_checkpoint():
    for now in (make_control(), make_control().after(1.5)):
        again = make_control(entropy_coef=0.5).restored(json.loads(json.dumps(now.state())))
        assert (again.coef, again.entropy, again.applied) == (now.coef, now.entropy, now.applied)
    assert make_control().entropy == math.inf


def test_adaptive_entropy_loss_uses_coefficient_of_the_step():
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    tensors = LossInputs(
        token_weights=torch.tensor([0.5, 0.5, 0.5]), advantages=torch.tensor([1.0, 1.0, -1.0]), sampler_logprobs=logprobs,
        old_logprobs=logprobs, is_compared=torch.ones(3), sequence=torch.tensor([0, 0, 1]), num_sequences=2, num_loss_tokens=3,
        token_index=torch.tensor([0, 1, 0]), longest=2,
    )  # fmt: skip
    entropy = torch.full_like(logprobs, 1.5)

    def loss(coef=None, **settings):
        made = GrpoLoss.from_config(GrpoConfig(**settings), max_completion_length=9, temperature=1.0)
        assert made.needs_entropy and not made.is_per_token
        return float(made(tensors, logprobs=logprobs, entropy=entropy, entropy_coef=coef)[0])

    without = loss(0.0, use_adaptive_entropy=True)
    assert loss(0.25, use_adaptive_entropy=True) == pytest.approx(loss(entropy_coef=0.25)) == pytest.approx(without - 0.25 * 1.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--entropy_target 3", "entropy_target (3) has no effect without use_adaptive_entropy true"),
        ("--use_adaptive_entropy true --entropy_coef 2", "starts at entropy_coef (2), which is not between entropy_coef_min (0)"),
    ],
)
def test_adaptive_entropy_settings_without_effect_are_rejected(words, said):
    [problem] = problems(resolve(words.split()))
    assert said in problem.message
