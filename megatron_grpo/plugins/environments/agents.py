"""Rollouts by agents that own their loop: each episode is a program or function that sends requests to an endpoint of the engine.

The endpoint (`agent_app`) runs in a thread; `AgentLoop` passes its turns to the engine and back. `agent_session` decides which tokens a
request continues, and `agent_programs` starts agents. docs/agents.md is the page for users.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import describe_exception
from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import Key, TurnEngine
from megatron_grpo.core.types import FAULTS, Completion, Group, Prompt
from megatron_grpo.plugins.environments.agent_app import AgentCall, AgentEpisode, AgentServer, EndpointAddress
from megatron_grpo.plugins.environments.agent_programs import (
    SECONDS_TO_TERMINATE,
    AgentEnvironment,
    AgentError,
    AgentProgram,
    AgentResult,
    Endpoint,
    as_result,
)
from megatron_grpo.plugins.environments.agent_session import AgentSession, SessionLimits
from megatron_grpo.plugins.environments.loading import make_template
from megatron_grpo.plugins.environments.players import EpisodeLoopFactory, EpisodeLoopSampler, RequestLoop, TurnRequest
from megatron_grpo.plugins.environments.protocol import InvalidReplyError
from megatron_grpo.plugins.environments.tools import ReadCalls, reader
from megatron_grpo.plugins.environments.trajectory import History, without_turns
from megatron_grpo.plugins.environments.workers import CallResult, CallTimeoutError, WorkerPool
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.rules.settings import REWARD
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.python_objects import copy_for_user

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

SECONDS_BETWEEN_LOOKS = 0.02  # at whether an agent has ended, while the sampler is idle
MOST_UNREAD = 0.05  # share of turns without a reader above which a warning is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRunnerFactory(EpisodeLoopFactory):
    """Settings that all agents of a run share.

    Args:
        needs_reward: Whether the built-in reward `environment` is used.
    """

    agent: type[AgentEnvironment]
    limits: SessionLimits
    needs_reward: bool
    reader: Callable[[Sequence[Mapping[str, Any]]], ReadCalls]
    address: EndpointAddress = EndpointAddress()
    history: History = "template"

    @classmethod
    def from_config(cls, cfg: Config, inputs: ValidatedInputs, *, max_model_len: int) -> AgentRunnerFactory:
        """Derive the settings from the configuration.

        Args:
            inputs: Validated inputs, whose environment is from `load_agent`.
            max_model_len: Context length in tokens where `vllm_max_model_len` is not set.
        """
        assert inputs.environment is not None
        environment, tokenizer = cast("type[AgentEnvironment]", inputs.environment), inputs.tokenizer
        turns, rollout = cfg.turns, cfg.rollout
        make_reader = lru_cache(16)(lambda tools: reader(turns.tool_call_parser, tokenizer, json.loads(tools)))
        return cls(
            agent=environment,
            template=make_template(cfg, environment, tokenizer, model_path=inputs.model_path),
            limits=SessionLimits(
                max_model_len=rollout.vllm_max_model_len or max_model_len, max_completion_length=rollout.max_completion_length,
                max_turns=turns.max_turns, max_contexts=turns.max_agent_contexts,
            ),
            system=cfg.data.system,
            timeout=turns.agent_timeout,
            concurrency=turns.max_agents,
            needs_reward=REWARD in cfg.rewards.reward_funcs,
            history=turns.turn_history,
            reader=lambda tools: make_reader(json.dumps(list(tools), sort_keys=True)),
            address=EndpointAddress(
                host=turns.agent_host, port=turns.agent_port and turns.agent_port + launcher.read().local_rank,
                certfile=turns.agent_ssl_certfile, keyfile=turns.agent_ssl_keyfile,
            ),
        )  # fmt: skip


class AgentLoop(RequestLoop):
    """`rollout.turns.EpisodeLoop` that runs the agents of some prompts and answers their requests.

    Args:
        notify: Receives a description of each refused request, and of each sampling parameter that is not the run's.
    """

    def __init__(
        self, stage: AgentRunnerFactory, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int,
        notify: Callable[[str], None] = lambda words: None,
    ):  # fmt: skip
        super().__init__(prompts, sampling.n)
        self.stage = stage
        make_session = partial(AgentSession, stage.template, stage.limits, seed=seed, reader=stage.reader, history=stage.history)
        self.episodes = {
            (prompt.number, index): AgentEpisode(prompt=prompt, place=index, session=make_session(key=(prompt.number, index)))
            for prompt in self.prompts
            for index in range(self.n)
        }
        self._running = set(self.episodes)
        episodes = list(self.episodes.values())
        self._server = AgentServer(episodes, sampling, on_call=self._ask_turn, notify=notify, address=stage.address)
        self._workers = WorkerPool(concurrency=stage.concurrency, timeout=stage.agent.timeout_of_call)
        for episode in self.episodes.values():
            self._workers.submit(episode.key, partial(self._play, episode))

    @property
    def warnings(self) -> list[str]:
        warnings = [f"An agent {effect}." for effect in self._workers.side_effects]
        if self._running:
            return warnings
        episodes = list(self.episodes.values())
        turns, unread = (sum(len(episode.session.turns) for episode in episodes), sum(episode.session.num_unread for episode in episodes))
        if unread > turns * MOST_UNREAD:
            warnings.append(f"Agents did not read more than {MOST_UNREAD:.0%} of their turns, and those are not trained. If an agent stops "
                         "waiting for long answers, long answers get no reward (metric agent/unread).")  # fmt: skip
        if sum(episode.finish_reason == "max_seconds" for episode in episodes) > len(episodes) / 2:
            warnings.append("More than half of the agents of a rollout reached agent_timeout; raise it, or lower max_turns.")
        return warnings

    @property
    def is_over(self) -> bool:
        """Whether all agents have ended and all their requests are answered."""
        return not self._running and not self._asked

    def groups(self) -> list[Group]:
        groups = []
        for prompt in self.prompts:
            episodes = [self.episodes[prompt.number, generation] for generation in range(self.n)]
            openings = len({episode.session.opening_ids for episode in episodes}) / self.n
            groups.append(Group(prompt=prompt, completions=tuple(self._completion(episode, openings) for episode in episodes)))
        return groups

    def close(self) -> None:
        """End the agents that still run, and the endpoint."""
        super().close()
        running = [self.episodes[key] for key in self._running]
        for episode in running:
            episode.session.end("done")
        started = [episode.endpoint for episode in running if episode.endpoint is not None]
        for endpoint in started:
            endpoint.closed.set()
        self._server.close()
        if isinstance(self.stage.agent.solve, AgentProgram):
            for endpoint in started:
                endpoint.ended.wait(SECONDS_TO_TERMINATE + 1)
        self._workers.close()

    # ---- between the threads

    def _receive(self, seconds: float) -> None:
        if seconds:
            self._wait(min(seconds, SECONDS_BETWEEN_LOOKS))
        for outcome in self._workers.take(0.0):
            self._ended(self.episodes[cast(Key, outcome.key)], outcome)

    def _ask_turn(self, call: AgentCall) -> None:
        turn, (number, generation) = call.turn, call.session.key
        self._ask([TurnRequest(
            key=(number, generation + self.n * turn.number), token_ids=turn.before, seed=turn.seed, max_tokens=turn.max_tokens,
            sampled=partial(self._sampled, call),
        )])  # fmt: skip

    def _sampled(self, call: AgentCall, sampled: SampledTurn) -> None:
        call.session.seconds_waited += time.monotonic() - call.asked_at
        call.session.commit(call.turn, sampled)
        self._server.answered(call)

    # ---- one episode

    def _play(self, episode: AgentEpisode) -> Any:
        """Run the agent. Called in a worker thread; returns what the agent returns."""
        session, prompt = episode.session, episode.prompt
        if self._is_closed:
            raise AgentError("was ended with the rollout")
        row = copy_for_user({**prompt.columns, "prompt": self.stage.opening(prompt)})
        episode.endpoint = Endpoint(
            url=self._server.url, api_key=episode.api_key, verdict_key=episode.verdict_key, timeout=self.stage.timeout,
            is_over=lambda: bool(session.end_reason), messages=lambda: copy_for_user((session.conversations() or [[]])[-1]),
        )  # fmt: skip
        return self.stage.agent.solve(row, episode.endpoint)

    def _ended(self, episode: AgentEpisode, outcome: CallResult) -> None:
        """Process the return value or the exception of an agent."""
        self._running.discard(episode.key)
        episode.seconds, episode.version = outcome.seconds, self._version
        session, error = episode.session, outcome.error
        limit, has_turns = session.end_reason, bool(session.trained_turns)
        session.end("done")
        try:
            if error is None:
                value = outcome.value
                episode.result = value if isinstance(value, AgentResult) else as_result(value, "the agent")
        except InvalidReplyError as invalid:
            error = invalid
        if episode.result.reward is not None:
            episode.reward = episode.result.reward
        lacks_reward = self.stage.needs_reward and episode.reward is None
        is_late = isinstance(error, CallTimeoutError) or episode.result.is_late
        error_text = str(error) if error is None or isinstance(error, AgentError) else describe_exception(error)
        seconds = f"within {self.stage.timeout:g} s"
        ends = [  # (whether, reason, fault); the first that applies
            (isinstance(error, InvalidReplyError), "invalid", str(error)),
            (is_late and not has_turns, "timeout", f"the agent sent no request {seconds}"),
            (is_late and lacks_reward, "timeout", f"the agent has returned no reward {seconds}"),
            (is_late, limit or "max_seconds", ""),
            (error is not None and (not limit or lacks_reward), "error", f"the agent {error_text}"),
            (not has_turns, "error", "the agent sent no request"),
            (lacks_reward, "invalid", "the agent returned no reward; expected a finite number, or a dict with reward"),
            (True, limit or "done", ""),
        ]
        episode.finish_reason, episode.fault = next((reason, fault) for applies, reason, fault in ends if applies)

    def _completion(self, episode: AgentEpisode, openings: float) -> Completion:
        session = episode.session
        trajectory = session.finished() or without_turns(episode.prompt.token_ids)
        conversations = session.conversations()
        messages = conversations[-1] if conversations else []
        num_opening = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), 0)
        num_turns = len(session.trained_turns)
        counts = session.counts
        metrics = {
            "agent/contexts": float(len(conversations)), "agent/forks": float(counts["forks"]), "agent/openings": openings,
            "agent/overruled": float(counts["overruled"]), "agent/refused": float(counts["refused"]),
            "agent/retries": float(counts["retries"]), "agent/seconds_waiting_for_engine": session.seconds_waited,
            "agent/unread": float(session.num_unread),
        }  # fmt: skip
        rewards: list[float | None] = [None] * num_turns
        if num_turns and episode.finish_reason not in FAULTS:
            rewards[-1] = episode.reward
        return episode.completion(
            trajectory, messages, num_opening=num_opening, rewards=rewards, metrics=metrics,
            columns={"contexts": conversations, "agent_output": "", **episode.result.columns},
        )  # fmt: skip


class AgentSampler(EpisodeLoopSampler[AgentRunnerFactory, AgentLoop]):
    """`Sampler` whose completions are episodes of agents."""

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> AgentLoop:
        return AgentLoop(self.stage, prompts, sampling, seed=seed, notify=self._notify)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Play one episode for each completion, and return the groups, as `EpisodeLoopSampler.generate` does. Collective."""
        return super().generate(prompts, replace(sampling, max_completion_length=1), seed=seed)

    def _notify(self, words: str) -> None:
        self._warn(f"An agent's request: {words}.")


def build_sampler(cfg: Config, inputs: ValidatedInputs, engine: TurnEngine) -> AgentSampler:
    """Build the sampler of the episodes of agents on an engine, as `run.plug_ins.BuildSampler`."""
    max_model_len = longest_context(cfg, inputs.longest_prompt)
    return AgentSampler(engine, AgentRunnerFactory.from_config(cfg, inputs, max_model_len=max_model_len))
