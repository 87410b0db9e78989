"""Code files that the settings files of a model's folder name. They are read, not run. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.files import read_object

TOKENIZER, CONFIG = "tokenizer_config.json", "config.json"
# Classes that transformers and vLLM load through these files for a model that is trained here.
_RUN = {
    TOKENIZER: ("AutoTokenizer", "AutoProcessor"),
    CONFIG: ("AutoConfig",),
    "preprocessor_config.json": ("AutoProcessor", "AutoImageProcessor"),
    "processor_config.json": ("AutoProcessor", "AutoImageProcessor"),
}
_CLASS = re.compile(r"([\w-]+)\.\w+")  # in a file of the folder; anything else is in another repository, or invalid
_RELATIVE = re.compile(r"^\s*(?:from\s+\.([\w-]+)\s+import|import\s+\.([\w-]+)\s*$)", re.M)  # as transformers finds them


def files_named(folder: Path) -> list[str]:
    """Return the names of all code files that the model refers to, including those that never run here. Copies of the model need them.

    Args:
        folder: Directory of the model.
    """
    return _with_imported(folder, [name for file in _RUN for name in _auto_map(folder, file).values()])


def _auto_map(folder: Path, file: str) -> dict[str, str]:
    """Return the `auto_map` of a settings file, such as {"AutoTokenizer": "tokenization_x.X"}.

    Of a slow and a fast tokenizer it contains the one that transformers loads.
    """
    entries: Any = read_object(folder / file).get("auto_map")
    auto_map = {"AutoTokenizer": entries} if isinstance(entries, list) else entries if isinstance(entries, dict) else {}
    chosen = {
        auto_class: next((x for x in reversed(value) if x), None) if isinstance(value, list) else value
        for auto_class, value in auto_map.items()
    }
    return {auto_class: value for auto_class, value in chosen.items() if isinstance(value, str)}


def _with_imported(folder: Path, classes: list[str]) -> list[str]:
    """Return the files of classes, and the files of the folder that they import, as far as they exist."""
    waiting = [parts[1] for name in classes if (parts := _CLASS.fullmatch(name))]
    files: dict[str, None] = {}
    while waiting:
        path = folder / f"{waiting.pop(0)}.py"
        if path.name not in files and path.is_file():
            files[path.name] = None
            waiting += _imported(path)
    return list(files)


def _imported(path: Path) -> Iterator[str]:
    for names in _RELATIVE.findall(path.read_text(encoding="utf-8", errors="replace")):
        yield from filter(None, names)
