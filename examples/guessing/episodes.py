"""Games, and what the warm start is taught: a player who halves what is left, or heeds what was said, or does neither."""

from __future__ import annotations

import random

HALVING, WITHIN_RANGE = 0.3, 0.2  # shares of the guesses
HIGHEST, TURNS = 15, 4
FLAGS = ("--environment", "examples/guessing/game.py:Game")
WARM_UP_STEPS = 600


def make_rows() -> dict[str, list[dict]]:
    """{"train": ..., "test": ...}. The question is always the same; the number is hidden in a column."""
    asked = [
        {"prompt": [{"role": "user", "content": f"Guess 1 to {HIGHEST}"}], "secret": 1 + i % HIGHEST, "game": i}
        for i in range(HIGHEST * 44)
    ]
    return {"train": asked[HIGHEST * 4 :], "test": asked[: HIGHEST * 4]}


def make_episode(draw: random.Random, row: dict) -> list[dict]:
    """A conversation to be taught."""
    secret, low, high = row["secret"], 1, HIGHEST
    messages = list(row["prompt"])
    for turn in range(TURNS):
        kind = draw.random()
        if kind < HALVING:
            guess = (low + high) // 2
        else:
            guess = draw.randint(low, high) if kind < HALVING + WITHIN_RANGE else draw.randint(1, HIGHEST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == TURNS - 1:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return messages
