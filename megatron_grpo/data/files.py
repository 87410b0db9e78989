"""Owns reading a data set from disk or the Hub into rows: plain dicts, in file order, each with a place to name it by in an error.

JSON is read with the standard library; parquet and the Hub need the extra `data`. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.base.errors import ConfigError, Problem, first_line, said_by

SUFFIXES = (".jsonl", ".json", ".parquet")
NAMED_ROWS = 5  # how many bad rows an error names; the rest are counted
LONGEST_LINE = 64 << 20  # bytes: a file without line ends is no data set, and is not taken into memory whole


class Rows(Sequence[dict[str, Any]]):
    """Rows of one or several files. `place(i)` says where row i stands, for errors: `data.jsonl line 7`, `part-1.parquet row 7`."""

    def __init__(self, parts: Sequence[tuple[str, str, Sequence[dict[str, Any]], Sequence[int] | None]]):
        # Each part: file name, "line" or "row", its rows, and the lines they stand on (None: numbered from 0).
        self.parts = tuple(parts)
        self.starts = [0]
        for _, _, rows, _ in self.parts:
            self.starts.append(self.starts[-1] + len(rows))

    def __len__(self) -> int:
        return self.starts[-1]

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = next(p for p in range(len(self.parts)) if index < self.starts[p + 1])
        return part, index - self.starts[part]

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # a row by its number; slices are not asked for
        part, offset = self._locate(index)
        return self.parts[part][2][offset]

    def place(self, index: int) -> str:
        part, offset = self._locate(index)
        name, word, _, lines = self.parts[part]
        return f"{name} {word} {offset if lines is None else lines[offset]}"


class _ParquetRows(Sequence[dict[str, Any]]):
    """Rows of a table, made into Python objects one at a time: a table is several times smaller than its dicts."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # a row by its number; slices are not asked for
        return self.table.slice(index, 1).to_pylist()[0]


def read_rows(dataset: str, *, split: str = "train", flag: str = "dataset") -> Rows:
    """All rows of `dataset`: a .jsonl, .json or .parquet file, a directory of them, or a Hub name (`name` or `name:subset`).

    Raises ConfigError about `flag`: an unknown path, an unreadable file, every line that is not JSON, a data set without rows.
    """
    kind = kind_of(dataset, flag)
    if kind == "files":
        rows = Rows([_read_file(file, name, flag) for file, name in files_of(Path(dataset), split, flag)])
    else:
        found = saved_by_datasets(dataset, flag) if kind == "saved" else from_hub(dataset, split, flag)
        rows = Rows([(dataset if kind == "hub" else Path(dataset).name, "row", found, None)])
    if not len(rows):
        raise wrong(flag, f"{flag} {dataset!r} has no rows.")
    return rows


def kind_of(dataset: str, flag: str) -> Literal["saved", "files", "hub"]:
    """Where a data set is: a directory of `datasets.save_to_disk`, files, or the Hub. Raises ConfigError for a path that is not there."""
    path = Path(dataset)
    if not dataset:
        raise wrong(flag, f"{flag} is not given: a .jsonl, .json or .parquet file, a directory, or a Hugging Face Hub name.")
    if path.is_dir() and (path / "state.json").is_file():
        return "saved"
    if path.exists():
        return "files"
    if is_path(dataset):
        raise wrong(flag, _no_such_file(flag, path))
    return "hub"


def is_path(name: str) -> bool:
    """Whether a name can only be a path on this machine, there or not: one on the Hub is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name.partition("#")[0]).suffix in SUFFIXES


def plain_name(name: str) -> str:
    """Without the number of rows behind it."""
    plain, _, count = name.rpartition("#")
    return plain if plain and count.isdigit() and not Path(name).exists() else name


def wrong(flag: str, message: str) -> ConfigError:
    return ConfigError([Problem(flags=(flag,), message=message)])


def _no_such_file(flag: str, path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{flag} {str(path)!r} does not exist, nor does its directory."
    beside = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES)[:8]
    there = f"In its directory: {', '.join(beside)}." if beside else "Its directory has no data files."
    return f"{flag} {str(path)!r} does not exist. {there}"


def files_of(path: Path, split: str, flag: str) -> list[tuple[Path, str]]:
    """The data files of a path, each with the name it has in errors. In a directory with files named after the split, only those."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise wrong(flag, f"{flag} {str(path)!r} ends in {path.suffix or 'nothing'!r}. What can be read: {', '.join(SUFFIXES)}.")
        return [(path, path.name)]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith("."))
    if not found:
        raise wrong(flag, f"{flag} {str(path)!r} is a directory without {', '.join(SUFFIXES)} files.")
    of_split = [file for file in found if file.name.startswith(split) or split in file.relative_to(path).parts[:-1]]
    return [(file, str(file.relative_to(path))) for file in of_split or found]


