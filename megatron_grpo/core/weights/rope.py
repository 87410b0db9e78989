"""Rotary frequencies, bitwise equal to those that transformers computes for the same config.json.

Megatron's attention receives frequencies gathered by position, so this is the only place where rope types are interpreted.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from megatron_grpo.core.weights.shape import ModelShape, RopeShape


def rope_inverse_frequencies(shape: ModelShape, rope: RopeShape | None = None) -> tuple[np.ndarray, float]:
    """Return the inverse frequencies of a rope.

    They are computed in torch and in float32: at position 30,000 an error in the last bit of a frequency exceeds the tolerance of the
    log-probs.

    Args:
        rope: Rope to use. Default: the model's main rope.

    Returns:
        (float32 [rope.dim / 2] in radians per position, factor of cos and sin).
    """
    rope = rope or shape.rope
    return _FREQUENCIES[rope.type](rope).numpy(), rope.attention_scaling


def _wavelengths_per_turn(rope: RopeShape) -> torch.Tensor:
    return rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)


def _default(rope: RopeShape) -> torch.Tensor:
    return 1.0 / _wavelengths_per_turn(rope)


def _linear(rope: RopeShape) -> torch.Tensor:
    return _default(rope) / rope.factor


def _llama3(rope: RopeShape) -> torch.Tensor:
    """Return Llama 3.1's frequencies: long waves are stretched by `factor`, short ones kept, and those between are blended."""
    frequencies, context = _default(rope), rope.original_max_position_embeddings
    waves = 2 * math.pi / frequencies
    is_long, is_short = waves > context / rope.low_freq_factor, waves < context / rope.high_freq_factor
    stretched = torch.where(is_long, frequencies / rope.factor, frequencies)
    smooth_factor = (context / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth_factor) * stretched / rope.factor + smooth_factor * stretched
    return torch.where(is_long | is_short, stretched, blended)


def _yarn(rope: RopeShape) -> torch.Tensor:
    """Return YaRN's frequencies (arXiv:2309.00071, section 3.2): fast channels keep their frequency, and slow ones are interpolated."""
    first, last = (_channel_with_turns(turns, rope) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    interpolated_share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept_share = 1 - interpolated_share
    wavelengths = _wavelengths_per_turn(rope)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def _channel_with_turns(turns: float, rope: RopeShape) -> float:
    """Return the (fractional) index of the channel pair that makes `turns` turns over the original context."""
    return rope.dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
