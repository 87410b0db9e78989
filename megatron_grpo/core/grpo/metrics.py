"""Metrics of the loss: sums per micro-batch, and the final values after they are added up over the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_grpo.core.grpo.objectives import ImportanceWeights, PerTokenLoss, SumOverContext, bounded

LARGEST_EXPONENT = 709.0  # exp of a little more is too large for float64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossLogs:
    """Logged values as 0-d float64 tensors, with the same names on every rank.

    `sums` are summed over micro-batches, DP and CP ranks; of `maxima` the maximum is taken.
    """

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def combine(logs: Iterable[LossLogs]) -> LossLogs:
    """Combine the logs of several micro-batches of one rank."""
    logs = list(logs)
    return LossLogs(
        sums={name: torch.stack([log.sums[name] for log in logs]).sum() for name in logs[0].sums},
        maxima={name: torch.stack([log.maxima[name] for log in logs]).max() for name in logs[0].maxima},
    )


def clip_logs(per_token: PerTokenLoss, units: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the sums for the clip ratios.

    Args:
        units: [C], weight of each position: 1, or 1/length of its sequence where the clip decision is one per sequence.
    """
    low, high = per_token.is_low.double(), per_token.is_high.double()
    return {"clip_units": units.sum(), "clip_low": (units * low).sum(), "clip_high": (units * high).sum()}


def clip_extremes(clips: Mapping[str, torch.Tensor], sum_over_context: SumOverContext) -> dict[str, torch.Tensor]:
    """Return the clipped shares of this micro-batch, for the smallest and largest share in a step (as in TRL).

    Unlike every other metric they depend on how a batch is partitioned. The share below is negated, since extremes are combined by their
    maximum.

    Args:
        clips: Result of `clip_logs`.
        sum_over_context: See `ratios.SumOverContext`.
    """
    units, low, high = sum_over_context(torch.stack([clips["clip_units"], clips["clip_low"], clips["clip_high"]]))
    no_units = torch.full_like(units, -math.inf)

    def share(part: torch.Tensor) -> torch.Tensor:
        return torch.where(units > 0, part / units.clamp(min=1e-300), no_units)

    return {"clip_low": share(-low), "clip_high": share(high)}


def mismatch_logs(
    log_rho: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    importance: ImportanceWeights | None,
    is_trained: torch.Tensor,
    is_scored: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Measure how far the trainer's log-probs are from the sampler's, at the weights that sampled.

    Args:
        log_rho: [C], trainer minus sampler log-prob, 0 where the sampler gave none.
        sampler_logprobs: [C], NaN where the sampler gave none.
        old_logprobs: [C], the trainer's old log-probs.
        importance: The rollout correction that was applied; None without one.
        is_trained: [C], 1 where a position is trained, else 0.
        is_scored: [C], 1 where both sides have a log-prob to compare, else 0. Other positions are left out, except that the ratio applied
            to them (1) counts.

    Returns:
        (sums, maxima) by name, each a scalar.
    """
    rho = bounded(log_rho).exp()
    factors, units = (rho, is_trained) if importance is None else (importance.factors, importance.units * is_trained)
    distance = log_rho.abs() * is_scored
    sums = {
        "num_scored_tokens": is_scored.sum(),
        "logp_difference": distance.sum(),
        "rollout_kl_k1": (is_scored * -log_rho).sum(),
        "rollout_kl_k3": (is_scored * (rho - log_rho - 1.0)).sum(),
        "sampler_logp": (is_scored * sampler_logprobs.nan_to_num()).sum(),
        "trainer_logp": (is_scored * old_logprobs).sum(),
        "rho": (is_scored * rho).sum(),
        "rho_squared": (is_scored * rho * rho).sum(),
        "importance": (units * factors).sum(),
        "importance_units": units.sum(),
    }
    return sums, {"logp_difference": distance.amax() if distance.numel() else distance.new_zeros(())}


def teacher_logs(log_ratio: torch.Tensor, is_seen: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the sums for KL(old || teacher) of the trained tokens, by the k3 estimator, as Megatron-SWIFT logs it.

    Args:
        log_ratio: [C], log p_teacher - log p_old.
        is_seen: [C], 1 where a teacher scored a trained token, else 0.
    """
    return {"teacher_kl": (is_seen * (bounded(log_ratio).exp() - log_ratio - 1.0)).sum(), "num_seen_tokens": is_seen.sum()}


# Metrics of single objectives, under TRL's and Megatron-SWIFT's names: means over the units of a clip decision (tokens or sequences).
OBJECTIVE_METRICS = ("vespo/phi_seq_mean", "fipo/future_kl_mean", "fipo/influence_weight_mean", "fipo/safety_keep_ratio")


def finish(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of one optimizer step from its summed logs. A mean over nothing is left out.

    `sampling/*`: log-probs are natural logs; KL(rollout || trainer) by two estimators; perplexities per token; the effective sample size is
    the share of tokens that importance weights leave, 1 when the engines agree.

    Args:
        sums: `LossLogs.sums`, summed over the whole step.
        maxima: `LossLogs.maxima`, the maximum over the whole step.
    """
    totals = {name: float(value) for name, value in sums.items()}
    metrics = {"loss": totals["loss"]}

    def mean(name: str, numerator: str, denominator: str) -> None:
        if numerator in totals and totals[denominator] > 0:
            metrics[name] = totals[numerator] / totals[denominator]

    mean("kl", "kl", "num_loss_tokens")
    mean("teacher_kl", "teacher_kl", "num_seen_tokens")
    mean("entropy", "entropy", "num_loss_tokens")
    mean("clip_ratio/low_mean", "clip_low", "clip_units")
    mean("clip_ratio/high_mean", "clip_high", "clip_units")
    if "clip_ratio/low_mean" in metrics:
        # A token is clipped below for A < 0 or above for A > 0, never both.
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"] = -float(maxima["clip_low"]), float(maxima["clip_high"])
    for name in OBJECTIVE_METRICS:
        mean(name, name, "clip_units")
    mean("sampling/importance_sampling_ratio/mean", "importance", "importance_units")
    mean("sampling/sampling_logp_difference/mean", "logp_difference", "num_scored_tokens")
    mean("sampling/kl_k1", "rollout_kl_k1", "num_scored_tokens")
    mean("sampling/kl_k3", "rollout_kl_k3", "num_scored_tokens")
    if totals["num_scored_tokens"] > 0:
        metrics["sampling/sampling_logp_difference/max"] = float(maxima["logp_difference"])
        metrics["sampling/perplexity_rollout"] = _perplexity(totals["sampler_logp"] / totals["num_scored_tokens"])
        metrics["sampling/perplexity_trainer"] = _perplexity(totals["trainer_logp"] / totals["num_scored_tokens"])
        metrics["sampling/effective_sample_size"] = totals["rho"] ** 2 / (totals["num_scored_tokens"] * totals["rho_squared"])
    return metrics


def _perplexity(mean_logprob: float) -> float:
    """Return exp(-mean log-prob), or infinity where that overflows float64. A metric never ends a run."""
    return math.exp(-mean_logprob) if mean_logprob > -LARGEST_EXPONENT else math.inf
