"""In which dtypes gradients and optimizer state are kept (`use_precision_aware_optimizer`), and what is lost by rounding. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import OptimizerConfig

BLOCK = 1 << 22  # numbers that share a scale
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_BITS = {"bf16": 7, "fp16": 10, "fp8": 3}  # behind the point, of numbers between one power of two and the next
DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")  # those of weights, those of moments
OF_THE_OPTIMIZER = ("use_precision_aware_optimizer", *DTYPES)  # of no use to a command that takes no step


def lost(opt: OptimizerConfig) -> Iterator[str]:
    """Legal, and yet what rounding to nearest never lets happen."""
    for name, beta in (("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")):
        dtype, moves = getattr(opt, f"{name}_dtype"), 1 - getattr(opt, beta)
        half = 2.0 ** -(_BITS[dtype] + 1) if dtype in _BITS else 0.0
        # The worst place is the number above a power of two, which is 1 + 2 half.
        if moves <= half / (1 + 2 * half):
            yield (
                f"{name}_dtype {dtype} with {beta} {getattr(opt, beta):g}: a step lets an average fall by {moves:.3g} of itself at most, "
                f"and {dtype} rounds by up to {half / (1 + 2 * half):.3g}, so that once it is high it may never fall again. Use fp32, or"
                f" {beta} below {1 - half / (1 + 2 * half):.3g}."
            )
    if opt.main_params_dtype == "fp16" and opt.lr > 0:
        yield (
            f"main_params_dtype fp16 with lr {opt.lr:g}: a step of Adam moves a weight by about lr, and fp16 rounds a weight w by up to "
            f"w / 2,048, so that weights above {opt.lr * 2048:.3g} mostly stay as they are, whatever their gradient says. Use fp32."
        )
