"""RMSNorm, SwiGLU and rotary embedding as one autograd function each, and the norm layers that consist of nothing else.

Autograd over their parts would make more passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean of x^2 + epsilon) * weight, over the last dimension.

    Numbers of less precision than float32 are rounded before the multiplication by the weight, as samplers and transformers do. torch's own
    norm rounds once, after it, which changes a quarter of its numbers.

    Args:
        x: Input, [..., channels].
        weight: Weight, [channels].
    """
    if x.dtype not in (torch.float32, torch.float64):
        return _RoundedNorm.apply(x, weight, epsilon)
    if x.device.type == "cpu":
        return _RmsNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)  # one kernel on a GPU


class Norm(torch.nn.Module):
    """RMSNorm over the last dimension.

    Under sequence parallelism the gradient of its weight is summed over TP, which Megatron does for the attribute `sequence_parallel`.
    """

    def __init__(self, config, hidden_size, eps=1e-6, **unused):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class ZeroCenteredRMSNorm(Norm):
    """RMSNorm with the weight 1 + `weight`, computed in float32 (Gemma)."""

    def forward(self, x):
        return rms_norm(x.float(), 1 + self.weight.float(), self.eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        # One over the root. The norm of a row takes one pass and allocates no squares.
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        product = torch.mul(grad, x).reshape(-1, x.shape[-1])
        grad_x, grad_weight = None, torch.mv(product.t(), scale.view(-1)) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            grad_scale = torch.mv(product, weight).view(scale.shape).mul_(scale.pow(3)).div_(-x.shape[-1])
            grad_x = torch.mul(grad, weight, out=product.view(x.shape)).mul_(scale).addcmul_(x, grad_scale)
        return grad_x, grad_weight, None


class _RoundedNorm(torch.autograd.Function):
    """RMSNorm with rounding before the weight. The squares are summed in float32, in one kernel on a GPU.

    The normed input is computed again in the backward.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return F.rms_norm(x, weight.shape, None, epsilon).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            normed = F.rms_norm(x, weight.shape, None, ctx.epsilon)
        (grad_x,) = torch.autograd.grad(normed, x, grad * weight)
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        product = grad.float().mul_(normed.detach()).reshape(-1, len(weight))
        return grad_x, product.sum(dim=0).to(weight.dtype), None


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half times the second half: x [..., 2 c] -> [..., c].

    Args:
        x: [..., 2 c].
    """
    return _SwiGlu.apply(x)


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Return gelu (tanh approximation) of the first half times the second half: x [..., 2 c] -> [..., c].

    Args:
        x: [..., 2 c].
    """
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, activated = ctx.saved_tensors
        grad_x = torch.empty_like(x)  # both halves are written in place: no concatenation afterwards
        (gate, up), (grad_gate, grad_up) = x.chunk(2, dim=-1), grad_x.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def clamped_swiglu(x: torch.Tensor, factor: float, limit: float) -> torch.Tensor:
    """Return gate * sigmoid(factor * gate) * (1 + up) for the clamped halves of x [..., 2 c] (gpt-oss).

    Args:
        x: Gate and up, [..., 2 c].
        limit: Upper bound of the gate, and bound of the absolute value of up.

    Returns:
        The product, [..., c].
    """
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * factor) * (up.clamp(-limit, limit) + 1)


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {"silu": swiglu, "gelu_tanh": geglu, "clamped": clamped_swiglu}


class RotaryFactors(NamedTuple):
    """Factors of a rotation, one row per token, [t, 1, channels].

    A channel is multiplied by `cos`, and its partner in the rotation by `sin`, which includes the sign.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def from_angles(cls, angles: torch.Tensor) -> RotaryFactors:
        """Return the rotation by angles [t, channels / 2], in radians.

        Args:
            angles: float32 [t, channels / 2], in radians.
        """
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None])


def rotate(x: torch.Tensor, rotation: RotaryFactors) -> torch.Tensor:
    """Rotate the first n channels of x, where n is the number of channels of the rotation. The others stay.

    Args:
        x: Queries or keys, [t, heads, channels]. Channel i forms a pair with channel i + n / 2.
        rotation: The rotation of each token.
    """
    cos, sin, channels = rotation.cos.to(x.dtype), rotation.sin.to(x.dtype), rotation.cos.shape[-1]
    if channels < x.shape[-1]:
        return torch.cat([_Rotate.apply(x[..., :channels], cos, sin), x[..., channels:]], dim=-1)
    return _Rotate.apply(x, cos, sin)


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
    """Rotate x. It works on whole rows: operations on half rows cost as much as on whole rows."""
    return torch.mul(x, cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin, value=sign)
