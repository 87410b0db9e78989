"""Linear layers in FP8, which are Transformer Engine's: what its recipes ask for. No torch: `plan` asks too."""

from __future__ import annotations

import math

from megatron_grpo.config.config import Config

# By fp8_recipe: what Transformer Engine asks of a GPU (compute capability), and of both sides of a matrix (a multiple). Read in 2.9 and
# 2.20: `quantization.check_fp8_*_support`, `utils.assert_dim_for_fp8_exec`, `Float8BlockQuantizer.is_quantizable`, MXFP8's block of 32.
NEEDS = {"tensorwise": ((8, 9), 16), "blockwise": ((9, 0), 128), "mxfp8": ((10, 0), 32)}


def rank_multiple(cfg: Config) -> int:
    """What the tokens of a micro-batch on one rank are rounded up to."""
    rows = NEEDS[cfg.model.fp8_recipe][1] if cfg.model.fp8_format else 1
    return math.lcm(cfg.batch.pad_to_multiple_of, rows)
