"""The gated delta rule over a packed stream in float64, against its definition token by token: outputs and gradients."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_grpo.core.policy.gated_delta_net import convolve, fault_of_rule, gated_delta_rule, gpu_rule, l2norm, rule_by_kernel
from megatron_grpo.core.policy.packed_batch import packed_stream, tokens_of_cp_rank
from megatron_grpo.core.types import Segment
from tests.mistakes import mistake

HEADS, K, V, KERNEL = 3, 5, 7, 4
# tokens, alignment padding behind them, parent. More than two chunks of 64, parents shorter than the kernel, a prompt that ends a chunk.
LONG = ((1, 0, -1), (135, 3, -1), (64, 0, -1), (2, 2, -1), (130, 1, 1), (3, 0, 1), (70, 0, 2), (1, 1, 3), (5, 0, 3))
SHORT = ((37, 1, -1), (1, 0, -1), (2, 1, -1), (16, 0, -1), (24, 0, 0), (1, 0, 0), (9, 3, 1), (2, 0, 1), (3, 0, 2), (17, 0, 3))


def make_segments(sizes) -> list[Segment]:
    found: list[Segment] = []
    for length, padding, parent in sizes:
        start = found[-1].end if found else 0
        found.append(Segment(start=start, end=start + length + padding, length=length, parent=parent))
    return [*found, Segment(start=found[-1].end, end=found[-1].end + 4, length=0)]


def compute_token_by_token(query, key, value, decay, strength):
    """Of one sequence: [n, heads, ...] -> [n, heads, v]."""
    state, found = torch.zeros(HEADS, K, V, dtype=value.dtype), []
    for q, k, v, g, beta in zip(query, key, value, decay, strength, strict=True):
        state = state * g.exp()[:, None, None]
        said = (state * k[:, :, None]).sum(1)
        state = state + k[:, :, None] * (beta[:, None] * (v - said))[:, None]
        found.append((state * q[:, :, None]).sum(1))
    return torch.stack(found)


def iterate_sequences(stream):
    """(places of a segment, places of its parent and it)."""
    for one in stream:
        own = torch.arange(one.start, one.start + one.length)
        before = stream[one.parent] if one.parent >= 0 else None
        yield own, own if before is None else torch.cat([torch.arange(before.start, before.start + before.length), own])


def draw_tensors(total: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(total, *size, dtype=torch.float64, generator=draw)

    query, key = (l2norm(normal(HEADS, K)) for _ in range(2))
    found = [query, key, normal(HEADS, V), -F.softplus(normal(HEADS)) * 0.3, normal(HEADS).sigmoid()]
    return [one.requires_grad_() for one in found]


@pytest.mark.parametrize(("sizes", "chunk"), [(LONG, 64), (SHORT, 8), (SHORT, 16)], ids=["long", "chunks of 8", "chunks of 16"])
def test_delta_rule_of_packed_stream_equals_token_by_token(sizes, chunk):
    stream = make_segments(sizes)
    inputs, total = draw_tensors(stream[-1].end), stream[-1].end
    order = packed_stream(stream, 1, 0, torch.from_numpy).recurrence(KERNEL, chunk)
    out = gated_delta_rule(*inputs, order)
    want = torch.zeros(total, HEADS, V, dtype=torch.float64)
    for own, whole in iterate_sequences(stream):
        if len(own):
            want = want.index_copy(0, own, compute_token_by_token(*(x[whole] for x in inputs))[len(whole) - len(own) :])
    assert (out - want).abs().max() < 1e-12
    grad = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True):
        assert (one - other).abs().max() < 1e-11 * other.abs().max()


@pytest.mark.parametrize("size", [1, 2, KERNEL])
def test_delta_net_convolution_restarts_per_segment_and_continues_from_parent(size):
    stream, channels = make_segments(SHORT), 6
    draw = torch.Generator().manual_seed(0)
    x, kernel = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((stream[-1].end, channels), (channels, size)))
    found = convolve(x, kernel, packed_stream(stream, 1, 0, torch.from_numpy).recurrence(size, 8).previous)
    for own, whole in iterate_sequences(stream):
        if len(own):
            padded = F.pad(x[whole].T[None], (size - 1, 0))
            want = F.conv1d(padded, kernel[:, None], groups=channels)[0].T[len(whole) - len(own) :]
            assert (found[own] - want).abs().max() < 1e-12


@pytest.mark.parametrize("cp", [2, 3])
def test_delta_net_context_parallel_ranks_exchange_tokens_in_stream_order(cp):
    stream = make_segments([(length * 2 * cp - 1, 1, parent) for length, _, parent in SHORT])
    stream[-1] = Segment(start=stream[-1].start, end=stream[-1].start + 2 * cp, length=0)
    order = packed_stream(stream, cp, 0, torch.from_numpy).recurrence(KERNEL, 8)
    gathered = np.concatenate([tokens_of_cp_rank(stream, cp, rank) for rank in range(cp)])
    assert gathered[order.to_stream].tolist() == list(range(stream[-1].end))
    assert np.arange(stream[-1].end)[order.to_ranks].tolist() == gathered.tolist()


def test_delta_rule_of_padding_gives_zeros():
    stream = [Segment(start=0, end=4, length=0)]
    inputs = draw_tensors(4)
    out = gated_delta_rule(*inputs, packed_stream(stream, 1, 0, torch.from_numpy).recurrence(KERNEL, 8))
    assert out.shape == (4, HEADS, V) and not out.any()


def compute_kernel_token_by_token(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens):
    """What flash-linear-attention's `chunk_gated_delta_rule` says that it computes, token by token."""
    assert output_final_state and q.shape[0] == 1 and cu_seqlens.dtype == torch.int64
    outputs, states = [], []
    for number, (begin, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        state = q.new_zeros(HEADS, q.shape[-1], v.shape[-1]) if initial_state is None else initial_state[number]
        for t in range(begin, end):
            state = state * g[0, t].exp()[:, None, None]
            moved = beta[0, t][:, None] * (v[0, t] - (state * k[0, t][:, :, None]).sum(1))
            state = state + k[0, t][:, :, None] * moved[:, None]
            outputs.append((state * q[0, t][:, :, None]).sum(1) * scale)
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states)


