"""Attention in parts against one softmax over a dense mask: outputs and gradients, by every kernel, with and without parents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_grpo.parallel.context import held_tokens
from megatron_grpo.policy import attention
from megatron_grpo.policy.layers import te_packed
from megatron_grpo.policy.stream import LONGEST_COPIED, packed_stream
from megatron_grpo.types import Segment

LONG = LONGEST_COPIED + 8
SIZES = ((8, -1), (4, -1), (4, 0), (12, 0), (LONG, 0), (4, 1), (4, 1), (8, -1), (20, -1))  # tokens, parent; cp 2 cuts each into four


def segments(padding: int = 4) -> list[Segment]:
    """Every second one ends with a token of alignment padding. The last segment is padding."""
    found: list[Segment] = []
    for number, (size, parent) in enumerate(SIZES):
        start = found[-1].end if found else 0
        found.append(Segment(start=start, end=start + size, parent=parent, length=size - number % 2))
    end = found[-1].end
    return [*found, Segment(start=end, end=end + padding, length=0)]


def seen_by(stream: list[Segment]) -> torch.Tensor:
    """bool [T, T]."""
    sees = torch.zeros(stream[-1].end, stream[-1].end, dtype=torch.bool)
    for one in stream:
        if one.length:
            sees[one.start : one.end, one.start : one.end] = torch.ones(one.end - one.start, one.end - one.start).tril().bool()
        if one.parent >= 0:
            parent = stream[one.parent]
            sees[one.start : one.end, parent.start : parent.start + parent.length] = True
    return sees


def dense(q, k, v, sees, scale):
    """[t, heads, c]; 0 for a query that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    weights = torch.where(sees, scores, -1e30).softmax(-1) * sees.any(-1, keepdim=True)
    return torch.einsum("hqk,khc->qhc", weights, v)


def drawn(total: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, 8, dtype=dtype, generator=generator)

    return make(4).requires_grad_(), make(2).requires_grad_(), make(2).requires_grad_(), make(4)


@pytest.mark.parametrize("kernel", [attention.FLASH_ON_CPU, attention.PLAIN], ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("cp", [1, 2])
def test_parts_are_one_softmax_forward_and_backward(kernel, cp):
    stream = segments()
    *inputs, gradient = drawn(stream[-1].end)
    wanted = dense(*inputs, seen_by(stream), 0.3)
    # A rank's queries and, rank after rank, all keys.
    order = torch.from_numpy(np.concatenate([held_tokens(stream, cp, rank) for rank in range(cp)]))
    found = torch.zeros_like(wanted)
    for rank in range(cp):
        held = torch.from_numpy(held_tokens(stream, cp, rank))
        q, k, v = inputs[0][held], inputs[1][order], inputs[2][order]
        part = attention._Attention.apply(q, k, v, packed_stream(stream, cp, rank, torch.from_numpy), 0.3, kernel)
        found = found.index_put((held,), part)
    assert (found - wanted).abs().max() < 1e-12
    pairs = zip(torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient), strict=True)
    assert max((mine - right).abs().max() for mine, right in pairs) < 1e-12


def test_without_parents_torchs_own_attention_gives_the_same():
    stream = [segment for segment in segments() if segment.parent < 0]
    moved, end = [], 0
    for one in stream:
        moved.append(Segment(start=end, end=end + one.end - one.start, length=one.length))
        end = moved[-1].end
    *inputs, gradient = drawn(end)
    wanted, packed = dense(*inputs, seen_by(moved), 0.3), packed_stream(moved, 1, 0, torch.from_numpy)
    found = attention._own_alone(*inputs, packed, 0.3)
    assert (found - wanted).abs().max() < 1e-12
    pairs = zip(torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient), strict=True)
    assert max((mine - right).abs().max() for mine, right in pairs) < 1e-12


def test_in_bfloat16_parts_are_merged_in_float32():
    stream = segments()
    *inputs, _ = drawn(stream[-1].end, torch.bfloat16)
    found = attention.attention(*inputs, packed_stream(stream, 1, 0, torch.from_numpy), 0.3)
    wanted = dense(*(x.double() for x in inputs), seen_by(stream), 0.3)
    assert found.dtype is torch.bfloat16 and (found - wanted).abs().max() < 0.03


def test_many_short_segments_of_many_lengths_run_in_few_calls():
    rng, stream = np.random.default_rng(0), []
    for length in rng.integers(1, LONGEST_COPIED, 256):
        start = stream[-1].end if stream else 0
        stream.append(Segment(start=start, end=start + int(length), length=int(length)))
    parts = packed_stream(stream, 1, 0, torch.from_numpy).own
    assert len(parts) < 40
    computed = sum(part.queries.n * part.queries.at.shape[1] for part in parts)
    assert computed < 1.1 * stream[-1].end


def test_transformer_engine_is_not_handed_a_stream_with_parents():
    with pytest.raises(ValueError, match="attention with parents, which Transformer Engine's path has not yet"):
        te_packed(packed_stream(segments(), 1, 0, torch.from_numpy))
