"""Files of rewards that were written for another system: programs that train where they are imported, and plugins of ms-swift."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_grpo.rewards.protocol import text_of

_REGISTRIES = ("orms", "prms", "rm_plugins", "multi_turns", "envs")


_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parsed(path: Path) -> ast.Module:
    """Empty where it is no Python: whoever imports it says what is wrong with it."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def trains_at_import(program: ast.Module) -> int | None:
    """The line that begins a training where this is imported, if there is one.

    It makes a GRPOTrainer or calls `.train()`, by itself or by a function of the file, and `if __name__ == "__main__":` is not above it.
    """
    defined = {line.name: _names(line) for line in program.body if isinstance(line, _DEFINES)}
    trains, before = {"GRPOTrainer", ".train"}, 0
    while before < len(trains):
        before = len(trains)
        trains |= {name for name, used in defined.items() if used & trains}
    runs = (line for line in program.body if not isinstance(line, _DEFINES) and "__name__" not in _names(getattr(line, "test", line)))
    return next((line.lineno for line in runs if _names(line) & trains), None)


def _names(node: ast.AST) -> set[str]:
    """Names that are used in it, and methods that are called, those with a dot."""
    called = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    methods = {f".{function.attr}" for function in called if isinstance(function, ast.Attribute)}
    return methods | {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


@contextmanager
def with_swift(program: ast.Module) -> Iterator[None]:
    """While a plugin of ms-swift is loaded where that is not installed: its registries take what is put into them, and what else the plugin
    imports of it are classes that do nothing."""
    lines = [line for line in ast.walk(program) if isinstance(line, ast.ImportFrom) and (line.module or "").split(".")[0] == "swift"]
    made: dict[str, ModuleType] = {}
    for line in lines if lines and find_spec("swift") is None else ():
        names = list(accumulate(str(line.module).split("."), "{}.{}".format))
        made |= {name: ModuleType(name) for name in names if name not in made}
        for word in line.names:
            idle = type(word.name, (), {"__init__": lambda self, args=None, **words: None, "__module__": line.module})
            setattr(
                made[names[-1]], word.name, {} if word.name in _REGISTRIES else logging.getLogger if word.name == "get_logger" else idle
            )
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def shown_text(cls: type) -> type:
    """A reward class; of one of ms-swift's, which judge text where the completions of a chat are messages here, one that is given text."""
    if not any(base.__module__.partition(".")[0] == "swift" for base in cls.__mro__):
        return cls
    inner: Callable[..., Any] = cls.__call__

    def call(self: Any, completions: Any, **columns: Any) -> Any:
        return inner(self, completions=[text_of(completion) for completion in completions], **columns)

    async def call_later(self: Any, completions: Any, **columns: Any) -> Any:
        return await call(self, completions, **columns)

    wrapped = functools.wraps(inner)(call_later if inspect.iscoroutinefunction(inner) else call)
    return type(cls.__name__, (cls,), {"__call__": wrapped, "__module__": cls.__module__})
