"""Samplers that play episodes: the connection between the independent packages `environments` and `rollout`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, TypeVar

from megatron_grpo.environments.episode_runner import EpisodeRunner, EpisodeRunnerFactory
from megatron_grpo.rollout.engine import SamplingSettings, WeightsLostError
from megatron_grpo.rollout.turns import Player, TurnEngine, request_seed
from megatron_grpo.types import Group, Prompt

logger = logging.getLogger(__name__)
OnePlayer = TypeVar("OnePlayer", bound=Player)


class PlayedSampler(Generic[OnePlayer]):
    """`Sampler` whose completions a player makes from sampled turns. A subclass defines the player.

    Args:
        engine: Engine that samples the turns.
    """

    def __init__(self, engine: TurnEngine):
        self.engine = engine
        self._asked: object = None
        self._player: OnePlayer | None = None

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> OnePlayer:
        """Make the player that plays these prompts from their beginning.

        Args:
            prompts: This rank's share of the prompts.
            sampling: Sampling settings of the run.
            seed: Seed of the run.
        """
        raise NotImplementedError  # every subclass implements it

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Play the prompts and return their groups. Collective.

        A call with the same arguments after WeightsLostError resumes the open episodes.

        Args:
            prompts: The prompts of the round, the same on every rank.
            sampling: Sampling settings of the run.
            seed: Seed of the run.

        Returns:
            The groups that this rank scores.

        Raises:
            WeightsLostError: The sampler lost its weights. Sync the weights and call it again.
        """
        asked = ([prompt.number for prompt in prompts], sampling, seed)
        if asked != self._asked:
            self._drop()
            self._asked = asked
        try:
            groups = self.engine.play(prompts, sampling, partial(self._begin, sampling=sampling, seed=seed))
            self._check()
        except WeightsLostError:
            raise
        except BaseException:
            self._drop()
            raise
        self._drop()
        return groups

    def wake_up(self) -> AbstractContextManager[None]:
        return self.engine.wake_up()

    def _begin(self, prompts: Sequence[Prompt], *, sampling: SamplingSettings, seed: int) -> OnePlayer:
        if self._player is None:
            self._player = self.new_player(prompts, sampling, seed=seed)
        return self._player

    def _check(self) -> None:
        """Check the result after all is played. Called on every rank; an exception ends the run on all of them."""

    def _drop(self) -> None:
        if self._player is not None:
            self._player.close()
        self._asked = self._player = None


class Episodes(PlayedSampler[EpisodeRunner]):
    """`Sampler` whose completions are episodes of an environment.

    Args:
        engine: Engine that samples the turns.
        stage: Settings of the episodes.
    """

    def __init__(self, engine: TurnEngine, stage: EpisodeRunnerFactory):
        super().__init__(engine)
        self.stage = stage
        self._reported: set[str] = set()

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> EpisodeRunner:
        return EpisodeRunner(self.stage, prompts, n=sampling.n, seed_of=partial(request_seed, seed, n=sampling.n))

    def _drop(self) -> None:
        play = self._player
        super()._drop()
        for effect in {*play.side_effects} - self._reported if play is not None else ():
            self._reported.add(effect)
            logger.warning("The environment %s.", effect)
