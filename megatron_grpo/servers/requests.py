"""What is asked of several servers at once: each has two calls at a time, for as long as it is of use. Rank 0 alone; no torch.

Who asks waits in the main thread; the calls are tasks of the loop that `http` has. `GenerationRequest` is what rollout servers are asked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megatron_grpo.base import activity
from megatron_grpo.base.errors import CancelledError, ConfigError, RunError
from megatron_grpo.config.servers import CALLS, chunk_size
from megatron_grpo.data.image_dataset import num_tokens
from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.servers import wire
from megatron_grpo.servers.http import ServerGoneError, begun
from megatron_grpo.servers.server_group import ServerGroup, ServerHandle, TrainingServerGroup
from megatron_grpo.types import Image

MOST_DEATHS = 3  # of servers, with the same prompt in flight
ENDS = ("stop", "length")  # "abort" is no answer
Shown = Sequence[tuple[int, Image]]
Key = TypeVar("Key", bound=Hashable)
Answered = TypeVar("Answered")
Chunk = tuple[int, ...]  # of what is asked, by number


class RequestRouter(Generic[Key, Answered]):
    """Which server is asked which prompts of one question. Pure: servers are names, answers are anything.

    A prompt lies with one server at a time. If that server is lost the prompt goes back, so none is lost with it; of several answers to a
    prompt the first counts, so none is there twice. A prompt that was in flight on three servers as they died is not given to a fourth.
    """

    def __init__(self, keys: Sequence[Key]):
        self.answers: dict[Key, Answered] = {}
        self.deaths: dict[Key, list[str]] = {}  # servers that died while they had it
        self._waiting = dict.fromkeys(keys)  # those that nobody has, in order
        self._with: dict[str, list[tuple[Key, ...]]] = {}  # server -> its open calls
        self._keys = dict.fromkeys(keys)

    @property
    def left(self) -> list[Key]:
        """What is not answered, in order."""
        return [key for key in self._keys if key not in self.answers]

    @property
    def is_done(self) -> bool:
        return len(self.answers) == len(self._keys)

    @property
    def deadly(self) -> list[Key]:
        """Prompts that are given to nobody any more."""
        return [key for key, servers in self.deaths.items() if len(servers) >= MOST_DEATHS]

    def next_for(self, server: str, size: int) -> tuple[Key, ...]:
        """What this server is to be asked next, at most so many; nothing if there is nothing just now.

        Prompts on which two servers died go to a server one at a time, and while it has nothing else: if it dies, it is clear of which.
        """
        if self.deadly or any(self._is_suspect(key) for call in self._with.get(server, ()) for key in call):
            return ()
        suspects = [key for key in self._waiting if self._is_suspect(key)]
        others = [key for key in self._waiting if not self._is_suspect(key)][:size]
        chosen = tuple(others or ([] if self._with.get(server) else suspects[:1]))
        for key in chosen:
            del self._waiting[key]
        if chosen:
            self._with.setdefault(server, []).append(chosen)
        return chosen

    def take(self, key: Key, answer: Answered) -> None:
        """An answer, from whomever; only the first counts."""
        if key in self._keys and key not in self.answers:
            self.answers[key] = answer
            self._waiting.pop(key, None)

    def ended(self, server: str, call: tuple[Key, ...], *, died: bool = False) -> None:
        """A call is over, and what it has not answered goes back. died: the server did, with these in flight."""
        self._with[server].remove(call)
        open_ones = {key: None for key in call if key not in self.answers}
        if died:
            for key in open_ones:
                self.deaths.setdefault(key, []).append(server)
        self._waiting = {key: None for key in self._keys if key in self._waiting or key in open_ones}

    def _is_suspect(self, key: Key) -> bool:
        return len(self.deaths.get(key, ())) == MOST_DEATHS - 1


class Calls(ABC, Generic[Answered]):
    """Numbers that are answered by whichever server has room. Who derives from it says what one call is, in `_hear`."""

    def __init__(self, numbers: Sequence[int]):
        self._dealing: RequestRouter[int, Answered] = RequestRouter(numbers)
        self._changed = asyncio.Event()  # never stays set: whoever waits for a change looks again
        self._asking: concurrent.futures.Future[None] | None = None

    def _begin(self, servers: ServerGroup, *, n: int = 1) -> None:
        """Asks those that are used now for what is not answered, and returns at once. n: completions of a number."""
        calls = []
        for member in servers.used:
            assert member.state is not None  # it has said how it is
            size = chunk_size(len(self._dealing.left), n=n, num_servers=len(servers.used), max_num_seqs=member.state.max_num_seqs)
            calls += [self._serve(servers, member, size, member.times_claimed) for _ in range(CALLS)]
        self._asking = begun(self._ask(calls))

    def rests(self, seconds: float) -> bool:
        """Whether there is nothing to wait for, after at most so long: all is answered, or it cannot go on by itself."""
        return self._asking is None or bool(concurrent.futures.wait([self._asking], seconds).done)

    def _wait(self, phase: activity.Phase, num_done: Callable[[], int], should_cancel: Callable[[], bool]) -> None:
        """Until all is answered, or nobody is left to ask. Raises RunError, what failed here, and CancelledError soon after
        `should_cancel()` is true."""
        while not self.rests(0.0):
            if should_cancel():
                raise CancelledError
            self.rests(1.0)
            phase.done = num_done()
        if self._asking is not None:
            self._asking.result()

    def abandon(self) -> None:
        """Nobody waits for it any more: its calls end."""
        if self._asking is not None:
            self._asking.cancel()

    # ---- on the loop

    @abstractmethod
    async def _hear(self, member: ServerHandle, chunk: Chunk) -> None:
        """One call: what a server answers goes to `_take`. Raises what is in LOST where the server is of no use."""

    @abstractmethod
    def _of_deadly(self, numbers: Sequence[int]) -> str:
        """They were with as many servers as died of one question, as a sentence."""

    @property
    def _is_over(self) -> bool:
        return self._dealing.is_done or bool(self._dealing.deadly)

    def _take(self, number: int, answer: Answered) -> None:
        self._dealing.take(number, answer)
        self._tell()

    def _tell(self, *_: object) -> None:
        self._changed.set()
        self._changed.clear()

    async def _change(self) -> None:
        with suppress(TimeoutError):  # whether a server is still of use is told by nobody
            await asyncio.wait_for(self._changed.wait(), 1.0)

    async def _ask(self, calls: Iterable[Awaitable[None]]) -> None:
        tasks = [asyncio.ensure_future(one) for one in calls]
        for task in tasks:
            task.add_done_callback(self._tell)
        try:
            while not self._is_over and not all([task.done() and task.result() is None for task in tasks]):  # raises what one failed with
                await self._change()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if deadly := self._dealing.deadly:
            raise RunError(self._of_deadly(deadly))

    async def _serve(self, servers: ServerGroup, member: ServerHandle, size: int, since: int) -> None:
        """One of a server's calls at a time, until nothing is left or it is lost. since: its `times_claimed`."""
        while not self._is_over and member.trouble is None and member.times_claimed == since:
            chunk = self._dealing.next_for(str(member), size)
            if not chunk:  # all is with other servers, and those may be lost
                await self._change()
                continue
            died = False
            try:
                died = await servers.during(member, self._hear(member, chunk))
            finally:
                self._dealing.ended(str(member), chunk, died=died)
                self._tell()


