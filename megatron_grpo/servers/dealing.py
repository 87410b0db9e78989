"""Which server is asked which prompts. Pure: servers are names, answers are anything, and whoever calls holds a lock.

A prompt lies with one server at a time. If that server is lost the prompt goes back, so none is lost with it; of several answers to a
prompt the first counts, so none is there twice. A prompt that was in flight on three servers as they died is not given to a fourth.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

MOST_DEATHS = 3  # of servers, with the same prompt in flight

Key = TypeVar("Key", bound=Hashable)
Answered = TypeVar("Answered")


class Dealing(Generic[Key, Answered]):
    """The prompts of one question over servers that come and go."""

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
