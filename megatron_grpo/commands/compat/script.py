"""Reader of the flags in a launch script, by the rules of a shell: `NPROC_PER_NODE=8 megatron rlhf --micro_batch_size 1 ...`.

Supports only what a list of flags needs: comments, quotes, continued lines, redirections, arithmetic, arrays and variables that the script
assigns, and files that it sources. A value that a shell would pass on but that cannot be determined here (a variable from outside,
`$(...)`, a value that depends on a condition) is a problem, and is never silently omitted.
"""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.base.files import read_text
from megatron_grpo.run.config.read import UNKNOWN, RawSetting, Read, read_file, read_words

_PLAIN_DOLLAR = "\x00"  # a quoted dollar sign, which starts no variable
_OPEN, _CLOSE = "\x02", "\x03"  # enclose the words of an array
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_FLAG = re.compile(r"--[A-Za-z]|\+*[A-Za-z_]\w*(\.\w+)+=")  # --name, or Hydra's section.name=
_VARIABLE = re.compile(r"\$\{(\w+)(\[[@*]\])?(?::?([-=])([^{}]*))?\}|\$(\w+)")  # the innermost first
_ALONE = re.compile(UNKNOWN + r"\$(\w+|\{[^/]*\})")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_REDIRECTION = re.compile(r"(?:\d+|&)?[<>]+[&|]?[ \t]*[^\s;&|]*")
_LAUNCHERS, _WRAPPERS = ("torchrun", "accelerate", "torch.distributed.run", "deepspeed"), ("uv", "uvx", "srun")
_UV = ("uv", "uvx")
_UV_OPTIONS = (*("--with", "--with-requirements", "--with-editable", "--from", "--extra", "--group", "--package", "--python", "-p"),
          *("--env-file", "--directory", "--project", "--index", "--index-url"))  # fmt: skip
