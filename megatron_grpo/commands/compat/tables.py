"""Loader of the tables `<system>.yaml`, which give the meaning of each foreign name. Arithmetic is in `<system>.py`.

A table has, by foreign name: `same` (a native setting with another name), `read` (a function of `<system>.py` or `settle.py` translates it;
names with CONVERSIONS are read together), `refused` (with a sentence), `aside` (with a reason), and `defaults` that differ from the
native ones. Names with a star are patterns, of which the longest match counts. Sentences in capitals are keys of `common.yaml`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, Dialect, DialectDefault, ForeignArg
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


def _code(name: str) -> ModuleType | None:
    """Return the Python module of a system; None if it has none."""
    return importlib.import_module(f"megatron_grpo.commands.compat.{name}") if (FOLDER / f"{name}.py").is_file() else None


def sentence(name: str) -> str:
    """Return the shared sentence of that name, or `name` itself if it is a sentence.

    Args:
        name: Name of a shared sentence, or a sentence.
    """
    return contents("common")["sentences"].get(name, name)


@cache
def load(name: str) -> Dialect:
    """Return the dialect in the file `name`.

    Args:
        name: Name of the dialect's file without its extension.
    """
    table = contents(name)
    rows = rows_of(name)
    sizes = {size: _size(size, **row) for size, row in table.get("sizes", {}).items()}
    sections = table.get("sections", {})
    return Dialect(
        name=table.get("name", name),
        title=table["title"],
        settings=sizes,
        products={native: _product(row) for native, row in table.get("products", {}).items()},
        hides=[flag for flag in SIZES if flag not in table.get("shows", "").split()] if sizes else (),
        prefixes=table.get("prefixes", "").split(),
        sections=tuple(sections),
        heads={section: heads for section, heads in sections.items() if heads},
        names={name: row for name, row in rows.items() if "*" not in name},
        patterns={name: rows[name] for name in sorted(rows, key=len, reverse=True) if "*" in name},
        defaults=[_default(name, row) for name, row in table.get("defaults", {}).items()],
        implies=table.get("implies", {}),
        trains_tower=table.get("trains_tower", False),
        convert=getattr(_code(table.get("like", name)), table.get("convert", "CONVERSIONS"), ()),
    )


@cache
def rows_of(name: str) -> Mapping[str, ForeignArg]:
    """Return the table row of each foreign name. With `names_of`, the rows of other systems are included, and its own take precedence.

    Args:
        name: Name of the file without its extension.
    """
    table, rows = contents(name), dict[str, ForeignArg]()
    for source in table.get("names_of", "").split():
        rows |= rows_of(source)
    modules = [_code(table.get("like", name)), _code("settle")]
    for part in (_same(table), _read(table, modules), _refused(table)):
        rows |= part
    for key, names in table.get("aside", {}).items():
        rows |= dict.fromkeys(names.split(), ForeignArg(why=sentence(key)))
    return rows


def _same(table: Mapping[str, Any]) -> Iterator[tuple[str, ForeignArg]]:
    for name, row in table.get("same", {}).items():
        if isinstance(row, dict):
            ((native, words),) = row.items()
            yield name, ForeignArg(native=native, values=contents("common")["values"][words] if isinstance(words, str) else words)
        elif name.endswith("."):  # a section
            yield from ((f"{name}{native}", ForeignArg(native=native)) for native in row.split())
        else:
            yield name, ForeignArg(native=row)


def _read(table: Mapping[str, Any], modules: list[Any]) -> Iterator[tuple[str, ForeignArg]]:
    labels = table.get("labels", "").split()
    for hint, row in table.get("read", {}).items():
        for reader, names in (row if isinstance(row, dict) else {"CONVERSIONS": row}).items():
            function = _reader(reader, modules)
            yield from ((name, ForeignArg(read=function, hint=hint, is_label=name in labels)) for name in names.split())


def _reader(spec: str, modules: list[Any]) -> Callable[..., Mapping[str, Any]]:
    """Return the function `name`, or the result of `name(argument)`."""
    name, _, argument = spec.partition(" ")
    if name == "CONVERSIONS":
        return lambda words, args: {}
    function = next(getattr(module, name) for module in modules if hasattr(module, name))
    return function(argument) if argument else function


def _refused(table: Mapping[str, Any]) -> Iterator[tuple[str, ForeignArg]]:
    tasks = table.get("other_tasks", "").split()
    for key, rows in table.get("refused", {}).items():
        for row in rows if isinstance(rows, list) else [rows]:
            names, instead = (row["names"], row["or_with"]) if isinstance(row, dict) else (row, ())
            for word in names.split():
                name, off_values = _off(word)
                yield name, ForeignArg(lacks=sentence(key), off=off_values, instead=instead, is_task=name in tasks)


def _off(word: str) -> tuple[str, tuple[str, ...]]:
    """Return (name, allowed values): `name=word` allows only this value, and `name|word` also those that ask for nothing."""
    name, has_values, value = word.partition("=")
    if has_values:
        return name, (value,) if value else ()
    name, *words = word.split("|")
    return name, (*OFF, *words)


def _default(name: str, row: Any) -> DialectDefault:
    """Return a default from its foreign value and native settings. A bare value belongs to the setting of the same name."""
    if not isinstance(row, dict):
        return DialectDefault(name=name, theirs=format_value(row), native={name: row})
    return DialectDefault(name=name, theirs=row["theirs"], native=row.get("is", {}), ours=row.get("ours", ""))


def _product(row: str | Mapping[str, str]) -> tuple[str, str]:
    """Return (unit, foreign name)."""
    return ("completions", row) if isinstance(row, str) else next(iter(row.items()))


def _size(name: str, help: str, default: int | None = None) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)
