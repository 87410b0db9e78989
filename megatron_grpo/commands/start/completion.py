"""The `megatron-grpo completion` command: completion scripts for bash and zsh, made from the table of settings. No torch.

A script contains everything that it offers, so a TAB starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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

# The part that both shells run: `flags` of the command, a line each, and the values that may come next, "file", "number", or "" for flags.
SCRIPT = """\
#compdef megatron-grpo
# Completion of megatron-grpo for @SHELL@, made by `megatron-grpo completion @SHELL@`.
_megatron_grpo_after() {  # the words before the cursor: the command first, and `name=value` as three words
    local word last= key= flag= count=0 settings=@SETTINGS@
    case $1 in
@COMMANDS@
    esac
    for word; do
        case $word in
            (--*=*) flag= key= ;;
            (--*) flag=$word key= count=0 ;;
            (=) key=$last ;;
            (*) key= count=$((count + 1)) ;;
        esac
        last=$word
    done
    [[ -z $key ]] || { flag=$key; count=0; }
    flag=${flag#--} flag=${flag//-/_}
    case $flag in
        (@SEVERAL@) ;;
        (*) ((count == 0)) || flag= ;;  # it has its value
    esac
    case $flag in
        ("") ;;
@VALUES@
        (@NUMBERS@) offered=number ;;
        (*) offered=file ;;
    esac
}
"""
BASH = """\
_megatron_grpo() {
    local current=${COMP_WORDS[COMP_CWORD]} flags= offered= before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    [[ $current != "=" ]] || { before+=("="); current=; }  # bash splits at `=`
    _megatron_grpo_after "${before[@]}"
    if [[ $current == -* && $current != -[0-9]* ]]; then
        current=${current#-} current=${current#-}
        offered=$flags current=--${current//-/_}
    fi
    COMPREPLY=()
    case ${offered:=$flags} in
        number) compopt +o default ;;
        file) ;;
        *=) compopt -o nospace ;&
        *) COMPREPLY=($(compgen -W "$offered" -- "$current")) ;;
    esac
}
complete -o default -F _megatron_grpo megatron-grpo
"""
ZSH = """\
_megatron_grpo() {
    local flags= offered=
    local -a before=("${(@)words[2,CURRENT-1]}") described
    [[ $PREFIX != *=* ]] || { before+=("${PREFIX%%=*}" =); compset -P 1 '*='; }
    _megatron_grpo_after "$before[@]"
    described=("${(@f)flags}")
    if ((CURRENT == 2)); then
        _describe command described
    elif [[ -z $offered || $PREFIX == -* && $PREFIX != -[0-9]* ]]; then
        _describe -o option described -M 'm:-=_'
    elif [[ $offered == number ]]; then
        _message number
    elif [[ $offered == *= ]]; then
        compadd -S '' ${=offered}
    elif [[ $offered == file ]] || ! compadd ${=offered}; then
        _files
    fi
}
if [[ $funcstack[1] == _megatron_grpo ]]; then _megatron_grpo "$@"; else compdef _megatron_grpo megatron-grpo; fi
"""


def run_completion(words: Sequence[str]) -> int:
    """Print the completion script of a shell.

    Args:
        words: Name of the shell.

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
    """Return the completion script of a shell. In zsh it shows the first line of help of each command and setting.

    Args:
        shell: "bash" or "zsh".
    """
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
    script = SCRIPT + (ZSH if shell == "zsh" else BASH)
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
