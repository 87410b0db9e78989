"""Attention in parts against one softmax over a dense mask: outputs and gradients of every kernel, with and without parents."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_grpo.core.policy import attention
from megatron_grpo.core.policy import packed_batch as stream_module
from megatron_grpo.core.policy.kernels import RotaryFactors
from megatron_grpo.core.policy.packed_batch import packed_stream, tokens_of_cp_rank
from megatron_grpo.core.types import Segment

LONG = 264
SIZES = ((8, -1), (4, -1), (4, 0), (12, 0), (LONG, 0), (4, 1), (4, 1), (8, -1), (20, -1))  # tokens, parent; cp 2 cuts each into four


def make_segments(padding: int = 4) -> list[Segment]:
    """Every second one ends with a token of alignment padding. The last segment is padding."""
    found: list[Segment] = []
    for number, (size, parent) in enumerate(SIZES):
        start = found[-1].end if found else 0
        found.append(Segment(start=start, end=start + size, parent=parent, length=size - number % 2))
    end = found[-1].end
    return [*found, Segment(start=end, end=end + padding, length=0)]


def make_mask(stream: list[Segment]) -> torch.Tensor:
    """bool [T, T]."""
    is_multimodal = torch.zeros(stream[-1].end, stream[-1].end, dtype=torch.bool)
    for one in stream:
        if one.length:
            is_multimodal[one.start : one.end, one.start : one.end] = torch.ones(one.end - one.start, one.end - one.start).tril().bool()
        if one.parent >= 0:
            parent = stream[one.parent]
            is_multimodal[one.start : one.end, parent.start : parent.start + parent.length] = True
    return is_multimodal


def compute_dense(q, k, v, is_multimodal, scale):
    """[t, heads, c]; 0 for a query that sees nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    weights = torch.where(is_multimodal, scores, -1e30).softmax(-1) * is_multimodal.any(-1, keepdim=True)
    return torch.einsum("hqk,khc->qhc", weights, v)


def draw_tensors(total: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, 8, dtype=dtype, generator=generator)

    return make(4).requires_grad_(), make(2).requires_grad_(), make(2).requires_grad_(), make(4)


@pytest.mark.parametrize("kernel", [attention.FLASH_ON_CPU, attention.PLAIN], ids=("flash on CPU", "plain"))
@pytest.mark.parametrize(("cp", "by_length"), [(1, False), (1, True), (2, False)])
def test_attention_in_parts_equals_one_softmax(kernel, cp, by_length, monkeypatch):
    monkeypatch.setattr(stream_module, "TOKENS_A_CALL", 10_000)  # where one call may be saved, it is
    stream = make_segments()
    *inputs, gradient = draw_tensors(stream[-1].end)
    wanted = compute_dense(*inputs, make_mask(stream), 0.3)
    # A rank's queries and, rank after rank, all keys.
    order = torch.from_numpy(np.concatenate([tokens_of_cp_rank(stream, cp, rank) for rank in range(cp)]))
    found = torch.zeros_like(wanted)
    for rank in range(cp):
        held = torch.from_numpy(tokens_of_cp_rank(stream, cp, rank))
        q, k, v = inputs[0][held], inputs[1][order], inputs[2][order]
        part = attention._Attention.apply(q, k, v, packed_stream(stream, cp, rank, torch.from_numpy, by_length=by_length), 0.3, kernel)
        found = found.index_put((held,), part)
    assert (found - wanted).abs().max() < 1e-12
    pairs = zip(torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient), strict=True)
    assert max((mine - right).abs().max() for mine, right in pairs) < 1e-12


def select_without_parents(stream: list[Segment]) -> list[Segment]:
    """Those without a parent, end to end."""
    moved, end = [], 0
    for one in (one for one in stream if one.parent < 0):
        moved.append(Segment(start=end, end=end + one.end - one.start, length=one.length))
        end = moved[-1].end
    return moved


