"""What a teacher says of the rows of a rollout, wherever they lie. `rollout.teachers` asks its servers, `grpo.teacher` uses it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_grpo.errors import ConfigError, GivenUp, NobodySamples, RunError
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.pending import deliver
from megatron_grpo.rollout import teachers
from megatron_grpo.types import RowKey, Sequence

TOLD = (ConfigError, RunError, NobodySamples, GivenUp)  # what rank 0 may end with, on behalf of all


class ServedTeacher:
    """Every rank has this object; rank 0 alone speaks to the teacher's servers."""

    def __init__(self, servers: teachers.Teacher | None):
        """servers: on rank 0. Waits for them: raises what `Teacher.gather` does. Collective."""
        self._servers = servers
        collectives.told(self._begin, TOLD)

    def __call__(
        self, sequences: Mapping[RowKey, Sequence], homes: Mapping[RowKey, int], parallel: ParallelState
    ) -> dict[RowKey, np.ndarray]:
        """log p of each masked token given those before it in its context, float32 [T], 0 elsewhere; of the rows whose home this rank is.

        sequences: those that this rank holds. homes: of all rows. Raises what `Teacher.logprobs` does, on every rank. Collective.
        """
        mine = dict(sequences) if parallel.is_first_of_share else {}
        held = {key: sequence for part in collectives.exchange({0: mine}) for key, sequence in part.items()}
        found: dict[RowKey, np.ndarray] = {}

        def ask() -> None:
            found.update(self._scored(held))

        collectives.told(ask, TOLD)
        return deliver({key: (homes[key], values) for key, values in found.items()}, parallel)

    def _begin(self) -> None:
        assert self._servers is not None  # asked on rank 0 alone
        self._servers.gather()

    def _scored(self, held: Mapping[RowKey, Sequence]) -> dict[RowKey, np.ndarray]:
        assert self._servers is not None
        found = {key: np.zeros(len(sequence.token_ids), dtype=np.float32) for key, sequence in held.items()}
        asked, places = [], []
        for key, sequence in held.items():
            for begin, end in sequence.contexts:
                drawn = np.flatnonzero(sequence.mask[begin:end])
                if len(drawn):
                    first, last = int(drawn[0]), int(drawn[-1]) + 1
                    asked.append(teachers.Drawn(ids=tuple(sequence.token_ids[begin : begin + last].tolist()), first=first))
                    places.append((key, slice(begin + first, begin + last)))
        for (key, where), logprobs in zip(places, self._servers.logprobs(asked), strict=True):
            found[key][where] = np.where(held[key].mask[where], logprobs, 0.0)
        return found
