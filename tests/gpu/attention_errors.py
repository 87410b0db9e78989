"""Measure attention with shared prefixes on a GPU: the kernel against matrix products, and twice. Prints JSON.

python -m tests.gpu.attention_errors
"""

from __future__ import annotations

import json

import numpy as np
import torch

from megatron_grpo.core.policy import attention
from megatron_grpo.core.policy.packed_batch import packed_stream, tokens_of_cp_rank
from megatron_grpo.core.types import Segment

SIZES = ((512, -1), (64, -1), (24, 0), (200, 0), (1000, 0), (8, 1), (8, 1), (2048, -1), (16, -1))  # tokens, parent


def main() -> None:
    ends = np.cumsum([0] + [size for size, _ in SIZES]).tolist()
    segments = [Segment(start=a, end=b, length=b - a - 1, parent=parent) for a, b, (_, parent) in zip(ends, ends[1:], SIZES)]
    device, found = torch.device("cuda"), []
    for dtype in (torch.bfloat16, torch.float16):
        for channels, heads, groups in ((64, 8, 8), (128, 8, 2), (192, 4, 4), (256, 4, 1)):
            kernel, lacks = attention.gpu_kernel(dtype, channels)
            for cp in (1, 2):
                found.append({"dtype": str(dtype), "channels": channels, "cp": cp, "lacks": lacks})
                if lacks is None:
                    found[-1] |= measure_errors(kernel, segments, cp, dtype, (channels, heads, groups), device)
    print(json.dumps(found))


def measure_errors(kernel, segments, cp: int, dtype: torch.dtype, sizes: tuple[int, int, int], device: torch.device) -> dict[str, object]:
    """Return the largest relative error of output and gradients, and whether a second pass gave the same bits in deterministic mode."""
    channels, heads, groups = sizes
    draw, total = torch.Generator().manual_seed(0), segments[-1].end
    q, k, v, grad = (torch.randn(total, n, channels, generator=draw).to(device, dtype) for n in (heads, groups, groups, heads))
    rank = cp - 1
    held = torch.from_numpy(tokens_of_cp_rank(segments, cp, rank)).to(device)
    packed = packed_stream(segments, cp, rank, lambda array: torch.from_numpy(array).to(device))

    def outcome(one, kind):
        inputs = [x.detach().to(kind).requires_grad_() for x in (q[held], k, v)]
        out = attention._Attention.apply(*inputs, packed, None, one)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad[held].to(kind))]

    right = outcome(attention.PLAIN, torch.float32)
    torch.use_deterministic_algorithms(True)
    mine, again = outcome(kernel, dtype), outcome(kernel, dtype)
    torch.use_deterministic_algorithms(False)
    worst = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True))
    return {"error": worst, "repeats": all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))}


if __name__ == "__main__":
    main()
