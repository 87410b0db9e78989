"""A 64-bit fingerprint of a tensor, to compare copies on several ranks bit for bit without sending them.

The raw bits are read as 64-bit words. The fingerprint is the sum of word * factor modulo 2^64, where each position has a fixed odd factor.
A change of a single word always changes the sum, because an odd factor is invertible. Changes of several words, or an exchange of words,
leave it unchanged with a probability of about 2^-63. (Multilinear hashing, Carter and Wegman 1979; Lemire and Kaser 2013, arXiv 1202.4961.)
The sum is computed on the tensor's device in one pass, and only the number is sent.
"""

from __future__ import annotations

from functools import lru_cache

import torch

WORDS = 1 << 17  # words of a chunk: 1 MiB, so that its factors stay in the cache
_GOLDEN, _ALL = 0x9E3779B97F4A7C15, 1 << 64


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the fingerprint of a tensor's raw bits, int64 [].

    Tensors to compare must have equal shapes: trailing zeros do not change the fingerprint.

    Args:
        tensor: Tensor of any dtype and shape.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    factors = _factors(raw.device)
    for number, chunk in enumerate(raw.split(8 * WORDS)):
        words = _as_int64(chunk)
        total += (words * factors[: len(words)]).sum() * _signed(2 * number * _GOLDEN + 1)
    return total


def _as_int64(chunk: torch.Tensor) -> torch.Tensor:
    """Convert bytes, uint8 [n], to words, int64 [ceil(n / 8)]. They are copied only if they are not aligned to words."""
    if chunk.storage_offset() % 8 or len(chunk) % 8:
        padded = chunk.new_zeros(-(-len(chunk) // 8) * 8)
        padded[: len(chunk)] = chunk
        chunk = padded
    return chunk.view(torch.int64)


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**63), 2**63 - 1, (WORDS,), dtype=torch.int64, generator=generator)
    return (random | 1).to(device)


def _signed(number: int) -> int:
    """Return a number modulo 2^64 in the range of int64."""
    return (number + _ALL // 2) % _ALL - _ALL // 2
