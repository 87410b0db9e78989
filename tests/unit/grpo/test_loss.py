"""GrpoLoss against the float64 reference, for every legal combination of settings and any partition of the batch."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.loss import OBJECTIVES, GrpoLoss, LossInputs
from megatron_grpo.core.grpo.metrics import finish
from megatron_grpo.core.grpo.objectives import (
    RATIOS,
    ClassificationTerms,
    SequenceIndex,
    classification,
    no_sum_over_context,
    off_policy_mask,
    rollout_correction,
)
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee import reference
from tests.combinations import KL_MODES, draw_other_settings, validate
from tests.reference.packing import (
    MAX_COMPLETION_LENGTH,
    compute_labels,
    in_whole_groups,
    pack,
    package_loss,
    random_batch,
    random_split,
    token_weight_fn,
)

LOSS_TYPES, LEVELS = tuple(OBJECTIVES), tuple(RATIOS)
OTHERS = {
    "epsilon": (0.2, 0.05, 3e-4),
    "epsilon_high": (None, 0.28, 3.0),
    "delta": (None, 1.5, 4.0),
    "entropy_coef": (0.0, 0.02),
    "top_entropy_quantile": (1.0, 0.5, 0.2),
    "overlong_filter": (False, True),
    "exclude_zero_std_groups": (False, True),
    "rollout_importance_sampling_mode": ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "rollout_importance_sampling_threshold": (2.0, 1.2),
    "rollout_importance_sampling_min": (None, 0.7),
    "rollout_is_geometric": (False, True),
    "off_policy_sequence_mask_delta": (None, 0.01, 0.3),
}


def draw_batch(cfg: GrpoConfig, seed: int, **how):
    completions = random_batch(seed, **how)
    return in_whole_groups(completions) if cfg.loss_type == "real" else completions


def compute_expected(cfg: GrpoConfig, completions):
    for c in completions:
        c.logp.grad = c.entropy.grad = None
    loss = reference.grpo_loss(completions, cfg, MAX_COMPLETION_LENGTH)
    loss.backward()
    return loss.item(), [c.logp.grad.numpy() * c.mask.numpy() for c in completions], [c.entropy.grad.numpy() for c in completions]


def assert_equal(found, wanted, *, loss_rtol: float, grad_rtol: float, context) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=loss_rtol, abs=loss_rtol * 1e-2), context
    for kind in (1, 2):
        flat, right = np.concatenate(found[kind]), np.concatenate(wanted[kind])
        assert np.linalg.norm(flat - right) <= grad_rtol * np.linalg.norm(right) + 1e-14, context


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_equals_reference_for_every_legal_combination_and_partition(loss_type, level):
    number = LOSS_TYPES.index(loss_type) * 10 + LEVELS.index(level)
    rng = np.random.default_rng(number)
    for kl_mode, kl in KL_MODES.items():
        base = {"loss_type": loss_type, "importance_sampling_level": level, **kl}
        for cfg in (validate(base), draw_other_settings(rng, base, OTHERS), draw_other_settings(rng, base, OTHERS)):
            seed = int(rng.integers(1 << 30))
            completions = draw_batch(cfg, seed)
            wanted = compute_expected(cfg, completions)
            found = package_loss(cfg, completions, random_split(seed, len(completions)))
            assert_equal(found, wanted, loss_rtol=1e-11, grad_rtol=1e-11, context=(kl_mode, cfg))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_in_float32_is_within_tolerance_of_float64(loss_type):
    rng = np.random.default_rng(5)
    for level, kl in itertools.product(LEVELS, KL_MODES.values()):
        cfg = draw_other_settings(rng, {"loss_type": loss_type, "importance_sampling_level": level, **kl}, OTHERS)
        seed = int(rng.integers(1 << 30))
        completions = draw_batch(cfg, seed, dtype=torch.float32)
        wanted = compute_expected(cfg, completions)
        found = package_loss(cfg, completions, random_split(seed, len(completions)), torch.float32)
        assert_equal(found, wanted, loss_rtol=1e-6, grad_rtol=1e-5, context=cfg)


def test_gradient_does_not_depend_on_micro_batch_size():
    completions = random_batch(3, 12)
    cfg = GrpoConfig(loss_type="dapo", importance_sampling_level="sequence_token", beta=0.1, entropy_coef=0.01, overlong_filter=True)
    whole = package_loss(cfg, completions, [range(12)])
    for size in (1, 2, 3, 5):
        cut = package_loss(cfg, completions, [range(i, min(i + size, 12)) for i in range(0, 12, size)])
        assert_equal(cut, whole, loss_rtol=1e-12, grad_rtol=1e-12, context=size)


def test_loss_random_batches_cover_every_branch():
    """The comparison above proves nothing about a branch that no batch enters."""
    completions = [c for seed in range(40) for c in random_batch(seed)]
    stale = [c for c in completions if c.old_logp is not None]
    ratios = torch.cat([(c.logp - c.old_logp).detach().exp() for c in stale])
    assert (ratios < 0.8).any() and (ratios > 4.0).any() and ((ratios - 1).abs() < 1e-3).any()
    assert any(c.mask.sum() == 0 for c in completions)
    assert any(c.sampler_logp.isnan().any() for c in completions)
    means = [reference.masked_mean((c.sampler_logp - c.logp.detach()).nan_to_num(), c.mask) for c in stale if c.advantage < 0]
    assert min(means) < 0.01 < 0.3 < max(means)


def test_loss_on_policy_gradient_equals_policy_gradient():
    loss = GrpoLoss.from_config(GrpoConfig(), max_completion_length=4, temperature=1.0)
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        token_weights=torch.tensor([0.25, 0.25, 0.5]),
        advantages=torch.tensor([2.0, 2.0, -1.0]),
        sampler_logprobs=logprobs.detach(),
        old_logprobs=torch.full((3,), float("nan")),
        is_compared=torch.ones(3, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 1]),
        num_sequences=2,
        num_loss_tokens=3,
    )
    value, _ = loss(inputs, logprobs=logprobs)
    value.backward()
    # -(0.25 * 2 + 0.25 * 2 - 0.5): by hand.
    assert value.item() == -0.5
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.5]


def compute_one_token_loss(cfg: GrpoConfig, *, ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token with weight 1, and its gradient in the log-prob."""
    loss = GrpoLoss.from_config(cfg, max_completion_length=1, temperature=1.0)
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        token_weights=torch.ones(1),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        sampler_logprobs=torch.full((1,), float("nan")),
        old_logprobs=logprobs.detach() - np.log(ratio),
        is_compared=torch.ones(1, dtype=torch.bool),
        sequence=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        num_loss_tokens=1,
        token_index=torch.zeros(1, dtype=torch.int64),
        longest=1,
    )
    value, _ = loss(inputs, logprobs=logprobs)
    value.backward()
    return value.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("settings", "ratio", "advantage", "loss", "grad"),
    [
        # clip(1.5, 0.8, 1.2) * 2 is the smaller: flat.
        ({}, 1.5, 2.0, -2.4, 0.0),
        # The lower bound has its own epsilon.
        ({"epsilon_high": 0.28}, 1.27, 1.0, -1.27, -1.27),
        ({"epsilon_high": 0.28}, 1.5, 1.0, -1.28, 0.0),
        ({"epsilon_high": 0.28}, 0.5, -1.0, 0.8, 0.0),
        # A < 0 and a large ratio: unbounded without delta, flat with it.
        ({}, 9.0, -1.0, 9.0, 9.0),
        ({"delta": 4.0}, 9.0, -1.0, 4.0, 0.0),
        ({"delta": 4.0}, 3.0, -1.0, 3.0, 3.0),
        # CISPO: epsilon_high bounds r itself (5.0 by default), and the gradient never vanishes. logp = -1.
        ({"loss_type": "cispo"}, 9.0, 2.0, 10.0, -10.0),
        ({"loss_type": "cispo"}, 4.0, 2.0, 8.0, -8.0),
        ({"loss_type": "cispo", "epsilon_high": 2.0}, 4.0, -1.0, -2.0, 2.0),
        # SAPO at r = 1: -(4 / tau) / 2, slope -A.
        ({"loss_type": "sapo"}, 1.0, 3.0, -6.0, -3.0),
        ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, 1.0, -3.0, 3.0, 3.0),
        # LUSPO is the clipped surrogate; what differs is the weight.
        ({"loss_type": "luspo"}, 1.5, 2.0, -2.4, 0.0),
        # VESPO: phi(1) = 1; phi(2) = 2^k e^-lambda, k and lambda by the sign of A, 2 and 3, or 3 and 2. logp = -1.
        ({"loss_type": "vespo"}, 1.0, 3.0, 3.0, -3.0),
        ({"loss_type": "vespo"}, 2.0, 3.0, 3 * 4 * np.exp(-3), -3 * 4 * np.exp(-3)),
        ({"loss_type": "vespo"}, 2.0, -3.0, -3 * 8 * np.exp(-2), 3 * 8 * np.exp(-2)),
        ({"loss_type": "vespo", "vespo_k_neg": 1.0, "vespo_lambda_neg": 0.5}, 2.0, -3.0, -6 * np.exp(-0.5), 6 * np.exp(-0.5)),
        # FIPO: the last token's future is itself: a ratio of 1.1 gives a weight of 1.1, one of 2 is clipped to 1.2, and never below 1.
        ({"loss_type": "fipo"}, 1.1, 1.0, -1.21, -1.21),
        ({"loss_type": "fipo"}, 2.0, -1.0, 2.4, 2.4),
        ({"loss_type": "fipo"}, 0.9, 1.0, -0.9, -0.9),
        ({"loss_type": "fipo", "fipo_clip_high_only": False}, 0.9, 1.0, -0.81, -0.81),
        ({"loss_type": "fipo", "fipo_clip_range": None}, 2.0, -1.0, 4.0, 4.0),
        ({"loss_type": "fipo"}, 5.0, -1.0, 5.0, 5.0),  # unsafe: the weight is at most 1
        ({"loss_type": "fipo", "fipo_safety_threshold": None}, 5.0, -1.0, 6.0, 6.0),
        ({"loss_type": "fipo", "delta": 3.0, "fipo_safety_threshold": None}, 2.0, -1.0, 2.4, 2.4),
        ({"loss_type": "fipo", "delta": 3.0, "fipo_safety_threshold": None}, 4.0, -1.0, 3.0, 0.0),  # beyond delta: no future of its own
    ],
)
def test_loss_of_one_token_by_hand(settings, ratio, advantage, loss, grad):
    found = compute_one_token_loss(GrpoConfig(**settings), ratio=ratio, advantage=advantage)
    assert found == (pytest.approx(loss), pytest.approx(grad, abs=1e-12))


