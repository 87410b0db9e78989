"""A stale sample without old log-probs is rejected before the loss, where its ratio would silently be 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_grpo.core.batching.collate import collate_samples as collate
from megatron_grpo.core.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.types import Sample

NAN = float("nan")


def make_sample(version: int) -> Sample:
    return Sample(row=3, rollout=1, prompt_number=0, version=version, on_policy_version=version, token_ids=np.arange(4),
                  mask=np.array([0, 0, 1, 1], bool),
                  sampler_logprobs=np.array([0, 0, -1, -2], np.float32), advantage=1.0, is_zero_std=False, is_truncated=False)  # fmt: skip


WEIGHTS = [0.5]


def test_collate_stale_sample_without_old_logprobs_raises():
    assert np.isnan(collate([make_sample(5)], WEIGHTS, trained_at=5).old_logprobs).all()
    with pytest.raises(ValueError, match="row 3 of rollout 1 .* version 4 .* version 5 without old log-probs"):
        collate([make_sample(4)], WEIGHTS, trained_at=5)


@pytest.mark.parametrize("by", ["recompute", "cached"])
def test_with_old_logprobs_rejects_missing_values_at_trained_tokens(by):
    with pytest.raises(ValueError, match="row 3 of rollout 1 has no old log-prob at 1 of 2 trained tokens"):
        make_sample(4).with_old_logprobs(np.array([NAN, NAN, -1.0, NAN]), by)
    assert make_sample(4).with_old_logprobs(np.array([NAN, NAN, -1.0, -1.0]), by).old_logprobs_from == by


def test_stale_sample_token_without_sampler_logprob_has_ratio_one():
    stale = make_sample(4).with_old_logprobs(np.array([0, 0, -1.5, NAN], np.float32), "rollout")
    micro = collate([stale], WEIGHTS, trained_at=5)
    names = ("token_weights", "advantages", "sampler_logprobs", "old_logprobs", "is_compared", "sequence")
    assert not micro.is_compared.any(), "the sampler's log-probs are no measure of the sampler"
    inputs = LossInputs(**{name: torch.from_numpy(getattr(micro, name)) for name in names}, num_sequences=1, num_loss_tokens=2)
    loss = GrpoLoss.from_config(GrpoConfig(epsilon=9.0), max_completion_length=4, temperature=1.0)
    value, _ = loss(inputs, logprobs=torch.tensor([-1.0, -2.0]))
    assert value.item() == pytest.approx(-0.5 * np.exp(0.5) - 0.5 * 1.0)
