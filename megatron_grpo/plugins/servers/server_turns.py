"""Rollout servers as a `TurnSampler`: submitted turns are sent every 20 ms, in one call per server.

All turns of an episode go to the same server, which has its tokens in the prefix cache. If that server is lost, the episode continues on
another one: the open turn is sent there with the same seed. Used on rank 0 alone; the module does not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.rollout.engine import SampledTurn
from megatron_grpo.core.rollout.turns import Key
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.http import start_coroutine
from megatron_grpo.plugins.servers.requests import MOST_DEATHS, describe_deadly, generate
from megatron_grpo.plugins.servers.server_group import ServerHandle, TrainingServerGroup

BETWEEN_CALLS = 0.02  # seconds between two batches of turns


class TurnServerLostError(Exception):
    """Error raised if turns are open, none of them is in flight, and no server with the weights is left."""


class ServerTurns:
    """`rollout.turns.TurnSampler` on rollout servers.

    Args:
        version: Version of the weights that must sample.
        deaths: Episode -> servers that died while its open turn was in flight. Updated here; kept by the caller when all servers are lost.
        format_name: Returns the name of an episode for error messages.
    """

    def __init__(
        self,
        server_group: TrainingServerGroup,
        sampling: wire.Sampling,
        *,
        version: int,
        deaths: dict[Key, list[str]],
        format_name: Callable[[Key], str] = str,
    ):
        self._server_group, self._sampling, self._version = server_group, sampling, version
        self._deaths, self._format_name = deaths, format_name
        self._count = 0
        self._open: dict[Key, wire.Request] = {}  # submitted, and not sampled yet
        self._flying: dict[Key, ServerHandle] = {}  # open turns that are in a call, with their server
        self._dp_ranks: dict[Key, str] = {}  # episode -> name of its server
        self._found: list[tuple[Key, SampledTurn]] = []
        self._changed = asyncio.Event()  # set by an answer or the end of a call since the last poll
        self._refusal: Exception | None = None
        self._calls: set[asyncio.Task[None]] = set()

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        self._count += 1  # names the turn, not the episode
        name = f"{key[0]}/{key[1]}/{self._count}"
        self._open[key] = wire.Request(key=name, ids=tuple(token_ids), seed=seed, n=1, max_tokens=max_tokens)

    @property
    def num_running(self) -> int:
        return len(self._open) + len(self._found)

    def poll(self) -> list[tuple[Key, SampledTurn]]:
        """Send waiting turns and return those that are sampled since the last call; waits up to 20 ms if there are none.

        Raises:
            TurnServerLostError: Turns are open and no server is left.
            RunError: A turn cannot be sampled by any server.
        """
        return start_coroutine(self._polled()).result()

    def abort(self) -> None:
        """Cancel all open turns."""
        start_coroutine(self._end()).result()

    # ---- on the event loop

    async def _end(self) -> None:
        self._open.clear()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _polled(self) -> list[tuple[Key, SampledTurn]]:
        self._send()
        if self._open and not self._found:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), BETWEEN_CALLS)
            self._changed.clear()
        if self._refusal is not None:
            raise self._refusal
        turns, self._found = self._found, []
        return turns

    def _send(self) -> None:
        waiting = [key for key in self._open if key not in self._flying]
        members = {str(member): member for member in self._server_group.used}
        if not members:
            # A server may still answer other calls after one has failed, and a weight sync would end them.
            if waiting and not self._flying and not self._found:
                raise TurnServerLostError
            return
        by_member: dict[str, dict[Key, wire.Request]] = {}
        for key, server in self._assign_servers(waiting, members).items():
            self._flying[key] = members[server]
            by_member.setdefault(server, {})[key] = self._open[key]
        for name, requests in by_member.items():
            task = asyncio.create_task(self._call(members[name], requests))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _assign_servers(self, waiting: Collection[Key], members: Mapping[str, ServerHandle]) -> dict[Key, str]:
        """Return the server that each turn is sent to now. Turns that are missing wait."""
        for key in waiting:
            if self._dp_ranks.get(key) not in members:
                episodes = list(self._dp_ranks.values())
                self._dp_ranks[key] = min(members, key=episodes.count)
        return {key: self._dp_ranks[key] for key in waiting}

    async def _generate(
        self, member: ServerHandle, body: wire.GenerateRequest, take: Callable[[wire.Request, wire.GenerateLine], object]
    ) -> None:
        await generate(member, body, take, noun="turns")

    async def _call(self, member: ServerHandle, requests: Mapping[Key, wire.Request]) -> None:
        keys = {request.key: key for key, request in requests.items()}
        body = wire.GenerateRequest(version=self._version, sampling=self._sampling, requests=tuple(requests.values()))

        def take(request: wire.Request, answer: wire.GenerateLine) -> None:
            self._take(keys[request.key], request, answer, body.version)

        is_lost = False
        try:
            is_lost = await self._server_group.during(member, self._generate(member, body, take))
        except Exception as error:  # noqa: BLE001 - raised by the next poll
            self._refusal = self._refusal or error
        finally:
            self._end_call(member, requests, is_lost=is_lost)

    def _take(self, key: Key, request: wire.Request, answer: wire.GenerateLine, version: int) -> None:
        if answer.error is not None:
            raise RunError(f"{self._format_name(key)} cannot be completed: {answer.error}")
        [completion] = answer.completions
        sampled = SampledTurn(
            token_ids=tuple(completion.tokens.tolist()),
            logprobs=tuple(completion.logprobs.tolist()),
            is_cut=completion.reason != "stop",
            sampling_mask=completion.sampling_mask,
            version=version,
            text=completion.text,
        )
        if self._open.get(key) is request:  # else another server has answered the turn
            del self._open[key]
            self._flying.pop(key, None)
            self._deaths.pop(key, None)
            self._add_sampled(key, sampled)

    def _add_sampled(self, key: Key, sampled: SampledTurn) -> None:
        self._found.append((key, sampled))
        self._changed.set()

    def _end_call(self, member: ServerHandle, requests: Mapping[Key, wire.Request], *, is_lost: bool) -> None:
        """Queue the unanswered turns of a finished call again.

        Keys alone do not identify them: the next turn of an episode whose turn was answered may already be in flight.
        """
        for key, request in requests.items():
            if self._flying.get(key) is not member or self._open.get(key) is not request:
                continue
            del self._flying[key]
            if is_lost:
                self._deaths.setdefault(key, []).append(str(member))
            if len(self._deaths.get(key, ())) >= MOST_DEATHS:
                self._refusal = self._refusal or RunError(describe_deadly(self._format_name(key), self._deaths[key]))
        self._changed.set()
