"""Make the tables of docs/composition.md: which pairs of features the rules of `plan` and `train` accept.

`tools/compatibility.yaml` lists the features. `python tools/docs.py write` writes the page.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.commands.compat import DIALECTS
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.check import check_parsed
from megatron_grpo.run.config import parse

TEXT, VISION = "Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"
SIZES = "--world_size 8 --micro_batch_size 2 --global_batch_size 64 --num_generations 4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Feature: the settings that enable it, and the architecture that it needs.

    Args:
        name: Name in the table.
        typed: Settings, as on the command line.
        page: Page below docs/.
        model: Architecture.
    """

    name: str
    typed: str
    page: str
    model: str = TEXT

    def combine_with(self, other: Feature) -> tuple[str, str] | None:
        """Return (architecture, settings) of both features; None if no architecture has both."""
        models = {self.model, other.model} - {TEXT} or {TEXT}
        return (models.pop(), f"{self.typed} {other.typed}") if len(models) == 1 else None


def read_features() -> list[Feature]:
    """Return the features in the order of the table."""
    return [Feature(**row) for row in _read_table()["features"]]


def read_refused_with_images() -> dict[str, str]:
    """Return the reason, by feature, why it is refused for rows with images."""
    return _read_table()["refused_with_images"]


def _read_table() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def make_configs() -> dict[str, Mapping]:
    """Return the config.json of each architecture that features need."""
    from tests.unit.test_composition import COMMON, MODELS
    from tests.unit.weights.test_vision import QWEN2_5_VL_7B

    return {name: {"architectures": [name], **COMMON, **sizes} for name, sizes in MODELS.items()} | {
        QWEN2_5_VL_7B["architectures"][0]: QWEN2_5_VL_7B
    }


def find_problems(model: str, typed: str) -> list[str]:
    """Return the error messages for some settings; empty if they are accepted.

    Args:
        model: Path of a config.json.
        typed: Settings, as on the command line.
    """
    given: dict[str, list[str]] = {}
    for word in f"{SIZES} {typed}".split():
        if word.startswith("--"):
            values = given[word] = []
        else:
            values.append(word)
    parsed = parse([*(word for flag in given for word in (flag, *given[flag])), "--model", model], dialects=lambda: DIALECTS)
    try:
        check_parsed(parsed)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    return []


@cache
def find_refusals() -> dict[tuple[int, int], list[str] | None]:
    """Return the error messages of each pair of features, by their indices; None if no architecture has both.

    The pair (k, k) is feature k alone.
    """
    rows, here = read_features(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, config in make_configs().items():
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").write_text(json.dumps(config))
        os.chdir(folder)  # so that messages contain a short path of the model
        try:
            found = {(k, k): find_problems(row.model, row.typed) for k, row in enumerate(rows)}
            for (i, one), (j, other) in combinations(enumerate(rows), 2):
                both = one.combine_with(other)
                found[i, j] = None if both is None else find_problems(*both)
        finally:
            os.chdir(here)
    return found


def make_tables() -> str:
    """Return the generated part of docs/composition.md: the table of pairs, and the reasons of the refusals."""
    rows, found, with_images = read_features(), find_refusals(), read_refused_with_images()
    reasons: dict[str, list[str]] = {}
    lines = [
        '<div class="compact" markdown>',
        "",
        f"| | |{'|'.join(str(k + 1) for k in range(len(rows)))}|",
        f"|---|---|{'|'.join(['---'] * len(rows))}|",
    ]
    for j, other in enumerate(rows):
        cells = []
        for i, one in enumerate(rows[:j]):
            messages = found[i, j]
            if one.model == VISION and other.name in with_images:
                messages = [f"Rows have images, but {with_images[other.name]}."]
            cells.append("–" if messages is None else "✗" if messages else "✓")
            if messages:
                reasons.setdefault(messages[0], []).append(f"{one.name} × {other.name}")
        lines.append(f"|{j + 1}|[{other.name}]({other.page})|{'|'.join([*cells, ''])}{'|' * (len(rows) - j)}")
    lines += ["", "</div>", "", "## Refused pairs", ""]
    lines += [f"* **{'; '.join(pairs)}**: {message}" for message, pairs in reasons.items()]
    return "\n".join(lines)