_PROGRAM = re.compile(r"(python[\d.]*|bash|sh|torchrun|accelerate|deepspeed|trl|swift|megatron|megatron[-_]grpo|-m|.*\.(py|sh))$")
_SERVERS = ("rollout", "vllm-serve", "serve", "deploy", "launch_server", "api_server")  # programs of servers, by their last part
# Flags of `swift rollout` that decide what an episode is. They count as flags of the run, which samples there.
_EPISODE_ARGS = ("multi_turn_scheduler", "max_turns", "use_gym_env", "gym_env", "context_manager")
_NESTED = 5  # largest depth of scripts that start scripts
_LONGEST_WORD = 1 << 16  # characters of a word with its variables expanded: variables that double each other have no end
_LAUNCHER_VARIABLES = {"nproc_per_node": "NPROC_PER_NODE", "nnodes": "NNODES", "num_processes": "NPROC_PER_NODE"}
_BEGINS, _ENDS = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_ITS_DIRECTORY = re.compile(r"dirname.*(BASH_SOURCE|\$0)")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*](?::(\d+))?\})")  # $@, ${@:2}
_PART_OF_PATH = re.compile(r"\$\((basename|dirname) +(?:-- +)?([^\s()$`]+)\)")
_PATH_PROPERTIES = {"basename": "name", "dirname": "parent"}
_IN_CASE = re.compile(r"\$\{(\w+)(,,?|\^\^?)\}")  # ${NAME,,} is the value in lower case


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedScript:
    """Result of reading a script: the last command that has flags, and the variables at the end.

    Unknown values contain UNKNOWN.

    Args:
        command: The program of the last command, with its subcommand.
        others: Words of the other commands with flags.
    """

    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    command: str = ""
    others: list[list[str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Shell:
    """State of a script: its assignments so far, and the commands with flags found so far."""

    source: str
    directory: Path
    arguments: list[str] = field(default_factory=list)  # arguments given by the script that started it
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    depth: int = 0  # nesting of conditions and loops
    found: list[list[str]] = field(default_factory=list)
    scripts: list[list[str]] = field(default_factory=list)  # scripts that it starts without a flag
    problems: list[Problem] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # sourced files that do not exist

    def problem(self, message: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(flags=("config",), message=message))

    def read(self, text: str) -> None:
        """Execute the commands of a script, as far as they concern flags."""
        for command in commands(text.replace("\r\n", "\n")):
            try:
                quoted = shlex.split(command)
            except ValueError as error:
                self.problem(f"{self.source} cannot be read as a shell script: {error} in {command.strip()[:60]!r}.")
                return
            while quoted and quoted[0] in (*_BEGINS, *_ENDS, "then", "else", "elif", "do", "{", "}", "!"):
                self.depth += (quoted[0] in _BEGINS) - (quoted[0] in _ENDS)
                quoted = quoted[1:]
            self.obey([part for word in quoted for part in self.expanded(word)])

    def obey(self, words: list[str]) -> None:
        """Execute one command: assignments, source, shift; or record it if it has flags."""
        words = [word for word in words if word not in ("export", "declare", "local", "readonly")]
        while words and _ASSIGNMENT.match(words[0]):
            words = self.assign(words)
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            self.source_file(words[1])
        elif words[:2] == ["printf", "-v"] and len(words) > 2:
            self.variables[words[2]] = f"{UNKNOWN}${words[2]}"
        elif words[:1] == ["shift"]:
            count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            self.arguments = self.arguments[count:]
        elif not any(_FLAG.match(word) for word in words):
            if started_script(words):
                self.scripts.append(words)
        elif _FLAG.match(words[0]):
            self.problem(
                f"{self.source}: a shell ends the command before {words[0]}, because the line above it does not end in a backslash (a "
                "space after the backslash, or a comment between two lines, ends it too). Fix that line."
            )
        else:
            self.found += [program] if (program := _without_launcher(words, self.variables)) else []

    def assign(self, words: list[str]) -> list[str]:
        """Execute the first assignment and return the remaining words. Values assigned in a condition or a loop are unknown."""
        name, _, value = words[0].partition("=")
        name, adds = name.removesuffix("+"), name.endswith("+")
        if value == _OPEN:
            end = words.index(_CLOSE) if _CLOSE in words else len(words)
            items = [*(self.arrays.get(name, []) if adds else []), *words[1:end]]
            self.arrays[name] = [f"{UNKNOWN}${{{name}[@]}}"] if self.depth > 0 else items
            return words[end + 1 :]
        if self.depth > 0 and self.variables.get(name) != value:
            value = f"{UNKNOWN}${name}"
        self.variables[name] = self.variables.get(name, "") + value if adds else value
        return words[1:]

    def source_file(self, name: str) -> None:
        """Execute a sourced file, or record that it is missing."""
        text = text_of_file(name, self.directory)[0]
        if text is None:
            self.missing.append(name.replace(UNKNOWN, ""))
        else:
            self.read(text)

    def expanded(self, word: str) -> list[str]:
        """Return a word with its variables expanded. An array becomes several words, and so does ARGS="--tp 2 --pp 2" where it is used."""
        if all_arguments := _ARGUMENTS.fullmatch(word):
            return self.arguments[max(0, int(all_arguments[1] or 1) - 1) :]
        variable = _VARIABLE.fullmatch(word)
        if variable and variable[2]:
            return self.arrays.get(variable[1], [f"{UNKNOWN}{word}"])

        def known_value(match: re.Match[str]) -> str:
            name, instead = match[1] or match[5], match[4]
            argument = self.arguments[int(name) - 1 : int(name)] if name.isdigit() and name != "0" else []
            value = argument[0] if argument else self.variables.get(name, os.environ.get(name))
            if value is None and name in self.arrays:
                value = " ".join(self.arrays[name])
            if value is None and instead is not None:
                value = _VARIABLE.sub(known_value, instead)
                if match[3] == "=":
                    self.variables[name] = value
            return f"{UNKNOWN}{match[0]}" if value is None else value

        def in_case(match: re.Match[str]) -> str:
            value = self.variables.get(match[1], os.environ.get(match[1]))
            change = str.upper if "^" in match[2] else str.lower
            return match[0] if value is None else change(value) if len(match[2]) > 1 else change(value[:1]) + value[1:]

        expanded = _ARITHMETIC.sub(lambda match: self.computed(match[1]), word)
        previous = ""
        while previous != expanded and UNKNOWN not in expanded:
            previous, expanded = expanded, _VARIABLE.sub(known_value, _IN_CASE.sub(in_case, expanded))
        if len(expanded) > _LONGEST_WORD:
            return [f"{UNKNOWN}{word}"]
        expanded = expanded.replace("$(pwd)", os.getcwd())
        expanded = _PART_OF_PATH.sub(lambda match: str(getattr(Path(match[2]), _PATH_PROPERTIES[match[1]])), expanded)
        if _ITS_DIRECTORY.search(word):
            expanded = re.sub(r"\$\(.*\)", lambda _: str(self.directory), expanded)
        if UNKNOWN not in expanded and ("`" in expanded or "$(" in expanded or "${" in expanded):
            name, equals, value = expanded.partition("=") if _ASSIGNMENT.match(expanded) else ("", "", expanded)
            expanded = f"{name}{equals}{UNKNOWN}{value}"
        return expanded.split() if expanded != word and expanded.lstrip().startswith("--") else [expanded]

    def computed(self, formula: str) -> str:
        """Return the value of whole-number arithmetic with known names."""
        names = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: self.variables.get(match[1], os.environ.get(match[1], "?")), formula)
        try:
            return str(_number(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return f"{UNKNOWN}$(({formula}))"


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    **dict.fromkeys((ast.Div, ast.FloorDiv), lambda left, right: int(left / right)),  # a shell rounds towards 0
}  # fmt: skip


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError


def read_shell(text: str, *, source: str, directory: str | Path = ".", arguments: Sequence[str] = (), nested: int = 0) -> ParsedScript:
    """Read the flags of a script, or of the script that its last command starts."""
    shell = _Shell(source=source, directory=Path(directory).absolute(), arguments=list(arguments))  # as `cd` and `pwd` print it
    shell.read(text)
    commands = shell.found or shell.scripts[-1:]
    trains = [index for index, words in enumerate(commands) if _PROGRAM.match(words[0].rpartition("/")[2])]
    chosen = next((index for index in reversed(trains) if not _is_server(commands[index])), trains[-1] if trains else len(commands) - 1)
    last = commands[chosen] if commands else []
    unread = [words for index, words in enumerate(commands) if index < chosen or index > chosen and _is_server(words)]
    if name := started_script(last):
        inner, folder = text_of_file(name, shell.directory)
        if inner is not None and nested < _NESTED:
            inner_arguments = last[last.index(name) + 1 :]
            nested_script = read_shell(inner, source=Path(name).name, directory=folder, arguments=inner_arguments, nested=nested + 1)
            return replace(nested_script, problems=[*shell.problems, *nested_script.problems])
        shell.problem(f"{source}: it starts {plain(name)}, which does not exist. Pass that script as config, together with its flags.")
    stray = [word for previous, word in zip(last, last[1:]) if _may_hold_flags(previous, word)]
    if stray:
        cause = f", because it sources {', '.join(shell.missing)}, which does not exist" if shell.missing else ""
        shell.problem(f"{source}: {', '.join(map(plain, stray))} cannot be determined from the script{cause}. Write its flags explicitly.")
    return ParsedScript(
        words=[word.replace(_PLAIN_DOLLAR, "$") for word in last if word not in stray],
        variables={name: plain(value) for name, value in shell.variables.items()},
        command=" ".join(_program(last)),
        others=unread,
        problems=shell.problems,
    )


def text_of_file(name: str, directory: Path) -> tuple[str | None, Path]:
    """Return the text and folder of a file that a script names.

    It is searched from the working directory, the script's folder, and the folders above it. The text is None if it is not found.
    """
    for folder in (Path("."), directory, *directory.parents):
        try:
            return read_text(folder / name), (folder / name).absolute().parent
        except (OSError, UnicodeDecodeError, ValueError):
            continue
    return None, directory


def started_script(words: list[str]) -> str:
    """Return the shell script that a command starts, or ""."""
    names = words[1:2] if words and words[0].rpartition("/")[2] in ("bash", "sh") else words[:1]
    return next((name for name in names if name.endswith((".sh", ".bash"))), "")


def _may_hold_flags(previous: str, word: str) -> bool:
    """Return whether `word` is an unknown variable that is not the value of the flag before it.

    The output of a program is assumed to be a value.
    """
    return bool(_ALONE.fullmatch(word)) and (not previous.startswith("--") or "[" in word)


def plain(word: str) -> str:
    """Return a word without the internal markers."""
    return word.replace(_PLAIN_DOLLAR, "$").replace(UNKNOWN, "")


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a script: quotes kept, comments and redirections removed, continued lines joined, arrays on one line."""
    command, position, quote, array = "", 0, "", False
    while position < len(text):
        char = text[position]
        at_word = not command or command[-1].isspace() or command[-1] == _OPEN
        if quote != "'" and text.startswith(("$(", "${"), position):
            end = _closing(text, position + 1)
            inner = text[position:end]
            # One word for shlex, including its quotes, unless it is a variable or arithmetic, which contains none.
            command += inner if not set(inner) & set(" \t\n'\"|&;<>") else inner if quote and '"' not in inner else _one_word(inner, quote)
            position = end
            continue
        if quote:
            if char == "\\" and quote == '"':
                following = text[position + 1 : position + 2]
                command += {"\n": "", "$": _PLAIN_DOLLAR}.get(following, char + following)
                position += 2
                continue
            command += _PLAIN_DOLLAR if char == "$" and quote == "'" else char
            quote = "" if char == quote else quote
        elif char == "\\":
            following = text[position + 1 : position + 2]
            command += {"\n": "", "$": _PLAIN_DOLLAR, "": ""}.get(following, char + following)
            position += 2
            continue
        elif char in "'\"":
            quote = char
            command += char
        elif char == "#" and at_word:
            position = text.find("\n", position) if "\n" in text[position:] else len(text)
            continue
        elif char == "(" and command.endswith("=") and not array:
            array = True
            command += f"{_OPEN} "
        elif char == ")" and array:
            array = False
            command += f" {_CLOSE} "
        elif array and char == "\n":
            command += " "
        elif (match := _REDIRECTION.match(text, position)) and (at_word or char in "<>"):
            position = match.end()
            continue
        elif char in "\n;&|" and not array:
            yield command
            command = ""
        else:
            command += char
        position += 1
    yield command


def _closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "({") - (text[position] in ")}")
        if depth == 0:
            return position + 1
    return len(text)


def _one_word(inner: str, quote: str) -> str:
    """Return a substitution as one word for shlex: inner quotes are removed, and spaces kept."""
    bare = re.sub(r"[\"'\n]", lambda match: " " if match[0] == "\n" else "", inner)
    return bare if quote else f'"{bare}"'


def _without_launcher(words: list[str], variables: dict[str, str]) -> list[str]:
    """Remove a launcher and its own arguments. The number of ranks given to torchrun or accelerate is kept in `variables`."""
    if "--" in words and any(_FLAG.match(word) for word in words[words.index("--") :]):  # ray job submit ... -- python3 train.py ...
        words = words[words.index("--") + 1 :]
    wrapper = next((index for index, word in enumerate(words[:3]) if word in _WRAPPERS), None)
    if wrapper is not None:
        inner = _behind_uv(words[wrapper + 1 :]) if words[wrapper] in _UV else words[wrapper + 1 :]
        if words[wrapper] not in _UV:
            start = next((index for index, word in enumerate(inner) if _PROGRAM.match(word.rpartition("/")[2])), None)
            inner = words if start is None else inner[start:]
        return inner if inner is words else _without_launcher(inner, variables)
    if not any(word.rpartition("/")[2] in _LAUNCHERS for word in words[:3]):
        return words
    start = next((index for index, word in enumerate(words) if word == "-m" and index > 2 or word.endswith(".py")), 0)
    for word, following in zip(words[:start], words[1:]):
        name, _, value = word.partition("=")
        variable = _LAUNCHER_VARIABLES.get(name.replace("-", "_").strip("_"))
        if variable:
            variables[variable] = value or following
    return words[start:]


def _behind_uv(words: list[str]) -> list[str]:
    """Return the command that uv starts, without uv's options."""
    index = 0
    while index < len(words) and (words[index] == "run" or words[index].startswith("-") and words[index] != "-m"):
        index += 2 if words[index] in _UV_OPTIONS else 1
    return words[index:]


def _program(words: list[str]) -> list[str]:
    return list(takewhile(lambda word: not _FLAG.match(word), words))


def _is_server(words: list[str]) -> bool:
    return any(re.split("[/.]", word.removesuffix(".py"))[-1] in _SERVERS for word in _program(words))


def read_script(text: str, *, source: str, directory: Path = Path(".")) -> tuple[list[RawSetting], list[Problem]]:
    """Read the flags of a launch script; the last occurrence of each flag counts.

    Variables become entries named `$NAME`, so that the number of ranks can be found. Entries `$other` name commands that are not read, and
    entries `$twice` name repeated flags. A file that the script names as config is read before its flags.

    Returns:
        (settings, problems).
    """
    script = read_shell(text, source=source, directory=directory)
    settings, word_problems = read_words(script.words, source=source, lenient=True)
    problems = [*script.problems, *word_problems]
    entries: list[RawSetting] = []
    last: dict[str, RawSetting] = {}
    if not settings and not problems:
        problems.append(Problem(flags=("config",), message=f"{source} contains no command with flags that can be read."))
    for entry in settings:
        if entry.name == "config" and entry.raw and UNKNOWN not in entry.raw[0] and text_of_file(entry.raw[0], directory)[0] is not None:
            more_entries, word_problems = read_file(str(text_of_file(entry.raw[0], directory)[1] / Path(entry.raw[0]).name), read_program)
            entries, problems = entries + more_entries, problems + word_problems
        elif entry.name == "config":
            problems.append(Problem(flags=("config",), message=f"{source}: config {' '.join(entry.raw)} does not exist. Pass it too."))
        else:
            if last.get(entry.name, entry).raw != entry.raw:
                entries.append(RawSetting(name="$twice", raw=[entry.name], source=source))
            last[entry.name] = entry
    entries += last.values()
    entries += [RawSetting(name=f"${name}", raw=[value], source=source) for name, value in script.variables.items()]
    entries.append(RawSetting(name="$command", raw=[script.command], source=source))
    for words in script.others:
        program = " ".join(_program(words)[:2])
        flags = read_words(words, source=f"{source}: {program}", lenient=True)[0]
        taken = [flag for flag in flags if flag.name in _EPISODE_ARGS and _is_server(words)]
        entries += [*taken, RawSetting(name="$other", raw=[program, *(flag.name for flag in flags if flag not in taken)], source=source)]
    return entries, problems


def read_program(text: str, path: str) -> Read:
    """Read a launch script, or a Python file that builds TRL's configuration."""
    file = Path(path)
    if file.suffix == ".py" and not text.startswith("#!"):
        from megatron_grpo.commands.compat.python import read_python

        return read_python(text, source=file.name, path=path)
    return read_script(text, source=file.name, directory=file.parent)
