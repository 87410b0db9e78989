"""RMS norm, rotation and SwiGLU as single functions: outputs and gradients against torch and Megatron-Core."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_grpo.core.policy.kernels import RotaryFactors, rms_norm, rotate, swiglu


def draw_tensor(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def make_views(x):
    """As attention hands out the heads of a query: not contiguous."""
    return x.split([2, 1], dim=1)[0]


def test_rms_norm_passes_gradcheck():
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (draw_tensor(3, 2, 5), draw_tensor(5, seed=1)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(make_views(x), w, 1e-2), (draw_tensor(3, 3, 5), draw_tensor(5, seed=1)))


def test_rotate_passes_gradcheck():
    rotation = RotaryFactors.from_angles(draw_tensor(3, 4, seed=1).detach())
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation), (draw_tensor(3, 2, 8),))
    assert torch.autograd.gradcheck(lambda x: rotate(make_views(x), rotation), (draw_tensor(3, 3, 8),))


def test_swiglu_equals_its_parts_and_passes_gradcheck():
    assert torch.autograd.gradcheck(swiglu, (draw_tensor(3, 2, 10),))
    x = draw_tensor(3, 2, 10)
    torch.testing.assert_close(swiglu(x), F.silu(x[..., :5]) * x[..., 5:])
    assert swiglu(x[:0]).shape == (0, 2, 5)


def test_rms_norm_equals_torch():
    x, weight, grad = (draw_tensor(*shape, dtype=torch.float32, seed=seed) for seed, shape in enumerate(((64, 1, 32), (32,), (64, 1, 32))))
    grad = grad.detach()
    found, wanted = rms_norm(x, weight, 1e-6), F.rms_norm(x, (32,), weight, 1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(wanted, (x, weight), grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rms_norm_in_bfloat16_rounds_before_weight_as_samplers():
    x, weight, grad = (draw_tensor(*shape, seed=seed).detach().bfloat16() for seed, shape in enumerate(((512, 2, 64), (64,), (512, 2, 64))))
    wide = x.float()
    by_hand = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)).bfloat16() * weight
    assert torch.equal(rms_norm(x, weight, 1e-6), by_hand)
    assert 0.1 < (F.rms_norm(x, (64,), weight, 1e-6) != by_hand).float().mean() < 0.5

    def gradients(norm, dtype):
        inputs = [one.to(dtype).requires_grad_() for one in (x, weight)]
        return [one.double() for one in torch.autograd.grad(norm(*inputs), inputs, grad.to(dtype))]

    right = gradients(lambda x, w: rms_norm(x, w, 1e-6), torch.float64)
    mine = gradients(lambda x, w: rms_norm(x, w, 1e-6), torch.bfloat16)
    torchs = gradients(lambda x, w: F.rms_norm(x, (64,), w, 1e-6), torch.bfloat16)
    for name, wanted, one, other in zip(("x", "weight"), right, mine, torchs, strict=True):
        error, usual = ((found - wanted).norm() / wanted.norm() for found in (one, other))
        assert error < 2 * usual and error < 5e-3, f"{name}: {error:.1e}, torch's own {usual:.1e}"


def test_rms_norm_of_zero_rows_and_of_no_rows():
    zeros = torch.zeros(2, 4, requires_grad=True)
    rms_norm(zeros, torch.ones(4), 1e-6).sum().backward()
    torch.testing.assert_close(zeros.grad, torch.full((2, 4), 1e3))  # 1 / sqrt(epsilon)
    assert rms_norm(zeros[:0], torch.ones(4), 1e-6).shape == (0, 4)


def test_rotate_equals_megatron():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x, angles = draw_tensor(16, 2, 8, dtype=torch.float32), draw_tensor(16, 4, dtype=torch.float32, seed=1).detach() * 100
    twice = torch.cat([angles, angles], dim=-1)[:, None, None]
    wanted = _apply_rotary_pos_emb_bshd(x[:, None], twice)[:, 0]
    torch.testing.assert_close(rotate(x, RotaryFactors.from_angles(angles)), wanted, rtol=1e-6, atol=1e-6)


def test_rms_norm_with_frozen_weight_has_no_weight_gradient():
    x, weight = draw_tensor(3, 5), draw_tensor(5, seed=1).detach()
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is None and x.grad.norm() > 0