def compute_dense_with_sinks(q, k, v, is_multimodal, sinks, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.where(is_multimodal, torch.einsum("qhc,khc->hqk", q, k) * scale, -1e30)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khc->qhc", weights * is_multimodal.any(-1, keepdim=True), v)


@pytest.mark.parametrize("kernel", [attention.FLASH_ON_CPU, attention.PLAIN], ids=("flash on CPU", "plain"))
@pytest.mark.parametrize(
    ("window", "cp"),
    [(1, 1), (1, 2), (2, 4), (3, 1), (3, 2), (7, 1), (7, 2), (7, 4), (66, 2), (100, 2), (100, 4), (263, 2), (265, 1), (265, 4)],
)
def test_attention_with_windows_and_sinks_equals_masked_softmax(kernel, window, cp):
    """Windows of one token, within a chunk of a rank, beyond one and several, of all but one and of all tokens."""
    stream = [dataclasses.replace(one, length=one.length - place % 4) for place, one in enumerate(concatenate_segments([16, LONG, 8, 24]))]
    stream.append(Segment(start=stream[-1].end, end=stream[-1].end + 8, length=0))
    *inputs, gradient = draw_tensors(stream[-1].end)
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    places = torch.arange(stream[-1].end)
    wanted = compute_dense_with_sinks(*inputs, make_mask(stream) & (places[:, None] - places < window), sinks, 0.3)
    order = torch.from_numpy(np.concatenate([tokens_of_cp_rank(stream, cp, rank) for rank in range(cp)]))
    found = torch.zeros_like(wanted)
    for rank in range(cp):
        held = torch.from_numpy(tokens_of_cp_rank(stream, cp, rank))
        packed = packed_stream(stream, cp, rank, torch.from_numpy, by_length=True).within(window)
        parts = [part for part in (packed.causal, *packed.full) if part]
        assert all(run.num_queries <= window and run.num_keys <= window for part in parts for run in part.runs) or window > 264
        part = attention._Attention.apply(inputs[0][held], inputs[1][order], inputs[2][order], packed, 0.3, kernel, sinks)
        found = found.index_put((held,), part)
    assert (found - wanted).abs().max() < 1e-12
    pairs = zip(*(torch.autograd.grad(out, [*inputs, sinks], gradient) for out in (found, wanted)), strict=True)
    assert max((mine - right).abs().max() for mine, right in pairs) < 1e-12


def test_attention_window_shorter_than_parent_raises():
    packed = packed_stream(make_segments(), 1, 0, torch.from_numpy)
    assert packed.within(None) is packed and packed.within(LONG + 8) is packed
    with pytest.raises(ValueError, match="share_prefix needs full attention, but a layer attends to 100 of 2"):
        packed.within(100)


def test_attention_without_parents_equals_torch():
    moved = select_without_parents(make_segments())
    *inputs, gradient = draw_tensors(moved[-1].end)
    wanted, packed = compute_dense(*inputs, make_mask(moved), 0.3), packed_stream(moved, 1, 0, torch.from_numpy)
    found = attention._by_torch(*inputs, packed, 0.3)
    assert (found - wanted).abs().max() < 1e-12
    pairs = zip(torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient), strict=True)
    assert max((mine - right).abs().max() for mine, right in pairs) < 1e-12


def test_in_bfloat16_parts_are_merged_in_float32():
    stream = make_segments()
    *inputs, _ = draw_tensors(stream[-1].end, torch.bfloat16)
    found = attention.attention(*inputs, packed_stream(stream, 1, 0, torch.from_numpy), 0.3)
    wanted = compute_dense(*(x.double() for x in inputs), make_mask(stream), 0.3)
    assert found.dtype is torch.bfloat16 and (found - wanted).abs().max() < 0.03


def concatenate_segments(lengths) -> list[Segment]:
    ends = np.cumsum(lengths).tolist()
    return [Segment(start=end - int(length), end=end, length=int(length)) for end, length in zip(ends, lengths)]


def test_attention_groups_short_segments_by_length_and_reads_long_ones_in_place():
    rng = np.random.default_rng(0)
    short, long = (
        packed_stream(concatenate_segments(rng.integers(1, most, 256)), 1, 0, torch.from_numpy, by_length=True).causal for most in (16, 64)
    )
    assert isinstance(short.queries, torch.Tensor) and len(short.runs) == 15
    assert isinstance(long.queries, slice) and len(long.runs) > 200
    equal = packed_stream(concatenate_segments([64] * 9), 1, 0, torch.from_numpy, by_length=True).causal
    assert isinstance(equal.queries, slice) and len(equal.runs) == 1


