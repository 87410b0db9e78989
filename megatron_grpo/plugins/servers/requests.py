"""Requests that are distributed over several servers, with two concurrent calls per usable server.

The caller waits in the main thread; the calls are tasks on the event loop of `http`. `GenerationRequest` asks rollout servers for
completions. Used on rank 0 alone; the module does not import torch.
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

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError, ConfigError, RunError
from megatron_grpo.core.images import ImageProcessorSpec, num_tokens
from megatron_grpo.core.types import Image
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.http import ServerGoneError, start_coroutine
from megatron_grpo.plugins.servers.plan import CALLS, chunk_size
from megatron_grpo.plugins.servers.server_group import ServerGroup, ServerHandle, TrainingServerGroup

MOST_DEATHS = 3  # a prompt is not sent again after this many servers died with it in flight
ENDS = ("stop", "length")  # valid finish reasons; "abort" is not one
PlacedImages = Sequence[tuple[int, Image]]
Key = TypeVar("Key", bound=Hashable)
Answered = TypeVar("Answered")
Chunk = tuple[int, ...]  # numbers of the items in one call


class RequestRouter(Generic[Key, Answered]):
    """Assignment of the prompts of one request to servers. Pure logic: servers are names, and answers may be anything.

    A prompt is assigned to one server at a time. If that server is lost, the prompt is queued again, so no prompt is lost. The first answer
    to a prompt counts, so no prompt is answered twice. A prompt that was in flight on three servers when they died is not sent to a fourth.

    Attributes:
        answers: Prompt -> its answer.
        deaths: Prompt -> names of the servers that died while it was in flight.
    """

    def __init__(self, keys: Sequence[Key]):
        self.answers: dict[Key, Answered] = {}
        self.deaths: dict[Key, list[str]] = {}
        self._waiting = dict.fromkeys(keys)  # unassigned prompts, in order
        self._with: dict[str, list[tuple[Key, ...]]] = {}  # server -> its open calls
        self._keys = dict.fromkeys(keys)

    @property
    def left(self) -> list[Key]:
        """Unanswered prompts, in order."""
        return [key for key in self._keys if key not in self.answers]

    @property
    def is_done(self) -> bool:
        """Whether all prompts are answered."""
        return len(self.answers) == len(self._keys)

    @property
    def deadly(self) -> list[Key]:
        """Prompts that are not sent again, since too many servers died with them in flight."""
        return [key for key, servers in self.deaths.items() if len(servers) >= MOST_DEATHS]

    def next_for(self, server: str, size: int) -> tuple[Key, ...]:
        """Assign the next prompts to a server.

        A prompt with which two servers died is sent alone, to a server without other calls: if that server dies too, the cause is clear.

        Args:
            size: Largest number of prompts.

        Returns:
            The prompts; empty if none can be assigned now.
        """
        if self.deadly or any(self._is_suspect(key) for call in self._with.get(server, ()) for key in call):
            return ()
        suspects = [key for key in self._waiting if self._is_suspect(key)]
        keys = [key for key in self._waiting if not self._is_suspect(key)][:size]
        chosen = tuple(keys or ([] if self._with.get(server) else suspects[:1]))
        for key in chosen:
            del self._waiting[key]
        if chosen:
            self._with.setdefault(server, []).append(chosen)
        return chosen

    def take(self, key: Key, answer: Answered) -> None:
        """Record an answer from any server. Only the first one of a prompt counts.

        Args:
            key: The prompt; an unknown one is ignored.
        """
        if key in self._keys and key not in self.answers:
            self.answers[key] = answer
            self._waiting.pop(key, None)

    def end_call(self, server: str, call: tuple[Key, ...], *, is_lost: bool = False) -> None:
        """Record the end of a call, and queue its unanswered prompts again.

        Args:
            call: The prompts of the call, as `next_for` returned them.
            is_lost: Whether the server died during the call.
        """
        self._with[server].remove(call)
        open_ones = {key: None for key in call if key not in self.answers}
        if is_lost:
            for key in open_ones:
                self.deaths.setdefault(key, []).append(server)
        self._waiting = {key: None for key in self._keys if key in self._waiting or key in open_ones}

    def _is_suspect(self, key: Key) -> bool:
        return len(self.deaths.get(key, ())) == MOST_DEATHS - 1


class ServerCallQueue(ABC, Generic[Answered]):
    """Calls that distribute numbered items over servers with free capacity. A subclass implements one call in `_receive`."""

    def __init__(self, numbers: Sequence[int]):
        self._router: RequestRouter[int, Answered] = RequestRouter(numbers)
        self._changed = asyncio.Event()  # set and cleared at every change: it wakes the waiting tasks, which check the state again
        self._asking: concurrent.futures.Future[None] | None = None

    def _begin(self, servers: ServerGroup, *, n: int = 1) -> None:
        """Begin to send unanswered items to the servers that are used now. Returns at once.

        Args:
            n: Completions per item.
        """
        calls = []
        for member in servers.used:
            assert member.state is not None  # known since the claim
            size = chunk_size(len(self._router.left), n=n, num_servers=len(servers.used), max_num_seqs=member.state.max_num_seqs)
            calls += [self._serve(servers, member, size, member.times_claimed) for _ in range(CALLS)]
        self._asking = start_coroutine(self._ask(calls))

    def rests(self, seconds: float) -> bool:
        """Wait until all is answered or no call can continue.

        Returns:
            Whether this is so; False after the time is up.
        """
        return self._asking is None or bool(concurrent.futures.wait([self._asking], seconds).done)

    def _wait(self, phase: activity.Phase, num_done: Callable[[], int], should_cancel: Callable[[], bool]) -> None:
        """Wait until all is answered or no server is left.

        Args:
            num_done: Returns the number of finished items, for the display.

        Raises:
            RunError: An item cannot be answered by any server.
            CancelledError: `should_cancel()` became true.
        """
        while not self.rests(0.0):
            if should_cancel():
                raise CancelledError
            self.rests(1.0)
            phase.done = num_done()
        if self._asking is not None:
            self._asking.result()

    def abort(self) -> None:
        """Cancel all open calls."""
        if self._asking is not None:
            self._asking.cancel()

    # ---- on the event loop

    @abstractmethod
    async def _receive(self, member: ServerHandle, chunk: Chunk) -> None:
        """Execute one call and pass each answer to `_take`. Raises an exception of LOST if the server is unusable."""

    @abstractmethod
    def _describe_deadly(self, numbers: Sequence[int]) -> str:
        """Return the error message for items with which `MOST_DEATHS` servers died."""

    @property
    def _is_over(self) -> bool:
        return self._router.is_done or bool(self._router.deadly)

    def _take(self, number: int, answer: Answered) -> None:
        self._router.take(number, answer)
        self._notify()

    def _notify(self, *_: object) -> None:
        self._changed.set()
        self._changed.clear()

    async def _change(self) -> None:
        with suppress(TimeoutError):  # polling, since `trouble` of a server may change without an event
            await asyncio.wait_for(self._changed.wait(), 1.0)

    async def _ask(self, calls: Iterable[Awaitable[None]]) -> None:
        tasks = [asyncio.ensure_future(call) for call in calls]
        for task in tasks:
            task.add_done_callback(self._notify)
        try:
            while not self._is_over and not all([task.done() and task.result() is None for task in tasks]):  # raises a task's exception
                await self._change()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if deadly := self._router.deadly:
            raise RunError(self._describe_deadly(deadly))

    async def _serve(self, servers: ServerGroup, member: ServerHandle, size: int, claim: int) -> None:
        """Make calls to a server one after the other, until no item is left or the server is lost or claimed anew (`claim` differs)."""
        while not self._is_over and member.trouble is None and member.times_claimed == claim:
            chunk = self._router.next_for(str(member), size)
            if not chunk:  # other servers have the remaining items, and may be lost
                await self._change()
                continue
            is_lost = False
            try:
                is_lost = await servers.during(member, self._receive(member, chunk))
            finally:
                self._router.end_call(str(member), chunk, is_lost=is_lost)
                self._notify()


# ---- prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesToSend:
    """Images of some prompts. Their files are read when they are sent.

    Args:
        image_data: Image data by key.
    """

    image_data: Mapping[str, Image] = field(default_factory=dict)
    bounds: wire.PixelBounds | None = None

    @classmethod
    def from_images(cls, images: Iterable[PlacedImages], image_spec: ImageProcessorSpec | None) -> ImagesToSend:
        """Collect the images of prompts.

        Args:
            images: (place, image) pairs of each prompt.
            image_spec: Image processor of the model; None: text only.
        """
        bounds = wire.PixelBounds(min_pixels=image_spec.min_pixels, max_pixels=image_spec.max_pixels) if image_spec else None
        return cls(image_data={image.key: image for placed in images for _, image in placed}, bounds=bounds)

    def but(self, known_keys: Collection[str], keys: Iterable[str]) -> tuple[wire.ImageData, ...]:
        """Read the files of images that a server does not have.

        Raises:
            ConfigError: A file is missing or has changed since the data were read.
        """
        return tuple(wire.ImageData(key=key, data=self.image_data[key].data()) for key in dict.fromkeys(keys) if key not in known_keys)


NOTHING = ImagesToSend()


def placed_images(images: PlacedImages) -> tuple[wire.PlacedImage, ...]:
    """Convert the images of a prompt to their HTTP form.

    Args:
        images: (index of the first image token, image) pairs.
    """
    return tuple(wire.PlacedImage(key=image.key, place=position, tokens=num_tokens(image)) for position, image in images)


async def generate(
    member: ServerHandle, body: wire.GenerateRequest, take: Callable[[wire.Request, wire.GenerateLine], object], *, noun: str = "prompts",
    ends: Callable[[], Collection[str]] = lambda: ENDS,
) -> None:  # fmt: skip
    """Send a body to /generate of a server, and pass each answer to `take` as it arrives.

    Args:
        take: Called with each request and its answer.
        ends: Returns the finish reasons that are valid now.

    Raises:
        ServerGoneError: The stream ended early.
        ServerRefusedError: The server refused the body.
        MalformedMessageError: An answer does not belong to a request, or its completions are invalid.
    """
    remaining = {request.key: request for request in body.requests}

    def stream(line: bytes) -> None:
        answer = wire.decode_line(wire.GenerateLine, line)
        activity.advance(0)  # heartbeats count as activity, also while completions are long
        if answer is None:
            return
        if answer.key not in remaining:
            raise wire.MalformedMessageError(f"it returned a response for unknown request ID {answer.key!r}")
        request = remaining.pop(answer.key)
        is_one = answer.error is None and not answer.lacks
        if is_one and (fault := fault_of_answer(answer.completions, request.n, body.version, ends())):
            raise wire.MalformedMessageError(fault)
        take(request, answer)

    await member.server.stream("/generate", body, stream)
    if remaining:
        raise ServerGoneError(f"its response ended with {len(remaining)} of {len(body.requests)} {noun} missing")


class GenerationRequest(ServerCallQueue[tuple[wire.SampledCompletion, ...]]):
    """Prompts to complete on rollout servers, and the answers so far.

    Args:
        requests: Prompt number -> request.
        version: Version of the weights that must sample. Set it anew after all servers were lost.
        format_name: Prompt number -> name in error messages.
    """

    def __init__(
        self,
        requests: Mapping[int, wire.Request],
        sampling: wire.Sampling,
        *,
        version: int,
        format_name: Callable[[int], str] = str,
        to_send: ImagesToSend = NOTHING,
    ):
        super().__init__(list(requests))
        self._to_send = to_send
        self.requests, self.sampling, self.version, self._format_name = dict(requests), sampling, version, format_name
        self._num_answered = 0  # completions
        self._began = self._last_answer_at = time.monotonic()

    @property
    def answers(self) -> Mapping[int, tuple[wire.SampledCompletion, ...]]:
        """Prompt number -> its completions, as far as they are answered."""
        return self._router.answers

    def ask(self, server_group: TrainingServerGroup) -> None:
        """Begin to send unanswered prompts to the servers that are used now. Returns at once.

        After all servers were lost, set `version` to that of the new weights before calling it again.
        """
        self._begin(server_group, n=max((request.n for request in self.requests.values()), default=1))

    @property
    def seconds(self) -> float:
        """Seconds from the construction to the last answer so far."""
        return self._last_answer_at - self._began

    def wait(self, should_cancel: Callable[[], bool] = lambda: False) -> int:
        """Wait until all prompts are answered or no server is left.

        Returns:
            The number of unanswered prompts.

        Raises:
            RunError: A prompt cannot be answered by any server.
            CancelledError: `should_cancel()` became true.
        """
        total = sum(request.n for request in self.requests.values())
        with activity.phase("sampling", total=total, unit="completions") as phase:
            self._wait(phase, lambda: self._num_answered, should_cancel)
        return len(self._router.left)

    # ---- on the event loop

    async def _receive(self, member: ServerHandle, chunk: Chunk) -> None:
        by_key = {self.requests[number].key: number for number in chunk}
        requests = tuple(self.requests[number] for number in chunk)
        images = [image.key for request in requests for image in request.images]
        try:
            image_data = await asyncio.to_thread(self._to_send.but, member.image_keys, images)
        except ConfigError as error:  # a file is missing or has changed
            raise RunError(str(error)) from error
        member.image_keys.update(images)
        bounds = self._to_send.bounds if images else None
        body = wire.GenerateRequest(version=self.version, sampling=self.sampling, requests=requests, image_data=image_data, bounds=bounds)

        def take(request: wire.Request, answer: wire.GenerateLine) -> None:
            number = by_key[request.key]
            if answer.error is not None:
                # Not retried elsewhere: every server would reject the request, and each would look like a failed one.
                raise RunError(f"{self._format_name(number)} cannot be completed: {answer.error}")
            if answer.lacks:
                member.image_keys.difference_update(answer.lacks)
                return  # still unanswered, so it is sent again
            self._num_answered += len(answer.completions)
            self._last_answer_at = time.monotonic()
            self._take(number, answer.completions)

        await generate(member, body, take)

    def _describe_deadly(self, numbers: Sequence[int]) -> str:
        return describe_deadly(", ".join(map(self._format_name, numbers)), self._router.deaths[numbers[0]])


def describe_deadly(name: str, servers: Sequence[str]) -> str:
    """Return the error message for prompts or turns with which `MOST_DEATHS` servers died."""
    return (
        f"{name}: in flight on {MOST_DEATHS} rollout servers when they died ({', '.join(servers)}), so it is not sent again. See the logs "
        "of these servers, or remove the row from the data set."
    )


def fault_of_answer(completions: Sequence[wire.SampledCompletion], n: int, version: int, valid: Collection[str] = ENDS) -> str | None:
    """Return why completions do not answer a request.

    Args:
        n: Number of requested completions.

    Returns:
        A clause about the server, or None if they are valid.
    """
    if len(completions) != n:
        return f"it returned {len(completions)} of {n} completions"
    if ends := {completion.reason for completion in completions} - {*valid}:
        return f"a completion has finish reason {ends.pop()!r}"
    other_versions = {span[0] for completion in completions for span in completion.versions} - {version}
    return f"it sampled with the weights of version {other_versions.pop()}, not {version}" if other_versions else None
