"""Rollouts by a function of the user's own (`--rollout_func`), over the engine that draws turns of episodes.

The function runs in a thread, on each rank that plays, with that rank's share of the prompts; what it asks the sampler for joins the
engine's running requests. So its answers depend neither on the number of ranks nor on who is quicker, and several of its calls are drawn
together. docs/rollout_func.md is the page for users.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_grpo.base import activity
from megatron_grpo.base.errors import RunError, raised
from megatron_grpo.environments.episodes import PlayedSampler
from megatron_grpo.environments.rollout_func_output import CompletionRequest, InvalidRolloutOutputError, Limits, asked_of, completions_of
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.engine import SamplingSettings
from megatron_grpo.rollout.turns import Key, SampledTurn, TurnEngine, TurnSampler, request_seed
from megatron_grpo.types import Completion, Group, Prompt

SECONDS_BETWEEN_LOOKS = 0.2  # at whether the function has asked, where nothing is being drawn
RolloutFunction = Callable[[Sequence[CompletionRequest], "RolloutFuncEngine"], Any]


class _Over(BaseException):
    """The rollout has ended without its function. No Exception: user code that catches those must not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFunc:
    """A function of the user's, and what it may rely on. name: as it was typed. timeout: seconds in which it neither asks nor returns."""

    name: str
    function: RolloutFunction
    tokenizer: Any
    limits: Limits
    timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """What the sampler drew behind one context."""

    token_ids: tuple[int, ...]  # with the one that ended it
    logprobs: tuple[float, ...]  # natural logs, one each
    is_cut: bool  # by max_tokens
    text: str  # without special tokens


@dataclass(slots=True, eq=False)
class _Request:
    """One context to draw behind; its caller waits for what is drawn."""

    key: Key
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    drawn: Future[SampledTurn] = field(default_factory=Future)


class RolloutFuncEngine:
    """What a rollout function is given to draw with. It may be called from several threads; a call returns when all of it is drawn.

    Drawing is at the run's temperature, stop and stop_token_ids: the policy is trained on just that distribution.
    """

    def __init__(
        self,
        own: RolloutFunc,
        sampling: SamplingSettings,
        ask: Callable[[Sequence[_Request]], None],
        seed_of: Callable[[int, int, int], int],
    ):
        self.tokenizer, self.temperature = own.tokenizer, sampling.temperature
        self.max_completion_length, self.max_model_len = own.limits.max_completion_length, own.limits.max_model_len
        self.num_generations = sampling.n
        self._own, self._ask, self._seed_of = own, ask, seed_of
        self._counts: Counter[tuple[int, int]] = Counter()  # what was drawn for each completion so far
        self._lock = threading.Lock()

    def __call__(
        self, asked: Sequence[CompletionRequest], token_ids: Sequence[Sequence[int]] | None = None, *, max_tokens: int | None = None
    ) -> list[DrawnTokens]:
        """Draws once behind each context. token_ids: the contexts, one for each of `asked`, which may stand there more than once (default:
        the prompts). max_tokens: most tokens of each (default: max_completion_length); less where the context leaves no more room.

        Raises ValueError for a context that is none.
        """
        contexts = [one.token_ids for one in asked] if token_ids is None else [tuple(int(i) for i in ids) for ids in token_ids]
        if len(contexts) != len(asked):
            raise ValueError(f"{len(contexts)} contexts for {len(asked)} entries of prompts: one each")
        requests = self._requests(asked, contexts, self.max_completion_length if max_tokens is None else max_tokens)
        self._ask(requests)
        return [self._told(request.drawn.result()) for request in requests]

    def _requests(self, asked: Sequence[CompletionRequest], contexts: Sequence[tuple[int, ...]], most: int) -> list[_Request]:
        requests = []
        for one, ids in zip(asked, contexts, strict=True):
            room = min(most, self.max_model_len - len(ids))
            if not ids or room < 1:
                raise ValueError(
                    f"{one}: a context of {len(ids)} tokens, with max_tokens {most} and room for {self.max_model_len} tokens in all"
                )
            if beyond := [i for i in ids if not 0 <= i < self._own.limits.vocab_size]:
                raise ValueError(f"{one}: {beyond[0]} is no token: ids are 0 to {self._own.limits.vocab_size - 1}")
            with self._lock:
                count = self._counts[one.number, one.generation]
                self._counts[one.number, one.generation] += 1
            key = one.number, one.generation + self.num_generations * count  # of one completion several may be drawn at a time
            requests.append(_Request(key, ids, self._seed_of(one.number, one.generation, count), room))
        return requests

    def _told(self, drawn: SampledTurn) -> DrawnTokens:
        text = self.tokenizer.decode(list(drawn.token_ids), skip_special_tokens=True)
        return DrawnTokens(token_ids=drawn.token_ids, logprobs=drawn.logprobs, is_cut=drawn.is_cut, text=text)


