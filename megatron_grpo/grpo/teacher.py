"""On-policy distillation: a teacher's word on each token that the policy drew, as a part of that token's advantage."""

from __future__ import annotations

import torch


def teacher_log_ratio(teacher_logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """log p_teacher - log p_old [C], a constant of the gradient; 0 where no teacher has seen the row (NaN).

    Its mean over what the old policy draws is -KL(old || teacher), so as a reward of each token it draws the policy to the teacher
    ("On-Policy Distillation", Thinking Machines Lab 2025; Megatron-SWIFT's `teacher_kl_coef`). A token is rewarded for itself alone:
    what it does to the tokens after it does not count.
    """
    return (teacher_logprobs - old_logprobs).nan_to_num(nan=0.0)
