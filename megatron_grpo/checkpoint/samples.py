"""Pending samples in a checkpoint: a list of `Sample` in one .npz file without pickles, bit for bit.

Written from the fields of the dataclasses, so a field added to `Sample` or a new kind of it needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron_grpo.types import Sample


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One array per field and kind of sample; arrays of tokens are laid end to end, with their lengths beside them."""
    arrays: dict[str, np.ndarray] = {"kinds": np.array([type(sample).__name__ for sample in samples], dtype=np.str_)}
    for kind in dict.fromkeys(type(sample) for sample in samples):
        mine = [sample for sample in samples if type(sample) is kind]
        for field in fields(kind):
            values = [getattr(sample, field.name) for sample in mine]
            key = f"{kind.__name__}.{field.name}"
            if isinstance(values[0], np.ndarray):
                arrays[key] = np.concatenate(values)
                arrays[f"{key}.lengths"] = np.array([len(value) for value in values], dtype=np.int64)
            else:
                arrays[key] = np.array(values)
            if arrays[key].dtype == object:
                raise TypeError(f"{key} holds {values[0]!r}, which numpy can only pickle")
    with path.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_samples(path: Path) -> list[Sample]:
    """What `write_samples` wrote, in the same order."""
    with np.load(path, allow_pickle=False) as arrays:
        kinds = [str(name) for name in arrays["kinds"]]
        known = {kind.__name__: kind for kind in _kinds(Sample)}
        made = {name: iter(list(_samples(known[name], arrays))) for name in dict.fromkeys(kinds)}
        return [next(made[name]) for name in kinds]


def _samples(kind: type[Sample], arrays: np.lib.npyio.NpzFile) -> Iterator[Sample]:
    columns = {}
    for field in fields(kind):
        key = f"{kind.__name__}.{field.name}"
        values = arrays[key]
        if f"{key}.lengths" in arrays:
            columns[field.name] = np.split(values, np.cumsum(arrays[f"{key}.lengths"])[:-1])
        else:
            columns[field.name] = values.tolist()
    for row in zip(*columns.values(), strict=True):
        yield kind(**dict(zip(columns, row, strict=True)))


def _kinds(kind: type[Sample]) -> Iterator[type[Sample]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
