"""Log-probs and entropy of a vocabulary that is split over tensor-parallel ranks, computed from hidden states.

The output layer is fused with the softmax: the logits of one chunk of positions exist at a time, so memory is chunk_size x vocabulary,
never tokens x vocabulary. The backward is written by hand: every shard holds its columns of `softmax - onehot`, whether or not it owns the
target token.

Where the loss can compute the gradient of a token's log-prob as soon as it is known (`Slope`), the gradients are computed in the forward,
while the logits exist: three matrix products instead of four, and one softmax instead of two. The backward then checks whether the loss has
requested exactly that gradient. If not, it computes the chunk's logits again: a slope can save work, and never changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

# (slice of the C positions, their log-probs [n]) -> gradient of the loss with respect to them [n]. The same on every rank of `group`.
Slope = Callable[[slice, torch.Tensor], torch.Tensor]

# Elements of one chunk's logits, and of the rows of it that pass through the softmax together, which should fit a processor's cache.
_CPU_CHUNK, _CPU_ROWS = 2**23, 2**18


# Replaces the logits of masked tokens: exp of it is 0 in any softmax, and 0 times it is 0, where 0 times -inf is NaN.
_LEFT_OUT = -1e30


class SamplingMaskTensors(NamedTuple):
    """Token IDs that the softmax of each of the C positions runs over (CSR layout). An empty row means the whole vocabulary.

    Args:
        at: Where each position's token IDs begin, int64 [C + 1], on the host.
        ids: Token IDs, int64 [m].
        positions: Position that each token ID belongs to, 0..C-1; int64 [m].
        is_some: Whether the position has token IDs, bool [C].
    """

    at: np.ndarray
    ids: torch.Tensor
    positions: torch.Tensor
    is_some: torch.Tensor

    @classmethod
    def from_offsets(cls, offsets: np.ndarray, ids: np.ndarray, device: torch.device) -> SamplingMaskTensors:
        """Build the mask.

        Args:
            offsets: int64 [C + 1], where each position's token IDs begin in `ids`.
            ids: Token IDs, int [m].
        """
        counts = np.diff(offsets)
        id_columns = torch.from_numpy(np.stack([ids.astype(np.int64), np.repeat(np.arange(len(counts)), counts)])).to(device)
        return cls(offsets, id_columns[0], id_columns[1], torch.from_numpy(counts > 0).to(device))


class TokenScores(NamedTuple):
    """Log-probs [C] and entropy [C] in nats, None if it was not requested. Float32 (float64 for float64 inputs)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


