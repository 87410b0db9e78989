"""A rollout engine that answers from a table, for tests: no vLLM, no model, no time. Its promises are those of `rollout.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_grpo.rollout.engine import NO_WEIGHTS, SamplingSettings, WeightSyncError
from megatron_grpo.rollout.logprobs import refuse_impossible
from megatron_grpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    import torch

Answer = Callable[[Prompt, int, int], Completion]
"""(prompt, place in its group, version of the weights) -> the completion. The same on every rank."""


class ScriptedEngine:
    """A RolloutEngine whose weights are a number: it takes what is pushed, and does not look at it.

    score: log-probs of one token sequence, from its second token on, for tests in which the check after a push matters. Without it
    every token has log-prob 0, so a run needs `--verify_weight_push false`.
    """

    dtype = "float32"

    def __init__(self, answer: Answer, *, score: Callable[[Sequence[int]], list[float]] | None = None):
        self._answer, self._score, self._version = answer, score, 0

    @property
    def version(self) -> int:
        return self._version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self._version == NO_WEIGHTS:
            raise WeightSyncError("the scripted engine holds no weights: a weight push failed.")
        groups, _ = refuse_impossible([
            Group(prompt=prompt, completions=tuple(self._answer(prompt, place, self._version) for place in range(sampling.n)),
                  version=self._version)
            for prompt in prompts
        ])  # fmt: skip
        return groups

    def update_weights(self, named: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        self._version = NO_WEIGHTS  # until all of it has arrived
        for _ in named:
            pass
        self._version = version

    def probes(self) -> list[tuple[int, ...]]:
        return [(4, 5, 6, 7), (7, 6, 5, 4)]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self._score(ids) if self._score else [0.0] * (len(ids) - 1) for ids in token_ids]

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Holds nothing."""
