"""The data sets of the calculator example, and the sample episodes that the model is warmed up on."""

from __future__ import annotations

import random

# Fractions of the episodes that call the calculator, and that call an unknown tool; the others guess.
CALLING, CALLING_UNKNOWN = 0.3, 0.15
HELD_OUT = 200
FLAGS = ("--tools", "examples/calculator/tool.py:calculator")  # of the run: the chat template lists its tools
WARM_UP_STEPS = 1000


def make_rows() -> dict[str, list[dict]]:
    """Return the rows of the data sets `train` and `test`: products of two two-digit numbers."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(1).shuffle(pairs)
    rows = [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in pairs]
    return {"train": rows[HELD_OUT:], "test": rows[:HELD_OUT]}


def make_episode(rng: random.Random, row: dict) -> list[dict]:
    """Return the messages of one sample episode."""
    question, answer = row["prompt"][0]["content"], row["answer"]
    kind = rng.random()
    if kind < CALLING:
        call = make_message("assistant", format_call("calculator", question))
        return [*row["prompt"], call, make_message("tool", answer), make_message("assistant", answer)]
    guess = make_message("assistant", str(rng.randint(100, 9999)))
    if kind < CALLING + CALLING_UNKNOWN:
        call = make_message("assistant", format_call("calc", question))
        error = "Error: no tool is called 'calc'; there are calculator"
        return [*row["prompt"], call, make_message("tool", error), guess]
    return [*row["prompt"], guess]


def make_message(role: str, text: str) -> dict:
    """Return a chat message."""
    return {"role": role, "content": text}


def format_call(name: str, expression: str) -> str:
    """Return a tool call in the format of Qwen3's chat template."""
    call = '{"name": "' + name + '", "arguments": {"expression": "' + expression + '"}}'
    return f"<tool_call>\n{call}\n</tool_call>"
