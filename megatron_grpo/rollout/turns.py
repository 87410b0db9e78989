"""Turns of many episodes over one engine: requests that join and leave while others run, and who asks for them; how ranks wait together.

Written for vLLM 0.32.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_grpo.base.errors import CancelledError
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.engine import Sampler, SamplingSettings, prompt_seed
from megatron_grpo.types import Group, Prompt, SamplingMask

Key = tuple[int, int]  # (prompt's number, place in its group)

# Ranks with nothing to wait for sit in a collective meanwhile, and a collective that lasts too long ends the run.
SECONDS_BETWEEN_AGREEMENTS = 20.0
SECONDS_BETWEEN_LOOKS = 0.5  # at whether the run gives up what it waits for
DONE, WAITS, GIVES_UP = 0.0, 1.0, 2.0  # where a rank has come to in its waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn."""

    token_ids: tuple[int, ...]  # with the one that ended it
    logprobs: tuple[float, ...]
    is_cut: bool  # by max_tokens
    version: int  # of the weights
    kept: SamplingMask | None = None  # what each token was drawn among, where that is told


class TurnSampler(Protocol):
    """One engine, or several servers, that draw a turn here and a turn there. An episode has at most one open turn."""

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None: ...

    def poll(self) -> Sequence[tuple[Key, SampledTurn]]:
        """A step of the engine, or what has come over the wire; what has ended in it."""

    @property
    def num_running(self) -> int:
        """Turns that are asked for and not drawn."""


class Player(Protocol):
    """Plays the episodes of some prompts, and has their groups in the end."""

    def advance(self, turns: TurnSampler, seconds: float, *, version: int) -> bool:
        """For about so long; whether all have ended. With other `turns` than before it asks them for what is open."""

    def groups(self) -> list[Group]: ...

    def close(self) -> None:
        """No more is played."""


class TurnEngine(Sampler, Protocol):
    """A sampler that can have turns drawn by somebody who answers them."""

    def play(self, prompts: Sequence[Prompt], sampling: SamplingSettings, begin: Callable[[Sequence[Prompt]], Player]) -> list[Group]:
        """As `generate`: collective, and each group is whole and on one rank.

        begin: called on the ranks that play, with their share of the prompts. After WeightsLostError it may be asked again, with a
        `begin` that
        gives the same player: its open turns are then drawn by whatever weights are there.
        """


def request_seed(run_seed: int, prompt_number: int, place: int, turn: int, *, n: int) -> int:
    """The seed of one turn: a function of these alone. The first turn's is that of a single answer.

    With one seed for all turns, each would repeat the random numbers of the first.
    """
    if turn == 0:
        return prompt_seed(run_seed, prompt_number, n) + place
    digest = hashlib.blake2b(f"{run_seed} {prompt_number} {place} {turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


class EngineTurns:
    """vLLM inside this process as a `TurnSampler`."""

    def __init__(self, engine: Any, sampling: SamplingSettings, *, version: int, adapter: Any = None):
        """engine: an LLMEngine. adapter: vLLM's LoRARequest, which every request must carry."""
        self._engine, self._sampling, self._version, self._adapter = engine, sampling, version, adapter
        self._vocab_size = engine.model_config.get_vocab_size()
        self._keys: dict[str, Key] = {}
        self._count = 0

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        from megatron_grpo.rollout.vllm_requests import sampling_params

        settings = replace(self._sampling, n=1, max_completion_length=max_tokens)
        # FINAL_ONLY: else vLLM copies all tokens so far at every step. Without strings that stop it nobody needs its text.
        final, words = RequestOutputKind.FINAL_ONLY, bool(settings.stop)
        params = sampling_params(settings, seed, vocab_size=self._vocab_size, output_kind=final, detokenize=words)
        self._count += 1
        name = f"turn-{self._count}"
        self._keys[name] = key
        self._engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params, lora_request=self._adapter)

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        if not self._keys:
            return []
        ended = [output for output in self._engine.step() if output.finished]
        return [(self._keys.pop(output.request_id), self._drawn(output.outputs[0])) for output in ended]

    @property
    def num_running(self) -> int:
        return len(self._keys)

    def rest(self, state: float) -> None:
        """Its player plays no further for now."""

    def abort(self) -> None:
        """Nobody wants what is open any more."""
        self._keys.clear()
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _drawn(self, output: Any) -> SampledTurn:
        from megatron_grpo.rollout.vllm_requests import sampled

        logprobs, kept = sampled(output, self._sampling, self._vocab_size)
        is_cut = output.finish_reason == "length"
        return SampledTurn(token_ids=tuple(output.token_ids), logprobs=tuple(logprobs), is_cut=is_cut, version=self._version, kept=kept)


