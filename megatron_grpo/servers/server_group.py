"""The rollout servers of a run, as its rank 0 sees them: who is there, who is ours, and whom it waits for. No torch.

A server is ours from its claim on. It stays ours as long as it hears of us, also while the main thread trains, because a training step is
longer than its patience. A server that fails is given up, and taken up again before the next push.
"""

from __future__ import annotations

import asyncio
import http
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.base import activity
from megatron_grpo.base.errors import CancelledError, NoRolloutServerError, Problem, RunError, config_error, problem_with, said_by
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import longest_completion
from megatron_grpo.config.sampling_mask import words_at_most
from megatron_grpo.config.servers import Address, addresses_of, read_token
from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.servers import wire
from megatron_grpo.servers.http import CONNECT, Server, ServerGoneError, ServerRefusedError, begun, run_name, together, trust_of, within
from megatron_grpo.weights.shape import ModelShape, flat

SECONDS_BETWEEN_SIGNS = 10.0  # of life, to servers that are ours; and between two words while waiting
SECONDS_BETWEEN_TRIES = 0.25
LOST = (ServerGoneError, ServerRefusedError, wire.MalformedMessageError)  # what a call to a server that is of no use raises


@dataclass(slots=True)
class ServerHandle:
    """A server, and what is known of it. Changed by whoever learns something."""

    server: Server
    state: wire.State | None = None  # as it answered the last claim; None: it was never ours
    trouble: str | None = "it was not asked yet"  # why it is not used; None: it is
    is_silent: bool = False  # it accepts calls and does not answer: asked again only beside all else, for each call would wait
    times_claimed: int = 0  # by this process
    is_proven: bool = False  # it took a push of ours since it was started
    pictures: set[str] = field(default_factory=set)  # keys of those that it was sent since then

    def __str__(self) -> str:
        return str(self.server)

    def give_up(self, why: Exception, since: int | None = None) -> bool | None:
        """Whether it was in use; None, and nothing changes, if it was claimed again since it had been claimed so often."""
        if since not in (None, self.times_claimed):
            return None
        was_used, self.trouble = self.trouble is None, str(why)
        self.is_silent = self.is_silent or getattr(why, "is_silent", False)
        return was_used


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequirements:
    """What a server must have for this run."""

    max_model_len: int  # tokens of prompt and completion
    shape: Mapping[str, Any] = field(default_factory=dict)  # `flat` of the model that is pushed; {}: not compared
    adapter_rank: int = 0  # room for adapters of this rank; 0: none are pushed
    tells_experts: bool = False  # answers come with the experts that their tokens were routed to
    limit_images: int = 0  # pictures of a prompt
    max_pixels: int = 0  # of a picture
    most_kept: int = 0  # top_k, where answers come with what was left of the vocabulary

    def problem(self, state: wire.State) -> str | None:
        """Why a server that is as `state` says cannot sample for this run, as the end of a sentence."""
        if state.is_frozen:
            return "is frozen, and takes no weights of a run: start it without --frozen, or name it as teacher_model_server"
        theirs, mine = state.shape, self.shape
        if theirs and mine and (other := [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]):
            told = ", ".join(f"{name} {theirs.get(name)} (the run's: {mine.get(name)})" for name in other)
            return f"was started with a model ({state.model}) that computes otherwise than the run's: {told}. Start it with the run's"
        if state.max_model_len < self.max_model_len:
            return (
                f"holds sequences of {state.max_model_len} tokens, and prompt and completion may have {self.max_model_len}: start it with "
                f"--vllm_max_model_len {self.max_model_len}, or lower max_completion_length or max_prompt_length"
            )
        if state.adapter_rank < self.adapter_rank:
            has = f"room for adapters of rank {state.adapter_rank}" if state.adapter_rank else "no room for adapters"
            return (
                f"has {has}, and the run pushes one of rank {self.adapter_rank}: start it with room for that, or use vllm_enable_lora "
                "false, which pushes merged weights"
            )
        if self.tells_experts and not state.tells_experts:
            return (
                "does not tell which experts it takes, and router_replay_mode R3 replays them: start it with --router_replay_mode R3, or "
                "train with R2"
            )
        if state.limit_images < self.limit_images:
            has = f"takes {state.limit_images} pictures a prompt" if state.limit_images else "has a model that sees no pictures"
            return f"{has}, and the data have {self.limit_images}: start it with the run's model and --limit_images {self.limit_images}"
        if state.max_pixels < self.max_pixels:
            return (
                f"takes pictures of {state.max_pixels:,} pixels, and the run's max_pixels is {self.max_pixels:,}: start it with "
                f"--max_pixels {self.max_pixels}"
            )
        if state.most_kept < self.most_kept:
            return (
                f"tells what is left of the vocabulary for a top_k of {state.most_kept}, and the run's top_k is {self.most_kept}: start it "
                "from the release that the run is started from"
            )
        return None


