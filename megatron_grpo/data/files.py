"""Read a data set from disk or the Hub as rows: plain dicts in file order, each with a location for error messages.

`read_rows` reads all rows. `open_source` yields rows one after another from any position and holds none. JSON is read with the standard
library; parquet and the Hub need the extra `data`. Nothing here imports torch.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_grpo.base import python_objects
from megatron_grpo.base.errors import config_error, first_line, one_line
from megatron_grpo.base.files import parse_json
from megatron_grpo.data.hub import SUFFIXES, from_hub, is_path, saved_by_datasets

if TYPE_CHECKING:
    import numpy as np

NAMED_ROWS = 5  # number of bad rows that an error lists; the rest are counted
LONGEST_LINE = 64 << 20  # bytes: a file without line ends is not a data set, and must not be read into memory whole
BATCH = 256  # rows of a Parquet file decoded together when it is streamed
BUFFER = 1 << 20  # bytes of each Parquet column read together
Row = dict[str, Any]


class Rows(Sequence[Row]):
    """Rows of one or several data sets in sequence, with the location of each: `data.jsonl line 7`, `part-1.parquet row 7`."""

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[Row], Callable[[int], str]]],
        numbers: np.ndarray | None = None,
        columns: Mapping[str, str] | None = None,
    ):
        """Combine parts into one sequence.

        Args:
            parts: (rows, function that maps a row's number in the part to its location) of each part.
            numbers: Numbers of the rows to use, counted over all parts, in this order. Default: all.
            columns: New column names by the names in the files.
        """
        self._parts, self._ends = parts, list(accumulate(len(rows) for rows, _ in parts))
        self._numbers, self._columns = numbers, columns

    def __len__(self) -> int:
        return self._ends[-1] if self._numbers is None else len(self._numbers)

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (part, number in the part) of a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = index if self._numbers is None else int(self._numbers[index])
        part = bisect_right(self._ends, number)
        return part, number - self._ends[part] + len(self._parts[part][0])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # a row by its number; slices are not asked for
        part, number = self._locate(index)
        row = self._parts[part][0][number]
        return {self._columns.get(name, name): value for name, value in row.items()} if self._columns else row

    def place(self, index: int) -> str:
        """Return the location of a row for error messages.

        Args:
            index: Index of the row, from 0.
        """
        part, number = self._locate(index)
        return self._parts[part][1](number)


def by_row(name: str) -> Callable[[int], str]:
    """Return a function that gives the location of a row in a file without lines.

    Args:
        name: Name of the file.
    """
    return lambda index: f"{name} row {index}"


class _ParquetRows(Sequence[Row]):
    """Rows of a table, converted to Python objects one at a time. A table is several times smaller than its dicts."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # a row by its number; slices are not asked for
        return self.table.slice(index, 1).to_pylist()[0]


class SourceRow(NamedTuple):
    """A row read from a source.

    Args:
        after: Position after the row, from which reading can continue.
        stands: Location of the row for error messages.
        row: The row; or, as a string, the reason why the line holds none.
    """

    after: Any
    stands: str
    row: Row | str


# Maps a position to an iterator over the rows after it. A position is JSON, so that a checkpoint can hold it; None is the beginning.
Source = Callable[[Any], Iterator[SourceRow]]


def read_rows(dataset: str, *, split: str = "train", flag: str = "dataset") -> Rows:
    """Read all rows of a data set.

    Args:
        dataset: A .jsonl, .json or .parquet file, a directory of them, a Hub name (`name` or `name:subset`), or `python:name`.
        split: Split of a Hub data set. In a directory with files named after it, only those are read.
        flag: Setting that names the data set, for error messages.

    Raises:
        ConfigError: If the path does not exist, a file is unreadable, lines are not JSON objects (up to five are listed), or there are no
            rows.
    """
    kind = _kind_of(dataset, flag)
    if kind == "object":
        rows = Rows([(python_objects.get(dataset, flag), by_row(_own_name(dataset)))])
    elif kind == "files":
        rows = Rows([_read_file(file, name, flag) for file, name in _files_of(Path(dataset), split, flag)])
    else:
        hf_dataset = saved_by_datasets(dataset, flag) if kind == "saved" else from_hub(dataset, split, flag)
        rows = Rows([(hf_dataset, by_row(dataset if kind == "hub" else Path(dataset).name))])
    if not len(rows):
        raise config_error(flag, f"{flag} {dataset!r} has no rows.")
    return rows


def open_source(dataset: str, split: str, flag: str) -> Source:
    """Open the same rows as `read_rows` for streaming.

    Args:
        dataset: A path or Hub name, as for `read_rows`.
        split: Split to read.
        flag: Setting that names the data set, for error messages.

    Raises:
        ConfigError: If the path does not exist, or a file cannot be streamed.
    """
    kind = _kind_of(dataset, flag)
    if kind == "object":
        return _mapped(_own_name(dataset), python_objects.get(dataset, flag))
    if kind == "hub":
        return _hub(dataset, lambda: from_hub(dataset, split, flag, streaming=True), flag)
    if kind == "saved":
        return _mapped(Path(dataset).name, saved_by_datasets(dataset, flag))
    return concatenated([_open_file(file, name, flag) for file, name in _files_of(Path(dataset), split, flag)])


def concatenated(sources: Sequence[Source]) -> Source:
    """Concatenate sources. A position is [number of the source, position in it].

    Args:
        sources: Sources in their order.
    """

    def begin(position: Any) -> Iterator[SourceRow]:
        first, inner = position or (0, None)
        for number in range(first, len(sources)):
            for read in sources[number](inner if number == first else None):
                yield read._replace(after=[number, read.after])

    return begin


def _kind_of(dataset: str, flag: str) -> Literal["object", "saved", "files", "hub"]:
    """Determine the kind of a data set: rows of a Python program, a directory of `datasets.save_to_disk`, files, or the Hub.

    Raises:
        ConfigError: If a path does not exist.
    """
    path = Path(dataset)
    if not dataset:
        raise config_error(flag, f"{flag} is missing. Use a .jsonl, .json or .parquet file, a directory, or a Hugging Face Hub name.")
    if python_objects.is_given(dataset):
        return "object"
    if path.is_dir() and (path / "state.json").is_file():
        return "saved"
    if path.exists():
        return "files"
    if not is_path(dataset):
        return "hub"
    if not path.parent.is_dir():
        raise config_error(flag, f"{flag} {str(path)!r} does not exist, and neither does its directory.")
    siblings = sorted(file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES)[:8]
    nearby = f"Data files in its directory: {', '.join(siblings)}." if siblings else "Its directory has no data files."
    raise config_error(flag, f"{flag} {str(path)!r} does not exist. {nearby}")


def plain_name(name: str) -> str:
    """Return a data set name without its `#count` suffix.

    Args:
        name: Name from `--dataset`.
    """
    plain, _, count = name.rpartition("#")
    return plain if plain and count.isdigit() and not Path(name).exists() else name


def _own_name(dataset: str) -> str:
    return dataset.removeprefix(python_objects.PREFIX)


def _files_of(path: Path, split: str, flag: str) -> list[tuple[Path, str]]:
    """List the data files of a path, each with its name for errors.

    If a directory has files named after the split, only those are listed.
    """
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise config_error(flag, f"{flag} {str(path)!r} has an unsupported suffix {path.suffix!r}. Supported: {', '.join(SUFFIXES)}.")
        return [(path, path.name)]
    paths = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file() and not file.name.startswith("."))
    if not paths:
        raise config_error(flag, f"{flag} {str(path)!r} is a directory without {', '.join(SUFFIXES)} files.")
    of_split = [file for file in paths if file.name.startswith(split) or split in file.relative_to(path).parts[:-1]]
    return [(file, str(file.relative_to(path))) for file in of_split or paths]


