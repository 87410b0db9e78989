"""Output of `--help` and `--print_config`, from the same table that the parser uses."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import megatron_grpo
from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import MAPS, Setting, canonical, close_to, keys, table

COMMANDS: dict[str, dict[str, Any]] = json.loads(Path(megatron_grpo.__file__).with_name("cli.json").read_text(encoding="utf-8"))
WORDS = {name: row["usage"] for name, row in COMMANDS.items()}


def print_overview() -> None:
    """Print the list of commands."""
    print("usage: megatron-grpo <command> [--config file.yaml] [--name value ...]\n\nGRPO on Megatron-Core, sampled by vLLM.\n")
    width = max(map(len, COMMANDS)) + 4
    for name, row in COMMANDS.items():
        text = f"  {name}".ljust(width) + row["help"][0]
        print(textwrap.fill(text, _width(), subsequent_indent=" " * width))
    print("\nOptions, also without a command:\n")
    print("  --help                list its settings, by section, with unit and default")
    print("  --help NAME ...       explain settings or sections, such as `--help batch`")
    print("  --help-search WORD    find settings by a word, such as `--help-search lr`")


def print_help(command: str, topics: Sequence[str] = ()) -> None:
    """Print every setting by section with type, unit, default and one line of help; of a map its keys.

    Raises:
        ConfigError: No setting, map or section has a name of `topics`.
    """
    if requested := [canonical(word) for word in topics]:
        known_names = {name for setting in table().values() for name in _list_names(setting)}
        if unknown := [name for name in requested if name not in known_names]:
            raise ConfigError([_unknown(name, known_names) for name in unknown])
        print("\n".join(_by_section([setting for setting in table().values() if _list_names(setting) & {*requested}])))
        return
    summary, *details = COMMANDS[command]["help"]
    print(summary)
    print(f"\nusage: megatron-grpo {command} {WORDS[command].replace('[settings]', '[--config file.yaml ...] [--name value ...]')}")
    print("\n" + textwrap.fill(" ".join(details), _width()))
    if "[settings]" not in WORDS[command]:
        return
    lines = [
        "",
        "Names may be written with - or _. The command line wins over files, and a later file over an earlier one.",
        "",
        "  --config FILE ...         YAML, flat or in sections, or a launch script; the same names as below",
        "  --print_config            show every value and its source, and stop",
        "  --help NAME ...           explain these settings or sections; of a map (KEY=VALUE ...) its keys; all: every setting and key",
        "  --help-search WORD ...    list the settings whose name, alias or help contains a word",
    ]
    group = None
    for setting in table().values():
        if setting.is_hidden:
            continue
        if setting.group != group:
            group = setting.group
            lines += ["", _heading(group)]
        map_name = _find_map(setting)
        if map_name is None:
            lines += _entry(setting)
        elif keys()[map_name][0] == setting.name:
            text = f"{MAPS[map_name][0]}: {', '.join(keys()[map_name])}. Each is also a setting: --{setting.name} ..."
            lines += [f"  --{map_name} KEY=VALUE ...", *_wrap(text)]
    lines += ["", f"Sections, each explained by `megatron-grpo {command} --help SECTION`:", ""]
    lines += [f"  {name:<12}{title}" for name, title in _titles().items()]
    print("\n".join(lines))


def print_matching(searched: Sequence[str]) -> None:
    """Print the settings whose name, alias or help contains all of the words.

    Args:
        searched: Words to find; a name contains a word at any position, a help text at the beginning of a word.

    Raises:
        ConfigError: No word is given, or no setting contains them.
    """
    if not searched:
        raise ConfigError("--help-search needs a word, such as `--help-search lr`.")
    matching = [setting for setting in table().values() if not setting.is_hidden and all(_contains(setting, word) for word in searched)]
    if not matching:
        raise ConfigError(f"No setting has {' and '.join(map(repr, searched))} in its name, aliases or help.")
    print("\n".join(_by_section(matching)))


def _contains(setting: Setting, word: str) -> bool:
    name = canonical(word).lower()
    in_names = any(name in alias for alias in (setting.name, *setting.aliases))
    return in_names or re.search(rf"\b{re.escape(word.lstrip('-'))}", setting.help, re.IGNORECASE) is not None


def _unknown(name: str, known_names: Set[str]) -> Problem:
    close = close_to(name, sorted(known_names))
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Sections: {', '.join(_titles())}."
    return Problem(flags=(), message=f"--help: {name!r} is not a setting or section. {hint}")


def _by_section(settings: Sequence[Setting]) -> list[str]:
    lines: list[str] = []
    for group in dict.fromkeys(setting.group for setting in settings):
        lines += ["", _heading(group), *(line for setting in settings if setting.group == group for line in _entry(setting))]
    return lines[1:]


def _titles() -> dict[str, str]:
    return {name: (type(section).__doc__ or "").strip() for name, section in Config().groups().items()}


def _heading(group: str) -> str:
    return f"{_titles()[group]}  [section `{group}`]"


def _find_map(setting: Setting) -> str | None:
    return next((name for name in MAPS if setting.name in keys()[name]), None)


def _list_names(setting: Setting) -> set[str]:
    """Return the names that select a setting in `--help`."""
    sections = set() if setting.is_hidden else {"all", setting.group, _find_map(setting) or setting.name}
    return {setting.name, *setting.aliases} | sections


def _entry(setting: Setting) -> list[str]:
    if setting.choices:
        kind = "{" + ",".join(setting.choices) + "}"
    else:
        kind = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT", "Any": "JSON"}[setting.kind]
        kind = f"TEXT={kind} ..." if setting.is_map else kind + (" ..." if setting.is_list else "")
    has_several_values = setting.is_list or setting.is_map
    default = "none" if setting.default is None else " ".join(map(str, setting.default)) if has_several_values else str(setting.default)
    if setting.kind == "bool" and setting.default is not None:
        default = default.lower()
    is_stated = default in ("none", "") and "default" in setting.help  # the help states the default
    notes = [
        note
        for note in ("" if setting.unit in setting.help else setting.unit, "" if is_stated else f"default {default or 'empty'}")
        if note
    ]
    is_open = is_stated and setting.help.endswith(")")  # "(default: end of the run)": the unit goes into these brackets
    text = setting.help[:-1] if notes and is_open else setting.help
    if notes:
        text += f"{'; ' if is_open else ' ('}{'; '.join(notes)})"
    if setting.aliases:
        text += f". Also: {', '.join(f'--{alias}' for alias in setting.aliases)}."
    return [f"  --{setting.name} {kind}", *_wrap(text.strip())]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _width() - 8, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns))


def print_config(cfg: Config) -> None:
    """Print every value and its source as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    out = Table(title="configuration", title_justify="left", box=None, pad_edge=False)
    out.add_column("setting", overflow="fold")
    out.add_column("value", overflow="fold")
    out.add_column("from", overflow="fold")
    for group, section in cfg.groups().items():
        out.add_row(f"[bold]{group}[/bold]", "", "")
        for name, value in vars(section).items():
            source = cfg.sources.get(name, "default")
            style = "dim" if source == "default" else "cyan" if source.startswith(("derived", "implied", "launcher")) else "green"
            out.add_row(f"  {name}", _value_text(value), source, style=style)
    console.print(out)


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(none)"
    if isinstance(value, dict):
        return format_value(value) or "(none)"
    from rich.markup import escape

    return "none" if value is None else escape(str(value)) if value != "" else '""'
