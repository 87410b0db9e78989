"""The reward `repetition`: a penalty in proportion to the share of n-grams (of tokens) that occur again in the same completion.

`(1 - distinct / all) * repetition_max_penalty`, 0 for completions shorter than one n-gram.
Source: Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), appendix C.2; TRL's `get_repetition_penalty_reward` is the same.
"""

from __future__ import annotations

from typing import Any

from megatron_grpo.config.config import Config


class Repetition:
    def __init__(self, *, n: int, max_penalty: float):
        self.n, self.max_penalty = n, max_penalty

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [self._score(token_ids) for token_ids in completion_ids]

    def _score(self, token_ids: list[int]) -> float:
        total = len(token_ids) - self.n + 1
        if total < 1:
            return 0.0
        distinct = len({tuple(token_ids[start : start + self.n]) for start in range(total)})
        return (1 - distinct / total) * self.max_penalty if distinct < total else 0.0


def build_repetition(config: Config) -> Repetition:
    return Repetition(n=config.rewards.repetition_n_grams, max_penalty=config.rewards.repetition_max_penalty)
