"""Extraction of the final answer from a text, and textual comparison of two answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from megatron_grpo.run.config.settings import Config

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE)
# "answer is" or "answer:" (or a full-width colon), with or without bold type; the bare word "answer" is part of many answers and of many
# last sentences. Of a line, all is the answer, or the number before the next sentence.
_SAID = re.compile(
    r"\banswer(?:\*\*)?(?:\s+is\b\s*[:\uff1a]?|\s*[:\uff1a])(?:\*\*(?=\s|[^*\n]*$))?\s*"
    r"([*$]*[-+\u2212]?\d[\d,]*(?:\.\d+)?[*$]*(?=[.!]\s+[A-Z])|.+?(?=\s*$))",
    re.MULTILINE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def needed_columns(config: Config) -> tuple[tuple[str, ...], ...]:
    """Return the columns that a reward with a correct answer needs, as alternatives."""
    return ((config.rewards.answer_column,),) if config.rewards.answer_column else (("answer", "solution"),)


def right_answers(columns: Mapping[str, Sequence[Any]], needs: Sequence[Sequence[str]]) -> list[Any]:
    """Return the correct answer of each row.

    If a row has both `answer` and `solution`, `answer` is used, because `solution` often contains the derivation.

    Args:
        columns: Columns of the data set, one value per row.
    """
    columns_present = [columns[name] for name in needs[0] if name in columns]
    return [next((value for value in row if value is not None), None) for row in zip(*columns_present)]


def alternatives(right: Any) -> list[str]:
    """Return the acceptable answers of a row as strings: one, or several if the column holds a list. Empty if the row has no answer."""
    values = right if isinstance(right, (list, tuple)) else [right]
    return [str(value) for value in values if value is not None and str(value).strip()]


def final_answer(text: str) -> str:
    r"""Return the final answer of a text, without surrounding space.

    Only text after the last `</think>` counts. In it, the first match in this order: the last `<answer>` tag, the last `\boxed{}`, a
    line `#### x`, the text after the last "answer is" or "answer:" on its line (a number ends where the next sentence begins), or else
    the whole text.
    """
    text = text.rpartition("</think>")[2]
    tags = _TAG.findall(text)
    if tags:
        text = tags[-1]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for pattern in (_HASHES, _SAID):
        matches = pattern.findall(text)
        if matches:
            return matches[-1].strip()
    return text.strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` of a text, with balanced braces; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None  # truncated before the closing brace


def same_answer(answer: str, right: str) -> bool:
    """Return whether two answers are equal, ignoring case, spacing, `$`, a final full stop, and notations of a decimal number."""
    first, second = normalise(answer), normalise(right)
    if first == second:
        return True
    if _NUMBER.fullmatch(first) and _NUMBER.fullmatch(second):
        return Decimal(first) == Decimal(second)
    return False


def normalise(answer: str) -> str:
    """Return an answer in the form that `same_answer` compares."""
    text, before = " ".join(answer.split()).casefold().replace("\u2212", "-"), ""
    while text != before:  # **$42$.**
        before, text = text, text.rstrip(".").strip("$ ") or text
        for left, right in (("\\(", "\\)"), ("\\[", "\\]"), ("\\text{", "}"), ("**", "**"), ('"', '"')):
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)].strip()
    return _THOUSANDS.sub("", text)
