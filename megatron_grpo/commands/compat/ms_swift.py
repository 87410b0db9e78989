"""Translation of ms-swift without Megatron. Most of its names are TRL's and Megatron-SWIFT's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.run.config.table import InvalidValueError

_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def settle_deepspeed(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Note how weights and optimizer state are sharded here; files of DeepSpeed are refused."""
    kind = args.text("deepspeed")
    if kind not in (*_DEEPSPEED, *OFF):
        supported = ", ".join(_DEEPSPEED)
        raise InvalidValueError(f"deepspeed ({kind}) is a file that is not read: {sentence('SHARDED_ELSEWHERE')}. Supported: {supported}")
    if kind not in ("zero0", *OFF):
        note = f"deepspeed {kind}: optimizer state is sharded here (use_distributed_optimizer, optimizer_cpu_offload for the host), and a "
        yield SettingChange(note=f"{note}rank holds complete weights, except with tensor_model_parallel_size and other model parallelism.")


def settle_intervals(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Read the strategies of saving and evaluation, of which the second is by default the first."""
    saves = args.text("save_strategy").lower()
    if saves == "no":
        yield SettingChange(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    if args.text("eval_strategy", saves).lower() == "no":
        yield SettingChange(values={"eval_steps": None}, note="eval_strategy no: eval_steps 0.")
