"""An engine that answers from a table, for tests: no vLLM, no model, no time. Its promises are those of `rollout.engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event

from megatron_grpo.base import activity
from megatron_grpo.base.errors import GivenUp
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.ahead import InThread, wait_together
from megatron_grpo.rollout.engine import Flight, SamplingSettings, WeightSyncError
from megatron_grpo.types import Completion, Group, Prompt, whole
from megatron_grpo.types import Sequence as Scored
from megatron_grpo.weights.buckets import NO_VERSION, WeightUpdate

Answer = Callable[[Prompt, int, int], Completion]
"""(prompt, place in its group, version of the weights) -> the completion. The same on every rank."""


class _Flight:
    """Each rank's share of the answers, in a thread of its own."""

    def __init__(self, work: Callable[[Event], list[Group]], gives_up: Callable[[], bool]):
        self._thread, self._gives_up = InThread(work, name="scripted answers"), gives_up
        self.has_ended = False

    def wait(self, seconds: float | None = None) -> bool:
        return wait_together(self._thread.wait, seconds, gives_up=self._gives_up if seconds is None else None)

    def groups(self) -> list[Group]:
        self.has_ended = True
        return self._thread.result()

    def drop(self) -> None:
        self._thread.give_up()
        self.has_ended = True

    @property
    def seconds(self) -> float:
        return self._thread.seconds


class ScriptedEngine:
    """An `Engine` whose weights are a number: it takes what is pushed, and does not look at it. It is a `BackgroundSampler` too.

    score: log-probs of one token sequence, from its second token on, for tests in which the check after a push matters. Without it
    every token has log-prob 0, so a run needs `--verify_weight_push false`.
    """

    dtype = "float32"

    def __init__(self, answer: Answer, *, score: Callable[[Sequence[int]], list[float]] | None = None):
        self._answer, self._score = answer, score
        self._version, self._has_base = 0, True
        self._flights: list[_Flight] = []
        self.gives_up: Callable[[], bool] = lambda: False

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_base(self) -> bool:
        return self._has_base

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self._version == NO_VERSION:
            raise WeightSyncError("the scripted engine holds no weights: a weight push failed.")
        groups = self._answered(prompts, sampling, self._version, self.gives_up)
        if collectives.largest(float(self.gives_up())):
            raise GivenUp
        return groups

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> Flight:
        version = self._version
        flight = _Flight(lambda dropped: self._answered(prompts, sampling, version, dropped.is_set), self.gives_up)
        self._flights.append(flight)
        return flight

    def _answered(self, prompts: Sequence[Prompt], sampling: SamplingSettings, version: int, gives_up: Callable[[], bool]) -> list[Group]:
        mine = prompts[collectives.rank() :: collectives.num_ranks()]
        return [
            Group(prompt=prompt, completions=tuple(self._told(prompt, place, version) for place in range(sampling.n)))
            for prompt in mine
            if not gives_up()
        ]

    def _told(self, prompt: Prompt, place: int, version: int) -> Completion:
        activity.advance(0)
        return self._answer(prompt, place, version)

    def prepare(self) -> bool:
        return False

    def take(self, update: WeightUpdate) -> None:
        if not all(flight.has_ended for flight in self._flights):
            raise WeightSyncError(f"version {update.version} was pushed to the scripted engine while it was answering prompts.")
        self._flights = []
        self._version = NO_VERSION  # until all of it has arrived
        if update.kind == "adapter" and not self._has_base:
            raise WeightSyncError("the scripted engine has no base for an adapter.")
        self._has_base = update.kind == "adapter"
        for _ in update.tensors:
            pass
        self._version, self._has_base = update.version, update.kind != "merged"

    def probes(self) -> list[Scored]:
        return [whole((4, 5, 6, 7)), whole((7, 6, 5, 4))]

    def scores(self, sequences: Sequence[Scored]) -> Mapping[str, list[list[float]]]:
        asked = [tuple(one.token_ids.tolist()) for one in sequences]
        return {f"rank {collectives.rank()}": [self._score(ids) if self._score else [0.0] * (len(ids) - 1) for ids in asked]}

    @contextmanager
    def awake(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Holds nothing."""
