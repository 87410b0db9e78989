"""RMSNorm and rotary embedding as one autograd function each: autograd of their parts makes twice the passes over memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean of x^2 + epsilon) * weight, over the last dimension."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _RmsNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)  # one kernel on a GPU; coarser numbers are squared in float32 there


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        # One over the root: the norm of a row is one pass that leaves no squares behind.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = torch.mul(x, scale)
        product = torch.mul(grad, normed).reshape(-1, x.shape[-1])
        grad_x, grad_weight = None, product.sum(dim=0) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            mean = torch.mv(product, weight).div_(x.shape[-1]).view(scale.shape)
            grad_x = torch.mul(grad, weight, out=product.view(x.shape)).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None


class Rotation(NamedTuple):
    """Of each token: cos and sin [t, 1, channels / 2] of its angles."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, angles: torch.Tensor) -> Rotation:
        """angles [t, channels / 2]."""
        return cls(angles.cos()[:, None], angles.sin()[:, None])


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """x [t, heads, channels], whose channel i turns with channel i + channels / 2."""
    return _Rotate.apply(x, rotation.cos.to(x.dtype), rotation.sin.to(x.dtype))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None  # the inverse of a rotation is its transpose


def _turned(x, cos, sin, sign: int) -> torch.Tensor:
    """Written into both halves of the result: nothing is put together afterwards."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out
