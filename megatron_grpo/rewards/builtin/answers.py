"""Owns finding the final answer in a text, and telling whether two answers are the same text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from megatron_grpo.config.config import Config

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE)
_SAID = re.compile(r"answer(?:\s+is)?\s*:?\s+(.+?)\s*$", re.MULTILINE | re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def needed_columns(config: Config) -> tuple[tuple[str, ...], ...]:
    """The columns that a reward with a right answer needs, as alternatives."""
    return ((config.rewards.answer_column,),) if config.rewards.answer_column else (("answer", "solution"),)


def right_answers(columns: Mapping[str, Sequence[Any]], needs: Sequence[Sequence[str]]) -> list[Any]:
    """What each row is judged by. Of `answer` and `solution` it is `answer`: the other often holds the way to it."""
    given = [columns[name] for name in needs[0] if name in columns]
    return [next((value for value in row if value is not None), None) for row in zip(*given)]


def alternatives(right: Any) -> list[str]:
    """Right answers as texts: one, or several where the column holds a list. Empty where the row has none."""
    values = right if isinstance(right, (list, tuple)) else [right]
    return [str(value) for value in values if value is not None and str(value).strip()]


def final_answer(text: str) -> str:
    """The last thing a text gives as its answer, without surrounding space.

    What stands after the last `</think>` counts; in it, in this order: the last `<answer>` tag, the last `\\boxed{}`, a line `#### x`, what
    follows the last "answer is" or "answer:" on its line, or else everything.
    """
    text = text.rpartition("</think>")[2]
    tags = _TAG.findall(text)
    if tags:
        text = tags[-1]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for pattern in (_HASHES, _SAID):
        found = pattern.findall(text)
        if found:
            return found[-1].strip()
    return text.strip()


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` of a text holds, braces inside it balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None  # cut off in the middle


def same_answer(answer: str, right: str) -> bool:
    """Whether two answers are the same once case, spacing, `$`, a final stop, and ways to write a decimal number are set aside."""
    left, other = normalise(answer), normalise(right)
    if left == other:
        return True
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(other):
        return Decimal(left) == Decimal(other)
    return False


def normalise(answer: str) -> str:
    """An answer as `same_answer` compares it."""
    text = " ".join(answer.split()).casefold()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\text{", "}"), ("**", "**"), ('"', '"')):
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    text = text.rstrip(".").strip()
    return _THOUSANDS.sub("", text)
