"""Names: the rules of CONTRIBUTING.md that a test can check."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import megatron_grpo
import megatron_grpo_referee

PACKAGE, REFEREE = (Path(package.__file__).parent for package in (megatron_grpo, megatron_grpo_referee))


def list_sources() -> list[tuple[str, Path]]:
    """(place inside its package, file) of each module of both distributions."""
    return [(str(path.relative_to(folder)), path) for folder in (PACKAGE, REFEREE) for path in sorted(folder.rglob("*.py"))]


def list_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for place, path in list_sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield place, node


def list_exceptions() -> set[str]:
    """Names of the package's classes that derive from an exception, over any number of steps."""
    found = {"Exception", "BaseException", "ValueError", "RuntimeError", "TypeError", "OSError"}
    bases = {node.name: {ast.unparse(base).split(".")[-1] for base in node.bases} for _, node in list_classes()}
    while grown := {name for name, above in bases.items() if above & found} - found:
        found |= grown
    return found & bases.keys()


def test_exception_names_end_in_error():
    """Private ones may carry control, not a fault."""
    assert [name for name in sorted(list_exceptions()) if not name.endswith("Error") and not name.startswith("_")] == []


def test_public_class_names_are_unique():
    places = defaultdict(set)
    for path, node in list_classes():
        if not node.name.startswith("_"):
            places[node.name].add(path)
    assert {name: sorted(where) for name, where in places.items() if len(where) > 1} == {}


def test_exception_subclasses_are_recognized():
    assert {"RowsError", "RunError", "ConfigError"} <= list_exceptions()


def list_documented_functions() -> Iterator[tuple[str, set[str], set[str], bool]]:
    """(place, arguments, names in the section Args, whether users call or implement it) of every public function with a docstring.

    A constructor's arguments are in its docstring, or in that of its class. A method without a docstring implements a protocol, which has
    it.
    """

    def walk(
        body: list[ast.stmt], owner: ast.ClassDef | None
    ) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from walk(node.body, node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node, owner

    for place, path in list_sources():
        for function, owner in walk(ast.parse(path.read_text(encoding="utf-8")).body, None):
            is_constructor = owner is not None and function.name == "__init__"
            docstring = ast.get_docstring(function) or (ast.get_docstring(owner) if owner is not None and is_constructor else None)
            if docstring is None or (function.name.startswith("_") and not is_constructor):
                continue
            found = function.args
            plain = [*found.posonlyargs, *found.args]
            is_bound = owner is not None and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
            extra = [argument for argument in (found.vararg, found.kwarg) if argument is not None]
            names = {argument.arg for argument in [*plain[is_bound:], *found.kwonlyargs, *extra]}
            section = re.search(r"^Args:\n((?: .*\n?|\n)*)", docstring, re.MULTILINE)
            documented = set(re.findall(r"^    \*{0,2}(\w+)(?: \(.*\))?:", section[1], re.MULTILINE)) if section else set()
            owner_name = owner.name if owner is not None else function.name
            is_protocol = owner is not None and any(ast.unparse(base).startswith("Protocol") for base in owner.bases)
            is_public = megatron_grpo._API.get(owner_name) == place.removesuffix(".py").replace("/", ".")
            is_users = place.startswith("api/") or is_public or is_protocol
            yield f"{place}:{function.lineno} {function.name}", names, documented, is_users


def test_public_arguments_are_documented_in_95_percent():
    """Elsewhere a docstring has the arguments that the signature does not explain: shapes, units, None, collectives."""
    functions = [(place, names, documented) for place, names, documented, is_users in list_documented_functions() if is_users]
    wanted = sum(len(names) for _, names, _ in functions)
    named = sum(len(names & documented) for _, names, documented in functions)
    missing = [f"{place}: {', '.join(sorted(names - documented))}" for place, names, documented in functions if names - documented]
    assert wanted > 120 and named >= 0.95 * wanted, f"{named} of {wanted}; not documented:\n" + "\n".join(missing)


# Names that users know: a setting, and a field of evaluations.jsonl. `of` holds the options that a reference of the mathematics passes on.
KEPT = {"pad_to_multiple_of", "pass_of", "of"}


def test_names_do_not_begin_or_end_with_of():
    """A function begins with a verb, a constructor is from_x."""
    pattern, found = re.compile(r"_*(of_\w*|\w+_of|of)$", re.IGNORECASE), set()
    for place, path in list_sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
            else:
                continue
            if pattern.match(name) and name not in KEPT:
                found.add((place, name))
    assert found == set()


def test_field_shapes_are_in_class_docstrings():
    """Not in a comment behind the field, which no tool shows."""
    shape = re.compile(r"#.*(\b(u?int|float|bool)\d* ?\[|\[[A-Zt]\b)")
    lines = {place: path.read_text(encoding="utf-8").splitlines() for place, path in list_sources()}
    fields = [
        f"{path}:{field.end_lineno} {lines[path][(field.end_lineno or 0) - 1].strip()}"
        for path, node in list_classes()
        for field in node.body
        if isinstance(field, ast.AnnAssign) and not node.name.startswith("_")
    ]
    assert [field for field in fields if shape.search(field)] == [] and len(fields) > 1000


def test_documented_arguments_exist_in_signature():
    stale = {place: documented - names for place, names, documented, _ in list_documented_functions() if documented - names}
    assert stale == {}


# Words that say nothing of the value: a local name is the field's (`row`, `tensor`, `path`, `match`, `result`, `local`).
RIDDLES = frozenset(
    "apart asked beside found given held how kept mine one others ours place places said theirs told "
    "wanted what which who whole why".split()
)
# A user's code may pass this argument by name.
PUBLIC_ARGUMENTS = {("plugins/environments/rollout_func.py", "asked")}


def list_local_names(source: str) -> Iterator[str]:
    """Names of arguments and local variables of functions, lambdas and comprehensions in them."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    yield node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


def test_local_names_contain_no_riddles():
    """The referee names pairs of numbers theirs and ours."""
    riddles = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in list_local_names(path.read_text(encoding="utf-8"))
        if name in RIDDLES
    }
    assert riddles == PUBLIC_ARGUMENTS


def test_local_name_search_finds_every_kind():
    assert set(list_local_names("def f(one, *, two):\n    x = [y for y in one]\n    return lambda z: x\n")) == {"one", "two", "x", "y", "z"}
