"""What is wrong with single values and with pairs of settings that do not go together. Sizes of batches: `batching/rules.py`."""

from __future__ import annotations

from typing import Any

from megatron_grpo.config import Config
from megatron_grpo.errors import Problem


def value_problem(name: str, value: Any) -> tuple[str, list[Any]] | None:
    """(what is wrong with a single value, the nearest that is not), or None."""
    return None


def validate(cfg: Config, unreadable: frozenset[str] | set[str] = frozenset()) -> list[Problem]:
    """Every problem that can be known from the settings alone, but for the sizes of batches."""
    return []
