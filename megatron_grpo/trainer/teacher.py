"""What a teacher says of the rows of a rollout, wherever they lie: one that servers hold, or one that the training ranks hold.

`servers.teachers` asks servers, `policy.passes` computes, `grpo.teacher` uses what is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch

from megatron_grpo.base.activity import Timers
from megatron_grpo.base.errors import CancelledError, ConfigError, NoRolloutServerError, RunError
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.memory_offload import PolicyOffloader, Role
from megatron_grpo.policy.passes import ModelScorer
from megatron_grpo.trainer.sample_buffer import PlacedRows, deliver, local_samples, score_rows, without_experts
from megatron_grpo.types import RowKey, TokensToScore
from megatron_grpo.types import Sequence as Scored

Ask = Callable[[SequenceOf[TokensToScore]], SequenceOf[np.ndarray]]
"""Tokens -> the log-probs of each from its `first` on, float32. What a teacher's servers say."""

TOLD = (ConfigError, RunError, NoRolloutServerError, CancelledError)  # what rank 0 may end with, on behalf of all


class ServedTeacher:
    """Every rank has this object; rank 0 alone speaks to the teacher's servers."""

    def __init__(self, parallel: ParallelState, gather: Callable[[], str] | None = None, ask: Ask | None = None):
        """gather, ask: on rank 0 alone. gather: waits for servers, and returns the teacher's fingerprint. Raises what it raises, on
        every rank. Collective."""
        self._parallel, self._ask = parallel, ask
        self.fingerprint = collectives.told(gather or str, TOLD)  # of the teacher, on every rank

    def __call__(self, rows: PlacedRows) -> dict[RowKey, np.ndarray]:
        """See `rollouts.Teacher`. At temperature 1, of the whole softmax. Raises what `Teacher.logprobs` does, on every rank."""
        mine = dict(rows.sequences) if self._parallel.is_model_parallel_src else {}
        held = {key: sequence for part in collectives.exchange({0: mine}) for key, sequence in part.items()}
        found: dict[RowKey, np.ndarray] = {}

        def ask() -> None:
            found.update(self._scored(held))

        collectives.told(ask, TOLD)
        return deliver({key: (rows.homes[key], values) for key, values in found.items()}, self._parallel)

    def _scored(self, held: Mapping[RowKey, Scored]) -> dict[RowKey, np.ndarray]:
        assert self._ask is not None  # rank 0 alone asks
        found = {key: np.zeros(len(sequence.token_ids), dtype=np.float32) for key, sequence in held.items()}
        asked, places = [], []
        for key, sequence in held.items():
            for begin, end in sequence.contexts:
                drawn = np.flatnonzero(sequence.mask[begin:end])
                if len(drawn):
                    first, last = int(drawn[0]), int(drawn[-1]) + 1
                    asked.append(TokensToScore(ids=tuple(sequence.token_ids[begin : begin + last].tolist()), first=first))
                    places.append((key, slice(begin + first, begin + last)))
        for (key, where), logprobs in zip(places, self._ask(asked), strict=True):
            found[key][where] = np.where(held[key].mask[where], logprobs, 0.0)
        return found


class HeldTeacher:
    """A model that the training ranks hold beside the policy and that nobody trains. It scores as old log-probs are made: by the same pass,
    over the sampling temperature, among the words that sampling left; experts are its own choice."""

    def __init__(self, name: str, scorer: ModelScorer, clock: Timers, *, leaves: bool):
        """name: for sentences. leaves: it is on the host between scorings."""
        self._name, self._scorer = name, scorer
        movable: tuple[Role, ...] = ("weights",) if leaves else ()
        self._room = PolicyOffloader(self._tensors, movable, scorer.parallel.device, clock)
        self._make_room()

    def __call__(self, rows: PlacedRows) -> dict[RowKey, np.ndarray]:
        """See `rollouts.Teacher`. Raises RunError on every rank where it gives no number."""
        bare = {key: replace(sequence, experts=None) for key, sequence in rows.sequences.items()}  # routes are of the policy's layers
        scorer, parallel = self._scorer, self._scorer.parallel
        with self._room.resident("weights"):
            found = score_rows(replace(rows, sequences=bare), score=without_experts(scorer.logprobs), cut=scorer.cut, parallel=parallel)
        self._make_room()
        senseless = sum(not np.isfinite(values).all() for values in found.logprobs.values())
        if collectives.all_reduce_max(senseless):
            raise RunError(f"the teacher ({self._name}) gives a drawn token a log-prob that no distribution has.")
        return local_samples(found.logprobs, found.rows.homes, rows.homes, parallel)

    def _make_room(self) -> None:
        if self._room.movable:
            self._room.make()

    def _tensors(self) -> Iterator[tuple[Role, torch.Tensor]]:
        for chunk in self._scorer.model:
            yield from (("weights", tensor.data) for tensor in (*chunk.parameters(), *chunk.buffers()))
