"""Metrics of the loss: by hand, and independent of the partition of the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.core.grpo.metrics import combine, finish
from megatron_grpo.core.settings import GrpoConfig
from tests.reference.packing import package_loss, random_batch

NAN = float("nan")


def measure(cfg=None, **tensors):
    """Two sequences of two tokens each; the last token of the second has weight 0 (filtered out)."""
    loss = GrpoLoss.from_config(cfg or GrpoConfig(), max_completion_length=4, temperature=1.0)
    given = {
        "token_weights": torch.tensor([0.25, 0.25, 0.5, 0.0]),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0]),
        "sampler_logprobs": torch.full((4,), NAN),
        "old_logprobs": torch.full((4,), NAN),
        "is_compared": torch.ones(4, dtype=torch.bool),
        "sequence": torch.tensor([0, 0, 1, 1]),
        "num_sequences": 2,
        "num_loss_tokens": 3,
    }
    extra = {name: tensors.pop(name) for name in ("entropy", "ref_logprobs") if name in tensors}
    logprobs = tensors.pop("logprobs", torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64))
    _, logs = loss(LossInputs(**(given | tensors)), logprobs=logprobs, **extra)
    return finish(logs.sums, logs.maxima)


def test_metrics_mismatch_by_hand():
    # old - sampler: log 2, unknown, -log 4; the fourth token is filtered out.
    sampler = torch.tensor([-1.0 - math.log(2), NAN, -3.0 + math.log(4), -100.0], dtype=torch.float64)
    found = measure(sampler_logprobs=sampler)
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 * math.log(2))
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4))
    assert found["sampling/kl_k1"] == pytest.approx(0.5 * math.log(2))
    assert found["sampling/kl_k3"] == pytest.approx((2 - math.log(2) - 1 + 0.25 + math.log(4) - 1) / 2)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx((2 + 1 + 0.25) / 3)
    assert found["sampling/effective_sample_size"] == pytest.approx(2.25**2 / (2 * 4.0625))
    assert found["sampling/perplexity_rollout"] == pytest.approx(math.exp((4 - math.log(2)) / 2))
    assert found["sampling/perplexity_trainer"] == pytest.approx(math.exp(2.0))


@pytest.mark.parametrize(("mode", "mean"), [("token_truncate", (1.5 + 1 + 0.25) / 3), ("sequence_truncate", (1.5 + 0.5 * 0.25) / 1.5)])
def test_metrics_importance_ratio_is_mean_over_trained_tokens_or_sequences(mode, mean):
    """Half of the second sequence is filtered out, and its last token has no log-prob of the sampler's."""
    sampler = torch.tensor([-1.0 - math.log(2), NAN, -3.0 + math.log(4), NAN], dtype=torch.float64)
    found = measure(GrpoConfig(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=1.5), sampler_logprobs=sampler)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(mean)


@pytest.mark.parametrize("geometric", [True, False])
def test_metrics_sequence_level_ratio_counts_once_per_sequence(geometric):
    """Ratios of 4 over three tokens and of 1/2 over one: 2.25 as a mean over sequences, and 3.125 over tokens."""
    sampler = torch.tensor([-1.0 - math.log(4), -2.0, -3.0, -4.0 + math.log(2)], dtype=torch.float64)
    if geometric:
        sampler[:3] = torch.tensor([-1.0, -2.0, -3.0]) - math.log(4)
    cfg = GrpoConfig(
        rollout_importance_sampling_mode="sequence_truncate", rollout_importance_sampling_threshold=9.0, rollout_is_geometric=geometric
    )
    given = dict(sampler_logprobs=sampler, sequence=torch.tensor([0, 0, 0, 1]), token_weights=torch.full((4,), 0.25))
    assert measure(cfg, **given)["sampling/importance_sampling_ratio/mean"] == pytest.approx(2.25)


def test_metrics_of_one_token_by_hand():
    one = {name: torch.tensor([value]) for name, value in {"token_weights": 1.0, "advantages": 1.0, "old_logprobs": NAN}.items()}
    found = measure(**one, sampler_logprobs=torch.tensor([-1.5]), logprobs=torch.tensor([-1.0]), entropy=torch.tensor([2.0]),
                     is_compared=torch.ones(1, dtype=torch.bool), sequence=torch.zeros(1, dtype=torch.int64), num_sequences=1,
                     num_loss_tokens=1)  # fmt: skip
    assert (found["entropy"], found["sampling/sampling_logp_difference/mean"], found["clip_ratio/region_mean"]) == (2.0, 0.5, 0.0)
    assert (found["sampling/sampling_logp_difference/max"], found["sampling/effective_sample_size"]) == (0.5, 1.0)


def test_metrics_of_cispo_count_upper_clipping_only():
    old = torch.tensor([-1.0, -4.0, -1.0, -4.0], dtype=torch.float64)  # ratios 1, e^2, e^-2
    found = measure(GrpoConfig(loss_type="cispo", epsilon_high=2.0), old_logprobs=old)
    assert (found["clip_ratio/low_mean"], found["clip_ratio/high_mean"]) == (0.0, pytest.approx(1 / 3))


def test_metrics_perplexity_of_tiny_logprobs_is_infinite():
    """exp(709.8) is too large for float64: a perplexity is infinite then."""
    found = measure(logprobs=torch.full((4,), -709.8, dtype=torch.float64), sampler_logprobs=torch.full((4,), -1.0e6))
    assert found["sampling/perplexity_trainer"] == found["sampling/perplexity_rollout"] == math.inf
    found = measure(logprobs=torch.full((4,), -700.0, dtype=torch.float64), sampler_logprobs=torch.full((4,), -700.0))
    assert found["sampling/perplexity_trainer"] == pytest.approx(math.exp(700.0))


