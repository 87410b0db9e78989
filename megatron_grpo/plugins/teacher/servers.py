"""Teacher servers: rank 0 requests the teacher's log-probs of sampled tokens from them.

Teacher servers are frozen: no run claims them, several runs may share one, and they are interchangeable. A server that fails is not used
until the next request. The module does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_grpo.core.base import activity, launcher
from megatron_grpo.core.base.errors import ConfigError, NoRolloutServerError, Problem, RunError, config_error, problem_with
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import read_token, teacher_addresses
from megatron_grpo.plugins.servers.http import CONNECT, Server, ServerGoneError, gather_results, make_tls_context, with_timeout
from megatron_grpo.plugins.servers.requests import Chunk, ServerCallQueue
from megatron_grpo.plugins.servers.server_group import ServerGroup, ServerHandle, names_with_reasons, request_state
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import fingerprint_vocabulary

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

FLAG = "teacher_model_server"
LARGEST = 1e-3  # largest valid log-prob: 0 plus rounding error


class TokensToScore(NamedTuple):
    """Tokens to score from index `first` on, each given all tokens before it."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequirements:
    """Requirements that a teacher server must meet for this run.

    Args:
        max_model_len: Prompt plus completion plus the one token that vLLM always samples, in tokens.
        vocabulary: Fingerprint of the policy's vocabulary (`data.chat.fingerprint_vocabulary`).
        vocab_size: Number of token IDs of the policy.
    """

    max_model_len: int
    vocabulary: str
    vocab_size: int

    @classmethod
    def from_config(cls, cfg: Config, shape: ModelShape, tokenizer: Any, longest_prompt: int) -> TeacherRequirements:
        """Derive the requirements from the settings and the data.

        Args:
            shape: Shape of the policy.
            longest_prompt: Length of the longest prompt in tokens.
        """
        longest = longest_prompt + cfg.rollout.max_completion_length
        if cfg.turns.environment or cfg.turns.has_agent or cfg.rollout.rollout_func:
            # These may extend the prompt, up to the context length of the sampler.
            configured = cfg.rollout.vllm_max_model_len if cfg.rollout.rollout_func else None
            longest = configured or longest_context(cfg, longest_prompt)
        return cls(max_model_len=longest + 1, vocabulary=fingerprint_vocabulary(tokenizer), vocab_size=shape.vocab_size)

    def problem(self, state: wire.ServerState) -> str | None:
        """Return why a server in this state cannot be a teacher of the run.

        Returns:
            The end of a sentence about the server, or None if it meets all requirements.
        """
        if not state.is_frozen:
            return "accepts weight updates, but the weights of a teacher must not change: start it with --frozen true"
        if state.vocabulary != self.vocabulary:
            return (
                f"serves {state.model}, whose vocabulary differs from the policy's, so the same token IDs stand for other text. Use a "
                "teacher with the same tokenizer"
            )
        if state.vocab_size < self.vocab_size:
            return (
                f"serves {state.model} with {state.vocab_size} token IDs, but the policy samples from {self.vocab_size}: it has no "
                "log-probs for the last ones"
            )
        if state.max_model_len < self.max_model_len:
            return (
                f"supports sequences of {state.max_model_len} tokens, but prompt plus completion plus one token may have "
                f"{self.max_model_len}: start it with --vllm_max_model_len {self.max_model_len}"
            )
        return None