class LeadingTurns(EngineTurns):
    """The first rank of several that share an engine: tells the others which requests join before each step.

    Environments answer at other times on other ranks, so this rank alone runs them; else the ranks would step different batches.
    """

    def __init__(self, engine: Any, sampling: SamplingSettings, tell: Callable[[Any], Any], *, version: int, adapter: Any = None):
        """tell: an object -> the same, on the ranks of the engine."""
        super().__init__(engine, sampling, version=version, adapter=adapter)
        self._tell = tell
        self._joining: list[tuple[Key, tuple[int, ...], int, int]] = []
        self._digest = b""  # of what the last step ended

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        self._joining.append((key, tuple(token_ids), seed, max_tokens))

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        joining, self._joining = self._joining, []
        self._tell((joining, self._digest))
        for key, token_ids, seed, max_tokens in joining:
            super().submit(key, token_ids, seed=seed, max_tokens=max_tokens)
        found = super().poll()
        self._digest = _digest(found)
        return found

    @property
    def num_running(self) -> int:
        return len(self._keys) + len(self._joining)

    def rest(self, state: float) -> None:
        self._tell(state)


def follow(turns: EngineTurns, hear: Callable[[], Any], digest: bytes) -> tuple[float, bytes]:
    """The other ranks of that engine: they add what the first one says, and step, until it rests. hear: what it tells next.

    digest: of what the last step ended. Returns the state that the first rank rests in, and that digest. Raises RuntimeError where this
    rank drew other tokens.
    """
    while not isinstance(heard := hear(), float):
        joining, expected = heard
        if expected != digest:
            raise RuntimeError("ranks share a vLLM engine but drew different tokens")
        for key, token_ids, seed, max_tokens in joining:
            turns.submit(key, token_ids, seed=seed, max_tokens=max_tokens)
        digest = _digest(turns.poll())
    return heard, digest


def _digest(found: Sequence[tuple[Key, SampledTurn]]) -> bytes:
    if not found:
        return b""
    return hashlib.blake2b(repr([(key, drawn.token_ids) for key, drawn in found]).encode(), digest_size=8).digest()


def lead(player: Player, turns: TurnSampler, should_cancel: Callable[[], bool], *, version: int) -> float:
    """Plays until all have ended, the run gives up, or ranks that have nothing left to play must hear that this one lives."""
    until = time.monotonic() + SECONDS_BETWEEN_AGREEMENTS
    while not player.advance(turns, SECONDS_BETWEEN_LOOKS, version=version):
        if should_cancel():
            return GIVES_UP
        if time.monotonic() >= until:
            return WAITS
    return DONE


def wait_together(
    is_done: Callable[[float], bool], seconds: float | None = None, *, should_cancel: Callable[[], bool] | None = None
) -> bool:
    """Until every rank is done, at most so long; says whether they are, the same on every rank. Collective.

    is_done: waits on this rank for at most the seconds that it is given, and says whether there is nothing left to wait for.
    gives_up: asked now and then; where it is true on a rank that is not done, CancelledError is raised on every rank.
    """
    left = seconds
    while True:
        part = SECONDS_BETWEEN_AGREEMENTS if left is None else min(SECONDS_BETWEEN_AGREEMENTS, left)
        worst = collectives.all_reduce_max(_waited(is_done, part, should_cancel))
        if worst == DONE:
            return True
        if worst == GIVES_UP:
            raise CancelledError
        if left is not None and (left := left - part) <= 0:  # counted, not measured: the same on every rank
            return False


def _waited(is_done: Callable[[float], bool], seconds: float, should_cancel: Callable[[], bool] | None) -> float:
    """What became of this rank's wait of at most so long."""
    if should_cancel is None:
        return DONE if is_done(seconds) else WAITS
    end = time.monotonic() + seconds
    while not is_done(min(SECONDS_BETWEEN_LOOKS, max(0.0, end - time.monotonic()))):
        if should_cancel():
            return GIVES_UP
        if time.monotonic() >= end:
            return WAITS
    return DONE
