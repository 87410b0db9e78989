"""Run the tests of the reward `code` in a separate process; they call functions of the program in the program's process.

Only data of Python's own types is exchanged, in both directions: arguments, return values, arguments of exceptions. Objects of other
types stay in their process; the tests get a `_Proxy` proxy, which they can call and query, and which compares with nothing. So a
program never sees the value a test expects, and takes no part in any comparison.

jail.py loads this file by its path in both processes, so it imports nothing of the package.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import operator
import os
import pickle
import re
import sys
from collections import deque
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType
from typing import Any

_BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_VALUES = {*_BASES, type(None), range, slice, deque, Fraction, Decimal, date, datetime, time, timedelta, timezone}
_NAMES = {(kind.__module__, kind.__qualname__) for kind in _VALUES} | {("numpy", "array")}
_LONGEST = 32 << 20  # bytes of a message
_ALIASES = {"np": "numpy", "pd": "pandas"}  # modules and functions that tests use without importing them
_HELPERS = {"isclose": "math", "allclose": "numpy", "approx": "pytest"}
# Of the standard library, unless the test is about the program's own: it uses no other name of the program.
_STANDARD = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple", "ChainMap"), "collections"),
    **dict.fromkeys(("datetime", "date", "timedelta", "timezone"), "datetime"),
    **dict.fromkeys(("deepcopy", "copy"), "copy"), "Decimal": "decimal", "Fraction": "fractions",
    **dict.fromkeys(("sqrt", "ceil", "floor", "fabs", "isnan"), "math"),
}  # fmt: skip
_PLAIN = re.compile(r"assert (\w+)\([^()]*\) == [^()]+")  # group 1: the tested function, which may have the name of a built-in: sum(10, 15)
# Operations on the program's objects, executed in its process. None takes a value to be compared: no `==`, no `-` (distances), no `in`.
_OPERATIONS = "call getattr setattr delattr iter next reversed len bool int float str repr getitem setitem delitem enter"


# ---- validation of tests


def find_test_problem(test: str) -> str | None:
    """Return the reason why a test cannot verify anything, as the end of a sentence about it; None if it can."""
    try:
        if any(map(_holds, ast.walk(ast.parse(test)))):
            return None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"is not Python ({type(error).__name__}: {error})"
    return "compares nothing: it has no `assert`, and no call like self.assertEqual"


def _holds(node: ast.AST) -> bool:
    """Return whether passing this node verifies something: it is an assertion, or expects an exception."""
    match node:
        case ast.Assert(test):
            return not isinstance(test, ast.Constant)
        case ast.Expr(ast.Call(function)) | ast.With([ast.withitem(ast.Call(function))]):
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            return name.lower().startswith("assert") or name == "raises"
        case ast.ExceptHandler(ast.Name(name)):
            return name not in ("BaseException", "Exception", "AssertionError")
    return False


class _CountAssertions(ast.NodeTransformer):
    """Transformer that makes a test count the assertions that have held."""

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        count = ast.parse("__held__()").body
        if isinstance(node, ast.ExceptHandler) and _holds(node):
            node.body[:0] = count
        return [node, *count] if isinstance(node, ast.stmt) and _holds(node) else node


def _names_read(node: ast.AST) -> set[str]:
    """Return the names that a node reads."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}