def test_fipo_future_kl_decays_by_half_life_over_all_tokens():
    """Three trained tokens at places 0, 1 and 3, a half-life of one token; log-ratios of the last two log 2 and log 4."""
    loss = GrpoLoss.from_config(
        GrpoConfig(loss_type="fipo", fipo_decay_rate=1.0, fipo_clip_range=0.0), max_completion_length=4, temperature=1.0
    )
    logprobs = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        token_weights=torch.ones(3), advantages=torch.full((3,), 0.01), sampler_logprobs=torch.full((3,), np.nan),
        old_logprobs=logprobs.detach() - torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).log(),
        is_compared=torch.ones(3, dtype=torch.bool), sequence=torch.zeros(3, dtype=torch.int64), num_sequences=1, num_loss_tokens=3,
        token_index=torch.tensor([0, 1, 3]), longest=4,
    )  # fmt: skip
    _, logs = loss(inputs, logprobs=logprobs)
    log2 = np.log(2)
    assert logs.sums["fipo/future_kl_mean"].item() == pytest.approx((log2 / 2 + 2 * log2 / 8) + (log2 + 2 * log2 / 4) + 2 * log2)
    exact = 2**0.75 + 2**1.5 + 4
    assert logs.sums["fipo/influence_weight_mean"].item() == pytest.approx(exact)


