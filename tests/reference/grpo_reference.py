"""GRPO and its relatives, in float64, one process, pure torch: what the package must equal. Read top to bottom in one sitting.

Nothing is packed, sharded or fused, and nothing comes from the package. A completion is a few tensors of its own length; the batch is a
list; every sum is a Python loop. `s` is any object with the settings' names (the package's GrpoConfig serves). Sections as in
docs/algorithms.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# ---------------------------------------------------------------------------------------------------------------------------------
# Log-probs and entropy of one position's next token, at the sampling temperature
# ---------------------------------------------------------------------------------------------------------------------------------


def token_logprobs(logits, targets, temperature):
    """logits [T, V], targets [T] -> (logp [T], entropy [T])."""
    log_softmax = torch.log_softmax(logits.double() / temperature, dim=-1)
    logp = log_softmax[torch.arange(len(targets)), targets]
    return logp, -(log_softmax.exp() * log_softmax).sum(dim=-1)


# ---------------------------------------------------------------------------------------------------------------------------------
# 1. Token weights
# ---------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Completion:
    """float64 [T] each, over the tokens of one completion. Where `mask` is 0 a token is not trained (a tool's answer, say)."""

    mask: torch.Tensor  # 0 or 1
    logp: torch.Tensor  # of the policy now, with gradient
    entropy: torch.Tensor  # with gradient
    sampler_logp: torch.Tensor  # NaN where the sampler gave none
    ref_logp: torch.Tensor
    old_logp: torch.Tensor | None  # None: on-policy
    advantage: float
    is_truncated: bool = False
    is_zero_std: bool = False
    group: int = 0  # completions of one prompt
    teacher_logp: torch.Tensor | None = None  # None: no teacher has seen it

    @property
    def old(self):
        return self.logp.detach() if self.old_logp is None else self.old_logp


def counted(completions, s):
    """The completions that make up N, and the mask that is left of each."""
    kept = [c for c in completions if not (s.exclude_zero_std_groups and c.is_zero_std)]
    return [(c, torch.zeros_like(c.mask) if s.overlong_filter and c.is_truncated else c.mask) for c in kept]


def token_weights(completions, s, max_completion_length):
    """u[i,t] of each counted completion."""
    batch = counted(completions, s)
    num_completions = len(batch)
    num_tokens = sum(m.sum() for _, m in batch)
    weights = []
    for _, m in batch:
        if s.loss_type in ("grpo", "sapo", "real"):
            u = m / (num_completions * m.sum()) if m.sum() > 0 else m
        elif s.loss_type in ("dapo", "bnpo", "cispo", "vespo", "fipo"):
            u = m / num_tokens if num_tokens > 0 else m
        elif s.loss_type == "dr_grpo":
            u = m / (num_completions * max_completion_length)
        elif s.loss_type in ("sequence_sum", "luspo"):
            u = m / num_completions
        weights.append(u)
    return weights


# ---------------------------------------------------------------------------------------------------------------------------------
# 2. The objective of a token
# ---------------------------------------------------------------------------------------------------------------------------------


def masked_mean(x, m):
    return (x * m).sum() / max(m.sum().item(), 1.0)


def exp20(log_ratio):
    return torch.exp(torch.clamp(log_ratio, -20.0, 20.0))


def ratio(c, s):
    """r[i,t], or r[i] for every t."""
    token = exp20(c.logp - c.old)
    if s.importance_sampling_level == "token":
        return token
    sequence = exp20(masked_mean(c.logp - c.old, c.mask))
    if s.importance_sampling_level == "sequence":
        return sequence * torch.ones_like(token)
    if s.importance_sampling_level == "sequence_token":
        return sequence.detach() * torch.exp(c.logp - c.logp.detach())


def token_advantage(c, s):
    """A[i], or with a teacher A[i,t] = A[i] + coef * (log p_teacher - log p_old), a constant of the gradient."""
    if not s.teacher_model_server or c.teacher_logp is None:
        return c.advantage
    return torch.stack([c.advantage + s.teacher_kl_coef * (c.teacher_logp[t] - c.old[t]) for t in range(len(c.mask))])


def objective(c, r, s):
    """l[i,t]."""
    a = token_advantage(c, s)
    if s.loss_type == "cispo":
        bound = 5.0 if s.epsilon_high is None else s.epsilon_high
        return -torch.clamp(r, max=bound).detach() * a * c.logp
    if s.loss_type == "sapo":
        positive = (torch.as_tensor(a) > 0).double()
        tau = positive * s.sapo_temperature_pos + (1.0 - positive) * s.sapo_temperature_neg
        return -(4.0 / tau) * torch.sigmoid(tau * (r - 1.0)) * a
    if s.loss_type == "vespo":
        k, decay = (s.vespo_k_pos, s.vespo_lambda_pos) if a >= 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
        log_w = 0.0
        for t in range(len(c.mask)):
            if c.mask[t]:
                correction = min(max(math.log(max(float(rollout_importance(c, s)[t]), 1e-300)), math.log(1e-8)), 20.0)
                log_w += min(max(float(c.logp[t].detach() - c.old[t]), -20.0), 20.0) + correction
        w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
        exponent = decay + k * math.log(w) - decay * w
        return -math.exp(exponent) * a * c.logp
    if s.loss_type == "real":
        return 0.0 * c.logp  # `real_loss` is not a sum over tokens
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    unclipped = r if s.delta is None else torch.clamp(r, max=s.delta)
    surrogate = -torch.minimum(unclipped * a, torch.clamp(r, 1.0 - s.epsilon, 1.0 + high) * a)
    return fipo_influence(c, r, s) * surrogate if s.loss_type == "fipo" else surrogate


def fipo_influence(c, r, s):
    """f[i,t], a constant."""
    influence = []
    for t in range(len(c.mask)):
        future = 0.0
        for k in range(t, len(c.mask)):
            if c.mask[k] and not (s.delta is not None and r[k] > s.delta):
                future += 0.5 ** ((k - t) / s.fipo_decay_rate) * float(c.logp[k].detach() - c.old[k])
        f = math.exp(min(max(future, -20.0), 20.0))
        if s.fipo_clip_range:
            f = min(max(f, 1.0 if s.fipo_clip_high_only else 1.0 - s.fipo_clip_range), 1.0 + s.fipo_clip_range)
        if s.fipo_safety_threshold is not None and c.advantage < 0 and r[t] > s.fipo_safety_threshold:
            f = min(max(f, 0.8), 1.0)
        influence.append(f)
    return torch.tensor(influence, dtype=torch.float64)


def real_loss(batch, s):
    """Mean over groups of log(1 + sum over good e^(-S/tau)) + log(1 + sum over bad e^(S/tau)); 0 of a group that lacks either."""
    groups = sorted({c.group for c, _ in batch})
    loss = 0.0
    for group in groups:
        scores = [(c.advantage, masked_mean(c.logp - c.old, m)) for c, m in batch if c.group == group and m.sum() > 0]
        good, bad = [score for a, score in scores if a > 0], [score for a, score in scores if a < 0]
        if good and bad:
            loss = loss + torch.log(1 + sum(torch.exp(-score / s.real_tau) for score in good))
            loss = loss + torch.log(1 + sum(torch.exp(score / s.real_tau) for score in bad))
    return loss / max(len(groups), 1)


def kl(c, r, s):
    d = torch.clamp(c.ref_logp - c.logp, -20.0, 20.0)
    estimate = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}[s.kl_estimator]
    return estimate * r if s.use_bias_correction_kl else estimate


