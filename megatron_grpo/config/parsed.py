"""What comes of reading settings: a configuration, what is wrong with it, and what is to be said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignDefault:
    """A default of another system that differs from ours and that nobody typed: `used` is one of the two."""

    name: str
    theirs: str
    ours: str
    used: str


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The other system whose words were typed, as far as a plan speaks of it.

    explain: (BatchSizes, max_steps) -> what is the same here and what differs, in sentences.
    length: (Config, BatchSizes, rows or None) -> optimizer steps of such a run there, None where they are counted as here; and what is
    said of it. trains_tower: a model that sees trains whole there, where nobody says otherwise.
    """

    title: str
    explain: Callable[[Any, int | None], Iterator[str]]
    length: Callable[[Config, Any, int | None], tuple[int | None, list[str]]]
    trains_tower: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A configuration, what is wrong with it, and the settings whose values could not be read (they hold their defaults)."""

    config: Config = field(default_factory=Config)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    print_config: bool = False
    is_other_task: bool = False  # problems say nothing but this: it asks for another task than GRPO
    system: System | None = None
    # Of it: names that change nothing and were set aside, by source; what was read as something else; defaults that differ.
    aside: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # flags that stand twice, a sentence each
    defaults: list[ForeignDefault] = field(default_factory=list)
