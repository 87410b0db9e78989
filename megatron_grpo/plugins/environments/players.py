"""Parts of all players: requests of turns, which may come from other threads, the record of an episode, and the samplers that play."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from megatron_grpo.core.base import activity
from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings, WeightsLostError
from megatron_grpo.core.rollout.turns import Key, TurnEngine, TurnSampler
from megatron_grpo.core.types import Completion, EpisodeNumbers, EpisodeRecord, Group, Prompt
from megatron_grpo.plugins.environments.protocol import Message
from megatron_grpo.plugins.environments.trajectory import ChatTemplate, TokenizedTrajectory
from megatron_grpo.plugins.environments.workers import LINGER, MOST_LINGERED
from megatron_grpo.run.data.chat import template_messages

MOST_WARNINGS = 20  # different ones of a run
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to sample.

    Args:
        key: Key of the completion, unique among the open ones; the first number is the prompt's.
        sampled: Function that receives the sampled turn, in the engine's thread.
        cancel: Function that is called if the player is closed before.
    """

    key: Key
    token_ids: Sequence[int]
    seed: int
    max_tokens: int
    sampled: Callable[[SampledTurn], None]
    cancel: Callable[[], None] = lambda: None


class RequestLoop:
    """`rollout.turns.EpisodeLoop` that passes requests to the sampler and turns to those who asked. A subclass decides who asks."""

    patience = 0.5  # longest wait for a request in seconds, before the sampler is polled again

    def __init__(self, prompts: Sequence[Prompt], n: int):
        self.prompts, self.n = list(prompts), n
        self._changed = threading.Condition()
        self._waiting: list[TurnRequest] = []
        self._asked: dict[Key, TurnRequest] = {}  # open turns
        self._turns: TurnSampler | None = None
        self._version = 0
        self._is_closed = False

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for the log about effects that bias the training or affect the process."""
        return ()

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended."""
        raise NotImplementedError  # every subclass implements it

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        """Play for about `seconds`.

        Args:
            turns: The sampler. If it is another one than in the last call, open turns are submitted to it again, since the earlier sampler
                may be lost.

        Returns:
            Whether all episodes have ended.
        """
        if self.is_over:
            return True
        if turns is not self._turns:
            for request in self._asked.values():
                turns.submit(request.key, request.token_ids, seed=request.seed, max_tokens=request.max_tokens)
        self._turns, self._version = turns, version
        deadline = time.monotonic() + seconds
        while True:
            self._receive(0.0 if turns.num_running else min(self.patience, max(0.0, deadline - time.monotonic())))
            self._submit(turns)
            for key, sampled in turns.poll():
                self._asked.pop(key).sampled(sampled)
            if self.is_over:
                self.close()
                return True
            activity.advance(0)
            if time.monotonic() >= deadline:
                return False

    def groups(self) -> list[Group]:
        """Return the groups in the order of the prompts. Call it after all episodes have ended."""
        raise NotImplementedError  # every subclass implements it

    def close(self) -> None:
        """Stop running work, and cancel open requests."""
        with self._changed:
            self._is_closed = True
            open_requests = [*self._waiting, *self._asked.values()]
            self._waiting.clear()
            self._asked.clear()
        for request in open_requests:
            request.cancel()

    def _receive(self, seconds: float) -> None:
        """Process events that occurred outside the sampler."""
        raise NotImplementedError  # every subclass implements it

    def _ask(self, requests: Sequence[TurnRequest]) -> bool:
        """Queue requests; any thread may call it. Returns False if the player is closed."""
        with self._changed:
            if not self._is_closed:
                self._waiting += requests
                self._changed.notify_all()
            return not self._is_closed

    def _wait(self, seconds: float, is_done: Callable[[], bool] = bool) -> None:
        """Wait for a request, or until the condition is true; then shortly for more requests, so that they enter the same engine step."""
        with self._changed:
            if self._changed.wait_for(lambda: self._waiting or is_done(), timeout=seconds):
                end, count = time.monotonic() + MOST_LINGERED, 0
                while count < len(self._waiting) and time.monotonic() < end:
                    count = len(self._waiting)
                    self._changed.wait(LINGER)

    def _submit(self, turns: TurnSampler) -> None:
        with self._changed:
            requests, self._waiting = self._waiting, []
            self._asked |= {request.key: request for request in requests}
        for request in requests:
            turns.submit(request.key, request.token_ids, seed=request.seed, max_tokens=request.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLoopFactory:
    """Settings that all episodes of a run share.

    Args:
        system: System message for prompts without one.
        timeout: Seconds that are allowed for one environment call, or for an agent's episode.
        concurrency: Largest number of concurrent environment calls, or agents.
    """

    template: ChatTemplate
    system: str | None
    timeout: float
    concurrency: int

    def opening(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        """Return the messages of a row, from which its token IDs were rendered."""
        assert not isinstance(prompt.raw, str)  # a string prompt is refused when the data are read
        return template_messages(prompt.raw, system=self.system)


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """State of one episode that all players share.

    Args:
        place: Index in its group.
        version: Version of the weights, for an episode without a turn.
    """

    prompt: Prompt
    place: int
    seconds: float = 0.0
    finish_reason: str = ""
    fault: str = ""
    version: int = 0

    @property
    def key(self) -> Key:
        """Prompt number, and index in the group."""
        return self.prompt.number, self.place

    def completion(
        self, trajectory: TokenizedTrajectory, messages: Sequence[Message], *, num_opening: int, rewards: Sequence[float | None],
        metrics: Mapping[str, float], columns: Mapping[str, Any] | None = None,
    ) -> Completion:  # fmt: skip
        """Return the completion of the ended episode.

        Args:
            trajectory: Its tokens.
            num_opening: Number of messages before the first turn.
            rewards: Reward of each turn.
        """
        numbers = EpisodeNumbers(
            finish_reason=self.finish_reason, num_turns=len(rewards), seconds=self.seconds, metrics=metrics, fault=self.fault
        )
        length = len(trajectory.sequence.token_ids)
        return Completion(
            sequence=trajectory.sequence,
            logprobs=trajectory.logprobs,
            text=turns_as_text(messages[num_opening:]),
            finish_reason=self.finish_reason,
            versions=trajectory.versions or ((self.version, length, length),),
            record=EpisodeRecord(numbers=numbers, messages=tuple(messages), num_opening=num_opening, turn_rewards=tuple(rewards)),
            columns=columns,
        )


def turns_as_text(messages: Sequence[Message], max_characters: int = 20_000) -> str:
    """Format messages as text, each after its role in brackets, with its tool calls."""
    lines = []
    for message in messages:
        name, text = message.get("name"), message["content"]
        role = f"{message['role']} {name}" if name else message["role"]
        lines.append(f"[{role}] {text if len(text) <= max_characters else f'{text[:max_characters]} ... ({len(text):,} characters)'}")
        lines += [f"-> {call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join(lines)


OnePlayer = TypeVar("OnePlayer", bound=RequestLoop)
Stage = TypeVar("Stage")


class EpisodeLoopSampler(Generic[Stage, OnePlayer]):
    """`Sampler` whose completions a player makes from sampled turns. A subclass defines the player."""

    def __init__(self, engine: TurnEngine, stage: Stage):
        self.engine, self.stage = engine, stage
        self._warned: set[str] = set()
        self._asked: object = None
        self._player: OnePlayer | None = None

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> OnePlayer:
        """Make the player that plays these prompts from their beginning."""
        raise NotImplementedError  # every subclass implements it

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Play the prompts and return their groups. Collective.

        A call with the same arguments after WeightsLostError resumes the open episodes.

        Returns:
            The groups that this rank scores.

        Raises:
            WeightsLostError: The sampler lost its weights. Sync the weights and call it again.
        """
        request = ([prompt.number for prompt in prompts], sampling, seed)
        if request != self._asked:
            self._drop()
            self._asked = request
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
            for words in self._player.warnings:
                self._warn(words)
        self._asked = self._player = None

    def _warn(self, words: str) -> None:
        """Log a warning once."""
        if words not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(words)
            _LOG.warning("%s", words)
