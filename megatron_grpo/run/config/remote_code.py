"""Code in a model's folder: which files `trust_remote_code` allows to run, and what cannot be read without them. No torch.

Files are read, not run. Which classes transformers and vLLM provide themselves is read from their installed sources, because importing them
would take seconds. A model's own layers (`AutoModel...`) never run: families are built here by name.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import Problem, problem_with
from megatron_grpo.core.base.files import read_object

FLAG = "trust_remote_code"
TOKENIZER, CONFIG = "tokenizer_config.json", "config.json"
# Classes that transformers and vLLM load through these files for a model that is trained here.
_RUN = {
    TOKENIZER: ("AutoTokenizer", "AutoProcessor"),
    CONFIG: ("AutoConfig",),
    "preprocessor_config.json": ("AutoProcessor", "AutoImageProcessor"),
    "processor_config.json": ("AutoProcessor", "AutoImageProcessor"),
}
# What the class of a settings file is for, its name in `auto_map`, the key of its kind, and the installed sources that name the kinds which
# need no code. A configuration that only the folder has would keep vLLM from starting.
_PROVIDED = {
    TOKENIZER: ("the tokenizer", "AutoTokenizer", "tokenizer_class",
                [("transformers", "models/auto/tokenization_auto.py"), ("transformers", "__init__.py")]),
    CONFIG: ("the configuration", "AutoConfig", "model_type",
             [("transformers", "models/auto/auto_mappings.py"), ("vllm", "transformers_utils/config.py")]),
}  # fmt: skip
_CLASS = re.compile(r"([\w-]+)\.\w+")  # in a file of the folder; anything else is in another repository, or invalid
_RELATIVE = re.compile(r"^\s*(?:from\s+\.([\w-]+)\s+import|import\s+\.([\w-]+)\s*$)", re.M)  # as transformers finds them


def files_named(folder: Path) -> list[str]:
    """Return the names of all code files that the model refers to, including those that never run here. Copies of the model need them."""
    return _with_imported(folder, [name for file in _RUN for name in _auto_map(folder, file).values()])


def files_that_run(folder: Path) -> list[str]:
    """Return the names of a model's files whose code runs with `trust_remote_code true`, including those that they import."""
    return _with_imported(folder, [name for file in _RUN for name in _classes(folder, file).values()])


def find_code_problem(folder: Path, *, is_trusted: bool, flag: str = "model") -> Problem | None:
    """Return the problem with a model's own code: it is needed but not trusted, or trusted but missing.

    Args:
        is_trusted: Value of `trust_remote_code`.
    """
    return _not_here(folder, flag) if is_trusted else _not_trusted(folder, flag)


def make_code_warning(folder: Path) -> str | None:
    """Return a warning that names the files that will run; None without any."""
    files = files_that_run(folder)
    runs = "runs" if len(files) == 1 else "run"
    return f"{FLAG}: {_listed(files)} of {folder} {runs} with your permissions. Read {_pronoun(files)} first." if files else None


def _not_trusted(folder: Path, flag: str) -> Problem | None:
    names: dict[str, str] = {}
    for file, (use, auto_class, key, sources) in _PROVIDED.items():
        kind = read_object(folder / file).get(key)
        is_provided = isinstance(kind, str) and any(_is_named(kind, *source) for source in sources)
        if not is_provided and (name := _classes(folder, file).get(auto_class)):
            names[use] = name
    if not names:
        return None
    files = files_that_run(folder) or sorted(set(names.values()))
    message = (
        f"{flag}: {' and '.join(names)} of {folder} {'is' if len(names) == 1 else 'are'} custom code ({_listed(files)}), which is not run. "
        f"Read {_pronoun(files)}; if you trust {_pronoun(files)}, use {FLAG} true."
    )
    return problem_with((flag, FLAG), message)


def _not_here(folder: Path, flag: str) -> Problem | None:
    for file in _RUN:
        for name in _classes(folder, file).values():
            parts, last = _CLASS.fullmatch(name), name.rpartition("--")[2].rpartition("/")[2]
            if parts and (folder / f"{parts[1]}.py").is_file():
                continue
            reason = (
                f"{parts[1]}.py, which is missing. Copy it from the source of the model."
                if parts
                else f"code in another place ({name}), which is not downloaded. Copy its file into the folder, and write {last} there."
            )
            return problem_with((flag, FLAG), f"{flag}: {file} of {folder} refers to {reason}")
    return None


def _is_named(word: str, package: str, file: str) -> bool:
    """Return whether a source file of an installed package contains this name; true if the package is not installed."""
    source, name = read_source(package, file), re.escape(word.removesuffix("Fast"))
    return source is None or re.search(rf"""["']{name}(?:Fast)?["']|^ +{name}=""", source, re.M) is not None


@cache
def read_source(package: str, file: str) -> str | None:
    """Return the text of a file of an installed package, which is not imported; None if it is not there."""
    spec = find_spec(package)
    paths = [Path(folder) / file for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)


def _classes(folder: Path, file: str) -> dict[str, str]:
    """Return the classes of a settings file that run here. Processors run only for vision-language models."""
    auto_map, is_multimodal = _auto_map(folder, file), "vision_config" in read_object(folder / CONFIG)
    return {name: auto_map[name] for name in _RUN[file] if name in auto_map and (is_multimodal or "Processor" not in name)}


def _auto_map(folder: Path, file: str) -> dict[str, str]:
    """Return the `auto_map` of a settings file, such as {"AutoTokenizer": "tokenization_x.X"}.

    Of a slow and a fast tokenizer it contains the one that transformers loads.
    """
    entries: Any = read_object(folder / file).get("auto_map")
    auto_map = {"AutoTokenizer": entries} if isinstance(entries, list) else entries if isinstance(entries, dict) else {}
    last = {name: [*filter(None, value)][-1:] if isinstance(value, list) else [value] for name, value in auto_map.items()}
    return {name: value for name, values in last.items() for value in values if isinstance(value, str)}


def _with_imported(folder: Path, classes: list[str]) -> list[str]:
    """Return the files of classes, and the files of the folder that they import, as far as they exist."""
    waiting = [parts[1] for name in classes if (parts := _CLASS.fullmatch(name))]
    files: dict[str, None] = {}
    while waiting:
        path = folder / f"{waiting.pop(0)}.py"
        if path.name not in files and path.is_file():
            files[path.name] = None
            imported = _RELATIVE.findall(path.read_text(encoding="utf-8", errors="replace"))
            waiting += [name for pair in imported for name in pair if name]
    return list(files)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _pronoun(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
