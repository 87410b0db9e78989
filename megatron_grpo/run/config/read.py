"""Read command lines and configuration files into a list of typed settings, without interpreting values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.base.files import parse_yaml, read_text
from megatron_grpo.core.field import Setting
from megatron_grpo.run.config.table import MAPS, InvalidValueError, canonical, keys, names, read_value, table

COMMAND_LINE = "command line"
UNKNOWN = "\x01"  # marks a word whose value cannot be determined from a script
_FLAG = re.compile(r"--[A-Za-z]")
_ASSIGNMENT = re.compile(r"\+*[A-Za-z_][\w.]*=")  # a plus adds a name that Hydra's file lacks


_REMOVED = re.compile(r"~[A-Za-z_][\w]*(\.\w+)+(=.*)?")  # Hydra's removal of a name


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSetting:
    """One setting as it was typed.

    Args:
        name: Canonical name, dots included: "micro_batch_size", "trainer.train_batch_size".
        raw: Words of a command line, or a YAML value, () for an empty list; or the InvalidValueError that parsing raised.
        source: "command line" or the file's name.
        typed: The name as typed, if it is another system's name of this setting.
        is_read: Whether `raw` is the final value.
    """

    name: str
    raw: Any
    source: str
    typed: str = ""
    is_read: bool = False


def read_words(words: Sequence[str], *, source: str = COMMAND_LINE, lenient: bool = False) -> tuple[list[RawSetting], list[Problem]]:
    """Return the flags of a command line with the words that follow them, and problems.

    Words `a.b=c` without dashes are read too if the name has a dot (Hydra's overrides).

    Args:
        lenient: Whether words that belong to no flag are skipped (such as the program's name in a shell script) instead of reported.
    """
    entries: list[RawSetting] = []
    problems: list[Problem] = []
    current: list[str] | None = None
    for word in words:
        if _FLAG.match(word):
            name, equals, value = word.partition("=")
            current = [value] if equals else []
            entries.append(RawSetting(name=canonical(name), raw=current, source=source))
            if equals:
                current = None
        elif _REMOVED.fullmatch(word):
            message = f"{word} removes a name from a configuration file of that system, which is not read here. Omit it"
            problems.append(Problem(flags=(word,), message=f"{message}, and set the resulting values."))
        elif "." in word.partition("=")[0] and _ASSIGNMENT.match(word) and not (current is not None and not current):
            name, _, value = word.lstrip("+").partition("=")
            entries.append(RawSetting(name=canonical(name), raw=[value], source=source))
            current = None
        elif current is not None:
            current.append(word)
        elif not lenient:
            location = f" after {entries[-1].name}" if entries else ""
            problems.append(Problem(flags=(word,), message=f"{word!r}{location} does not belong to a flag. Flags begin with two dashes."))
    return entries, problems


Read = tuple[list[RawSetting], list[Problem]]


def read_file(path: str, read_program: Callable[[str, str], Read] | None = None) -> Read:
    """Read a configuration file: YAML, or a program.

    Returns:
        (typed settings, problems).
    """
    file = Path(path)
    try:
        text = read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        return [], [Problem(flags=("config",), message=f"config {path} cannot be read: {reason}.")]
    if read_program and (file.suffix in (".sh", ".bash", ".py") or text.startswith("#!")):
        try:
            return read_program(text, path)
        except (RecursionError, MemoryError):  # Python's parser reports both for deep nesting
            return [], [Problem(flags=("config",), message=f"config {path} cannot be read: it is nested too deeply, or includes itself.")]
    return read_yaml(text, source=file.name)


def read_yaml(text: str, *, source: str) -> tuple[list[RawSetting], list[Problem]]:
    """Read YAML keys, flat or in sections.

    Sections named after a group of settings are dropped from the names; others remain as `section.key`.

    Returns:
        (typed settings, problems).
    """
    try:
        data, root = parse_yaml(text)  # nodes too, because a dict hides duplicate keys
    except ValueError as error:
        return [], [Problem(flags=("config",), message=f"{source} is not valid YAML: {error}.")]
    if data is None:
        return [], []
    if not isinstance(data, dict):
        return [], [Problem(flags=("config",), message=f"{source} must contain `name: value` lines, not a {type(data).__name__}.")]
    problems = [Problem(flags=(key,), message=f"{key} is set twice in {source}. Use one of them.") for key in _repeated(root)]
    groups = {setting.group for setting in table().values()}
    entries: list[RawSetting] = []

    def walk(mapping: dict, prefix: str, section: str) -> None:
        """Collect the entries of a mapping.

        Args:
            prefix: Prefix of the names; a group of settings adds none.
        """
        for key, value in mapping.items():
            name = prefix + canonical(str(key))
            setting = names().get(name)
            if isinstance(value, dict) and not (setting and setting.is_map):
                is_group = name in MAPS or not section and name in groups
                walk(value, "" if is_group else f"{section}{canonical(str(key))}.", f"{section}{canonical(str(key))}.")
            else:
                entries.append(RawSetting(name=name, raw=() if value == [] else value, source=source))

    walk(data, "", "")
    return entries, problems


def split_entry(entry: RawSetting) -> list[RawSetting]:
    """Split an entry that names settings through a map (`loss_kwargs real_tau=1`, `loss_kwargs.real_tau 1`) into these settings.

    Args:
        entry: The entry. If it names no map, it is returned as it is.
    """
    name, _, key = entry.name.partition(".")
    if name not in MAPS or (key and key not in keys()[name]):
        return [entry]
    if key:
        return [replace(entry, name=key)]
    try:
        values = read_value(Setting(name=name, kind="Any", is_map=True), entry.raw)
        if unknown := [k for k in values if k not in keys()[name]]:
            raise InvalidValueError(f"has no key {unknown[0]}. Supported: {', '.join(keys()[name])}")
    except InvalidValueError as error:
        return [replace(entry, raw=error)]
    return [replace(entry, name=k, raw=value) for k, value in values.items()]


def _repeated(root: Any) -> list[str]:
    """Return keys that occur twice in one mapping. Aliases name a node twice, so each is visited once."""
    import yaml

    repeated, stack, visited = [], [root], set()
    while stack:
        node = stack.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack += node.value
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in keys and key.value != "<<":
                        repeated.append(canonical(key.value))
                    keys.add(key.value)
                stack.append(value)
    return repeated


def is_from_script(entries: Sequence[RawSetting]) -> bool:
    """Return whether settings come from a launch script: its launcher's words (`$...`), or values that only running it would tell."""
    return any(entry.name.startswith("$") or any(UNKNOWN in word for word in split_words(entry.raw)) for entry in entries)


def split_words(raw: Any) -> list[str]:
    """Return what was typed after a flag or a YAML key as words; a mapping becomes `name=value` words."""
    if isinstance(raw, dict):
        return [f"{name}={format_value(value)}" for name, value in raw.items()]
    return [_one_word(word) for word in raw] if isinstance(raw, (list, tuple)) else [_one_word(raw)]


def format_value(value: Any) -> str:
    """Return a value as a user would type it."""
    return " ".join(split_words(value))


def _one_word(value: Any) -> str:
    """Return a value as one word. A list or mapping inside another one is printed as Python prints it."""
    if value is None or value is True or value is False:
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)


def split_flags(words: Sequence[str], own_flags: Collection[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Separate a command's own flags from settings.

    Args:
        words: Command line; `--row 1` and `--row=1` are equivalent.

    Returns:
        (typed values of each flag, remaining words).
    """
    values, other_words, remaining = {name: list[str]() for name in own_flags}, list[str](), iter(words)
    for word in remaining:
        name, is_one_word, value = word.partition("=")
        if name in values:
            values[name].append(value if is_one_word else next(remaining, ""))
        else:
            other_words.append(word)
    return values, other_words
