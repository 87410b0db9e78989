"""What a name of another system is here. The tables of the systems are YAML; this is what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from megatron_grpo.config.table import TRUE, InvalidValueError, Setting


class Given(dict[str, list[str]]):
    """Every name of theirs in a run, with its words. What each method falls back to is their default."""

    def text(self, name: str, otherwise: str) -> str:
        return " ".join(self.get(name, [otherwise]))

    def is_true(self, name: str, otherwise: str = "false") -> bool:
        return self.text(name, otherwise).lower() in TRUE

    def number(self, name: str, otherwise: float | str) -> float:
        return float(self.text(name, str(otherwise)))

    def whole(self, name: str, otherwise: int) -> int:
        text = self.text(name, str(otherwise))
        if not text.isdigit():
            raise InvalidValueError(f"{name} needs a whole number, not {text!r}")
        return int(text)


# (words after the name, all foreign names of this run with their words) -> what that is in native settings, not yet read.
Reader = Callable[[Sequence[str], Given], Mapping[str, Any]]


class OtherTaskError(InvalidValueError):
    """Several names together ask for another task than GRPO: this is said, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A name of another system: translated (`native` or `read`), refused (`lacks`), or set aside because it changes nothing (neither).

    values: words that are spelt otherwise here; all others are read as they stand.
    lacks: the sentence that refuses it, but where its value is one of `off`, or where one of `instead` was typed.
    instead: what the sentence says to type: a setting, or a setting and its value (`vllm_mode server`).
    hint: what to type instead, for someone who typed the name without the dialect.
    why: of a name that is set aside: what it is about.
    is_task: what it refuses is another task, of which nothing else needs to be said.
    is_label: nothing that is trained depends on it: where a script leaves it open, it is left out.
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

    @property
    def says(self) -> str:
        """What it is here, as `docs/arguments.md` has it: one sentence."""
        words = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in self.values.items())
        if self.native:
            return f"`{self.native}`" + (f"; {words}" if words else "")
        if self.read is not None:
            return f"read: {self.hint}"
        if self.lacks:
            asked = [word for word in self.off if word not in OFF]
            said = [f"`{word}`" for word in asked] + [f"`{one}` is given" for one in self.instead]
            unless = f" (unless {' or '.join(said)})" if said else ""
            return f"refused{unless}: {self.lacks}"
        return f"set aside: {self.why or NOTHING}"

    def refuses(self, words: Sequence[str], given: Mapping[str, Sequence[str]]) -> bool:
        """Whether these words ask for what is not there. given: all names of this run with their words."""
        asked = [one.split() for one in self.instead]
        is_said = any(name in given and (not value or list(given[name]) == value) for name, *value in asked)
        return bool(self.lacks) and " ".join(words).lower() not in self.off and not is_said


UNKNOWN = "\x01"  # begins a word, or stands in one, that cannot be known from a script
OFF = ("none", "null", "false", "", "[]", "{}")  # nobody asks for anything with these
NOTHING = "nothing that is sampled or trained depends on it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """A default of another system that is not ours. With `native` theirs is used, for it is what the user's files rely on; else ours."""

    name: str
    theirs: str
    native: Mapping[str, Any] = field(default_factory=dict)
    ours: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What follows from several names at once: settings to be set (or left at their defaults, with None), and why.

    untyped: (name, their default) where none of those names was typed; it then stands in the table of defaults, on its first setting.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    untyped: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Another system's vocabulary: its sizes, and all its other names."""

    name: str
    title: str  # "Megatron-SWIFT"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    hides: Sequence[str] = ()  # native names that mean nothing, or something else, in this vocabulary
    products: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by size of ours: (unit, its own name)
    prefixes: Sequence[str] = ()  # sections of its files that may stand before the name of a size: "trainer."
    sections: Sequence[str] = ()  # sections that are left out in the keys of `names`
    heads: Mapping[str, str] = field(default_factory=dict)  # first words of names by section, those that stand in no other
    names: Mapping[str, Foreign] = field(default_factory=dict)
    patterns: Mapping[str, Foreign] = field(default_factory=dict)  # of names that `names` lacks: "ref.*", without sections
    defaults: Sequence[Default] = ()
    implies: Mapping[str, Any] = field(default_factory=dict)  # native settings that it switches on
    trains_tower: bool = False  # a model that sees trains whole where nobody says otherwise
    # each (native values, foreign names with their words) -> what changes once everything has been read
    settle: Sequence[Callable[[Mapping[str, Any], Given], Iterable[Change]]] = ()

    def row(self, name: str) -> tuple[str, Foreign | None]:
        """A name without its section, and what it is here; nothing in a section that is not its own."""
        if self._is_astray(name):
            return name, None
        for section in self.sections:
            if name.startswith(section):
                name = name.removeprefix(section)
                break
        found = self.names.get(name)
        if found is None:
            found = next((row for pattern, row in self.patterns.items() if fnmatchcase(name, pattern)), None)
        return name, found

    def makes(self, native: str) -> tuple[str, ...]:
        """Names of theirs, whose product is a size of ours."""
        unit, name = self.products[native]
        return (name, self.products["num_generations"][1]) if unit == "prompts" else (name,)

    def size(self, name: str) -> str | None:
        """The name of a size without its section, where it is one."""
        if self._is_astray(name):
            return None
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        return name if name in self.settings else None

    def _is_astray(self, name: str) -> bool:
        section = next((section for section in self.sections if name.startswith(section)), "")
        head = name.removeprefix(section).partition(".")[0]
        return any(head in words.split() for other, words in self.heads.items() if section and other != section)

    def knows(self, name: str) -> bool:
        return self.size(name) is not None or self.row(name)[1] is not None
