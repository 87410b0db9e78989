"""Combinations of GRPO settings: legal ones pass, others are rejected with a reason."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.core.settings import GrpoConfig, RolloutConfig
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.settings import Config, RewardConfig
from megatron_grpo.run.config.table import table


def make_config(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, reward_funcs=(), **grpo):
    sampling = RolloutConfig(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    return Config(grpo=GrpoConfig(**grpo), rollout=sampling, rewards=RewardConfig(reward_funcs=[*reward_funcs]))


def test_grpo_defaults_give_no_problems_and_no_warnings():
    assert validation.problems(Config()) == [] and validation.warnings(Config()) == []


def test_grpo_settings_each_choice_is_legal_alone():
    restricted = [setting for setting in table().values() if setting.group == "grpo" and setting.choices]
    assert restricted
    for setting in restricted:
        for choice in setting.choices:
            assert validation.problems(make_config(**{setting.name: choice})) == [], (setting.name, choice)


@pytest.mark.parametrize(
    ("settings", "flag", "reason"),
    [
        ({"loss_type": "vespo", "delta": 4.0}, "delta", "which loss_type vespo does not have"),
        (
            {"loss_type": "vespo", "rollout_importance_sampling_mode": "sequence_mask"},
            "rollout_importance_sampling_mode",
            "would be counted once per token",
        ),
        (
            {"loss_type": "real", "rollout_importance_sampling_mode": "token_mask"},
            "rollout_importance_sampling_mode",
            "applies to single tokens, but loss_type real",
        ),
        ({"loss_type": "real", "top_entropy_quantile": 0.5}, "top_entropy_quantile", "applies to single tokens, but loss_type real"),
        (
            {"loss_type": "real", "off_policy_sequence_mask_delta": 0.5},
            "off_policy_sequence_mask_delta",
            "applies to single tokens, but loss_type real",
        ),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "kl_estimator", "zero mean"),
        ({"loss_type": "cispo", "delta": 4.0}, "delta", "which loss_type cispo does not have"),
        ({"loss_type": "sapo", "delta": 4.0}, "delta", "which loss_type sapo does not have"),
        ({"kl_in_reward": True}, "kl_in_reward", "beta is 0"),
        ({"kl_in_reward": True, "beta": 0.1, "advantage_estimator": "gdpo"}, "kl_in_reward", "a single reward"),
        ({"kl_in_reward": True, "beta": 0.1, "scale_rewards": "gdpo"}, "kl_in_reward", "a single reward"),
        ({"sync_ref_model": True}, "sync_ref_model", "beta 0 uses none"),
        ({"advantage_estimator": "rloo", "scale_rewards": "batch"}, "scale_rewards", "rloo has a fixed one"),
        ({"multi_objective_aggregation": "normalize_then_sum", "advantage_estimator": "rloo"}, "multi_objective_aggregation", "gdpo"),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, "multi_objective_aggregation", "gdpo"),
        ({"rollout_is_geometric": True}, "rollout_is_geometric", "applies to sequence ratios"),
        ({"rollout_is_geometric": True, "rollout_importance_sampling_mode": "token_mask"}, "rollout_is_geometric", "token_mask"),
        ({"rollout_importance_sampling_min": 0.5}, "rollout_importance_sampling_min", "is disabled"),
        ({"teacher_model_server": ["http://t:1"], "min_p": 0.1}, "min_p", r"with min_p \(0.1\) tokens are sampled from another"),
        (
            {"teacher_model_server": ["http://t:1"], "oversample_ratio": 1.5},
            "oversample_ratio",
            "without reward_funcs all groups are zero-std",
        ),
        (
            {"rollout_importance_sampling_min": 3.0, "rollout_importance_sampling_mode": "token_mask"},
            "rollout_importance_sampling_min",
            r"below rollout_importance_sampling_threshold \(2.0\)",
        ),
    ],
)
def test_grpo_incompatible_settings_are_rejected_with_reason(settings, flag, reason):
    (problem,) = validation.problems(make_config(**settings))
    assert flag in problem.flags
    assert re.search(reason, problem.message), problem.message


def test_all_problems_are_reported_together():
    found = validation.problems(make_config(loss_type="vespo", delta=4.0, kl_in_reward=True, rollout_is_geometric=True))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss_type": "cispo"}, "5.0 is used"),
        ({"loss_type": "cispo", "epsilon_high": 0.2}, "every weight becomes 0.2"),
        ({"loss_type": "sapo", "epsilon_high": 0.28}, "does not clip"),
        ({"loss_type": "luspo"}, "which equals sequence_sum"),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "only changes the ratio that corrects the KL"),
        ({"loss_type": "real", "epsilon_high": 0.28}, "real does not clip"),
        ({"delta": 1.1}, "not above 1 \\+ epsilon_high"),
        ({"importance_sampling_level": "sequence"}, "3e-4"),
        ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "dapo"}, "once per token"),
        ({"advantage_estimator": "reinforce_plus_plus", "exclude_zero_std_groups": True}, "whole batch"),
        ({"kl_in_reward": True, "beta": 0.1, "exclude_zero_std_groups": True}, "^kl_in_reward with exclude_zero_std_groups: .* differ"),
        (
            {"kl_in_reward": True, "beta": 0.1, "exclude_zero_std_groups": True, "dynamic_sample": True},
            "leave dynamic_sample and exclude_zero_std_groups out",
        ),
        ({"teacher_model_server": ["http://t:1"], "importance_sampling_level": "sequence", "epsilon": 3e-4}, "averaged over the sequence"),
        (
            {"teacher_model_server": ["http://t:1"], "reward_funcs": ["length"], "dynamic_sample": True},
            "the teacher's signal also trains zero-std groups",
        ),
    ],
)
def test_grpo_unusual_settings_give_a_warning(settings, says):
    assert validation.problems(make_config(**settings)) == []
    (warning,) = validation.warnings(make_config(**settings))
    assert re.search(says, warning), warning


@pytest.mark.parametrize(
    ("rollout", "says", "nearest"),
    [
        (
            {"top_k": 257},
            "top_k (257) is more than 256: the IDs of the remaining tokens are stored with every sampled token",
            {"top_k": [256, 0]},
        ),
        ({"top_p": 0.9}, None, {}),
        ({"min_p": 0.1}, None, {}),
        ({"vllm_structured_outputs_regex": "a+"}, None, {}),
        ({"min_p": 0.1, "top_k": 4, "rollout_func": "a.py:f"}, "top_k 4 and min_p 0.1 is not supported with rollout_func", {}),
        ({"top_k": 1}, "top_k (1) keeps only the most likely token", {"top_k": [64, 0]}),
        ({"top_k": 5, "min_p": 1.0}, "min_p (1) keeps only the most likely token", {"min_p": [0.0]}),
        ({"min_p": 0.1, "top_k": 256, "top_p": 0.9}, None, {}),
    ],
)
def test_sampling_mask_without_finite_size_is_rejected(rollout, says, nearest):
    found = validation.problems(Config(rollout=RolloutConfig(**rollout)))
    assert [says in one.message for one in found] == ([True] if says else []) and all(one.nearest == nearest for one in found)
    assert validation.warnings(Config(rollout=RolloutConfig(top_p=0.9, top_k=5))) == []


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_p": 0.9, "min_p": 0.1}, "top_p 0.9 and min_p 0.1"),
        ({"generation_kwargs": {"structured_outputs": {"choice": ["a", "b"]}}}, "structured outputs"),
    ],
)
def test_top_p_or_min_p_without_top_k_uses_largest_top_k_with_warning(rollout, said):
    cfg = RolloutConfig(**rollout)
    (warning,) = validation.warnings(Config(rollout=cfg))
    assert warning.startswith(f"Note: {said} without top_k implies top_k 256")
    asked = SamplingSettings.from_config(cfg, num_generations=2)
    assert (asked.top_k, asked.top_p, asked.min_p, asked.returns_sampling_mask) == (256, cfg.top_p, cfg.min_p, True)
    assert SamplingSettings.from_config(RolloutConfig(), num_generations=2).top_k == 0


def test_gspo_with_settings_of_its_paper_gives_no_warning():
    assert validation.warnings(make_config(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)) == []


def test_checking_imports_no_torch():
    code = "import sys; import megatron_grpo.run.config.rules.grpo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("sizes", "flag", "near"),
    [
        (dict(generation=24, global_batch=12, passes=1), "global_batch_size", {"global_batch_size": [8, 16]}),
        (dict(generation=24, global_batch=16, passes=2), "num_iterations", {"num_iterations": [1]}),
    ],
)
def test_real_loss_without_whole_groups_per_step_is_rejected(sizes, flag, near):
    (problem,) = validation.group_problems(GrpoConfig(loss_type="real"), group=8, **sizes)
    assert flag in problem.flags and problem.nearest == near
    assert validation.group_problems(GrpoConfig(), group=8, **sizes) == []
    assert validation.group_problems(GrpoConfig(loss_type="real"), generation=32, global_batch=16, group=8, passes=2) == []