def needs_of(
    cfg: Config,
    shape: ModelShape,
    longest_prompt: int,
    lora: LoraPush | None,
    *,
    eyes: ImageProcessorSpec | None = None,
    most_pictures: int = 0,
) -> ServerRequirements:
    """longest_prompt: of the data, in tokens. lora: how adapters are pushed. eyes: of a model that sees. most_pictures: of a prompt."""
    return ServerRequirements(
        max_model_len=longest_prompt + longest_completion(cfg),
        shape=flat(shape),
        adapter_rank=lora.slot_rank if lora else 0,
        tells_experts=cfg.grpo.router_replay_mode == "R3",
        limit_images=max(1, most_pictures) if eyes else 0,  # one that is probed with
        max_pixels=eyes.max_pixels if eyes else 0,
        most_kept=words_at_most(cfg.rollout),
    )


def problems_with_servers(cfg: Config, needs: ServerRequirements) -> list[Problem]:
    """What is wrong with servers that answer already, before a run claims any. Who is not there yet may still come.

    Raises ConfigError where there is no token.
    """
    token, trust = read_token(cfg.rollout), trust_of(cfg.rollout.vllm_server_ca)
    servers = [Server(address, token=token, incarnation="", trust=trust) for address in addresses_of(cfg.rollout)]
    run, found = run_name(Path(cfg.run.output_dir)), []
    for server, call in [(server, begun(within(2 * CONNECT, look_at(server)))) for server in servers]:
        with suppress(ServerGoneError):  # it is started later, or never: the run waits for it
            state, sentence = call.result()
            if state is not None:
                sentence = needs.problem(state)
                if state.owner not in (None, run):
                    sentence = (
                        f"belongs to another run, {said_by(state.owner, repr)}. Wait for its end, or name other servers; a run that was "
                        f"killed is forgotten {wire.LEASE_SECONDS:.0f} s after"
                    )
            if sentence:
                found.append(problem_with("vllm_server_host", f"the rollout server {server} {sentence}."))
    return found


async def look_at(server: Server) -> tuple[wire.State | None, str | None]:
    """What a server says of itself; or why it does not, as the end of a sentence. Raises Gone."""
    try:
        return await server.state(as_owner=False), None
    except ServerRefusedError as refusal:
        other_token = ". Its token is another one than this run's" * (refusal.status == http.HTTPStatus.UNAUTHORIZED)
        return None, f"cannot be used: {refusal}{other_token}"
    except wire.MalformedMessageError as error:
        return None, f"answers, and not as a rollout server does: {error}"


class ServerGroup(ABC):
    """Servers that come and go, as one asks for them: who is there, and for whom it waits."""

    WHOM = ""  # it waits for, for people
    NONE = ""  # of them, as the beginning of a sentence
    LOSS = REFUSAL = ""  # sentences: of a server and why it is not used any more; of a server and why any would refuse what was asked
    SAYS_WHO_IS_MISSING = True  # where it begins without all

    def __init__(
        self,
        addresses: Callable[[], Sequence[Address]],
        server_at: Callable[[Address], Server],
        *,
        timeout: float,
        waits_for_all: bool = True,
        say: Callable[[str], None] | None = None,
    ):
        """addresses: of all servers that are known now. timeout: the longest wait for servers, in seconds.

        waits_for_all: the first time."""
        self._addresses, self._server_at = addresses, server_at
        self.timeout, self.say = timeout, say or say_aloud
        self.members: dict[Address, ServerHandle] = {}
        self._has_begun, self._waits_for_all = False, waits_for_all
        self.should_cancel: Callable[[], bool] = lambda: False  # what it waits for, since the run is to stop

    @property
    def used(self) -> list[ServerHandle]:
        """Those that are ours and well."""
        return [member for member in self.members.values() if member.trouble is None]

    def gather(self) -> list[ServerHandle]:
        """Those that can be asked; waits for one, and the first time for all that are named.

        Raises NoRolloutServerError after `timeout`, CancelledError soon after `should_cancel()` is true, and what `_look` raises.
        """
        with activity.phase(f"waiting for {self.WHOM}", pause=self.timeout):
            start = next_word = time.monotonic()
            while True:
                self._look()
                waited, missing = time.monotonic() - start, [member for member in self.members.values() if member.trouble is not None]
                if self.used and (self._has_begun or not self._waits_for_all or not missing or waited > self.timeout):
                    if missing and not self._has_begun and self.SAYS_WHO_IS_MISSING:
                        self.say(f"the run begins without {named(missing)}; they are taken up when they come")
                    self._has_begun = True
                    return self.used
                if self.should_cancel():
                    raise CancelledError(f"the wait for {self.WHOM} is given up")
                if waited > self.timeout:
                    raise NoRolloutServerError(f"{self.NONE} answered within {self.timeout:g} s (vllm_server_timeout): {named(missing)}")
                if time.monotonic() >= next_word + SECONDS_BETWEEN_SIGNS:
                    next_word = time.monotonic()
                    self.say(f"waiting for {self.WHOM} ({waited:.0f} of {self.timeout:g} s): {named(missing)}")
                time.sleep(SECONDS_BETWEEN_TRIES)  # nobody tells that a server has come up

    def lose(self, member: ServerHandle, why: Exception, *, since: int | None = None) -> bool:
        """It is given up, by a call that failed. Whether what was in flight may have killed it.

        since: `times_claimed` of the server as the call began. A call from before the last claim says nothing of the server: the push
        that a claim is for ends what is under way there.
        """
        was_used = member.give_up(why, since)
        if was_used:
            self.say(self.LOSS.format(member, why))
        if isinstance(why, ServerRefusedError):
            return was_used is not None and why.is_failure
        return was_used is not None and not getattr(why, "is_silent", False)  # who stands still does not die of a prompt

    async def during(self, member: ServerHandle, work: Awaitable[object]) -> bool:
        """One call. Whether what was in flight may have killed the server. Raises RunError where any server would refuse it."""
        since = member.times_claimed
        try:
            await work
        except LOST as error:
            died = self.lose(member, error, since=since)
            if isinstance(error, ServerRefusedError) and not (error.is_conflict or error.is_failure):
                raise RunError(self.REFUSAL.format(member, error)) from error
            return died
        return False

    @abstractmethod
    def _look(self) -> None:
        """Asks all that may be there, at the same time, whether they can be used."""

    def _read_addresses(self) -> None:
        """Raises ValueError."""
        for address in self._addresses():
            if address not in self.members:
                self.members[address] = ServerHandle(self._server_at(address))


