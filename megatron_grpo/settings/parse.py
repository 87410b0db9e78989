"""From entries to a `Config` that knows where each value came from. Collects every mistake instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.settings.config import Config
from megatron_grpo.settings.read import COMMAND_LINE, Entry, read_file, read_words
from megatron_grpo.settings.table import BadValue, Dialect, Setting, close_to, names, read_value, table


@dataclass(kw_only=True)
class Parsed:
    """A configuration, what is wrong with it, and the settings whose values could not be read (they hold their defaults)."""

    config: Config = field(default_factory=Config)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    ignored: dict[str, list[str]] = field(default_factory=dict)  # keys of a foreign file that mean nothing here, by file
    taken: dict[str, list[str]] = field(default_factory=dict)  # keys of a foreign file, not about batches, that mean the same here
    print_config: bool = False


def resolve(argv: Sequence[str], *, launcher_world_size: int | None = None, dialects: Mapping[str, Dialect] | None = None) -> Config:
    """The configuration that a command line, its `--config` files and the defaults make together; the command line wins.

    Raises ConfigError with everything that cannot be read: unknown names, wrong types, words outside the choices.
    """
    parsed = parse(argv, launcher_world_size=launcher_world_size, dialects=dialects)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config


def parse(argv: Sequence[str], *, launcher_world_size: int | None = None, dialects: Mapping[str, Dialect] | None = None) -> Parsed:
    """As `resolve`, but hands the problems back, so that a caller can add those it finds later."""
    typed_entries, problems = read_words(argv)
    own = ("config", "print_config", "help")  # flags of the program, not settings
    files = [path for entry in typed_entries if entry.name == "config" for path in entry.raw]
    if any(entry.name == "config" and not entry.raw for entry in typed_entries):
        problems.append(Problem(flags=("config",), message="config needs the name of a file."))
    entries: list[Entry] = []
    for path in files:
        file_entries, file_problems = read_file(path)
        entries += file_entries
        problems += file_problems
    entries += [entry for entry in typed_entries if entry.name not in own]

    print_config = any(entry.name == "print_config" and entry.raw[:1] != ["false"] for entry in typed_entries)
    builder = _Builder(Parsed(problems=problems, print_config=print_config), _dialect_of(entries, dialects or {}))
    for entry in entries:
        builder.take(entry)
    return builder.finish(launcher_world_size)


def _dialect_of(entries: Sequence[Entry], dialects: Mapping[str, Dialect]) -> Dialect | None:
    """`--dialect` decides what the other names mean, so it is looked for first."""
    found = None
    for entry in entries:
        if entry.name in ("dialect", "plan.dialect"):
            word = entry.raw[0] if isinstance(entry.raw, list) and entry.raw else entry.raw
            found = dialects.get(word) if isinstance(word, str) else None
    return found


class _Builder:
    def __init__(self, parsed: Parsed, dialect: Dialect | None):
        self.parsed, self.dialect = parsed, dialect
        self.values: dict[str, Any] = {}  # by setting; a size in another vocabulary is in `foreign`
        self.sources: dict[str, str] = {}
        self.typed: dict[str, str] = {}
        self.foreign: dict[str, int] = {}
        self.seen: dict[tuple[str, str], tuple[str, Any]] = {}  # (source, setting) -> (name typed, value)

    def take(self, entry: Entry) -> None:
        setting, value, name = self._find(entry)
        if name.startswith("$"):
            self._shell_variable(name, entry)
            return
        if setting is None:
            self._unknown(entry)
            return
        foreign_setting = self.dialect is not None and setting.name in self.dialect.settings
        # In a foreign file a key that is not about batches may mean something else: taken where it fits, else listed, never refused.
        is_guest = self.dialect is not None and entry.source != COMMAND_LINE and not foreign_setting and setting.group not in _SIZE_GROUPS
        try:
            value = value if value is not None else read_value(setting, entry.raw)
            if is_guest:
                from megatron_grpo.settings.checks import value_problem

                if value_problem(setting.name, value):
                    raise BadValue("out of range")
        except BadValue as bad:
            if is_guest:
                self.parsed.ignored.setdefault(entry.source, []).append(entry.name)
                return
            where = "" if entry.source == COMMAND_LINE else f" ({entry.source})"
            nearest = {name: bad.suggestions} if bad.suggestions else {}
            self.parsed.problems.append(Problem(flags=(name,), message=f"{name}{where} {bad}.", nearest=nearest))
            self.parsed.unreadable.add(setting.name)
            return
        if is_guest:
            self.parsed.taken.setdefault(entry.source, []).append(name)
        key = (entry.source, setting.name)
        earlier = self.seen.get(key)
        if earlier and earlier[0] != name and earlier[1] != value:
            message = f"{earlier[0]} ({earlier[1]}) and {name} ({value}) are one setting with two values. Keep one of them."
            self.parsed.problems.append(Problem(flags=(earlier[0], name), message=message))
        self.seen[key] = (name, value)
        self._set(setting, value, source=entry.source, typed=name)

    def _set(self, setting: Setting, value: Any, *, source: str, typed: str) -> None:
        if self.dialect is not None and setting.name in self.dialect.settings:
            self.foreign[setting.name] = value
        else:
            self.values[setting.name] = value
        self.sources[setting.name] = source
        self.typed[setting.name] = typed

    def _find(self, entry: Entry) -> tuple[Setting | None, Any, str]:
        """(setting, value when the name itself says it, the name as the user knows it)."""
        name = entry.name
        if self.dialect:
            for prefix in self.dialect.prefixes:
                name = name.removeprefix(prefix)
            if name in self.dialect.settings:
                return self.dialect.settings[name], None, name
            if name in self.dialect.renames:
                return table()[self.dialect.renames[name]], None, name
        setting = names().get(name)
        if setting is None and entry.name.startswith("no_") and entry.raw == []:
            negated = names().get(name.removeprefix("no_"))
            if negated is not None and negated.kind == "bool":
                return negated, False, name
        if setting is not None and self.dialect and setting.name in self.dialect.hides:
            return None, None, name
        return setting, None, name

    def _shell_variable(self, name: str, entry: Entry) -> None:
        """A script's own launcher says how many ranks it starts."""
        if name in ("$NPROC_PER_NODE", "$NNODES") and entry.raw[0].isdigit():
            self.seen[("shell", name)] = (entry.source, int(entry.raw[0]))

    def _unknown(self, entry: Entry) -> None:
        if self.dialect is not None and entry.source != COMMAND_LINE:
            self.parsed.ignored.setdefault(entry.source, []).append(entry.name)
            return
        own = [*self.dialect.settings, *self.dialect.renames] if self.dialect else []
        hidden = self.dialect.hides if self.dialect else ()
        known = own + [name for name, setting in names().items() if setting.name not in hidden] + ["config", "print_config"]
        section, _, last = entry.name.rpartition(".")
        close = close_to(last or entry.name, [*known, *hidden], limit=1) or close_to(last or entry.name, known, limit=1, cutoff=0.0)
        where = "" if entry.source == COMMAND_LINE else f" in {entry.source}"
        if self.dialect and (entry.name in hidden or close[0] in hidden):
            hint = f" In the {self.dialect.name} dialect the batch sizes are: {', '.join(own)}."
        elif section and last in known:
            groups = sorted({setting.group for setting in table().values()})
            hint = f" {last} is a setting, but {section} is not a section; the sections are: {', '.join(groups)}."
        else:
            hint = f" Did you mean {close[0]}?"
        self.parsed.problems.append(Problem(flags=(entry.name,), message=f"{entry.name}{where} is not a setting.{hint}"))

    def finish(self, launcher_world_size: int | None) -> Parsed:
        """The configuration is made here, once, from everything that was taken."""
        if self.dialect:
            for name, value in self.dialect.implies.items():
                self.values[name] = value
                self.sources.setdefault(name, f"implied by the {self.dialect.name} dialect")
            self.foreign = {
                name: setting.default
                for name, setting in self.dialect.settings.items()
                if setting.default is not None and setting.group == "foreign"
            } | self.foreign
        self._world_size(launcher_world_size)
        self._dtype()
        sources = {name: self.sources.get(name, "default") for name in {**table(), **self.sources}}
        config = Config().with_values(self.values, sources=sources)
        return replace(self.parsed, config=replace(config, typed=self.typed, foreign=self.foreign))

    def _world_size(self, launcher: int | None) -> None:
        """The launcher knows; without one, what was typed; else what a script gives to its own launcher; else 1."""
        asked = self.values.get("world_size")
        if asked is None and ("shell", "$NPROC_PER_NODE") in self.seen:
            source, per_node = self.seen[("shell", "$NPROC_PER_NODE")]
            asked = per_node * self.seen.get(("shell", "$NNODES"), ("", 1))[1]
            self.sources["world_size"] = f"{source} (NPROC_PER_NODE x NNODES)"
        if launcher is not None:
            if asked not in (None, launcher):
                name = self.typed.get("world_size", "world_size")
                self.parsed.problems.append(
                    Problem(
                        flags=(name,),
                        nearest={name: [launcher]},
                        message=f"{name} ({asked}) differs from the number of ranks that the launcher started ({launcher}). "
                        f"Leave {name} out.",
                    )
                )
                self.parsed.unreadable.add("world_size")
            asked = launcher
            self.sources["world_size"] = "launcher"
        self.values["world_size"] = 1 if asked is None else asked

    def _dtype(self) -> None:
        """`bf16` is another way to say torch_dtype."""
        bf16 = self.values.get("bf16")
        if bf16 is None:
            return
        dtype = "bfloat16" if bf16 else "float32"
        typed = self.values.get("torch_dtype", dtype)
        if typed != dtype:
            name = self.typed["torch_dtype"]
            self.parsed.problems.append(
                Problem(
                    flags=("bf16", name),
                    message=f"bf16 ({str(bf16).lower()}) means {dtype}, but {name} is {typed}. Keep one of them.",
                    nearest={name: [dtype]},
                )
            )
        self.values["torch_dtype"] = dtype
        self.sources["torch_dtype"] = "derived from bf16"


_SIZE_GROUPS = ("parallel", "batch")
