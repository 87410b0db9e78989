"""The reward `accuracy`: 1 where the completion's final answer is the right one as text, else 0; None where the row has no right answer."""

from __future__ import annotations

from typing import Any

from megatron_grpo.config.config import Config
from megatron_grpo.rewards.builtin.answers import alternatives, final_answer, needed_columns, right_answers, same_answer
from megatron_grpo.rewards.protocol import Score, text_of


class Accuracy:
    def __init__(self, *, needs: tuple[tuple[str, ...], ...], exact: bool):
        self.needs, self.exact = needs, exact

    def __call__(self, completions: list[Any], **columns: Any) -> list[Score]:
        return [self._score(text_of(completion), right) for completion, right in zip(completions, right_answers(columns, self.needs))]

    def _score(self, text: str, right: Any) -> Score:
        answers = alternatives(right)
        if not answers:
            return None
        if self.exact:
            return float(text in answers)
        given = final_answer(text)
        return float(any(same_answer(given, final_answer(answer)) for answer in answers))


def build_accuracy(config: Config) -> Accuracy:
    return Accuracy(needs=needed_columns(config), exact=config.rewards.accuracy_exact)
