"""Completions of the reference as inputs of the package, and random batches of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from megatron_grpo.core.grpo.entropy import entropy_threshold
from megatron_grpo.core.grpo.loss import GrpoLoss, LossInputs, TokenWeights
from megatron_grpo.core.grpo.metrics import LossLogs, combine
from megatron_grpo.core.grpo.objectives import ClassificationTerms, classification
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo_referee.reference import ReferenceCompletion

MAX_COMPLETION_LENGTH = 9


def random_batch(
    seed: int, num_completions: int = 8, *, dtype: torch.dtype = torch.float64, share_on_policy: float = 0.5
) -> list[ReferenceCompletion]:
    """Return random completions of 1 to 8 tokens.

    Some are stale, truncated or of zero-std groups; some tokens are not trained or have no sampler log-prob. Four completions form a group:
    the entropies of their first tokens, which have one context, are equal except for rounding. Values are rounded to `dtype` and held in
    float64, so that a float32 implementation starts from the same numbers.
    """
    rng, group_rng = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    first_entropies = np.repeat(group_rng.exponential(1.0, -(-num_completions // 4)), 4)[:num_completions]
    first_entropies *= 1 + group_rng.uniform(-1e-6, 1e-6, num_completions)

    def values(array, *, grad=False):
        return torch.tensor(array, dtype=dtype).double().requires_grad_(grad)

    completions = []
    for row in range(num_completions):
        length = rng.integers(1, MAX_COMPLETION_LENGTH)
        logp = -rng.exponential(1.0, length)
        # A completion is close to its old policy, or far from it: beyond every clip range.
        spread = rng.choice([1e-4, 0.1, 0.8])
        mask = (rng.random(length) < 0.85).astype(float)
        sampler = logp + rng.normal(0, 0.4, length)
        sampler[rng.random(length) < 0.05] = np.nan
        is_zero_std = bool(rng.random() < 0.2)
        completions.append(
            ReferenceCompletion(
                mask=values(mask),
                logp=values(logp, grad=True),
                entropy=values([first_entropies[row], *rng.exponential(1.0, length)[1:]], grad=True),
                sampler_logp=values(sampler),
                ref_logp=values(logp + rng.normal(0, 0.5, length)),
                old_logp=None if rng.random() < share_on_policy else values(logp + rng.normal(0, spread, length)),
                advantage=0.0 if is_zero_std else float(np.float32(rng.normal())),
                is_truncated=bool(rng.random() < 0.2),
                is_zero_std=is_zero_std,
                group=row // 4,
            )
        )
    return completions


@dataclasses.dataclass
class Packed:
    """One micro-batch: the inputs of GrpoLoss with their own leaf tensors, and the origin of each position."""

    inputs: LossInputs
    logprobs: torch.Tensor
    entropy: torch.Tensor
    ref_logprobs: torch.Tensor
    places: list[tuple[int, int]]  # (completion, token) of each of the C positions


def pack(
    completions: Sequence[ReferenceCompletion], weights: TokenWeights, which: Sequence[int], dtype: torch.dtype, labels=None
) -> Packed:
    """Pack the completions `which` in this order. Only trained positions exist; a completion may have none.

    labels: the result of `compute_labels`.
    """
    places = [(i, int(t)) for i in which for t in torch.nonzero(completions[i].mask)[:, 0]]
    nan = float("nan")

    def column(read, kind=dtype):
        return torch.tensor([read(completions[i], i, t) for i, t in places], dtype=kind)

    inputs = LossInputs(
        token_weights=column(lambda c, i, t: weights.row_weights[i], torch.float64),
        advantages=column(lambda c, i, t: c.advantage),
        sampler_logprobs=column(lambda c, i, t: c.sampler_logp[t]),
        old_logprobs=column(lambda c, i, t: nan if c.old_logp is None else c.old_logp[t]),
        is_compared=torch.ones(len(places), dtype=torch.bool),
        sequence=torch.tensor([list(which).index(i) for i, _ in places], dtype=torch.int64),
        num_sequences=len(which),
        num_loss_tokens=weights.num_loss_tokens,
        token_index=torch.tensor([t for _, t in places], dtype=torch.int64),
        longest=max((len(completions[i].mask) for i in which), default=1),
        labels=None
        if labels is None
        else ClassificationTerms(*(column(lambda c, i, t, label=label: label[i], torch.float64) for label in labels)),
    )
    return Packed(
        inputs=inputs,
        logprobs=column(lambda c, i, t: c.logp[t].item()).requires_grad_(),
        entropy=column(lambda c, i, t: c.entropy[t].item()).requires_grad_(),
        ref_logprobs=column(lambda c, i, t: c.ref_logp[t]),
        places=places,
    )


def token_weight_fn(loss: GrpoLoss, completions: Sequence[ReferenceCompletion]) -> TokenWeights:
    return loss.token_weights(
        [int(c.mask.sum()) for c in completions],
        is_truncated=[c.is_truncated for c in completions],
        is_zero_std=[c.is_zero_std for c in completions],
    )


def compute_threshold(cfg: GrpoConfig, completions: Sequence[ReferenceCompletion], weights: TokenWeights) -> float:
    """Return the entropy threshold over tokens with a nonzero weight, as the policy gathers them."""
    masks = [c.mask.bool().numpy() & (u > 0) for c, u in zip(completions, weights.row_weights, strict=True)]
    return entropy_threshold([c.entropy.detach().numpy() for c in completions], masks, cfg.top_entropy_quantile)


def in_whole_groups(completions: Sequence[ReferenceCompletion]) -> Sequence[ReferenceCompletion]:
    """Return completions in which zero-std groups are complete and have advantage zero, like those of a rollout."""
    for group in {c.group for c in completions}:
        members = [c for c in completions if c.group == group]
        for c in members:
            c.is_zero_std = members[0].is_zero_std
            c.advantage = 0.0 if c.is_zero_std else c.advantage
    return completions


def compute_labels(
    loss: GrpoLoss, completions: Sequence[ReferenceCompletion], weights: TokenWeights
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the labels as the policy gathers them before a step."""
    if loss.needs_classification is None:
        return None
    means = [float(((c.logp.detach() - c.old) * c.mask).sum() / max(c.mask.sum(), 1)) for c in completions]
    return classification(
        means, [c.advantage for c in completions], [c.group for c in completions], weights.row_weights > 0, tau=loss.needs_classification
    )


