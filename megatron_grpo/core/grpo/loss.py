"""GRPO loss of one packed micro-batch, a plain weighted sum over tokens: sum of u * (c * l + beta * kl) - coef * entropy.

Read this after docs/algorithms.md. Every choice is made once, in `GrpoLoss.from_config`; `__call__` tests no strings. Everything is
float64. It costs little, because there is one number per trained token; and the partition of the batch changes the sum by at most 1e-15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from megatron_grpo.core.grpo import objectives
from megatron_grpo.core.grpo.entropy import AdaptiveEntropy
from megatron_grpo.core.grpo.metrics import LossLogs, clip_extremes, clip_logs, mismatch_logs, teacher_logs
from megatron_grpo.core.grpo.objectives import (
    ClassificationTerms,
    ImportanceWeights,
    Objective,
    ObjectiveInputs,
    PerTokenLoss,
    RolloutCorrection,
    SequenceIndex,
    SumOverContext,
    no_sum_over_context,
)
from megatron_grpo.core.grpo.zero_gradient import RowKind
from megatron_grpo.core.settings import GrpoConfig

# CISPO bounds the ratio itself; clipping at 1 + 0.2 style values there would flatten every weight.
CISPO_EPSILON_HIGH = 5.0


def _clipped(cfg: GrpoConfig) -> Objective:
    epsilon_high = cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high
    if cfg.delta is None:
        return objectives.clipped_surrogate(cfg.epsilon, epsilon_high)
    return objectives.two_sided(cfg.epsilon, epsilon_high, cfg.delta)


def _fipo(cfg: GrpoConfig) -> Objective:
    return objectives.fipo(
        _clipped(cfg),
        half_life=cfg.fipo_decay_rate,
        clip_range=cfg.fipo_clip_range or 0.0,
        high_only=cfg.fipo_clip_high_only,
        safety=cfg.fipo_safety_threshold,
        delta=cfg.delta,
    )


OBJECTIVES: dict[str, Callable[[GrpoConfig], Objective]] = {
    "grpo": _clipped,
    "bnpo": _clipped,
    "dapo": _clipped,
    "dr_grpo": _clipped,
    "sequence_sum": _clipped,
    "cispo": lambda cfg: objectives.cispo(CISPO_EPSILON_HIGH if cfg.epsilon_high is None else cfg.epsilon_high),
    "sapo": lambda cfg: objectives.sapo(cfg.sapo_temperature_pos, cfg.sapo_temperature_neg),
    "luspo": _clipped,
    "vespo": lambda cfg: objectives.vespo((cfg.vespo_k_pos, cfg.vespo_lambda_pos), (cfg.vespo_k_neg, cfg.vespo_lambda_neg)),
    "fipo": _fipo,
    "real": lambda cfg: objectives.real,
}
# In these, the loss of a token depends on other tokens of its sequence.
_SEQUENCE_LOSSES = ("vespo", "fipo")


# ---- token weights: fixed once per global batch, before it is partitioned. The loss is a plain sum: no later reduction divides


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenWeights:
    """Token weights of one global batch.

    Args:
        row_weights: float64 [rows], the weight of each trained token of a row. All zero without a loss token: the step is skipped.
        num_sequences: N, the number of completions that count, over the whole global batch.
        num_loss_tokens: Sum of the masks after filtering.
    """

    row_weights: np.ndarray
    num_sequences: int
    num_loss_tokens: int


def token_weights(
    num_masked: Sequence[int] | np.ndarray,
    *,
    loss_type: str,
    is_truncated: Sequence[bool] | np.ndarray,
    is_zero_std: Sequence[bool] | np.ndarray,
    max_completion_length: int,
    overlong_filter: bool = False,
    exclude_zero_std_groups: bool = False,
) -> TokenWeights:
    """Compute `u` for every row of one global batch, all data-parallel ranks together.

    There is one weight per row, and it depends on integers and flags alone. Sources of the normalisations: `grpo` arXiv 2402.03300,
    equation 3; `dapo` arXiv 2503.14476, equation 8; `dr_grpo` arXiv 2503.20783.

    Args:
        num_masked: Trained tokens of each row.
        is_truncated: Whether each row reached the length limit.
        is_zero_std: Whether each row belongs to a zero-std group.
        max_completion_length: Limit of the completion length, in tokens.
        overlong_filter: Empty the mask of a truncated completion, which still counts in N.
    """
    counts = ~(np.asarray(is_zero_std, dtype=bool) & exclude_zero_std_groups)
    trains = counts & ~(np.asarray(is_truncated, dtype=bool) & overlong_filter)
    num_trained = np.asarray(num_masked, dtype=np.int64) * trains
    num_sequences, num_loss_tokens = int(counts.sum()), int(num_trained.sum())
    divisors = NORMALISATIONS[loss_type](max(num_sequences, 1), max(num_loss_tokens, 1), np.maximum(num_trained, 1), max_completion_length)
    return TokenWeights(row_weights=(num_trained > 0) / np.asarray(divisors), num_sequences=num_sequences, num_loss_tokens=num_loss_tokens)


# loss_type -> denominator of a trained token's weight, from (completions, trained tokens, those of its row, max_completion_length).
NORMALISATIONS: dict[str, Callable[[int, int, np.ndarray, int], np.ndarray | int]] = {
    **dict.fromkeys(
        ("grpo", "sapo", "real"), lambda sequences, tokens, tokens_of_sequence, longest: sequences * tokens_of_sequence
    ),  # a mean of means
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo", "fipo"), lambda sequences, tokens, tokens_of_sequence, longest: tokens),
    "dr_grpo": lambda sequences, tokens, tokens_of_sequence, longest: sequences * longest,
    # luspo: the sequence loss of GSPO times its length
    **dict.fromkeys(("sequence_sum", "luspo"), lambda sequences, tokens, tokens_of_sequence, longest: sequences),
}


# ---- the loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Inputs of the loss for one packed micro-batch.

    It has C trained positions of S sequences (or a context-parallel rank's part of them). `old_logprobs` is NaN where a position is
    on-policy: there the current log-prob, held constant, is the old one. A stale position never has NaN, because `batching.collate` refuses
    a stale sample that is not a `SampleWithOldLogprobs`.

    Args:
        token_weights: Weight of each position, float [C]; `u`; 0 where a filter removed the completion.
        advantages: Advantage of each position, float [C].
        sampler_logprobs: The sampler's log-probs, float [C]; NaN where the sampler gave none.
        old_logprobs: Old log-probs, float [C]; NaN where on-policy.
        is_compared: Whether old log-probs come from the trainer, so that comparing them with the sampler's is meaningful; bool [C].
        sequence: Index of the sequence of each position, 0..S-1; int64 [C].
        num_sequences: Number of sequences S.
        num_loss_tokens: Over the whole global batch, all ranks: the entropy bonus is a mean over them.
        teacher_logprobs: The teacher's log-probs, float [C]; NaN where no teacher scored the row.
        token_index: Token index in its row, from 0, untrained tokens counted; for `fipo`; int64 [C].
        longest: Greater than any `token_index` in the whole micro-batch.
        labels: Classification terms of the rows' groups, if `needs_classification`.
    """

    token_weights: torch.Tensor
    advantages: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    is_compared: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int
    num_loss_tokens: int
    teacher_logprobs: torch.Tensor | None = None
    token_index: torch.Tensor | None = None
    longest: int = 0
    labels: ClassificationTerms | None = None