class TransformerEngineAttention(torch.nn.Module):
    """Transformer Engine's attention in thd layout, [t, heads, c] and segment bounds -> [t, heads * c], computed by torch."""

    calls: list = []

    def __init__(self, *, config, softmax_scale, pg_collection, **more):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, mask, *, attn_mask_type, packed_seq_params):
        assert packed_seq_params.qkv_format == "thd" and query.dim() == 3
        TransformerEngineAttention.calls.append(packed_seq_params)
        cut = [x.split(packed_seq_params.cu_seqlens_q.diff().tolist()) for x in (query, key, value)]
        out = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1).unsqueeze(0) for x in of), is_causal=True, scale=self.scale, enable_gqa=True
            )
            for of in zip(*cut, strict=True)
        ]
        return torch.cat([x.squeeze(0).transpose(0, 1) for x in out]).flatten(1)


@pytest.mark.parametrize(("parents", "dtype", "calls"), [(False, "bfloat16", 1), (True, "bfloat16", 0), (False, "float32", 0)])
def test_fused_attention_uses_transformer_engine_where_supported(monkeypatch, parents, dtype, calls):
    import megatron.core.extensions.transformer_engine as extensions

    from megatron_grpo.core.policy.layers import FusedAttention, PackedAttention

    monkeypatch.setattr(extensions, "TEDotProductAttention", TransformerEngineAttention, raising=False)
    TransformerEngineAttention.calls = []
    found = make_segments() if parents else [dataclasses.replace(one, parent=-1) for one in make_segments()]
    packed, total = packed_stream(found, 1, 0, torch.from_numpy), found[-1].end
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    one, other = (kind(SimpleNamespace(), softmax_scale=0.2, pg_collection=groups) for kind in (FusedAttention, PackedAttention))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(total, 1, heads, 16, generator=draw).to(getattr(torch, dtype)) for heads in (4, 2, 2))
    angles = torch.arange(total, dtype=torch.float32)[:, None] * 0.1 * torch.ones(8)
    packed = dataclasses.replace(packed, rotations=(RotaryFactors.from_angles(angles),))
    mine, theirs = (each(q, k, v, None, packed_seq_params=packed).float() for each in (one, other))
    assert len(TransformerEngineAttention.calls) == calls and mine.shape == theirs.shape
    seen = torch.from_numpy(np.concatenate([np.arange(s.start, s.start + s.length) for s in found]))  # what padding says nobody reads
    assert torch.allclose(mine[seen], theirs[seen], atol=2e-2 if dtype == "bfloat16" else 0.0, rtol=0.0)


# ---- flash attention of GPUs: everything but torch's two kernels runs here ---------------------------------------------------------------


