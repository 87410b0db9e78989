"""Options passed through to vLLM, Megatron-Core and chat templates: which are allowed, and why others are not. No torch.

Names are checked against the installed packages by reading their source, because importing them would take seconds. Facts about the options
are in `engine_kwargs.yaml`, which is read only if such options are given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_grpo.run.config.remote_code import read_source
from megatron_grpo.run.config.rules import Rule
from megatron_grpo.run.config.table import close_to

FLAGS = ("generation_kwargs", "eval_generation_kwargs", "vllm_engine_kwargs", "megatron_extra_kwargs")
_TEMPLATE_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "conversation",
                 "chat_template", "documents", "padding", "truncation", "max_length", "return_tensors")  # fmt: skip


@cache
def options(flag: str) -> Mapping[str, Any]:
    """Return the entry of a setting of `FLAGS` in `engine_kwargs.yaml`.

    Its `here` is {option: setting}, `refused` {option: reason}, and `fields` {option: annotation} of the installed package, empty if it is
    not installed.
    """
    import yaml

    entry = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[flag]
    return entry | {
        "here": {name: name for name in entry["same"].split()} | entry["here"],
        "refused": {name: reason for reason, names in entry.get("refused", {}).items() for name in names.split()},
        "may": entry.get("may", "").split(),
        "fields": {name: kind for source in entry["fields"] for name, kind in read_class_fields(*source).items() if name[0] != "_"},
    }


def _find_fault(known: Mapping[str, Any], name: str, value: Any) -> str | None:
    """Return why an option is rejected, as the end of a sentence; None if it is allowed."""
    owner, fields = known["what"], known["fields"]
    if fields and name not in fields:
        close = close_to(name, list(fields), limit=1)
        return f"unknown field of {owner}{f'. Did you mean {close[0]}?' if close else '.'}"
    if name in known["refused"]:
        return f"refused: {known['refused'][name]}."
    if known["may"] and name not in known["may"]:
        return f"refused: {known['otherwise']}. Supported: {', '.join(sorted(known['may']))}."
    expected = expected_type(fields.get(name, ""), value)
    return f"{expected} in {owner}, not {value!r}." if expected else None


@cache
def read_class_fields(package: str, file: str, name: str) -> Mapping[str, str]:
    """Return {field: annotation} of a class from the source of an installed package; {} if it is not installed."""
    tree = ast.parse(read_source(package, file) or "")
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return {ast.unparse(line.target): ast.unparse(line.annotation) for line in body if isinstance(line, ast.AnnAssign)}


_PLAIN: Mapping[str, list[type]] = {"int": [int], "float": [int, float], "bool": [bool], "str": [str], "None": [type(None)]}


def expected_type(annotation: str, value: Any) -> str | None:
    """Return the annotation if it consists of plain types and the value has none of them, else None.

    Args:
        annotation: Source text of a type annotation, such as "int | None".
    """
    kinds = [kind.strip() for kind in re.sub(r"^Optional\[(.*)\]$", r"\1 | None", annotation).split("|")]
    is_plain = all(kind in _PLAIN for kind in kinds)
    return annotation if is_plain and not any(type(value) in _PLAIN[kind] for kind in kinds) else None


# ---- rules


def _refused(c: SimpleNamespace) -> Iterator[dict[str, Any]]:
    for flag in FLAGS:
        for name, value in getattr(c, flag).items():
            if setting := options(flag)["here"].get(name):
                yield {"flags": f"{flag} {setting}", "flag": flag, "why": f"{name} is the setting {setting}. Use that setting."}
            elif fault := _find_fault(options(flag), name, value):
                yield {"flags": flag, "flag": flag, "why": f"{name} is {fault}"}


def _find_other_thinking(c: SimpleNamespace) -> dict[str, Any] | None:
    thinks, other = c.enable_thinking, c.chat_template_kwargs.get("enable_thinking", c.enable_thinking)
    return {"thinks": str(thinks).lower(), "other": other} if thinks is not None and other != thinks else None


PASSED_ON = (
    Rule("{flags}", lambda c: list(_refused(c)), "{flag}: {why}"),
    Rule(
        "chat_template_kwargs",
        lambda c: (taken := [name for name in c.chat_template_kwargs if name in _TEMPLATE_OWN]) and {"taken": ", ".join(taken)},
        "chat_template_kwargs: {taken} is set by this package for each prompt. Omit it.",
    ),
    Rule(
        "enable_thinking chat_template_kwargs",
        _find_other_thinking,
        "enable_thinking ({thinks}) and chat_template_kwargs enable_thinking={other} differ. Use one of them.",
    ),
)
