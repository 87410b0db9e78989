"""Fingerprints of tensors of one shape are equal only if every bit is equal."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.commands.analysis.fingerprint import WORDS, fingerprint


def compute_by_hand(raw: bytes) -> int:
    """Word by word, in Python's integers."""
    from megatron_grpo.commands.analysis.fingerprint import _GOLDEN, _factors

    factors, total = _factors(torch.device("cpu")).tolist(), 0
    raw += bytes(-len(raw) % 8)
    for at in range(0, len(raw), 8):
        number, place = divmod(at // 8, WORDS)
        total += int.from_bytes(raw[at : at + 8], "little", signed=True) * factors[place] * (2 * number * _GOLDEN + 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_fingerprint_equals_formula_at_any_storage_offset(dtype, size):
    whole = torch.randn(size + 5, generator=torch.Generator().manual_seed(size)).mul(50).to(dtype)
    raw = whole[1 : size + 1].clone().view(torch.uint8).numpy().tobytes()
    assert int(fingerprint(whole[1 : size + 1])) == int(fingerprint(whole[1 : size + 1].clone())) == compute_by_hand(raw)


def test_fingerprint_changes_with_bits_order_chunks_and_sign_of_zero():
    tensor = torch.randn(2 * WORDS * 2 + 3, generator=torch.Generator().manual_seed(0))  # three chunks
    before = int(fingerprint(tensor))
    for at in (0, 1, 2 * WORDS - 1, 2 * WORDS, len(tensor) - 1):
        for bit in (0, 22, 30, 31):
            other = tensor.clone()
            other.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 1 << bit
            assert int(fingerprint(other)) != before
    swapped = tensor.clone()
    swapped[[3, 2 * WORDS + 3]] = tensor[[2 * WORDS + 3, 3]]
    assert int(fingerprint(swapped)) != before and int(fingerprint(tensor.clone())) == before
    assert int(fingerprint(torch.tensor([0.0, 1.0]))) != int(fingerprint(torch.tensor([-0.0, 1.0])))
    assert int(fingerprint(torch.zeros(0))) == 0 and int(fingerprint(torch.ones(4, 3).T)) == int(fingerprint(torch.ones(3, 4)))
