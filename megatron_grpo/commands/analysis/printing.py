"""Output of the analysis commands on standard output. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def print_report(result: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    """Print the findings on standard output.

    Args:
        as_json: Print the object instead of the lines.
    """
    print(json.dumps(_finite(result), indent=1) if as_json else "\n".join(lines), flush=True)


def table_lines(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Align the cells of a table; a cell that is not on the left is a number.

    Args:
        rows: Cells of each row, the heading first.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))] for row in rows]
    return ["  ".join(cells).rstrip() for cells in aligned]


def format_columns(columns: Mapping[str, str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Align the cells of a table whose columns have fixed widths.

    Args:
        columns: Format of the numbers in each column by its heading, such as `>9.4f`; the part before the point is that of texts too.
        rows: Numbers and texts of each row; None is shown as `-`.
    """
    return ["".join(format_cell(value, columns[name]) for name, value in zip(columns, row, strict=True)) for row in (columns, *rows)]


def format_cell(value: Any, numbers: str) -> str:
    """Format a number or a text; None is `-`.

    Args:
        value: Number, text or None.
        numbers: Format of numbers; the part before the point is that of texts too.
    """
    text = "-" if value is None else value
    return format(text, numbers.partition(".")[0] if isinstance(text, str) else numbers)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by strings, because JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
