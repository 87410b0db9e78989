"""What is asked of several servers at once: each has two calls at a time, in threads, for as long as it is of use. No torch."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from megatron_grpo.base import activity
from megatron_grpo.base.errors import GivenUp, RunError
from megatron_grpo.config.servers import CALLS, chunk_size
from megatron_grpo.servers.dealing import Dealing
from megatron_grpo.servers.fleet import LOST, Member
from megatron_grpo.servers.http import Refused

Answered = TypeVar("Answered")
Chunk = tuple[int, ...]  # of what is asked, by number


class Loses(Protocol):
    def __call__(self, member: Member, why: Exception, *, since: int) -> bool:
        """A call to a server failed that began when it had been claimed `since` times. Whether what was in flight may have killed it."""


class Calls(ABC, Generic[Answered]):
    """Numbers that are answered by whichever server has room. Who derives from it says what one call is, in `_hear`."""

    def __init__(self, numbers: Sequence[int]):
        self._dealing: Dealing[int, Answered] = Dealing(numbers)
        self._changed = threading.Condition()
        self._refusal: BaseException | None = None  # nobody can answer; raised by who waits
        self._open = 0  # threads

    def _begin(self, members: Sequence[Member], lose: Loses, *, n: int = 1) -> None:
        """Asks these for what is not answered, and returns at once. n: completions of a number."""
        for member in members:
            assert member.state is not None  # it has said how it is
            size = chunk_size(len(self._dealing.left), n=n, num_servers=len(members), max_num_seqs=member.state.max_num_seqs)
            for _ in range(CALLS):
                with self._changed:
                    self._open += 1
                threading.Thread(target=self._serve, args=(member, lose, size, member.times_claimed), daemon=True).start()

    def _wait(self, phase: activity.Phase, num_done: Callable[[], int], gives_up: Callable[[], bool]) -> None:
        """Until all is answered, or nobody is left to ask. Raises the refusal, RunError, and GivenUp soon after `gives_up()` is true."""
        with self._changed:
            while self._open and not self._is_over:
                if gives_up():
                    raise GivenUp
                self._changed.wait(timeout=1.0)  # woken now and then, so that the main thread hears of signals
                phase.done = num_done()
            if self._refusal is not None:
                raise self._refusal
            if deadly := self._dealing.deadly:
                raise RunError(self._of_deadly(deadly))

    def _refuse(self, error: BaseException) -> None:
        with self._changed:
            self._refusal = self._refusal or error
            self._changed.notify_all()

    # ---- in threads

    @abstractmethod
    def _hear(self, member: Member, chunk: Chunk) -> None:
        """One call: what a server answers goes to `_dealing`. Raises what is in LOST where the server is of no use."""

    @abstractmethod
    def _refused_by(self, member: Member, error: Refused) -> str:
        """Any server would refuse it, as a sentence."""

    @abstractmethod
    def _of_deadly(self, numbers: Sequence[int]) -> str:
        """They were with as many servers as died of one question, as a sentence."""

    @property
    def _is_over(self) -> bool:
        return self._dealing.is_done or self._refusal is not None or bool(self._dealing.deadly)

    def _serve(self, member: Member, lose: Loses, size: int, since: int) -> None:
        """One of a server's calls at a time, until nothing is left or it is lost. since: its `times_claimed`."""
        try:
            while chunk := self._next(member, size, since):
                self._call(member, lose, chunk, since)
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _next(self, member: Member, size: int, since: int) -> Chunk:
        """Waits where all is with other servers, for those may be lost."""
        with self._changed:
            while not self._is_over and member.trouble is None and member.times_claimed == since:
                if chunk := self._dealing.next_for(str(member), size):
                    return chunk
                self._changed.wait(timeout=1.0)
            return ()

    def _call(self, member: Member, lose: Loses, chunk: Chunk, since: int) -> None:
        died = False
        try:
            self._hear(member, chunk)
        except LOST as error:
            if isinstance(error, Refused) and not (error.is_conflict or error.is_failure):
                self._refuse(RunError(self._refused_by(member, error)))
            died = lose(member, error, since=since)
        except BaseException as error:  # noqa: BLE001 - raised where the answers are waited for: else they would be asked for without end
            self._refuse(error)
        finally:
            with self._changed:
                self._dealing.ended(str(member), chunk, died=died)
                self._changed.notify_all()
