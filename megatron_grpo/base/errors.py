"""The ways a run ends before its time, and how what others say gets into a sentence.

What is the user's to mend is a `ConfigError`, which carries *all* problems found, so that one run of the program is enough to learn them;
or, once the run has begun, a `RewardError`. What a machine refused and a sentence explains is a `RunError`. Anything else is a bug and is
left to crash with its traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # in the name of an environment variable
EXIT_DONE, EXIT_CRASH, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with what the user typed.

    flags: the names the user typed (no dashes; the dialect's names in a dialect).
    message: a sentence with the arithmetic in it, ending in what would work.
    nearest: for a flag, the closest values with which the whole configuration passes when only that flag is changed.
    """

    flags: Sequence[str]
    message: str
    nearest: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


class ConfigError(Exception):
    """What the user typed cannot work. Raised before any model loads; `cli.main` prints it and exits with 2."""

    def __init__(self, problems: Sequence[Problem] | str):
        if isinstance(problems, str):
            problems = [Problem(flags=(), message=problems)]
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


def problem_with(flags: str | Sequence[str], message: str) -> Problem:
    """flags: one, or several."""
    return Problem(flags=(flags,) if isinstance(flags, str) else flags, message=message)


def config_error(flags: str | Sequence[str], message: str) -> ConfigError:
    """The error of one problem. flags: one, or several."""
    return ConfigError([problem_with(flags, message)])


class RewardError(Exception):
    """A reward function failed and `--reward_on_error raise` is set. The message names function, row and value; every rank raises it."""


class RunError(Exception):
    """A run that had begun cannot go on, for a reason outside the program that the message says in full: a peer died, a disk is full."""


class RowsError(RunError):
    """Rows of a data set that is read as the run goes cannot be read, or are not what rows must be. Raised on every rank; what the run has
    is saved before it ends."""


class RunInterruptedError(Exception):
    """The run was asked to stop, by a signal or because its time is up; its state is on disk. `cli.main` exits with 3: safe to resume."""

    is_final = False  # whether this machine's launcher should not start the job again


class NoRolloutServerError(RunInterruptedError):
    """No rollout server is left, and none came back in time. Raised on every rank; what the run has is saved before it ends."""


class CancelledError(RunInterruptedError):
    """The run was asked to stop, and what is being sampled or judged takes longer than it may wait. Raised on every rank; what the run
    has is saved before it ends."""

    def __init__(self, message: str = "what was being sampled is given up"):
        super().__init__(message)


_secrets: set[str] = set()
_SHORTEST = 8  # characters of a secret; a shorter one would be found in ordinary words


def keep_secret(text: str | None) -> None:
    """From now on no sentence of `said_by` has it."""
    if text and len(text) >= _SHORTEST:
        _secrets.add(text)


def said_by(value: Any, words: Callable[[Any], str] = str, most: int = 500) -> str:
    """The text of an exception, a server's answer or any foreign object, fit to be printed: one line of at most `most` characters, with
    none that moves a cursor or turns the line round, and without our secrets. "" where it raises instead.
    """
    try:
        text = words(value)
        shown = text[: 20 * most]
    except BaseException:  # noqa: BLE001 - a user's code
        return ""
    known = _secrets | {held for name, held in os.environ.items() if SECRET.search(name) and len(held) >= _SHORTEST}
    for secret in sorted(known, key=len, reverse=True):
        shown = shown.replace(secret, "(a secret)")
    shown = f"{shown[:most]}..." if len(shown) > most else shown
    plain = (one if one.isprintable() else " " if one in "\n\r\t" else one.encode("unicode_escape").decode() for one in shown)
    return "".join(plain).strip()


def raised(error: BaseException) -> str:
    """The class and text of an exception, as the end of a sentence about who raised it."""
    said = said_by(error)
    return f"raised {type(error).__name__}{': ' * bool(said)}{said}"


def shown(value: Any) -> str:
    """A value as a sentence names it."""
    return f"the {type(value).__name__} {said_by(value, repr, 80)}".strip()


def first_line(value: Any) -> str:
    """The first line of a value's text, for `said_by`."""
    return str(value).strip().partition("\n")[0]
