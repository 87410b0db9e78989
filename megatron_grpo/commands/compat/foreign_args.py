"""Types for the names of another system. The tables of the systems are YAML files; these classes hold their content."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from megatron_grpo.run.config.table import TRUE, InvalidValueError, Setting


class FrameworkArgs(dict[str, list[str]]):
    """All foreign names of a run, with their words. A name that was not typed has the other system's default.

    Args:
        defaults: Default of each name that is read together with others.
    """

    def __init__(self, defaults: Mapping[str, str] = MappingProxyType({})):
        super().__init__()
        self.defaults = defaults

    def text(self, name: str, default: str = "") -> str:
        """Return the words of a name, joined by spaces.

        Args:
            default: Value if the name neither was typed nor has a default.
        """
        return " ".join(self.get(name, [self.defaults.get(name, default)]))

    def is_true(self, name: str) -> bool:
        """Return whether the value of a name is true."""
        return self.text(name).lower() in TRUE

    def number(self, name: str) -> float:
        """Return the value of a name as a float.

        Raises:
            ValueError: It is not a number.
        """
        return float(self.text(name))

    def integer(self, name: str, default: int = 0) -> int:
        """Return the value of a name as a whole number.

        Args:
            default: Value if the name neither was typed nor has a default.

        Raises:
            InvalidValueError: It is not one.
        """
        text = self.text(name, str(default))
        if not text.isdigit():
            raise InvalidValueError(f"{name} must be a whole number, not {text!r}")
        return int(text)

    def choice(self, name: str, supported: Iterable[str], remark: str = "") -> str:
        """Return the value of a name.

        Raises:
            InvalidValueError: It is not supported.
        """
        text = self.text(name)
        if text not in supported:
            raise InvalidValueError(f"{name} ({text}) is not supported. Supported: {', '.join(supported)}{remark}")
        return text

    def find_changed(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that were typed with another value than their default.

        Args:
            names: Foreign names without their sections.
        """
        return [name for name in names if self.text(name).lower() != self.defaults[name]]


# (words after the name, all foreign names of this run with their words) -> native settings, not yet parsed; or, under NOTE, what differs.
Reader = Callable[[Sequence[str], FrameworkArgs], Mapping[str, Any]]


class OtherTaskError(InvalidValueError):
    """Error for names that together ask for another task than GRPO. It is reported alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkArg:
    """A name of another system: translated (`native` or `read`), refused (`lacks`), or ignored because it has no effect (neither).

    Args:
        native: Native setting with the same meaning.
        values: Words that are spelled differently here; all others are read unchanged.
        read: Function that translates the value.
        lacks: Sentence that refuses the name, unless its value is in `off` or one of `instead` was typed.
        off: Values that ask for nothing.
        instead: Remedies in the sentence: a setting, or a setting and its value (`vllm_mode server`).
        hint: Remedy for a user who typed the name without the dialect.
        why: Subject of an ignored name.
        is_task: Whether the name asks for another task, so that no other problem needs to be reported.
        is_label: Whether training does not depend on it. It is left out if a script does not determine its value.
    """

    native: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    read: Reader | None = None
    lacks: str = ""
    off: Sequence[str] = ()
    instead: Sequence[str] = ()
    hint: str = ""
    why: str = ""
    is_task: bool = False
    is_label: bool = False

    def refuses(self, words: Sequence[str], args: Mapping[str, Sequence[str]]) -> bool:
        """Return whether these words ask for something unsupported.

        Args:
            words: Words after the name.
        """
        suggestions = [suggestion.split() for suggestion in self.instead]
        is_given = any(name in args and (not value or list(args[name]) == value) for name, *value in suggestions)
        return bool(self.lacks) and " ".join(words).lower() not in self.off and not is_given


NOTE = "$note"  # key of a reader's sentence on what differs, which begins behind the foreign name
OFF = ("none", "null", "false", "", "[]", "{}")  # values that ask for nothing
NOTHING = "it affects neither sampling nor training"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkDefault:
    """A default of another system that differs from the native one.

    With `native`, the foreign default is used, because the user's files rely on it; without it, the native one.

    Args:
        name: Foreign name.
        theirs: Foreign default, as text.
        native: Native settings that reproduce it.
        ours: Native default, as text, if it cannot be taken from `native`.
    """

    name: str
    theirs: str
    native: Mapping[str, Any] = field(default_factory=dict)
    ours: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """Consequence of several names together.

    Args:
        values: Settings to set; None resets to the default.
        note: Explanation for the user.
        untyped: (foreign name, its default) if none of those names was typed. It is then listed in the table of defaults, with the first
            of `values`.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    untyped: tuple[str, str] | None = None


# (native settings so far, all foreign names of this run) -> what follows from several of them
Step = Callable[[Mapping[str, Any], FrameworkArgs], Iterator[SettingChange]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFramework:
    """Vocabulary of another system: its batch sizes, and all its other names.

    Args:
        title: Title, such as "Megatron-SWIFT".
        hides: Native names that are unknown, or mean something else, in this vocabulary.
        products: Native size -> (unit, foreign name).
        prefixes: Sections of its files that may precede the name of a size: "trainer.".
        sections: Sections that are omitted in the keys of `names` -> first parts of names that occur in no other section.
        patterns: Names not in `names`, without sections: "ref.*".
        implies: Native settings that the dialect sets.
        trains_tower: Whether the vision tower trains by default.
        settle: Steps that are applied once everything has been read, in parts of which each ends with its first error.
        fallbacks: Its defaults of names that are read together with others.
    """

    name: str
    title: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    hides: Sequence[str] = ()
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    prefixes: Sequence[str] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, FrameworkArg] = field(default_factory=dict)
    patterns: Mapping[str, FrameworkArg] = field(default_factory=dict)
    defaults: Sequence[FrameworkDefault] = ()
    implies: Mapping[str, Any] = field(default_factory=dict)
    trains_tower: bool = False
    settle: Sequence[Sequence[Step]] = ()
    fallbacks: Mapping[str, str] = field(default_factory=dict)

    def row(self, name: str) -> tuple[str, FrameworkArg | None]:
        """Return a name without its section, and its table row; None as the row if it is unknown or in the wrong section.

        Args:
            name: Foreign name, with or without its section.
        """
        if self._is_astray(name):
            return name, None
        for section in self.sections:
            if name.startswith(section):
                name = name.removeprefix(section)
                break
        row = self.names.get(name)
        if row is None:
            row = next((row for pattern, row in self.patterns.items() if fnmatchcase(name, pattern)), None)
        return name, row

    def makes(self, native: str) -> tuple[str, ...]:
        """Return the foreign names whose product is a native size."""
        unit, name = self.products[native]
        return (name, self.products["num_generations"][1]) if unit == "prompts" else (name,)

    def size(self, name: str) -> str | None:
        """Return the name of a batch size without its section; None if it is not a size."""
        if self._is_astray(name):
            return None
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name if name in self.settings else None

    def _is_astray(self, name: str) -> bool:
        section = next((section for section in self.sections if name.startswith(section)), "")
        head = name.removeprefix(section).partition(".")[0]
        return any(head in words.split() for other_section, words in self.sections.items() if section and other_section != section)

    def knows(self, name: str) -> bool:
        """Return whether the dialect has this name.

        Args:
            name: Foreign name, with or without its section.
        """
        return self.size(name) is not None or self.row(name)[1] is not None
