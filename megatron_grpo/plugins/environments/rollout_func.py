"""Rollouts by a user function (`--rollout_func`) on the engine that samples turns of episodes.

The function runs in a thread on each rank that plays, with that rank's share of the prompts. Its requests join the running batch of the
engine, so concurrent calls are sampled together. Seeds depend on prompt, generation and call count alone, so the results depend neither on
the number of ranks nor on timing. docs/rollout_func.md is the page for users.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import RunError, describe_exception
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import TurnEngine, request_seed
from megatron_grpo.core.types import Completion, Group, Prompt
from megatron_grpo.plugins.environments.players import EpisodeLoopSampler, RequestLoop, TurnRequest
from megatron_grpo.plugins.environments.rollout_func_output import (
    CompletionRequest,
    InvalidRolloutOutputError,
    TokenLimits,
    completion_requests,
    convert_completions,
)
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.data.chat import decode_completion, read_end_ids

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

RolloutFunction = Callable[[Sequence[CompletionRequest], "RolloutFuncEngine"], Any]


class _RolloutEnded(BaseException):
    """The rollout ended before its function returned. A BaseException, so that `except Exception` in user code does not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFunc:
    """A user's rollout function with its tokenizer and limits.

    Args:
        name: Name as given in `--rollout_func`.
        timeout: Seconds in which the function must call the sampler or return.
        skip_special_tokens: Whether the texts of completions leave out special tokens.
    """

    name: str
    function: RolloutFunction
    tokenizer: Any
    limits: TokenLimits
    timeout: float
    skip_special_tokens: bool = True

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens.

        Args:
            token_ids: Token IDs.
        """
        skips = self.skip_special_tokens
        return decode_completion(self.tokenizer, token_ids, skip_special_tokens=skips, end_ids=self.limits.end_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens that the sampler generated after one context.

    Args:
        token_ids: Token IDs, including the end token.
        logprobs: Natural logs, one per token.
        is_cut: Whether it was truncated by max_tokens.
        text: Text without special tokens, unless the run keeps them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_cut: bool
    text: str


class RolloutFuncEngine:
    """Sampler that a rollout function receives as its second argument.

    It may be called from several threads; a call returns when all its contexts are sampled. Sampling uses the run's temperature, stop and
    stop_token_ids, because the policy is trained on exactly that distribution.

    Args:
        derive_seed: (prompt number, generation, call count) -> seed.

    Attributes:
        tokenizer: Tokenizer of the model.
        temperature: Sampling temperature.
        max_completion_length: Limit for one completion in tokens.
        max_model_len: Limit for prompt plus completion in tokens.
        num_generations: Completions per prompt.
        oldest_version: Oldest version of the weights that sampled a token; None before the first call.
    """

    def __init__(
        self,
        rollout_func: RolloutFunc,
        sampling: SamplingSettings,
        on_requests: Callable[[Sequence[TurnRequest]], None],
        derive_seed: Callable[[int, int, int], int],
    ):
        self.tokenizer, self.temperature = rollout_func.tokenizer, sampling.temperature
        self.max_completion_length, self.max_model_len = rollout_func.limits.max_completion_length, rollout_func.limits.max_model_len
        self.num_generations = sampling.n
        self.oldest_version: int | None = None
        self._own, self._ask, self._derive_seed = rollout_func, on_requests, derive_seed
        self._counts: Counter[tuple[int, int]] = Counter()  # requests so far of each completion
        self._lock = threading.Lock()

    def __call__(
        self, asked: Sequence[CompletionRequest], token_ids: Sequence[Sequence[int]] | None = None, *, max_tokens: int | None = None
    ) -> list[SampledTokens]:
        """Sample once after each context.

        Args:
            asked: The completions that the contexts belong to; one may occur more than once.
            token_ids: Token IDs of the contexts, one for each of `asked`. Default: the prompts.
            max_tokens: Limit for each sample in tokens. Default: max_completion_length. It is lowered to the room that the context leaves.

        Returns:
            One `SampledTokens` per context, in order.

        Raises:
            ValueError: The number of contexts is wrong, or a context is empty, too long or contains an invalid token ID.
        """
        contexts = [request.token_ids for request in asked] if token_ids is None else [tuple(int(i) for i in ids) for ids in token_ids]
        if len(contexts) != len(asked):
            raise ValueError(f"{len(contexts)} contexts for {len(asked)} entries of prompts; expected one each")
        requests = self._requests(asked, contexts, self.max_completion_length if max_tokens is None else max_tokens)
        self._ask([request for request, _ in requests])
        sampled = [future.result() for _, future in requests]
        with self._lock:
            versions = [turn.version for turn in sampled] + ([] if self.oldest_version is None else [self.oldest_version])
            self.oldest_version = min(versions, default=None)
        return [self._sampled_tokens(turn) for turn in sampled]

    def _requests(
        self, asked: Sequence[CompletionRequest], contexts: Sequence[tuple[int, ...]], max_tokens: int
    ) -> list[tuple[TurnRequest, Future[SampledTurn]]]:
        requests = []
        for entry, ids in zip(asked, contexts, strict=True):
            max_new_tokens = min(max_tokens, self.max_model_len - len(ids))
            if not ids or max_new_tokens < 1:
                raise ValueError(
                    f"{entry}: a context of {len(ids)} tokens with max_tokens {max_tokens}; together they must have 1 to "
                    f"{self.max_model_len}"
                )
            if invalid_ids := [i for i in ids if not 0 <= i < self._own.limits.vocab_size]:
                raise ValueError(f"{entry}: {invalid_ids[0]} is not a token ID (0 to {self._own.limits.vocab_size - 1})")
            with self._lock:
                count = self._counts[entry.number, entry.generation]
                self._counts[entry.number, entry.generation] += 1
            key = entry.number, entry.generation + self.num_generations * count  # unique, since a completion may have several open requests
            future, seed = Future[SampledTurn](), self._derive_seed(entry.number, entry.generation, count)
            cancel = partial(future.set_exception, _RolloutEnded())
            request = TurnRequest(key=key, token_ids=ids, seed=seed, max_tokens=max_new_tokens, sampled=future.set_result, cancel=cancel)
            requests.append((request, future))
        return requests

    def _sampled_tokens(self, sampled: SampledTurn) -> SampledTokens:
        text = self._own.decode(sampled.token_ids)
        return SampledTokens(token_ids=sampled.token_ids, logprobs=sampled.logprobs, is_cut=sampled.is_cut, text=text)


class RolloutFuncRunner(RequestLoop):
    """`rollout.turns.EpisodeLoop` that passes requests and samples between the function's thread and the engine."""

    def __init__(self, rollout_func: RolloutFunc, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int):
        super().__init__(prompts, sampling.n)
        self.own = rollout_func
        self.problem: str | None = None
        self._derive_seed = partial(request_seed, seed, n=sampling.n)
        self._sampler = RolloutFuncEngine(rollout_func, sampling, self._ask_for, self._derive_seed)
        self._completions: list[Completion] = []
        self._thread: threading.Thread | None = None
        self._is_finished = False
        self._received_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self._is_finished and not self._waiting and not self._asked

    def groups(self) -> list[Group]:
        """Return the groups in the order of the prompts, or an empty list if there is a `problem`."""
        if self.problem is not None:
            return []
        parts = [self._completions[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]
        return [Group(prompt=prompt, completions=tuple(part)) for prompt, part in zip(self.prompts, parts, strict=True)]

    def _receive(self, seconds: float) -> None:
        """Wait for a request or the end of the function. After its timeout, set `problem` and abandon the function."""
        if self._thread is None:
            self._received_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="rollout_func", daemon=True)
            self._thread.start()
        if seconds:
            self._wait(seconds, is_done=lambda: self._is_finished)
        if self._waiting or self._asked:
            self._received_at = time.monotonic()
        elif time.monotonic() - self._received_at > self.own.timeout and not self._is_finished:
            self.problem = f"has neither called the sampler nor returned for {self.own.timeout:g} s (rollout_func_timeout)."
            self._is_finished = True
            self.close()

    # ---- in the function's thread

    def _ask_for(self, requests: Sequence[TurnRequest]) -> None:
        if self._is_finished or not self._ask(requests):
            raise _RolloutEnded

    def _run(self) -> None:
        completions, problem = self._called()
        with self._changed:
            if not self._is_finished:  # else it was abandoned
                self._completions, self.problem = completions, problem
            self._is_finished = True
            self._changed.notify_all()

    def _called(self) -> tuple[list[Completion], str | None]:
        requests = completion_requests(self.prompts, self.n)
        try:
            returned = self.own.function(requests, self._sampler) if requests else {"completion_ids": [], "logprobs": []}
            oldest = self._sampler.oldest_version
            version = self._version if oldest is None else oldest
            return convert_completions(returned, requests, self.own.limits, version=version, decode=self.own.decode), None
        except _RolloutEnded:
            return [], "was ended with the rollout."
        except InvalidRolloutOutputError as invalid:
            return [], str(invalid)
        except BaseException as error:  # noqa: BLE001 - any exception of user code ends the run with a message
            return [], describe_exception(error) + _place(error, self.own.function)


