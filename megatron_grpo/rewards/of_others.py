"""Files of rewards that were written for another system: programs that train where they are imported, and plugins of ms-swift."""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from megatron_grpo.rewards.protocol import text_of

_REGISTRIES = ("orms", "prms", "rm_plugins", "multi_turns", "envs")


def trains_at_import(text: str) -> int | None:
    """The line that begins a training where a file with this text is imported, if there is one.

    It makes a GRPOTrainer or calls `.train()`, by itself or by a function of the file, and `if __name__ == "__main__":` is not above it.
    """
    try:
        lines = ast.parse(text).body
    except (SyntaxError, ValueError):  # whoever imports it says what is wrong with it
        return None
    defined = {line.name: _names(line) for line in lines if isinstance(line, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    trains, before = {"GRPOTrainer", ".train"}, 0
    while before < len(trains):
        before = len(trains)
        trains |= {name for name, used in defined.items() if used & trains}
    idle = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    is_program = (line for line in lines if not isinstance(line, idle) and "__name__" not in _names(getattr(line, "test", line)))
    return next((line.lineno for line in is_program if _names(line) & trains), None)


def _names(node: ast.AST) -> set[str]:
    """Names that are used in it, and methods that are called, those with a dot."""
    called = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    methods = {f".{function.attr}" for function in called if isinstance(function, ast.Attribute)}
    return methods | {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


class _Module(ModuleType):
    """Stands for ms-swift's own: a registry takes what is put into it, and any other name is a class that does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found: Any = {} if name in _REGISTRIES else logging.getLogger if name == "get_logger" else None
        if found is None:
            found = type(name, (), {"__init__": lambda self, args=None, **words: None, "__module__": self.__name__})
        setattr(self, name, found)
        return found


class _Finder:
    """Finds `swift` and all modules in it; it is its own loader."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "swift" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def with_swift() -> Iterator[None]:
    """While a plugin of ms-swift is loaded: where ms-swift is not installed, something stands in its place."""
    if find_spec("swift") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
            del sys.modules[name]


def shown_text(cls: type) -> type:
    """A reward class; of one of ms-swift's, which judge text where the completions of a chat are messages here, one that is given text."""
    if not any(base.__module__.partition(".")[0] == "swift" for base in cls.__mro__):
        return cls
    inner: Callable[..., Any] = cls.__call__  # type: ignore[attr-defined]

    def call(self: Any, completions: Any, **columns: Any) -> Any:
        return inner(self, completions=[text_of(completion) for completion in completions], **columns)

    async def call_later(self: Any, completions: Any, **columns: Any) -> Any:
        return await call(self, completions, **columns)

    wrapped = functools.wraps(inner)(call_later if inspect.iscoroutinefunction(inner) else call)
    return type(cls.__name__, (cls,), {"__call__": wrapped, "__module__": cls.__module__})
