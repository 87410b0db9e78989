"""A command line, read with the words of all systems and checked at once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.run.check import CheckedConfig, check_parsed
from megatron_grpo.run.config import parse


def check(argv: Sequence[str], *, launcher_world_size: int | None = None) -> CheckedConfig:
    """Raises ConfigError with everything that is wrong."""
    return check_parsed(parse(argv, launcher_world_size=launcher_world_size, dialects=lambda: DIALECTS))
