"""The calculator tool, and the reward of an episode."""

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
    """Return 1.0 for each episode whose last message is the model's and equals `answer`, else 0.0.

    Args:
        completions: The messages of each episode after the question.
        answer: The column of that name, one value per episode.
        columns: All other columns.
    """
    last = [messages[-1] if messages else {} for messages in completions]
    return [float(message.get("role") == "assistant" and message["content"] == right) for message, right in zip(last, answer, strict=True)]
