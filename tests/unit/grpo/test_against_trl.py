"""Comparison with TRL 1.16 where it has the same formulas: its own methods, from rewards to gradients, on the same numbers.

TRL's methods run as they are, on a trainer whose model is replaced by tables of log-probs; one micro-batch and one optimizer step per
rollout (TRL's `bnpo` is a mean over the micro-batch, its `dapo` counts the rollout's tokens). Everything in float64.
"""

from __future__ import annotations

import collections
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo import advantages as ours
from megatron_grpo.core.grpo.loss import GrpoLoss
from megatron_grpo.core.grpo.metrics import finish
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee.reference import ReferenceCompletion
from tests.reference.packing import MAX_COMPLETION_LENGTH, compute_threshold, pack, random_batch, token_weight_fn

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is a test-only dependency: pip install megatron-grpo[dev]")

NUM_GROUPS, G = 4, 4
LAST_TOKEN, TRUNCATED_AT = 1, 2  # token ids: the end of a text, and anything else


@pytest.fixture(autouse=True)
def float64_everywhere():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class SingleProcessAccelerator:
    """The interface of an accelerator that TRL uses with one process."""

    device, process_index, num_processes, is_main_process, sync_gradients = torch.device("cpu"), 0, 1, True, True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor

    def pad_across_processes(self, tensor, dim, pad_index):
        return tensor

    def unwrap_model(self, model):
        return model


class TableLogprobTrainer(grpo_trainer.GRPOTrainer):
    """TRL's trainer with its own loss and advantage code, and log-probs from a table."""

    def __init__(self, completions: list[ReferenceCompletion], rewards, reward_weights, **settings):
        self.completions, self.rewards_per_func = completions, torch.tensor(rewards)
        defaults = dict(
            loss_type="grpo", epsilon_high=None, delta=None, beta=0.0, use_bias_correction_kl=True, importance_sampling_level="token",
            scale_rewards="group", multi_objective_aggregation="sum_then_normalize", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, mask_truncated_completions=False, entropy_coef=0.0,
            vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
            use_vllm=False, vllm_importance_sampling_mode="sequence_mask", clip_max=3.0, clip_min=None, epsilon=0.2,
        )  # fmt: skip
        s = self.args = SimpleNamespace(**(defaults | settings))
        s.steps_per_generation, s.gradient_accumulation_steps, s.per_device_train_batch_size = 1, 1, len(completions)
        s.gradient_checkpointing_kwargs, s.report_to = None, []
        if any(c.old_logp is not None for c in completions):
            s.gradient_accumulation_steps, s.steps_per_generation = 1, 2  # makes TRL ask for old log-probs
        self.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
        self.ref_model = object()
        self.accelerator = SingleProcessAccelerator()
        self._metrics = collections.defaultdict(lambda: collections.defaultdict(list))
        self._logs = collections.defaultdict(list) | {"rewards": collections.defaultdict(list)}
        self._pending_extra_logs, self._pending_metrics = {}, {}
        self.environment_factories = self.environments = self.tools = self.rollout_func = self.pad_to_multiple_of = None
        self._is_vlm = self.log_multimodal = self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._tokenizer, self.eos_token_ids = SimpleNamespace(pad_token_id=0), [LAST_TOKEN]
        self.num_generations, self.num_iterations, self.max_completion_length = G, 1, MAX_COMPLETION_LENGTH
        self.reward_weights, self.reward_funcs = torch.tensor(reward_weights), [None] * len(reward_weights)
        self.reward_func_names = [f"f{k}" for k in range(len(reward_weights))]
        self.epsilon_low, self.epsilon_high = s.epsilon, s.epsilon if s.epsilon_high is None else s.epsilon_high
        self.vllm_importance_sampling_correction = s.use_vllm
        self.vllm_importance_sampling_clip_max, self.vllm_importance_sampling_clip_min = s.clip_max, s.clip_min
        self.current_gradient_accumulation_steps = 1
        self._entropy_bonus_enabled = s.entropy_coef != 0
        for name in ("loss_type", "beta", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation", "use_vllm",
                     "vllm_importance_sampling_mode", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef",
                     "mask_truncated_completions"):  # fmt: skip
            setattr(self, name, getattr(s, name))

    def _calculate_rewards(self, *args):
        return self.rewards_per_func.clone()

    def _generate(self, prompts):
        ids = [[3] * (len(c.mask) - 1) + [TRUNCATED_AT if c.is_truncated else LAST_TOKEN] for c in self.completions]
        sampler = [[None if math.isnan(x) else x for x in c.sampler_logp.tolist()] for c in self.completions]
        tool_mask = [c.mask.long().tolist() for c in self.completions]
        return [[5]] * len(ids), ids, tool_mask, [""] * len(ids), sampler if self.use_vllm else None, {}, None, None

    def table(self, of, fill=0.0):
        rows = [of(c) for c in self.completions]
        return torch.stack([torch.cat([row, row.new_full((max(map(len, rows)) - len(row),), fill)]) for row in rows])

    def _get_per_token_logps_and_entropies(self, model, *args, compute_entropy=False, **kwargs):
        if compute_entropy:
            return self.table(lambda c: c.logp), self.table(lambda c: c.entropy), None
        if model is self.ref_model:
            return self.table(lambda c: c.ref_logp), None, None
        return self.table(lambda c: c.old.detach()), None, None

    def run(self):
        """Rewards to loss. Returns the advantages and the loss; gradients are left in the completions."""
        inputs = [{"prompt": ""} for _ in self.completions]
        batch = self._generate_and_score_completions(inputs)
        if self.args.steps_per_generation == 2:
            # Asking for old log-probs must not change how the loss is scaled.
            self.args.steps_per_generation = 1
        loss = self._compute_loss(self.model, batch)
        loss.backward()
        return batch["advantages"], loss.item()


