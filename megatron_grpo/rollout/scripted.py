"""An engine that answers from a table, for tests: no vLLM, no model, no time. Its promises are those of `rollout.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.engine import SamplingSettings, WeightSyncError
from megatron_grpo.types import Completion, Group, Prompt
from megatron_grpo.weights.update import NO_VERSION, WeightUpdate

Answer = Callable[[Prompt, int, int], Completion]
"""(prompt, place in its group, version of the weights) -> the completion. The same on every rank."""


class ScriptedEngine:
    """An `Engine` whose weights are a number: it takes what is pushed, and does not look at it.

    score: log-probs of one token sequence, from its second token on, for tests in which the check after a push matters. Without it
    every token has log-prob 0, so a run needs `--verify_weight_push false`.
    """

    dtype = "float32"

    def __init__(self, answer: Answer, *, score: Callable[[Sequence[int]], list[float]] | None = None):
        self._answer, self._score = answer, score
        self._version, self._has_base = 0, True

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_base(self) -> bool:
        return self._has_base

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self._version == NO_VERSION:
            raise WeightSyncError("the scripted engine holds no weights: a weight push failed.")
        mine = prompts[collectives.rank() :: collectives.num_ranks()]
        return [
            Group(prompt=prompt, completions=tuple(self._answer(prompt, place, self._version) for place in range(sampling.n)))
            for prompt in mine
        ]

    def take(self, update: WeightUpdate) -> None:
        self._version = NO_VERSION  # until all of it has arrived
        if update.kind == "adapter" and not self._has_base:
            raise WeightSyncError("the scripted engine has no base for an adapter.")
        self._has_base = update.kind == "adapter"
        for _ in update.tensors:
            pass
        self._version, self._has_base = update.version, update.kind != "merged"

    def probes(self) -> list[tuple[int, ...]]:
        return [(4, 5, 6, 7), (7, 6, 5, 4)]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [self._score(ids) if self._score else [0.0] * (len(ids) - 1) for ids in token_ids]

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Holds nothing."""
