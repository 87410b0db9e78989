"""The flags of a launch script, read as a shell reads them: `NPROC_PER_NODE=8 megatron rlhf --micro_batch_size 1 ...`.

Only what a list of flags needs of the shell: comments, quotes, continued lines, variables that the script itself assigns, redirections.
What a shell would pass on and this cannot know (a variable from outside, `$(...)`, an array) is a problem, never a word left out.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from megatron_grpo.errors import Problem

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_FLAG = re.compile(r"--[A-Za-z]|\+*[A-Za-z_]\w*(\.\w+)+=")  # --name, or Hydra's section.name=
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=])([^}]*))?\}|\$(\w+)")
_REDIRECTION = re.compile(r"(?:\d+|&)?[<>]+[&|]?[ \t]*[^\s;&|]*")
_LAUNCHERS = ("torchrun", "accelerate", "torch.distributed.run", "deepspeed")
_OF_LAUNCHERS = {"nproc_per_node": "NPROC_PER_NODE", "nnodes": "NNODES", "num_processes": "NPROC_PER_NODE"}
_PLAIN_DOLLAR = "\x00"  # a dollar sign that quotes keep from being a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """`words` of the last command that has flags, and the variables as they are at the end."""

    words: list[str] = field(default_factory=list)
    variables: Mapping[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)  # the programs of earlier commands that have flags too
    problems: list[Problem] = field(default_factory=list)


def read_shell(text: str, *, source: str) -> Script:
    """The flags of a script. source: how its file is called in messages."""
    variables: dict[str, str] = {}
    found: list[list[str]] = []
    problems: list[Problem] = []
    for command in commands(text.replace("\r\n", "\n")):
        try:
            quoted = shlex.split(command)
        except ValueError as error:
            return Script(problems=[_problem(f"{source} cannot be read as a shell script: {error} in {command.strip()[:60]!r}.")])
        words = [part for word in quoted for part in _expanded(word, variables)]
        words = [word for word in words if word not in ("export", "$@", "$*")]  # the script's own arguments: it was given none
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not any(_FLAG.match(word) for word in words):
            continue
        if _FLAG.match(words[0]):
            problems.append(
                _problem(
                    f"{source}: a shell ends the command before {words[0]}, because the line above it does not end in a backslash "
                    "(a space after the backslash, or a comment between two lines, ends it too). Mend that line."
                )
            )
            continue
        found.append(_without_launcher(words, variables))
    last = found[-1] if found else []
    unknown = [word.replace(_PLAIN_DOLLAR, "$") for word in last if "$" in word or "`" in word]
    if unknown:
        problems.append(
            _problem(
                f"{source}: {', '.join(unknown)} cannot be known from the script. Give those flags on the command line, or write values."
            )
        )
    return Script(
        words=[word.replace(_PLAIN_DOLLAR, "$") for word in last],
        variables={name: value.replace(_PLAIN_DOLLAR, "$") for name, value in variables.items()},
        others=[_program(words) for words in found[:-1]],
        problems=problems,
    )


def commands(text: str) -> Iterator[str]:
    """The commands of a script, quotes kept: without comments and redirections, continued lines joined."""
    command, place, quote = "", 0, ""
    while place < len(text):
        char = text[place]
        at_word = not command or command[-1].isspace()
        if quote:
            if char == "\\" and quote == '"':
                following = text[place + 1 : place + 2]
                command += {"\n": "", "$": _PLAIN_DOLLAR}.get(following, char + following)
                place += 2
                continue
            command += _PLAIN_DOLLAR if char == "$" and quote == "'" else char
            quote = "" if char == quote else quote
        elif char == "\\":
            following = text[place + 1 : place + 2]
            command += {"\n": "", "$": _PLAIN_DOLLAR, "": ""}.get(following, char + following)
            place += 2
            continue
        elif char in "'\"":
            quote = char
            command += char
        elif char == "#" and at_word:
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
            continue
        elif (match := _REDIRECTION.match(text, place)) and (at_word or char in "<>"):
            place = match.end()
            continue
        elif char in "\n;&|":
            yield command
            command = ""
        else:
            command += char
        place += 1
    yield command


def _expanded(word: str, variables: MutableMapping[str, str]) -> list[str]:
    """The word with its variables; one that holds several flags (ARGS="--tp 2 --pp 2"; run $ARGS) becomes several words."""

    def value(match: re.Match[str]) -> str:
        name, instead = match[1] or match[4], match[3]
        known = variables.get(name, os.environ.get(name))
        if known is None and instead is not None:
            known = _VARIABLE.sub(value, instead)
            if match[2] == "=":
                variables[name] = known
        return match[0] if known is None else known

    expanded = _VARIABLE.sub(value, word)
    return expanded.split() if expanded != word and expanded.lstrip().startswith("--") else [expanded]


def _without_launcher(words: list[str], variables: MutableMapping[str, str]) -> list[str]:
    """What torchrun or accelerate is told of itself stands before the program; of it, the number of ranks is kept."""
    if not any(word.rpartition("/")[2] in _LAUNCHERS for word in words[:3]):
        return words
    start = next((place for place, word in enumerate(words) if word == "-m" and place > 2 or word.endswith(".py")), 0)
    for word, following in zip(words[:start], words[1:]):
        name, _, value = word.partition("=")
        variable = _OF_LAUNCHERS.get(name.replace("-", "_").strip("_"))
        if variable:
            variables[variable] = value or following
    return words[start:]


def _program(words: list[str]) -> str:
    return " ".join(word for word in words[:2] if not word.startswith("--"))


def _problem(message: str) -> Problem:
    return Problem(flags=("config",), message=message)
