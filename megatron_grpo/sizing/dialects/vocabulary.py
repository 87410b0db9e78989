"""What the tables of dialects share: batch sizes as rows, and the reward functions that are built in here."""

from __future__ import annotations

from megatron_grpo.settings.table import Setting
from megatron_grpo.sizing.sizes import NATIVE

BUILT_IN_REWARDS = (
    *("math", "accuracy", "format", "length", "soft_overlong", "cosine", "repetition", "code", "reward_model", "llm_judge"),
)
NATIVE_SIZES = tuple(flag for flags in NATIVE.values() for flag in flags)


def size(name: str, default: int | None, help: str) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)


def sizes(*rows: Setting) -> dict[str, Setting]:
    return {row.name: row for row in rows}