def _find_bound(tree: ast.AST) -> set[str]:
    """Return the names that a test binds anywhere: variables, arguments, functions, classes, imports."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(name, ast.Store()) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name) | ast.ExceptHandler(name=str(name))
            ):
                names.add(name)
            case ast.alias(name, other):
                names.add(other or name.partition(".")[0])
    return names


def _compared(tree: ast.AST) -> list[list[ast.expr]]:
    """Return the operands of each comparison of a test; of an assertion of a call, its function and the call."""
    compared: list[list[ast.expr]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, _, others):
                compared.append([left, *others])
            case ast.Call(ast.Attribute(attr=name) | ast.Name(name), [first, second, *_]) if name.lower().startswith("assert"):
                compared.append([first, second])
            case ast.Assert(ast.Call(function) as call) | ast.Assert(ast.UnaryOp(ast.Not(), ast.Call(function) as call)):
                compared.append([function, call])
    return compared


# ---- communication between the processes


class RpcConnection:
    """One end of the connection between the two processes. While it waits for a response, it serves requests of the other end."""

    def __init__(self, descriptor: int, *, own: object = None, is_tests: bool = False):
        """Open one end.

        Args:
            is_tests: Whether this is the end of the tests. It only exposes functions, which can only be called.
        """
        self.descriptor, self.is_tests, self.reader = descriptor, is_tests, os.fdopen(descriptor, "rb", closefd=False)
        self.given = [own]
        self.calls, self.unheld = 0, ""

    def ask(self, operation: str, target: _Proxy, /, *arguments: Any, **named: Any) -> Any:
        """Request an operation on an object of the other process, and return its result.

        Args:
            operation: Name of a special method, such as `__call__`.
        """
        self.calls += 1
        self._send("do", operation, target, arguments, named)
        while (answer := self._receive())[0] == "do":
            self._do(*answer[1:])
        kind, value, changed = answer
        if kind == "raised":
            raise _error(value, is_next=operation == "__next__")(*changed)
        if value is None:  # otherwise a function that returns a value could also change the arguments that its result is compared with
            for argument, value_there in zip(arguments, changed):
                _change(argument, value_there)
        return value

    def serve(self) -> None:
        """Serve requests until the other end closes."""
        while True:
            self._do(*self._receive()[1:])

    def register_object(self, value: object) -> int:
        """Register an object of this process, and return the number by which the other end refers to it.

        Raises:
            TypeError: In the process of the tests, if the object is not a function.
        """
        if self.is_tests and not isinstance(value, (FunctionType, BuiltinFunctionType)):
            self.unheld = f"passes the program an object of type {type(value).__name__}, which cannot leave the process of the tests"
            raise TypeError(self.unheld)
        self.given.append(value)
        return len(self.given) - 1

    def _do(self, operation: str, target: Any, arguments: tuple, named: dict) -> None:
        try:
            if self.is_tests and (operation != "__call__" or not any(target is item for item in self.given)):
                raise TypeError("functions of a test can only be called")
            does = getattr(operator, operation, None) or getattr(builtins, operation.strip("_"), None) or getattr(type(target), operation)
            value = does(target, *arguments, **named)
            self._send("gave", value, arguments if value is None else ())  # a function that returns None may have changed its arguments
        except BaseException as error:  # noqa: BLE001 - the error is raised in the other process
            kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            self._send("raised", next(kinds), tuple(argument for argument in error.args if type(argument) in (str, int, float)))

    def _send(self, *message: Any) -> None:
        stream = io.BytesIO()
        _Pickler(stream, self).dump(message)
        remaining = memoryview(stream.tell().to_bytes(4, "little") + stream.getvalue())
        while remaining:
            remaining = remaining[os.write(self.descriptor, remaining) :]

    def _receive(self) -> Any:
        size = int.from_bytes(self.reader.read(4), "little")
        content = self.reader.read(size) if 0 < size <= _LONGEST else b""
        if not content or len(content) != size:
            os._exit(0)  # the other process has ended, or sends too much: remaining tests have not passed
        return _Unpickler(io.BytesIO(content), self).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, link: RpcConnection):
        super().__init__(stream, 4)
        self.link = link

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        kind = type(value)
        if kind in _VALUES or (value in _VALUES if isinstance(value, type) else isinstance(value, _BASES) or _is_numpys(value)):
            return None
        return ("yours", value._number) if kind is _Proxy else ("mine", self.link.register_object(value))

    def reducer_override(self, value: Any) -> Any:
        """Reduce subclasses of Python's types, and NumPy's types, to their plain values."""
        if _is_numpys(value) and hasattr(value, "tolist"):
            if value.shape:
                return sys.modules["numpy"].array, (value.tolist(), value.dtype.str)
            value = value.tolist()
        elif type(value) in _VALUES:
            return NotImplemented
        base = next((base for base in _BASES if isinstance(value, base)), None)
        return NotImplemented if base is None else (base, (base(value),))


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (value is numpy.array or isinstance(value, (numpy.generic, numpy.ndarray)))


class _Unpickler(pickle._Unpickler):  # the one in Python, since the one in C has no dispatch table
    dispatch = {code: read for code, read in pickle._Unpickler.dispatch.items() if code != pickle.BUILD[0]}

    def __init__(self, stream: io.BytesIO, link: RpcConnection):
        super().__init__(stream)
        self.link = link

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, persistent_id: tuple[str, int]) -> Any:
        owner, number = persistent_id
        return self.link.given[number] if owner == "yours" else _Proxy(self.link, number)


def _error(name: str, *, is_next: bool) -> type[Exception]:
    """Return the built-in exception of this name. StopIteration is only used for `next`, because it would end a loop of the test."""
    kind = getattr(builtins, name, None)
    is_one = isinstance(kind, type) and issubclass(kind, Exception) and (is_next or kind is not StopIteration)
    return kind if is_one else RuntimeError  # type: ignore[return-value]


def _change(target: Any, value: Any) -> None:
    """Apply the program's change of an argument to the object in the process of the tests."""
    if type(target) is type(value) and isinstance(target, (list, bytearray, deque, dict, set)):
        target.clear()
        (target.update if isinstance(target, (dict, set)) else target.extend)(value)


