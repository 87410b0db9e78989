"""Read a data set from disk or the Hub as rows: plain dicts in file order, each with a location for error messages.

`read_rows` reads all rows. `open_source` yields rows one after another from any position and holds none; all rows are such a source too.
JSON is read with the standard library; parquet and the Hub need the extra `data`. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megatron_grpo.core.base.errors import config_error, first_line, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run import python_objects

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".jsonl", ".json", ".parquet")  # of data set files
# Of files that are not read here, but are not names on the Hub either.
_OTHER_SUFFIXES = tuple(".csv .tsv .txt .ndjson .arrow .feather .xlsx .zip .gz .zst .bz2 .xz .tar .yaml .yml .py .pkl .bin .gguf".split())
NAMED_ROWS = 5  # number of bad rows that an error lists; the rest are counted
LONGEST_LINE = 64 << 20  # bytes: a file without line ends is not a data set, and must not be read into memory whole
BATCH = 256  # rows of a Parquet file decoded together when it is streamed
BUFFER = 1 << 20  # bytes of each Parquet column read together
MOST_EXAMINED = 256 << 20  # bytes of a file that are read together to find out why its first line is no row
_SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "testing", "eval")}
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # that `datasets` writes beside rows
_CONTENTS = (  # first bytes of a file, what it is, and what helps
    (b"PAR1", "is Parquet. Rename it to .parquet"), (b"\x1f\x8b", "is compressed. Use gunzip"), (b"PK\x03\x04", "is an archive. Use unzip"),
    (b"\x28\xb5\x2f\xfd", "is compressed. Use unzstd"), (b"ARROW1", "is an Arrow file. Write it with Dataset.to_parquet"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data. Use git lfs pull"),
    (b"<", "is HTML or XML. Download the file itself, not a page that shows it"),
    *((mark, "is UTF-16. Use iconv -f UTF-16 -t UTF-8 {name} > utf8-{name}") for mark in (b"\xff\xfe", b"\xfe\xff")),
    (b"{\0", "is UTF-16. Use iconv -f UTF-16LE -t UTF-8 {name} > utf8-{name}"),
)  # fmt: skip
Row = dict[str, Any]
ABSENT = object()  # the value of a column that a row does not have
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns that the chat template receives
IMAGE_COLUMNS = ("images", "image")
_CHATS = ("prompt", "messages")
_ROLE, _ROLES = frozenset({"role", "from"}), {"human": "user", "gpt": "assistant"}  # ShareGPT's names


class RawRow(NamedTuple):
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
Source = Callable[[Any], Iterator[RawRow]]


class ConcatRows(Sequence[Row]):
    """Rows of one or several data sets in sequence, with the location of each: `data.jsonl line 7`, `part-1.parquet row 7`.

    They are a `Source` too; a position is the number of rows before it.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[Row], Callable[[int], str]]],
        numbers: np.ndarray | None = None,
        convert: Callable[[Row], Row] | None = None,
    ):
        """Combine parts into one sequence.

        Args:
            parts: (rows, function that maps a row's number in the part to its location) of each part.
            numbers: Numbers of the rows to use, counted over all parts, in this order. Default: all.
        """
        self._parts, self._ends = parts, list(accumulate(len(rows) for rows, _ in parts))
        self._numbers, self._convert = numbers, convert

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
        return row if self._convert is None else self._convert(row)

    def place(self, index: int) -> str:
        """Return the location of a row for error messages."""
        part, number = self._locate(index)
        return self._parts[part][1](number)

    def select(self, numbers: np.ndarray) -> ConcatRows:
        """Return the rows with these numbers, in this order.

        Args:
            numbers: Numbers of rows, from 0.
        """
        return ConcatRows([(self, self.place)], numbers)

    def convert(self, convert: Callable[[Row], Row]) -> ConcatRows:
        """Return the rows, each converted when it is asked for."""
        return ConcatRows([(self, self.place)], convert=convert)

    def __call__(self, position: Any) -> Iterator[RawRow]:
        for index in range(position or 0, len(self)):
            yield RawRow(index + 1, self.place(index), self[index])


