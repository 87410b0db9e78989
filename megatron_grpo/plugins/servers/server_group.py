"""Rollout servers of a run, as rank 0 tracks them: which answer, which it owns, and which it waits for.

A run owns a server from its claim on. Periodic requests renew the lease, also while the main thread trains, because a training step may
take longer than the lease. A server that fails is dropped, and claimed again before the next weight sync. The module does not import torch.
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
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError, NoRolloutServerError, Problem, RunError, config_error, one_line, problem_with
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.rollout.sampling_mask import max_mask_tokens
from megatron_grpo.core.weights.lora import LoraSync
from megatron_grpo.core.weights.shape import ModelShape, flat_values
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import Address, list_addresses, read_token
from megatron_grpo.plugins.servers.http import (
    CONNECT,
    Server,
    ServerGoneError,
    ServerRefusedError,
    gather_results,
    make_tls_context,
    run_name,
    start_coroutine,
    with_timeout,
)
from megatron_grpo.run.adapters import lora_sync
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.settings import Config

if TYPE_CHECKING:
    from megatron_grpo.run.inputs import ValidatedInputs

SECONDS_BETWEEN_SIGNS = 10.0  # between heartbeats to servers, and between two log lines while waiting
SECONDS_BETWEEN_TRIES = 0.25
LOST = (ServerGoneError, ServerRefusedError, wire.MalformedMessageError)  # exceptions of a call to an unusable server


@dataclass(slots=True)
class ServerHandle:
    """A server and its last known status. Mutable: every call to the server may update it.

    Args:
        state: Response to the last claim; None: never claimed.
        trouble: Why the server is not used; None: it is used.
        is_silent: Whether it accepts connections but does not answer; only heartbeats try it again, since each call would time out.
        times_claimed: Claims by this process.
        is_proven: Whether it has completed a weight sync of this run since its start.
        image_keys: Keys of the images that it was sent since its start.
    """

    server: Server
    state: wire.ServerState | None = None
    trouble: str | None = "not contacted yet"
    is_silent: bool = False
    times_claimed: int = 0
    is_proven: bool = False
    image_keys: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return str(self.server)

    def give_up(self, error: Exception, claim: int | None = None) -> bool | None:
        """Mark the server as unused.

        Args:
            claim: `times_claimed` when that call began; None: unconditional.

        Returns:
            Whether the server was in use. None, without any change, if it has been claimed again since.
        """
        if claim not in (None, self.times_claimed):
            return None
        was_used, self.trouble = self.trouble is None, str(error)
        self.is_silent = self.is_silent or getattr(error, "is_silent", False)
        return was_used


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequirements:
    """Requirements that a rollout server must meet for this run.

    Args:
        max_model_len: Prompt plus completion, in tokens.
        shape: `flat_values` of the model that is synced; {}: not compared.
        adapter_rank: LoRA rank that it must support; 0: no adapters are synced.
        returns_experts: Whether completions must include the experts that their tokens were routed to.
        limit_images: Images per prompt.
        max_pixels: Maximum number of pixels per image.
        max_mask_size: top_k of the run if completions must include the sampling mask, else 0.
    """

    max_model_len: int
    shape: Mapping[str, Any] = field(default_factory=dict)
    adapter_rank: int = 0
    returns_experts: bool = False
    limit_images: int = 0
    max_pixels: int = 0
    max_mask_size: int = 0

    def problem(self, state: wire.ServerState) -> str | None:
        """Return why a server in this state cannot sample for the run.

        Returns:
            The end of a sentence about the server, or None if it meets all requirements.
        """
        if state.is_frozen:
            return "is frozen and accepts no weight updates: start it without --frozen, or use it as teacher_model_server"
        server_shape, run_shape = state.shape, self.shape
        if (
            server_shape
            and run_shape
            and (different := [name for name in {**run_shape, **server_shape} if server_shape.get(name) != run_shape.get(name)])
        ):
            differences = ", ".join(f"{name} {server_shape.get(name)} (the run's: {run_shape.get(name)})" for name in different)
            return f"was started with a model ({state.model}) that differs from the run's: {differences}. Start it with the run's model"
        if state.max_model_len < self.max_model_len:
            return (
                f"supports sequences of {state.max_model_len} tokens, but prompt plus completion may have {self.max_model_len}: start it "
                f"with --vllm_max_model_len {self.max_model_len}, or lower max_completion_length or max_prompt_length"
            )
        if state.adapter_rank < self.adapter_rank:
            has = f"supports adapters of rank {state.adapter_rank}" if state.adapter_rank else "does not support adapters"
            return (
                f"{has}, but the run syncs one of rank {self.adapter_rank}: start it with the run's LoRA settings, or use "
                "vllm_enable_lora false to sync merged weights"
            )
        if self.returns_experts and not state.returns_experts:
            return (
                "does not return routed experts, which router_replay_mode R3 needs: start it with --router_replay_mode R3, or train with R2"
            )
        if state.limit_images < self.limit_images:
            has = f"supports {state.limit_images} images per prompt" if state.limit_images else "has a text-only model"
            return f"{has}, but the data has {self.limit_images}: start it with the run's model and --limit_images {self.limit_images}"
        if state.max_pixels < self.max_pixels:
            return (
                f"supports images of {state.max_pixels:,} pixels, but the run's max_pixels is {self.max_pixels:,}: start it with "
                f"--max_pixels {self.max_pixels}"
            )
        if state.max_mask_size < self.max_mask_size:
            return (
                f"returns sampling masks for a top_k of at most {state.max_mask_size}, but the run's top_k is {self.max_mask_size}: "
                "start it with the same release of megatron_grpo as the run"
            )
        return None


def derive_requirements(
    cfg: Config,
    shape: ModelShape,
    longest_prompt: int,
    lora: LoraSync | None,
    *,
    image_spec: ImageProcessorSpec | None = None,
    max_images: int = 0,
) -> ServerRequirements:
    """Derive the requirements on rollout servers from the settings and the data.

    Args:
        shape: Shape of the policy.
        longest_prompt: Length of the longest prompt in tokens.
        lora: How adapters are synced; None: full weights.
        image_spec: Image processor of a vision-language model; None: text only.
        max_images: Largest number of images in a prompt.
    """
    return ServerRequirements(
        max_model_len=longest_context(cfg, longest_prompt),
        shape=flat_values(shape),
        adapter_rank=lora.slot_rank if lora else 0,
        returns_experts=cfg.grpo.router_replay_mode == "R3",
        limit_images=max(1, max_images) if image_spec else 0,  # at least 1, for the probe sequence with an image
        max_pixels=image_spec.max_pixels if image_spec else 0,
        max_mask_size=max_mask_tokens(cfg.rollout),
    )


def check_servers(cfg: Config, inputs: ValidatedInputs) -> list[Problem]:
    """Check the servers that answer, before a run claims any. A server that does not answer yet may still start, and is no problem.

    Args:
        inputs: Inputs read so far: the model's shape, and the sets of prompts.

    Raises:
        ConfigError: The token is missing.
    """
    max_images = max((rows.max_images for _, rows in inputs.sets), default=0)
    lora = lora_sync(cfg, inputs.shape, on_gpu=None)
    requirements = derive_requirements(cfg, inputs.shape, inputs.longest_row, lora, image_spec=inputs.image_spec, max_images=max_images)
    token, trust = read_token(cfg.rollout), make_tls_context(cfg.rollout.vllm_server_ca)
    servers = [Server(address, token=token, incarnation="", trust=trust) for address in list_addresses(cfg.rollout)]
    run, problems = run_name(Path(cfg.run.output_dir)), []
    for server, call in [(server, start_coroutine(with_timeout(2 * CONNECT, request_state(server)))) for server in servers]:
        with suppress(ServerGoneError):  # not started yet: the run waits for it
            state, sentence = call.result()
            if state is not None:
                sentence = requirements.problem(state)
                if state.owner not in (None, run):
                    sentence = (
                        f"belongs to another run, {one_line(state.owner, repr)}. Wait until that run ends, or use other servers; a server "
                        f"is released {wire.LEASE_SECONDS:.0f} s after its run was killed"
                    )
            if sentence:
                problems.append(problem_with("vllm_server_host", f"Rollout server {server} {sentence}."))
    return problems


async def request_state(server: Server) -> tuple[wire.ServerState | None, str | None]:
    """Request the state of a server without claiming it.

    Returns:
        (state, None), or (None, reason) if it refuses the request; the reason is the end of a sentence.

    Raises:
        ServerGoneError: The server does not answer.
    """
    try:
        return await server.state(as_owner=False), None
    except ServerRefusedError as refusal:
        other_token = ". Its token differs from this run's" * (refusal.status == http.HTTPStatus.UNAUTHORIZED)
        return None, f"cannot be used: {refusal}{other_token}"
    except wire.MalformedMessageError as error:
        return None, f"responds, but not as a rollout server: {error}"


class ServerGroup(ABC):
    """A set of servers that may start and stop during a run.

    Args:
        addresses: Returns the addresses of all servers that are known now.
        timeout: Longest wait for servers in seconds.
        waits_for_all: Whether the first `gather` waits for all servers.
        print_line: Prints a line for the user; default: `print_stderr`.
    """

    WHOM = ""  # name of the servers in log lines
    NONE = ""  # beginning of the sentence "no server answered"
    LOSS = REFUSAL = ""  # format strings with a server and a reason: it is not used any more; every server would refuse the request
    SAYS_WHO_IS_MISSING = True  # whether to log which servers are missing when the run begins without all

    def __init__(
        self,
        addresses: Callable[[], Sequence[Address]],
        server_at: Callable[[Address], Server],
        *,
        timeout: float,
        waits_for_all: bool = True,
        print_line: Callable[[str], None] | None = None,
    ):
        self._addresses, self._server_at = addresses, server_at
        self.timeout, self.print_line = timeout, print_line or print_stderr
        self.members: dict[Address, ServerHandle] = {}
        self._has_begun, self._waits_for_all = False, waits_for_all
        self.should_cancel: Callable[[], bool] = lambda: False  # True if the run is to stop: then waits end

    @property
    def used(self) -> list[ServerHandle]:
        """Servers that can be used now."""
        return [member for member in self.members.values() if member.trouble is None]

    def gather(self) -> list[ServerHandle]:
        """Return the servers that can be used. Waits for one of them, and the first time for all if `waits_for_all`.

        Raises:
            NoRolloutServerError: No server answered within `timeout`.
            CancelledError: `should_cancel()` became true.
            ConfigError: As `_poll` of the subclass raises.
        """
        with activity.phase(f"waiting for {self.WHOM}", pause=self.timeout):
            start = next_token = time.monotonic()
            while True:
                self._poll()
                waited, missing = time.monotonic() - start, [member for member in self.members.values() if member.trouble is not None]
                if self.used and (self._has_begun or not self._waits_for_all or not missing or waited > self.timeout):
                    if missing and not self._has_begun and self.SAYS_WHO_IS_MISSING:
                        self.print_line(f"starting without {names_with_reasons(missing)}; they are used as soon as they respond")
                    self._has_begun = True
                    return self.used
                if self.should_cancel():
                    raise CancelledError(f"cancelled while waiting for {self.WHOM}")
                if waited > self.timeout:
                    raise NoRolloutServerError(
                        f"{self.NONE} responded within {self.timeout:g} s (vllm_server_timeout): {names_with_reasons(missing)}"
                    )
                if time.monotonic() >= next_token + SECONDS_BETWEEN_SIGNS:
                    next_token = time.monotonic()
                    self.print_line(f"waiting for {self.WHOM} ({waited:.0f} of {self.timeout:g} s): {names_with_reasons(missing)}")
                time.sleep(SECONDS_BETWEEN_TRIES)  # polling, since servers do not announce themselves

    def lose(self, member: ServerHandle, error: Exception, *, claim: int | None = None) -> bool:
        """Mark a server as unused after a call to it has failed.

        Args:
            claim: `times_claimed` of the server when the call began. A failure from before the last claim is ignored: the sync after a
                claim ends all requests on the server.

        Returns:
            Whether the requests in flight may have crashed the server.
        """
        was_used = member.give_up(error, claim)
        if was_used:
            self.print_line(self.LOSS.format(member, error))
        if isinstance(error, ServerRefusedError):
            return was_used is not None and error.is_failure
        return was_used is not None and not getattr(error, "is_silent", False)  # a silent server was not crashed by a prompt

    async def during(self, member: ServerHandle, work: Awaitable[object]) -> bool:
        """Await one call to a server, and mark the server as unused if the call fails.

        Returns:
            Whether the requests in flight may have crashed the server.

        Raises:
            RunError: The server refused the request, as every server would.
        """
        claim = member.times_claimed
        try:
            await work
        except LOST as error:
            is_lost = self.lose(member, error, claim=claim)
            if isinstance(error, ServerRefusedError) and not (error.is_conflict or error.is_failure):
                raise RunError(self.REFUSAL.format(member, error)) from error
            return is_lost
        return False

    @abstractmethod
    def _poll(self) -> None:
        """Ask all known servers concurrently whether they can be used, and update `members`."""

    def _read_addresses(self) -> None:
        """Add new addresses to `members`. Raises ValueError for an invalid address."""
        for address in self._addresses():
            if address not in self.members:
                self.members[address] = ServerHandle(self._server_at(address))


class TrainingServerGroup(ServerGroup):
    """Servers that a run claims, keeps alive with heartbeats, and claims again after a failure.

    `gather` claims every server that answers, including restarted ones. The first time, it raises ConfigError if a server belongs to
    another run or does not meet the requirements. It raises RunError if another process of this run has taken over.

    Args:
        args: As for `ServerGroup`.
        kwargs: As for `ServerGroup`. A resumed run passes `waits_for_all=False`: it has used its servers before, and begins with any of
            them. Even with True, `gather` waits for missing servers no longer than `timeout`.
    """

    WHOM, NONE = "rollout servers", "No rollout server"
    LOSS, REFUSAL = "rollout server {} is not used until the next weight sync: {}", "Rollout server {} rejected the request: {}"

    def __init__(self, *args: Any, run: str, incarnation: str, requirements: ServerRequirements, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._claim, self.needs = wire.ClaimRequest(run=run, incarnation=incarnation), requirements
        self._staying = start_coroutine(self._stay_owner())

    # ---- claims

    def _poll(self) -> None:
        """Claim all servers that are not silent."""
        try:
            self._read_addresses()
        except ValueError as error:
            if not self._has_begun:
                raise config_error("vllm_server_host", f"servers: {error}.") from error
            self.print_line(f"servers: {error}")  # the known servers remain
        gather_results(self._take_up(member) for member in self.members.values() if not member.is_silent)

    async def _take_up(self, member: ServerHandle) -> None:
        try:
            state = await with_timeout(3 * CONNECT, self._claimed(member))
        except LOST as error:
            member.give_up(error)
            return
        problem = self.needs.problem(state)
        if problem and not self._has_begun:
            raise config_error("vllm_server_host", f"Rollout server {member} {problem}.")
        if member.state is None or member.state.boot != state.boot:
            member.is_proven, member.image_keys = False, set()
        member.state, member.trouble, member.times_claimed = state, problem, member.times_claimed + 1

    async def _claimed(self, member: ServerHandle) -> wire.ServerState:
        """Claim a server. Raises RunError if another process of this run owns it: two copies of a run must not sync weights alternately."""
        server = member.server
        try:
            if member.state is not None:
                await self._find_owner(member)
            return wire.decode(wire.ServerState, await server.call("POST", "/claim", self._claim, timeout=CONNECT))
        except ServerRefusedError as refusal:
            if self._has_begun or refusal.is_failure:
                raise
            raise config_error("vllm_server_host", f"{server}: {refusal}.") from refusal

    async def _find_owner(self, member: ServerHandle) -> None:
        try:
            await member.server.state()
        except ServerRefusedError as refusal:
            if refusal.is_conflict and (await member.server.state(as_owner=False)).owner == self._claim.run:
                raise RunError(f"Another process of this run has claimed {member}; this process stops.") from refusal

    # ---- heartbeats

    async def _stay_owner(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_SIGNS)
            await asyncio.gather(*[self._sign(member) for member in list(self.members.values())])

    async def _sign(self, member: ServerHandle) -> None:
        try:
            await with_timeout(2 * CONNECT, member.server.state(as_owner=member.state is not None))
            member.is_silent = False
        except ServerRefusedError:
            member.is_silent = False
        except LOST:
            pass  # the next call to the server reports the failure

    def close(self) -> None:
        """Release all servers, so that another run can claim them at once."""
        self._staying.cancel()
        gather_results(self._release(member) for member in self.members.values() if member.state is not None and not member.is_silent)

    async def _release(self, member: ServerHandle) -> None:
        with suppress(*LOST):  # it has stopped, or another run owns it
            await with_timeout(CONNECT, member.server.call("POST", "/release", wire.EmptyBody(), timeout=CONNECT))


def names_with_reasons(members: Sequence[ServerHandle]) -> str:
    """Return the names of servers for a log line, each with the reason why it is not used.

    Args:
        members: The servers. If there are none, the text says that no address has been written yet.
    """
    return "; ".join(f"{member} ({member.trouble})" for member in members) or "no server has written its address yet"


def print_stderr(text: str) -> None:
    """Print a line for the user on stderr."""
    print(f"megatron-grpo: {text}", file=sys.stderr, flush=True)