def entropy_kept(completions, s):
    """Top-entropy mask of each counted completion: one quantile over all trained tokens of the global batch.

    What lies below the lowest token kept by no more than 1e-4 of it (or 1e-5 nats) ties with it, and is kept as well.
    """
    batch = counted(completions, s)
    if s.top_entropy_quantile >= 1.0:
        return [torch.ones_like(m) for _, m in batch]
    everything = sorted(h for c, m in batch for h, trained in zip(c.entropy.tolist(), m.tolist(), strict=True) if trained)
    if not everything:
        return [m for _, m in batch]
    place = round((len(everything) - 1) * (1.0 - s.top_entropy_quantile), 9)
    below, above = everything[math.floor(place)], everything[math.ceil(place)]
    threshold = below + (above - below) * (place - math.floor(place))
    lowest = min(h for h in everything if h >= threshold)
    return [(c.entropy.detach() >= lowest - max(1e-4 * lowest, 1e-5)).double() for c, _ in batch]


# ---------------------------------------------------------------------------------------------------------------------------------
# 4. Factors for off-policy data
# ---------------------------------------------------------------------------------------------------------------------------------


def rollout_importance(c, s):
    """The correction for the engine mismatch: rho, bounded."""
    mode = s.rollout_importance_sampling_mode
    if mode == "none":
        return torch.ones_like(c.logp)
    log_rho = torch.nan_to_num(c.old - c.sampler_logp, nan=0.0)
    if mode.startswith("sequence"):
        total = masked_mean(log_rho, c.mask) if s.rollout_is_geometric else (log_rho * c.mask).sum()
        log_rho = total * torch.ones_like(log_rho)
    rho = exp20(log_rho)
    lowest, highest = s.rollout_importance_sampling_min or 0.0, s.rollout_importance_sampling_threshold
    if mode.endswith("truncate"):
        return torch.clamp(rho, lowest, highest)
    return torch.where((rho > highest) | (rho < lowest), 0.0, rho)


