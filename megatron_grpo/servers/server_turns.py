"""Rollout servers as a `TurnSampler`: turns that were asked for are sent every 20 ms, in one call a server. Rank 0 alone; no torch.

All turns of an episode go to one server, which has its tokens in the prefix cache. If that server is lost, the episode goes on with another
one: what was in flight is asked there, with the same seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from megatron_grpo.base import activity
from megatron_grpo.base.errors import RunError
from megatron_grpo.rollout.turns import Drawn, Key
from megatron_grpo.servers import wire
from megatron_grpo.servers.asking import fault_of_answer
from megatron_grpo.servers.dealing import MOST_DEATHS
from megatron_grpo.servers.fleet import LOST, Fleet, Member
from megatron_grpo.servers.http import Gone, Refused

BETWEEN_CALLS = 0.02  # seconds


class NoServer(Exception):
    """Turns are open, none is in flight any more, and no server is left that has the weights."""


class ServerTurns:
    """See `rollout.turns.TurnSampler`. version: of the weights that are to draw; it may be set anew once servers were lost."""

    def __init__(self, fleet: Fleet, sampling: wire.Sampling, *, version: int, name_of: Callable[[Key], str] = str):
        """name_of: an episode, for people."""
        self.version = version
        self._fleet, self._sampling, self._name_of = fleet, sampling, name_of
        self._count = 0
        self._open: dict[Key, wire.Request] = {}  # asked for, and not drawn
        self._flying: dict[Key, Member] = {}  # of those, the ones in a call
        self._homes: dict[Key, str] = {}  # server of each episode, by name
        self._deaths: dict[Key, list[str]] = {}  # of servers, with this turn in flight
        self._found: list[tuple[Key, Drawn]] = []
        self._changed = threading.Condition()
        self._refusal: BaseException | None = None

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int) -> None:
        with self._changed:
            self._count += 1  # a name for the turn, not for the episode
            self._open[key] = wire.Request(
                key=f"{key[0]}/{key[1]}/{self._count}", ids=tuple(token_ids), seed=seed, n=1, max_tokens=max_tokens
            )

    @property
    def num_running(self) -> int:
        with self._changed:
            return len(self._open) + len(self._found)

    def poll(self) -> list[tuple[Key, Drawn]]:
        """Raises NoServer; RunError where a turn cannot be drawn by anybody."""
        with self._changed:
            self._send()
            if self._open and not self._found:
                self._changed.wait(BETWEEN_CALLS)
            if self._refusal is not None:
                raise self._refusal
            found, self._found = self._found, []
        return found

    def abandon(self) -> None:
        """Nobody wants what is open: its calls end."""
        with self._changed:
            self._open.clear()
            self._refusal = self._refusal or RunError("the turns were given up")

    # ----

    def _send(self) -> None:
        waiting = [key for key in self._open if key not in self._flying]
        members = {str(member): member for member in self._fleet.used}
        if not members:
            # A server that one call lost may still answer others, and a push would end those.
            if waiting and not self._flying:
                raise NoServer
            return
        by_member: dict[str, list[Key]] = {}
        for key in waiting:
            home = self._homes.get(key, "")
            if home not in members:
                episodes = list(self._homes.values())
                home = self._homes[key] = min(members, key=episodes.count)
            self._flying[key] = members[home]
            by_member.setdefault(home, []).append(key)
        for name, keys in by_member.items():
            body = wire.Generate(version=self.version, sampling=self._sampling, requests=tuple(self._open[key] for key in keys))
            member = members[name]
            threading.Thread(target=self._call, args=(member, keys, body, member.times_claimed), daemon=True).start()

    def _call(self, member: Member, keys: Sequence[Key], body: wire.Generate, since: int) -> None:
        """since: the server's `times_claimed`."""
        died = False
        try:
            self._hear(member, {request.key: key for key, request in zip(keys, body.requests, strict=True)}, body)
        except LOST as error:
            if isinstance(error, Refused) and not (error.is_conflict or error.is_failure):
                self._refuse(RunError(f"the rollout server {member} refused to sample: {error}"))
            died = self._fleet.lose(member, error, since=since)
        except BaseException as error:  # noqa: BLE001 - raised where turns are polled for
            self._refuse(error)
        finally:
            self._ended(member, dict(zip(keys, body.requests, strict=True)), died=died)

    def _hear(self, member: Member, left: dict[str, Key], body: wire.Generate) -> None:
        for line in member.server.lines("/generate", body):
            answer = wire.decode_line(wire.Answer, line)
            activity.advance(0)  # a server that lives says so
            if answer is not None:
                self._take(left.pop(answer.key, None), answer, body)
            if self._refusal is not None:
                return
        if left:
            raise Gone(f"its answer ended with {len(left)} of {len(body.requests)} turns left")

    def _take(self, key: Key | None, answer: wire.Answer, body: wire.Generate) -> None:
        if key is None:
            raise wire.Malformed(f"it answered {answer.key!r}, which it was not asked")
        if answer.error is not None:
            return self._refuse(RunError(f"{self._name_of(key)} cannot be answered: {answer.error}"))
        if wrong := fault_of_answer(answer.completions, 1, body.version):
            raise wire.Malformed(wrong)
        [one] = answer.completions
        drawn = Drawn(
            token_ids=tuple(one.tokens.tolist()),
            logprobs=tuple(one.logprobs.tolist()),
            is_cut=one.reason == "length",
            kept=one.kept,
            version=body.version,
        )
        with self._changed:
            if key in self._open and self._open[key].key == answer.key:  # else the turn was asked elsewhere, and answered there
                del self._open[key]
                self._flying.pop(key, None)
                self._deaths.pop(key, None)
                self._found.append((key, drawn))
                self._changed.notify_all()

    def _ended(self, member: Member, asked: Mapping[Key, wire.Request], *, died: bool) -> None:
        """A call is over; what it has not answered is asked again. Of an episode whose turn it has answered the next may be in flight."""
        with self._changed:
            for key, request in asked.items():
                if self._flying.get(key) is not member or self._open.get(key) is not request:
                    continue
                del self._flying[key]
                if died:
                    self._deaths.setdefault(key, []).append(str(member))
                if len(self._deaths.get(key, ())) >= MOST_DEATHS:
                    servers = ", ".join(self._deaths[key])
                    self._refusal = self._refusal or RunError(
                        f"{self._name_of(key)}: in flight on {MOST_DEATHS} rollout servers as they died ({servers}), so it is not asked "
                        "again. Their logs say of what they died; the row can be taken out of the data set."
                    )
            self._changed.notify_all()

    def _refuse(self, error: BaseException) -> None:
        with self._changed:
            self._refusal = self._refusal or error
            self._changed.notify_all()
