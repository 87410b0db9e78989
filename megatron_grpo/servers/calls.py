"""What is asked of several servers at once: each has two calls at a time, for as long as it is of use. No torch.

Who asks waits in the main thread; the calls are tasks of the loop that `http` has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from megatron_grpo.base import activity
from megatron_grpo.base.errors import GivenUp, RunError
from megatron_grpo.config.servers import CALLS, chunk_size
from megatron_grpo.servers.fleet import LOST, Member
from megatron_grpo.servers.http import Refused, begun

MOST_DEATHS = 3  # of servers, with the same prompt in flight


Key = TypeVar("Key", bound=Hashable)
Answered = TypeVar("Answered")
Chunk = tuple[int, ...]  # of what is asked, by number


class Dealing(Generic[Key, Answered]):
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
        open_ones = [key for key in call if key not in self.answers]
        if died:
            for key in open_ones:
                self.deaths.setdefault(key, []).append(server)
        self._give_back(open_ones)

    def _is_suspect(self, key: Key) -> bool:
        return len(self.deaths.get(key, ())) == MOST_DEATHS - 1

    def _give_back(self, keys: Iterable[Key]) -> None:
        back = {*keys}
        self._waiting = {key: None for key in self._keys if key in self._waiting or key in back}


class Loses(Protocol):
    def __call__(self, member: Member, why: Exception, *, since: int) -> bool:
        """A call to a server failed that began when it had been claimed `since` times. Whether what was in flight may have killed it."""


async def call(member: Member, work: Awaitable[object], lose: Loses, *, since: int, refused: Callable[[Member, Refused], str]) -> bool:
    """One call. Whether what was in flight may have killed the server. Raises RunError, which `refused` words, where any server
    would refuse it."""
    try:
        await work
    except LOST as error:
        died = lose(member, error, since=since)
        if isinstance(error, Refused) and not (error.is_conflict or error.is_failure):
            raise RunError(refused(member, error)) from error
        return died
    return False


class Calls(ABC, Generic[Answered]):
    """Numbers that are answered by whichever server has room. Who derives from it says what one call is, in `_hear`."""

    def __init__(self, numbers: Sequence[int]):
        self._dealing: Dealing[int, Answered] = Dealing(numbers)
        self._changed = asyncio.Event()  # never stays set: whoever waits for a change looks again
        self._asking: concurrent.futures.Future[None] | None = None

    def _begin(self, members: Sequence[Member], lose: Loses, *, n: int = 1) -> None:
        """Asks these for what is not answered, and returns at once. n: completions of a number."""
        calls = []
        for member in members:
            assert member.state is not None  # it has said how it is
            size = chunk_size(len(self._dealing.left), n=n, num_servers=len(members), max_num_seqs=member.state.max_num_seqs)
            calls += [self._serve(member, lose, size, member.times_claimed) for _ in range(CALLS)]
        self._asking = begun(self._ask(calls))

    def rests(self, seconds: float) -> bool:
        """Whether there is nothing to wait for, after at most so long: all is answered, or it cannot go on by itself."""
        return self._asking is None or bool(concurrent.futures.wait([self._asking], seconds).done)

    def _wait(self, phase: activity.Phase, num_done: Callable[[], int], gives_up: Callable[[], bool]) -> None:
        """Until all is answered, or nobody is left to ask. Raises RunError, what failed here, and GivenUp soon after
        `gives_up()` is true."""
        while not self.rests(0.0):
            if gives_up():
                raise GivenUp
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
    async def _hear(self, member: Member, chunk: Chunk) -> None:
        """One call: what a server answers goes to `_take`. Raises what is in LOST where the server is of no use."""

    @abstractmethod
    def _refused_by(self, member: Member, error: Refused) -> str:
        """Any server would refuse it, as a sentence."""

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
            while not self._is_over and not all([_has_ended(task) for task in tasks]):
                await self._change()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if deadly := self._dealing.deadly:
            raise RunError(self._of_deadly(deadly))

    async def _serve(self, member: Member, lose: Loses, size: int, since: int) -> None:
        """One of a server's calls at a time, until nothing is left or it is lost. since: its `times_claimed`."""
        while not self._is_over and member.trouble is None and member.times_claimed == since:
            chunk = self._dealing.next_for(str(member), size)
            if not chunk:  # all is with other servers, and those may be lost
                await self._change()
                continue
            died = False
            try:
                died = await call(member, self._hear(member, chunk), lose, since=since, refused=self._refused_by)
            finally:
                self._dealing.ended(str(member), chunk, died=died)
                self._tell()


def _has_ended(task: asyncio.Future[None]) -> bool:
    """Raises what it failed with."""
    return task.done() and task.result() is None