class _Gradients:
    """Gradients of hidden states and of weight rows, or of those that are needed; accumulated chunk by chunk."""

    def __init__(self, hidden, weight, num_rows: int, temperature: float, *, wants_hidden: bool, wants_weight: bool):
        self.hidden_states, self.words, self.temperature = hidden, weight[:num_rows], temperature
        self.dtype = weight.dtype
        self.hidden = torch.zeros_like(hidden) if wants_hidden else None
        # Summed over chunks in the softmax's dtype: a bfloat16 sum would lose a chunk's share to rounding.
        self.weight = torch.zeros_like(weight, dtype=_softmax_dtype(weight)) if wants_weight else None

    def add(self, chunk: slice, columns: torch.Tensor, factor: torch.Tensor) -> None:
        """Add the gradients of a chunk, given those of its logits as columns * factor.

        columns is [n, rows], factor is [n]: it is cheaper to apply to what has H columns.
        """
        hidden = self.hidden_states[chunk]
        columns, factor = columns.to(hidden.dtype), (factor / self.temperature)[:, None]
        if self.hidden is not None:
            self.hidden[chunk] = (columns @ self.words).mul_(factor)
        if self.weight is not None:
            total, weighed = self.weight[: len(self.words)], (hidden * factor).to(hidden.dtype)
            if total.dtype == weighed.dtype:
                torch.addmm(total, columns.t(), weighed, out=total)
            else:
                total += columns.t() @ weighed

    def all(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.hidden, None if self.weight is None else self.weight.to(self.dtype)


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
    slope: Slope | None = None,
    vocab_mask: SamplingMaskTensors | None = None,
) -> TokenScores:
    """Return the log-prob of each target under softmax(hidden @ weight.T / temperature), and optionally the entropy of that distribution.

    The matrix products run in the dtype of the inputs, everything after them in float32. One MAX and one SUM all-reduce per chunk in
    forward, none in backward: the returned gradient of `hidden` is this shard's PARTIAL sum, to be summed over `group` by the caller (as
    Megatron's column-parallel mappings do); that of `weight` is complete. C may be 0. Collective over `group`.

    Args:
        hidden: [C, H], the same on every rank of `group`.
        weight: [V_shard, H], this rank's rows of the output layer, which are rows vocab_start.. of the vocabulary.
        targets: Token to predict at each position, int64 [C]; IDs in the whole vocabulary.
        num_valid_rows: Rows of this shard that are tokens; the rest is padding of the vocabulary and takes no part in the softmax. None is
            all rows.
        group: Tensor-parallel group; None if the vocabulary is not split.
        chunk_size: Positions whose logits exist at a time; fewer on a CPU.
        with_entropy: Whether to return the entropy.
        slope: Gradient of the loss by log-prob, see above. Called for one chunk after another, if a gradient is required at all.
        vocab_mask: Tokens that softmax and entropy run over; they include the target. None is the whole vocabulary.
    """
    num_rows = weight.shape[0] if num_valid_rows is None else num_valid_rows
    logprobs, entropy = _LinearLogprobs.apply(
        hidden,
        weight,
        targets,
        temperature,
        vocab_start,
        num_rows,
        group,
        _rows_of_chunk(hidden, num_rows, chunk_size),
        with_entropy,
        slope,
        vocab_mask,
    )
    return TokenScores(logprobs, entropy)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, vocab_start, num_rows, group, chunk_size, with_entropy, slope, vocab_mask):
        num_positions, needs_grad = hidden.shape[0], ctx.needs_input_grad[:2]
        log_normaliser, logprobs, entropy = hidden.new_empty(3, num_positions, dtype=_softmax_dtype(hidden))
        gradients = grads_of_logprobs = logits = None
        if slope is not None and any(needs_grad):
            gradients = _Gradients(hidden, weight, num_rows, temperature, wants_hidden=needs_grad[0], wants_weight=needs_grad[1])
            grads_of_logprobs = torch.empty_like(logprobs)
        for chunk in _chunks(num_positions, chunk_size):
            logits = _logits(hidden[chunk], weight[:num_rows], temperature, logits)
            if vocab_mask is not None:
                _leave_out(logits, vocab_mask, chunk, vocab_start)
            columns, owned = _own_columns(targets[chunk], vocab_start, num_rows)
            highest = logits.amax(dim=1) if num_rows else logits.new_full((len(logits),), -math.inf)
            if group is not None:
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            sums = _sums(logits, columns, owned, highest, with_entropy)
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_normaliser[chunk] = highest + log_sum
            logprobs[chunk] = sums[1] - log_sum
            entropy[chunk] = log_sum - sums[2] / sums[0]
            if gradients is not None:
                grads_of_logprobs[chunk] = slope(chunk, logprobs[chunk])
                # d log p_target / dx_v = [v is the target] - p_v, and p_v is the exponential over the sum
                if num_rows:
                    logits.scatter_add_(1, columns[:, None], -(sums[0] * owned)[:, None])
                gradients.add(chunk, logits, -grads_of_logprobs[chunk] / sums[0])
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, entropy)
        ctx.temperature, ctx.vocab_start, ctx.num_rows, ctx.chunk_size = temperature, vocab_start, num_rows, chunk_size
        ctx.made, ctx.asked, ctx.vocab_mask = gradients, grads_of_logprobs, vocab_mask
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        gradients, ctx.made = ctx.made, None
        asks_entropy = grad_entropy is not None and bool(grad_entropy.any())
        if gradients is None or asks_entropy or grad_logprobs is None or not torch.equal(grad_logprobs, ctx.asked):
            gradients = _again(ctx, grad_logprobs, grad_entropy if asks_entropy else None)
        return *gradients.all(), *[None] * 9