# ---- prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSend:
    """The pictures of some prompts. Their files are read when they are sent."""

    pictures: Mapping[str, Image] = field(default_factory=dict)  # by key
    bounds: wire.Bounds | None = None

    @classmethod
    def of(cls, shown: Iterable[Shown], eyes: ImageProcessorSpec | None) -> ToSend:
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
    member: ServerHandle, body: wire.Generate, take: Callable[[wire.Request, wire.Answer], object], *, things: str = "prompts"
) -> None:
    """Gives `take` the answers as they come. things: what the requests are, for people. Raises what is in LOST."""
    left = {request.key: request for request in body.requests}

    def hear(line: bytes) -> None:
        answer = wire.decode_line(wire.Answer, line)
        activity.advance(0)  # a server that lives says so, also while its answers are long
        if answer is None:
            return
        if answer.key not in left:
            raise wire.MalformedMessageError(f"it answered {answer.key!r}, which it was not asked")
        request = left.pop(answer.key)
        is_one = answer.error is None and not answer.lacks
        if is_one and (wrong := fault_of_answer(answer.completions, request.n, body.version)):
            raise wire.MalformedMessageError(wrong)
        take(request, answer)

    await member.server.hear("/generate", body, hear)
    if left:
        raise ServerGoneError(f"its answer ended with {len(left)} of {len(body.requests)} {things} left")


class GenerationRequest(Calls[tuple[wire.SampledCompletion, ...]]):
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
    def answers(self) -> Mapping[int, tuple[wire.SampledCompletion, ...]]:
        return self._dealing.answers

    def ask(self, fleet: TrainingServerGroup) -> None:
        """Begins to ask whoever is used now for what is not answered. Returns at once. After all servers were lost `version` is set anew:
        of the weights that are there then."""
        self._begin(fleet, n=max((request.n for request in self.requests.values()), default=1))

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer so far."""
        return self._last_heard - self._began

    def wait(self, should_cancel: Callable[[], bool] = lambda: False) -> int:
        """Until all is answered, or nobody is left to ask: how many prompts are then left. Raises RunError where a prompt cannot be
        answered by anybody, and CancelledError soon after `should_cancel()` is true."""
        total = sum(request.n for request in self.requests.values())
        with activity.phase("sampling", total=total, unit="completions") as phase:
            self._wait(phase, lambda: self._num_answered, should_cancel)
        return len(self._dealing.left)

    # ---- on the loop

    async def _hear(self, member: ServerHandle, chunk: Chunk) -> None:
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


def fault_of_answer(completions: Sequence[wire.SampledCompletion], n: int, version: int) -> str | None:
    """What makes these no answer to what was asked."""
    if len(completions) != n:
        return f"it drew {len(completions)} of {n} completions"
    if ends := {one.reason for one in completions} - {*ENDS}:
        return f"a completion ended with {ends.pop()!r}"
    others = {span[0] for one in completions for span in one.versions} - {version}
    return f"it sampled with the weights of version {others.pop()}, not {version}" if others else None
