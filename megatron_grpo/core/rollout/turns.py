"""Multi-turn sampling on one engine: requests join and leave while others run. Also how ranks wait together.

Written for vLLM 0.32.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import PartialCompletion, SampledTurn, Sampler, SamplingSettings, prompt_seed
from megatron_grpo.core.types import Group, Prompt

Key = tuple[int, int]  # (prompt number, index in its group)

# Ranks with nothing to wait for block in a collective meanwhile, and a collective that exceeds its timeout ends the run.
SECONDS_BETWEEN_AGREEMENTS = 20.0
SECONDS_BETWEEN_LOOKS = 0.5  # between two checks whether the run cancels what it waits for
DONE, WAITS, GIVES_UP = 0.0, 1.0, 2.0  # states of a rank that waits; the largest over all ranks decides


class TurnSampler(Protocol):
    """One engine, or several servers, that sample single turns of many episodes. An episode has at most one open turn."""

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        """Request one turn.

        Args:
            key: Episode that the turn belongs to.
            token_ids: Context that the turn continues.
            seed: Seed of the turn (`request_seed`).
            max_tokens: Maximum number of tokens to sample.
        """

    def poll(self) -> Sequence[tuple[Key, SampledTurn]]:
        """Run one step of the engine, or receive what the servers have sent; return the turns that finished."""

    @property
    def num_running(self) -> int:
        """Number of turns that are requested and not yet sampled."""


class EpisodeLoop(Protocol):
    """Player of the episodes of some prompts, whose groups it returns at the end."""

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        """Run the episodes for a limited time.

        Given another `turns` object than before, it requests its open turns from that one.

        Args:
            turns: Sampler of the turns.
            seconds: Approximate time to run, in seconds.
            version: Version of the weights.

        Returns:
            Whether all episodes have ended.
        """

    def groups(self) -> list[Group]:
        """Return the groups of the finished episodes."""

    def close(self) -> None:
        """Stop running episodes."""


class TurnEngine(Sampler, Protocol):
    """A sampler that can sample the turns of episodes for an `EpisodeLoop`."""

    def play(self, prompts: Sequence[Prompt], sampling: SamplingSettings, begin: Callable[[Sequence[Prompt]], EpisodeLoop]) -> list[Group]:
        """Run the episodes of the prompts. Collective, and each group is complete and on one rank, as in `generate`.

        After WeightsLostError it may be called again with a `begin` that returns the same player: its open turns are then sampled with
        whatever weights there are.

        Args:
            prompts: Prompts, the same on every rank.
            sampling: Sampling parameters, the same on every rank.
            begin: Returns the player for a rank's part of the prompts; called on the ranks that run episodes.
        """


def request_seed(run_seed: int, prompt_number: int, index: int, turn: int | str, *, n: int) -> int:
    """Return the seed of one turn, a function of the arguments alone. The seed of the first turn is that of a single-turn completion.

    With one seed for all turns, each turn would repeat the random numbers of the first.

    Args:
        index: Index of the episode in its group.
        turn: Index of the turn in its episode, from 0; or the name of another request than the first.
    """
    if turn == 0:
        return prompt_seed(run_seed, prompt_number, n) + index
    return hash_seed(run_seed, prompt_number, index, turn)


def hash_seed(*parts: object) -> int:
    """Return a seed below 2**32 that is a hash of the arguments.

    Args:
        parts: Objects; their text is hashed.
    """
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


class EngineTurnSampler:
    """A vLLM engine inside this process as a `TurnSampler`.

    Args:
        adapter: vLLM's LoRARequest, which every request must carry; None without an adapter.
    """

    def __init__(self, engine: Any, sampling: SamplingSettings, *, version: int, adapter: Any = None):
        self._engine, self._sampling, self._version, self._adapter = engine, sampling, version, adapter
        self._vocab_size = engine.model_config.get_vocab_size()
        self._keys: dict[str, Key] = {}
        self._earlier: dict[Key, tuple[Sequence[int], int]] = {}  # tokens of requests that continue a completion, and how many are of it
        self._count = 0

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int, num_sampled: int | None = None) -> None:
        from vllm.sampling_params import RequestOutputKind

        from megatron_grpo.core.rollout.vllm_requests import sampling_params
        from megatron_grpo.core.rollout.vllm_scheduling import PROMPT

        settings = replace(self._sampling, n=1, max_completion_length=max_tokens)
        # FINAL_ONLY: otherwise vLLM copies all tokens so far at every step. The text is needed for stop strings alone.
        final, words = RequestOutputKind.FINAL_ONLY, bool(settings.stop)
        params = sampling_params(settings, seed, vocab_size=self._vocab_size, output_kind=final, detokenize=words)
        self._count += 1
        # `vllm_scheduling` computes a prompt once for the requests whose names end alike after an underscore.
        name = f"turn-{self._count}" + (f"_{PROMPT}{key[0]}" if num_sampled == 0 else "")
        self._keys[name] = key
        if num_sampled:
            self._earlier[key] = token_ids, num_sampled
        self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params, lora_request=self._adapter)

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        if not self._keys:
            return []
        finished = [output for output in self._engine.step() if output.finished]
        turns = [(self._keys.pop(output.request_id), output.outputs[0]) for output in finished]
        return [(key, self._sampled_turn(key, output)) for key, output in turns]

    @property
    def num_running(self) -> int:
        return len(self._keys)

    def rest(self, state: float) -> None:
        """Pause until the ranks have agreed on how to go on."""

    def interrupt(self) -> list[tuple[Key, SampledTurn]]:
        """Abort all open requests, and return the tokens that each has sampled so far; nothing for those without a token."""
        states = [state for state in self._engine.output_processor.request_states.values() if state.detokenizer.num_output_tokens()]
        outputs = [
            SimpleNamespace(
                token_ids=state.detokenizer.output_token_ids, logprobs=state.logprobs_processor.logprobs, finish_reason="length"
            )
            for state in states
        ]
        keys = [self._keys[state.external_req_id] for state in states]
        turns = [(key, self._sampled_turn(key, output)) for key, output in zip(keys, outputs, strict=True)]
        self.abort()
        return turns

    def abort(self) -> None:
        """Abort all open requests."""
        self._keys.clear()
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _sampled_turn(self, key: Key, output: Any) -> SampledTurn:
        from megatron_grpo.core.rollout.vllm_requests import sampled, until_stop

        earlier = self._earlier.pop(key, None)
        if self._sampling.stop and earlier is not None:
            output = until_stop(output, self._engine.get_tokenizer(), *earlier, self._sampling)
        logprobs, sampling_mask = sampled(output, self._sampling, self._vocab_size)
        is_cut = output.finish_reason == "length"
        return SampledTurn(
            token_ids=tuple(output.token_ids), logprobs=tuple(logprobs), is_cut=is_cut, version=self._version, sampling_mask=sampling_mask
        )


class LeaderTurnSampler(EngineTurnSampler):
    """Turns on the first of several ranks that share an engine: it sends the requests that join before each step to the other ranks.

    Environments respond at different times on different ranks, so this rank alone runs them; otherwise the ranks would step different
    batches.

    Args:
        broadcast: Broadcasts an object from this rank to all ranks of the engine, and returns it.
        adapter: vLLM's LoRARequest, or None.
    """

    def __init__(self, engine: Any, sampling: SamplingSettings, broadcast: Callable[[Any], Any], *, version: int, adapter: Any = None):
        super().__init__(engine, sampling, version=version, adapter=adapter)
        self._broadcast = broadcast
        self._joining: list[tuple[Key, tuple[int, ...], int, int]] = []
        self._digest = b""  # of the turns that finished in the last step

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int, num_sampled: int | None = None) -> None:
        self._joining.append((key, tuple(token_ids), seed, max_tokens))

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        joining, self._joining = self._joining, []
        self._broadcast((joining, self._digest))
        for key, token_ids, seed, max_tokens in joining:
            super().submit(key, token_ids, seed=seed, max_tokens=max_tokens)
        turns = super().poll()
        self._digest = _digest(turns)
        return turns

    @property
    def num_running(self) -> int:
        return len(self._keys) + len(self._joining)

    def rest(self, state: float) -> None:
        self._broadcast(state)


def follow_engine(turns: EngineTurnSampler, receive: Callable[[], Any], digest: bytes) -> tuple[float, bytes]:
    """Repeat the steps of the first rank of a shared engine on another of its ranks, until the first rank rests.

    Returns:
        (state that the first rank rests in, digest of the last step).

    Raises:
        RuntimeError: This rank sampled other tokens than the first.
    """
    while not isinstance(received := receive(), float):
        joining, expected = received
        if expected != digest:
            raise RuntimeError("ranks share a vLLM engine but sampled different tokens")
        for key, token_ids, seed, max_tokens in joining:
            turns.submit(key, token_ids, seed=seed, max_tokens=max_tokens)
        digest = _digest(turns.poll())
    return received, digest


def _digest(turns: Sequence[tuple[Key, SampledTurn]]) -> bytes:
    if not turns:
        return b""
    return hashlib.blake2b(repr([(key, sampled.token_ids) for key, sampled in turns]).encode(), digest_size=8).digest()


def lead_engine(player: EpisodeLoop, turns: TurnSampler, should_cancel: Callable[[], bool], *, version: int) -> float:
    """Run episodes until all have ended, the run cancels them, or it is time to synchronize with the other ranks.

    The limit is SECONDS_BETWEEN_AGREEMENTS: ranks that have nothing left to run must learn that this one is alive.

    Args:
        should_cancel: Whether the run cancels what it waits for.

    Returns:
        DONE, WAITS or GIVES_UP.
    """
    deadline = time.monotonic() + SECONDS_BETWEEN_AGREEMENTS
    while not player.advance(turns, SECONDS_BETWEEN_LOOKS, version=version):
        if should_cancel():
            return GIVES_UP
        if time.monotonic() >= deadline:
            return WAITS
    return DONE


def wait_together(
    is_done: Callable[[float], bool], seconds: float | None = None, *, should_cancel: Callable[[], bool] | None = None
) -> bool:
    """Wait until every rank is done, or until the time is over. Collective.

    Args:
        is_done: Waits on this rank for at most the given number of seconds, and returns whether there is nothing left to wait for.
        seconds: Maximum time to wait, in seconds; None waits without a limit.
        should_cancel: Called every half second; None never cancels.

    Returns:
        Whether every rank is done, the same on every rank.

    Raises:
        CancelledError: `should_cancel` returned true on a rank that was not done. Raised on every rank.
    """
    remaining = seconds
    while True:
        part = SECONDS_BETWEEN_AGREEMENTS if remaining is None else min(SECONDS_BETWEEN_AGREEMENTS, remaining)
        worst = collectives.all_reduce_max(_wait_on_rank(is_done, part, should_cancel))
        if worst == DONE:
            return True
        if worst == GIVES_UP:
            raise CancelledError
        if remaining is not None and (remaining := remaining - part) <= 0:  # counted, not measured: the same on every rank
            return False


def _wait_on_rank(is_done: Callable[[float], bool], seconds: float, should_cancel: Callable[[], bool] | None) -> float:
    """Wait on this rank for at most `seconds`, and return DONE, WAITS or GIVES_UP."""
    if should_cancel is None:
        return DONE if is_done(seconds) else WAITS
    end = time.monotonic() + seconds
    while not is_done(min(SECONDS_BETWEEN_LOOKS, max(0.0, end - time.monotonic()))):
        if should_cancel():
            return GIVES_UP
        if time.monotonic() >= end:
            return WAITS
    return DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAssignment:
    """Prompts that the engine of a rank samples, and those whose groups this rank returns. They depend on the prompt's number alone."""

    rank: int
    num_engines: int
    ranks_per_engine: int

    def find_leader(self, number: int) -> int:
        """Return the rank that returns the group of a prompt."""
        turn, engine = divmod(number, self.num_engines)
        return engine * self.ranks_per_engine + turn % self.ranks_per_engine

    def is_sampled_here(self, number: int) -> bool:
        """Return whether the engine of this rank samples a prompt."""
        return self.find_leader(number) // self.ranks_per_engine == self.rank // self.ranks_per_engine

    def delivered(self, partial: Iterable[PartialCompletion]) -> list[PartialCompletion]:
        """Return the partial completions of all ranks that this rank's engine continues. Collective."""
        parts: dict[int, list[PartialCompletion]] = {}
        for completion in partial:
            first = self.find_leader(completion.prompt_number) // self.ranks_per_engine * self.ranks_per_engine
            for rank in range(first, first + self.ranks_per_engine):
                parts.setdefault(rank, []).append(completion)
        return [completion for part in collectives.exchange(parts) for completion in part]
