"""The reward `cosine`: right answers are worth more when short, wrong ones less bad when long, along half a cosine of the length.

`end + (start - end) * (1 + cos(pi * min(tokens, L) / L)) / 2`, from `cosine_min_len_value_*` at length 0 to `cosine_max_len_value_*` at
`L = cosine_max_len`. What is right is what the reward `math` says. Source: arXiv 2502.03373, section 4; the names are Megatron-SWIFT's.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.rewards.builtin.math import Math, build_math
from megatron_grpo.rewards.protocol import RowFailure, Score


class Cosine:
    def __init__(self, correct: Math, *, right: tuple[float, float], wrong: tuple[float, float], max_length: int):
        self.correct, self.right, self.wrong, self.max_length = correct, right, wrong, max_length
        self.needs = correct.needs

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[Score | RowFailure]:
        verdicts = self.correct(completions=completions, **columns)
        return [self._score(verdict, len(token_ids)) for verdict, token_ids in zip(verdicts, completion_ids)]

    def _score(self, verdict: Score | RowFailure, length: int) -> Score | RowFailure:
        if not isinstance(verdict, float):
            return verdict
        start, end = self.right if verdict >= 1 else self.wrong
        return end + (start - end) * (1 + math.cos(math.pi * min(length, self.max_length) / self.max_length)) / 2

    def close(self) -> None:
        self.correct.close()


def build_cosine(config: Config) -> Cosine:
    settings = config.rewards
    max_length = config.rollout.max_completion_length if settings.cosine_max_len is None else settings.cosine_max_len
    return Cosine(
        build_math(config),
        right=(settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct),
        wrong=(settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong),
        max_length=max_length,
    )