class _Proxy:
    """Proxy of an object in the other process."""

    _link: RpcConnection
    _number: int

    def __init__(self, link: RpcConnection, number: int):
        vars(self).update(_link=link, _number=number)

    def __exit__(self, *_: object) -> Any:
        return self._link.ask("__getattr__", self, "__exit__")(None, None, None)

    def _compared(self, _: object = None) -> bool:
        raise TypeError("objects of the program's own classes cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __array_interface__ = __array_struct__ = property(_compared)  # the program could set these to an address in this process


def _operation(name: str) -> Any:
    return lambda self, /, *arguments, **named: self._link.ask(name, self, *arguments, **named)


for _name in _OPERATIONS.split():
    setattr(_Proxy, f"__{_name}__", _operation(f"__{_name}__"))


# ---- the process of the tests


class _Names(dict):
    """Namespace of the tests. Names they do not bind are looked up in Python, then among those that the program has defined.

    In `same(f(1)) == same(2)` and `judge(f(1), 2)` the names `same` and `judge` are not taken from the program, which would judge itself.
    """

    def __init__(self, link: RpcConnection):
        super().__init__(__name__="tests", __held__=self.count)
        self.program = _Proxy(link, 0)
        self.held, self.tested, self.modules, self.fault = 0, "", set[str](), ""
        self.standard, self.wrapping = set[str](), set[str]()

    def count(self) -> None:
        self.held += 1

    def read(self, tree: ast.Module, test: str) -> None:
        """Decide for a test where the names come from that it does not bind."""
        bases = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
        self.modules, self.fault = bases & {*sys.stdlib_module_names, *_ALIASES}, ""
        self.tested = match[1] if (match := _PLAIN.fullmatch(test.strip())) else ""
        free = {name for name in _names_read(tree) - _find_bound(tree) - self.modules - _HELPERS.keys() if name not in self}
        free = {name for name in free if not hasattr(builtins, name) or name == self.tested}
        self.standard = _STANDARD.keys() & free if free - _STANDARD.keys() else set()
        origins: dict[str, set[str]] = {}  # names of the program that a variable's value was made with
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                origins[node.targets[0].id] = self._origins(node.value, free, origins)
        sides = [[self._origins(side, free, origins) for side in operands] for operands in _compared(tree)]
        self.wrapping = {name for names in sides for smaller in names for larger in names if smaller < larger for name in smaller}

    def _origins(self, node: ast.AST, free: set[str], origins: dict[str, set[str]]) -> set[str]:
        read = _names_read(node)
        return read & (free - self.standard) | set().union(*(origins.get(name, set()) for name in read))

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return importlib.import_module(_ALIASES.get(name, name))
        if module := _HELPERS.get(name) or (_STANDARD[name] if name in self.standard else None):
            return getattr(importlib.import_module(module), name)
        if name in self.wrapping:
            self.fault = f"does not define `{name}`, by which the program would judge itself: define or import it in the test"
        elif not hasattr(builtins, name) or name == self.tested:
            with suppress(KeyError):
                return self.program[name]  # type: ignore[index]  # its operations are set below
        raise KeyError(name)


def run_tests(tests: list[str], descriptor: int, report: int) -> None:
    """Run the tests, and write one JSON line per completed test: whether it passed, or a string that says why it is inconclusive.

    Args:
        tests: Source of each test.
    """
    link = RpcConnection(descriptor, is_tests=True)
    names = _Names(link)
    for test in tests:
        os.write(report, json.dumps(_verdict(test, names, link)).encode() + b"\n")


def _verdict(test: str, names: _Names, link: RpcConnection) -> bool | str:
    names_before, names.held, link.calls, link.unheld = dict(names), 0, 0, ""
    try:
        tree = ast.parse(test)
        names.read(tree, test)
        if "unittest" in test:
            import unittest

            unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # it would look for tests in __main__ and exit
        exec(compile(ast.fix_missing_locations(_CountAssertions().visit(tree)), "<test>", "exec"), names)
        _run_defined([value for name, value in names.items() if names_before.get(name) is not value])
    except BaseException:  # noqa: BLE001 - a test that exits has not passed
        return link.unheld or names.fault or False
    return (
        link.unheld
        or names.fault
        or (names.held > 0 if link.calls else "does not use the program: does it define functions that it never calls?")
    )


def _run_defined(defined: list[Any]) -> None:
    """Run what a test defines, like pytest and unittest: functions test..., and test cases."""
    unittest = sys.modules.get("unittest")
    for value in defined:
        if isinstance(value, FunctionType) and value.__name__.startswith("test") and not value.__code__.co_argcount:
            value()
        elif unittest is not None and isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.wasSuccessful()
