"""A number of 64 bits for a tensor: whether copies on several ranks are the same, bit for bit, without sending them.

The raw bits are read as words of 64 bits; the sum over words of word * factor is taken modulo 2^64, where the factor is an odd number that
belongs to the word's place. One word that changes always changes the sum: an odd factor can be divided by. Several that change leave it
alone with a probability of about 2^-63, and so do words that change places. (Multilinear hashing, Carter and Wegman 1979; Lemire and Kaser
2013, arXiv 1202.4961.) It is computed where the tensor lies, in one pass, and only the number travels.
"""

from __future__ import annotations

from functools import lru_cache

import torch

WORDS = 1 << 17  # a chunk: a mebibyte, so that its factors stay in a cache
_GOLDEN, _ALL = 0x9E3779B97F4A7C15, 1 << 64


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """int64 []: of the raw bits, in their order. Equal shapes are taken for granted: zeros behind the end do not count."""
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return found
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    factors = _factors(raw.device)
    for number, chunk in enumerate(raw.split(8 * WORDS)):
        words = _words(chunk)
        found += (words * factors[: len(words)]).sum() * _signed(2 * number * _GOLDEN + 1)
    return found


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> int64 [n / 8, rounded up]. Copied only where the bytes begin or end inside a word."""
    if chunk.storage_offset() % 8 or len(chunk) % 8:
        whole = chunk.new_zeros(-(-len(chunk) // 8) * 8)
        whole[: len(chunk)] = chunk
        chunk = whole
    return chunk.view(torch.int64)


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (WORDS,), dtype=torch.int64, generator=generator)
    return (drawn | 1).to(device)


def _signed(number: int) -> int:
    """Modulo 2^64, as int64 has it."""
    return (number + _ALL // 2) % _ALL - _ALL // 2
