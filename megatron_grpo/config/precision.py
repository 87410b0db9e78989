"""In which dtypes gradients and optimizer state are kept (`use_precision_aware_optimizer`): what does not go together, and what is lost by
rounding. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_grpo.config.config import Config, OptimizerConfig
from megatron_grpo.config.tuner import Pair

BLOCK = 1 << 22  # numbers that share a scale
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_BITS = {"bf16": 7, "fp16": 10, "fp8": 3}  # behind the point, of numbers between one power of two and the next
DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")  # those of weights, those of moments
OF_THE_OPTIMIZER = ("use_precision_aware_optimizer", *DTYPES)  # of no use to a command that takes no step


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    opt = cfg.optimizer
    other = {name: getattr(opt, name) for name in DTYPES if getattr(opt, name) != "fp32"}
    fp32 = dict.fromkeys(other, ["fp32"])
    if not opt.use_precision_aware_optimizer:
        if other:
            message = f"{_told(other)} without use_precision_aware_optimizer true: all would be kept in float32. Add it, or use fp32."
            yield (*other, "use_precision_aware_optimizer"), message, {"use_precision_aware_optimizer": [True], **fp32}
        return
    if not opt.use_distributed_optimizer:
        message = "use_precision_aware_optimizer true needs use_distributed_optimizer true: Megatron-Core has it with that optimizer alone."
        names = ("use_precision_aware_optimizer", "use_distributed_optimizer")
        yield names, message, {"use_distributed_optimizer": [True], "use_precision_aware_optimizer": [False]}
    if other and opt.optimizer_cpu_offload:
        message = (
            f"{_told(other)} with optimizer_cpu_offload true: Megatron-Core's optimizer on the host keeps float32. Use fp32, or "
            "optimizer_cpu_offload false."
        )
        yield (*other, "optimizer_cpu_offload"), message, {"optimizer_cpu_offload": [False], **fp32}
    of_weights = {name: value for name, value in other.items() if name in DTYPES[:2]}
    if of_weights and cfg.model.torch_dtype == "float32":
        message = (
            f"{_told(of_weights)} with torch_dtype float32: such weights have float32 gradients and are the optimizer's own. Use fp32, or "
            "torch_dtype bfloat16."
        )
        yield (*of_weights, "torch_dtype"), message, {"torch_dtype": ["bfloat16"], **dict.fromkeys(of_weights, ["fp32"])}


def _told(named: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {value}" for name, value in named.items())


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
