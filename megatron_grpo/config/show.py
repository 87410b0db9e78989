"""Output of `--help` and `--print_config`, from the same table that the parser uses."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from megatron_grpo.config.config import Config
from megatron_grpo.config.read import shown
from megatron_grpo.config.table import MAPS, Setting, canonical, keys, table

WORDS = {  # arguments of commands that take more, or less, than settings
    "doctor": "[--json]",
    "rehearse": "[--rows 8] [--json] [settings]",
    "mismatch": "OUTPUT_DIR | CHECKPOINT | MODEL [--row N] [--rows 16] [--dtype float32] [--json] [settings]",
    "replay": "CAPSULE [--json] [settings]",
    "whatif": 'OUTPUT_DIR [--step N] [--try "NAME=VALUE ..."] [--png FILE] [--json] [settings]',
}


def print_overview(commands: Mapping[str, Callable]) -> None:
    """Print the list of commands.

    Args:
        commands: Functions by command name; their docstrings are shown.
    """
    print("usage: megatron-grpo <command> [--config file.yaml] [--name value ...]\n\nGRPO on Megatron-Core, sampled by vLLM.\n")
    for name, function in commands.items():
        print(textwrap.fill(f"  {name:<10}{(function.__doc__ or '').strip().splitlines()[0]}", _width(), subsequent_indent=" " * 12))
    print("\n`megatron-grpo <command> --help` lists every setting with its unit and default, `--help NAME` explains one.")


def print_help(command: str, function: Callable, asked: Sequence[str] = ()) -> None:
    """Print every setting by group with type, unit, default and one line of help; of a map its keys.

    Args:
        command: Name of the command.
        function: Its function, whose docstring is shown.
        asked: Settings, maps and groups to explain alone, or "all".
    """
    if explained := [setting for setting in table().values() if _names_of(setting) & {*map(canonical, asked)}]:
        print("\n".join(line for setting in explained for line in _entry(setting)))
        return
    titles = {name: (type(section).__doc__ or "").strip() for name, section in Config().groups().items()}
    words = WORDS.get(command, "[settings]")
    print(f"usage: megatron-grpo {command} {words.replace('[settings]', '[--config file.yaml ...] [--name value ...]')}\n")
    print(inspect.cleandoc(function.__doc__ or ""))
    if "[settings]" not in words:
        return
    lines = [
        "",
        "Names may be written with - or _; the command line wins over files, and a later file over an earlier one.",
        "",
        "  --config FILE ...         YAML, flat or in sections, or a launch script; the same names as below",
        "  --print_config            show every value and where it came from, and stop",
        "  --help NAME ...           these settings alone; of a map (KEY=VALUE ...) its keys; all: every setting and key",
    ]
    group = None
    for setting in table().values():
        if setting.is_hidden:
            continue
        if setting.group != group:
            group = setting.group
            lines += ["", f"{titles[group]}  [section `{group}`]"]
        of_map = _map_of(setting)
        if of_map is None:
            lines += _entry(setting)
        elif keys()[of_map][0] == setting.name:
            text = f"{MAPS[of_map][0]}: {', '.join(keys()[of_map])}. Also each by itself: --{setting.name} ..."
            lines += [f"  --{of_map} KEY=VALUE ...", *_wrapped(text)]
    print("\n".join(lines))


def _map_of(setting: Setting) -> str | None:
    return next((name for name in MAPS if setting.name in keys()[name]), None)


def _names_of(setting: Setting) -> set[str | None]:
    """Return the names that select a setting in `--help`."""
    return {setting.name, *setting.aliases, *setting.formerly} | (set() if setting.is_hidden else {"all", setting.group, _map_of(setting)})


def _entry(setting: Setting) -> list[str]:
    if setting.choices:
        kind = "{" + ",".join(setting.choices) + "}"
    else:
        kind = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT", "Any": "JSON"}[setting.kind]
        kind = f"TEXT={kind} ..." if setting.is_map else kind + (" ..." if setting.is_list else "")
    several = setting.is_list or setting.is_map
    default = "none" if setting.default is None else " ".join(map(str, setting.default)) if several else str(setting.default)
    if setting.kind == "bool" and setting.default is not None:
        default = default.lower()
    is_told = default in ("none", "") and "default" in setting.help  # the help states the default
    notes = [note for note in (setting.unit, "" if is_told else f"default {default or 'empty'}") if note]
    text = f"{setting.help} ({'; '.join(notes)})" if notes else setting.help
    if setting.aliases:
        text += f". Also: {', '.join(f'--{alias}' for alias in setting.aliases)}."
    return [f"  --{setting.name} {kind}", *_wrapped(text.strip())]


def _wrapped(text: str) -> list[str]:
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
            out.add_row(f"  {name}", _plain(value), source, style=style)
    console.print(out)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "(none)"
    if isinstance(value, dict):
        return shown(value) or "(none)"
    from rich.markup import escape

    return "none" if value is None else escape(str(value)) if value != "" else '""'
