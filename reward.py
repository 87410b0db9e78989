"""Rewards of the run. A function has TRL's signature and returns one number per completion."""

from __future__ import annotations

import re


def correct(completions, answer, **columns):
    """1 where the last number of a completion is the answer, else 0. `answer` is a column of the data set."""
    return [float(last_number(text_of(one)) == float(right)) for one, right in zip(completions, answer, strict=True)]


def last_number(text):
    """The last number in a text; None without one."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def text_of(completion):
    """A completion is a string if the prompt is a string, else a list of one chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
