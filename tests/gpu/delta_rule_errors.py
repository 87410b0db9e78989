"""Measure the gated delta rule on a GPU: the kernel against plain torch in float32, and twice. Prints JSON.

python -m tests.gpu.delta_rule_errors
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from megatron_grpo.core.policy import gated_delta_net as net
from megatron_grpo.core.policy.packed_batch import packed_stream
from megatron_grpo.core.types import Segment

# Tokens, alignment padding behind them, parent: long prompts, one that ends a chunk, one shorter than a chunk, children of each.
SIZES = ((512, 0, -1), (64, 0, -1), (2048, 8, -1), (3, 1, -1), (200, 0, 0), (1000, 0, 0), (8, 0, 1), (1, 0, 2), (130, 2, 3))
CHANNELS = ((64, 64), (128, 128), (128, 256))  # of keys, of values


def main() -> None:
    segments: list[Segment] = []
    for length, padding, parent in SIZES:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start=start, end=start + length + padding, length=length, parent=parent))
    stream = packed_stream(segments, 1, 0, lambda array: torch.from_numpy(array).cuda()).recurrence(4, net.CHUNK)
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        for channels in CHANNELS:
            rule, lacks = net.gpu_rule(dtype, *channels)
            found.append({"dtype": str(dtype), "channels": channels, "lacks": lacks})
            if lacks is None:
                found[-1] |= measure_errors(rule, stream, segments[-1].end, dtype, *channels)
    print(json.dumps(found))


def measure_errors(rule: net.Rule, stream, total: int, dtype: torch.dtype, key_channels: int, value_channels: int) -> dict[str, object]:
    """Return the largest relative error of output and gradients, and whether a second pass gave the same bits."""
    draw, heads = torch.Generator().manual_seed(0), 4
    query, key, value, grad, decay, strength = (
        torch.randn(total, heads, *size, generator=draw).cuda()
        for size in ((key_channels,), (key_channels,), (value_channels,), (value_channels,), (), ())
    )
    query, key = net.l2norm(query) * key_channels**-0.5, net.l2norm(key)
    drawn = [*(x.to(dtype).float() for x in (query, key, value)), -0.3 * F.softplus(decay), strength.sigmoid()]

    def outcome(one):
        inputs = [x.detach().requires_grad_() for x in drawn]
        out = one(*inputs, stream)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    expected, actual, again = outcome(net.gated_delta_rule), outcome(rule), outcome(rule)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))
    return {"error": worst, "repeats": all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))}


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
