"""From entries to a `Config` that knows where each value came from. Collects every mistake instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config import begins
from megatron_grpo.config.config import Config
from megatron_grpo.config.foreign import Change, Dialect, Foreign, OtherTask, shown, words_of
from megatron_grpo.config.parsed import ForeignDefault, Parsed
from megatron_grpo.config.read import COMMAND_LINE, TypedSetting, read_file, read_words
from megatron_grpo.config.remedies import ALIKE, LIST, reads_as, remedy
from megatron_grpo.config.script import UNKNOWN, plain
from megatron_grpo.config.table import BadValue, Setting, close_to, names, read_value, table

_LABELS = ("run_name", "project")  # nothing depends on them


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
    entries: list[TypedSetting] = []
    for path in files:
        file_entries, file_problems = read_file(path)
        entries += file_entries
        problems += file_problems
    entries += [entry for entry in typed_entries if entry.name not in own]

    print_config = any(entry.name == "print_config" and entry.raw[:1] != ["false"] for entry in typed_entries)
    builder = _Builder(Parsed(problems=problems, print_config=print_config), _dialect_of(entries, dialects or {}), dialects or {})
    for entry in entries:
        builder.hear(entry)
    for entry in entries:
        builder.take(entry)
    return builder.finish(launcher_world_size)


def _dialect_of(entries: Sequence[TypedSetting], dialects: Mapping[str, Dialect]) -> Dialect | None:
    """`--dialect` decides what the other names mean, so it is looked for first."""
    found = None
    for entry in entries:
        if entry.name in ("dialect", "plan.dialect"):
            word = entry.raw[0] if isinstance(entry.raw, list) and entry.raw else entry.raw
            found = dialects.get(word) if isinstance(word, str) else None
    return found


class _Builder:
    """Takes entries one by one and makes the configuration of them at the end."""

    def __init__(self, parsed: Parsed, dialect: Dialect | None, dialects: Mapping[str, Dialect]):
        self.parsed, self.dialect, self.dialects = parsed, dialect, dialects
        self.first = len(parsed.problems)  # those of the files themselves come before all others
        self.values: dict[str, Any] = {}  # by setting; a size in another vocabulary is in `foreign`
        self.sources: dict[str, str] = {}
        self.typed: dict[str, str] = {}
        self.foreign: dict[str, int] = {}
        self.given: dict[str, list[str]] = {}  # every name of another system with its words, as typed
        self.seen: dict[tuple[str, str], tuple[str, Any]] = {}  # (source, setting) -> (name typed, value)
        self.said: set[str] = set()  # names whose values are known, wherever they stand
        self.unknown: dict[str, list[str]] = {}  # by source
        self.unknowable: dict[str, list[tuple[str, str]]] = {}  # by source: (name, name and words) that depend on what is not in it
        self.lacking: dict[str, list[tuple[str, str]]] = {}  # sentence -> (name, words) that it refuses
        self.tasks: set[str] = set()  # those of them that refuse another task

    def hear(self, entry: TypedSetting) -> None:
        """Names that are read together need each other's words, whichever comes first."""
        if entry.raw == () or any(UNKNOWN in word for word in words_of(entry.raw)):
            return
        self.said.add(entry.name)
        if self.dialect:
            self.given[self.dialect.row(entry.name)[0]] = words_of(entry.raw) or ["true"]

    def take(self, entry: TypedSetting) -> None:
        row = self.dialect.row(entry.name)[1] if self.dialect else None
        if entry.name.startswith("$") and row is None:
            self._of_a_script(entry)
            return
        if self._is_unknown(entry, row):
            return
        if row is not None and not row.native:
            if entry.raw != ():  # a list that holds nothing says nothing
                self._take_foreign(entry, row)
            return
        setting, value, name = self._find(entry, row)
        if setting is None:
            self.unknown.setdefault(entry.source, []).append(entry.name)
            return
        raw = entry.raw
        if row is not None and row.values and raw != ():
            raw = [row.values.get(word.lower(), word) for word in words_of(raw)]
        if setting.name == "dataset" and isinstance(raw, list) and len(raw) > 1:  # several words, or a list in a file
            self._set(table()["further_datasets"], [str(word) for word in raw[1:]], source=entry.source, typed=name)
            raw = raw[:1]
        try:
            value = value if value is not None else read_value(setting, raw)
        except BadValue as bad:
            self._bad(name, setting.name, entry.source, bad)
            return
        self._set(setting, value, source=entry.source, typed=name)

    def _is_unknown(self, entry: TypedSetting, row: Foreign | None) -> bool:
        """Whether its value cannot be known from its script: a mistake, unless it is said elsewhere too, or changes nothing."""
        unknown = [plain(word) for word in words_of(entry.raw) if UNKNOWN in word]
        idle = row is not None and not (row.native or row.read or row.lacks)
        if not unknown or idle:
            return False
        setting = self._find(entry, row)[0] if row is None or row.native else None
        is_label = setting is not None and setting.name in _LABELS or row is not None and row.is_label
        if is_label and entry.name not in self.said:
            self.parsed.notes.append(f"{entry.source}: {entry.name} {' '.join(unknown)} cannot be known from the script, and is left out.")
        elif entry.name not in self.said:
            self.unknowable.setdefault(entry.source, []).append((entry.name, f"{entry.name} {' '.join(unknown)}"))
        return True

    def _take_foreign(self, entry: TypedSetting, row: Foreign) -> None:
        """A name that is read by a function, refused, or set aside."""
        words = words_of(entry.raw) or ["true"]
        name = self.dialect.row(entry.name)[0] if self.dialect else entry.name
        if words != self.given.get(name, words):  # said again further on: the command line wins over a file
            return
        if row.read is not None:
            try:
                for native, raw in row.read(words, self.given).items():
                    setting = table()[native]
                    is_text = isinstance(raw, str) and setting.kind == "str" and not setting.choices and not setting.is_list
                    self._set(setting, raw if is_text else read_value(setting, raw), source=entry.source, typed=entry.name)
            except BadValue as bad:
                self._bad(entry.name, entry.name, entry.source, bad)
            except (TypeError, ValueError, KeyError, AttributeError):
                self._bad(entry.name, entry.name, entry.source, BadValue(f"({' '.join(words)}) has another form than its system gives it"))
        elif row.refuses(words, self.given):
            self.lacking.setdefault(row.lacks, []).append((entry.name, " ".join(words)))
            self.tasks |= {row.lacks} if row.is_task else set()
        elif not row.lacks or " ".join(words).lower() in row.off:
            self.parsed.aside.setdefault(entry.source, []).append(entry.name)

    def _bad(self, name: str, setting: str, source: str, bad: BadValue) -> None:
        where = "" if source == COMMAND_LINE else f" ({source})"
        nearest = {name: bad.suggestions} if bad.suggestions else {}
        self.parsed.problems.append(Problem(flags=(name,), message=f"{name}{where} {bad}.", nearest=nearest))
        self.parsed.unreadable.add(setting)

    def _set(self, setting: Setting, value: Any, *, source: str, typed: str) -> None:
        key = (source, setting.name)
        earlier = self.seen.get(key)
        if earlier and earlier[1] != value and (earlier[0] != typed or source != COMMAND_LINE):
            message = f"{earlier[0]} ({shown(earlier[1])}) and {typed} ({shown(value)}) are one setting with two values. Keep one of them."
            if earlier[0] == typed:
                message = f"{typed} stands twice in {source} ({shown(earlier[1])}, {shown(value)}). Keep one of them."
            self.parsed.problems.append(Problem(flags=(earlier[0], typed), message=message))
        elif earlier and earlier[1] != value:  # a script that passes "$@" on relies on it
            self.parsed.repeated.append(
                f"{typed} stands twice on the command line ({shown(earlier[1])}, {shown(value)}): the last is used."
            )
        self.seen[key] = (typed, value)
        if setting.name == "dataset" and self.sources.get("further_datasets", source) != source:  # those of a file are not behind this one
            del self.values["further_datasets"], self.sources["further_datasets"], self.typed["further_datasets"]
        if self.dialect is not None and setting.name in self.dialect.settings:
            self.foreign[setting.name] = value
        else:
            self.values[setting.name] = value
        self.sources[setting.name] = source
        self.typed[setting.name] = typed

    def _find(self, entry: TypedSetting, row: Foreign | None) -> tuple[Setting | None, Any, str]:
        """(setting, value when the name itself says it, the name as the user knows it)."""
        name = entry.name
        if self.dialect:
            size = self.dialect.size(name)
            if size is not None:
                return self.dialect.settings[size], None, size
            if row is not None:
                return table()[row.native], None, name
        setting = names().get(name)
        if setting is None and name.startswith("no_") and entry.raw == []:
            negated = names().get(name.removeprefix("no_"))
            if negated is not None and negated.kind == "bool":
                return negated, False, name
        if setting is not None and self.dialect and setting.name in self.dialect.hides:
            return None, None, name
        return setting, None, name

    def _of_a_script(self, entry: TypedSetting) -> None:
        """A script's own launcher says how many ranks it starts; a script may hold more commands than one."""
        if entry.name == "$other":
            self.parsed.notes.append(f"{entry.source}: the flags of its last command are read, not those of {entry.raw[0]}.")
        elif entry.name == "$twice":
            self.parsed.repeated.append(f"{entry.raw[0]} stands twice in {entry.source}: the last is used.")
        elif entry.name in ("$NPROC_PER_NODE", "$NNODES") and entry.raw[0].isdigit():
            self.seen[("shell", entry.name)] = (entry.source, int(entry.raw[0]))

    def _report_unknown(self) -> None:
        """A file full of another system's names is one mistake; any other name is one each, with what to type instead."""
        problems: list[Problem] = []
        for source, unknown in self.unknown.items():
            where = "" if source == COMMAND_LINE else f" in {source}"
            found = reads_as(unknown, self.dialects) if self.dialect is None else None
            if found:
                dialect, known = found
                what = "This command line" if source == COMMAND_LINE else source
                some = ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
                message = f"{what} reads as a {dialect.title} file ({some}): add `--dialect {dialect.name}`."
                problems.append(Problem(flags=tuple(known), message=message))
            hints = {name: self._hint(name) for name in unknown if not found or name not in found[1]}
            if self.dialect and len(alike := [name for name, hint in hints.items() if LIST in hint]) > 1:
                message = f"{', '.join(alike)}{where} are neither settings nor {self.dialect.title} names that are known here, so they may \
change what is trained."
                problems.append(Problem(flags=tuple(alike), message=message))
                hints = {name: hint for name, hint in hints.items() if name not in alike}
            problems += [Problem(flags=(name,), message=f"{name}{where} is not a setting.{hint}") for name, hint in hints.items()]
        for source, found_in in self.unknowable.items():
            it = found_in[0][0] if len(found_in) == 1 else "them"
            message = f"{source}: {', '.join(said for _, said in found_in)} cannot be known from the script. Give {it} on the command line."
            problems.append(Problem(flags=tuple(name for name, _ in found_in), message=message))
        self.parsed.problems[self.first : self.first] = problems

    def _hint(self, name: str) -> str:
        if self.dialect is None:
            return remedy(name, self.dialects)
        sizes = list(self.dialect.settings)
        close = close_to(name, [*sizes, *self.dialect.hides], limit=1, cutoff=ALIKE)
        if sizes and close:
            return f" In the {self.dialect.name} dialect the batch sizes are: {', '.join(sizes)}."
        found = remedy(name, self.dialects, hidden=self.dialect.hides)
        return f"{found} Nor is it a {self.dialect.title} name that is known here, so it may change what is trained."

    def _report_lacking(self) -> None:
        for sentence, asked in self.lacking.items():
            said = ", ".join(f"{name} ({words})" for name, words in asked)
            self.parsed.problems.append(Problem(flags=tuple(name for name, _ in asked), message=f"{said}: {sentence}."))

    def finish(self, launcher_world_size: int | None) -> Parsed:
        """The configuration is made here, once, from everything that was taken."""
        self._report_unknown()
        self._report_lacking()
        if self.dialect:
            self._settle_dialect(self.dialect)
        self._world_size(launcher_world_size)
        self._another_way("bf16", "torch_dtype", "bfloat16", "float32")
        self._another_way("async_generate", "async_rollout_depth", 1, 0)
        settled, was = begins.settled(self.values), dict(self.sources)
        for name, value in settled.items():  # the path is given, under the other name
            other = next(one for one in settled if one != name)
            self.values[name], self.sources[name] = value, was.get(other, "default") if value not in (None, "auto") else "default"
        sources = {name: self.sources.get(name, "default") for name in {**table(), **self.sources}}
        config = Config().with_values(self.values, sources=sources)
        config = replace(config, typed=self.typed, foreign=self.foreign)
        problems = [one for one in self.parsed.problems if not self.tasks or any(task in one.message for task in self.tasks)]
        return replace(self.parsed, config=config, problems=problems, is_other_task=bool(self.tasks))

    def _settle_dialect(self, dialect: Dialect) -> None:
        """What follows from several names at once, and the defaults that nobody typed."""
        self.values["dialect"] = dialect.name
        for name, value in dialect.implies.items():
            self.values[name] = value
            self.sources.setdefault(name, f"implied by the {dialect.name} dialect")
        values = dict(self.values)
        for part in dialect.settle:  # each by itself, so that all that is wrong is told at once
            try:
                for change in part(values, self.given):
                    self._change(change, dialect)
            except OtherTask as bad:
                self.tasks.add(str(bad))
                self.parsed.problems.append(Problem(flags=("dialect",), message=f"{bad}."))
            except (BadValue, ValueError) as bad:  # ValueError: a number that is none, of names that are read together
                self.parsed.problems.append(Problem(flags=("dialect",), message=f"{bad}."))
        for row in dialect.defaults:
            ours = {name: table()[name].default for name in row.native}
            if row.name in self.given or set(row.native) & set(self.values) or (row.native and ours == dict(row.native)):
                continue
            kept = row.ours or shown(next(iter(ours.values())))
            self.parsed.defaults.append(
                ForeignDefault(name=row.name, theirs=row.theirs, ours=kept, used=row.theirs if row.native else kept)
            )
            for name, value in row.native.items():
                self.values[name], self.sources[name] = value, f"{dialect.title}'s default"
        self.foreign = {name: setting.default for name, setting in dialect.settings.items() if setting.default is not None} | self.foreign

    def _change(self, change: Change, dialect: Dialect) -> None:
        for name, value in change.values.items():
            if name in dialect.settings:
                self.foreign[name] = value
                continue
            self.values[name] = table()[name].default if value is None else value
            self.sources[name] = f"{dialect.title}'s reading"
        if change.untyped:
            (theirs_name, theirs), (native, value) = change.untyped, next(iter(change.values.items()))
            ours, used = shown(table()[native].default), f"{native} {shown(value)}"
            self.parsed.defaults.append(ForeignDefault(name=theirs_name, theirs=theirs, ours=ours, used=used))
        elif change.note:
            self.parsed.notes.append(change.note)

    def _world_size(self, launcher: int | None) -> None:
        """The launcher knows; without one, what was typed; else what a script gives to its own launcher; else 1."""
        asked = self.values.get("world_size")
        if asked is None and ("shell", "$NPROC_PER_NODE") in self.seen:
            source, per_node = self.seen[("shell", "$NPROC_PER_NODE")]
            asked = per_node * self.seen.get(("shell", "$NNODES"), ("", 1))[1]
            self.sources["world_size"] = f"{source} (NPROC_PER_NODE x NNODES)"
        if launcher is not None:
            if asked not in (None, launcher) and not self.sources.get("world_size", "").endswith("default"):  # of a dialect
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

    def _another_way(self, word: str, name: str, if_true: Any, if_false: Any) -> None:
        """`word`, true or false, is another way to say `name`."""
        said = self.values.get(word)
        if said is None:
            return
        value = if_true if said else if_false
        other = self.values.get(name, value)
        if other != value:
            typed, way = self.typed[name], self.typed.get(word, word)
            self.parsed.problems.append(
                Problem(
                    flags=(way, typed),
                    message=f"{way} ({str(said).lower()}) means {typed} {value}, which is {other}. Keep one of them.",
                    nearest={typed: [value]},
                )
            )
        self.values[name] = value
        self.sources[name] = f"derived from {word}"
