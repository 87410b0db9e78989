"""Exceptions that end a run, and helpers that quote foreign text in messages.

An error that the user can fix is a `ConfigError`, which carries *all* problems found, so that one run of the program shows all of them; or,
once the run has begun, a `RewardError`. A failure of the environment that one sentence explains is a `RunError`. Anything else is a bug and
crashes with its traceback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # in names of environment variables that hold secrets
EXIT_DONE, EXIT_CRASH, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Problem with the user's settings.

    Args:
        flags: Names that the user typed (no dashes; the dialect's names in a dialect).
        message: A sentence that includes the arithmetic and ends with values that work.
        nearest: For a flag, the closest values with which the whole configuration passes when only that flag is changed.
    """

    flags: Sequence[str]
    message: str
    nearest: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


class ConfigError(Exception):
    """Invalid settings. Raised before any model loads; `cli.main` prints it and exits with 2."""

    def __init__(self, problems: Sequence[Problem] | str):
        if isinstance(problems, str):
            problems = [Problem(flags=(), message=problems)]
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


def problem_with(flags: str | Sequence[str], message: str) -> Problem:
    """Return a problem with one flag or several."""
    return Problem(flags=(flags,) if isinstance(flags, str) else flags, message=message)


def config_error(flags: str | Sequence[str], message: str) -> ConfigError:
    """Return the error for one problem with one flag or several."""
    return ConfigError([problem_with(flags, message)])


class RewardError(Exception):
    """Failure of a reward function under `--reward_on_error raise`.

    The message names function, row and value; every rank raises it.
    """


class RunError(Exception):
    """Failure of a run for a reason outside the program, which the message states in full: a peer died, a disk is full."""


class WeightsNotFiniteError(RunError):
    """Weights of the trainer that are not finite: no further step can succeed. Raised on every rank, with the names of the tensors."""


class RowsError(RunError):
    """Unreadable or invalid rows of a streamed data set.

    Raised on every rank; the state of the run is saved before it ends.
    """


class RunInterruptedError(Exception):
    """End of a run on request, by a signal or because its time is up. Its state is on disk.

    `cli.main` exits with 3: safe to resume.
    """

    is_final = False  # if True, this machine's launcher should not start the job again


class NoRolloutServerError(RunInterruptedError):
    """Error raised if no rollout server is left and none returned in time.

    Raised on every rank; the state of the run is saved before it ends.
    """


class CancelledError(RunInterruptedError):
    """Error raised if sampling or scoring is cancelled, because it would take longer than the time left after a stop request.

    Raised on every rank; the state of the run is saved before it ends.
    """

    def __init__(self, message: str = "sampling was cancelled"):
        super().__init__(message)


_secrets: set[str] = set()
_SHORTEST = 8  # characters of a secret; a shorter one would match parts of ordinary words


def keep_secret(text: str | None) -> None:
    """Register a secret that `one_line` replaces from now on. A secret shorter than 8 characters is ignored.

    Args:
        text: The secret, such as a token or an API key; None is ignored.
    """
    if text and len(text) >= _SHORTEST:
        _secrets.add(text)


def one_line(value: Any, words: Callable[[Any], str] = str, max_characters: int = 500) -> str:
    """Return the text of an exception, a server's answer or any foreign object as one printable line.

    Control characters, which move a cursor or change the text direction, are escaped, and known secrets are replaced.

    Args:
        words: Function that returns its text.
        max_characters: Largest length, in characters; longer text is cut.

    Returns:
        The line, or "" if `words` raises.
    """
    try:
        text = words(value)
        result = text[: 20 * max_characters]
    except BaseException:  # noqa: BLE001 - a user's code
        return ""
    secrets = _secrets | {content for name, content in os.environ.items() if SECRET.search(name) and len(content) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        result = result.replace(secret, "(a secret)")
    result = f"{result[:max_characters]}..." if len(result) > max_characters else result
    plain = (
        character if character.isprintable() else " " if character in "\n\r\t" else character.encode("unicode_escape").decode()
        for character in result
    )
    return "".join(plain).strip()


def describe_exception(error: BaseException) -> str:
    """Return the class and text of an exception, as the end of a sentence whose subject raised it."""
    text = one_line(error)
    return f"raised {type(error).__name__}{': ' * bool(text)}{text}"


def describe_value(value: Any) -> str:
    """Return the type and the text of a value, for a sentence."""
    return f"the {type(value).__name__} {one_line(value, repr, 80)}".strip()


def first_line(value: Any) -> str:
    """Return the first line of a value's text, for `one_line`."""
    return str(value).strip().partition("\n")[0]