def test_real_loss_groups_by_hand():
    """Good ones have scores 0 and log 4, a bad one 0; beside a group of good ones alone, and one with a row that trains nothing."""
    scores, tau = [0.0, np.log(4), 0.0, 5.0, 5.0, 5.0, 0.0, 0.0, 7.0], 1.0
    advantages = [1.0, 2.0, -1.0, 1.0, 1.0, 0.0, 1.0, -1.0, -1.0]
    groups, trains = [0, 0, 0, 1, 1, 1, 2, 2, 2], [True] * 8 + [False]
    values, slopes = classification(scores, advantages, groups, trains, tau=tau)
    good = np.log(1 + 1 + 0.25)
    np.testing.assert_allclose(values, [3 * good / 2, 3 * good / 2, 3 * np.log(2), 0, 0, 0, 3 * np.log(2), 3 * np.log(2), 0])
    np.testing.assert_allclose(slopes, [-3 / 2.25, -3 * 0.25 / 2.25, 3 / 2, 0, 0, 0, -3 / 2, 3 / 2, 0])
    halved = classification(scores, advantages, groups, trains, tau=0.5)[1]
    assert halved[2] == pytest.approx(3 * 2 / 2)  # of a score of 0, twice as steep
    assert classification([0.0, 1e6], [1.0, -1.0], [0, 0], [True, True], tau=0.5)[1].tolist() == [-2.0, 4.0]  # no overflow