@pytest.mark.parametrize("sizes", [LONG, SHORT], ids=["long", "short"])
def test_delta_rule_kernel_equals_torch_implementation(sizes):
    stream = make_segments(sizes)
    inputs, order = draw_tensors(stream[-1].end), packed_stream(stream, 1, 0, torch.from_numpy).recurrence(KERNEL, 8)
    expected, actual = (
        gated_delta_rule(*inputs, order),
        rule_by_kernel(*inputs, order, dtype=torch.float64, kernel=compute_kernel_token_by_token),
    )
    assert (expected - actual).abs().max() < 1e-12
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        assert (one - other).abs().max() < 1e-11 * other.abs().max()


def raise_kernel_error(*inputs):
    raise RuntimeError("no kernel image\nfor this device")


@pytest.mark.parametrize(("rule", "phrase"), [
    (gated_delta_rule, None),
    (raise_kernel_error, "does not run on this GPU (no kernel image)"),
    (lambda query, *inputs: gated_delta_rule(query * 1.05, *inputs), "its output by 5.0e-02, more than rounding (3.1e-02)"),
    (lambda q, k, v, decay, s, stream: gated_delta_rule(q, k, v, decay.detach() + (decay - decay.detach()) * 2, s, stream),
     "the gradient of decays by 1.0e+00"),
])  # fmt: skip
def test_delta_rule_kernel_with_wrong_result_is_rejected(rule, phrase):
    fault = fault_of_rule(rule, torch.bfloat16, 16, 24, torch.device("cpu"))
    assert fault is None if phrase is None else phrase in fault


def test_delta_rule_falls_back_to_torch_without_kernel():
    assert "not float32, which it multiplies as TF32" in gpu_rule(torch.float32, 16, 24).lacks
    if find_spec("fla") is None:
        chosen = gpu_rule(torch.bfloat16, 16, 24)
        assert chosen.rule is gated_delta_rule and chosen.lacks == "flash-linear-attention is not installed (the extra `fla`)"


LAYER, STREAM = (f"megatron_grpo.core.policy.{name}" for name in ("gated_delta_net", "packed_batch"))


@pytest.mark.parametrize("wrong", [
    (LAYER, "else last[wave.parents]", "else 0 * last[wave.parents]"),
    (LAYER, "else last[wave.parents]", "else last[wave.parents].detach()"),
    (LAYER, "torch.cat([carried * fade[rows] + ", "torch.cat([carried * 0 + 0 * "),
    (STREAM, "segment.start + min(first + chunk, segment.length))", "min(segment.start + first + chunk, segment.end))"),
    (STREAM, "index[segments[i].parent] for", "0 * index[segments[i].parent] for"),
], ids=["children begin anew", "no gradient to parents", "forgotten between chunks", "padding of a parent", "one parent"])  # fmt: skip
def test_delta_rule_tests_detect_planted_errors(wrong):
    with mistake(*wrong), pytest.raises((AssertionError, RuntimeError)):
        test_delta_rule_of_packed_stream_equals_token_by_token(LONG, 64)


@pytest.mark.parametrize("wrong", [
    (STREAM, "preceding[kernel - 1 - len(last) :] = last", "pass"),
    (STREAM, "last = np.arange(parent.start, parent.start + parent.length)",
     "last = np.arange(parent.end - parent.length, parent.end)"),
    (STREAM, "preceding = np.full(kernel - 1, total)", "preceding = np.arange(segment.start - kernel + 1, segment.start)"),
], ids=["a child begins anew", "padding of a parent is seen", "segments see each other"])  # fmt: skip
def test_delta_net_convolution_tests_detect_planted_errors(wrong):
    with mistake(*wrong), pytest.raises(AssertionError):
        test_delta_net_convolution_restarts_per_segment_and_continues_from_parent(KERNEL)


@pytest.mark.parametrize("wrong", [
    (LAYER, "else states[wave.parents]", "else 0 * states[wave.parents]"),
    (LAYER, "scale=1.0", "scale=None"),
    (LAYER, "out.index_copy(0, wave.tokens, outputs", "out.index_copy(0, wave.tokens.flip(0), outputs"),
    (STREAM, "segments[i].start + segments[i].length) for i in numbers]", "segments[i].end) for i in numbers]"),
], ids=["children begin anew", "scaled twice", "outputs of others", "padding of a parent"])  # fmt: skip
def test_delta_rule_kernel_tests_detect_planted_errors(wrong):
    with mistake(*wrong), pytest.raises((AssertionError, RuntimeError, TypeError)):
        test_delta_rule_kernel_equals_torch_implementation(LONG)
