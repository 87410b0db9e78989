"""Build a `Config` that knows the source of each value from typed settings. All mistakes are collected in `ParsedConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.run.config.read import COMMAND_LINE, RawSetting, Read, format_value, is_from_script, read_file, read_words, split_entry
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import InvalidValueError, Setting, names, read_value, table


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkDefaultValue:
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
class Framework:
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
class ParsedConfig:
    """A configuration with its problems and notes.

    Args:
        config: The configuration. Settings whose values could not be read hold their defaults.
        problems: Everything that is wrong with what was typed.
        unreadable: Names of settings whose values could not be read.
        print_config: Whether --print_config was typed.
        is_other_task: Whether the arguments request another task than GRPO; `problems` then say only this.
        system: The other system whose names were typed; None if all names are ours.
        aside: Names of that system that change nothing and are ignored, by source.
        notes: Notes on settings that were read as something else.
        repeated: A sentence for each flag that occurs twice.
        defaults: Defaults of that system that differ from ours.
    """

    config: Config = field(default_factory=Config)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    print_config: bool = False
    is_other_task: bool = False
    system: Framework | None = None
    # About `system`: names that change nothing and are ignored, by source; what was read as something else; defaults that differ.
    aside: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    defaults: list[FrameworkDefaultValue] = field(default_factory=list)


class FrameworkNames(Protocol):
    """Knowledge of other systems' names and launch scripts, which `compat` provides to the parser."""

    def read_program(self, text: str, path: str) -> Read:
        """Return the settings in a launch script, and its problems.

        Args:
            text: Content of a shell script or Python file.
            path: Its path.
        """

    def translation(self, entries: Sequence[RawSetting]) -> Any | None:
        """Return a `Translation` of these settings; None if they contain only our names and come from no launch script.

        Args:
            entries: Settings as typed.
        """

    def unknown(self, names: Mapping[str, Sequence[str]], translation: Any | None) -> Sequence[Problem]:
        """Return problems that suggest replacements for unknown names.

        Args:
            names: Unknown names, by source.
            translation: The translation that did not know them; None without one.
        """

    def value_hint(self, name: str, raw: Any) -> str:
        """Return a sentence, with a leading space, on what to type for a word that is no value of a setting; "" if none is known.

        Args:
            name: The setting.
            raw: What was typed.
        """


Dialects = Callable[[], FrameworkNames]  # imports `compat`; called only if something may be another system's name


def resolve(argv: Sequence[str], *, launcher_world_size: int | None = None, dialects: Dialects | None = None) -> Config:
    """Return the configuration of a command line, its `--config` files and the defaults; the command line wins.

    Args:
        launcher_world_size: Number of ranks that the launcher started; None without a launcher.
        dialects: Returns the knowledge of other systems' names.

    Raises:
        ConfigError: With everything that cannot be read: unknown names, wrong types, values outside the choices.
    """
    parsed = parse(argv, launcher_world_size=launcher_world_size, dialects=dialects)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config


def parse(argv: Sequence[str], *, launcher_world_size: int | None = None, dialects: Dialects | None = None) -> ParsedConfig:
    """Parse as `resolve` does, but return the problems, so that a caller can add those that it finds later.

    Args:
        launcher_world_size: Number of ranks that the launcher started; None without a launcher.
        dialects: Returns the knowledge of other systems' names.
    """
    typed_entries, problems = read_words(argv)
    program_flags = ("config", "print_config", "help")  # flags of the program, not settings
    files = [path for entry in typed_entries if entry.name == "config" for path in entry.raw]
    if any(entry.name == "config" and not entry.raw for entry in typed_entries):
        problems.append(Problem(flags=("config",), message="config requires the name of a file."))
    entries: list[RawSetting] = []
    read_program = (lambda text, path: dialects().read_program(text, path)) if dialects else None
    for path in files:
        file_entries, file_problems = read_file(path, read_program)
        entries += file_entries
        problems += file_problems
    entries += [entry for entry in typed_entries if entry.name not in program_flags]
    entries = [part for entry in entries for part in split_entry(entry)]

    print_config = any(entry.name == "print_config" and entry.raw[:1] != ["false"] for entry in typed_entries)
    may_be_foreign = is_from_script(entries) or any(entry.name.rpartition(".")[2] == "dialect" for entry in entries)
    translation = dialects().translation(entries) if dialects and may_be_foreign else None
    builder = _Builder(ParsedConfig(problems=problems, print_config=print_config), translation, dialects)
    for entry in translation.entries if translation else entries:
        builder.take(entry)
    unknown = dialects().unknown(builder.unknown, translation) if dialects and builder.unknown else _unknown(builder.unknown)
    builder.parsed.problems[builder.first : builder.first] = [*unknown, *(translation.unknowable() if translation else ())]
    return builder.finish(launcher_world_size)