def package_loss(
    cfg: GrpoConfig, completions: Sequence[ReferenceCompletion], split: Sequence[Sequence[int]], dtype: torch.dtype = torch.float64
) -> tuple[float, list[np.ndarray], list[np.ndarray], LossLogs]:
    """Return the package's loss over a global batch in micro-batches `split`, its gradients by completion (logp, entropy), and its logs."""
    loss = GrpoLoss.from_config(cfg, max_completion_length=MAX_COMPLETION_LENGTH, temperature=1.0)
    weights = token_weight_fn(loss, completions)
    threshold, labels = compute_threshold(cfg, completions, weights), compute_labels(loss, completions, weights)
    total, logs = 0.0, []
    grads = [[np.zeros(len(c.mask)) for c in completions] for _ in range(2)]
    for which in split:
        packed = pack(completions, weights, which, dtype, labels)
        value, log = loss(
            packed.inputs,
            logprobs=packed.logprobs,
            entropy=packed.entropy if loss.needs_entropy else None,
            ref_logprobs=packed.ref_logprobs if loss.needs_reference else None,
            entropy_threshold=threshold,
        )
        value.backward()
        total += value.item()
        logs.append(log)
        for leaf, grad in zip((packed.logprobs, packed.entropy), grads, strict=True):
            if leaf.grad is not None:
                for (i, t), g in zip(packed.places, leaf.grad.tolist(), strict=True):
                    grad[i][t] = g
    return total, grads[0], grads[1], combine(logs)


def random_split(seed: int, num_completions: int) -> list[list[int]]:
    """Return the completions in random order in one to four micro-batches; one of them may be empty."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_completions).tolist()
    cuts = sorted(rng.integers(0, num_completions + 1, rng.integers(0, 4)).tolist())
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, num_completions], strict=True)]
