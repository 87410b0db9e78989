"""Reward function of the quickstart."""

from __future__ import annotations


def correct(prompts: list[str], completions: list[str], answer: list[str], **columns) -> list[float]:
    """Return 1.0 for each completion that equals `answer`, a column of the data set, else 0.0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