class TrainingServerGroup(ServerGroup):
    """Servers that are claimed, kept, lost and taken up again.

    `gather` claims every server that answers, also one that was started again. It raises ConfigError, the first time, where a server is
    another run's or cannot serve this one; RunError where another process of this run has taken over.
    """

    WHOM, NONE = "rollout servers", "no rollout server"
    LOSS, REFUSAL = "rollout server {} is given up until the next push: {}", "the rollout server {} refused to sample: {}"

    def __init__(self, *where: Any, run: str, incarnation: str, needs: ServerRequirements, **more: Any):
        """where, more: as `ServerGroup`. run, incarnation: who claims.

        waits_for_all: the first time, if they come in time. A run that is started again has had its servers, and begins with any.
        """
        super().__init__(*where, **more)
        self._claim, self.needs = wire.Claim(run=run, incarnation=incarnation), needs
        self._staying = begun(self._stay_owner())

    # ---- who is there

    def _look(self) -> None:
        """Claims all that may be there."""
        try:
            self._read_addresses()
        except ValueError as error:
            if not self._has_begun:
                raise config_error("vllm_server_host", f"servers: {error}.") from error
            self.say(f"servers: {error}")  # those that are known stay
        together(self._take_up(member) for member in self.members.values() if not member.is_silent)

    async def _take_up(self, member: ServerHandle) -> None:
        try:
            state = await within(3 * CONNECT, self._claimed(member))
        except LOST as error:
            member.give_up(error)
            return
        problem = self.needs.problem(state)
        if problem and not self._has_begun:
            raise config_error("vllm_server_host", f"the rollout server {member} {problem}.")
        if member.state is None or member.state.boot != state.boot:
            member.is_proven, member.pictures = False, set()
        member.state, member.trouble, member.times_claimed = state, problem, member.times_claimed + 1

    async def _claimed(self, member: ServerHandle) -> wire.State:
        """Takes a server, unless another process of this run has it by now: two copies of one run must not push in turns."""
        server = member.server
        try:
            if member.state is not None:
                await self._look_who_has(member)
            return wire.decode(wire.State, await server.call("POST", "/claim", self._claim, timeout=CONNECT))
        except ServerRefusedError as refusal:
            if self._has_begun or refusal.is_failure:
                raise
            raise config_error("vllm_server_host", f"{server}: {refusal}.") from refusal

    async def _look_who_has(self, member: ServerHandle) -> None:
        try:
            await member.server.state()
        except ServerRefusedError as refusal:
            if refusal.is_conflict and (await member.server.state(as_owner=False)).owner == self._claim.run:
                raise RunError(f"another process of this run has taken over {member}: this one ends.") from refusal

    # ---- how they stay ours

    async def _stay_owner(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_SIGNS)
            await asyncio.gather(*[self._sign(member) for member in list(self.members.values())])

    async def _sign(self, member: ServerHandle) -> None:
        try:
            await within(2 * CONNECT, member.server.state(as_owner=member.state is not None))
            member.is_silent = False
        except ServerRefusedError:
            member.is_silent = False
        except LOST:
            pass  # whoever needs the server will notice

    def close(self) -> None:
        """Gives all of them back, so that another run need not wait."""
        self._staying.cancel()
        together(self._release(member) for member in self.members.values() if member.state is not None and not member.is_silent)

    async def _release(self, member: ServerHandle) -> None:
        with suppress(*LOST):  # it has gone, or is another's
            await within(CONNECT, member.server.call("POST", "/release", wire.Nothing(), timeout=CONNECT))


def named(members: Sequence[ServerHandle]) -> str:
    """Who they are, and why none of them is used."""
    return "; ".join(f"{member} ({member.trouble})" for member in members) or "none has written its address yet"


def say_aloud(text: str) -> None:
    """To whoever started the run."""
    print(f"megatron-grpo: {text}", file=sys.stderr, flush=True)