def test_the_entropy_bonus_of_a_single_token_by_hand():
    cfg = GrpoConfig(entropy_coef=0.5)
    loss = GrpoLoss.from_config(cfg, max_completion_length=1, temperature=1.0)
    one = torch.tensor([1.0], dtype=torch.float64)
    inputs = LossInputs(token_weights=one, advantages=0 * one, sampler_logprobs=one * float("nan"), old_logprobs=one * float("nan"),
                        is_compared=one > 0, sequence=torch.zeros(1, dtype=torch.int64), num_sequences=1, num_loss_tokens=1)  # fmt: skip
    assert loss(inputs, logprobs=-one, entropy=3 * one)[0].item() == -1.5


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, 2.0)])
def test_rollout_correction_includes_ratio_equal_to_bound(bounds):
    """An engine that agrees exactly is not masked by a bound of 1."""
    correction = rollout_correction("token_mask", lowest=bounds[0], highest=bounds[1], geometric=False)
    one_sequence = SequenceIndex(torch.zeros(2, dtype=torch.int64), 1, no_sum_over_context)
    assert correction(torch.zeros(2, dtype=torch.float64), one_sequence).factors.tolist() == [1.0, 1.0]


def test_off_policy_mask_with_delta_zero_includes_unchanged_sequence():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    kept = off_policy_mask(0.0, logprobs=logprobs, old_logprobs=logprobs, sampler_logprobs=logprobs,
                                       advantages=torch.tensor([-1.0, -1.0]),
                                       sequences=SequenceIndex(torch.zeros(2, dtype=torch.int64), 1, no_sum_over_context))  # fmt: skip
    assert kept.tolist() == [1.0, 1.0]


def test_loss_with_log_ratio_above_20_is_finite_without_gradient():
    value, grad = compute_one_token_loss(GrpoConfig(), ratio=np.exp(60.0), advantage=-1.0)
    assert value == pytest.approx(np.exp(20.0)) and grad == 0.0


