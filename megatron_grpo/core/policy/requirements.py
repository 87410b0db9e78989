"""What kernels and the optimizer require (flash attention, FP8, dtypes), and the schedule of the learning rate. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_grpo.core.settings import OptimizerConfig, StepConfig

# Dtypes of gradients and optimizer state (`use_precision_aware_optimizer`).
BLOCK = 1 << 22  # elements that share a scale
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")  # two of weights and gradients, two of moments
OPTIMIZER_SETTINGS = ("use_precision_aware_optimizer", *DTYPES)  # unused by commands that take no optimizer step
# Linear layers in FP8, by fp8_recipe: (minimum compute capability of the GPU, required multiple of both sides of a matrix). From
# Transformer Engine 2.9 and 2.20: `quantization.check_fp8_*_support`, `utils.assert_dim_for_fp8_exec`, MXFP8's block of 32,
# `Float8BlockQuantizer.is_quantizable`.
FP8_NEEDS = {"tensorwise": ((8, 9), 16), "blockwise": ((9, 0), 128), "mxfp8": ((10, 0), 32)}
MOST_FLASH_CHANNELS = 256  # of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Learning-rate and weight-decay schedule, in optimizer steps.

    Args:
        warmup: Steps of warm-up.
        decay: Step at which the decay ends.
        anneal: Last steps of the decay in which WSD lowers the rate; None for other styles.
        start_wd: Initial weight decay.
        end_wd: Final weight decay.
    """

    warmup: int
    decay: int
    anneal: int | None
    start_wd: float
    end_wd: float


def make_lr_schedule(cfg: OptimizerConfig, num_steps: int) -> LRSchedule:
    """Return the schedule of a run."""
    warmup = cfg.lr_warmup_iters if cfg.lr_warmup_fraction is None else round(cfg.lr_warmup_fraction * num_steps)
    start = cfg.weight_decay if cfg.start_weight_decay is None else cfg.start_weight_decay
    end = cfg.weight_decay if cfg.end_weight_decay is None else cfg.end_weight_decay
    # Megatron-Core requires a decay that is longer than the warm-up, even if the run ends before it.
    decay = max(cfg.lr_decay_iters or num_steps, warmup + 1)
    return LRSchedule(warmup=warmup, decay=decay, anneal=cfg.lr_wsd_decay_iters, start_wd=start, end_wd=end)


def rank_multiple(cfg: StepConfig) -> int:
    """Return the multiple to which the tokens of a micro-batch on one rank are padded."""
    rows = FP8_NEEDS[cfg.model.fp8_recipe][1] if cfg.model.fp8_format else 1
    return math.lcm(cfg.batch.pad_to_multiple_of, rows)


def flash_obstacle(dtype: str, channels: int) -> str | None:
    """Return why flash attention on GPUs does not support these heads, as a phrase; None if it does.

    `policy.attention` checks the GPU itself.

    Args:
        dtype: Name of the dtype, such as "bfloat16".
    """
    if dtype not in ("bfloat16", "float16"):
        return f"flash attention supports bfloat16 and float16, not {dtype}"
    if channels > MOST_FLASH_CHANNELS or channels % 8:
        return f"flash attention supports head dimensions up to {MOST_FLASH_CHANNELS} that are multiples of 8, not {channels}"
    return None
