"""A question to rollout servers: prompts that are answered by whichever has room, two calls at a time each. Rank 0 alone; no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from megatron_grpo.base import activity
from megatron_grpo.base.errors import ConfigError, RunError
from megatron_grpo.servers import wire, wire_pictures
from megatron_grpo.servers.calls import Calls, Chunk
from megatron_grpo.servers.dealing import MOST_DEATHS
from megatron_grpo.servers.fleet import Fleet, Member
from megatron_grpo.servers.http import Gone, Refused

ENDS = ("stop", "length")  # "abort" is no answer


class Question(Calls[tuple[wire.Drawn, ...]]):
    """Prompts and what was answered so far. It is asked by threads of its own; `wait` says what came of it."""

    def __init__(
        self,
        requests: Mapping[int, wire.Request],
        sampling: wire.Sampling,
        *,
        version: int,
        name_of: Callable[[int], str] = str,
        album: wire_pictures.ToSend = wire_pictures.NOTHING,
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

    def rests(self, seconds: float) -> bool:
        """Whether there is nothing to wait for, after at most so long: all is answered, or it cannot go on by itself."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over or not self._open, timeout=seconds)

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

    def abandon(self) -> None:
        """Nobody waits for it any more: its calls end."""
        self._refuse(RunError("the question was given up"))

    # ---- in threads

    def _refused_by(self, member: Member, error: Refused) -> str:
        return f"the rollout server {member} refused to sample: {error}"

    def _hear(self, member: Member, chunk: Chunk) -> None:
        by_key = {self.requests[number].key: number for number in chunk}
        requests = tuple(self.requests[number] for number in chunk)
        shown = [one.key for request in requests for one in request.shown]
        try:
            sent = self._album.but(member.pictures, shown)
        except ConfigError as error:  # a file that has gone, or has changed
            return self._refuse(RunError(str(error)))
        body = wire.Generate(
            version=self.version, sampling=self.sampling, requests=requests, pictures=sent, bounds=self._album.bounds if shown else None
        )
        member.pictures.update(shown)
        for line in member.server.lines("/generate", body):
            answer = wire.decode_line(wire.Answer, line)
            activity.advance(0)  # a server that lives says so, also while its answers are long
            if answer is not None:
                member.pictures.difference_update(answer.lacks)
                self._take(by_key.pop(answer.key, None), answer)
            if self._is_over:
                return
        if by_key:
            raise Gone(f"its answer ended with {len(by_key)} of {len(chunk)} prompts left")

    def _take(self, number: int | None, answer: wire.Answer) -> None:
        if number is None:
            raise wire.Malformed(f"it answered {answer.key!r}, which it was not asked")
        if answer.error is not None:
            # Not a reason to ask elsewhere: every server would say so, one after the other, and look like one that failed.
            self._refuse(RunError(f"{self._name_of(number)} cannot be answered: {answer.error}"))
            return
        if answer.lacks:
            return  # it is not answered, so it is asked again
        if wrong := fault_of_answer(answer.completions, self.requests[number].n, self.version):
            raise wire.Malformed(wrong)
        with self._changed:
            self._dealing.take(number, answer.completions)
            self._num_answered += len(answer.completions)
            self._last_heard = time.monotonic()
            self._changed.notify_all()

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