def _place(error: BaseException, function: Any) -> str:
    """Return the innermost line of the function's file in the traceback, for the error message."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]} of {file})" if lines else ""


class RolloutFuncSampler(EpisodeLoopSampler[RolloutFunc, RolloutFuncRunner]):
    """`Sampler` whose completions a user function makes."""

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> RolloutFuncRunner:
        return RolloutFuncRunner(self.stage, prompts, sampling, seed=seed)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Sample as `EpisodeLoopSampler.generate` does. Collective.

        Raises:
            RunError: The function failed on some rank (raised on every rank), or a prompt has images.
        """
        if any(prompt.images for prompt in prompts):
            raise RunError("rollout_func does not support images.")
        return super().generate(prompts, sampling, seed=seed)

    def _check(self) -> None:
        problems = collectives.all_gather_object(self._player.problem if self._player is not None else None)
        if failed := [problem for problem in problems if problem is not None]:
            raise RunError(f"rollout_func {self.stage.name} {failed[0]}")


def build_sampler(cfg: Config, inputs: ValidatedInputs, engine: TurnEngine) -> RolloutFuncSampler:
    """Build the sampler of the user's rollout function on an engine, as `run.plug_ins.BuildSampler`."""
    assert inputs.rollout_func is not None
    limits = TokenLimits(
        vocab_size=inputs.shape.vocab_size,
        max_completion_length=cfg.rollout.max_completion_length,
        max_model_len=cfg.rollout.vllm_max_model_len or longest_context(cfg, inputs.longest_prompt),
        end_ids=read_end_ids(inputs.model_path, inputs.tokenizer, cfg.rollout.stop_token_ids),
    )
    rollout_func = RolloutFunc(
        name=cfg.rollout.rollout_func or "", function=inputs.rollout_func, tokenizer=inputs.tokenizer, limits=limits,
        timeout=cfg.rollout.rollout_func_timeout, skip_special_tokens=cfg.rollout.generation_kwargs.get("skip_special_tokens", True),
    )  # fmt: skip
    return RolloutFuncSampler(engine, rollout_func)