def make_rewards(seed, num_funcs):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.5, 1.0, np.nan], p=[0.4, 0.2, 0.3, 0.1], size=(NUM_GROUPS, G, num_funcs))
    rewards[0] = 1.0  # a zero-std group
    return rewards


def convert_rewards(rewards):
    """As reward functions give them."""
    return [[[None if math.isnan(r) else float(r) for r in row] for row in rows] for rows in rewards]


def assert_same(
    cfg: GrpoConfig, trl_settings: dict, *, seed: int, num_funcs: int = 2, share_on_policy: float = 0.5, batch=random_batch
) -> None:
    completions = batch(seed, NUM_GROUPS * G, share_on_policy=share_on_policy)
    for c in completions:
        c.is_zero_std = False
        if c.mask.sum() == 0:
            c.mask[0] = 1.0  # TRL's clipping metrics divide by it
    rewards, weights = make_rewards(seed, num_funcs), [1.0, 0.5][:num_funcs]

    trl = TableLogprobTrainer(completions, rewards.reshape(-1, num_funcs), weights, **trl_settings)
    trl_advantages, trl_loss = trl.run()

    scored = ours.advantages(convert_rewards(rewards), cfg, weights)
    np.testing.assert_allclose(scored.advantages.ravel(), trl_advantages.numpy(), rtol=1e-9, atol=1e-9)
    metrics = ours.reward_metrics(scored, trl.reward_func_names)
    theirs = {name: values[-1] for name, values in trl._metrics["train"].items()}
    for name in ("reward", "reward_std", "rewards/f0/mean", "rewards/f0/std"):
        assert metrics[name] == pytest.approx(theirs[name], rel=1e-9)

    for c, advantage in zip(completions, trl_advantages.tolist(), strict=True):
        c.advantage = advantage
    loss = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0)
    token_weights = token_weight_fn(loss, completions)
    packed = pack(completions, token_weights, range(len(completions)), torch.float64)
    value, logs = loss(
        packed.inputs,
        logprobs=packed.logprobs,
        entropy=packed.entropy,
        ref_logprobs=packed.ref_logprobs if loss.needs_reference else None,
        entropy_threshold=compute_threshold(cfg, completions, token_weights),
    )
    value.backward()
    assert value.item() == pytest.approx(trl_loss, rel=1e-10, abs=1e-12)
    for leaf, grads in ((packed.logprobs, [c.logp.grad for c in completions]), (packed.entropy, [c.entropy.grad for c in completions])):
        if leaf.grad is not None:
            theirs_at = torch.stack([grads[i][t] if grads[i] is not None else torch.zeros(()) for i, t in packed.places])
            torch.testing.assert_close(leaf.grad, theirs_at, rtol=1e-9, atol=1e-13)

    found = finish(logs.sums, logs.maxima)
    same_names = ["entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"] + ["kl"] * bool(cfg.beta)
    if cfg.overlong_filter:
        # TRL's sequence-level clip means count completions that the filter emptied.
        same_names = ["entropy"]
    for name in same_names:
        if name in theirs:
            assert found[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name  # TRL counts in float32
    if "vespo/phi_seq_mean" in theirs:
        assert found["vespo/phi_seq_mean"] == pytest.approx(theirs["vespo/phi_seq_mean"])
    if "cispo_clip_ratio" in theirs:
        assert found["clip_ratio/high_mean"] == pytest.approx(theirs["cispo_clip_ratio"])
    if trl.use_vllm:
        assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(theirs["sampling/sampling_logp_difference/mean"])
        assert found["sampling/sampling_logp_difference/max"] == pytest.approx(theirs["sampling/sampling_logp_difference/max"])
        assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(theirs["sampling/importance_sampling_ratio/mean"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo"])
def test_losses_and_clipping_equal_trl(loss_type, level):
    for seed, epsilon_high in enumerate((0.28, 5.0)):
        settings = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": epsilon_high}
        assert_same(GrpoConfig(**settings), settings, seed=seed)


@pytest.mark.parametrize("mode", [None, "token_truncate", "token_mask"])
def test_vespo_equals_trl(mode):
    """Its correction is inside the weight."""
    ours = {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 0.7, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.2, "beta": 0.04}
    theirs = dict(ours)
    if mode is not None:
        ours |= {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": 1.3}
        theirs |= {"use_vllm": True, "vllm_importance_sampling_mode": mode, "clip_max": 1.3}
    for seed, share_on_policy in ((20, 0.0), (21, 1.0)):
        assert_same(GrpoConfig(**ours), theirs, seed=seed, share_on_policy=share_on_policy)


def test_two_sided_clip_equals_trl():
    settings = {"delta": 1.5, "epsilon_high": 0.28}
    assert_same(GrpoConfig(**settings), settings, seed=3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("corrected", [True, False])
def test_kl_equals_trl(corrected, level):
    settings = {"beta": 0.04, "use_bias_correction_kl": corrected, "importance_sampling_level": level, "epsilon": 0.1}
    assert_same(GrpoConfig(**settings), settings, seed=4)
    assert_same(GrpoConfig(loss_type="cispo", epsilon_high=5.0, **settings), {"loss_type": "cispo", "epsilon_high": 5.0} | settings, seed=5)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_scale_rewards_equals_trl(scale_rewards):
    settings = {"scale_rewards": scale_rewards}
    assert_same(GrpoConfig(**settings), settings, seed=6)
    assert_same(GrpoConfig(**settings), settings, seed=7, num_funcs=1)


def test_gdpo_set_in_three_ways_equals_trl():
    trl_settings = {"multi_objective_aggregation": "normalize_then_sum"}
    for settings in (trl_settings, {"scale_rewards": "gdpo"}, {"advantage_estimator": "gdpo"}):
        assert_same(GrpoConfig(**settings), trl_settings, seed=8)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_mask_truncated_completions_equals_trl(loss_type):
    trl_settings = {"loss_type": loss_type, "mask_truncated_completions": True}
    assert_same(GrpoConfig(loss_type=loss_type, overlong_filter=True), trl_settings, seed=9)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_entropy_bonus_and_top_entropy_quantile_equal_trl(loss_type):
    assert_same(GrpoConfig(loss_type=loss_type, entropy_coef=0.01), {"loss_type": loss_type, "entropy_coef": 0.01}, seed=10)
    for quantile in (0.2503, 0.6003):  # TRL's float32 arithmetic does not fall on a token there
        settings = {"loss_type": loss_type, "top_entropy_quantile": quantile}
        assert_same(GrpoConfig(**settings), settings, seed=11)


def test_trl_divides_first_tokens_of_a_group_that_differ_by_rounding():
    """There the two differ on purpose: which of those tokens TRL trains is up to the last bit of their entropies."""
    with pytest.raises(AssertionError):
        assert_same(GrpoConfig(top_entropy_quantile=0.2003), {"loss_type": "grpo", "top_entropy_quantile": 0.2003}, seed=11)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("lowest", [None, 0.8])
def test_rollout_importance_sampling_equals_trl(mode, lowest):
    cfg = GrpoConfig(
        beta=0.04,
        rollout_importance_sampling_mode=mode,
        rollout_importance_sampling_threshold=1.3,
        rollout_importance_sampling_min=lowest,
    )
    trl_settings = {"beta": 0.04, "use_vllm": True, "vllm_importance_sampling_mode": mode, "clip_max": 1.3, "clip_min": lowest}
    for seed, share_on_policy in ((12, 0.0), (13, 1.0)):
        assert_same(cfg, trl_settings, seed=seed, share_on_policy=share_on_policy)


@pytest.mark.parametrize("use_vllm", [True, False])
def test_off_policy_sequence_mask_equals_trl(use_vllm):
    """TRL takes the old log-probs where there is no sampler; where the sampler misses single tokens we do so too, and TRL counts 0."""
    for seed in range(14, 20):
        cfg = GrpoConfig(
            off_policy_sequence_mask_delta=0.1,
            rollout_importance_sampling_mode="sequence_mask" if use_vllm else "none",
            rollout_importance_sampling_threshold=3.0,
        )
        batch = make_batch_with_sampler if use_vllm else make_batch_without_sampler
        assert_same(cfg, {"off_policy_mask_threshold": 0.1, "use_vllm": use_vllm}, seed=seed, share_on_policy=0.0, batch=batch)


def make_batch_without_sampler(*args, **kwargs):
    completions = random_batch(*args, **kwargs)
    for c in completions:
        c.sampler_logp = torch.full_like(c.sampler_logp, math.nan)
    return completions


def make_batch_with_sampler(*args, **kwargs):
    completions = random_batch(*args, **kwargs)
    for c in completions:
        c.sampler_logp = torch.where(c.sampler_logp.isnan(), c.old, c.sampler_logp).detach()
    return completions