def _read_file(file: Path, name: str, flag: str) -> tuple[str, str, Sequence[dict[str, Any]], Sequence[int] | None]:
    if file.suffix == ".parquet":
        parquet = pyarrow_parquet(flag)
        import psutil  # a plan of other files does without

        with read_as_parquet(name, flag):
            return name, "row", _ParquetRows(_table(parquet, file, name, flag, psutil.virtual_memory().available // 2)), None
    if is_json_array(file):
        return name, "row", _json_array(file, name, flag), None
    rows, lines, bad = [], [], []
    for number, _, text in text_lines(file, name, flag):
        row = row_of(text)
        if isinstance(row, str):
            bad.append((number, row))
        else:
            rows.append(row)
            lines.append(number)
    if bad:
        named = "; ".join(f"line {number}: {reason}" for number, reason in bad[:NAMED_ROWS])
        raise wrong(flag, f"{name} has {len(bad)} line(s) that are not JSON objects: {named}{'; ...' if len(bad) > NAMED_ROWS else ''}")
    return name, "line", rows, lines


def text_lines(file: Path, name: str, flag: str, *, before: int = 0, begin: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """(its number, from 1; the byte behind it; what it holds) of each line that holds something. before: lines that end at `begin`."""
    with file.open("rb") as lines:
        lines.seek(begin)
        end = begin
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE), b""), start=before + 1):
            if len(line) == LONGEST_LINE:
                raise wrong(flag, f"{name} line {number} is longer than {LONGEST_LINE >> 20} MiB, and no line of a data set is.")
            end += len(line)
            if line.strip():
                yield number, end, line


def row_of(text: bytes) -> dict[str, Any] | str:
    """The row that a line holds; or, as a string, why it holds none."""
    try:
        row = json.loads(text.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError; UnicodeDecodeError for bytes that are no UTF-8; too deep
        return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return row if isinstance(row, dict) else f"a {type(row).__name__} where an object with named columns should be"


def _table(parquet: Any, file: Path, name: str, flag: str, room: int) -> Any:
    """The table of a file. A column of one value, a thousand million times, takes a few bytes there: what comes out is counted.

    room: bytes that it may take.
    """
    import pyarrow

    batches: list[Any] = []
    taken = 0
    with parquet.ParquetFile(file) as source:
        for batch in source.iter_batches(batch_size=1024):
            taken += batch.nbytes
            if taken > room:
                read = sum(len(one) for one in batches)
                message = (
                    f"{name} ({file.stat().st_size:,} bytes) holds {source.metadata.num_rows:,} rows, of which {read:,} already take all "
                    f"memory that one file may have: {room:,} bytes, half of what is free. Cut it into smaller data sets."
                )
                raise wrong(flag, message)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, schema=source.schema_arrow)


def is_json_array(file: Path) -> bool:
    """Whether a .json file holds one array. Many hold one object a line, whatever their name."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json_array(file: Path, name: str, flag: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise wrong(flag, f"{name} line {error.lineno} column {error.colno} is not JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8, a number of 5,000 digits; too deep
        raise wrong(flag, f"{name} cannot be read as JSON: {error}.") from error
    bad = [index for index, row in enumerate(rows) if not isinstance(row, dict)]
    if bad:
        raise wrong(flag, f"{name} has {len(bad)} entries that are not objects with named columns; the first is entry {bad[0]}.")
    return rows


@contextmanager
def read_as_parquet(name: str, flag: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise wrong(flag, f"{name} cannot be read as parquet: {said_by(error, first_line)}") from error


def pyarrow_parquet(flag: str) -> Any:
    if find_spec("pyarrow") is None:
        raise wrong(flag, "Reading parquet needs the extra `data`: pip install 'megatron-grpo[data]'.")
    from pyarrow import parquet

    return parquet


def _datasets(flag: str) -> Any:
    if find_spec("datasets") is None:
        raise wrong(flag, "Reading from the Hugging Face Hub needs the extra `data`: pip install 'megatron-grpo[data]'.")
    import datasets

    return datasets


def saved_by_datasets(directory: str, flag: str) -> Any:
    """A data set that `datasets` maps into memory."""
    return _datasets(flag).load_from_disk(directory)


def from_hub(dataset: str, split: str, flag: str, *, streaming: bool = False) -> Any:
    """streaming: what `datasets` reads as it is asked for it, and does not fetch first."""
    datasets = _datasets(flag)
    name, _, subset = dataset.partition(":")
    try:
        return datasets.load_dataset(name, subset or None, split=split, **({"streaming": True} if streaming else {}))
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline, unknown split or subset: datasets has no one base for them
        reason = said_by(error, first_line)
        raise wrong(flag, f"{flag} {dataset!r} is no local path, and the Hub gave: {reason}") from error
