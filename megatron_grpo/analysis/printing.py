"""Output of the analysis commands on standard output. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def print_report(result: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> None:
    """Print the findings on standard output.

    Args:
        result: Findings as one object.
        lines: Findings as lines of text.
        as_json: Print the object instead of the lines.
    """
    print(json.dumps(_finite(result), indent=1) if as_json else "\n".join(lines), flush=True)


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by strings, because JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
