"""What two policies say of the same tokens: the importance ratio, the estimates of a KL divergence, and a teacher's log-ratio."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_grpo.grpo.sequences import Sequences

# r [C], per token or per sequence, of logprobs [C], old_logprobs [C] (a constant) and the sequences.
Ratio = Callable[[torch.Tensor, torch.Tensor, Sequences], torch.Tensor]

# exp(20) is 5e8: far outside every clip range, and still harmless in float32. Outside it the gradient is 0.
LOG_RATIO_BOUND = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """r[i,t] = exp(logp - old), PPO's."""
    return bounded(logprobs - old_logprobs).exp()


def sequence_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """r[i] = exp(mean over t of (logp - old)), shared by the sequence's tokens (GSPO, arXiv 2507.18071).

    The gradient of every token goes through the mean, hence through the sum over context-parallel ranks.
    """
    return sequences.spread(bounded(sequences.mean(logprobs - old_logprobs)).exp())


def sequence_token_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """r[i,t] has the value of the sequence's ratio and the gradient of the token's log-prob (GSPO-token, arXiv 2507.18071)."""
    with torch.no_grad():
        value = sequence_ratio(logprobs, old_logprobs, sequences)
    return value * (logprobs - logprobs.detach()).exp()


RATIOS: dict[str, Ratio] = {"token": token_ratio, "sequence": sequence_ratio, "sequence_token": sequence_token_ratio}

# Estimates KL(policy || reference) from one sample: (logprobs [C], ref_logprobs [C]) -> kl [C]. Their d is ref - logp, as in
# http://joschu.net/blog/kl-approx.html.
KlEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """-d: unbiased, may be negative. As a loss without the ratio its on-policy gradient has zero mean: `check` refuses that."""
    return -bounded(ref_logprobs - logprobs)


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """d*d/2."""
    return 0.5 * bounded(ref_logprobs - logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1: unbiased and never negative."""
    d = bounded(ref_logprobs - logprobs)
    return d.exp() - d - 1.0


KL_ESTIMATORS: dict[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def teacher_log_ratio(teacher_logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """log p_teacher - log p_old [C], a constant of the gradient; 0 where no teacher has seen the row (NaN).

    Its mean over what the old policy draws is -KL(old || teacher), so as a reward of each token it draws the policy to the teacher
    ("On-Policy Distillation", Thinking Machines Lab 2025; Megatron-SWIFT's `teacher_kl_coef`). A token is rewarded for itself alone:
    what it does to the tokens after it does not count.
    """
    return (teacher_logprobs - old_logprobs).nan_to_num(nan=0.0)
