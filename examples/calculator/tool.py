"""The tool, and the reward of a whole episode."""

import re


def calculator(expression: str):
    """Works out a product.

    Args:
        expression: for example 12*34
    """
    found = re.fullmatch(r"(\d+)\*(\d+)", expression)
    if not found:
        raise ValueError("not a product of two numbers")
    return str(int(found[1]) * int(found[2]))


def correct(completions, answer, **columns):
    """1 where the last thing that the model says is the answer. completions: all messages after the question."""
    last = [messages[-1] if messages else {} for messages in completions]
    return [float(said.get("role") == "assistant" and said["content"] == right) for said, right in zip(last, answer, strict=True)]
