"""Parse and validate a command line of any supported framework."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.run.check import CheckedConfig, check_parsed
from megatron_grpo.run.config import parse


def check(argv: Sequence[str], *, launcher_world_size: int | None = None) -> CheckedConfig:
    """Return the checked run. Raises ConfigError with all problems."""
    return check_parsed(parse(argv, launcher_world_size=launcher_world_size, dialects=lambda: DIALECTS))
