"""Plays episodes over the sampler of a run: where environments and rollout meet, which know nothing of each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from megatron_grpo.environments.loading import Stage
from megatron_grpo.environments.play import Play
from megatron_grpo.rollout.engine import SamplingSettings, WeightsLost
from megatron_grpo.rollout.turns import TurnEngine, TurnSampler, request_seed
from megatron_grpo.types import Group, Prompt

logger = logging.getLogger(__name__)


class Episodes:
    """A `Sampler` whose completions are episodes."""

    def __init__(self, engine: TurnEngine, stage: Stage):
        self.engine, self.stage = engine, stage
        self._asked: object = None
        self._player: _Player | None = None
        self._told: set[str] = set()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Asked the same after WeightsLost, it goes on where it was."""
        asked = ([prompt.number for prompt in prompts], sampling, seed)
        if asked != self._asked:
            self._drop()
            self._asked = asked
        try:
            groups = self.engine.play(prompts, sampling, partial(self._begin, sampling=sampling, seed=seed))
        except WeightsLost:
            raise
        except BaseException:
            self._drop()
            raise
        self._drop()
        return groups

    def awake(self) -> AbstractContextManager[None]:
        return self.engine.awake()

    def _begin(self, prompts: Sequence[Prompt], *, sampling: SamplingSettings, seed: int) -> _Player:
        if self._player is None:
            play = self.stage.begin(prompts, n=sampling.n, seed_of=partial(request_seed, seed, n=sampling.n))
            self._player = _Player(play)
        return self._player

    def _drop(self) -> None:
        if self._player is not None:
            self._player.close()
            for did in {*self._player.play.told} - self._told:
                self._told.add(did)
                logger.warning("The environment %s.", did)
        self._asked = self._player = None


class _Player:
    """A `Play` as `rollout.turns.Player`."""

    def __init__(self, play: Play):
        self.play = play

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        return self.play.advance(turns, seconds, version=version)

    def groups(self) -> list[Group]:
        return [Group(prompt=prompt, completions=completions) for prompt, completions in self.play.completions()]

    def close(self) -> None:
        self.play.close()
