"""The `megatron-grpo completion` command: completion scripts for bash and zsh, made from the table of settings. No torch.

A script contains everything that it offers, so a TAB starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_grpo.commands.start.show import COMMANDS, WORDS
from megatron_grpo.core.base.errors import EXIT_DONE, ConfigError
from megatron_grpo.run.config.table import MAPS, Setting, keys, table
from megatron_grpo.run.metrics.reporters import ALL, REPORTERS
from megatron_grpo.run.rewards.loading import BUILT_IN

KNOWN = {"reward_funcs": [*BUILT_IN], "report_to": [*REPORTERS, ALL, "none"]}  # values of settings without `choices`
GENERAL = {  # flags of every command that takes settings
    "config": "YAML file or launch script",
    "print_config": "show every value and its source, and stop",
    "help_search": "list the settings whose name, alias or help contains a word",
}
SEVERAL = ("config", "help", "help_search", "variant")  # flags besides lists and maps that take several words

# completion.sh is the part that both shells run: it sets `flags` of the command, a line each, and `offered`, the values that may come next:
# words, "file", "number", or "" for flags.
TEMPLATES = Path(__file__).parent / "templates"


def run_completion(words: Sequence[str]) -> int:
    """Print the completion script of a shell.

    Raises:
        ConfigError: The word is not one of the shells.
    """
    if len(words) != 1 or words[0] not in ("bash", "zsh"):
        typed_text = f", not {' '.join(words)!r}" if words else ""
        raise ConfigError(
            f"completion needs the name of a shell{typed_text}: `megatron-grpo completion bash` or `megatron-grpo completion zsh`."
        )
    print(completion_script(words[0]), end="")
    return EXIT_DONE


def completion_script(shell: str) -> str:
    """Return the completion script of a shell. In zsh it shows the first line of help of each command and setting."""
    has_help = shell == "zsh"
    helps = {name: row["help"][0] for name, row in COMMANDS.items()}
    arms = [f"('') flags={_listed(helps | {'--help': '', '--version': ''}, has_help)} ;;", *map(_arm, COMMANDS)]
    parts = {
        "SHELL": shell,
        "SETTINGS": _listed({f"--{name}": text for name, text in _flags_with_help().items()}, has_help),
        "COMMANDS": "\n".join(f"        {arm}" for arm in arms),
        "SEVERAL": "|".join(_several()),
        "VALUES": "\n".join(f'        ({"|".join(names)}) offered="{" ".join(words)}" ;;' for words, names in _values()),
        "NUMBERS": "|".join(_numbers()),
    }
    script = "".join((TEMPLATES / f"completion.{ending}").read_text(encoding="utf-8") for ending in ("sh", shell))
    return re.sub(r"@([A-Z]+)@", lambda match: parts[match[1]], script)


def _listed(texts: Mapping[str, str], has_help: bool) -> str:
    """Return names, with their help or without it, as a quoted word of a shell with a line each."""
    lines = [f"{name}:{text}" if has_help and text else name for name, text in texts.items()]
    return "'" + "\n".join(lines).replace("'", "'\\''") + "'"


def _arm(command: str) -> str:
    """Return the arm of `case` for a command: its flags, and its positional argument: words to choose from, "file", or "" for none."""
    usage = WORDS[command]
    first = usage.split()[0].strip("[]")
    positional = first.replace("|", " ") if re.fullmatch(r"[a-z]+(\|[a-z]+)+", first) else "file" if first.isupper() else ""
    flags = [*(f"--{name}" for name in re.findall(r"--([\w-]+)", usage)), "--help", *["$settings"] * ("[settings]" in usage)]
    return f'({command}) offered="{positional}" flags="{chr(10).join(flags)}" ;;'


def _flags_with_help() -> dict[str, str]:
    """Return the flags of settings, with their help."""
    options = dict(GENERAL)
    for name, (topic, _) in MAPS.items():
        options[name] = topic
    for setting in table().values():
        if not setting.is_hidden:
            options |= {name: setting.help for name in (setting.name, *setting.aliases)}
    return options


def _values() -> list[tuple[tuple[str, ...], list[str]]]:
    """Return (values, names of the flags that take them); keys of a map end in `=`."""
    groups = dict.fromkeys(setting.group for setting in table().values())
    values: dict[str, tuple[str, ...]] = {"help": (*groups, *MAPS, *table(), "all")}
    for name in MAPS:
        values[name] = tuple(f"{key}=" for key in keys()[name])
    for setting in table().values():
        words = setting.choices or KNOWN.get(setting.name, ()) or (("true", "false") if setting.kind == "bool" else ())
        if words:
            values |= {name: tuple(words) for name in _names(setting)}
    flags_by_values: dict[tuple[str, ...], list[str]] = {}
    for name, words in values.items():
        flags_by_values.setdefault(words, []).append(name)
    return [*flags_by_values.items()]


def _several() -> list[str]:
    return [*SEVERAL, *MAPS, *(name for setting in table().values() if setting.is_list or setting.is_map for name in _names(setting))]


def _numbers() -> list[str]:
    plain = (setting for setting in table().values() if setting.kind in ("int", "float") and not setting.is_map and not setting.choices)
    return [name for setting in plain for name in _names(setting)]


def _names(setting: Setting) -> tuple[str, ...]:
    return (setting.name, *setting.aliases)
