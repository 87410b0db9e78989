"""The vocabularies of other systems: their batch sizes as products of their own flags, and what each of their other names is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_grpo.base.errors import Problem
from megatron_grpo.compat.foreign_args import UNKNOWN, Dialect
from megatron_grpo.config.read import Read, TypedSetting, words_of

if TYPE_CHECKING:
    from megatron_grpo.compat.translate import Translation


class _Dialects(Mapping[str, Dialect]):
    """By what --dialect takes, `swift` being short for `swift-megatron`. Its table is read when a system is asked for."""

    names = ("trl", "skyrl", "skyrl-doc", "swift-megatron", "swift", "ms-swift", "cs336", "verl", "slime")

    def __getitem__(self, name: str) -> Dialect:
        from megatron_grpo.compat.tables import load

        if name not in self.names:
            raise KeyError(name)
        return load(name.removesuffix("-megatron").replace("-", "_"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def read_program(self, text: str, path: str) -> Read:
        """The flags of a launch script, or of a Python file that builds TRL's configuration."""
        from megatron_grpo.compat.script import read_program

        return read_program(text, path)

    def translation(self, entries: Sequence[TypedSetting]) -> Translation | None:
        """What these are here; None where they are names of ours alone. `--dialect` decides what the others mean, wherever it stands."""
        dialect, is_script = None, any(entry.name.startswith("$") for entry in entries)
        for entry in entries:
            if entry.name in ("dialect", "plan.dialect"):
                word = entry.raw[0] if isinstance(entry.raw, list) and entry.raw else entry.raw
                dialect = self.get(word) if isinstance(word, str) else None
        if dialect is None and not is_script and not any(UNKNOWN in word for entry in entries for word in words_of(entry.raw)):
            return None
        from megatron_grpo.compat.translate import Translation

        return Translation(entries, dialect)

    def unknown(self, found: Mapping[str, Sequence[str]], translation: Translation | None) -> list[Problem]:
        """What to type instead of names, by source, that nobody knows."""
        from megatron_grpo.compat.suggestions import problems_of_unknown

        return list(problems_of_unknown(found, translation.dialect if translation else None, self))


DIALECTS = _Dialects()