class RolloutFuncRunner:
    """A `rollout.turns.Player`: pumps between the function's thread and the engine."""

    def __init__(self, own: RolloutFunc, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int):
        self.own, self.prompts, self.n = own, list(prompts), sampling.n
        self.problem: str | None = None
        self._seed_of = partial(request_seed, seed, n=sampling.n)
        self._sampler = RolloutFuncEngine(own, sampling, self._ask, self._seed_of)
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._open: dict[Key, _Request] = {}
        self._completions: list[Completion] = []
        self._thread: threading.Thread | None = None
        self._has_ended = self._is_closed = False
        self._turns: TurnSampler | None = None
        self._version, self._heard_at = 0, time.monotonic()
        self._oldest: int | None = None  # weights that drew anything

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        """See `rollout.turns.Player`."""
        if turns is not self._turns:  # the first, or others after lost weights
            for request in self._open.values():
                turns.submit(request.key, request.token_ids, seed=request.seed, max_tokens=request.max_tokens)
        self._turns, self._version = turns, version
        if self._thread is None:
            self._heard_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="rollout_func", daemon=True)
            self._thread.start()
        until = time.monotonic() + seconds
        while True:
            self._submit(turns)
            if self._has_ended and not self._open:
                return True
            activity.advance(0)
            if turns.num_running:
                for key, drawn in turns.poll():
                    self._take(key, drawn)
            else:
                self._rest()
            if time.monotonic() >= until:
                return False

    def groups(self) -> list[Group]:
        """None of them where there is a `problem`."""
        if self.problem is not None:
            return []
        parts = [self._completions[i * self.n : (i + 1) * self.n] for i in range(len(self.prompts))]
        return [Group(prompt=prompt, completions=tuple(part)) for prompt, part in zip(self.prompts, parts, strict=True)]

    def close(self) -> None:
        """Calls that wait end; a function in its own code is left behind there."""
        with self._changed:
            self._is_closed = True
            left = [*self._waiting, *self._open.values()]
            self._waiting.clear()
            self._open.clear()
        for request in left:
            request.drawn.set_exception(_Over())

    # ---- between the threads

    def _submit(self, turns: TurnSampler) -> None:
        with self._changed:
            asked, self._waiting = self._waiting, []
            self._open |= {request.key: request for request in asked}
        if asked:
            self._heard_at = time.monotonic()
        for request in asked:
            turns.submit(request.key, request.token_ids, seed=request.seed, max_tokens=request.max_tokens)

    def _take(self, key: Key, drawn: SampledTurn) -> None:
        self._heard_at = time.monotonic()
        self._oldest = drawn.version if self._oldest is None else min(self._oldest, drawn.version)
        self._open.pop(key).drawn.set_result(drawn)

    def _rest(self) -> None:
        """Until the function asks or ends; it is given up after its timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended, timeout=SECONDS_BETWEEN_LOOKS)
        if time.monotonic() - self._heard_at > self.own.timeout and not self._waiting and not self._has_ended:
            self.problem = f"has neither asked the sampler nor returned for {self.own.timeout:g} s (rollout_func_timeout)."
            self._has_ended = True
            self.close()

    # ---- in the function's thread

    def _ask(self, requests: Sequence[_Request]) -> None:
        with self._changed:
            if self._is_closed or self._has_ended:
                raise _Over
            self._waiting += requests
            self._changed.notify_all()

    def _run(self) -> None:
        found, problem = self._called()
        with self._changed:
            if not self._has_ended:  # or else it was given up
                self._completions, self.problem = found, problem
            self._has_ended = True
            self._changed.notify_all()

    def _called(self) -> tuple[list[Completion], str | None]:
        asked = asked_of(self.prompts, self.n)
        try:
            returned = self.own.function(asked, self._sampler) if asked else {"completion_ids": [], "logprobs": []}
            decode = partial(self.own.tokenizer.decode, skip_special_tokens=True)
            version = self._version if self._oldest is None else self._oldest
            return completions_of(returned, asked, self.own.limits, version=version, decode=decode), None
        except _Over:
            return [], "was ended with the rollout."
        except InvalidRolloutOutputError as bad:
            return [], str(bad)
        except BaseException as error:  # noqa: BLE001 - a user's code; whatever it raises ends the run with a sentence
            return [], raised(error) + _place(error, self.own.function)


def _place(error: BaseException, function: Any) -> str:
    """Where in the function's own file it was raised."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]} of {file})" if lines else ""


class RolloutFuncSampler(PlayedSampler[RolloutFuncRunner]):
    """A `Sampler` whose completions are what a function of the user's makes of an engine's tokens."""

    def __init__(self, engine: TurnEngine, own: RolloutFunc):
        super().__init__(engine)
        self.own = own

    def new_player(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> RolloutFuncRunner:
        return RolloutFuncRunner(self.own, prompts, sampling, seed=seed)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """As `PlayedSampler.generate`. Raises RunError, on every rank, where the function fails on any."""
        if any(prompt.pictures for prompt in prompts):
            raise RunError("rollout_func does not go with pictures: what it returns has no place for them.")
        return super().generate(prompts, sampling, seed=seed)

    def _check(self) -> None:
        problems = collectives.all_gather_object(self._player.problem if self._player is not None else None)
        if said := [problem for problem in problems if problem is not None]:
            raise RunError(f"rollout_func {self.own.name} {said[0]}")
