"""From a command line and configuration files to a list of `name, raw value, where it stood`; nothing is interpreted yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.base.files import read_text
from megatron_grpo.config.field import Setting
from megatron_grpo.config.table import MAPS, InvalidValueError, canonical, keys, names, read_value, table

COMMAND_LINE = "command line"
_FLAG = re.compile(r"--[A-Za-z]")
_ASSIGNMENT = re.compile(r"\+*[A-Za-z_][\w.]*=")  # with a plus: a name that their file lacks


_REMOVED = re.compile(r"~[A-Za-z_][\w]*(\.\w+)+(=.*)?")  # Hydra's: a name that it is to forget


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedSetting:
    """One setting as it was typed. `raw`: words of a command line, or what YAML made of it, () of an empty list."""

    name: str  # canonical, dots and all: "micro_batch_size", "trainer.train_batch_size"
    raw: Any  # or the InvalidValueError that it is
    source: str  # "command line" or the file's name
    typed: str = ""  # the name as it was typed, of a name of another system that is this setting
    is_read: bool = False  # `raw` is the value


def read_words(words: Sequence[str], *, source: str = COMMAND_LINE, lenient: bool = False) -> tuple[list[TypedSetting], list[Problem]]:
    """Flags with what follows them. `a.b=c` without dashes is read too where the name has a dot (Hydra's overrides).

    lenient: words that belong to no flag are passed over (the program's name in a shell script) instead of reported.
    """
    entries: list[TypedSetting] = []
    problems: list[Problem] = []
    current: list[str] | None = None
    for word in words:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            current = [value] if equals else []
            entries.append(TypedSetting(name=canonical(name), raw=current, source=source))
            if equals:
                current = None
        elif _REMOVED.fullmatch(word):
            said = f"{word} takes a name out of a file of theirs, which is not read here. Leave it out"
            problems.append(Problem(flags=(word,), message=f"{said}, and give what follows from it."))
        elif "." in word.partition("=")[0] and _ASSIGNMENT.match(word) and not (current is not None and not current):
            name, _, value = word.lstrip("+").partition("=")
            entries.append(TypedSetting(name=canonical(name), raw=[value], source=source))
            current = None
        elif current is not None:
            current.append(word)
        elif not lenient:
            after = f" after {entries[-1].name}" if entries else ""
            problems.append(Problem(flags=(word,), message=f"{word!r}{after} belongs to no flag. A flag begins with two dashes."))
    return entries, problems


Read = tuple[list[TypedSetting], list[Problem]]


def read_file(path: str, read_program: Callable[[str, str], Read] | None = None) -> Read:
    """A YAML file; or by `read_program`, of text and path, a shell script whose last command holds the flags, or a Python file."""
    file = Path(path)
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        return [], [Problem(flags=("config",), message=f"config {path} cannot be read: {reason}.")]
    if read_program and (file.suffix in (".sh", ".bash", ".py") or text.startswith("#!")):
        return read_program(text, path)
    return read_yaml(text, source=file.name)


def read_yaml(text: str, *, source: str) -> tuple[list[TypedSetting], list[Problem]]:
    """Keys, flat or in sections. Sections named after a group of settings disappear; others stay as `section.key`."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)  # nodes, not a dict: a dict would hide a key that stands twice
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" line {where.line + 1}" if where else ""
        return [], [Problem(flags=("config",), message=f"{source}{place} is not YAML: {getattr(error, 'problem', error)}.")]
    if data is None:
        return [], []
    if not isinstance(data, dict):
        return [], [Problem(flags=("config",), message=f"{source} must hold `name: value` lines, not a {type(data).__name__}.")]
    problems = [Problem(flags=(key,), message=f"{key} stands twice in {source}. Keep one of them.") for key in _repeated(root)]
    groups = {setting.group for setting in table().values()}
    entries: list[TypedSetting] = []

    def walk(mapping: dict, prefix: str, within: str) -> None:
        """prefix: of the names, which a group of settings has none of; within: the sections, whatever they are."""
        for key, value in mapping.items():
            name = prefix + canonical(str(key))
            setting = names().get(name)
            if isinstance(value, dict) and not (setting and setting.is_map):
                is_group = name in MAPS or not within and name in groups
                walk(value, "" if is_group else f"{within}{canonical(str(key))}.", f"{within}{canonical(str(key))}.")
            else:
                entries.append(TypedSetting(name=name, raw=() if value == [] else value, source=source))

    walk(data, "", "")
    return entries, problems


def spread(entry: TypedSetting) -> list[TypedSetting]:
    """The settings that an entry names by way of a map: `loss_kwargs real_tau=1`, `loss_kwargs.real_tau 1`; else the entry itself."""
    name, _, key = entry.name.partition(".")
    if name not in MAPS or (key and key not in keys()[name]):
        return [entry]
    if key:
        return [replace(entry, name=key)]
    try:
        values = read_value(Setting(name=name, kind="Any", is_map=True), entry.raw)
        if unknown := [one for one in values if one not in keys()[name]]:
            raise InvalidValueError(f"has no {unknown[0]}: its keys are {', '.join(keys()[name])}")
    except InvalidValueError as bad:
        return [replace(entry, raw=bad)]
    return [replace(entry, name=one, raw=value) for one, value in values.items()]


def _repeated(root: Any) -> list[str]:
    """Keys that stand twice in one mapping. A file may be made of anchors, of itself too: each node is looked at once."""
    import yaml

    found, stack, looked_at = [], [root], set()
    while stack:
        node = stack.pop()
        if id(node) in looked_at:
            continue
        looked_at.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack += node.value
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen and key.value != "<<":
                        found.append(canonical(key.value))
                    seen.add(key.value)
                stack.append(value)
    return found


def words_of(raw: Any) -> list[str]:
    """What stood after a flag or a YAML key, as words; a mapping is `name=value` words."""
    if isinstance(raw, dict):
        return [f"{name}={shown(value)}" for name, value in raw.items()]
    return [_word(word) for word in raw] if isinstance(raw, (list, tuple)) else [_word(raw)]


def shown(value: Any) -> str:
    """A value as one would type it."""
    return " ".join(words_of(value))


def _word(value: Any) -> str:
    """A list or mapping inside another is as Python writes it, which ends where one holds itself."""
    if value is None or value is True or value is False:
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)