def off_policy_kept(c, s):
    """0 for a completion of negative advantage that drifted further than the threshold, else 1."""
    if s.off_policy_sequence_mask_delta is None or c.advantage >= 0:
        return 1.0
    before = torch.where(torch.isnan(c.sampler_logp), c.old, c.sampler_logp)
    return 0.0 if masked_mean(before - c.logp.detach(), c.mask) > s.off_policy_sequence_mask_delta else 1.0


# ---------------------------------------------------------------------------------------------------------------------------------
# The loss of a global batch
# ---------------------------------------------------------------------------------------------------------------------------------


def grpo_loss(completions, s, max_completion_length):
    """sum of u * (c * l + beta * kl), minus entropy_coef * mean entropy. Differentiable in logp and entropy of every completion."""
    batch = counted(completions, s)
    num_tokens = sum(m.sum() for _, m in batch)
    loss = sum(0.0 * (c.logp.sum() + c.entropy.sum()) for c in completions)
    if s.loss_type == "real":
        loss = loss + real_loss(batch, s)
    weights, kept = token_weights(completions, s, max_completion_length), entropy_kept(completions, s)
    for (c, m), u, high_entropy in zip(batch, weights, kept, strict=True):
        r = ratio(c, s)
        correction = 1.0 if s.loss_type == "vespo" else rollout_importance(c, s)  # vespo has it in its weight
        factor = torch.as_tensor(correction * off_policy_kept(c, s) * high_entropy)
        loss = loss + (u * factor.detach() * objective(c, r, s)).sum()
        if s.beta and not s.kl_in_reward:
            loss = loss + s.beta * (u * kl(c, r, s)).sum()
        if s.entropy_coef:
            loss = loss - s.entropy_coef * (m * c.entropy).sum() / max(num_tokens, 1)
    return loss


# ---------------------------------------------------------------------------------------------------------------------------------
# 3. Advantages
# ---------------------------------------------------------------------------------------------------------------------------------


def mean(values):
    return sum(values) / len(values)


def std(values):
    """Sample standard deviation; of a single value, 0."""
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def total(row, weights):
    """One completion's reward: the weighted sum over the functions that apply; None where none does."""
    applies = [w * r for w, r in zip(weights, row, strict=True) if r is not None]
    return sum(applies) if applies else None


def judged(values):
    return [v for v in values if v is not None]


def advantages(rewards, weights, s, kl_penalty=None):
    """rewards [groups][G][functions], None where a function does not apply; kl_penalty [groups][G] -> advantages [groups][G]."""
    if s.advantage_estimator == "gdpo" or s.scale_rewards == "gdpo" or s.multi_objective_aggregation == "normalize_then_sum":
        return gdpo(rewards, weights)
    totals = [[total(row, weights) for row in group] for group in rewards]
    if kl_penalty is not None:
        totals = [[None if r is None else r - p for r, p in zip(*pair, strict=True)] for pair in zip(totals, kl_penalty, strict=True)]
    batch = [r for group in totals for r in judged(group)]
    centred = [r - mean(judged(group)) for group in totals for r in judged(group)]

    def advantage(r, group):
        others = len(group) - 1
        if s.advantage_estimator == "grpo":
            scale = {"group": std(group) + 1e-4, "batch": std(batch) + 1e-4, "none": 1.0}[s.scale_rewards]
            return (r - mean(group)) / scale
        if s.advantage_estimator == "rloo":
            return r - (sum(group) - r) / others if others else 0.0
        if s.advantage_estimator == "reinforce_plus_plus":
            return (r - mean(batch)) / (std(batch) + 1e-4)
        if s.advantage_estimator == "reinforce_plus_plus_baseline":
            return (r - mean(group)) / (std(centred) + 1e-4)

    return [[0.0 if r is None else advantage(r, judged(group)) for r in group] for group in totals]


def gdpo(rewards, weights):
    """Each function normalised inside its group; the weighted sum normalised over the batch."""
    sums = []
    for group in rewards:
        columns = [judged(column) for column in zip(*group, strict=True)]
        for row in group:
            normalised = [None if r is None else (r - mean(column)) / (std(column) + 1e-4) for r, column in zip(row, columns, strict=True)]
            sums.append(total(normalised, weights))
    batch = judged(sums)
    flat = [0.0 if x is None else (x - mean(batch)) / (std(batch) + 1e-4) for x in sums]
    size = len(rewards[0])
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def kl_penalty(completions, beta):
    """What `kl_in_reward` subtracts from each completion's reward: beta * sum over tokens of (old - ref)."""
    return [beta * float(((c.old - c.ref_logp) * c.mask).sum()) for c in completions]