def test_loss_of_a_rank_without_trained_positions_is_a_zero_that_backpropagates():
    for loss_type, level in itertools.product(LOSS_TYPES, LEVELS):
        cfg = GrpoConfig(loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.1)
        loss = GrpoLoss.from_config(cfg, max_completion_length=4, temperature=1.0)
        completions = random_batch(1)
        weights = token_weight_fn(loss, completions)
        packed = pack(completions, weights, [], torch.float32, compute_labels(loss, completions, weights))
        value, logs = loss(packed.inputs, logprobs=packed.logprobs, entropy=packed.entropy, ref_logprobs=packed.ref_logprobs)
        value.backward()
        assert value.item() == 0.0 and packed.logprobs.grad.shape == (0,)
        assert all(v.item() == 0.0 for v in logs.sums.values())
        nothing = {"logp_difference": 0.0, "clip_low": -np.inf, "clip_high": -np.inf}  # smaller than what any other rank may have
        assert {name: v.item() for name, v in logs.maxima.items()} == nothing


def test_loss_logs_are_detached_copies():
    """Megatron's schedule may scale the loss it is given in place."""
    completions = random_batch(2)
    loss = GrpoLoss.from_config(GrpoConfig(), max_completion_length=9, temperature=1.0)
    packed = pack(completions, token_weight_fn(loss, completions), range(8), torch.float64)
    value, logs = loss(packed.inputs, logprobs=packed.logprobs)
    before = logs.sums["loss"].item()
    with torch.no_grad():
        value *= 1000.0
    assert logs.sums["loss"].item() == before and not logs.sums["loss"].requires_grad


def test_loss_with_missing_inputs_raises_with_their_names():
    cfg = GrpoConfig(beta=0.1, top_entropy_quantile=0.2)
    loss = GrpoLoss.from_config(cfg, max_completion_length=9, temperature=1.0)
    completions = random_batch(2)
    packed = pack(completions, token_weight_fn(loss, completions), range(8), torch.float64)
    assert (loss.needs_reference, loss.needs_entropy, loss.needs_entropy_threshold) == (True, True, True)
    with pytest.raises(ValueError, match="entropy and ref_logprobs and entropy_threshold"):
        loss(packed.inputs, logprobs=packed.logprobs)


def test_loss_with_beta_zero_or_kl_in_reward_needs_no_reference():
    for settings in ({}, {"beta": 0.1, "kl_in_reward": True}):
        assert not GrpoLoss.from_config(GrpoConfig(**settings), max_completion_length=9, temperature=1.0).needs_reference


def test_loss_with_kl_in_reward_logs_kl_without_gradient():
    completions = random_batch(6)
    loss, plain = (GrpoLoss.from_config(GrpoConfig(beta=beta, kl_in_reward=beta > 0), max_completion_length=9, temperature=1.0)
                   for beta in (0.3, 0.0))  # fmt: skip
    packed = pack(completions, token_weight_fn(loss, completions), range(8), torch.float64)
    value, logs = loss(packed.inputs, logprobs=packed.logprobs, ref_logprobs=packed.ref_logprobs)
    assert value.item() == plain(packed.inputs, logprobs=packed.logprobs)[0].item()
    assert logs.sums["kl"] > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_slope_of_any_slice_equals_whole_gradient_exactly(loss_type):
    """The head uses what it made with the slope only where the loss then asks for exactly that."""
    rng, asked = np.random.default_rng(11), 0
    for kl in KL_MODES.values():
        cfg = draw_other_settings(rng, {"loss_type": loss_type, **kl}, {**OTHERS, "entropy_coef": (0.0,), "top_entropy_quantile": (1.0,)})
        loss, completions = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0), random_batch(asked)
        weights = token_weight_fn(loss, completions)
        packed = pack(completions, weights, range(len(completions)), torch.float32, compute_labels(loss, completions, weights))
        ref_logprobs = packed.ref_logprobs if loss.needs_reference else None
        loss(packed.inputs, logprobs=packed.logprobs, ref_logprobs=ref_logprobs)[0].backward()
        if not loss.is_per_token:
            of_a_sequence = cfg.rollout_importance_sampling_mode.startswith("sequence") or cfg.off_policy_sequence_mask_delta is not None
            assert of_a_sequence or loss_type in ("vespo", "fipo")
            continue
        asked += 1
        for chunk in (slice(0, 1), slice(1, 12), slice(12, None)):
            names = ("token_weights", "advantages", "sampler_logprobs", "old_logprobs", "is_compared", "sequence")
            labels = packed.inputs.labels and ClassificationTerms(*(of[chunk] for of in packed.inputs.labels))
            piece = dataclasses.replace(packed.inputs, **{name: getattr(packed.inputs, name)[chunk] for name in names}, labels=labels)
            piece_ref = None if ref_logprobs is None else ref_logprobs[chunk]
            found = loss.slope(piece, logprobs=packed.logprobs[chunk], ref_logprobs=piece_ref)
            assert torch.equal(found, packed.logprobs.grad[chunk]), cfg
    assert bool(asked) == (loss_type not in ("vespo", "fipo"))


