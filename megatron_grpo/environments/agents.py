"""Rollouts by agents that own their loop: each episode is a program or function that sends requests to an endpoint of the engine.

The endpoint (`agent_app`) runs in a thread; `AgentPlayer` passes its turns to the engine and back. `agent_session` decides which tokens a
request continues, and `agent_programs` starts agents. docs/agents.md is the page for users.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

from megatron_grpo.base import activity
from megatron_grpo.base.errors import raised
from megatron_grpo.config.config import Config
from megatron_grpo.config.validation import REWARD
from megatron_grpo.data.chat import opening_of
from megatron_grpo.environments.agent_app import AgentCall, AgentServer
from megatron_grpo.environments.agent_programs import (
    SECONDS_TO_TERMINATE,
    AgentEnvironment,
    AgentError,
    AgentProgram,
    AgentResult,
    Endpoint,
    as_result,
)
from megatron_grpo.environments.agent_session import AgentSession, SessionLimits
from megatron_grpo.environments.episode_runner import PlayedSampler, turns_as_text
from megatron_grpo.environments.loading import template_of
from megatron_grpo.environments.protocol import InvalidReplyError
from megatron_grpo.environments.tools import ReadCalls, reader
from megatron_grpo.environments.trajectory import ChatTemplate, without_turns
from megatron_grpo.environments.workers import CallResult, CallTimeoutError, Workers
from megatron_grpo.rollout.engine import SamplingSettings
from megatron_grpo.rollout.turns import Key, TurnEngine, TurnSampler
from megatron_grpo.types import FAULTS, Completion, EpisodeNumbers, EpisodeRecord, Group, Prompt

MOST_UNREAD = 0.05  # share of turns without a reader above which a warning is logged
SECONDS_BETWEEN_LOOKS = 0.02  # longest wait for a request while the sampler is idle
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRunnerFactory:
    """Settings that all episodes of a run share."""

    agent: type[AgentEnvironment]
    template: ChatTemplate
    limits: SessionLimits
    system: str | None
    timeout: float  # seconds of an episode
    concurrency: int  # agents at a time
    needs_reward: bool  # whether the built-in reward `environment` is used
    reader: Callable[[Sequence[Mapping[str, Any]]], ReadCalls]

    @classmethod
    def of(
        cls, cfg: Config, environment: type[AgentEnvironment], tokenizer: Any, *, model_path: Path, max_model_len: int
    ) -> AgentRunnerFactory:
        """Derive the settings from the configuration.

        Args:
            cfg: The settings of the run.
            environment: From `load_agent`.
            tokenizer: Tokenizer of the model.
            model_path: Directory of the model, for its end tokens.
            max_model_len: Context length in tokens where `vllm_max_model_len` is not set.
        """
        turns, rollout = cfg.turns, cfg.rollout
        made = lru_cache(16)(lambda tools: reader(turns.tool_call_parser, tokenizer, json.loads(tools)))
        return cls(
            agent=environment,
            template=template_of(cfg, environment, tokenizer, model_path=model_path),
            limits=SessionLimits(
                max_model_len=rollout.vllm_max_model_len or max_model_len, max_completion_length=rollout.max_completion_length,
                max_turns=turns.max_turns, max_contexts=turns.max_agent_contexts,
            ),
            system=cfg.data.system,
            timeout=turns.agent_timeout,
            concurrency=turns.max_agents,
            needs_reward=REWARD in cfg.rewards.reward_funcs,
            reader=lambda tools: made(json.dumps(list(tools), sort_keys=True)),
        )  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode:
    prompt: Prompt
    place: int
    session: AgentSession
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    verdict_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    endpoint: Endpoint | None = None
    reward: float | None = None  # sent to /v1/verdict
    result: AgentResult = AgentResult()
    finish_reason: str = ""
    fault: str = ""
    seconds: float = 0.0
    version: int = 0

    @property
    def key(self) -> Key:
        return self.prompt.number, self.place


class AgentPlayer:
    """`rollout.turns.Player` that runs the agents of some prompts and answers their requests.

    Args:
        stage: Settings of the episodes.
        prompts: The prompts.
        sampling: Sampling settings of the run.
        seed: Seed of the run.
        overruled: Receives a description of each sampling parameter of a request that is not the run's.
    """

    def __init__(
        self, stage: AgentRunnerFactory, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int,
        overruled: Callable[[str], None] = lambda words: None,
    ):  # fmt: skip
        self.stage, self.prompts, self.n = stage, list(prompts), sampling.n
        made = partial(AgentSession, stage.template, stage.limits, seed=seed, reader=stage.reader)
        self.episodes = {
            (prompt.number, place): _Episode(prompt=prompt, place=place, session=made(key=(prompt.number, place)))
            for prompt in self.prompts
            for place in range(self.n)
        }
        self._running = set(self.episodes)
        self._changed = threading.Condition()
        self._waiting: list[AgentCall] = []
        self._open: dict[Key, AgentCall] = {}
        self._counts: Counter[Key] = Counter()  # turns so far of each episode
        self._turns: TurnSampler | None = None
        self._is_closed = False
        self._server = AgentServer(list(self.episodes.values()), sampling, ask=self._ask, overruled=overruled)
        self._workers = Workers(concurrency=stage.concurrency, timeout=stage.agent.timeout_of_call)
        for one in self.episodes.values():
            self._workers.submit(one.key, partial(self._play, one))

    @property
    def side_effects(self) -> list[str]:
        """Side effects of agents on this process; each entry completes a sentence about an agent."""
        return self._workers.side_effects

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        """Pass requests to the sampler and answers to the agents, as `rollout.turns.Player` documents.

        Args:
            turns: Sampler of turns.
            seconds: Maximum time to wait.
            version: Version of the weights that sample.
        """
        if turns is not self._turns:  # the first call, or a new sampler after lost weights
            for key, call in self._open.items():
                turns.submit(key, call.turn.before, seed=call.turn.seed, max_tokens=call.turn.max_tokens)
        self._turns = turns
        until = time.monotonic() + seconds
        while True:
            self._submit(turns)
            for key, sampled in turns.poll():
                call = self._open.pop(key)
                call.session.seconds_waited += time.monotonic() - call.asked_at
                call.session.commit(call.turn, sampled)
                self._server.answered(call)
            for outcome in self._workers.take(0.0):
                self._ended(self.episodes[cast(Key, outcome.key)], outcome, version)
            if not self._running and not self._open:
                self.close()
                return True
            activity.advance(0)
            if not turns.num_running:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting, timeout=SECONDS_BETWEEN_LOOKS)
            if time.monotonic() >= until:
                return False

    def groups(self) -> list[Group]:
        """Return the groups in the order of the prompts. Call it after all episodes have ended."""
        groups = []
        for prompt in self.prompts:
            played = [self.episodes[prompt.number, place] for place in range(self.n)]
            openings = len({one.session.opening for one in played}) / self.n
            groups.append(Group(prompt=prompt, completions=tuple(self._completion(one, openings) for one in played)))
        return groups

    def close(self) -> None:
        """End the agents that still run, and the endpoint."""
        self._is_closed = True
        left = [self.episodes[key] for key in self._running]
        for one in left:
            one.session.end("done")
        started = [one.endpoint for one in left if one.endpoint is not None]
        for endpoint in started:
            endpoint.closed.set()
        self._server.close()
        if isinstance(self.stage.agent.solve, AgentProgram):
            for endpoint in started:
                endpoint.ended.wait(SECONDS_TO_TERMINATE + 1)
        self._workers.close()

    # ---- between the threads

    def _ask(self, call: AgentCall) -> None:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()

    def _submit(self, turns: TurnSampler) -> None:
        with self._changed:
            calls, self._waiting = self._waiting, []
        for call in calls:
            number, place = call.session.key
            key = number, place + self.n * self._counts[number, place]  # unique, since an episode may have several open requests
            self._counts[number, place] += 1
            self._open[key] = call
            turns.submit(key, call.turn.before, seed=call.turn.seed, max_tokens=call.turn.max_tokens)

    # ---- one episode

    def _play(self, episode: _Episode) -> Any:
        """Run the agent. Called in a worker thread; returns what the agent returns."""
        session, prompt = episode.session, episode.prompt
        if self._is_closed:
            raise AgentError("was ended with the rollout")
        assert not isinstance(prompt.raw, str)  # a string prompt is refused when the data are read
        row = {**prompt.columns, "prompt": [dict(message) for message in opening_of(prompt.raw, system=self.stage.system)]}
        episode.endpoint = Endpoint(
            url=self._server.url, api_key=episode.api_key, verdict_key=episode.verdict_key, timeout=self.stage.timeout,
            is_over=lambda: bool(session.ended), messages=lambda: (session.conversations() or [[]])[-1],
        )  # fmt: skip
        return self.stage.agent.solve(row, episode.endpoint)

    def _ended(self, episode: _Episode, outcome: CallResult, version: int) -> None:
        """Process what an agent has returned or raised."""
        self._running.discard(episode.key)
        episode.seconds, episode.version = outcome.seconds, version
        session, error, reason, fault = episode.session, outcome.error, "", ""
        limit, has_turns = session.ended, bool(session.read_turns)
        session.end("done")
        try:
            if error is None:
                found = outcome.value
                episode.result = found if isinstance(found, AgentResult) else as_result(found, "the agent")
        except InvalidReplyError as invalid:
            error = invalid
        is_late = isinstance(error, CallTimeoutError) or episode.result.is_late
        if episode.result.reward is not None:
            episode.reward = episode.result.reward
        if isinstance(error, InvalidReplyError):
            reason, fault = "nonsense", str(error)
        elif is_late and not has_turns:
            reason, fault = "timeout", f"the agent has asked nothing within {self.stage.timeout:g} s"
        elif is_late and self.stage.needs_reward and episode.reward is None:
            reason, fault = "timeout", f"the agent has returned no reward within {self.stage.timeout:g} s"
        elif is_late:
            reason = limit or "max_seconds"
        elif error is not None and not (limit and (episode.reward is not None or not self.stage.needs_reward)):
            reason, fault = "error", f"the agent {error if isinstance(error, AgentError) else 'raised ' + raised(cast(Exception, error))}"
        elif not has_turns:
            reason, fault = "error", "the agent asked nothing"
        elif self.stage.needs_reward and episode.reward is None:
            reason, fault = "nonsense", "the agent returned no reward; expected a finite number, or a dict with reward"
        episode.finish_reason, episode.fault = reason or limit or "done", fault

    def _completion(self, episode: _Episode, openings: float) -> Completion:
        session = episode.session
        trajectory = session.finished() or without_turns(episode.prompt.token_ids)
        conversations = session.conversations()
        messages = conversations[-1] if conversations else []
        num_opening = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
        num_turns = len(session.read_turns)
        counts = session.counts
        metrics = {
            "agent/contexts": float(len(conversations)), "agent/forks": float(counts["forks"]), "agent/openings": openings,
            "agent/overruled": float(counts["overruled"]), "agent/refused": float(counts["refused"]),
            "agent/retries": float(counts["retries"]), "agent/seconds_waiting_for_engine": session.seconds_waited,
            "agent/unread": float(session.num_unread),
        }  # fmt: skip
        is_failed = episode.finish_reason in FAULTS
        length = len(trajectory.sequence.token_ids)
        return Completion(
            sequence=trajectory.sequence,
            logprobs=trajectory.logprobs,
            text=turns_as_text(messages[num_opening:]),
            finish_reason=episode.finish_reason,
            versions=trajectory.versions or ((episode.version, length, length),),
            record=EpisodeRecord(
                numbers=EpisodeNumbers(
                    finish_reason=episode.finish_reason, num_turns=num_turns, seconds=episode.seconds, metrics=metrics, fault=episode.fault
                ),
                messages=tuple(messages),
                num_opening=num_opening,
                turn_rewards=(*(None,) * (num_turns - 1), episode.reward) if num_turns and not is_failed else (None,) * num_turns,
            ),
            columns={"contexts": conversations, "agent_output": "", **episode.result.columns},
        )  # fmt: skip


class AgentSampler(PlayedSampler[AgentPlayer]):
    """`Sampler` whose completions are episodes of agents.

    Args:
        engine: Engine that samples the turns.
        stage: Settings of the episodes.
    """

    def __init__(self, engine: TurnEngine, stage: AgentRunnerFactory):
        super().__init__(engine)
        self.stage = stage
        self._reported: set[str] = set()

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> AgentPlayer:
        return AgentPlayer(self.stage, prompts, sampling, seed=seed, overruled=self._overruled)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Play as `PlayedSampler.generate` does. Collective.

        Args:
            prompts: The prompts of the round, the same on every rank.
            sampling: Sampling settings of the run. The session of an episode limits its lengths.
            seed: Seed of the run.
        """
        return super().generate(prompts, replace(sampling, max_completion_length=1), seed=seed)

    def _check(self) -> None:
        """Warn about effects that bias the training."""
        if self._player is None:
            return
        for effect in self._player.side_effects:
            self._warn(f"An agent {effect}.")
        episodes = list(self._player.episodes.values())
        turns, unread = (sum(len(one.session.turns) for one in episodes), sum(one.session.num_unread for one in episodes))
        if unread > turns * MOST_UNREAD:
            self._warn(f"Agents did not read more than {MOST_UNREAD:.0%} of their turns, and those are not trained. If an agent gives up "
                       "waiting for long answers, long answers are never punished (metric agent/unread).")  # fmt: skip
        if sum(one.finish_reason == "max_seconds" for one in episodes) > len(episodes) / 2:
            self._warn("More than half of the agents of a rollout reached agent_timeout; raise it, or lower max_turns.")

    def _overruled(self, words: str) -> None:
        self._warn(f"An agent's request: {words}, because the policy is trained on the distribution of the run.")

    def _warn(self, words: str) -> None:
        """Log a warning once, and at most 20 different ones."""
        if words not in self._reported and len(self._reported) < 20:
            self._reported.add(words)
            _LOG.warning("%s", words)
