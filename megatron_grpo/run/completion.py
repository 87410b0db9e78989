"""The `megatron-grpo completion` command: completion scripts for bash and zsh, made from the table of settings. No torch.

A script contains everything that it offers, so a TAB starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_grpo.base.errors import EXIT_DONE, ConfigError
from megatron_grpo.config.show import WORDS
from megatron_grpo.config.table import MAPS, Setting, keys, table
from megatron_grpo.metrics.reporters import ALL, REPORTERS
from megatron_grpo.rewards.loading import BUILT_IN

KNOWN = {"reward_funcs": [*BUILT_IN], "report_to": [*REPORTERS, ALL, "none"]}  # values of settings without `choices`
GENERAL = {  # flags of every command that takes settings
    "config": "YAML file or launch script",
    "print_config": "show every value and its source, and stop",
    "help_search": "list the settings whose name, alias or help contains a word",
}
SEVERAL = ("config", "help", "help_search", "variant")  # flags besides lists and maps that take several words

BASH = """\
# Completion of megatron-grpo for bash, made by `megatron-grpo completion bash`.
_megatron_grpo() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} flag= flags= words= positional= place=0
    local settings="@SETTINGS@"
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$current"))
        return
    fi
    case ${COMP_WORDS[1]} in
@OF_COMMANDS@
    esac
    # bash splits `--name=value` and `key=value` at `=`
    if [[ $current == "=" ]]; then
        current= flag=$previous
    elif [[ $previous == "=" ]]; then
        flag=${COMP_WORDS[COMP_CWORD-2]}
    elif [[ $current == -* && $current != -[0-9]* ]]; then
        current=${current#-} current=${current#-}
        COMPREPLY=($(compgen -W "$flags" -- "--${current//-/_}"))
        return
    else
        for ((place = COMP_CWORD - 1; place > 1; place--)); do
            [[ ${COMP_WORDS[place]} == --* ]] && flag=${COMP_WORDS[place]} && break
        done
    fi
    flag=${flag#--} flag=${flag//-/_}
    case $flag in
        @SEVERAL@) ;;
        *) ((place == 0 || place == COMP_CWORD - 1)) || flag= ;;  # it has its value
    esac
    case $flag in
        "") [[ $positional == file ]] || words=${positional:-$flags} ;;
@VALUES@
        @NUMBERS@) compopt +o default ;;
    esac
    [[ $words != *= ]] || compopt -o nospace
    [[ -z $words ]] || COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _megatron_grpo megatron-grpo
"""

ZSH = """\
#compdef megatron-grpo
# Completion of megatron-grpo for zsh, made by `megatron-grpo completion zsh`.
_megatron_grpo() {
    local flag= positional= words_of= place=0
    local -a commands settings flags values
    commands=(
@COMMANDS@
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    settings=(
@SETTINGS@
    )
    case $words[2] in
@OF_COMMANDS@
    esac
    if [[ $PREFIX == *=* ]]; then
        flag=${PREFIX%%=*}
        compset -P 1 '*='
    elif [[ $PREFIX == -* && $PREFIX != -[0-9]* ]]; then
        _describe -o option flags -M 'm:-=_'
        return
    else
        for ((place = CURRENT - 1; place > 2; place--)); do
            [[ $words[place] == --* ]] && flag=$words[place] && break
        done
    fi
    flag=${flag#--} flag=${flag//-/_}
    case $flag in
        (@SEVERAL@) ;;
        (*) ((place == 0 || place == CURRENT - 1)) || flag= ;;  # it has its value
    esac
    case $flag in
        ("") [[ -n $positional ]] || { _describe -o option flags -M 'm:-=_'; return }
            [[ $positional == file ]] || words_of=$positional ;;
@VALUES@
        (@NUMBERS@) _message number; return ;;
    esac
    values=(${=words_of})
    if [[ $words_of == *= ]]; then
        compadd -S '' -a values
    elif [[ -z $words_of ]] || ! compadd -a values; then
        _files
    fi
}
if [[ $funcstack[1] == _megatron_grpo ]]; then _megatron_grpo "$@"; else compdef _megatron_grpo megatron-grpo; fi
"""


def run_completion(words: Sequence[str], commands: Mapping[str, Callable]) -> int:
    """Print the completion script of a shell.

    Args:
        words: Name of the shell.
        commands: Functions by command name; the first lines of their docstrings are descriptions.

    Raises:
        ConfigError: The word is not one of the shells.
    """
    scripts = {"bash": bash_script, "zsh": zsh_script}
    if len(words) != 1 or words[0] not in scripts:
        got = f", not {' '.join(words)!r}" if words else ""
        raise ConfigError(f"completion needs the name of a shell{got}: `megatron-grpo completion bash` or `megatron-grpo completion zsh`.")
    print(scripts[words[0]](commands), end="")
    return EXIT_DONE


def bash_script(commands: Mapping[str, Callable]) -> str:
    """Return the completion script for bash.

    Args:
        commands: Functions by command name.
    """
    arms = []
    for command in commands:
        own, has_settings, positional = _arguments(command)
        flags = " ".join([f"--{name}" for name in own] + ["$settings"] * has_settings)
        arms.append(f'{command}) flags="{flags}" positional="{positional}" ;;')
    values = [f'{"|".join(names)}) words="{" ".join(words)}" ;;' for words, names in _values()]
    return _filled(
        BASH,
        SETTINGS=" ".join(f"--{name}" for name in _offered()),
        COMMANDS=" ".join(commands),
        OF_COMMANDS=_lines(arms),
        SEVERAL="|".join(_several()),
        VALUES=_lines(values),
        NUMBERS="|".join(_numbers()),
    )


def zsh_script(commands: Mapping[str, Callable]) -> str:
    """Return the completion script for zsh, which also shows the first line of help of each command and setting.

    Args:
        commands: Functions by command name.
    """
    arms = []
    for command in commands:
        own, has_settings, positional = _arguments(command)
        flags = " ".join([f"'--{name}'" for name in own] + ["$settings"] * has_settings)
        arms.append(f'({command}) flags=({flags}) positional="{positional}" ;;')
    helps = {name: (function.__doc__ or "").strip().splitlines()[0] for name, function in commands.items()}
    values = [f'({"|".join(names)}) words_of="{" ".join(words)}" ;;' for words, names in _values()]
    return _filled(
        ZSH,
        SETTINGS=_lines(_quoted(f"--{name}:{text}") for name, text in _offered().items()),
        COMMANDS=_lines(_quoted(f"{name}:{text}") for name, text in helps.items()),
        OF_COMMANDS=_lines(arms),
        SEVERAL="|".join(_several()),
        VALUES=_lines(values),
        NUMBERS="|".join(_numbers()),
    )


def _arguments(command: str) -> tuple[list[str], bool, str]:
    """Return (flags of a command besides settings, whether it takes settings, its positional argument).

    The last one is the words to choose from, "file", or "" without one.
    """
    usage = WORDS.get(command, "[settings]")
    first = usage.split()[0].strip("[]")
    positional = first.replace("|", " ") if re.fullmatch(r"[a-z]+(\|[a-z]+)+", first) else "file" if first.isupper() else ""
    return [*re.findall(r"--([\w-]+)", usage), "help"], "[settings]" in usage, positional


def _offered() -> dict[str, str]:
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
    return (setting.name, *setting.aliases, *setting.formerly)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(f"        {text}" for text in texts)


def _filled(script: str, **parts: str) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], script)
