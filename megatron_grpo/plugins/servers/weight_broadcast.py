"""Weight updates of all rollout servers of a run: one broadcast from rank 0 to all their workers, which succeeds on all or fails."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.rollout.engine import ReceiverChangedError, WeightSyncError
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import is_loopback
from megatron_grpo.plugins.servers.http import ServerRefusedError, start_coroutine, wait_for_answer, with_timeout
from megatron_grpo.plugins.servers.requests import ImagesToSend, placed_images
from megatron_grpo.plugins.servers.server_group import LOST, ServerHandle, TrainingServerGroup
from megatron_grpo.plugins.servers.weight_transfer import LinkError, Rendezvous, WeightSender, local_address

LINK_SECONDS = 60.0  # timeout for a member of the link
FINISH_SECONDS = 600.0  # timeout from the last byte until a server can sample, while it packs layers and clears caches
SCORE_SECONDS = 120.0  # timeout of one /score call


class WeightBroadcaster:
    """Sender of the policy's weights to all servers of a group, and of probe sequences that verify them. Exists on rank 0 alone.

    Args:
        bucket_bytes: Size of one message in bytes.
    """

    def __init__(
        self,
        server_group: TrainingServerGroup,
        *,
        device: torch.device,
        bucket_bytes: int,
        modules: frozenset[str] = frozenset(),
        link_seconds: float = LINK_SECONDS,
    ):
        self.server_group, self.device, self.bucket_bytes = server_group, device, bucket_bytes
        self.modules, self.link_seconds = modules, link_seconds
        self._rendezvous = Rendezvous()
        self._link: WeightSender | None = None
        self._linked: list[tuple[ServerHandle, str]] = []  # members of the link, each with its `boot`
        self._failures = 0  # consecutive failures without a lost server

    def send_update(self, update: WeightUpdate) -> None:
        """Send an update to all servers that are used.

        Args:
            update: The update. An exception of its `tensors` generator is raised unchanged.

        Raises:
            ReceiverChangedError: The weight sync failed, and may succeed if it is repeated.
            WeightSyncError: The weight sync failed twice in a row although no server was lost.
        """
        members = self._members()
        link = self._connect_members(members)
        calls = [(member, start_coroutine(self._order(member, update, link.name))) for member in members]
        try:
            link.send(update.tensors, self.bucket_bytes)
        except LinkError as error:
            self.drop()  # the link may be out of step; closing it also notifies the remaining members at once
            raise self._broken(update, self._settle(calls, self.link_seconds), error) from error
        except BaseException:
            self._settle(calls, self.link_seconds)  # the tensors failed, not the link: the servers were notified, and end the sync first
            raise
        if failed := self._settle(calls, FINISH_SECONDS):
            self.drop()
            raise self._broken(update, failed)
        self._failures = 0
        for member in members:
            member.is_proven = True

    def scores(
        self, sequences: Sequence[TokenSequence], version: int, image_spec: ImageProcessorSpec | None = None
    ) -> dict[str, list[list[float]]]:
        """Score probe sequences on each server, as `WeightReceiver.scores` documents.

        Args:
            image_spec: Image processor of a vision-language model; None: text only.

        Returns:
            Server name -> one row of log-probs per sequence.

        Raises:
            ReceiverChangedError: A server was lost, or has weights of another version.
        """
        images = [sequence.images for sequence in sequences]
        to_send = ImagesToSend.from_images(images, image_spec)
        body = wire.ScoreRequest(
            sequences=tuple(tuple(sequence.token_ids.tolist()) for sequence in sequences), images=tuple(map(placed_images, images)),
            image_data=to_send.but((), to_send.image_data), bounds=to_send.bounds,
        )  # fmt: skip
        scores_by_server: dict[str, list[list[float]]] = {}
        calls = [(member, start_coroutine(with_timeout(SCORE_SECONDS, self._request_scores(member, body)))) for member in self._members()]
        is_any_lost = False
        for member, call in calls:
            try:
                scores = call.result()
            except LOST as error:
                self.server_group.lose(member, error)
                is_any_lost = True
                continue
            is_any_lost = is_any_lost or scores.version != version  # restarted meanwhile, without the run's weights
            scores_by_server[str(member)] = [list(row) for row in scores.logprobs]
        if is_any_lost:
            raise ReceiverChangedError("A rollout server was lost before it reported its weights")
        return scores_by_server

    async def _request_scores(self, member: ServerHandle, body: wire.ScoreRequest) -> wire.ScoreResponse:
        return wire.decode(wire.ScoreResponse, await member.server.call("POST", "/score", body, timeout=SCORE_SECONDS))

    def _members(self) -> list[ServerHandle]:
        """Return the servers that are used. Raises ReceiverChangedError if all were lost since they were gathered."""
        if not (members := self.server_group.used):
            raise ReceiverChangedError("No rollout server is left")
        return members

    # ---- the link

    def _connect_members(self, members: Sequence[ServerHandle]) -> WeightSender:
        """Return the existing link if its members are the same processes, else build a new one."""
        boots = [(member, member.state.boot) for member in members if member.state is not None]
        if self._link is not None and self._link.is_whole and self._linked == boots:
            return self._link
        self.drop()
        name, first, calls = secrets.token_hex(8), 1, []
        world = 1 + sum(member.state.world_size for member in members if member.state is not None)
        addresses = rendezvous_addresses([self._near(member) for member in members])
        for member, address in zip(members, addresses, strict=True):
            assert member.state is not None
            body = wire.JoinRequest(
                address=address, port=self._rendezvous.port, first_rank=first, world=world, name=name, seconds=self.link_seconds
            )
            calls.append((member, start_coroutine(member.server.call("POST", "/join", body, timeout=self.link_seconds + 5))))
            first += member.state.world_size
        link, broke = None, None
        try:
            link = WeightSender(
                self._rendezvous, name=name, world=world, local_host=addresses[0], seconds=self.link_seconds, device=self.device
            )
        except LinkError as error:
            broke = error
        failed = self._settle(calls, self.link_seconds)
        if failed or link is None:
            if link is not None:
                link.drop()
            raise ReceiverChangedError(f"Cannot create the link to the rollout servers: {_describe_failures(failed) or broke}") from broke
        self._link, self._linked = link, boots
        return link

    def _near(self, member: ServerHandle) -> str:
        """Return this machine's address as seen by the server."""
        address = member.server.address
        try:
            return local_address(address.host, address.port)
        except OSError as error:
            self.server_group.lose(member, error)
            raise ReceiverChangedError(f"{member} cannot be reached: {error}") from error

    def drop(self) -> None:
        """Close the link; the next weight sync builds a new one."""
        if self._link is not None:
            self._link.drop()
            self._link = None

    # ---- calls to servers and their results

    async def _order(self, member: ServerHandle, update: WeightUpdate, link: str) -> wire.ServerState:
        body: wire.WeightUpdateRequest | wire.AdapterUpdateRequest
        if update.kind == "adapter":
            path, config = "/adapter", dict(update.config)
            body = wire.AdapterUpdateRequest(version=update.version, link=link, config=config, modules=tuple(sorted(self.modules)))
        else:
            # Base weights before their adapter have no version; a merged trial update keeps its number.
            version = None if update.kind == "weights" and update.version == NO_VERSION else update.version
            path, body = "/weights", wire.WeightUpdateRequest(version=version, link=link, kind=update.kind, moves_tower=update.moves_tower)
        return wire.decode(wire.ServerState, await member.server.call("POST", path, body, timeout=FINISH_SECONDS))

    def _settle(self, calls: Sequence[tuple[ServerHandle, Future[Any]]], seconds: float) -> list[tuple[ServerHandle, Exception]]:
        """Wait for all calls. Returns the servers that failed with their exceptions; those that did not answer are marked as lost."""
        failed: list[tuple[ServerHandle, Exception]] = []
        deadline = time.monotonic() + seconds
        for member, call in calls:
            try:
                answer = wait_for_answer(call, deadline - time.monotonic())
                if isinstance(answer, wire.ServerState):
                    member.state = answer
            except LOST as error:
                failed.append((member, error))
                if not isinstance(error, ServerRefusedError) or error.is_conflict:
                    self.server_group.lose(member, error)
        return failed

    def _broken(self, update: WeightUpdate, failed: list[tuple[ServerHandle, Exception]], error: LinkError | None = None) -> Exception:
        """Return the exception for a failed weight sync."""
        is_anybody_lost = any(member.trouble is not None for member, _ in failed)
        self._failures = 0 if is_anybody_lost else self._failures + 1
        name = "a trial adapter" if update.version == NO_VERSION and update.kind != "weights" else f"version {update.version}"
        sentence = f"The weight sync of {name} failed: {_describe_failures(failed) or error}"
        return WeightSyncError(sentence) if self._failures > 1 else ReceiverChangedError(sentence)

    def close(self) -> None:
        """Close the link, even if a member has died."""
        with suppress(RuntimeError):
            self.drop()


def rendezvous_addresses(nears: Sequence[str]) -> list[str]:
    """Return the address of the rendezvous store for each server.

    A server on this machine may see a loopback address, which other machines cannot reach. If there are servers on other machines, such a
    server uses the address that the first of those sees.

    Args:
        nears: This machine's address as seen by each server.
    """
    outward = next((address for address in nears if not is_loopback(address)), None)
    return [outward if outward is not None and is_loopback(address) else address for address in nears]


def _describe_failures(failed: Sequence[tuple[ServerHandle, Exception]]) -> str:
    return "; ".join(f"{member}: {error}" for member, error in failed)
