"""The reward `math`: 1 where the completion's answer equals the right one as mathematics, else 0; None where the row has no right answer.

Equality is math-verify's. It can hang past its own timeout and insists on a main thread, so it only ever runs in a child process that is
killed at a deadline; an answer that cannot be compared in time counts as wrong. Right answers that are no mathematics ("yes", "Paris") are
compared as text, as the reward `accuracy` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config
from megatron_grpo.rewards.builtin.answers import alternatives, final_answer, needed_columns, right_answers, same_answer
from megatron_grpo.rewards.builtin.child import Child, ChildDied, serve
from megatron_grpo.rewards.protocol import RowFailure, Score, text_of

_FIRST_LOOK = 1.0  # seconds; what takes longer waits until every other row has its score
_LONGEST_BARE = 200  # characters; a longer text without any mark of an answer is none
_MEMORY = 4 << 30  # bytes of address space: 10**(10**10) ends in a MemoryError, not in a machine without memory


_SLOW = RowFailure(kind="slow", reason="took longer than its first look")  # never leaves this module


class Math:
    def __init__(self, *, needs: tuple[tuple[str, ...], ...], row_seconds: float, batch_seconds: float):
        self.needs, self.row_seconds, self.batch_seconds = needs, row_seconds, batch_seconds
        self.child = Child("megatron_grpo.rewards.builtin.math")

    def __call__(self, completions: list[Any], **columns: Any) -> list[Score | RowFailure]:
        deadline = time.monotonic() + self.batch_seconds
        rows = [(text_of(completion), right) for completion, right in zip(completions, right_answers(columns, self.needs))]
        scores = [self._score(text, right, min(self.row_seconds, _FIRST_LOOK), deadline) for text, right in rows]
        for row, score in enumerate(scores):
            if score is _SLOW:
                again = self._score(*rows[row], self.row_seconds, deadline) if self.row_seconds > _FIRST_LOOK else 0.0
                scores[row] = 0.0 if isinstance(again, RowFailure) else again
        return scores

    def _score(self, text: str, right: Any, seconds: float, deadline: float) -> Score | RowFailure:
        answers = alternatives(right)
        if not answers:
            return None
        given = final_answer(text)
        if any(same_answer(given, final_answer(answer)) for answer in answers):
            return 1.0  # equal as text: no need to ask
        left = deadline - time.monotonic()
        if left <= 0:
            return RowFailure(kind="timeout", reason=f"reached its reward_timeout of {self.batch_seconds:g} s before this row,")
        try:
            return self.child.ask({"text": text, "given": given, "answers": answers}, min(seconds, left))
        except ChildDied:
            return _SLOW

    def close(self) -> None:
        self.child.close()


def build_math(config: Config) -> Math:
    """Raises ConfigError where math-verify is not installed."""
    if find_spec("math_verify") is None:
        message = "Reward `math` needs the extra `math`: pip install 'megatron-grpo[math]'. Reward `accuracy` compares as text, without it."
        raise ConfigError([Problem(flags=("reward_funcs",), message=message)])
    settings = config.rewards
    return Math(needs=needed_columns(config), row_seconds=settings.math_timeout, batch_seconds=settings.reward_timeout)


def _prepare() -> Callable[[Any], float]:
    """Imports math-verify; returns what answers one request. Runs in the child only."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # it warns that its own timeouts are off; ours is the kill
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        return parse(text, targets, parsing_timeout=None)

    def boxed(answer: str) -> list[Any]:
        # A bare answer is often LaTeX without its dollars, or an interval or a set that only means something inside a box.
        return read(f"\\boxed{{{answer}}}") or read(answer)

    right_answer = lru_cache(maxsize=1024)(lambda answer: boxed(final_answer(answer)))  # the same for a whole group

    def readings(request: Any) -> Iterator[list[Any]]:
        yield read(request["text"])
        if "\\boxed" not in request["text"] and len(request["given"]) <= _LONGEST_BARE:
            yield boxed(request["given"])

    def equal(request: Any) -> float:
        try:
            rights = [right_answer(answer) for answer in request["answers"]]
            return float(any(verify(right, given, timeout_seconds=None) for given in readings(request) for right in rights))
        except Exception:  # noqa: BLE001 - sympy raises anything on what a model writes: such an answer is wrong
            return 0.0

    return equal


if __name__ == "__main__":
    serve(_prepare, memory_bytes=_MEMORY)
