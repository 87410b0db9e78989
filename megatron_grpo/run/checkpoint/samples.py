"""Pending samples in a checkpoint: a list of `Sample` in one .npz file without pickles, bit for bit. No torch.

The format follows from the fields of the dataclasses and their type hints, so a new field needs no change here. Supported types: arrays
of any shape, tuples of integers, numbers, strings, and each of these or None. Fields missing from a file take their default; a file with
an unknown field is rejected.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from megatron_grpo import __version__
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.rollout.engine import PartialCompletion
from megatron_grpo.core.types import Sample

FORMAT = 2
FOLDERS = {Sample: "pending", PartialCompletion: "partial"}  # base class of the samples -> folder in a checkpoint
HEADER = "header"  # JSON: format, version of the writer, and the column type of each field per sample class
NOT_SAVED = ("images",)  # images: they are found again by the prompt's number
LEFT_OUT = ("spans", "text")  # where all values are empty, which is the default
_SCALARS = {int: np.int64, float: np.float64, bool: np.bool_, str: np.str_}


class UnknownFormatError(ValueError):
    """Error raised if a file is intact but contains something that this version does not know."""


def serialize_samples(samples: Sequence[Any]) -> bytes:
    """Serialize samples to the contents of an .npz file.

    The file has the columns of each sample class in the order of the list; `kinds` holds the class of each sample.
    """
    arrays: dict[str, np.ndarray] = {"kinds": np.array([type(sample).__name__ for sample in samples], dtype=np.str_)}
    types: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(type(sample) for sample in samples):
        same_kind = [sample for sample in samples if type(sample) is kind]
        types[kind.__name__] = column_types(kind)
        for name, column in column_types(kind).items():
            values = [getattr(sample, name) for sample in same_kind]
            if name in LEFT_OUT and not any(values):
                del types[kind.__name__][name]
                continue
            arrays |= {f"{kind.__name__}.{name}{part}": array for part, array in _columns(column, values, name).items()}
    header = {"format": FORMAT, "written_by": f"megatron_grpo {__version__}", "kinds": types}
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **{HEADER: np.array(json.dumps(header))}, **arrays)
    return stream.getvalue()


def read_samples(path: Path, kind: type = Sample) -> list[Any]:
    """Read the samples that `serialize_samples` wrote, in the same order.

    Raises:
        UnknownFormatError: If the file has an unknown format, class or field.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    rows = {name: iter(_rows(path, *known, arrays)) for name, known in _known_kinds(path, arrays[HEADER], kind).items()}
    return [next(rows[str(name)]) for name in arrays["kinds"]]


def unreadable_reason(path: Path, kind: type = Sample) -> str | None:
    """Return the reason why this version cannot read a file of samples, from its header alone; None if it can."""
    try:
        with np.load(path, allow_pickle=False) as file:
            _known_kinds(path, file[HEADER], kind)
    except UnknownFormatError as error:
        return str(error)
    return None


def sample_files(folder: Path, kind: type) -> list[Path]:
    """Return all files of pending rows or partial completions in a checkpoint: one per rank that held some, or one for all ranks.

    Args:
        kind: Base class of the samples, one of `FOLDERS`.
    """
    return [*folder.glob(f"{FOLDERS[kind]}.npz"), *sorted((folder / FOLDERS[kind]).glob("rank_*.npz"))]


def column_types(kind: type) -> dict[str, str]:
    """Return the column type of each saved field: "array", "integers", "int", "float", "bool" or "str", with "?" if None is allowed.

    Raises:
        TypeError: If a field has another type, which could not be saved.
    """
    hints = get_type_hints(kind)
    return {field.name: _column_type(kind, field.name, hints[field.name]) for field in fields(kind) if field.name not in NOT_SAVED}


