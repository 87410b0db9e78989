"""A question to rollout servers: prompts that are answered by whichever has room. Rank 0 alone; no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_grpo.base import activity
from megatron_grpo.base.errors import ConfigError, RunError
from megatron_grpo.data.album import num_tokens
from megatron_grpo.data.eyes import Eyes
from megatron_grpo.servers import wire
from megatron_grpo.servers.calls import MOST_DEATHS, Calls, Chunk
from megatron_grpo.servers.fleet import Fleet, Member
from megatron_grpo.servers.http import Gone, Refused
from megatron_grpo.types import Picture

ENDS = ("stop", "length")  # "abort" is no answer
Shown = Sequence[tuple[int, Picture]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSend:
    """The pictures of some prompts. Their files are read when they are sent."""

    pictures: Mapping[str, Picture] = field(default_factory=dict)  # by key
    bounds: wire.Bounds | None = None

    @classmethod
    def of(cls, shown: Iterable[Shown], eyes: Eyes | None) -> ToSend:
        """shown: by each prompt. eyes: of the model."""
        bounds = wire.Bounds(min_pixels=eyes.min_pixels, max_pixels=eyes.max_pixels) if eyes else None
        return cls(pictures={picture.key: picture for one in shown for _, picture in one}, bounds=bounds)

    def but(self, known: Collection[str], keys: Iterable[str]) -> tuple[wire.SentPicture, ...]:
        """Those of these keys that are not known. Raises ConfigError where a file is not the one any more that it was."""
        return tuple(wire.SentPicture(key=key, data=self.pictures[key].data()) for key in dict.fromkeys(keys) if key not in known)


NOTHING = ToSend()


def on_the_wire(shown: Shown) -> tuple[wire.ShownPicture, ...]:
    return tuple(wire.ShownPicture(key=picture.key, place=place, tokens=num_tokens(picture)) for place, picture in shown)


async def generate(
    member: Member, body: wire.Generate, take: Callable[[wire.Request, wire.Answer], object], *, things: str = "prompts"
) -> None:
    """Gives `take` the answers as they come. things: what the requests are, for people. Raises what is in LOST."""
    left = {request.key: request for request in body.requests}

    def hear(line: bytes) -> None:
        answer = wire.decode_line(wire.Answer, line)
        activity.advance(0)  # a server that lives says so, also while its answers are long
        if answer is None:
            return
        if answer.key not in left:
            raise wire.Malformed(f"it answered {answer.key!r}, which it was not asked")
        request = left.pop(answer.key)
        is_one = answer.error is None and not answer.lacks
        if is_one and (wrong := fault_of_answer(answer.completions, request.n, body.version)):
            raise wire.Malformed(wrong)
        take(request, answer)

    await member.server.hear("/generate", body, hear)
    if left:
        raise Gone(f"its answer ended with {len(left)} of {len(body.requests)} {things} left")


class Question(Calls[tuple[wire.Drawn, ...]]):
    """Prompts and what was answered so far. `wait` says what came of it."""

    def __init__(
        self,
        requests: Mapping[int, wire.Request],
        sampling: wire.Sampling,
        *,
        version: int,
        name_of: Callable[[int], str] = str,
        album: ToSend = NOTHING,
    ):
        """requests: by the prompt's number. version: of the weights that are to answer. name_of: a prompt's number, for people.

        album: the pictures of the requests.
        """
        super().__init__(list(requests))
        self._album = album
        self.requests, self.sampling, self.version, self._name_of = dict(requests), sampling, version, name_of
        self._num_answered = 0  # completions
        self._began = self._last_heard = time.monotonic()

    @property
    def answers(self) -> Mapping[int, tuple[wire.Drawn, ...]]:
        return self._dealing.answers

    def ask(self, fleet: Fleet) -> None:
        """Begins to ask whoever is used now for what is not answered. Returns at once."""
        n = max((request.n for request in self.requests.values()), default=1)
        self._begin(fleet.used, fleet.lose, n=n)

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer so far."""
        return self._last_heard - self._began

    def go_on(self, fleet: Fleet, *, version: int) -> None:
        """As `ask`, after all servers were lost: by the weights that are there now, which may be newer."""
        self.version = version
        self.ask(fleet)

    def wait(self, gives_up: Callable[[], bool] = lambda: False) -> int:
        """Until all is answered, or nobody is left to ask: how many prompts are then left. Raises RunError where a prompt cannot be
        answered by anybody, and GivenUp soon after `gives_up()` is true."""
        total = sum(request.n for request in self.requests.values())
        with activity.phase("sampling", total=total, unit="completions") as phase:
            self._wait(phase, lambda: self._num_answered, gives_up)
        return len(self._dealing.left)

    # ---- on the loop

    def _refused_by(self, member: Member, error: Refused) -> str:
        return f"the rollout server {member} refused to sample: {error}"

    async def _hear(self, member: Member, chunk: Chunk) -> None:
        by_key = {self.requests[number].key: number for number in chunk}
        requests = tuple(self.requests[number] for number in chunk)
        shown = [one.key for request in requests for one in request.shown]
        try:
            sent = await asyncio.to_thread(self._album.but, member.pictures, shown)
        except ConfigError as error:  # a file that has gone, or has changed
            raise RunError(str(error)) from error
        member.pictures.update(shown)
        bounds = self._album.bounds if shown else None
        body = wire.Generate(version=self.version, sampling=self.sampling, requests=requests, pictures=sent, bounds=bounds)

        def take(request: wire.Request, answer: wire.Answer) -> None:
            number = by_key[request.key]
            if answer.error is not None:
                # Not a reason to ask elsewhere: every server would say so, one after the other, and look like one that failed.
                raise RunError(f"{self._name_of(number)} cannot be answered: {answer.error}")
            if answer.lacks:
                member.pictures.difference_update(answer.lacks)
                return  # it is not answered, so it is asked again
            self._num_answered += len(answer.completions)
            self._last_heard = time.monotonic()
            self._take(number, answer.completions)

        await generate(member, body, take)

    def _of_deadly(self, numbers: Sequence[int]) -> str:
        servers = ", ".join(self._dealing.deaths[numbers[0]])
        return (
            f"{', '.join(map(self._name_of, numbers))}: in flight on {MOST_DEATHS} rollout servers as they died ({servers}), so it is not "
            "asked a fourth time. Their logs say of what they died; the row can be taken out of the data set."
        )


def fault_of_answer(completions: Sequence[wire.Drawn], n: int, version: int) -> str | None:
    """What makes these no answer to what was asked."""
    if len(completions) != n:
        return f"it drew {len(completions)} of {n} completions"
    if ends := {one.reason for one in completions} - {*ENDS}:
        return f"a completion ended with {ends.pop()!r}"
    others = {span[0] for one in completions for span in one.versions} - {version}
    return f"it sampled with the weights of version {others.pop()}, not {version}" if others else None
