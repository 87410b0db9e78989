"""Each objective as its paper writes it, on padded [group, completion, token] tensors in float64, from rewards to gradients.

The groups are degenerate ones. Written from the papers and from TRL's functions; only the batch that both receive is from the package
and from tests/reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_grpo.core.grpo.advantages import advantages
from megatron_grpo.core.grpo.loss import OBJECTIVES
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee.reference import ReferenceCompletion
from tests.reference.packing import MAX_COMPLETION_LENGTH, package_loss, random_split

T = MAX_COMPLETION_LENGTH - 1


class Batch:
    """A batch with rewards [G, n], truncated [G, n] and all else [G, n, T].

    Tokens after the end of a completion and in holes are not trained.
    """

    def __init__(self, rng: np.random.Generator, groups: int, n: int, *, far: float):
        shape = (groups, n, T)
        lengths = rng.integers(1, T + 1, (groups, n))
        lengths[0] = 1  # completions of one token
        self.mask = torch.tensor((np.arange(T) < lengths[:, :, None]) & (rng.random(shape) < 0.8)).double()
        self.mask[:, :, 0] = 1.0  # nobody is without a token ...
        self.mask[-1, -1] = 0.0  # ... but one
        self.logp = torch.tensor(-rng.exponential(1.0, shape)).requires_grad_()
        self.old = self.logp.detach() + torch.tensor(rng.normal(0, far, shape))
        self.old[1, 0, 0] += 9.0  # a ratio next to nothing, and one of thousands
        self.old[1, -1, 0] -= 9.0
        self.ref = self.logp.detach() + torch.tensor(rng.normal(0, 0.3, shape))
        self.rewards = rng.choice([-3.0, -0.5, 0.0, 1.0], (groups, n))
        self.rewards[1 % groups] = -3.0  # nothing to choose between
        self.truncated = torch.tensor(rng.random((groups, n)) < 0.3)
        self.truncated[-2 % groups] = True

    def completions(self, cfg: GrpoConfig) -> list[ReferenceCompletion]:
        found = advantages([[[float(r)] for r in group] for group in self.rewards], cfg, [1.0])
        return [
            ReferenceCompletion(
                mask=self.mask[g, i], logp=self.logp[g, i].detach().requires_grad_(), entropy=torch.zeros(T, dtype=torch.float64),
                sampler_logp=self.old[g, i], ref_logp=self.ref[g, i], old_logp=self.old[g, i], advantage=float(found.advantages[g, i]),
                is_truncated=bool(self.truncated[g, i]), is_zero_std=bool(found.is_zero_std[g]), group=g,
            )
            for g in range(self.rewards.shape[0])
            for i in range(self.rewards.shape[1])
        ]  # fmt: skip


def compute_advantages(rewards: np.ndarray, estimator: str) -> torch.Tensor:
    r = torch.tensor(rewards)
    mean, n = r.mean(1, keepdim=True), r.shape[1]
    found = {
        "grpo": lambda: (r - mean) / (r.std(1, keepdim=True) + 1e-4),
        "rloo": lambda: r - (r.sum(1, keepdim=True) - r) / (n - 1),
        "reinforce_plus_plus": lambda: (r - r.mean()) / (r.std() + 1e-4),
    }[estimator]()
    return found[..., None]


def compute_paper_loss(cfg: GrpoConfig, b: Batch) -> torch.Tensor:
    """The loss that is to be minimized."""
    a, mask = compute_advantages(b.rewards, cfg.advantage_estimator), b.mask.clone()
    if cfg.overlong_filter:
        mask[b.truncated] = 0.0
    length = b.mask.sum(2, keepdim=True).clamp(min=1)
    shift = b.logp - b.old
    sequence = (shift * b.mask).sum(2, keepdim=True) / length
    log_r = {"token": shift, "sequence": sequence.expand_as(shift), "sequence_token": sequence.detach() + b.logp - b.logp.detach()}
    r = log_r[cfg.importance_sampling_level].exp()
    low, high = 1 - cfg.epsilon, 1 + (cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high)
    clipped = -torch.minimum(r.clamp(max=cfg.delta) * a if cfg.delta else r * a, r.clamp(low, high) * a)
    kind = cfg.loss_type
    if kind == "cispo":
        loss = -r.detach().clamp(max=5.0) * a * b.logp
    elif kind == "sapo":
        tau = torch.where(a > 0, a.new_tensor(cfg.sapo_temperature_pos), a.new_tensor(cfg.sapo_temperature_neg))
        loss = -torch.sigmoid(tau * (r - 1)) * 4 / tau * a
    elif kind == "vespo":
        w = (shift.detach() * b.mask).sum(2, keepdim=True).clamp(np.log(1e-8), 20.0).exp()
        k, slope = torch.where(a >= 0, cfg.vespo_k_pos, cfg.vespo_k_neg), torch.where(a >= 0, cfg.vespo_lambda_pos, cfg.vespo_lambda_neg)
        loss = -(w**k * (slope * (1 - w)).exp()) * a * b.logp
    elif kind == "fipo":
        future, f = torch.zeros_like(shift), shift.detach() * b.mask
        if cfg.delta:
            f = torch.where(r.detach() > cfg.delta, 0.0, f)
        for t in reversed(range(T)):
            future[..., t] = f[..., t] + (2.0 ** (-1 / cfg.fipo_decay_rate) * future[..., t + 1] if t + 1 < T else 0.0)
        weight = future.clamp(-20, 20).exp().clamp(1.0 if cfg.fipo_clip_high_only else 1 - cfg.fipo_clip_range, 1 + cfg.fipo_clip_range)
        unsafe = (a < 0) & (r.detach() > cfg.fipo_safety_threshold)
        loss = torch.where(unsafe, weight.clamp(0.8, 1.0), weight) * clipped
    else:
        loss = clipped
    if kind == "real":
        total = 0.0 * b.logp.sum()
        for g in range(a.shape[0]):
            takes_part = mask[g].sum(1) > 0
            good, bad = (a[g, :, 0] > 0) & takes_part, (a[g, :, 0] < 0) & takes_part
            if good.any() and bad.any():
                s = sequence[g, :, 0] / cfg.real_tau
                total = total + torch.log1p((-s[good]).exp().sum()) + torch.log1p(s[bad].exp().sum())
        return total / a.shape[0]
    number = a.shape[0] * a.shape[1]
    over = {
        "grpo": number * length, "sapo": number * length, "dr_grpo": number * MAX_COMPLETION_LENGTH,
        "sequence_sum": number, "luspo": number,
    }.get(kind, mask.sum().clamp(min=1))  # fmt: skip
    if cfg.beta:
        d = b.ref - b.logp
        loss = loss + cfg.beta * {"k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[cfg.kl_estimator] * r
    return (loss * mask / over).sum()


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_loss_equals_paper_formula_on_degenerate_groups(loss_type):
    """Equal rewards, all truncated, one token, nothing trained, masks with holes, ratios of thousands, rewards below 0, groups of 1."""
    rng, compared = np.random.default_rng(20261122), 0
    levels = ("token", "sequence", "sequence_token") if loss_type not in ("real", "fipo", "vespo") else ("token",)
    for level in levels:
        for groups, n, estimator in ((4, 3, "grpo"), (3, 2, "rloo"), (6, 1, "reinforce_plus_plus"), (2, 4, "grpo")):
            if loss_type == "real" and n == 1:  # which compares the two sides of a group
                continue
            for others in ({}, {"overlong_filter": True}, {"epsilon_high": 0.28, "delta": 3.0}, {"beta": 0.1, "kl_estimator": "k1"},
                           {"beta": 0.1}, {"fipo_clip_high_only": False}):  # fmt: skip
                if loss_type in ("cispo", "sapo", "vespo", "real") and "delta" in others or loss_type == "real" and "beta" in others:
                    continue
                batch = Batch(rng, groups, n, far=float(rng.choice([1e-3, 0.3])))
                cfg = GrpoConfig(loss_type=loss_type, importance_sampling_level=level, advantage_estimator=estimator, **others)
                wanted = compute_paper_loss(cfg, batch)
                (gradient,) = torch.autograd.grad(wanted, batch.logp)
                found = package_loss(cfg, batch.completions(cfg), random_split(compared, groups * n))
                assert found[0] == pytest.approx(wanted.item(), rel=1e-10, abs=1e-12), cfg
                right = (gradient * batch.mask).numpy().reshape(groups * n, T)
                assert np.linalg.norm(np.stack(found[1]) - right) <= 1e-10 * np.linalg.norm(right) + 1e-13, cfg
                compared += 1
    assert compared >= 9
