"""Mutations: replace a line in a module of this process, to check that a test detects it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any


@contextmanager
def mistake(module: str, right: str, wrong: str) -> Iterator[None]:
    """Replace the code of functions and methods in a module; they keep their identity, whoever has imported them. Constants change too."""
    found = importlib.import_module(module)
    source = inspect.getsource(found)
    assert right in source, f"{module} has no {right!r}"
    _take(found, source.replace(right, wrong))
    try:
        yield
    finally:
        _take(found, source)


def _take(module: Any, source: str) -> None:
    made = dict(vars(module))
    exec(compile(source, module.__file__, "exec"), made)
    for name, value in list(vars(module).items()):
        if isinstance(value, float):
            setattr(module, name, made[name])
        elif isinstance(value, (FunctionType, type)) and value.__module__ == module.__name__:
            _take_code(value, made[name])


def _take_code(old: Any, new: Any) -> None:
    if isinstance(old, FunctionType):
        if not hasattr(old, "__wrapped__"):
            old.__code__ = new.__code__
        return
    for name, member in vars(old).items():
        other = vars(new).get(name)
        if isinstance(member, property):
            member, other = member.fget, other.fget
        if isinstance(member, (staticmethod, classmethod)):
            member, other = member.__func__, other.__func__
        if isinstance(member, FunctionType):
            _take_code(member, other)
