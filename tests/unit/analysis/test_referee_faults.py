# ruff: noqa: E501 - lines of TRL's source, and what stands in their place
"""The referee on dumps of TRL with errors planted in copies of TRL's methods, and on correct dumps."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee import trl
from megatron_grpo_referee.findings import findings
from tests.referee_dumps import MAX_COMPLETION_LENGTH, G, dump_trl

pytest.importorskip("trl", reason="TRL is a test-only dependency: pip install megatron-grpo[dev]")


@pytest.fixture(autouse=True)
def float32_by_default():
    torch.set_default_dtype(torch.float32)


# TRL's names that GrpoConfig spells otherwise
OURS = {
    "use_vllm": None, "vllm_importance_sampling_mode": "rollout_importance_sampling_mode", "clip_max": "rollout_importance_sampling_threshold",
    "clip_min": "rollout_importance_sampling_min", "mask_truncated_completions": "overlong_filter",
    "off_policy_mask_threshold": "off_policy_sequence_mask_delta",
}  # fmt: skip


def settings_for(theirs: dict) -> SimpleNamespace:
    ours = {OURS.get(name, name): value for name, value in theirs.items() if OURS.get(name, name)}
    if not theirs.get("use_vllm"):
        ours.pop("rollout_importance_sampling_mode", None)
    return SimpleNamespace(
        **vars(GrpoConfig(**ours)),
        num_generations=G,
        reward_weights=[1.0, 0.5],
        max_completion_length=MAX_COMPLETION_LENGTH,
        temperature=1.0,
        weights=None,
    )


def judge(folder, seed, theirs, **made):
    s = settings_for(theirs)
    return findings(trl.read(dump_trl(folder, seed, **theirs, **made), None, s), s)


LOSS, SCORE = "_compute_loss", "_generate_and_score_completions"
DAPO, VLLM = {"loss_type": "dapo"}, {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "clip_max": 1.3}
MINIMUM = "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)"
CLIP = "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"
PER_ROW = "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
OVER_TOKENS = "loss = (per_token_loss * mask).sum() / normalizer"
KL = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
OLD = "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps"
CORRECT = 'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]'
STD = "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)"
RATIO = "logps_diff = old_per_token_logps - sampling_per_token_logps"
MICRO = {"micro_batches": 4}

# name -> settings of TRL, of the dump, (method, text, text instead), quantity that parts first, words of its cause
FAULTS = {
    "length bias": (DAPO, MICRO, (LOSS, OVER_TOKENS, PER_ROW + " / self.current_gradient_accumulation_steps"), "loss", "length bias"),
    "length bias in dr_grpo": ({"loss_type": "dr_grpo"}, {}, (LOSS, "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)", PER_ROW), "loss", "length bias"),
    "token mean for row mean": ({}, {}, (LOSS, PER_ROW, "loss = (per_token_loss * mask).sum() / mask.sum()"), "loss", "a mean over all tokens"),
    "sum over tokens": ({}, {}, (LOSS, PER_ROW, "loss = (per_token_loss * mask).sum(-1).mean()"), "loss", "divided by no length"),
    "mean of micro-batch means": (DAPO, MICRO, (LOSS, OVER_TOKENS, "loss = (per_token_loss * mask).sum() / mask.sum() / self.current_gradient_accumulation_steps"), "loss", "mean of micro-batch means"),
    "masked tokens counted, rows": ({}, {}, (LOSS, PER_ROW, "loss = ((per_token_loss * mask).sum(-1) / completion_mask.sum(-1)).mean()"), "loss", "masked tokens counted"),
    "masked tokens counted, tokens": (DAPO, MICRO, (SCORE, "gather(loss_mask.sum()).sum()", "gather(completion_mask.sum()).sum()"), "tokens in the mean", "masked tokens counted"),
    "masked tokens trained": ({}, {}, (LOSS, PER_ROW, "loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1)).mean()"), "loss", "masked tokens trained"),
    "padding in the mean, rows": ({}, {}, (LOSS, PER_ROW, "loss = (per_token_loss * mask).mean(-1).mean()"), "loss", "padding in the mean"),
    "padding in the mean, tokens": (DAPO, MICRO, (SCORE, "gather(loss_mask.sum()).sum()", "gather(torch.tensor(loss_mask.numel())).sum()"), "tokens in the mean", "padding counted"),
    "truncated rows kept": ({"mask_truncated_completions": True}, {}, (SCORE, "if self.mask_truncated_completions:", "if False:"), "tokens in the mean", "truncated rows kept"),
    "empty rows left out": ({"mask_truncated_completions": True}, {}, (LOSS, PER_ROW, "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / (mask.sum(-1) > 0).sum()"), "loss", "rows without a trained token"),
    "not divided by accumulation": ({}, MICRO, (LOSS, PER_ROW, "loss = self.current_gradient_accumulation_steps * " + PER_ROW[7:]), "loss", "not divided by the number of micro-batches"),
    "divided twice": ({}, MICRO, (LOSS, PER_ROW, PER_ROW + " / self.current_gradient_accumulation_steps"), "loss", "divided by the number of micro-batches once more"),
    "the batch is a group": ({"scale_rewards": "none"}, {}, (SCORE, "torch.nanmean(rewards.view(-1, num_generations), dim=1)", "torch.nanmean(rewards).repeat(len(rewards) // num_generations)"), "advantages", "the whole batch is one group"),
    "halves of groups": ({"scale_rewards": "none"}, {}, (SCORE, "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)\n            mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)", "mean_grouped_rewards = rewards.view(-1, 2).mean(1).repeat_interleave(2)"), "advantages", "each part of 2"),
    "every G-th": ({"scale_rewards": "none"}, {}, (SCORE, "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)\n            mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)", "mean_grouped_rewards = rewards.view(num_generations, -1).mean(0).repeat(num_generations)"), "advantages", "every G-th"),
    "n for n - 1": ({}, {}, (SCORE, STD, "std_rewards = rewards.view(-1, num_generations).std(dim=1, unbiased=False)"), "advantages", "n instead of n - 1"),
    "batch deviation": ({}, {}, (SCORE, "std_rewards = std_rewards.repeat_interleave(num_generations, dim=0)", "std_rewards = nanstd(rewards).expand_as(rewards)"), "advantages", "deviation of the batch"),
    "not scaled": ({}, {}, (SCORE, 'if self.scale_rewards != "none":', "if False:"), "advantages", "not divided by a standard deviation"),
    "not centered": ({}, {}, (SCORE, "advantages = rewards - mean_grouped_rewards", "advantages = rewards"), "advantages", "mean is not subtracted"),
    "no reward weights": ({}, {}, (SCORE, "rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)\n            rewards[unscorable_mask]", "rewards = rewards_per_func.nansum(dim=1)\n            rewards[unscorable_mask]"), "advantages", "reward_weights are not applied"),
    "small epsilon": ({}, {"small": True}, (SCORE, "advantages = advantages / (std_rewards + 1e-4)", "advantages = advantages / (std_rewards + 1e-6)"), "advantages", "1e-06 instead of 0.0001"),
    "correction twice": (VLLM, {}, (LOSS, CORRECT, CORRECT + ' * inputs["importance_sampling_ratio"]'), "loss", "applied twice"),
    "correction divides": (VLLM, {}, (LOSS, CORRECT, CORRECT.replace("loss * ", "loss / ")), "loss", "wrong side: it divides"),
    "correction not applied": (VLLM, {}, (LOSS, CORRECT, "pass"), "loss", "sampler is not applied"),
    "sampler over trainer": (VLLM, {}, (SCORE, "old_per_token_logps - sampling_per_token_logps", "sampling_per_token_logps - old_per_token_logps"), "correction", "wrong side: sampler over trainer"),
    "correction unbounded": (VLLM, {}, (SCORE, "vllm_importance_sampling_ratio = torch.clamp(", "vllm_importance_sampling_ratio = (lambda x, min, max: x)("), "correction", "not bounded"),
    "staleness ignored": ({}, {}, (LOSS, OLD, "old_per_token_logps = per_token_logps.detach()"), "loss", "staleness ignored"),
    "old are the sampler's": (VLLM, {}, (LOSS, OLD, 'old_per_token_logps = torch.where(inputs["sampling_per_token_logps"].isnan(), inputs["old_per_token_logps"], inputs["sampling_per_token_logps"])'), "loss", "they are the sampler's"),
    "old of another version": ({}, {"fresh": True}, (LOSS, OLD, OLD), "old log-probs", "old log-probs of the wrong version"),
    "ratio inverted": ({}, {}, (LOSS, "log_ratio = per_token_logps - old_per_token_logps", "log_ratio = old_per_token_logps - per_token_logps"), "loss", "inverted"),
    "sequence ratio": ({}, {}, (LOSS, 'if self.importance_sampling_level == "token":', "if False:\n            pass\n        elif True:\n            log_importance_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)\n        elif True:"), "loss", "of the sequence"),
    "clip on the wrong side": ({}, {}, (LOSS, MINIMUM, MINIMUM.replace("torch.min", "torch.max")), "loss", "clip on the wrong side: the larger"),
    "bounds swapped": ({"epsilon": 0.1, "epsilon_high": 0.4}, {}, (LOSS, CLIP, "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_high, 1 + self.epsilon_low)"), "loss", "epsilon and epsilon_high are swapped"),
    "epsilon_high ignored": ({"epsilon_high": 0.5}, {}, (LOSS, CLIP, "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_low)"), "loss", "epsilon_high is not applied"),
    "not clipped": ({}, {}, (LOSS, CLIP, "coef_2 = coef_1"), "loss", "not clipped"),
    "delta ignored": ({"delta": 1.5}, {}, (LOSS, "if self.args.delta is not None:", "if False:"), "loss", "delta"),
    "clipped without minimum": ({}, {}, (LOSS, MINIMUM, "per_token_loss = -per_token_loss2"), "loss", "without the minimum"),
    "advantage sign": ({}, {}, (LOSS, 'advantages = inputs["advantages"]', 'advantages = -inputs["advantages"]'), "loss", "sign of the advantages"),
    "KL subtracted": ({"beta": 0.1}, {}, (LOSS, "per_token_loss + self.beta * per_token_kl", "per_token_loss - self.beta * per_token_kl"), "loss", "KL of the wrong sign: it is subtracted"),
    "KL exchanged": ({"beta": 0.1}, {}, (LOSS, KL, "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1"), "kl", "exchanged"),
    "k1": ({"beta": 0.1}, {}, (LOSS, KL, "per_token_logps - ref_per_token_logps"), "kl", "k1 instead of k3"),
    "k2": ({"beta": 0.1}, {}, (LOSS, KL, "(per_token_logps - ref_per_token_logps) ** 2 / 2"), "kl", "k2 instead of k3"),
    "KL not weighted": ({"beta": 0.1}, {}, (LOSS, "per_token_kl = per_token_kl * coef_1", "pass"), "kl", "is not multiplied by the importance ratio"),
    "KL not applied": ({"beta": 0.1}, {}, (LOSS, "per_token_loss = per_token_loss + self.beta * per_token_kl", "pass"), "loss", "KL term is not applied"),
    "entropy sign": ({"entropy_coef": 0.1}, {}, (LOSS, "loss = loss - apply_coef * entropy_loss", "loss = loss + apply_coef * entropy_loss"), "loss", "entropy bonus has the wrong sign"),
    "off-policy mask ignored": ({"off_policy_mask_threshold": 0.05}, {}, (LOSS, "per_token_loss = per_token_loss * off_policy_mask", "pass"), "loss", "off_policy_sequence_mask_delta is not applied"),
    "cispo bound": ({"loss_type": "cispo", "epsilon_high": 1.5}, {}, (LOSS, "torch.clamp(coef_1, max=self.epsilon_high).detach()", "torch.clamp(coef_1, max=1 + self.epsilon_high).detach()"), "loss", "1 + epsilon_high"),
    "cispo not detached": ({"loss_type": "cispo", "epsilon_high": 1.5}, {}, (LOSS, "torch.clamp(coef_1, max=self.epsilon_high).detach()", "torch.clamp(coef_1, max=self.epsilon_high)"), "gradient", "not detached"),
    "sapo temperatures": ({"loss_type": "sapo", "sapo_temperature_neg": 2.0}, {}, (LOSS, "torch.where(advantages > 0, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)", "torch.where(advantages > 0, self.args.sapo_temperature_neg, self.args.sapo_temperature_pos)"), "loss", "sapo's temperatures"),
    "mask one token early": ({}, {}, (LOSS, PER_ROW, "mask = torch.cat([mask[:, 1:], 0 * mask[:, :1]], 1); " + PER_ROW), "loss", "it begins one token earlier"),
    "last token dropped": ({}, {}, (LOSS, PER_ROW, "mask = mask * (mask.flip(1).cumsum(1).flip(1) > 1); " + PER_ROW), "loss", "the end of the text, of each completion is left out"),
    "reference is old": ({"beta": 0.1}, {}, (LOSS, 'ref_per_token_logps = inputs["ref_per_token_logps"]', 'ref_per_token_logps = inputs["old_per_token_logps"]'), "kl", "KL of the wrong reference"),
    "rewards rewritten": ({}, {}, (SCORE, "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)", "rewards_per_func[:, 1:] = 0.0; unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)"), "advantages", "only the first reward function"),
    "weights in another order": ({}, {}, (SCORE, "self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)\n            rewards[unscorable", "self.reward_weights.flip(0).to(device).unsqueeze(0)).nansum(dim=1)\n            rewards[unscorable"), "advantages", "another order"),
    "correction bounded below": (VLLM, {}, (SCORE, "min=self.vllm_importance_sampling_clip_min,\n                        max=self.vllm_importance_sampling_clip_max,", "min=self.vllm_importance_sampling_clip_max,"), "correction", "bounded on the wrong side"),
    "everything tripled": ({}, {}, (LOSS, PER_ROW, "loss = 3 * " + PER_ROW[7:]), "loss", "every gradient is multiplied by 3"),
}  # fmt: skip


def find_first_micro_step(found):
    return next((one for one in found if one.is_different), None)


@pytest.mark.parametrize("name", FAULTS)
def test_referee_names_a_planted_trl_fault_first(name, tmp_path):
    settings, made, (method, text, instead), quantity, cause = FAULTS[name]
    made = dict(made)
    if made.pop("small", False):
        made["rewards"] = 1e-3 * np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    found = find_first_micro_step(judge(tmp_path, 3, settings, faults={method: (text, instead)}, **made))
    assert found is not None, "nothing differs"
    assert found.quantity == quantity and cause in found.cause, found
    if name != "old of another version":
        assert find_first_micro_step(judge(tmp_path / "sound", 3, settings, **made)) is None


def draw_settings(rng):
    """Settings by lot."""
    loss_type = str(rng.choice(["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]))
    s: dict = {"loss_type": loss_type, "epsilon_high": float(rng.choice([0.2, 0.28, 5.0 if loss_type == "cispo" else 0.4]))}
    s["importance_sampling_level"] = "token" if loss_type == "vespo" else str(rng.choice(["token", "sequence"]))
    s["scale_rewards"] = str(rng.choice(["group", "batch", "none"]))
    if rng.random() < 0.5:
        s |= {"beta": float(rng.choice([0.01, 0.1])), "use_bias_correction_kl": bool(rng.random() < 0.5)}
    modes = ["token_truncate", "token_mask", *(["sequence_truncate", "sequence_mask"] if loss_type != "vespo" else [])]
    if rng.random() < 0.5:
        s |= {"use_vllm": True, "vllm_importance_sampling_mode": str(rng.choice(modes))}
        s |= {"clip_max": float(rng.choice([1.3, 3.0]))}
    if rng.random() < 0.3:
        s["mask_truncated_completions"] = True
    if rng.random() < 0.3:
        s["delta"] = 1.5
    if rng.random() < 0.2:
        s["multi_objective_aggregation"] = "normalize_then_sum"
    made = {"micro_batches": int(rng.choice([1, 2, 4])), "share_on_policy": float(rng.choice([0.0, 1.0]))}
    return s, made


@pytest.mark.parametrize("lot", range(10))
def test_referee_reports_nothing_for_correct_trl_dumps(lot, tmp_path):
    for seed in range(20 * lot, 20 * lot + 20):
        settings, made = draw_settings(np.random.default_rng([seed, 11]))
        found = find_first_micro_step(judge(tmp_path / str(seed), seed, settings, **made))
        assert found is None, (seed, settings, made, found)


def test_referee_in_bfloat16_ignores_rounding_and_reports_faults(tmp_path):
    for seed in range(20):
        settings, made = draw_settings(np.random.default_rng([seed, 11]))
        found = judge(tmp_path / str(seed), seed, settings, dtype=torch.bfloat16, **made)
        assert find_first_micro_step(found) is None, (seed, settings, made, found)
    settings, made, (method, text, instead), quantity, cause = FAULTS["length bias"]
    found = find_first_micro_step(judge(tmp_path, 3, settings, faults={method: (text, instead)}, dtype=torch.bfloat16, **made))
    assert found.quantity == quantity and cause in found.cause
