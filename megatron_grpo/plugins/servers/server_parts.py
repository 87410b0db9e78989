"""Completions on rollout servers that continue over weight syncs: `plugins.partial_rollouts.engine` with servers as the engine.

Servers go on sampling while the trainer trains. Parts are sent in order, as servers have room for them, from the event loop of `http`: the
main thread is not needed. Rank 0 alone has them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import PartialCompletion, SampledTurn, SamplingSettings
from megatron_grpo.core.rollout.turns import EngineAssignment, Key
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.plugins.partial_rollouts.engine import PartialGeneration
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.http import ServerRefusedError, start_coroutine
from megatron_grpo.plugins.servers.requests import CALLS, ENDS, generate
from megatron_grpo.plugins.servers.server_group import ServerHandle
from megatron_grpo.plugins.servers.server_turns import BETWEEN_CALLS, ServerTurns, TurnServerLostError

if TYPE_CHECKING:
    from megatron_grpo.plugins.servers.servers import ServerEngine

Value = TypeVar("Value")
ABORT = "abort"  # finish reason of a completion that POST /abort ended
ABORT_SECONDS = 60.0  # longest wait for POST /abort, which lasts as long as an engine step
SECONDS_BETWEEN_LOOKS = 0.5  # at whether the server that should answer is silent


class ServerPartialRollouts(ServerTurns):
    """`plugins.partial_rollouts.engine.StepwiseEngine` on rollout servers; see `ServerTurns` for its arguments.

    A server gets whole groups, at most twice the completions that it samples at a time, so that others share what is left.
    """

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._joining: deque[tuple[Key, wire.Request]] = deque()  # filled by the main thread, emptied by the event loop
        self._is_aborting, self._has_more = False, True
        self._sending = start_coroutine(self._keep_sending())

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int, num_sampled: int | None = None) -> None:
        request = wire.Request(
            key=f"{key[0]}/{key[1]}", ids=tuple(token_ids), seed=seed, n=1, max_tokens=max_tokens, num_sampled=num_sampled or 0
        )
        self._joining.append((key, request))
        self._has_more = True

    def interrupt(self) -> list[tuple[Key, SampledTurn]]:
        """End all parts, and return what was sampled since the last `poll`. What a lost server has sampled is missing.

        Raises:
            RunError: A part cannot be sampled by any server.
        """
        return start_coroutine(self._interrupted()).result()

    # ---- on the event loop

    async def _keep_sending(self) -> None:
        while True:
            if self._has_more:
                self._has_more = False
                with suppress(TurnServerLostError):  # raised where the main thread waits
                    self._send()
            await asyncio.sleep(BETWEEN_CALLS)

    async def _interrupted(self) -> list[tuple[Key, SampledTurn]]:
        self._is_aborting = True
        self._sending.cancel()
        while calls := list(self._calls):  # again for a call that a server had not read
            members = {str(member): member for member in self._flying.values()}
            await asyncio.gather(*(self._server_group.during(member, self._abort(member)) for member in members.values()))
            await asyncio.wait(calls, timeout=1.0)
        self._open.clear()
        if self._refusal is not None:
            raise self._refusal
        sampled, self._found = self._found, []
        return sampled

    async def _abort(self, member: ServerHandle) -> None:
        call = member.server.call("POST", "/abort", wire.AbortRequest(version=self._version), timeout=ABORT_SECONDS)
        answer = asyncio.ensure_future(call)
        # Streams have heartbeats, so they notice a silent server long before the time of /abort is up.
        while not answer.done() and not member.is_silent:
            await asyncio.wait([answer], timeout=SECONDS_BETWEEN_LOOKS)
        if answer.done():
            await answer
        else:
            answer.cancel()

    async def _end(self) -> None:
        self._is_aborting = True  # nothing is sent after this
        self._sending.cancel()
        await super()._end()

    def _send(self) -> None:
        if self._is_aborting:
            return
        while self._joining:
            key, request = self._joining.popleft()
            self._open[key] = request
        super()._send()

    def _assign_servers(self, waiting: Collection[Key], members: Mapping[str, ServerHandle]) -> dict[Key, str]:
        assigned: dict[Key, str] = {}
        flying = Counter(map(str, self._flying.values()))
        room = {name: CALLS * (member.state.max_num_seqs if member.state else 1) for name, member in members.items()}
        for _, keys in groupby(waiting, key=lambda key: key[0]):
            least_loaded = min(room, key=lambda name: flying[name] / room[name])
            if flying[least_loaded] >= room[least_loaded]:
                break
            group_keys = list(keys)
            assigned |= dict.fromkeys(group_keys, least_loaded)
            flying[least_loaded] += len(group_keys)
        return assigned

    async def _generate(
        self, member: ServerHandle, body: wire.GenerateRequest, take: Callable[[wire.Request, wire.GenerateLine], object]
    ) -> None:
        try:
            await generate(member, body, take, noun="parts", ends=lambda: (*ENDS, ABORT) if self._is_aborting else ENDS)
        except ServerRefusedError as refusal:
            if not (self._is_aborting and refusal.is_conflict):
                raise

    def _end_call(self, *args: Any, **more: Any) -> None:
        super()._end_call(*args, **more)
        self._has_more = True

    def _add_sampled(self, key: Key, sampled: SampledTurn) -> None:
        if sampled.token_ids:  # a part that was aborted may have none
            super()._add_sampled(key, sampled)
        self._has_more = True


class ServerGeneration(PartialGeneration):
    """`PartialGeneration` on rollout servers; every rank holds one, and rank 0 alone has its completions.

    Args:
        make_parts: Returns the servers as an engine that samples parts by the present weights; called on rank 0 alone.
    """

    def __init__(self, engine: ServerEngine, make_parts: Callable[[], ServerPartialRollouts], sampling: SamplingSettings, *, seed: int):
        self._engine, self._make_parts, self._prompts = engine, make_parts, dict[int, Prompt]()
        super().__init__(
            cast(ServerPartialRollouts, None), sampling, seed=seed, version=engine.version,
            decode_text=lambda _, completion: completion.text,
            share=EngineAssignment(rank=0, num_engines=1, ranks_per_engine=1), should_cancel=lambda: engine.should_cancel(),
        )  # fmt: skip

    def begin(self, prompts: Sequence[Prompt], partial: Iterable[PartialCompletion]) -> ServerGeneration:
        """Request the completions of the prompts. Returns at once. Collective.

        Returns:
            This object.
        """
        self._found = {completion.key: completion for part in collectives.exchange({0: list(partial)}) for completion in part}
        self._engine.run_on_rank_zero(lambda _: self._ask_servers(prompts))
        return self

    def _ask_servers(self, prompts: Sequence[Prompt]) -> None:
        """Request the completions of further prompts; after all servers were lost, also of all earlier ones that are unfinished."""
        self._prompts |= {prompt.number: prompt for prompt in prompts}
        if self._parts is None:
            self._asked, self._parts = set(), self._make_parts()
            prompts = list(self._prompts.values())
        self._ask(prompts)

    def groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        self._engine.require_weights()
        keys = [(prompt.number, generation) for prompt in prompts for generation in range(self._sampling.n)]

        def wait(_: object) -> int:
            self._ask_servers(prompts)
            with activity.phase("sampling", total=len(keys), unit="completions") as phase:
                while open_ := [key for key in keys if key not in self._found or not self._found[key].finish_reason]:
                    phase.done = len(keys) - len(open_)
                    if self._should_cancel():
                        raise CancelledError
                    try:
                        self._take(self._parts.poll())
                    except TurnServerLostError:
                        self.abort()
                        return len(open_)
            return 0

        self._engine.require_all(wait, "{} completions are not sampled")
        n = self._sampling.n
        groups = [] if self._parts is None else [[self._found[key] for key in keys[i : i + n]] for i in range(0, len(keys), n)]
        local = [sampled for part in collectives.exchange(round_robin(groups)) for sampled in part]
        own = prompts[collectives.rank() :: collectives.num_ranks()]
        return [
            Group(prompt=prompt, completions=tuple(self._completion(prompt, completion) for completion in sampled))
            for prompt, sampled in zip(own, local, strict=True)
        ]

    def interrupt(self) -> list[PartialCompletion]:
        def interrupt(_: object) -> None:
            if self._parts is not None:
                self._take(self._parts.interrupt())

        self._engine.run_on_rank_zero(interrupt)
        return self.sampled()

    def abort(self) -> None:
        if self._parts is not None:
            self._parts.abort()
            self._parts = cast(ServerPartialRollouts, None)


def round_robin(values: Sequence[Value]) -> dict[int, Sequence[Value]]:
    """Deal things to the ranks that score them, round-robin.

    Args:
        values: One per prompt, in the order of the prompts.

    Returns:
        Rank -> its things; ranks without any are missing.
    """
    return {rank: values[rank :: collectives.num_ranks()] for rank in range(min(collectives.num_ranks(), len(values)))}
