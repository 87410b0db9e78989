"""Objects that a Python program passes to a run, under the names that settings have for them, such as `python:correct`.

Settings remain text, so config.yaml, plans and messages do not change; only the object behind such a name comes from here.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, problem_with

PREFIX = "python:"
_PLAIN = (str, bytes, int, float, bool, type(None), tuple)
_UNCHANGEABLE = frozenset({str, int, float, bool, type(None), bytes})
_objects: dict[str, Any] = {}
_fingerprints: dict[str, str] = {}


def provide(objects: Mapping[str, Any], fingerprints: Mapping[str, str] | None = None) -> None:
    """Make `python:NAME` refer to these objects in this process.

    Args:
        objects: Objects by name. An earlier object of the same name is replaced.
        fingerprints: Fingerprints by name, taken where the sources can be read; None computes them here.
    """
    _objects.update(objects)
    _fingerprints.update(
        fingerprints if fingerprints is not None else {name: compute_fingerprint(value) for name, value in objects.items()}
    )


def copy_for_user(value: Any) -> Any:
    """Return a copy of a value for a function or an object of the user, which may change it.

    Lists and dicts are copied with their contents, arrays and images too. Two places that hold one object get a copy each. What Python's
    `copy` module cannot copy, such as a lock or a connection, is passed as it is.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:
        return {key: item if type(item) in _UNCHANGEABLE else copy_for_user(item) for key, item in value.items()}
    if kind in (list, tuple):
        return kind([item if type(item) in _UNCHANGEABLE else copy_for_user(item) for item in value])
    try:
        return _copy_picture(value) if kind.__module__.startswith("PIL.") else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - copying runs code of the value
        return value


def _copy_picture(image: Any) -> Any:
    """Return a picture of Pillow with the same pixels in memory, which Pillow copies before it edits them (`readonly`).

    A batch has one picture for each completion; a copy of 1024 x 1024 pixels takes 3 MB.
    """
    if image.mode in ("P", "PA"):  # Pillow edits palettes in place
        return copy.deepcopy(image)
    image.load()
    picture = image._new(image.im)
    picture.format, picture.readonly = image.format, 1
    return picture


def is_given(spec: object) -> bool:
    """Return whether a value of a setting refers to an object of a Python program."""
    return isinstance(spec, str) and spec.startswith(PREFIX)


def get(spec: str, flag: str) -> Any:
    """Return the object that a setting refers to.

    Args:
        spec: `python:NAME`.

    Raises:
        ConfigError: If no program of this process provided it, for example because config.yaml is used on a command line.
    """
    name = spec.removeprefix(PREFIX)
    if name not in _objects:
        message = f"{flag}: {spec} is an object of a Python program. Start that program again, or name a file."
        raise ConfigError([problem_with(flag, message)])
    return _objects[name]


def fingerprint(spec: str) -> str | None:
    """Return the fingerprint of the code that a setting refers to; None if this process has no such object.

    Args:
        spec: Value of a setting for which `is_given` is true.
    """
    return _fingerprints.get(spec.removeprefix(PREFIX))


def compute_fingerprint(value: Any) -> str:
    """Return a fingerprint of the code of a function, class or callable object, equal in all processes.

    It covers the source, or the bytecode if there is no source, and those values in closures, in the globals that the code reads and in
    attributes of an object that are plain (text, numbers, tuples of them).

    Args:
        value: Function, class or callable object.
    """
    if isinstance(value, functools.partial):
        arguments = repr([argument for argument in (*value.args, *sorted(value.keywords.items())) if isinstance(argument, _PLAIN)])
        return _digest(compute_fingerprint(value.func), arguments)
    function = inspect.unwrap(value) if callable(value) else value
    code = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError):
        text = _bytecode(code.__code__) if inspect.isfunction(code) else f"{code.__module__}.{code.__qualname__}"
    values = dict(getattr(function, "__dict__", {})) if not inspect.isclass(function) else {}
    if inspect.isfunction(function):
        closure = inspect.getclosurevars(function)
        values |= {**closure.globals, **closure.nonlocals}
    plain = sorted((name, repr(plain_value)) for name, plain_value in values.items() if isinstance(plain_value, _PLAIN))
    return _digest(text, repr(plain))


def _digest(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:12]


def _bytecode(code: CodeType) -> str:
    """Return the instructions, names and constants of a function, without addresses in memory."""
    constants = [_bytecode(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts]
    return repr((code.co_code, code.co_names, constants))
