"""Translation of another system's names, and of launch scripts, into native settings, with notes on everything else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from megatron_grpo.commands.compat.explain import explain, length_there
from megatron_grpo.commands.compat.foreign_args import NOTE, FrameworkArg, FrameworkArgs, OtherTaskError, SettingChange, SourceFramework
from megatron_grpo.commands.compat.script import plain
from megatron_grpo.commands.compat.tables import contents
from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run.config.parse import Framework, FrameworkDefaultValue
from megatron_grpo.run.config.read import UNKNOWN, RawSetting, format_value, split_words
from megatron_grpo.run.config.settings import BatchSizeOrigin
from megatron_grpo.run.config.table import InvalidValueError, names, read_value, table

_LABELS = ("run_name", "project")  # training does not depend on them


class Translation:
    """Translation of one command line with its files.

    First `entries` translates name by name; then `convert` is called, when the values of all settings are known.

    Args:
        settings: Settings as typed, in order.
        dialect: System whose names are used; None for a launch script with native names.
    """

    def __init__(self, settings: Sequence[RawSetting], dialect: SourceFramework | None):
        self.dialect = dialect
        self.sizes = dialect.settings if dialect else {}  # batch sizes under foreign names
        self.counts: dict[str, int] = {}  # their values
        self.origins: dict[str, BatchSizeOrigin] = {}  # how native sizes follow from them
        self.hides = dialect.hides if dialect else ()  # native names that are unknown in this dialect
        self.args = FrameworkArgs(dialect.fallbacks if dialect else {})  # every foreign name with its words, as typed
        self.given: set[str] = set()  # names whose values are known, at any position
        self.notes: list[str] = []
        self.aside: dict[str, list[str]] = {}  # names without effect, by source
        self.repeated: list[str] = []
        self.defaults: list[FrameworkDefaultValue] = []
        self.tasks: set[str] = set()  # sentences about tasks other than GRPO
        self.world_size: tuple[int, str] | None = None  # ranks of the script's launcher, and their source
        self._launcher: dict[str, tuple[str, int]] = {}
        self._unknowable: dict[str, list[tuple[str, str]]] = {}  # by source: (name, name and words) with unknown values
        self._lacking: dict[str, list[tuple[str, str]]] = {}  # sentence -> refused (name, words)
        for entry in settings:  # names that are read together need each other's words, in any order
            if entry.raw != () and not any(UNKNOWN in word for word in split_words(entry.raw)):
                self.given.add(entry.name)
                self.args[self._row(entry.name)[0]] = split_words(entry.raw) or ["true"]
        self.entries = [translated for entry in settings for translated in self._translated(entry)]
        if "$NPROC_PER_NODE" in self._launcher:
            source, per_node = self._launcher["$NPROC_PER_NODE"]
            self.world_size = per_node * self._launcher.get("$NNODES", ("", 1))[1], f"{source} (NPROC_PER_NODE x NNODES)"

    def _row(self, name: str) -> tuple[str, FrameworkArg | None]:
        return self.dialect.row(name) if self.dialect else (name, None)

    def _translated(self, entry: RawSetting) -> Iterator[RawSetting]:
        row = self._row(entry.name)[1]
        size = self.dialect.size(entry.name) if self.dialect else None
        if entry.name.startswith("$") and row is None:
            self._handle_script(entry)
        elif self._is_unknown(entry, row):
            pass
        elif row is not None and not row.native:
            if entry.raw != ():  # an empty list sets nothing
                yield from self._read(entry, row)
        elif size is not None:
            yield RawSetting(name=size, raw=entry.raw, source=entry.source)
        elif row is not None:
            is_otherwise = row.values and entry.raw != ()
            raw = [row.values.get(word.lower(), word) for word in split_words(entry.raw)] if is_otherwise else entry.raw
            yield RawSetting(name=row.native, raw=raw, source=entry.source, typed=entry.name)
        else:
            yield entry

    def _read(self, entry: RawSetting, row: FrameworkArg) -> Iterator[RawSetting]:
        """Translate a name with a function, or refuse it, or set it aside."""
        words, name = split_words(entry.raw) or ["true"], self._row(entry.name)[0]
        if words != self.args.get(name, words):  # given again later: the command line overrides a file
            return
        if row.read is not None:
            try:
                for native, raw in row.read(words, self.args).items():
                    if native == NOTE:
                        self.notes.append(f"What differs: {entry.name} {raw}")
                        continue
                    setting = table()[native]
                    is_text = isinstance(raw, str) and setting.kind == "str" and not setting.choices and not setting.is_list
                    value = raw if is_text else read_value(setting, raw)
                    yield RawSetting(name=native, raw=value, source=entry.source, typed=entry.name, is_read=True)
            except InvalidValueError as error:
                yield RawSetting(name=entry.name, raw=error, source=entry.source)
            except (TypeError, ValueError, KeyError, AttributeError):
                format_error = InvalidValueError(f"({' '.join(words)}) does not have the format of its system")
                yield RawSetting(name=entry.name, raw=format_error, source=entry.source)
        elif row.refuses(words, self.args):
            self._lacking.setdefault(row.lacks, []).append((entry.name, " ".join(words)))
            self.tasks |= {row.lacks} if row.is_task else set()
        elif not row.lacks or " ".join(words).lower() in row.off:
            self.aside.setdefault(entry.source, []).append(entry.name)
        else:
            own = " and ".join(way.split()[0] for way in row.instead if way.split()[0] in self.args)
            self.notes.append(f"What differs: {entry.name} ({' '.join(words)}) is not read, because {own} is set.")

    def _is_unknown(self, entry: RawSetting, row: FrameworkArg | None) -> bool:
        """Return whether the value is unknown. It becomes a problem unless it is known elsewhere or has no effect."""
        unknown = [plain(word) for word in split_words(entry.raw) if UNKNOWN in word]
        idle = row is not None and not (row.native or row.read or row.lacks)
        if not unknown or idle:
            return False
        setting = names().get(row.native if row else entry.name)
        is_label = setting is not None and setting.name in _LABELS or row is not None and row.is_label
        if is_label and entry.name not in self.given:
            self.notes.append(f"{entry.source}: {entry.name} {' '.join(unknown)} cannot be determined from the script and is ignored.")
        elif entry.name not in self.given:
            self._unknowable.setdefault(entry.source, []).append((entry.name, f"{entry.name} {' '.join(unknown)}"))
        return True

    def _handle_script(self, entry: RawSetting) -> None:
        """Handle the entries of a script: the ranks of its launcher, repeated flags, and further commands."""
        if entry.name == "$other":
            program, *flags = entry.raw
            unread = f" ({', '.join(flags)})" if flags else ""
            self.notes.append(f"{entry.source}: the flags of its last command are read, not those of {program}{unread}.")
        elif entry.name == "$command" and self.dialect is not None:
            self._check_command(self.dialect, entry)
        elif entry.name == "$twice":
            self.repeated.append(f"{entry.raw[0]} is set twice in {entry.source}: the last value is used.")
        elif entry.name in ("$NPROC_PER_NODE", "$NNODES") and entry.raw[0].isdigit():
            self._launcher[entry.name] = (entry.source, int(entry.raw[0]))

    def _check_command(self, dialect: SourceFramework, entry: RawSetting) -> None:
        """Refuse a script that starts the program of another system than the dialect's, whose names mean something else."""
        systems = [name for name, pattern in contents("common")["commands"].items() if re.search(pattern, entry.raw[0])]
        if systems and dialect.name.removesuffix("-doc") not in systems:
            sentence = f"{entry.source} starts `{entry.raw[0]}`, whose names are those of --dialect {systems[0]}"
            self._lacking[sentence] = [("dialect", dialect.name)]
            self.tasks.add(sentence)

    def unknowable(self) -> Iterator[Problem]:
        """Yield problems for values that the script does not determine."""
        for source, entries in self._unknowable.items():
            pronoun = entries[0][0] if len(entries) == 1 else "them"
            message = (
                f"{source}: {', '.join(text for _, text in entries)} cannot be determined from the script. Pass {pronoun} on the "
                "command line."
            )
            yield Problem(flags=tuple(name for name, _ in entries), message=message)

    def lacking(self) -> Iterator[Problem]:
        """Yield problems for names that ask for something unsupported."""
        for sentence, entries in self._lacking.items():
            listed = ", ".join(f"{name} ({words})" for name, words in entries)
            yield Problem(flags=tuple(name for name, _ in entries), message=f"{listed}: {sentence}.")

    def system(self) -> Framework | None:
        """Return what a plan reports about the system; None without a dialect."""
        if (dialect := self.dialect) is None:
            return None
        return Framework(
            title=dialect.title,
            trains_tower=dialect.trains_tower,
            explain=partial(explain, dialect.name, self.counts),
            length=partial(length_there, dialect.name),
        )

    def convert(self, values: dict[str, Any], sources: dict[str, str], typed_texts: dict[str, str]) -> Iterator[Problem]:
        """Apply the changes that follow from several names together, the foreign defaults, and the native batch sizes.

        The three mappings are modified in place. Foreign sizes in them are removed.

        Args:
            values: Value of each setting.
            sources: Source of each value.
            typed_texts: Name under which each setting was typed.
        """
        if self.dialect is None:
            return
        dialect = self.dialect
        self.counts |= {name: values.pop(name) for name in self.sizes if name in values}
        placed = {name: sources.pop(name) for name in self.counts}
        for name in self.counts:
            del typed_texts[name]
        values["dialect"] = dialect.name
        for name, value in dialect.implies.items():
            values[name] = value
            sources.setdefault(name, f"implied by the {dialect.name} dialect")
        previous = dict(values)
        for part in dialect.settle:  # one by one, so that all problems are reported at once
            try:
                for change in chain.from_iterable(step(previous, self.args) for step in part):
                    for name, value in change.values.items():
                        if name in self.sizes:
                            self.counts[name] = value
                        else:
                            values[name] = table()[name].default if value is None else value
                            sources[name] = f"{dialect.title}'s rule"
                    self._record(change)
            except OtherTaskError as error:
                self.tasks.add(str(error))
                yield Problem(flags=("dialect",), message=f"{error}.")
            except (InvalidValueError, ValueError) as error:  # ValueError: not a number, in names that are read together
                yield Problem(flags=("dialect",), message=f"{error}.")
        self._apply_defaults(dialect, values, sources)
        for name, setting in self.sizes.items():
            if setting.default is not None:
                self.counts.setdefault(name, setting.default)
        for native, (unit, name) in dialect.products.items():
            self.origins[native] = self._origin(native, unit, name, placed)
            if name in self.counts and unit != "micro-steps":
                values[native] = math.prod(self.counts[factor] for factor in dialect.makes(native))
            if name in placed:
                sources[native] = placed[name]

    def _origin(self, native: str, unit: str, name: str, placed: Mapping[str, str]) -> BatchSizeOrigin:
        """Return how a native size follows from foreign ones. `placed`: source of each size that was typed."""
        assert self.dialect is not None
        if name not in self.counts:
            return BatchSizeOrigin(name=name, count=None, unit=unit)
        factors = [f"{factor} {self.counts[factor]}{'' if factor in placed else ' by default'}" for factor in self.dialect.makes(native)]
        if unit == "micro-steps":
            divisor = self.dialect.products["gradient_accumulation_steps"][1]
            factors = [f"{factors[0]} / {divisor} {self.counts[divisor]}"]
        return BatchSizeOrigin(name=name, count=self.counts[name], unit=unit, text=" x ".join(factors))

    def _record(self, change: SettingChange) -> None:
        if change.untyped:
            (theirs_name, foreign_value), (native, value) = change.untyped, next(iter(change.values.items()))
            default, used = format_value(table()[native].default), f"{native} {format_value(value)}"
            self.defaults.append(FrameworkDefaultValue(name=theirs_name, theirs=foreign_value, ours=default, used=used))
        elif change.note:
            self.notes.append(change.note)

    def _apply_defaults(self, dialect: SourceFramework, values: dict[str, Any], sources: dict[str, str]) -> None:
        for row in dialect.defaults:
            native_defaults = {name: table()[name].default for name in row.native}
            if row.name in self.args or set(row.native) & set(values) or (row.native and native_defaults == dict(row.native)):
                continue
            default_text = row.ours or format_value(next(iter(native_defaults.values())))
            used = row.theirs if row.native else default_text
            self.defaults.append(FrameworkDefaultValue(name=row.name, theirs=row.theirs, ours=default_text, used=used))
            for name, value in row.native.items():
                values[name], sources[name] = value, f"{dialect.title}'s default"
