"""Questions, and what the warm start is taught: three of ten episodes use the calculator, the others call what is not there, or guess."""

from __future__ import annotations

import random

CALLS, CALLS_NOBODY = 0.3, 0.15  # shares of the episodes
HELD_OUT = 200
FLAGS = ("--tools", "examples/calculator/tool.py:calculator")  # what the template shows, as in a run
WARM_UP_STEPS = 1000


def make_rows() -> dict[str, list[dict]]:
    """{"train": ..., "test": ...}: products of two numbers of two digits."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(1).shuffle(pairs)
    asked = [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs]
    return {"train": asked[HELD_OUT:], "test": asked[:HELD_OUT]}


def make_episode(draw: random.Random, row: dict) -> list[dict]:
    """A conversation to be taught."""
    question, answer = row["prompt"][0]["content"], row["answer"]
    kind = draw.random()
    if kind < CALLS:
        return [*row["prompt"], _says(_call("calculator", question)), _answers(answer), _says(answer)]
    guess = _says(str(draw.randint(100, 9999)))
    if kind < CALLS + CALLS_NOBODY:
        error = "Error: no tool is called 'calc'; there are calculator"
        return [*row["prompt"], _says(_call("calc", question)), _answers(error), guess]
    return [*row["prompt"], guess]


def _says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def _answers(text: str) -> dict:
    return {"role": "tool", "content": text}


def _call(name: str, expression: str) -> str:
    return '<tool_call>\n{"name": "' + name + '", "arguments": {"expression": "' + expression + '"}}\n</tool_call>'
