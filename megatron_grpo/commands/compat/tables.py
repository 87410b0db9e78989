"""Loader of the tables `<system>.yaml`, which give the meaning of each foreign name. Arithmetic is in `<system>.py`.

A table has, by foreign name: `same` (a native setting with another name), `read` (a reader translates it: a function of `<system>.py` or
`settle.py`, or one of the table's `cases`; names without a reader are read together by `settle`), `refused` (with a sentence), `aside`
(with a reason), and `defaults` that differ from the native ones. Names with a star are patterns, of which the longest match counts.
Sentences in capitals are keys of `common.yaml`. `settle` has the steps that follow from several names: rules, functions, and rules that
several systems share; in it a name that was not typed has the value in `fallbacks`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, FrameworkArg, FrameworkDefault, SourceFramework, Step
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.sizes import SIZES
from megatron_grpo.run.config.table import Setting

FOLDER = Path(__file__).parent


@cache
def contents(name: str) -> dict[str, Any]:
    """Return a YAML file of this folder.

    With `like: other`, its keys override those of the other file. `takes` merges its entries over the named keys of other files, and
    `without` removes defaults.

    Args:
        name: Name of the file without its extension.
    """
    import yaml

    with (FOLDER / f"{name}.yaml").open(encoding="utf-8") as file:
        table: dict[str, Any] = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for source, keys in table.get("takes", {}).items():
        table |= {key: contents(source)[key] | table.get(key, {}) for key in keys.split()}
    for default in table.get("without", "").split():
        del table["defaults"][default]
    return contents(table["like"]) | table if "like" in table else table


def _code(name: str) -> Any:
    """Return the Python module of a system; None if it has none."""
    return importlib.import_module(f"megatron_grpo.commands.compat.{name}") if (FOLDER / f"{name}.py").is_file() else None


def sentence(name: str) -> str:
    """Return the shared sentence of that name, or `name` itself if it is a sentence."""
    return contents("common")["sentences"].get(name, name)


@cache
def load(name: str) -> SourceFramework:
    """Return the dialect in the file `name`.

    Args:
        name: Name of the dialect's file without its extension.
    """
    table = contents(name)
    rows = read_table(name)
    sizes = {size: _size(size, **row) for size, row in table.get("sizes", {}).items()}
    return SourceFramework(
        name=table.get("name", name),
        title=table["title"],
        settings=sizes,
        products={native: _product(row) for native, row in table.get("products", {}).items()},
        hides=[flag for flag in SIZES if flag not in table.get("shows", "").split()] if sizes else (),
        prefixes=table.get("prefixes", "").split(),
        sections=table.get("sections", {}),
        names={name: row for name, row in rows.items() if "*" not in name},
        patterns={name: rows[name] for name in sorted(rows, key=len, reverse=True) if "*" in name},
        defaults=[_default(name, row) for name, row in table.get("defaults", {}).items()],
        implies=table.get("implies", {}),
        trains_tower=table.get("trains_tower", False),
        settle=[_steps(name, part) for part in table.get("settle", {})],
        fallbacks=table.get("fallbacks", {})
        | {size: str(setting.default) for size, setting in sizes.items() if setting.default is not None},
    )


@cache
def read_table(name: str) -> Mapping[str, FrameworkArg]:
    """Return the table row of each foreign name. With `names_of`, the rows of other systems are included, and its own take precedence.

    Args:
        name: Name of the file without its extension.
    """
    table, rows = contents(name), dict[str, FrameworkArg]()
    for source in table.get("names_of", "").split():
        rows |= read_table(source)
    for part in (_same(table), _read(name), _refused(table)):
        rows |= part
    for key, names in table.get("aside", {}).items():
        rows |= dict.fromkeys(names.split(), FrameworkArg(why=sentence(key)))
    return rows


def _same(table: Mapping[str, Any]) -> Iterator[tuple[str, FrameworkArg]]:
    for name, row in table.get("same", {}).items():
        if isinstance(row, dict):
            ((native, words),) = row.items()
            yield name, FrameworkArg(native=native, values=contents("common")["values"][words] if isinstance(words, str) else words)
        elif name.endswith("."):  # a section
            yield from ((f"{name}{native}", FrameworkArg(native=native)) for native in row.split())
        else:
            yield name, FrameworkArg(native=row)


def _read(name: str) -> Iterator[tuple[str, FrameworkArg]]:
    table = contents(name)
    labels = table.get("labels", "").split()
    for hint, row in table.get("read", {}).items():
        for reader, names in (row if isinstance(row, dict) else {"settle": row}).items():
            function = _function(name, reader)
            yield from ((foreign, FrameworkArg(read=function, hint=hint, is_label=foreign in labels)) for foreign in names.split())


def _function(system: str, spec: str) -> Callable[..., Any]:
    """Return the reader or step `name`, or `name argument`."""
    name, _, argument = spec.partition(" ")
    settle, cases = _code("settle"), contents(system).get("cases", {})
    if name == "settle":
        return lambda words, args: {}
    if name in cases:
        return partial(settle.read_case, cases=cases[name])
    function = next(getattr(module, name) for module in (_code(contents(system).get("like", system)), settle) if hasattr(module, name))
    return (lambda first, args: function(first, args, argument)) if argument else function


def _steps(system: str, part: str) -> list[Step]:
    """Return a part of `settle`: that of the table, or of another system."""
    steps = contents(system)["settle"][part]
    return _steps(steps, part) if isinstance(steps, str) else [step for row in steps for step in read_steps(system, row)]


def read_steps(system: str, row: Any) -> Iterator[Step]:
    """Yield the steps of a row of `settle`."""
    if isinstance(row, dict):
        rule = row | ({"then": [step for inner in row["then"] for step in read_steps(system, inner)]} if "then" in row else {})
        yield partial(_code("settle").apply_rule, rule=rule, title=contents(system)["title"])
    elif row in contents("common")["rules"]:
        for inner in contents("common")["rules"][row]:
            yield from read_steps(system, inner)
    else:
        yield _function(system, row)


def _refused(table: Mapping[str, Any]) -> Iterator[tuple[str, FrameworkArg]]:
    tasks = table.get("other_tasks", "").split()
    for key, rows in table.get("refused", {}).items():
        for row in rows if isinstance(rows, list) else [rows]:
            names, instead = (row["names"], row["or_with"]) if isinstance(row, dict) else (row, ())
            for word in names.split():
                name, off_values = _off(word)
                yield name, FrameworkArg(lacks=sentence(key), off=off_values, instead=instead, is_task=name in tasks)


def _off(word: str) -> tuple[str, tuple[str, ...]]:
    """Return (name, allowed values): `name=word` allows only this value, and `name|word` also those that ask for nothing."""
    name, has_values, value = word.partition("=")
    if has_values:
        return name, (value,) if value else ()
    name, *words = word.split("|")
    return name, (*OFF, *words)


def _default(name: str, row: Any) -> FrameworkDefault:
    """Return a default from its foreign value and native settings. A bare value belongs to the setting of the same name."""
    if not isinstance(row, dict):
        return FrameworkDefault(name=name, theirs=format_value(row), native={name: row})
    return FrameworkDefault(name=name, theirs=row["theirs"], native=row.get("is", {}), ours=row.get("ours", ""))


def _product(row: str | Mapping[str, str]) -> tuple[str, str]:
    """Return (unit, foreign name)."""
    return ("completions", row) if isinstance(row, str) else next(iter(row.items()))


def _size(name: str, help: str, default: int | None = None) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)