def _unknown(names: Mapping[str, Sequence[str]]) -> list[Problem]:
    return [Problem(flags=(name,), message=f"{name} is not a setting.") for names_of_one in names.values() for name in names_of_one]


class _Builder:
    """Collects settings one by one and builds the configuration from them at the end."""

    def __init__(self, parsed: ParsedConfig, translation: Any | None, dialects: Dialects | None):
        self.parsed, self.translation, self.dialects = parsed, translation, dialects
        self.sizes: Mapping[str, Setting] = translation.sizes if translation else {}
        self.first = len(parsed.problems)  # problems with the files themselves come before all others
        self.values: dict[str, Any] = {}  # by name of a setting, or of another system's size
        self.sources: dict[str, str] = {}
        self.typed: dict[str, str] = {}
        self.seen: dict[tuple[str, str], tuple[str, Any]] = {}  # (source, setting) -> (name typed, value)
        self.unknown: dict[str, list[str]] = {}  # by source

    def take(self, entry: RawSetting) -> None:
        name = entry.typed or entry.name
        if isinstance(entry.raw, InvalidValueError):
            self._bad(name, name, entry.source, entry.raw)
            return
        setting, value = self._find(entry)
        if setting is None:
            self.unknown.setdefault(entry.source, []).append(name)
            return
        raw = entry.raw
        if setting.name == "dataset" and isinstance(raw, list) and len(raw) > 1:  # several words, or a list in a file
            self._set(table()["further_datasets"], [str(word) for word in raw[1:]], source=entry.source, typed_name=name)
            raw = raw[:1]
        if entry.is_read:
            value = raw
        elif value is None:
            try:
                value = read_value(setting, raw)
            except InvalidValueError as error:
                self._bad(name, setting.name, entry.source, error, raw)
                return
        self._set(setting, value, source=entry.source, typed_name=name)

    def _find(self, entry: RawSetting) -> tuple[Setting | None, Any]:
        """Return (setting, its value if the name itself implies it)."""
        name = entry.name
        if entry.typed:
            return table()[name], None
        if name in self.sizes:
            return self.sizes[name], None
        setting = names().get(name)
        if setting is None and name.startswith("no_") and entry.raw == []:
            negated = names().get(name.removeprefix("no_"))
            if negated is not None and negated.kind == "bool":
                return negated, False
        is_hidden = setting is not None and self.translation is not None and setting.name in self.translation.hides
        return None if is_hidden else setting, None

    def _bad(self, name: str, setting: str, source: str, error: InvalidValueError, raw: Any = None) -> None:
        source_text = "" if source == COMMAND_LINE else f" ({source})"
        nearest = {name: error.suggestions} if error.suggestions else {}
        hint = self.dialects().value_hint(setting, raw) if self.dialects else ""
        self.parsed.problems.append(Problem(flags=(name,), message=f"{name}{source_text} {error}.{hint}", nearest=nearest))
        self.parsed.unreadable.add(setting)

    def _set(self, setting: Setting, value: Any, *, source: str, typed_name: str) -> None:
        key = (source, setting.name)
        previous = self.seen.get(key)
        if previous and previous[1] != value and (previous[0] != typed_name or source != COMMAND_LINE):
            message = (
                f"{previous[0]} ({format_value(previous[1])}) and {typed_name} ({format_value(value)}) set the same setting. Use one "
                "of them."
            )
            if previous[0] == typed_name:
                message = f"{typed_name} is set twice in {source} ({format_value(previous[1])}, {format_value(value)}). Keep one of them."
            self.parsed.problems.append(Problem(flags=(previous[0], typed_name), message=message))
        elif previous and previous[1] != value:  # scripts that forward "$@" rely on this
            self.parsed.repeated.append(
                f"{typed_name} is set twice on the command line ({format_value(previous[1])}, {format_value(value)}): the last value is "
                "used."
            )
        self.seen[key] = (typed_name, value)
        if setting.name == "dataset" and self.sources.get("further_datasets", source) != source:  # they belong to a file
            del self.values["further_datasets"], self.sources["further_datasets"], self.typed["further_datasets"]
        self.values[setting.name] = value
        self.sources[setting.name] = source
        self.typed[setting.name] = typed_name

    def finish(self, launcher_world_size: int | None) -> ParsedConfig:
        """Build the configuration, once, from everything that was taken."""
        foreign, tasks = self.translation, set[str]()
        if foreign:
            self.parsed.problems.extend([*foreign.lacking(), *foreign.convert(self.values, self.sources, self.typed)])
            self.parsed = replace(self.parsed, notes=foreign.notes, aside=foreign.aside, defaults=foreign.defaults, system=foreign.system())
            self.parsed.repeated[:0] = foreign.repeated
            tasks = foreign.tasks
        self._world_size(launcher_world_size)
        self._another_way("bf16", "torch_dtype", "bfloat16", "float32")
        self._another_way("async_generate", "async_rollout_depth", 1, 0)
        settled, old_sources = _beginning(self.values), dict(self.sources)
        for name, value in settled.items():  # the path was typed under the other name
            other_name = next(candidate for candidate in settled if candidate != name)
            self.values[name], self.sources[name] = (
                value,
                old_sources.get(other_name, "default") if value not in (None, "auto") else "default",
            )
        sources = {name: self.sources.get(name, "default") for name in {**table(), **self.sources}}
        config = Config().with_values(self.values, sources=sources)
        config = replace(config, typed=self.typed, origins=foreign.origins if foreign else {})
        problems = [problem for problem in self.parsed.problems if not tasks or any(task in problem.message for task in tasks)]
        return replace(self.parsed, config=config, problems=problems, is_other_task=bool(tasks))

    def _world_size(self, launcher: int | None) -> None:
        """Set the number of ranks: from the launcher, else as typed, else as a script passes it to its own launcher, else 1."""
        world_size = self.values.get("world_size")
        if world_size is None and self.translation and self.translation.world_size:
            world_size, self.sources["world_size"] = self.translation.world_size
        if launcher is not None:
            if world_size not in (None, launcher) and not self.sources.get("world_size", "").endswith("default"):  # a dialect's default
                name = self.typed.get("world_size", "world_size")
                self.parsed.problems.append(
                    Problem(
                        flags=(name,),
                        nearest={name: [launcher]},
                        message=f"{name} ({world_size}) differs from the launcher's number of ranks ({launcher}). Omit {name}.",
                    )
                )
                self.parsed.unreadable.add("world_size")
            world_size = launcher
            self.sources["world_size"] = "launcher"
        self.values["world_size"] = 1 if world_size is None else world_size

    def _another_way(self, word: str, name: str, if_true: Any, if_false: Any) -> None:
        """Set `name` through another setting whose typed value, `word`, is true or false."""
        typed_value = self.values.get(word)
        if typed_value is None:
            return
        value = if_true if typed_value else if_false
        other_value = self.values.get(name, value)
        if other_value != value:
            typed_name, way = self.typed[name], self.typed.get(word, word)
            self.parsed.problems.append(
                Problem(
                    flags=(way, typed_name),
                    message=f"{way} ({str(typed_value).lower()}) means {typed_name} {value}, but {typed_name} is {other_value}. Use one of "
                    "them.",
                    nearest={typed_name: [value]},
                )
            )
        self.values[name] = value
        self.sources[name], self.typed[name] = f"derived from {word}", self.typed.get(word, word)


def _beginning(values: dict[str, Any]) -> dict[str, Any]:
    """Return changes that `finetune` makes to `mcore_model` and `resume`, as in Megatron.

    With true, `resume` means `mcore_model`; with false, `mcore_model` means `resume`.
    """
    finetune, beginning, resume = values.get("finetune"), values.get("mcore_model"), values.get("resume", "auto")
    if finetune is False and beginning and resume == "auto":
        return {"mcore_model": None, "resume": beginning}
    if finetune is True and not beginning and resume not in ("auto", "never"):
        return {"mcore_model": resume, "resume": "auto"}
    return {}