def _column_type(kind: type, name: str, hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        [inner] = [arg for arg in get_args(hint) if arg is not NoneType]
        return _column_type(kind, name, inner) + "?"
    if hint is np.ndarray or get_origin(hint) is np.ndarray:
        return "array"
    if get_origin(hint) is tuple and get_args(hint) == (int, ...):
        return "integers"
    if get_origin(hint) is Literal and all(isinstance(arg, str) for arg in get_args(hint)):
        return "str"
    if hint in _SCALARS:
        return hint.__name__
    raise TypeError(f"{kind.__name__}.{name} has type {hint}; supported are arrays, tuples of integers, numbers and strings")


# -- one column: the arrays of one field, by the suffix of their name ----------------------------------------------------------------------


def _columns(column: str, values: list[Any], name: str) -> dict[str, np.ndarray]:
    parts = {}
    if column.endswith("?"):
        parts[".present"] = np.array([value is not None for value in values], dtype=np.bool_)
        column, values = column[:-1], [value for value in values if value is not None]
    if column == "array":
        return parts | _concatenate_arrays(values, name)
    if column == "integers":
        return parts | _concatenate_arrays([np.array(value, dtype=np.int64) for value in values], name)
    kind = {"int": int, "float": float, "bool": bool, "str": str}[column]
    return parts | {"": np.array([kind(value) for value in values], dtype=_SCALARS[kind])}


def _concatenate_arrays(values: list[np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Concatenate arrays, and record their shapes. int64 is stored as int32 if the values fit, as token IDs always do."""
    dtypes, dimensions = {value.dtype for value in values}, {value.ndim for value in values}
    if len(dtypes) > 1 or len(dimensions) > 1 or any(dtype.hasobject for dtype in dtypes):
        raise TypeError(
            f"{name} has arrays of {sorted(map(str, dtypes))} with {sorted(dimensions)} dimensions; all must have the same dtype and "
            "number of dimensions"
        )
    flat = np.concatenate([value.ravel() for value in values]) if values else np.empty(0)
    dtype = flat.dtype
    if dtype == np.int64 and (not len(flat) or (flat.min() >= -(2**31) and flat.max() < 2**31)):
        flat = flat.astype(np.int32)
    shapes = np.array([value.shape for value in values], dtype=np.int64).reshape(len(values), max(dimensions, default=0))
    return {"": flat, ".shapes": shapes, ".dtype": np.array(str(dtype))}


def _values(column: str, part: Mapping[str, np.ndarray]) -> list[Any]:
    """Invert `_columns`."""
    if column.endswith("?"):
        present = iter(_values(column[:-1], part))
        return [next(present) if is_there else None for is_there in part[".present"]]
    if column not in ("array", "integers"):
        return part[""].tolist()
    shapes = [tuple(shape) for shape in part[".shapes"].tolist()]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes], dtype=np.int64)
    flat = part[""].astype(str(part[".dtype"]), copy=False)
    arrays = [array.reshape(shape) for array, shape in zip(np.split(flat, ends[:-1]), shapes)] if shapes else []
    return arrays if column == "array" else [tuple(array.tolist()) for array in arrays]


# -- reading -------------------------------------------------------------------------------------------------------------------------------


def _known_kinds(path: Path, header: np.ndarray, kind: type) -> dict[str, tuple[type, dict[str, str]]]:
    """Return the classes in a file and the column type of their fields, by name; checked to be known ones."""
    content = parse_json(str(header))
    begin, own_version = f"{path} was written by {content['written_by']} and has", f"megatron_grpo {__version__}"
    if content["format"] != FORMAT:
        raise UnknownFormatError(f"{begin} format {content['format']}; {own_version} reads format {FORMAT}")
    kinds_by_name = {sample_kind.__name__: sample_kind for sample_kind in _kinds(kind)}
    for name, columns in content["kinds"].items():
        if name not in kinds_by_name:
            raise UnknownFormatError(f"{begin} samples of the kind {name}, which {own_version} does not know")
        types = column_types(kinds_by_name[name])
        for column, its_type in columns.items():
            if column not in types:
                raise UnknownFormatError(f"{begin} the field {name}.{column}, which {own_version} does not know")
            if types[column] not in (its_type, f"{its_type}?"):
                raise UnknownFormatError(f"{begin} {name}.{column} as {its_type}; in {own_version} it is {types[column]}")
    return {name: (kinds_by_name[name], columns) for name, columns in content["kinds"].items()}


def _rows(path: Path, kind: type, columns: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> list[Any]:
    for field in fields(kind):
        if field.name not in columns and field.default is MISSING and field.default_factory is MISSING:
            raise UnknownFormatError(f"{path} lacks {kind.__name__}.{field.name}, which has no default in megatron_grpo {__version__}")
    values = {}
    for name, column in columns.items():
        key = f"{kind.__name__}.{name}"
        part = {ending: arrays[key + ending] for ending in ("", ".shapes", ".dtype", ".present") if key + ending in arrays}
        values[name] = _values(column, part)
    return [kind(**dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True)]


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    narrower: type
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