def _again(ctx, grad_logprobs, grad_entropy) -> _Gradients:
    """Compute the gradients from logits that are computed a second time."""
    hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
    needs_grad = ctx.needs_input_grad[:2]
    gradients = _Gradients(hidden, weight, ctx.num_rows, ctx.temperature, wants_hidden=needs_grad[0], wants_weight=needs_grad[1])
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_normaliser)
    logits = None
    for chunk in _chunks(hidden.shape[0], ctx.chunk_size):
        logits = _logits(hidden[chunk], weight[: ctx.num_rows], ctx.temperature, logits)
        if ctx.vocab_mask is not None:
            _leave_out(logits, ctx.vocab_mask, chunk, ctx.vocab_start)
        grad_of_chunk = grad_logprobs[chunk]
        for rows in _rows(logits):
            x = logits[rows].sub_(log_normaliser[chunk][rows, None])
            if grad_entropy is None:
                x.exp_()
            else:  # dH/dx_v = -p_v (log p_v + H)
                softmax = x.exp()
                x.add_(entropy[chunk][rows, None]).mul_(grad_entropy[chunk][rows, None]).add_(grad_of_chunk[rows, None]).mul_(softmax)
        at_target, factor = (
            (torch.ones_like(grad_of_chunk), -grad_of_chunk) if grad_entropy is None else (grad_of_chunk, -torch.ones_like(grad_of_chunk))
        )
        if ctx.num_rows:
            columns, owned = _own_columns(targets[chunk], ctx.vocab_start, ctx.num_rows)
            logits.scatter_add_(1, columns[:, None], -(at_target * owned)[:, None])
        gradients.add(chunk, logits, factor)
    return gradients


def _sums(logits, columns, owned, highest, with_entropy: bool) -> torch.Tensor:
    """Return [3, n]: sums of exp(x), of the target's x, and of x * exp(x) if the entropy is needed; x is relative to `highest`.

    Leaves exp(x) in place of the logits.
    """
    sums = logits.new_zeros(3, len(logits))
    if not logits.shape[1]:
        return sums
    sums[1] = (logits.gather(1, columns[:, None])[:, 0] - highest) * owned
    for rows in _rows(logits):
        x = logits[rows].sub_(highest[rows, None])
        offsets = x.clone() if with_entropy else None
        sums[0, rows] = x.exp_().sum(dim=1)
        if offsets is not None:
            sums[2, rows] = offsets.mul_(x).sum(dim=1)
    return sums


def _leave_out(logits: torch.Tensor, vocab_mask: SamplingMaskTensors, chunk: slice, vocab_start: int) -> None:
    """Mask all logits of a chunk but those of each row's kept tokens, as far as this shard has them. In place."""
    words = slice(int(vocab_mask.at[chunk.start]), int(vocab_mask.at[chunk.stop]))
    columns, owned = _own_columns(vocab_mask.ids[words], vocab_start, logits.shape[1])
    rows, columns = (vocab_mask.positions[words] - chunk.start)[owned], columns[owned]
    values = logits[rows, columns]
    logits.masked_fill_(vocab_mask.is_some[chunk, None], _LEFT_OUT)
    logits[rows, columns] = values


def _rows_of_chunk(hidden: torch.Tensor, num_rows: int, chunk_size: int) -> int:
    """Return the positions per chunk: `chunk_size` on a GPU; on a CPU as many as a cache holds, which reach full rate already."""
    return chunk_size if hidden.device.type != "cpu" else min(chunk_size, max(_CPU_CHUNK // max(num_rows, 1), 64))


def _rows(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the rows of a chunk to process at a time, which stay in the cache between two passes over them. On a GPU, all rows."""
    size = len(logits) if logits.device.type != "cpu" else max(_CPU_ROWS // max(logits.shape[1], 1), 1)
    yield from _chunks(len(logits), size)


def _chunks(num_positions: int, chunk_size: int) -> list[slice]:
    return [slice(start, min(start + chunk_size, num_positions)) for start in range(0, num_positions, chunk_size)]


def _softmax_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _logits(hidden: torch.Tensor, words: torch.Tensor, temperature: float, previous: torch.Tensor | None) -> torch.Tensor:
    """Return the logits [n, rows] in the softmax's dtype; callers work in place.

    The logits of the previous chunk are overwritten: on a CPU new memory costs a page fault for every 4 KiB.
    """
    if hidden.dtype == _softmax_dtype(hidden):
        is_reusable = previous is not None and len(previous) == len(hidden)
        return torch.mm(hidden / temperature, words.t(), out=previous if is_reusable else None)
    return (hidden @ words.t()).to(_softmax_dtype(hidden)).div_(temperature)  # coarser hidden states would be rounded once more


def _own_columns(targets: torch.Tensor, vocab_start: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each target in this shard (an arbitrary one if another shard owns it), and whether the shard owns it."""
    columns = targets - vocab_start
    owned = (columns >= 0) & (columns < num_rows)
    return columns.clamp(0, max(num_rows - 1, 0)), owned
