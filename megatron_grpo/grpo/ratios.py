"""The importance ratio r between the policy now and the policy that the samples are anchored to: per token or per sequence.

Each function takes logprobs [C], old_logprobs [C] (a constant) and the sequences, and returns r [C].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_grpo.grpo.sequences import Sequences

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