def _read_file(file: Path, name: str, flag: str) -> tuple[Sequence[Row], Callable[[int], str]]:
    """Read all rows of a file. Return them with a function that gives their locations."""
    if file.suffix == ".parquet":
        parquet = _parquet(flag)
        import psutil  # imported here because `plan` of other files does not need it

        with _read_as_parquet(name, flag):
            return _ParquetRows(_table(parquet, file, name, flag, psutil.virtual_memory().available // 2)), by_row(name)
    if _is_json_array(file):
        return _json_array(file, name, flag), by_row(name)
    rows, lines, faults = [], [], []
    for number, _, row in _lines(file, name, flag):
        if isinstance(row, str):
            faults.append(f"line {number}: {row}")
        else:
            rows.append(row)
            lines.append(number)
    if faults:
        listed = f"{'; '.join(faults[:NAMED_ROWS])}{'; ...' if len(faults) > NAMED_ROWS else ''}"
        raise config_error(flag, f"{name} has {len(faults)} line(s) that are not JSON objects: {listed}")
    return rows, lambda index: f"{name} line {lines[index]}"


def _open_file(file: Path, name: str, flag: str) -> Source:
    """Open a file for streaming. A position is the number of rows before it (parquet), or [lines before it, bytes before it]."""
    if file.suffix == ".parquet":
        _parquet(flag)
        return lambda position: _rows_of_parquet(file, name, flag, position or 0)
    if _is_json_array(file):
        raise config_error(flag, f"{name} is a JSON array, which cannot be streamed. Write one object per line, or leave streaming out.")
    return lambda position: (
        SourceRow([number, end], f"{name} line {number}", row) for number, end, row in _lines(file, name, flag, *(position or (0, 0)))
    )


# ---- JSON


def _lines(file: Path, name: str, flag: str, lines_before: int = 0, begin: int = 0) -> Iterator[tuple[int, int, Row | str]]:
    """Yield (line number from 1, byte offset after the line, row or the reason why it holds none) for each line that is not empty.

    Args:
        lines_before: Number of lines that end at `begin`.
        begin: Byte offset to start from.
    """
    with file.open("rb") as lines:
        lines.seek(begin)
        end = begin
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE), b""), start=lines_before + 1):
            if len(line) == LONGEST_LINE:
                raise config_error(flag, f"{name} line {number} is longer than the maximum of {LONGEST_LINE >> 20} MiB.")
            end += len(line)
            if line.strip():
                yield number, end, _row_of(line)


