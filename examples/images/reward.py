"""The example's reward. Change it and run again: the curve moves."""

from __future__ import annotations


def correct(prompts: list, completions: list, answer: list[str], **columns) -> list[float]:
    """1 where the completion is the answer, to the character; else 0. `answer` is a column of the data set."""
    return [float(completion[0]["content"] == right) for completion, right in zip(completions, answer, strict=True)]
