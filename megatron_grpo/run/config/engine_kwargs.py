"""Options passed through to vLLM, Megatron-Core and chat templates: which are allowed, and why others are not. No torch.

Names are checked against the installed packages by reading their source, because importing them would take seconds. Facts about the options
are in `engine_kwargs.yaml`, which is read only if such options are given.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Facts about the options of another package that one setting accepts.

    Args:
        what: Name of what they belong to, for messages.
        here: Options that have a setting here, and its name.
        refused: Options that are rejected, with the reason.
        may: The only options that are allowed; None allows all that are known and not rejected.
        otherwise: Reason why others are not allowed.
        fields: Options of the installed package with their annotations; empty if it is not installed.
    """

    what: str
    here: Mapping[str, str]
    refused: Mapping[str, str]
    may: Collection[str] | None
    otherwise: str
    fields: Mapping[str, str]

    def wrong(self, name: str, value: Any) -> str | None:
        """Return why an option is rejected, as the end of a sentence; None if it is allowed."""
        if (self.fields and name not in self.fields) or name.startswith("_"):
            close = close_to(name, [field for field in self.fields if not field.startswith("_")], limit=1)
            return f"unknown field of {self.what}{f'. Did you mean {close[0]}?' if close else '.'}"
        if name in self.refused:
            return f"refused: {self.refused[name]}."
        if self.may is not None and name not in self.may:
            return f"refused: {self.otherwise}. Supported: {', '.join(sorted(self.may))}."
        expected = expected_type(self.fields.get(name, ""), value)
        return f"{expected} in {self.what}, not {value!r}." if expected else None


@cache
def options(flag: str) -> Options:
    """Return the facts about a setting of `FLAGS`."""
    import yaml

    entry = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))[flag]
    return Options(
        what=entry["what"],
        here={**{name: name for name in entry["same"].split()}, **entry["here"]},
        refused={name: group["why"] for group in entry.get("refused", ()) for name in group["names"].split()},
        may=entry["may"].split() if "may" in entry else None,
        otherwise=entry.get("otherwise", ""),
        fields={name: annotation for source in entry["fields"] for name, annotation in read_class_fields(*source).items()},
    )


@cache
def read_class_fields(package: str, file: str, name: str) -> Mapping[str, str]:
    """Return {field: annotation} of a class from the source of an installed package; {} if it is not installed."""
    tree = ast.parse(read_source(package, file) or "")
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return {ast.unparse(line.target): ast.unparse(line.annotation) for line in body if isinstance(line, ast.AnnAssign)}


_PLAIN: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}


def expected_type(annotation: str, value: Any) -> str | None:
    """Return the annotation if it consists of plain types and the value has none of them, else None.

    Args:
        annotation: Source text of a type annotation, such as "int | None".
    """
    inner = annotation.removeprefix("Optional[").removesuffix("]") + " | None" if annotation.startswith("Optional[") else annotation
    kinds = [kind.strip() for kind in inner.split("|")]
    if not annotation or any(kind not in _PLAIN for kind in kinds):
        return None
    has_type = any(type(value) in _PLAIN[kind] for kind in kinds)
    return None if has_type else annotation


# ---- rules


def _refused(c: SimpleNamespace) -> Iterator[dict[str, Any]]:
    for flag in FLAGS:
        for name, value in getattr(c, flag).items():
            if setting := options(flag).here.get(name):
                yield {"flags": f"{flag} {setting}", "flag": flag, "why": f"{name} is the setting {setting}. Use that setting."}
            elif fault := options(flag).wrong(name, value):
                yield {"flags": flag, "flag": flag, "why": f"{name} is {fault}"}


def _thinks_twice(c: SimpleNamespace) -> dict[str, Any] | None:
    enable_thinking = c.enable_thinking
    template_value = c.chat_template_kwargs.get("enable_thinking", enable_thinking)
    return (
        {"thinks": str(enable_thinking).lower(), "other": template_value}
        if enable_thinking is not None and template_value != enable_thinking
        else None
    )


PASSED_ON = (
    Rule("{flags}", lambda c: list(_refused(c)), "{flag}: {why}"),
    Rule(
        "chat_template_kwargs",
        lambda c: (taken := [name for name in c.chat_template_kwargs if name in _TEMPLATE_OWN]) and {"taken": ", ".join(taken)},
        "chat_template_kwargs: {taken} is set by this package for each prompt. Omit it.",
    ),
    Rule(
        "enable_thinking chat_template_kwargs",
        _thinks_twice,
        "enable_thinking ({thinks}) and chat_template_kwargs enable_thinking={other} differ. Use one of them.",
    ),
)
