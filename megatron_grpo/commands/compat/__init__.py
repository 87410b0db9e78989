"""Dialects: the settings of other systems (TRL, verl, SkyRL, slime, Megatron-SWIFT, ...), translated into settings of this package.

Batch sizes are computed as products of the other system's flags; every other name is translated, refused, or ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_grpo.commands.compat.foreign_args import SourceFramework
from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run.config.read import RawSetting, Read, is_from_script

if TYPE_CHECKING:
    from megatron_grpo.commands.compat.translate import Translation


class _Dialects(Mapping[str, SourceFramework]):
    """Dialects by the value of --dialect; `swift` is short for `swift-megatron`. A dialect's table is read on first use."""

    names = ("trl", "skyrl", "skyrl-doc", "swift-megatron", "swift", "ms-swift", "cs336", "verl", "slime")

    def __getitem__(self, name: str) -> SourceFramework:
        from megatron_grpo.commands.compat.tables import load

        if name not in self.names:
            raise KeyError(name)
        return load(name.removesuffix("-megatron").replace("-", "_"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def read_program(self, text: str, path: str) -> Read:
        """Return the flags of a launch script, or of a Python file that builds TRL's configuration."""
        from megatron_grpo.commands.compat.script import read_program

        return read_program(text, path)

    def translation(self, entries: Sequence[RawSetting]) -> Translation | None:
        """Return the translation of these settings; None if all are settings of this package.

        `--dialect` decides what the others mean, at any position.

        Args:
            entries: Settings as typed, in order.
        """
        dialect = None
        for entry in entries:
            if entry.name in ("dialect", "plan.dialect"):
                word = entry.raw[0] if isinstance(entry.raw, list) and entry.raw else entry.raw
                dialect = self.get(word) if isinstance(word, str) else None
        if dialect is None and not is_from_script(entries):
            return None
        from megatron_grpo.commands.compat.translate import Translation

        return Translation(entries, dialect)

    def unknown(self, names_by_source: Mapping[str, Sequence[str]], translation: Translation | None) -> list[Problem]:
        """Return problems with suggestions for unknown names.

        Args:
            translation: Result of `translation`.
        """
        from megatron_grpo.commands.compat.suggestions import problems_of_unknown

        return list(problems_of_unknown(names_by_source, translation.dialect if translation else None, self))

    def value_hint(self, name: str, raw: Any) -> str:
        """Return a sentence, with a leading space, on what to type for a word that is no value of a setting; "" if none is known."""
        from megatron_grpo.commands.compat.suggestions import value_hint

        return value_hint(name, raw)


DIALECTS = _Dialects()