def _row_of(text: bytes) -> Row | str:
    """Parse the row of a line; return a string with the reason if it holds none."""
    try:
        row = parse_json(text.rstrip(b"\r\n"))
    except ValueError as error:  # JSONDecodeError; UnicodeDecodeError for bytes that are not UTF-8; nesting too deep
        return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return row if isinstance(row, dict) else f"expected an object with named columns, got {type(row).__name__}"


def _is_json_array(file: Path) -> bool:
    """Return whether a .json file holds one array. Many hold one object per line instead."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json_array(file: Path, name: str, flag: str) -> list[Row]:
    try:
        rows = parse_json(file.read_bytes())
    except json.JSONDecodeError as error:
        raise config_error(flag, f"{name} line {error.lineno} column {error.colno} is not JSON: {error.msg}.") from error
    except ValueError as error:  # bytes that are not UTF-8, a number of 5,000 digits; nesting too deep
        raise config_error(flag, f"{name} cannot be read as JSON: {error}.") from error
    invalid = [index for index, row in enumerate(rows) if not isinstance(row, dict)]
    if invalid:
        raise config_error(
            flag, f"{name} has {len(invalid)} entries that are not objects with named columns; the first is entry {invalid[0]}."
        )
    return rows


# ---- Parquet


def _parquet(flag: str) -> Any:
    if find_spec("pyarrow") is None:
        raise config_error(flag, "Reading parquet needs the extra `data`: pip install 'megatron-grpo[data]'.")
    from pyarrow import parquet

    return parquet


@contextmanager
def _read_as_parquet(name: str, flag: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise config_error(flag, f"{name} cannot be read as parquet: {one_line(error, first_line)}") from error


def _table(parquet: Any, file: Path, name: str, flag: str, limit: int) -> Any:
    """Read a parquet file as a table, limited by its size in memory.

    A column that repeats one value 10^9 times takes only a few bytes in the file, so the decoded size is counted.

    Args:
        limit: Limit in bytes.
    """
    import pyarrow

    batches: list[Any] = []
    num_bytes = 0
    with parquet.ParquetFile(file) as source:
        for batch in source.iter_batches(batch_size=1024):
            num_bytes += batch.nbytes
            if num_bytes > limit:
                num_rows = sum(len(batch) for batch in batches)
                raise config_error(flag, (
                    f"{name} ({file.stat().st_size:,} bytes) has {source.metadata.num_rows:,} rows; the first {num_rows:,} already fill "
                    "the "
                    f"memory limit for one file: {limit:,} bytes, half of the free memory. Split it into smaller data sets."
                ))  # fmt: skip
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, schema=source.schema_arrow)


def _rows_of_parquet(file: Path, name: str, flag: str, begin: int) -> Iterator[SourceRow]:
    """Yield rows from number `begin` on. Row groups before it are not read."""
    import psutil

    buffers = {"buffer_size": BUFFER, "pre_buffer": False}  # otherwise a whole row group is read, which may be the whole file
    with _read_as_parquet(name, flag), _parquet(flag).ParquetFile(file, **buffers) as source:
        groups, row = list(range(source.metadata.num_row_groups)), 0
        while groups and row + source.metadata.row_group(groups[0]).num_rows <= begin:
            row += source.metadata.row_group(groups.pop(0)).num_rows
        for batch in source.iter_batches(batch_size=BATCH, row_groups=groups) if groups else ():
            # A column that repeats one value takes only a few bytes in the file.
            limit = psutil.virtual_memory().available // 2
            if batch.nbytes > limit:
                message = f"{name}: rows {row} to {row + len(batch)} take {batch.nbytes:,} bytes, more than half of the free memory."
                raise config_error(flag, message)
            num_skipped = max(0, begin - row)
            for offset, values in enumerate(batch.slice(num_skipped).to_pylist(), start=row + num_skipped):
                yield SourceRow(offset + 1, f"{name} row {offset}", values)
            row += len(batch)


# ---- what `datasets` reads


def _mapped(name: str, rows: Sequence[Row]) -> Source:
    """Open a memory-mapped table for streaming. A position is the number of rows before it."""
    return lambda position: (SourceRow(row + 1, f"{name} row {row}", rows[row]) for row in range(position or 0, len(rows)))


def _hub(name: str, open_it: Callable[[], Any], flag: str) -> Source:
    """Open a Hub data set for streaming. A position is [rows before it, state of the `datasets` iterator]."""

    def begin(position: Any) -> Iterator[SourceRow]:
        row, state = position or (0, None)
        rows = open_it()
        if state is not None:
            rows.load_state_dict(state)
        try:
            for number, values in enumerate(rows, start=row):
                yield SourceRow([number + 1, rows.state_dict()], f"{name} row {number}", values)
        except Exception as error:
            reason = one_line(error, first_line)
            raise config_error(flag, f"Reading {name} from the Hub failed ({type(error).__name__}: {reason}).") from error

    return begin
