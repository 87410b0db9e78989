"""The data sets of the guessing game, and the sample games that the model is warmed up on."""

from __future__ import annotations

import random

# Fractions of the guesses that halve the remaining range, and that are random within it; the others are random.
HALVING, WITHIN_RANGE = 0.3, 0.2
HIGHEST, TURNS = 15, 4
FLAGS = ("--environment", "examples/guessing/game.py:Game")
WARM_UP_STEPS = 600


def make_rows() -> dict[str, list[dict]]:
    """Return the rows of the data sets `train` and `test`. All prompts are equal; the column `secret` has the number."""
    prompt = [{"role": "user", "content": f"Guess 1 to {HIGHEST}"}]
    games = range(HIGHEST * 44)
    rows = [{"prompt": prompt, "secret": 1 + i % HIGHEST, "game": i} for i in games]
    return {"train": rows[HIGHEST * 4 :], "test": rows[: HIGHEST * 4]}


def make_episode(rng: random.Random, row: dict) -> list[dict]:
    """Return the messages of one sample game."""
    secret, low, high = row["secret"], 1, HIGHEST
    messages = list(row["prompt"])
    for turn in range(TURNS):
        kind = rng.random()
        if kind < HALVING:
            guess = (low + high) // 2
        else:
            bounds = (low, high) if kind < HALVING + WITHIN_RANGE else (1, HIGHEST)
            guess = rng.randint(*bounds)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret or turn == TURNS - 1:
            break
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return messages
