"""A rollout engine for tests that answers from a function: no vLLM, no model. It implements `rollout.engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Event, Thread

import numpy as np

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import GenerationFuture, SamplingSettings, WeightSyncError
from megatron_grpo.core.rollout.turns import wait_together
from megatron_grpo.core.types import Completion, Group, Prompt, TokenSequence
from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate

Answer = Callable[[Prompt, int, int], Completion]
"""(prompt, index in its group, version of the weights) -> the completion. The same on every rank."""


class _ScriptedGeneration:
    """Each rank's part of the completions, computed in a daemon thread, which does not keep the process alive.

    Args:
        work: Receives an event, and should end soon once that is set. Must not contain collectives.
        should_cancel: Whether the run cancels what it waits for.
    """

    def __init__(self, work: Callable[[Event], list[Group]], should_cancel: Callable[[], bool]):
        self._future: Future[list[Group]] = Future()
        self._dropped, self._should_cancel = Event(), should_cancel
        self.seconds, self.is_finished = 0.0, False
        Thread(target=self._run, args=(work,), name="scripted answers", daemon=True).start()

    def _run(self, work: Callable[[Event], list[Group]]) -> None:
        start = time.perf_counter()
        try:
            result = work(self._dropped)
        except BaseException as error:  # noqa: BLE001 - raised again in `groups`
            self._future.set_exception(error)
        else:
            self.seconds = time.perf_counter() - start
            self._future.set_result(result)

    def wait(self, seconds: float | None = None) -> bool:
        return wait_together(
            lambda timeout: bool(wait([self._future], timeout).done),
            seconds,
            should_cancel=self._should_cancel if seconds is None else None,
        )

    def groups(self) -> list[Group]:
        self.is_finished = True
        return self._future.result()

    def drop(self) -> None:
        self._dropped.set()
        self.is_finished = True


class ScriptedEngine:
    """An `Engine` and `BackgroundSampler` whose weights are only a version number: it consumes updates without reading them.

    Args:
        answer: Returns a completion; the same on every rank.
        score: Log-probs of a token sequence, from its second token on, for tests in which the check after a weight update matters. Without
            it every token has log-prob 0, so a run needs `--verify_weight_sync false`.
    """

    dtype = "float32"

    def __init__(self, answer: Answer, *, score: Callable[[Sequence[int]], list[float]] | None = None):
        self._answer, self._score = answer, score
        self.version, self.has_base = 0, True
        self._futures: list[_ScriptedGeneration] = []
        self.should_cancel: Callable[[], bool] = lambda: False

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self.version == NO_VERSION:
            raise WeightSyncError("The scripted engine has no weights: a weight sync failed.")
        groups = self._answered(prompts, sampling, self.version, self.should_cancel)
        if collectives.all_reduce_max(float(self.should_cancel())):
            raise CancelledError
        return groups

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> GenerationFuture:
        version = self.version
        future = _ScriptedGeneration(lambda dropped: self._answered(prompts, sampling, version, dropped.is_set), self.should_cancel)
        self._futures.append(future)
        return future

    def _answered(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, version: int, should_cancel: Callable[[], bool]
    ) -> list[Group]:
        local = prompts[collectives.rank() :: collectives.num_ranks()]
        return [
            Group(prompt=prompt, completions=tuple(self._completion(prompt, index, version) for index in range(sampling.n)))
            for prompt in local
            if not should_cancel()
        ]

    def _completion(self, prompt: Prompt, index: int, version: int) -> Completion:
        activity.advance(0)
        return self._answer(prompt, index, version)

    def prepare(self) -> bool:
        return False

    def load_weights(self, update: WeightUpdate) -> None:
        if not all(future.is_finished for future in self._futures):
            raise WeightSyncError(f"Version {update.version} was sent to the scripted engine while it was sampling.")
        self._futures = []
        self.version = NO_VERSION  # until all of it has arrived
        if update.kind == "adapter" and not self.has_base:
            raise WeightSyncError("The scripted engine has no base weights for an adapter.")
        self.has_base = update.kind == "adapter"
        for _ in update.tensors:
            pass
        self.version, self.has_base = update.version, update.kind != "merged"

    def probes(self) -> list[TokenSequence]:
        return [TokenSequence(token_ids=np.array(ids), mask=np.arange(4) > 0) for ids in ((4, 5, 6, 7), (7, 6, 5, 4))]

    def scores(self, sequences: Sequence[TokenSequence]) -> Mapping[str, list[list[float]]]:
        rows = [tuple(sequence.token_ids.tolist()) for sequence in sequences]
        return {f"rank {collectives.rank()}": [self._score(ids) if self._score else [0.0] * (len(ids) - 1) for ids in rows]}

    @contextmanager
    def wake_up(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Do nothing: this engine holds no resources."""