def nested_value(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a key inside one (`reward_model.ground_truth`); ABSENT if the row has none."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if value is not None:
            value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def images_of_row(row: Mapping[str, Any]) -> list[Any]:
    """Return the contents of a row's image column; an empty list if it has no images."""
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if isinstance(value, (list, tuple)):
            return list(value)
        if value is not None and value != "":
            return [value]
    return []


def convert_row(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with its columns and chats in this package's form.

    Chats may be JSON text, have null keys (Parquet writes them) or ShareGPT's names (`conversations`, `from`, `value`, human, gpt).
    """
    new_row = {columns.get(name, name): value for name, value in row.items()}
    nested = {new: nested_value(row, name) for name, new in columns.items() if name not in row}
    new_row |= {new: value for new, value in nested.items() if value is not ABSENT}
    if "conversations" in new_row and new_row.get("prompt") is None and new_row.get("messages") is None:
        new_row["messages"] = new_row.pop("conversations")
    for name in _CHATS:
        if new_row.get(name) is not None:
            new_row[name] = _chat(new_row[name])
    for name in TEMPLATE_COLUMNS:
        if new_row.get(name):
            new_row[name] = _without_nulls(_from_json(new_row[name]))
    return new_row


def _chat(value: Any) -> Any:
    """Return a chat in this package's form, and anything else unchanged."""
    messages = _from_json(value) or ()
    is_chat = isinstance(messages, (list, tuple)) and all(isinstance(entry, Mapping) and entry.keys() & _ROLE for entry in messages)
    return [_message(message) for message in messages] if is_chat and messages else value


def _message(values: Mapping[str, Any]) -> dict[str, Any]:
    renamed = values if "role" in values else {{"from": "role", "value": "content"}.get(key, key): value for key, value in values.items()}
    message = {key: _without_nulls(value) for key, value in renamed.items() if value is not None or key == "content"}
    role = message.get("role")
    return message | ({"role": _ROLES[role.lower()]} if isinstance(role, str) and role.lower() in _ROLES else {})


def _from_json(value: Any) -> Any:
    """Parse a list or an object that is given as JSON text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):
            return parse_json(value)
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def by_row(name: str) -> Callable[[int], str]:
    """Return a function that gives the location of a row in a file without lines."""
    return lambda index: f"{name} row {index}"


class _ParquetRows(Sequence[Row]):
    """Rows of a table, converted to Python objects one at a time. A table is several times smaller than its dicts."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]  # a row by its number; slices are not asked for
        return self.table.slice(index, 1).to_pylist()[0]


def read_rows(dataset: str, *, split: str = "train", flag: str = "dataset") -> ConcatRows:
    """Read all rows of a data set.

    Args:
        dataset: A .jsonl, .json or .parquet file, a directory of them, a Hub name (`name` or `name:subset`), or `python:name`.
        split: Split of a data set with several. "": test, or the only one.

    Raises:
        ConfigError: If the path does not exist, a file is unreadable, lines are not JSON objects (up to five are listed), or there are no
            rows.
    """
    kind, path = _determine_kind(dataset, flag), Path(dataset)
    if kind == "files":
        rows = ConcatRows([_read_file(file, name, flag) for file, name in _list_files(path, split, flag)])
    elif kind == "object":
        rows = ConcatRows([(python_objects.get(dataset, flag), by_row(dataset.removeprefix(python_objects.PREFIX)))])
    else:
        from megatron_grpo.run.data.hub import from_hub, saved_by_datasets

        read, name = (saved_by_datasets, path.name) if kind == "saved" else (from_hub, dataset)
        rows = ConcatRows([(read(dataset, split, flag), by_row(name))])
    if not len(rows):
        raise config_error(flag, f"{flag} {dataset!r} has no rows.")
    return rows


def open_source(dataset: str, split: str, flag: str) -> Source:
    """Open the same rows as `read_rows` for streaming.

    Args:
        dataset: A path or Hub name, as for `read_rows`.

    Raises:
        ConfigError: If the path does not exist, or a file cannot be streamed.
    """
    kind = _determine_kind(dataset, flag)
    if kind == "hub":
        from megatron_grpo.run.data.hub import stream_hub

        return stream_hub(dataset, split, flag)
    if kind == "files":
        return concatenated([_open_file(file, name, flag) for file, name in _list_files(Path(dataset), split, flag)])
    return read_rows(dataset, split=split, flag=flag)  # a table that is mapped into memory, or rows that a program holds


def concatenated(sources: Sequence[Source]) -> Source:
    """Concatenate sources. A position is [number of the source, position in it].

    Args:
        sources: Sources in their order.
    """

    def begin(position: Any) -> Iterator[RawRow]:
        first, inner = position or (0, None)
        for number in range(first, len(sources)):
            for read in sources[number](inner if number == first else None):
                yield read._replace(after=[number, read.after])

    return begin


def is_path(name: str) -> bool:
    """Return whether a name can only be local, existing or not: a path, or an object of a program. A Hub name is `name` or `owner/name`.

    Args:
        name: Name from `--dataset` or `--model`.
    """
    return (
        python_objects.is_given(name)
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or Path(name.partition("#")[0].lower()).suffix in (*SUFFIXES, *_OTHER_SUFFIXES)
    )


def _determine_kind(dataset: str, flag: str) -> Literal["object", "saved", "files", "hub"]:
    """Determine the kind of a data set: rows of a Python program, a directory of `datasets.save_to_disk`, files, or the Hub.

    Raises:
        ConfigError: If a path does not exist.
    """
    path = Path(dataset)
    if not dataset:
        raise config_error(flag, f"{flag} is missing. Use a .jsonl, .json or .parquet file, a directory, or a Hugging Face Hub name.")
    if python_objects.is_given(dataset):
        return "object"
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
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


def has_splits(dataset: str, flag: str) -> bool:
    """Return whether a data set may have several splits: one file and the rows of a program have none.

    Args:
        dataset: A path or Hub name, as for `read_rows`.

    Raises:
        ConfigError: If the path does not exist.
    """
    path = Path(dataset)
    return _determine_kind(dataset, flag) != "object" and not path.is_file() and not (path / "state.json").is_file()


def split_count(name: str) -> tuple[str, int | None]:
    """Split the name of a data set, `name#n`, into (name, n); n is None without such a suffix.

    Args:
        name: Name from `--dataset`.
    """
    plain, _, count = name.rpartition("#")
    return (plain, int(count)) if plain and count.isdigit() and not Path(name).exists() else (name, None)


def _list_files(path: Path, split: str, flag: str) -> list[tuple[Path, str]]:
    """List the data files of a path, each with its name for errors. Of a directory with several splits, only those of one are listed."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise config_error(flag, f"{flag} {str(path)!r} has an unsupported suffix {path.suffix!r}. Supported: {', '.join(SUFFIXES)}.")
        return [(path, path.name)]
    names = [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
    names = [name for name in names if Path(name).name not in _METADATA and not any(part.startswith(".") for part in Path(name).parts)]
    if not names:
        raise config_error(flag, f"{flag} {str(path)!r} is a directory without {', '.join(SUFFIXES)} files.")
    split = next((known for known, words in _SPLITS.items() if split in words), split)
    known_splits = dict.fromkeys([*filter(None, [split]), *_SPLITS])
    by_split = {known: split_files for known in known_splits if (split_files := [name for name in names if _is_named_after(known, name)])}
    unnamed_files = [name for name in names if not any(_is_named_after(known, name) for known in known_splits)]
    # Files that are named after no split are trained; their directories are not configurations.
    if unnamed_files and "train" not in by_split:
        by_split["train"] = unnamed_files
    split = choose_split(list(by_split), split, str(path), flag)
    split_files = by_split[split]
    if split_files is not unnamed_files and len(configurations := sorted({_configuration(split, name) for name in split_files})) > 1:
        listed = f"{', '.join(name or '.' for name in configurations)}), whose rows would be mixed. Use {path / configurations[-1]}"
        raise config_error(flag, f"{flag} {str(path)!r} has several configurations ({listed}.")
    return [(path / name, name) for name in split_files]


def choose_split(splits: Sequence[str], split: str, dataset: str, flag: str) -> str:
    """Return the split of a data set that is read.

    Args:
        split: Requested split. "", the default of held-out sets: test, or the only one.

    Raises:
        ConfigError: If the data set does not have the split.
    """
    chosen = split or (splits[0] if len(splits) == 1 else "test")
    if chosen in splits:
        return chosen
    is_held_out = flag.startswith("eval_")
    setting = "eval_dataset_split" if is_held_out else "dataset_split"
    use = next((name for name in splits if name != "train"), splits[0]) if is_held_out else splits[0]
    message = f"{flag} {dataset!r} has no split {chosen}; it has {', '.join(splits)}. Use {setting} {use}."
    raise config_error((setting, flag), message)


def _is_named_after(split: str, name: str) -> bool:
    words = "|".join(map(re.escape, _SPLITS.get(split, (split,))))
    return re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", name, re.IGNORECASE) is not None


def _configuration(split: str, name: str) -> str:
    """Return the directories of a file above the one that is named after its split: a configuration of the Hub's layout."""
    parents = Path(name).parts[:-1]
    return "/".join(parents[: next((i for i, part in enumerate(parents) if _is_named_after(split, part)), len(parents))])


def _read_file(file: Path, name: str, flag: str) -> tuple[Sequence[Row], Callable[[int], str]]:
    """Read all rows of a file. Return them with a function that gives their locations."""
    if file.suffix == ".parquet":
        parquet = _parquet(flag)
        import psutil  # imported here because `plan` of other files does not need it

        with _read_as_parquet(name, flag):
            return _ParquetRows(_table(parquet, file, name, flag, psutil.virtual_memory().available // 2)), by_row(name)
    if _is_json_array(file, name, flag):
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
    if _is_json_array(file, name, flag):
        raise config_error(flag, f"{name} is a JSON array, which cannot be streamed. Write one object per line, or leave streaming out.")
    return lambda position: (
        RawRow([number, end], f"{name} line {number}", row) for number, end, row in _lines(file, name, flag, *(position or (0, 0)))
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
        end, has_row = begin, False
        for number, line in enumerate(iter(partial(lines.readline, LONGEST_LINE), b""), start=lines_before + 1):
            if len(line) == LONGEST_LINE:
                raise config_error(flag, f"{name} line {number} is longer than the maximum of {LONGEST_LINE >> 20} MiB.")
            end += len(line)
            if line.strip():
                row = _parse_row(line)
                if isinstance(row, str) and not begin and not has_row and (reason := _shape_of_rows(file)):
                    raise config_error(flag, f"{name} {reason}.")
                has_row = True
                yield number, end, row


def _parse_row(text: bytes) -> Row | str:
    """Parse the row of a line; return a string with the reason if it holds none."""
    try:
        row = parse_json(text.rstrip(b"\r\n"))
    except ValueError as error:  # JSONDecodeError; UnicodeDecodeError for bytes that are not UTF-8; nesting too deep
        return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
    return row if isinstance(row, dict) else f"expected an object with named columns, got {type(row).__name__}"


def _is_json_array(file: Path, name: str, flag: str) -> bool:
    """Return whether a file holds one array, whatever its suffix, instead of one object per line.

    Raises:
        ConfigError: If its first bytes show that it is no JSON in UTF-8.
    """
    with file.open("rb") as content:
        head = content.read(4096)
    if fault := next((fault for begin, fault in _CONTENTS if head.startswith(begin)), None):
        raise config_error(flag, f"{name} {fault.format(name=file.name)}.")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return text.startswith(b"[") and (file.suffix == ".json" or text[1:].lstrip()[:1] == b"{")


def _shape_of_rows(file: Path) -> str:
    """Describe what a file whose first line is no row holds instead, with the command that helps; "" if that is unknown."""
    with file.open("rb") as content:
        text = content.read(MOST_EXAMINED).decode("utf-8-sig", errors="replace").lstrip()
    if text.startswith("{'"):
        return "has rows in the notation of Python, not JSON. Write them with json.dumps"
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict) or "\n" not in text[:end]:
        return ""
    lists = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if not lists or "messages" in lists or "prompt" in value or text[end:].strip():
        return f"has an object over several lines ({', '.join(value)}), not one per line. Use jq -c . {file.name} > rows.jsonl"
    return f"has one object, whose {lists[0]} is a list of rows. Use jq -c '.{lists[0]}[]' {file.name} > rows.jsonl"


def _json_array(file: Path, name: str, flag: str) -> list[Row]:
    try:
        rows = parse_json(file.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and file.suffix == ".jsonl":
            message = f"{name} has a list on each line, not an object. Use jq -c '{{messages: .}}' {file.name} > rows.jsonl."
            raise config_error(flag, message) from error
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


def import_extra(module: str, source: str, flag: str) -> Any:
    """Return a module of the extra `data`.

    Args:
        source: What is read with it, for the ConfigError if it is not installed.
    """
    if find_spec(module.partition(".")[0]) is None:
        raise config_error(flag, f"Reading {source} needs the extra `data`: pip install 'megatron-grpo[data]'.")
    return importlib.import_module(module)


_parquet = partial(import_extra, "pyarrow.parquet", "parquet")


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
                message = (
                    f"{name} ({file.stat().st_size:,} bytes) has {source.metadata.num_rows:,} rows; the first {num_rows:,} already fill "
                    f"the memory limit for one file: {limit:,} bytes, half of the free memory. Split it into smaller data sets."
                )
                raise config_error(flag, message)
            batches.append(batch)
        return pyarrow.Table.from_batches(batches, schema=source.schema_arrow)


def _rows_of_parquet(file: Path, name: str, flag: str, begin: int) -> Iterator[RawRow]:
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
                yield RawRow(offset + 1, f"{name} row {offset}", values)
            row += len(batch)
