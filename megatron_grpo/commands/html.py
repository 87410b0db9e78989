"""HTML tables for notebooks (`_repr_html_`)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any


def table(title: str, rows: Mapping[str, Any]) -> str:
    """Return a table of names and values with a caption. All text is escaped."""
    return grid(title, (), [(name, value) for name, value in rows.items()])


def grid(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with a caption. All text is escaped.

    Args:
        heads: Column names; empty for none.
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(_text(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
