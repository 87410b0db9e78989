"""A push to all rollout servers of a run at once, from rank 0: over one link of rank 0 and all their workers, all or nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.rollout.engine import ReceiverChangedError, WeightSyncError
from megatron_grpo.servers import wire
from megatron_grpo.servers.http import ServerRefusedError, answer_of, begun, within
from megatron_grpo.servers.requests import ToSend, on_the_wire
from megatron_grpo.servers.server_group import LOST, ServerHandle, TrainingServerGroup
from megatron_grpo.servers.weight_transfer import LinkError, Rendezvous, WeightSender, local_address
from megatron_grpo.types import Sequence as Scored
from megatron_grpo.weights.buckets import NO_VERSION, WeightUpdate

LINK_SECONDS = 60.0  # the longest that a member of the link waits for another
FINISH_SECONDS = 600.0  # from the last byte until a server can sample: layers are packed, caches emptied
SCORE_SECONDS = 120.0


class WeightBroadcaster:
    """Gives all servers of a fleet what the policy streams, and asks them what they make of it."""

    def __init__(
        self,
        fleet: TrainingServerGroup,
        *,
        device: torch.device,
        bucket_bytes: int,
        modules: frozenset[str] = frozenset(),
        link_seconds: float = LINK_SECONDS,
    ):
        """bucket_bytes: of a message. modules: Hugging Face names of those that every adapter of this run is on."""
        self.fleet, self.device, self.bucket_bytes = fleet, device, bucket_bytes
        self.modules, self.link_seconds = modules, link_seconds
        self._meeting = Rendezvous()
        self._link: WeightSender | None = None
        self._linked: list[tuple[ServerHandle, str]] = []  # with the boot of each
        self._failures = 0  # one after the other, with nobody lost

    def push(self, update: WeightUpdate) -> None:
        """All that are used get the update.

        Raises ReceiverChangedError where that failed and may succeed if it is done again; WeightSyncError where it failed twice though
        everybody
        was there. An error of the update's own tensors is raised as it is.
        """
        members = self._members()
        link = self._link_of(members)
        calls = [(member, begun(self._order(member, update, link.name))) for member in members]
        try:
            link.send(update.tensors, self.bucket_bytes)
        except LinkError as error:
            self.drop()  # nothing more is sent on a link that may have lost its step; and who is left hears of it at once
            raise self._broken(update, self._settle(calls, self.link_seconds), error) from error
        except BaseException:
            self._settle(calls, self.link_seconds)  # the tensors failed, not the link: servers were told, and end first
            raise
        if failed := self._settle(calls, FINISH_SECONDS):
            self.drop()
            raise self._broken(update, failed)
        self._failures = 0
        for member in members:
            member.is_proven = True

    def scores(self, sequences: Sequence[Scored], version: int, eyes: ImageProcessorSpec | None = None) -> dict[str, list[list[float]]]:
        """What each server makes of these; see `WeightReceiver.scores`. Raises ReceiverChangedError where one was lost. eyes: of the
        model.
        """
        shown = [one.shown for one in sequences]
        album = ToSend.of(shown, eyes)
        body = wire.Score(
            sequences=tuple(tuple(one.token_ids.tolist()) for one in sequences), shown=tuple(map(on_the_wire, shown)),
            pictures=album.but((), album.pictures), bounds=album.bounds,
        )  # fmt: skip
        found: dict[str, list[list[float]]] = {}
        asked = [(member, begun(within(SCORE_SECONDS, self._scores_of(member, body)))) for member in self._members()]
        lost = False
        for member, call in asked:
            try:
                scores = call.result()
            except LOST as error:
                self.fleet.lose(member, error)
                lost = True
                continue
            lost = lost or scores.version != version  # it was restarted, and has no weights of ours
            found[str(member)] = [list(row) for row in scores.logprobs]
        if lost:
            raise ReceiverChangedError("a rollout server was lost before it had shown what it holds")
        return found

    async def _scores_of(self, member: ServerHandle, body: wire.Score) -> wire.ScoreResponse:
        return wire.decode(wire.ScoreResponse, await member.server.call("POST", "/score", body, timeout=SCORE_SECONDS))

    def _members(self) -> list[ServerHandle]:
        """Those that are used. Raises ReceiverChangedError where all were lost since they were gathered."""
        if not (members := self.fleet.used):
            raise ReceiverChangedError("no rollout server is left")
        return members

    # ---- the link

    def _link_of(self, members: Sequence[ServerHandle]) -> WeightSender:
        """The one there is if its members are the same processes; else a new one."""
        wanted = [(member, member.state.boot) for member in members if member.state is not None]
        if self._link is not None and self._link.is_whole and self._linked == wanted:
            return self._link
        self.drop()
        name, first, calls = secrets.token_hex(8), 1, []
        world = 1 + sum(member.state.world_size for member in members if member.state is not None)
        places = meeting_places([self._near(member) for member in members])
        for member, place in zip(members, places, strict=True):
            assert member.state is not None
            body = wire.Join(address=place, port=self._meeting.port, first_rank=first, world=world, name=name, seconds=self.link_seconds)
            calls.append((member, begun(member.server.call("POST", "/join", body, timeout=self.link_seconds + 5))))
            first += member.state.world_size
        link, broke = None, None
        try:
            link = WeightSender(self._meeting, name=name, world=world, near=places[0], seconds=self.link_seconds, device=self.device)
        except LinkError as error:
            broke = error
        failed = self._settle(calls, self.link_seconds)
        if failed or link is None:
            if link is not None:
                link.drop()
            raise ReceiverChangedError(f"the link to the rollout servers could not be made: {_said(failed) or broke}") from broke
        self._link, self._linked = link, wanted
        return link

    def _near(self, member: ServerHandle) -> str:
        """This machine's address, as that server sees it."""
        address = member.server.address
        try:
            return local_address(address.host, address.port)
        except OSError as error:
            self.fleet.lose(member, error)
            raise ReceiverChangedError(f"{member} cannot be reached: {error}") from error

    def drop(self) -> None:
        if self._link is not None:
            self._link.drop()
            self._link = None

    # ---- what servers are told, and what came of it

    async def _order(self, member: ServerHandle, update: WeightUpdate, link: str) -> wire.State:
        body: wire.WeightPush | wire.AdapterPush
        if update.kind == "adapter":
            path, config = "/adapter", dict(update.config)
            body = wire.AdapterPush(version=update.version, link=link, config=config, modules=tuple(sorted(self.modules)))
        else:
            # A base before its adapter makes no version; a merged trial has the number of a trial.
            version = None if update.kind == "weights" and update.version == NO_VERSION else update.version
            path, body = "/weights", wire.WeightPush(version=version, link=link, kind=update.kind, moves_tower=update.moves_tower)
        return wire.decode(wire.State, await member.server.call("POST", path, body, timeout=FINISH_SECONDS))

    def _settle(self, calls: Sequence[tuple[ServerHandle, Future[Any]]], seconds: float) -> list[tuple[ServerHandle, Exception]]:
        """Waits for all answers; who failed, and how. Those of whom nothing was heard are lost."""
        failed: list[tuple[ServerHandle, Exception]] = []
        until = time.monotonic() + seconds
        for member, call in calls:
            try:
                answer = answer_of(call, until - time.monotonic())
                if isinstance(answer, wire.State):
                    member.state = answer
            except LOST as error:
                failed.append((member, error))
                if not isinstance(error, ServerRefusedError) or error.is_conflict:
                    self.fleet.lose(member, error)
        return failed

    def _broken(self, update: WeightUpdate, failed: list[tuple[ServerHandle, Exception]], error: LinkError | None = None) -> Exception:
        """What a push that failed ends with."""
        is_anybody_lost = any(member.trouble is not None for member, _ in failed)
        self._failures = 0 if is_anybody_lost else self._failures + 1
        name = "a trial adapter" if update.version == NO_VERSION and update.kind != "weights" else f"version {update.version}"
        sentence = f"the push of {name} failed: {_said(failed) or error}"
        return WeightSyncError(sentence) if self._failures > 1 else ReceiverChangedError(sentence)

    def close(self) -> None:
        with suppress(RuntimeError):  # a member has gone
            self.drop()


def meeting_places(nears: Sequence[str]) -> list[str]:
    """Where each server is to meet the others. nears: this machine's address, as each of them sees it.

    A server of this machine sees it under one that no other machine can reach. If there are others, it is told what they see.
    """
    outward = next((near for near in nears if not _is_loopback(near)), None)
    return [outward if outward is not None and _is_loopback(near) else near for near in nears]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _said(failed: Sequence[tuple[ServerHandle, Exception]]) -> str:
    return "; ".join(f"{member}: {error}" for member, error in failed)