@pytest.mark.parametrize("settings", [
    dict(importance_sampling_level="sequence"), dict(importance_sampling_level="sequence_token"), dict(entropy_coef=0.01),
    dict(loss_type="vespo"), dict(loss_type="fipo"),
    dict(top_entropy_quantile=0.5), dict(rollout_importance_sampling_mode="sequence_mask"), dict(off_policy_sequence_mask_delta=0.1),
], ids=str)  # fmt: skip
def test_loss_that_depends_on_other_tokens_has_no_slope(settings):
    assert GrpoLoss.from_config(GrpoConfig(), max_completion_length=9, temperature=1.0).is_per_token
    assert not GrpoLoss.from_config(GrpoConfig(**settings), max_completion_length=9, temperature=1.0).is_per_token


def test_teacher_advantage_by_hand():
    """Two on-policy tokens, and one whose old log-prob is -1: A + 2 (log p_teacher - log p_old); the third no teacher has seen."""
    cfg = GrpoConfig(teacher_model_server=["http://t:1"], teacher_kl_coef=2.0, epsilon=0.9)
    logp = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        token_weights=torch.ones(4), advantages=torch.tensor([0.5, 0.5, -1.0, 0.0]), sampler_logprobs=torch.full((4,), torch.nan),
        old_logprobs=torch.tensor([torch.nan, torch.nan, torch.nan, -1.0]), is_compared=torch.ones(4, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 1, 2]), num_sequences=3, num_loss_tokens=4,
        teacher_logprobs=torch.tensor([-1.25, -1.0, torch.nan, -2.0]),
    )  # fmt: skip
    loss_of = GrpoLoss.from_config(cfg, max_completion_length=8, temperature=1.0)
    loss, logs = loss_of(inputs, logprobs=logp)
    ratio = math.exp(-2.0)  # of the last one
    advantages = [0.5 + 2 * -0.25, 0.5 + 2 * 1.0, -1.0, 2 * -1.0]
    right = -(advantages[0] + advantages[1] + advantages[2] + max(ratio, 0.1) * advantages[3])
    assert loss.item() == pytest.approx(right, rel=1e-12)
    (grad,) = torch.autograd.grad(loss, logp)
    assert grad.tolist() == pytest.approx([-advantages[0], -advantages[1], -advantages[2], -ratio * advantages[3]], rel=1e-12)
    k3 = [math.exp(d) - d - 1 for d in (-0.25, 1.0, -1.0)]
    told = finish({name: float(value) for name, value in logs.sums.items()}, logs.maxima)
    assert told["teacher_kl"] == pytest.approx(sum(k3) / 3, rel=1e-12)
    plain = GrpoLoss.from_config(GrpoConfig(), max_completion_length=8, temperature=1.0)
    assert "teacher_kl" not in plain(inputs, logprobs=logp)[1].sums
    nobody = dataclasses.replace(inputs, teacher_logprobs=torch.full((4,), torch.nan))
    unseen = GrpoLoss.from_config(GrpoConfig(epsilon=0.9), max_completion_length=8, temperature=1.0)
    assert loss_of(nobody, logprobs=logp)[0] == unseen(nobody, logprobs=logp)[0]
    assert "teacher_kl" not in finish({k: float(v) for k, v in loss_of(nobody, logprobs=logp)[1].sums.items()}, logs.maxima)