class _Terms(NamedTuple):
    """Loss without its entropy bonus, and the terms it is made of."""

    loss: torch.Tensor
    per_token: PerTokenLoss
    old_logprobs: torch.Tensor  # float64 [C]: the current ones, as constants, where a position is on-policy
    mismatch: torch.Tensor
    importance: ImportanceWeights | None
    kl: torch.Tensor | None
    teacher_gap: torch.Tensor | None  # float64 [C]: log p_teacher - log p_old, 0 where no teacher scored the row


def has_entropy_term(cfg: GrpoConfig) -> bool:
    """Return whether entropy is part of the loss in at least some steps."""
    return cfg.entropy_coef != 0.0 or cfg.use_adaptive_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoLoss:
    """Loss of a run.

    Call it on each micro-batch and sum: losses and `logs.sums` over micro-batches, DP and CP ranks.

    Args:
        token_weights: The function with all arguments bound but those of the batch.
        temperature: Divisor of the logits before the softmax.
        sequence_clip: Whether a clip decision, or a logged weight, is one per sequence and is counted once per sequence.
        corrects_inside: Whether the objective includes the rollout correction, so it is not applied as a factor as well.
        beta: Coefficient of the KL term in the loss; 0 where the KL is in the reward.
        teacher_kl_coef: Coefficient of the teacher's KL term; 0 without a teacher.
        entropy_coef: Coefficient of the entropy bonus in every step; with `adaptive`, the initial value.
        needs_entropy: Whether `entropy` must be passed.
        needs_entropy_threshold: Whether a no-grad pass over the global batch must first find the threshold (`entropy.entropy_threshold`).
        needs_reference: Whether `ref_logprobs` must be passed.
        needs_classification: Tau for `objectives.classification` if a no-grad pass must first find `LossInputs.labels`, else None.
        is_per_token: Whether a token's contribution depends on its own log-prob alone, so that `slope` can be called.
        zero_gradient: Kinds of rows that have no gradient.
    """

    token_weights: Callable[..., TokenWeights]
    temperature: float
    ratio: objectives.Ratio
    objective: Objective
    sequence_clip: bool
    corrects_inside: bool
    kl: objectives.KlEstimator
    beta: float
    use_bias_correction_kl: bool
    teacher_kl_coef: float
    entropy_coef: float
    adaptive: AdaptiveEntropy | None
    correction: RolloutCorrection | None
    off_policy_delta: float | None
    top_entropy_quantile: float
    needs_entropy: bool
    needs_entropy_threshold: bool
    needs_reference: bool
    needs_classification: float | None
    is_per_token: bool
    zero_gradient: frozenset[RowKind]

    @classmethod
    def from_config(
        cls, cfg: GrpoConfig, *, max_completion_length: int, temperature: float, zero_gradient: frozenset[RowKind] = frozenset()
    ) -> GrpoLoss:
        """Build the loss from settings that passed `validation.problems`.

        Args:
            max_completion_length: Limit of the completion length, in tokens.
        """
        return cls(
            token_weights=partial(
                token_weights,
                loss_type=cfg.loss_type,
                max_completion_length=max_completion_length,
                overlong_filter=cfg.overlong_filter,
                exclude_zero_std_groups=cfg.exclude_zero_std_groups,
            ),
            temperature=temperature,
            ratio=objectives.RATIOS[cfg.importance_sampling_level],
            objective=OBJECTIVES[cfg.loss_type](cfg),
            sequence_clip=cfg.importance_sampling_level != "token" or cfg.loss_type == "vespo",
            corrects_inside=cfg.loss_type == "vespo",
            kl=objectives.KL_ESTIMATORS[cfg.kl_estimator],
            beta=0.0 if cfg.kl_in_reward else cfg.beta,
            use_bias_correction_kl=cfg.use_bias_correction_kl and not cfg.kl_in_reward,
            teacher_kl_coef=cfg.teacher_kl_coef if cfg.teacher_flag else 0.0,
            entropy_coef=cfg.entropy_coef,
            adaptive=AdaptiveEntropy.from_config(cfg),
            correction=_correction(cfg),
            off_policy_delta=cfg.off_policy_sequence_mask_delta,
            top_entropy_quantile=cfg.top_entropy_quantile,
            needs_entropy=cfg.log_entropy or has_entropy_term(cfg) or cfg.top_entropy_quantile < 1.0,
            needs_entropy_threshold=cfg.top_entropy_quantile < 1.0,
            needs_reference=cfg.beta != 0.0 and not cfg.kl_in_reward,
            needs_classification=cfg.real_tau if cfg.loss_type == "real" else None,
            is_per_token=cfg.importance_sampling_level == "token"
            and cfg.loss_type not in _SEQUENCE_LOSSES
            and not cfg.rollout_importance_sampling_mode.startswith("sequence")
            and cfg.off_policy_sequence_mask_delta is None
            and not has_entropy_term(cfg)
            and cfg.top_entropy_quantile == 1.0,
            zero_gradient=zero_gradient,
        )

    def slope(self, tensors: LossInputs, *, logprobs: torch.Tensor, ref_logprobs: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient of the loss with respect to the log-probs [C] of some trained positions.

        Needs `is_per_token`.

        Args:
            logprobs: [C], current log-probs.
            ref_logprobs: [C], log-probs of the reference; None without one.
        """
        assert self.is_per_token, "a token's gradient depends on others"
        with torch.enable_grad():
            logprobs = logprobs.detach().requires_grad_()
            terms = self._terms(
                tensors, SequenceIndex(tensors.sequence, tensors.num_sequences, no_sum_over_context), logprobs, ref_logprobs
            )
            return torch.autograd.grad(terms.loss, logprobs)[0]

    def __call__(
        self,
        tensors: LossInputs,
        *,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        entropy_threshold: float | None = None,
        entropy_coef: float | None = None,
        sum_over_context: SumOverContext = no_sum_over_context,
    ) -> tuple[torch.Tensor, LossLogs]:
        """Compute the loss of one micro-batch.

        Works for C = 0, where it returns a 0 that can still be back-propagated. All log-probs and entropies are those of the sampling
        distribution at `temperature`.

        Args:
            logprobs: [C], log-probs of the current policy.
            entropy: [C], entropy of the current policy, in nats; required if `needs_entropy`.
            ref_logprobs: [C], log-probs of the reference; required if `needs_reference`.
            entropy_threshold: Result of `entropy.entropy_threshold`, in nats; required if `needs_entropy_threshold`.
            entropy_coef: Entropy coefficient of this step, if it is adaptive.
            sum_over_context: See `objectives.SumOverContext`.

        Returns:
            The loss (0-d float64, to be summed, never averaged) and its logs.

        Raises:
            ValueError: A required argument is missing.
        """
        self._require(entropy, ref_logprobs, entropy_threshold)
        sequences = SequenceIndex(tensors.sequence, tensors.num_sequences, sum_over_context)
        loss, per_token, old_logprobs, mismatch, importance, kl, teacher_gap = self._terms(
            tensors, sequences, logprobs, ref_logprobs, entropy, entropy_threshold
        )
        is_trained = (tensors.token_weights > 0).double()
        sums = {"num_loss_tokens": is_trained.sum()}
        if kl is not None:
            sums["kl"] = (is_trained * kl.detach()).sum()
        if teacher_gap is not None and tensors.teacher_logprobs is not None:
            sums |= teacher_logs(teacher_gap, is_trained * ~tensors.teacher_logprobs.isnan())
        if entropy is not None:
            entropy_sum = (is_trained * entropy.double()).sum()
            if coef := self.entropy_coef if entropy_coef is None else entropy_coef:
                loss = loss - coef * entropy_sum / max(tensors.num_loss_tokens, 1)
            sums["entropy"] = entropy_sum.detach()

        units = is_trained * sequences.one_over_length if self.sequence_clip else is_trained
        clips = clip_logs(per_token, units)
        sums |= {name: (units * value).sum() for name, value in per_token.metrics.items()}
        sampler_logprobs = tensors.sampler_logprobs.double()
        is_scored = is_trained * tensors.is_compared * (~sampler_logprobs.isnan())
        mismatch_sums, maxima = mismatch_logs(mismatch, sampler_logprobs, old_logprobs, importance, is_trained, is_scored)
        sums, maxima = sums | clips | mismatch_sums, maxima | clip_extremes(clips, sum_over_context)
        # A copy: the schedule may scale the loss in place, and a pipeline's last stage frees it.
        return loss, LossLogs(sums={"loss": loss.detach().clone()} | sums, maxima=maxima)

    def _terms(
        self,
        tensors: LossInputs,
        sequences: SequenceIndex,
        logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
        entropy: torch.Tensor | None = None,
        entropy_threshold: float | None = None,
    ) -> _Terms:
        logprobs, constant = logprobs.double(), logprobs.detach().double()
        old_logprobs = torch.where(tensors.old_logprobs.isnan(), constant, tensors.old_logprobs.double())
        u, advantages, sampler_logprobs = tensors.token_weights.double(), tensors.advantages.double(), tensors.sampler_logprobs.double()
        teacher_gap = None
        if self.teacher_kl_coef and tensors.teacher_logprobs is not None:
            teacher_gap = objectives.teacher_log_ratio(tensors.teacher_logprobs.double(), old_logprobs)
            advantages = advantages + self.teacher_kl_coef * teacher_gap
        mismatch = objectives.log_rho(old_logprobs, sampler_logprobs)
        importance = self.correction(mismatch, sequences) if self.correction is not None else None
        correction = None if importance is None else importance.factors
        ratio = self.ratio(logprobs, old_logprobs, sequences)
        per_token = self.objective(
            ObjectiveInputs(
                ratio, logprobs, old_logprobs, advantages, sequences, tensors.token_index, tensors.longest, correction, tensors.labels
            )
        )

        # c: factors that are constants of the gradient and of every denominator.
        factor = torch.ones_like(constant) if correction is None or self.corrects_inside else correction
        if self.off_policy_delta is not None:
            factor = factor * objectives.off_policy_mask(
                self.off_policy_delta, logprobs=constant, old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs,
                advantages=advantages, sequences=sequences,
            )  # fmt: skip
        if self.needs_entropy_threshold and entropy is not None and entropy_threshold is not None:
            factor = factor * (entropy.detach().double() >= entropy_threshold)

        loss, kl = (u * factor * per_token.loss).sum(), None
        if ref_logprobs is not None:
            kl = self.kl(logprobs, ref_logprobs.double())
            if self.use_bias_correction_kl:
                # Samples come from the old policy; the ratio makes their mean, and its gradient, that of the current one.
                kl = kl * ratio
            if self.beta:
                loss = loss + self.beta * (u * kl).sum()
        return _Terms(loss, per_token, old_logprobs, mismatch, importance, kl, teacher_gap)

    def _require(self, entropy: torch.Tensor | None, ref_logprobs: torch.Tensor | None, entropy_threshold: float | None) -> None:
        requirements = (
            ("entropy", self.needs_entropy, entropy),
            ("ref_logprobs", self.needs_reference, ref_logprobs),
            ("entropy_threshold", self.needs_entropy_threshold, entropy_threshold),
        )
        missing = [name for name, is_needed, value in requirements if is_needed and value is None]
        if missing:
            raise ValueError(f"this loss needs {' and '.join(missing)}")


def _correction(cfg: GrpoConfig) -> RolloutCorrection | None:
    if cfg.rollout_importance_sampling_mode == "none":
        return None
    return objectives.rollout_correction(
        cfg.rollout_importance_sampling_mode,
        lowest=cfg.rollout_importance_sampling_min or 0.0,
        highest=cfg.rollout_importance_sampling_threshold,
        geometric=cfg.rollout_is_geometric,
    )
