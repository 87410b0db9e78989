"""Log-probs and entropy of a vocabulary that is cut over tensor-parallel ranks, straight from hidden states.

The output layer is fused with the softmax: the logits of one chunk of positions exist at a time, forward and (recomputed) backward, so
memory is chunk_size x vocabulary, never tokens x vocabulary. The backward is written out by hand: every shard holds its own columns of
`softmax - onehot`, whether or not it owns the target token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist


class TokenScores(NamedTuple):
    """logprobs [C]; entropy [C] in nats, or None where it was not asked for. Float32 (float64 for float64 inputs)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_start: int = 0,
    num_valid_rows: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_size: int = 1024,
    with_entropy: bool = False,
) -> TokenScores:
    """Log-prob of each target, and the entropy of the distribution it was drawn from, under softmax(hidden @ weight.T / temperature).

    hidden: [C, H], the same on every rank of `group`. weight: [V_shard, H], this rank's rows of the output layer, which are rows
    vocab_start.. of the vocabulary. targets: int64 [C], ids in the whole vocabulary. num_valid_rows: how many of this shard's rows
    are words; the rest is padding of the vocabulary and takes no part in the softmax (default: all).

    The matrix products run in the dtype of the inputs, everything after them in float32. One MAX and one SUM all-reduce per chunk in
    forward, none in backward: the gradient of `hidden` that comes back is this shard's PARTIAL sum, to be summed over `group` by the
    caller (as Megatron's column-parallel mappings do); that of `weight` is complete. C may be 0.
    """
    num_rows = weight.shape[0] if num_valid_rows is None else num_valid_rows
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, targets, temperature, vocab_start, num_rows, group, chunk_size, with_entropy)
    return TokenScores(logprobs, entropy)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_start, num_rows, group, chunk_size, with_entropy):
        num_positions = hidden.shape[0]
        dtype = _softmax_dtype(hidden)
        log_normaliser = hidden.new_empty(num_positions, dtype=dtype)
        logprobs = hidden.new_empty(num_positions, dtype=dtype)
        entropy = hidden.new_empty(num_positions, dtype=dtype)
        for chunk in _chunks(num_positions, chunk_size):
            logits = _logits(hidden[chunk], weight[:num_rows], temperature)
            columns, owned = _own_columns(targets[chunk], vocab_start, num_rows)
            highest = logits.amax(dim=1) if num_rows else logits.new_full((len(logits),), -math.inf)
            if group is not None:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            logits.sub_(highest[:, None])
            # Three sums per position in one message: of exp(x), of the target's x, and of x * exp(x), with x measured from the maximum.
            sums = logits.new_zeros(3, len(logits))
            if num_rows:
                sums[1] = logits.gather(1, columns[:, None])[:, 0] * owned
                exponentials = logits.exp() if with_entropy else logits.exp_()
                sums[0] = exponentials.sum(dim=1)
                if with_entropy:
                    sums[2] = exponentials.mul_(logits).sum(dim=1)
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_normaliser[chunk] = highest + log_sum
            logprobs[chunk] = sums[1] - log_sum
            entropy[chunk] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, entropy)
        ctx.temperature, ctx.vocab_start, ctx.num_rows, ctx.chunk_size = temperature, vocab_start, num_rows, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        words = weight[: ctx.num_rows]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        # Summed over chunks in the softmax's dtype: a bfloat16 sum would lose a chunk's share to rounding.
        grad_weight = torch.zeros_like(weight, dtype=_softmax_dtype(weight)) if wants_weight else None
        for chunk in _chunks(hidden.shape[0], ctx.chunk_size):
            log_softmax = _logits(hidden[chunk], words, ctx.temperature).sub_(log_normaliser[chunk, None])
            softmax = log_softmax.exp()
            if grad_entropy is not None:
                # dH/dx_v = -p_v (log p_v + H)
                grad_logits = log_softmax.add_(entropy[chunk, None]).mul_(softmax).mul_(-grad_entropy[chunk, None])
            else:
                grad_logits = log_softmax.zero_()
            if grad_logprobs is not None:
                # d log p_target / dx_v = [v is the target] - p_v
                grad_logits.sub_(softmax.mul_(grad_logprobs[chunk, None]))
                if ctx.num_rows:
                    columns, owned = _own_columns(targets[chunk], ctx.vocab_start, ctx.num_rows)
                    grad_logits.scatter_add_(1, columns[:, None], (grad_logprobs[chunk] * owned)[:, None])
            del softmax
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            if wants_hidden:
                grad_hidden[chunk] = grad_logits @ words
            if wants_weight:
                grad_weight[: ctx.num_rows] += grad_logits.t() @ hidden[chunk]
        if wants_weight:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _chunks(num_positions: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_positions)) for start in range(0, num_positions, chunk_size)]


def _softmax_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(hidden: torch.Tensor, words: torch.Tensor, temperature: float) -> torch.Tensor:
    """[chunk, rows] in the softmax's dtype, in memory of its own (callers work in place)."""
    return (hidden @ words.t()).to(_softmax_dtype(hidden)).div_(temperature)


def _own_columns(targets: torch.Tensor, vocab_start: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in this shard (some column of the shard where another owns it), and whether the shard owns it."""
    columns = targets - vocab_start
    owned = (columns >= 0) & (columns < num_rows)
    return columns.clamp(0, max(num_rows - 1, 0)), owned