def test_metrics_of_sapo_count_no_clipping():
    found = measure(GrpoConfig(loss_type="sapo"), old_logprobs=torch.tensor([-9.0, -9.0, 9.0, 9.0], dtype=torch.float64))
    assert found["clip_ratio/region_mean"] == 0.0


def test_metrics_without_sampler_logprobs_omit_mismatch():
    assert not {name for name in measure() if name.startswith("sampling/") and "ratio" not in name}


def test_entropy_and_kl_are_means_over_trained_tokens():
    found = measure(GrpoConfig(beta=0.1, kl_estimator="k1"), entropy=torch.tensor([1.0, 2.0, 6.0, 50.0]),
                     ref_logprobs=torch.tensor([-1.5, -2.0, -4.0, -90.0]))  # fmt: skip
    assert found["entropy"] == pytest.approx(3.0)
    assert found["kl"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_clip_ratios_count_tokens_or_sequences():
    old = torch.tensor([-1.0, -2.5, -2.0, -4.0], dtype=torch.float64)  # ratios 1, e^0.5, e^-1: above, below
    found = measure(old_logprobs=old)
    assert found["clip_ratio/high_mean"] == pytest.approx(1 / 3) and found["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert found["clip_ratio/region_mean"] == pytest.approx(2 / 3)
    # As sequences: e^0.25 is above for the first. The second has half of itself filtered, and e^-0.5 is below.
    found = measure(GrpoConfig(importance_sampling_level="sequence"), old_logprobs=old)
    assert found["clip_ratio/high_mean"] == pytest.approx(1 / 1.5) and found["clip_ratio/low_mean"] == pytest.approx(0.5 / 1.5)


def test_metrics_omit_mismatch_where_old_logprobs_are_from_sampler():
    """`--old_logprobs rollout`: the second of two stale sequences takes its ratio against them; they differ from themselves by nothing."""
    sampler = torch.tensor([-1.5, -2.0, -3.0, -4.0], dtype=torch.float64)
    given = dict(sampler_logprobs=sampler, old_logprobs=torch.tensor([-1.0, -1.0, -3.0, -4.0]), token_weights=torch.full((4,), 0.25))
    found = measure(**given, is_compared=torch.tensor([True, True, False, False]))
    assert (found["sampling/sampling_logp_difference/mean"], found["sampling/sampling_logp_difference/max"]) == (0.75, 1.0)
    assert measure(**given)["sampling/sampling_logp_difference/mean"] == 0.375


def test_the_extremes_of_clipping_are_those_of_single_micro_batches():
    loss = GrpoLoss.from_config(GrpoConfig(), max_completion_length=4, temperature=1.0)
    logs = []
    for ratios in ([1.0, 2.0], [2.0, 2.0], [0.5, 1.0]):  # clipped above: 1/2, 1, 0; below: 0, 0, 1/2
        inputs = LossInputs(
            token_weights=torch.full((2,), 1 / 6),
            advantages=torch.tensor([1.0, 1.0]) if max(ratios) > 1 else torch.tensor([-1.0, -1.0]),
            sampler_logprobs=torch.full((2,), NAN),
            old_logprobs=-1.0 - torch.tensor(ratios).log(),
            is_compared=torch.ones(2, dtype=torch.bool),
            sequence=torch.tensor([0, 0]),
            num_sequences=1,
            num_loss_tokens=6,
        )
        logs.append(loss(inputs, logprobs=torch.full((2,), -1.0, dtype=torch.float64))[1])
    together = combine(logs)
    found = finish(together.sums, together.maxima)
    assert (found["clip_ratio/high_max"], found["clip_ratio/low_min"]) == (1.0, 0.0)
    assert found["clip_ratio/high_mean"] == pytest.approx(3 / 6) and found["clip_ratio/low_mean"] == pytest.approx(1 / 6)
    alone = finish(logs[2].sums, logs[2].maxima)
    assert alone["clip_ratio/low_min"] == 0.5
    nothing = loss(replace(inputs, token_weights=torch.zeros(2)), logprobs=torch.full((2,), -1.0, dtype=torch.float64))[1]
    together = combine([logs[2], nothing])
    assert finish(together.sums, together.maxima)["clip_ratio/low_min"] == 0.5, "a micro-batch in which nothing trains has no share"


def test_metrics_of_step_without_trained_tokens_contain_only_loss():
    assert measure(token_weights=torch.zeros(4)) == {"loss": 0.0}


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_are_equal_for_any_partition_of_the_batch(level):
    cfg = GrpoConfig(beta=0.1, log_entropy=True, importance_sampling_level=level, rollout_importance_sampling_mode=f"{level}_mask")
    completions = random_batch(7)
    one, many = (package_loss(cfg, completions, split)[3] for split in ([range(8)], [[i] for i in (3, 1, 2, 0, 7, 6, 5, 4)]))
    found, wanted = (finish(logs.sums, logs.maxima) for logs in (many, one))
    assert found.keys() == wanted.keys()
    for name in ("clip_ratio/low_min", "clip_ratio/high_max"):  # of single micro-batches, as TRL's are
        assert found.pop(name) <= wanted.pop(name) if name.endswith("min") else found.pop(name) >= wanted.pop(name)
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-11, atol=1e-13)
