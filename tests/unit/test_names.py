"""How things are called: what CONTRIBUTING.md says of names, as far as a test can hold it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import megatron_grpo

PACKAGE = Path(megatron_grpo.__file__).parent


def classes(folder: Path = PACKAGE) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(folder)), node


def exceptions() -> set[str]:
    """Names of the package's classes that derive from an exception, over any number of steps."""
    found = {"Exception", "BaseException", "ValueError", "RuntimeError", "TypeError", "OSError"}
    bases = {node.name: {ast.unparse(base).split(".")[-1] for base in node.bases} for _, node in classes()}
    while grown := {name for name, above in bases.items() if above & found} - found:
        found |= grown
    return found & bases.keys()


def test_an_exception_ends_in_error():
    """Private ones may carry control, not a fault."""
    assert [name for name in sorted(exceptions()) if not name.endswith("Error") and not name.startswith("_")] == []


def test_no_two_public_classes_have_one_name():
    places = defaultdict(set)
    for path, node in classes():
        if not node.name.startswith("_"):
            places[node.name].add(path)
    assert {name: sorted(where) for name, where in places.items() if len(where) > 1} == {}


def test_an_exception_of_an_exception_is_one():
    assert {"RowsError", "RunError", "ConfigError"} <= exceptions()
