"""Sizes of functions and constructors. Ruff, mypy and import-linter check complexity, types and layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron_grpo
import megatron_grpo_referee

PACKAGE, REFEREE = (Path(package.__file__).parent for package in (megatron_grpo, megatron_grpo_referee))
MOST_LINES, MOST_PARAMETERS = 60, 8

# What is longer, or takes more, and why it stays so.
LONG_FUNCTIONS: dict[str, str] = {}
WIDE_CONSTRUCTORS = {"api.trainer.GRPOTrainer": "TRL's arguments, in TRL's order"}


def list_functions(source: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name inside the module; of a nested one, the names around it too."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = (*names, child.name)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ".".join(inside), child
            yield from walk(child, inside)

    return walk(ast.parse(source), ())


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without its decorators and its docstring, with everything else."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self; *args and **kwargs are one each."""
    args = function.args
    stars = [star for star in (args.vararg, args.kwarg) if star is not None]
    return len([*args.posonlyargs, *args.args, *args.kwonlyargs, *stars]) - 1


def list_all_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    found = []
    for root, path in ((folder, path) for folder in (PACKAGE, REFEREE) for path in sorted(folder.rglob("*.py"))):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found += [(f"{module}.{name}", function) for name, function in list_functions(path.read_text(encoding="utf-8"))]
    return found


def test_functions_have_at_most_60_lines_or_a_reason():
    long = {name: count_lines(function) for name, function in list_all_functions() if count_lines(function) > MOST_LINES}
    assert long.keys() == LONG_FUNCTIONS.keys(), f"too long, or in the list and no longer long: {long}"


def test_constructors_have_at_most_8_parameters_or_a_reason():
    """A dataclass is no constructor: its fields are what it is."""
    constructors = {name.removesuffix(".__init__"): count_parameters(f) for name, f in list_all_functions() if name.endswith(".__init__")}
    wide = {name: count for name, count in constructors.items() if count > MOST_PARAMETERS}
    assert wide.keys() == WIDE_CONSTRUCTORS.keys(), f"too wide, or in the list and no longer wide: {wide}"


def test_line_and_parameter_counts_by_hand():
    source = """
class A:
    @staticmethod
    async def f():
        def g():
            pass
    def __init__(self, a, /, b, *c, d=1, **e):
        pass
"""
    found = dict(list_functions(source))
    assert {name: count_lines(function) for name, function in found.items()} == {"A.f": 3, "A.f.g": 2, "A.__init__": 2}
    assert count_parameters(found["A.__init__"]) == 5
