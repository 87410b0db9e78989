"""Rows that are not computed have no gradient in any loss, and rows with a gradient are computed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.loss import OBJECTIVES, GrpoLoss
from megatron_grpo.core.grpo.zero_gradient import DECIDING, has_zero_gradient, zero_gradient_kinds
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.config.settings import Config
from tests.reference.packing import MAX_COMPLETION_LENGTH, compute_threshold, pack, package_loss, random_batch, token_weight_fn

WEIGHTLESS = {"no_token"}
LOOKED_AT = {
    "KL": dict(beta=0.1),
    "entropy bonus": dict(entropy_coef=0.02),
    "negative entropy bonus": dict(entropy_coef=-0.02),
    "adaptive entropy": dict(use_adaptive_entropy=True, entropy_coef=0.02),
    "quantile": dict(top_entropy_quantile=0.5),
    "teacher": dict(teacher_model="a"),
    "teacher on a server": dict(teacher_model_server=["http://a"]),
}
LEFT_OUT = {
    **{loss_type: dict(loss_type=loss_type) for loss_type in OBJECTIVES if loss_type != "real"},
    "GSPO": dict(importance_sampling_level="sequence"),
    "GSPO-token": dict(importance_sampling_level="sequence_token"),
    "KL in the reward": dict(beta=0.1, kl_in_reward=True),
    "two-sided": dict(delta=1.5),
    "corrected": dict(rollout_importance_sampling_mode="sequence_mask"),
    "off-policy mask": dict(off_policy_sequence_mask_delta=0.01),
    "entropy is logged": dict(log_entropy=True),
}
FILTERS = {"overlong_filter": "truncated", "exclude_zero_std_groups": "zero_std"}


def find_kinds(**settings):
    return zero_gradient_kinds(list_settings(Config().with_values(settings)))


def find_omitted_rows(completions, kinds) -> list[bool]:
    rows = [
        SimpleNamespace(
            num_masked=int(c.mask.sum()), is_truncated=c.is_truncated, is_zero_std=c.is_zero_std, is_zero_advantage=c.advantage == 0.0
        )
        for c in completions
    ]
    return [has_zero_gradient(row, kinds) for row in rows]


def make_batch(seed: int):
    """A row without a trained token; and one with advantage 0 in a group that has a signal."""
    completions = random_batch(seed, 12)
    completions[3].mask.zero_()
    completions[5].advantage, completions[5].is_zero_std, completions[5].is_truncated = 0.0, False, False
    completions[5].mask.fill_(1.0)
    completions[7].is_zero_std, completions[7].advantage = True, 0.0
    completions[8].is_truncated = True
    return completions


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("filters", [(), ("overlong_filter",), ("exclude_zero_std_groups",), tuple(FILTERS)])
def test_omitted_row_has_no_gradient_and_does_not_change_others(name, filters):
    settings = LEFT_OUT[name] | dict.fromkeys(filters, True)
    kinds = find_kinds(**settings)
    assert kinds == WEIGHTLESS | {"zero_advantage"} | {FILTERS[one] for one in filters}
    for seed in range(5):
        completions = make_batch(seed)
        gone = find_omitted_rows(completions, kinds)
        assert gone[3] and gone[5] and gone[7] and not all(gone)
        loss, of_logp, of_entropy, _ = package_loss(GrpoConfig(**settings), completions, [range(12)])
        for place in np.flatnonzero(gone):
            assert not of_logp[place].any() and not of_entropy[place].any(), place
        kept = [place for place in range(12) if not gone[place]]
        alone, logp_alone, _, _ = package_loss(GrpoConfig(**settings), completions, [kept])
        assert alone == pytest.approx(loss, rel=1e-14, abs=1e-14)
        assert all(np.array_equal(of_logp[place], logp_alone[place]) for place in kept)


@pytest.mark.parametrize("name", [name for name in LOOKED_AT if "teacher" not in name and name != "adaptive entropy"])
def test_zero_advantage_rows_are_computed_if_a_setting_needs_them(name):
    settings = LOOKED_AT[name]
    assert find_kinds(**settings) == WEIGHTLESS
    cfg, changed = GrpoConfig(**settings), False
    for seed in range(5):
        completions = make_batch(seed)
        _, of_logp, of_entropy, _ = package_loss(cfg, completions, [range(12)])
        loss = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0)
        weights = token_weight_fn(loss, completions)
        without = dataclasses.replace(weights, row_weights=weights.row_weights * [place != 5 for place in range(12)])
        changed |= bool(of_logp[5].any() or of_entropy[5].any())
        changed |= compute_threshold(cfg, completions, weights) != compute_threshold(cfg, completions, without)
    assert changed, "the row has a gradient, or it moves the threshold of others"


def test_zero_advantage_rows_with_teacher_have_a_gradient():
    completions = make_batch(0)
    cfg = GrpoConfig(teacher_model="a")
    loss = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0)
    packed = pack(completions, token_weight_fn(loss, completions), [5], torch.float64)
    taught = dataclasses.replace(packed.inputs, teacher_logprobs=packed.inputs.old_logprobs.nan_to_num(-1.0) - 0.5)
    loss(taught, logprobs=packed.logprobs)[0].backward()
    assert packed.logprobs.grad.any()


@pytest.mark.parametrize("name", LOOKED_AT)
def test_rows_of_weight_zero_are_always_omitted(name):
    assert find_kinds(**LOOKED_AT[name], overlong_filter=True) == WEIGHTLESS | {"truncated"}


@pytest.mark.parametrize(
    "settings",
    [dict(compute_zero_advantage_rows=True), dict(moe_z_loss_coeff=0.01), dict(loss_type="real")],
    ids=lambda one: next(iter(one)),
)
def test_no_row_is_omitted_if_every_row_has_a_gradient(settings):
    kinds = find_kinds(**settings, overlong_filter=True, exclude_zero_std_groups=True)
    assert kinds == frozenset() and not any(find_omitted_rows(make_batch(0), kinds))


def test_checkpoint_without_zero_gradient_record_omits_no_rows():
    settings = list_settings(Config())
    assert zero_gradient_kinds(settings) and not zero_gradient_kinds(
        {name: settings[name] for name in settings if name not in DECIDING[:1]}
    )


def test_zero_gradient_rules_name_every_setting_they_read():
    """A resume compares these."""

    class RecordingDict(dict):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

    read: set[str] = set()
    for changes in ({}, dict(kl_in_reward=True, beta=0.1)):
        zero_gradient_kinds(RecordingDict(list_settings(Config().with_values(changes))))
    assert read == set(DECIDING)


def test_row_weights_are_zero_exactly_for_filtered_rows():
    for filters in ((), ("overlong_filter",), ("exclude_zero_std_groups",), tuple(FILTERS)):
        completions = make_batch(1)
        cfg = GrpoConfig(**dict.fromkeys(filters, True))
        weights = token_weight_fn(GrpoLoss.from_config(cfg, max_completion_length=9, temperature=1.0), completions)
        kinds = frozenset({"no_token", *(FILTERS[one] for one in filters)})
        assert (weights.row_weights == 0).tolist() == find_omitted_rows(completions, kinds)
