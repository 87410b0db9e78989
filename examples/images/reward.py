"""Reward function of the example."""

from __future__ import annotations


def correct(prompts: list, completions: list, answer: list[str], **columns) -> list[float]:
    """Return 1.0 for each completion that equals `answer`, a column of the data set, else 0.0."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]