class TeacherServerGroup(ServerGroup):
    """Servers of one teacher model. Exists on rank 0 alone.

    Args:
        args: As for `ServerGroup`.
        kwargs: As for `ServerGroup`.
    """

    WHOM, NONE = "teacher servers", "No teacher server"
    LOSS = "teacher server {} is not used until the next request: {}"
    REFUSAL = "Teacher server {} cannot score the completions: {}."
    SAYS_WHO_IS_MISSING = False

    def __init__(self, *args: Any, requirements: TeacherRequirements, should_cancel: Callable[[], bool] = lambda: False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._needs, self.should_cancel = requirements, should_cancel
        self._fingerprint: str | None = None  # of the teacher model, as the first server reports it

    @classmethod
    def build(cls, cfg: Config, requirements: TeacherRequirements, should_cancel: Callable[[], bool] = lambda: False) -> TeacherServerGroup:
        """Make the group for the servers that the settings name.

        Raises:
            ConfigError: The token is missing.
        """
        token, trust = read_token(cfg.rollout), make_tls_context(cfg.rollout.vllm_server_ca)
        server_at = partial(Server, token=token, incarnation="", trust=trust)
        return cls(
            partial(teacher_addresses, cfg.grpo),
            server_at,
            requirements=requirements,
            timeout=cfg.rollout.vllm_server_timeout,
            should_cancel=should_cancel,
        )

    def fingerprint(self) -> str:
        """Return the fingerprint of the teacher model. Waits for a server as `gather` does."""
        self.gather()
        assert self._fingerprint is not None  # set by the first server that answers
        return self._fingerprint

    def problems(self) -> list[Problem]:
        """Check the servers that answer. A server that does not answer yet may still start, and is no problem.

        Raises:
            ConfigError: An address is invalid.
        """
        try:
            self._read_addresses()
        except ValueError as error:
            raise config_error(FLAG, f"{FLAG}: {error}.") from error
        members = gather_results(map(self._poll_server, self.members.values()))
        troubled = [member for member in members if member is not None and member.trouble is not None]
        return [problem_with(FLAG, f"Teacher server {member} {member.trouble}.") for member in troubled]

    # ---- checks

    def _poll(self) -> None:
        """Check all servers, since one may have been restarted with another model.

        Raises:
            ConfigError: The first time, if a server does not meet the requirements.
        """
        problems = self.problems()
        if problems and not self._has_begun:
            raise ConfigError(problems)

    async def _poll_server(self, member: ServerHandle) -> ServerHandle | None:
        """Update the state of a server. Returns it if it answered, else None."""
        try:
            state, member.trouble = await with_timeout(2 * CONNECT, request_state(member.server))
        except ServerGoneError as error:
            member.trouble = str(error)
            return None
        if state is not None:
            member.state, member.trouble = state, self._needs.problem(state) or self._other_model(state)
        return member

    def _other_model(self, state: wire.ServerState) -> str | None:
        self._fingerprint = self._fingerprint or state.fingerprint
        if state.fingerprint == self._fingerprint:
            return None
        return f"serves {state.model} ({state.fingerprint}), but this run's teacher is another model ({self._fingerprint})"

    # ---- log-probs

    def logprobs(self, to_score: Sequence[TokensToScore]) -> list[np.ndarray]:
        """Compute the teacher's log-probs of sequences at temperature 1, on servers with free capacity.

        Returns:
            float32 [tokens from `first` on] of each sequence.

        Raises:
            RunError: The teacher cannot score a sequence.
            NoRolloutServerError: No server answered, or all that are alive have scored nothing for `timeout` seconds.
            CancelledError: The run is to stop.
        """
        request = _ScoringRequest(to_score, timeout=self.timeout)
        while not request.is_done:
            num_before = request.num_answered
            self.gather()
            request.ask(self)
            if request.hangs and request.num_answered == num_before:
                raise NoRolloutServerError(
                    f"No teacher server has scored a sequence for {self.timeout:g} s (vllm_server_timeout): "
                    f"{names_with_reasons(list(self.members.values()))}"
                )
        return request.answers()


def check_teacher(cfg: Config, inputs: ValidatedInputs) -> list[Problem]:
    """Return problems with the teacher's servers that already answer. Only rank 0 checks.

    Args:
        inputs: Inputs read so far: the policy's shape and tokenizer, and the sets of prompts.
    """
    if launcher.read().rank != 0:
        return []
    return TeacherServerGroup.build(
        cfg, TeacherRequirements.from_config(cfg, inputs.shape, inputs.tokenizer, inputs.longest_row)
    ).problems()


class _ScoringRequest(ServerCallQueue[np.ndarray]):
    def __init__(self, to_score: Sequence[TokensToScore], *, timeout: float):
        """Distribute sequences over the teacher's servers.

        Args:
            timeout: Longest time in seconds in which a live server may score nothing.
        """
        super().__init__(range(len(to_score)))
        self._to_score, self._timeout = to_score, timeout
        self.hangs = False  # True after a server has exceeded the timeout

    @property
    def is_done(self) -> bool:
        return self._router.is_done

    @property
    def num_answered(self) -> int:
        return len(self._router.answers)

    def answers(self) -> list[np.ndarray]:
        return [self._router.answers[index] for index in range(len(self._to_score))]

    def ask(self, teacher: TeacherServerGroup) -> None:
        """Wait until all is answered, or all servers that are used now are lost."""
        self._begin(teacher)
        with activity.phase("computing teacher log-probs", total=len(self._to_score), unit="completions") as phase:
            self._wait(phase, lambda: self.num_answered, teacher.should_cancel)

    def _describe_deadly(self, numbers: Sequence[int]) -> str:
        return "A completion was in flight on three teacher servers when they died. See their logs."

    async def _receive(self, member: ServerHandle, chunk: Chunk) -> None:
        to_score = [self._to_score[index] for index in chunk]
        body = wire.PromptLogprobsRequest(
            sequences=tuple(sequence.ids for sequence in to_score), first=tuple(sequence.first for sequence in to_score)
        )
        remaining, last_line = set(chunk), time.monotonic()

        def stream(line: bytes) -> None:
            nonlocal last_line
            activity.advance(0)
            if time.monotonic() - last_line > self._timeout:
                self.hangs = True
                raise ServerGoneError(
                    f"it responds, but has not scored a sequence for {self._timeout:g} s (vllm_server_timeout)", is_silent=True
                )
            if not (scored := wire.decode_line(wire.LogprobsLine, line)):
                return
            index, logprobs = scored.place, scored.logprobs
            if not 0 <= index < len(chunk) or len(logprobs) != len(to_score[index].ids) - to_score[index].first:
                raise wire.MalformedMessageError(f"it returned {len(logprobs)} log-probs for sequence {index} of {len(chunk)}")
            if not (np.isfinite(logprobs) & (logprobs <= LARGEST)).all():
                raise RunError(f"The teacher ({member}) returned a log-prob that is positive or not finite.")
            remaining.discard(chunk[index])
            last_line = time.monotonic()
            self._take(chunk[index], logprobs)

        await member.server.stream("/prompt_logprobs", body, stream)
        if remaining:
            raise ServerGoneError(f"its response ended with {len(remaining)} of {len(chunk)} sequences missing")