class VarlenKernels:
    """The two variable-length kernels with the conditions of torch's source, on a CPU."""

    def __init__(self):
        self.calls = 0

    def _runs(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal):
        self.calls += 1
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[1] % k.shape[1] == 0 and dropout == 0.0
        for cu, x, longest in ((cu_q, q, max_q), (cu_k, k, max_k)):
            assert cu.dtype is torch.int32 and cu[0] == 0 and cu[-1] == len(x)
            sizes = cu.diff()
            assert sizes.min() > 0 and sizes.max() <= longest  # a run without tokens hangs
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            is_multimodal = torch.ones(b - a, d - c, dtype=torch.bool)
            yield slice(a, b), slice(c, d), is_multimodal.tril(int((d - c) - (b - a))) if is_causal else is_multimodal

    def forward(self, q, k, v, *rest, scale=None):
        *bounds, dropout, is_causal, debug = rest
        out, lse = torch.full_like(q, np.nan), q.new_full(q.shape[1::-1], np.nan)
        for at, of, is_multimodal in self._runs(q, k, v, *bounds, dropout, is_causal):
            scores = self._scores(q[at], k[of], is_multimodal, scale)
            lse[:, at] = scores.logsumexp(-1)
            out[at] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), self._for_heads(v[of], q))
        return out, lse, torch.empty(2), torch.empty(()), torch.empty(0)

    def backward(self, grad, q, k, v, out, lse, *rest, scale=None):
        *bounds, dropout, is_causal, state, unused = rest
        assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and grad.stride(-1) == out.stride(-1) == 1
        dq, dk, dv = torch.full_like(q, np.nan), torch.full_like(k, np.nan), torch.full_like(v, np.nan)
        for at, of, is_multimodal in self._runs(q, k, v, *bounds, dropout, is_causal):
            said = (self._scores(q[at], k[of], is_multimodal, scale) - lse[:, at, None]).exp()
            rows = torch.einsum("qhc,qhc->hq", grad[at], out[at])
            grad_scores = said * (torch.einsum("qhc,khc->hqk", grad[at], self._for_heads(v[of], q)) - rows[..., None])
            grad_scores = grad_scores * (scale or q.shape[-1] ** -0.5)
            dq[at] = torch.einsum("hqk,khc->qhc", grad_scores, self._for_heads(k[of], q))
            dk[of] = torch.einsum("hqk,qhc->khc", grad_scores, q[at]).unflatten(1, (k.shape[1], -1)).sum(2)
            dv[of] = torch.einsum("hqk,qhc->khc", said, grad[at]).unflatten(1, (k.shape[1], -1)).sum(2)
        return dq, dk, dv

    def _scores(self, q, k, is_multimodal, scale):
        scale = scale or q.shape[-1] ** -0.5
        return (torch.einsum("qhc,khc->hqk", q, self._for_heads(k, q)) * scale).masked_fill(~is_multimodal, -np.inf)

    def _for_heads(self, x, q):
        return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_flash_attention_of_gpu_equals_cpu_gradients(cp):
    stream = [dataclasses.replace(one, start=one.start * 2, end=one.end * 2, length=one.length * 2) for one in make_segments()]
    *inputs, gradient = draw_tensors(stream[-1].end)
    ops = VarlenKernels()
    for rank in range(cp):
        packed, outcomes = packed_stream(stream, cp, rank, torch.from_numpy), []
        for kernel in (attention._Varlen(ops.forward, ops.backward), attention.FLASH_ON_CPU):
            held = slice(0, stream[-1].end // cp)  # of these all tokens may be a rank's: what lies where does not matter here
            out = attention._Attention.apply(inputs[0][held], *inputs[1:], packed, 0.3, kernel)
            outcomes.append((out, *torch.autograd.grad(out, inputs, gradient[held])))
        assert max((mine - right).abs().max() for mine, right in zip(*outcomes, strict=True)) < 1e-12
    assert ops.calls == 2 * cp * (2 if cp == 1 else 3)


def test_attention_parent_without_children_makes_no_call():
    """Two equal completions are all trunk."""
    stream = [Segment(start=0, end=8, length=8), Segment(start=8, end=16, length=8), Segment(start=16, end=20, length=4, parent=0),
              Segment(start=20, end=24, length=4), Segment(start=24, end=30, length=6)]  # fmt: skip
    stream[4] = dataclasses.replace(stream[4], parent=3)
    [part] = packed_stream(stream, 1, 0, torch.from_numpy).full
    assert part.cu_keys.tolist() == [0, 8, 12] and part.keys.tolist() == [*range(8), *range(20, 24)]


@pytest.mark.parametrize(("op", "backward_takes"), [
    ("_flash_attention_forward", 0), ("_flash_attention_backward", 3),
])  # fmt: skip
def test_torch_attention_ops_have_the_expected_arguments(op, backward_takes):
    schema = getattr(torch.ops.aten, op).default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    bounds = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    if backward_takes:
        assert names == ["grad_out", "query", "key", "value", "out", "logsumexp", *bounds, "rng_state", "unused"]
        assert len(schema.returns) == 3
    else:
        assert names == ["query", "key", "value", *bounds, "return_debug_mask"]
        assert [one.name for one in schema.returns][:2] == ["output", "softmax_logsumexp"]
    assert [argument.name for argument in schema.arguments if argument.kwarg_only][0] == "scale"


def test_find_kernel_problem_detects_wrong_kernels():
    ops, cpu = VarlenKernels(), torch.device("cpu")

    def fault(forward=ops.forward, backward=ops.backward):
        return attention.find_kernel_problem(attention._Varlen(forward, backward), torch.float32, 16, cpu)

    def padded_log_sum_exp(*args, **how):
        out, lse, *rest = ops.forward(*args, **how)
        return out, lse.flip(1), *rest

    def its_own_statistics(grad, q, k, v, out, lse, *rest, scale):
        mine = ops.forward(q, k, v, *rest[:-2], False, scale=scale)
        return ops.backward(grad, q, k, v, mine[0], mine[1], *rest, scale=scale)

    assert attention.find_kernel_problem(attention.FLASH_ON_CPU, torch.float32, 16, cpu) is None and fault() is None
    assert "its output differs by" in fault(forward=padded_log_sum_exp)
    assert "the gradient of queries differs by" in fault(backward=its_own_statistics)
    # Here torch has no such kernel at all, and says so.
    assert "does not run on this GPU (" in attention.find_kernel_problem(attention.FLASH_ON_GPU, torch.bfloat16, 16, cpu)
