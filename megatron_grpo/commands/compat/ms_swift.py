"""Translation of ms-swift without Megatron. Most of its names are TRL's and Megatron-SWIFT's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.commands.compat import swift, trl
from megatron_grpo.commands.compat.foreign_args import OFF, ForeignArgs, SettingChange
from megatron_grpo.commands.compat.settle import drops_last
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.run.config.table import InvalidValueError

_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def _convert(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes specific to ms-swift, beyond those of both its trainers."""
    kind = args.text("deepspeed", "none")
    if kind not in (*_DEEPSPEED, *OFF):
        supported = ", ".join(_DEEPSPEED)
        raise InvalidValueError(f"deepspeed ({kind}) is a file that is not read: {sentence('SHARDED_ELSEWHERE')}. Supported: {supported}")
    if kind not in ("zero0", *OFF):
        note = f"deepspeed {kind}: optimizer state is sharded here (use_distributed_optimizer, optimizer_cpu_offload for the host), and a "
        yield SettingChange(note=f"{note}rank holds complete weights, except with tensor_model_parallel_size and other model parallelism.")
    if "tuner_type" not in values:
        yield SettingChange(values={"tuner_type": "lora"}, untyped=("tuner_type", "lora"))
    if values.get("tuner_type", "lora") == "lora":
        yield from swift.adapter(values)
    saves = args.text("save_strategy", "steps").lower()
    if saves == "no":
        yield SettingChange(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    if args.text("eval_strategy", saves).lower() == "no":
        yield SettingChange(values={"eval_steps": None}, note="eval_strategy no: eval_steps 0.")
    yield from drops_last(values, title="ms-swift")


CONVERSIONS = (*swift.of_both("lora"), _convert, trl.lowest_lr)
