"""Result of reading settings: a configuration, its problems, and notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignDefault:
    """Default of another system that differs from ours, for a setting that was not typed.

    Args:
        name: Name of the setting.
        theirs: The other system's default.
        ours: This package's default.
        used: The value that is used, one of the two.
    """

    name: str
    theirs: str
    ours: str
    used: str


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The other system whose names were typed, as far as a plan needs it.

    Args:
        title: Name of the system.
        explain: (BatchSizes, max_steps) -> sentences on what is the same here and what differs.
        length: (Config, BatchSizes, rows or None) -> (optimizer steps of such a run there, or None if they are counted as here; sentences
            about it).
        trains_tower: Whether a vision-language model trains its vision tower there by default.
    """

    title: str
    explain: Callable[[Any, int | None], Iterator[str]]
    length: Callable[[Config, Any, int | None], tuple[int | None, list[str]]]
    trains_tower: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A configuration with its problems and notes.

    Args:
        config: The configuration. Settings whose values could not be read hold their defaults.
        problems: Everything that is wrong with what was typed.
        unreadable: Names of settings whose values could not be read.
        print_config: Whether --print_config was typed.
        is_other_task: Whether the arguments request another task than GRPO; `problems` then say only this.
        system: The other system whose names were typed; None if all names are ours.
        aside: Names of that system that change nothing and are ignored, by source.
        notes: What was read as something else.
        repeated: A sentence for each flag that occurs twice.
        renamed: Current name of each setting that was typed under a name of an earlier version, by that name.
        defaults: Defaults of that system that differ from ours.
    """

    config: Config = field(default_factory=Config)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    print_config: bool = False
    is_other_task: bool = False  # the arguments request another task than GRPO
    system: System | None = None
    # About `system`: names that change nothing and are ignored, by source; what was read as something else; defaults that differ.
    aside: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # a sentence for each flag that occurs twice
    renamed: dict[str, str] = field(default_factory=dict)  # current names, by the former names that were typed
    defaults: list[ForeignDefault] = field(default_factory=list)
