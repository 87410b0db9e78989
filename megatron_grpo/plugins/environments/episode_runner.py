"""Concurrent episodes of environments on one sampler. While some episodes wait, others are sampled; no lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from megatron_grpo.core.base.errors import one_line
from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import Key, TurnEngine, request_seed
from megatron_grpo.core.types import Completion, Group, Prompt
from megatron_grpo.plugins.environments.loading import make_template
from megatron_grpo.plugins.environments.players import Episode, EpisodeLoopFactory, EpisodeLoopSampler, RequestLoop, TurnRequest
from megatron_grpo.plugins.environments.protocol import Environment, InvalidReplyError, Message, Turn, as_messages, as_step_output
from megatron_grpo.plugins.environments.trajectory import History, Trajectory, without_turns
from megatron_grpo.plugins.environments.workers import CallResult, CallTimeoutError, WorkerPool
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.python_objects import copy_for_user
from megatron_grpo.run.rewards.process_isolation import ExitRequestedError

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRunnerFactory(EpisodeLoopFactory):
    """Settings that all episodes of a run share. Lengths are in tokens.

    Args:
        max_completion_length: Limit for an episode after its opening, including messages of the environment.
        max_model_len: Limit for one context.
    """

    environment: type[Environment]
    max_turns: int
    max_completion_length: int
    max_model_len: int
    history: History = "template"

    @classmethod
    def from_config(cls, cfg: Config, inputs: ValidatedInputs, *, max_model_len: int) -> EpisodeRunnerFactory:
        """Derive the settings from the configuration.

        Args:
            max_model_len: Context length in tokens where `vllm_max_model_len` is not set.
        """
        assert inputs.environment is not None
        turns, rollout = cfg.turns, cfg.rollout
        return cls(
            environment=inputs.environment,
            template=make_template(cfg, inputs.environment, inputs.tokenizer, model_path=inputs.model_path),
            system=cfg.data.system,
            max_turns=turns.max_turns,
            max_completion_length=rollout.max_completion_length,
            max_model_len=rollout.vllm_max_model_len or max_model_len,
            timeout=turns.environment_timeout,
            concurrency=turns.max_environment_concurrency,
            history=turns.turn_history,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Episode(Episode):
    opening: Sequence[Message]  # the row's messages
    environment: Environment | None = None
    transcript: Trajectory | None = None
    num_turns: int = 0
    messages: list[Message] = field(default_factory=list)  # the whole conversation, unmodified
    num_opening: int = 0  # messages before the first turn
    rewards: list[float | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class EpisodeRunner(RequestLoop):
    """`rollout.turns.EpisodeLoop` that plays the episodes of some prompts with an environment.

    A failure of an environment ends its own episode alone. Environments are constructed in worker threads, and their methods are called
    there too.

    Args:
        n: Episodes per prompt.
        derive_seed: (prompt number, index of the episode in its group, turn) -> seed of that turn.
    """

    def __init__(self, stage: EpisodeRunnerFactory, prompts: Sequence[Prompt], *, n: int, derive_seed: Callable[[int, int, int], int]):
        super().__init__(prompts, n)
        self.stage, self._derive_seed = stage, derive_seed
        self._workers = WorkerPool(concurrency=stage.concurrency, timeout=stage.timeout)
        self._openings: dict[int, tuple[int, ...]] = {}  # prompt number -> token IDs of its opening
        episodes = [
            _Episode(prompt=prompt, place=generation, opening=opening)
            for prompt in self.prompts
            for opening in [stage.opening(prompt)]
            for generation in range(n)
        ]
        self.episodes = {episode.key: episode for episode in episodes}
        self._open = set(self.episodes)
        for episode in episodes:
            self._workers.submit(("start", episode.key), partial(self._start, episode))

    @property
    def warnings(self) -> list[str]:
        return [f"The environment {effect}." for effect in self._workers.side_effects]

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended and all environment calls have returned or timed out."""
        return not self._open and not self._workers

    def close(self) -> None:
        """End the worker threads."""
        super().close()
        self._workers.close()

    def groups(self) -> list[Group]:
        return [
            Group(
                prompt=prompt, completions=tuple(self._completion(self.episodes[prompt.number, generation]) for generation in range(self.n))
            )
            for prompt in self.prompts
        ]

    def _receive(self, seconds: float) -> None:
        for outcome in self._workers.take(seconds):
            self._returned(outcome)

    @staticmethod
    def _completion(episode: _Episode) -> Completion:
        trajectory = episode.transcript.finished() if episode.transcript is not None else without_turns(episode.prompt.token_ids)
        return episode.completion(
            trajectory, episode.messages, num_opening=episode.num_opening, rewards=episode.rewards, metrics=episode.metrics
        )

    # ---- one episode

    def _start(self, episode: _Episode) -> Any:
        """Construct and start the environment. Runs in a worker thread."""
        episode.environment = self.stage.environment(copy_for_user(dict(episode.prompt.columns)))
        return episode.environment.start(copy_for_user(list(episode.opening)))

    def _returned(self, outcome: CallResult) -> None:
        """Process the result of an environment call."""
        kind, key = cast(tuple[str, Key], outcome.key)
        episode = self.episodes[key]
        episode.seconds += outcome.seconds
        if kind == "close" or key not in self._open:
            return
        try:
            if outcome.error is not None:
                raise outcome.error
            if kind == "start":
                episode.version = self._version
                self._started(episode, outcome.value)
            else:
                self._handle_result(episode, outcome.value)
        except CallTimeoutError:
            self._finish(episode, "timeout", f"{kind} did not return within {self.stage.timeout:g} s")
        except InvalidReplyError as error:
            self._finish(episode, "invalid", str(error))
        except MemoryError:
            raise
        except ExitRequestedError as exit_request:
            self._finish(episode, "error", f"{kind} tried to end the process with {exit_request}")
        except BaseException as raised:  # noqa: BLE001 - user code, or a template that rejects its messages
            text = one_line(raised)
            self._finish(episode, "error", f"{kind} raised {type(raised).__name__}{': ' * bool(text)}{text}")

    def _started(self, episode: _Episode, value: Any) -> None:
        is_own = value is not None and list(value) == list(episode.opening) if isinstance(value, (list, tuple)) else False
        messages = tuple(episode.opening) if is_own else as_messages(value, source="start")
        if not messages:
            raise InvalidReplyError("start returned no messages")
        token_ids = episode.prompt.token_ids if is_own else None  # the data set's tokens, so all ranks and rounds use the same ones
        if not is_own and self._is_long(messages, self.stage.max_model_len):
            raise InvalidReplyError(f"start returned more than the maximum of {self.stage.max_model_len} tokens of an episode")
        transcript = Trajectory(self.stage.template, messages, token_ids, history=self.stage.history)
        if not is_own and len(transcript.ids) >= self.stage.max_model_len:
            raise InvalidReplyError(
                f"start returned {len(transcript.ids)} tokens, but an episode with its turns may have at most {self.stage.max_model_len}"
            )
        episode.transcript = transcript
        episode.messages, episode.num_opening = list(messages), len(messages)
        first = self._openings.setdefault(episode.prompt.number, episode.transcript.opening_ids)
        if episode.transcript.opening_ids != first:
            name = type(episode.environment).__name__
            raise InvalidReplyError(
                f"start of {name} returned different messages for two episodes of one row (data-set row {episode.prompt.row}); they may "
                "depend on the row only, because GRPO compares completions of one prompt"
            )
        self._ask_turn(episode)

    def _room(self, episode: _Episode) -> int:
        """Return the limit for the next turn in tokens."""
        assert episode.transcript is not None
        num_used = episode.transcript.num_sampled + episode.transcript.num_environment_tokens
        return min(self.stage.max_completion_length - num_used, self.stage.max_model_len - len(episode.transcript.ids))

    def _is_long(self, messages: Sequence[Message], max_tokens: int) -> bool:
        return self.stage.template.is_longer(sum(1 + len(message["content"]) for message in messages), max_tokens)

    def _ask_turn(self, episode: _Episode) -> None:
        assert episode.transcript is not None
        max_tokens = self._room(episode)
        if max_tokens <= 0:
            return self._finish(episode, "length")
        token_ids, seed = tuple(episode.transcript.ids), self._derive_seed(*episode.key, episode.num_turns)
        sampled = partial(self._sampled, episode)
        self._ask([TurnRequest(key=episode.key, token_ids=token_ids, seed=seed, max_tokens=max_tokens, sampled=sampled)])

    def _sampled(self, episode: _Episode, sampled: SampledTurn) -> None:
        """Process a sampled turn and pass it to the environment."""
        assert episode.transcript is not None and episode.environment is not None
        text = episode.transcript.add_turn(sampled)
        number, episode.num_turns = episode.num_turns, episode.num_turns + 1
        episode.rewards.append(None)
        episode.messages.append({"role": "assistant", "content": text})
        if sampled.is_cut:  # a truncated tool call is not executed
            return self._finish(episode, "length")
        is_last = episode.num_turns == self.stage.max_turns
        turn = Turn(number=number, text=text, messages=copy_for_user(tuple(episode.messages)), is_last=is_last)
        self._workers.submit(("step", episode.key), partial(episode.environment.step, turn))

    def _handle_result(self, episode: _Episode, value: Any) -> None:
        """Process the output of the environment."""
        assert episode.transcript is not None
        step = as_step_output(value)
        episode.rewards[-1] = step.reward
        for name, amount in step.metrics.items():
            episode.metrics[name] = episode.metrics.get(name, 0.0) + amount
        episode.messages += step.messages
        if step.done or not step.messages:
            return self._finish(episode, "done")
        if episode.num_turns >= self.stage.max_turns:
            return self._finish(episode, "max_turns")
        if self._is_long(step.messages, self._room(episode)):
            return self._finish(episode, "length")
        episode.transcript.add_messages(step.messages)
        self._ask_turn(episode)

    def _finish(self, episode: _Episode, finish_reason: str, fault: str = "") -> None:
        self._open.discard(episode.key)
        episode.finish_reason, episode.fault = finish_reason, fault
        if episode.environment is not None and finish_reason != "timeout":
            self._workers.submit(("close", episode.key), episode.environment.close)


class EpisodeSampler(EpisodeLoopSampler[EpisodeRunnerFactory, EpisodeRunner]):
    """`Sampler` whose completions are episodes of an environment."""

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> EpisodeRunner:
        return EpisodeRunner(self.stage, prompts, n=sampling.n, derive_seed=partial(request_seed, seed, n=sampling.n))


def build_sampler(cfg: Config, inputs: ValidatedInputs, engine: TurnEngine) -> EpisodeSampler:
    """Build the sampler of episodes on an engine, as `run.plug_ins.BuildSampler`."""
    max_model_len = longest_context(cfg, inputs.longest_prompt)
    return EpisodeSampler(engine, EpisodeRunnerFactory.from_config(cfg, inputs, max_model_len=max_model_len))
