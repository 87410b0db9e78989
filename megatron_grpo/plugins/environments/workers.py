"""Threads and an event loop that run environment calls concurrently with sampling.

A call that does not return within its timeout is abandoned together with its thread.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_grpo.run.rewards.process_isolation import IsolatedCall, is_alive

LINGER, MOST_LINGERED = 0.001, 0.02  # seconds to wait for the next result, and for all results of one `take`


class CallTimeoutError(Exception):
    """Error raised if a call does not end within its timeout."""


class CallResult(NamedTuple):
    """Result of one call: its key, its return value or its exception, and its duration in seconds."""

    key: Hashable
    value: Any
    error: BaseException | None
    seconds: float


@dataclass(slots=True, eq=False)
class _Call:
    key: Hashable
    work: Callable[[], Any]
    began: float = 0.0
    is_cancelled: bool = False
    is_awaited: bool = False  # the event loop awaits its result, and its thread is free again


class WorkerPool:
    """Runner of calls in daemon threads; awaitables that they return run on one event loop.

    It is not a thread pool, because Python joins a thread pool at exit and would wait for a call that hangs. A thread in which a call hangs
    is abandoned and replaced by another one. If a coroutine blocks the event loop, a new loop replaces it.

    Args:
        concurrency: Largest number of concurrent calls, not counting abandoned ones.
        timeout: Limit for one call in seconds, from its start.
    """

    def __init__(self, *, concurrency: int, timeout: float):
        self.concurrency, self.timeout = concurrency, timeout
        self.side_effects: list[str] = []  # of calls on the process; each entry completes a sentence
        self._waiting: deque[_Call] = deque()
        self._running: set[_Call] = set()
        self._ended: queue.SimpleQueue[tuple[_Call, CallResult]] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_free = 0  # threads that wait for a job
        self._lock = threading.Lock()  # guards what threads change: `_num_free`, and `is_cancelled` of a call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of calls that have not ended."""
        return len(self._waiting) + len(self._running)

    def submit(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Queue a call and start it as soon as a slot is free.

        Args:
            key: Identifies the call in its `CallResult`.
            work: Function that returns a value or an awaitable. Any exception becomes the result of the call.
        """
        self._waiting.append(_Call(key, work))
        self._fill()

    def take(self, seconds: float) -> list[CallResult]:
        """Return the results that have arrived since the last call.

        After the first result it waits up to 20 ms for others, so that turns that become ready together enter the same engine step.
        """
        results: list[CallResult] = []
        deadline = time.monotonic() + seconds
        while True:
            try:
                call, outcome = self._ended.get(timeout=(LINGER if self._running else 0.0) if results else self._patience(deadline))
            except queue.Empty:
                results += self._late()
                self._fill()
                if results or time.monotonic() >= deadline:
                    return results
                continue
            if call.is_cancelled:
                continue
            if not results:
                deadline = time.monotonic() + MOST_LINGERED
            self._running.discard(call)
            results.append(outcome)
            self._fill()
            if time.monotonic() >= deadline:
                return results

    def close(self) -> None:
        """End idle threads at once and busy ones when their call ends."""
        with self._lock:
            self._is_closed, num_free, self._num_free = True, self._num_free, 0
        for _ in range(num_free):
            self._jobs.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    # ----

    def _patience(self, deadline: float) -> float:
        """Return the seconds until `deadline` or the next timeout of a call, whichever is earlier."""
        deadlines = [call.began + self.timeout for call in self._running]
        return max(0.0, min([deadline, *deadlines]) - time.monotonic())

    def _late(self) -> list[CallResult]:
        time_now = time.monotonic()
        late = [call for call in self._running if call.began + self.timeout <= time_now]
        with self._lock:
            for call in late:
                call.is_cancelled = True
        self._running.difference_update(late)
        if any(call.is_awaited for call in late) and self._loop is not None and not is_alive(self._loop, 0.5):
            self._loop = None
        return [CallResult(call.key, None, CallTimeoutError(), self.timeout) for call in late]

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.concurrency:
            call = self._waiting.popleft()
            call.began = time.monotonic()
            self._running.add(call)
            with self._lock:
                is_taken = self._num_free > 0
                self._num_free -= is_taken
            if is_taken:
                self._jobs.put(call)
            else:
                threading.Thread(target=self._work, args=(call,), daemon=True, name="environment").start()

    def _work(self, first: _Call) -> None:
        call: _Call | None = first
        while call is not None and self._do(call):
            call = self._jobs.get()

    def _do(self, call: _Call) -> bool:
        """Execute one call. Returns whether the thread is available for another call."""
        value: Any = None
        raised, is_awaited = None, False
        try:
            with IsolatedCall(self.side_effects):
                value = call.work()
                is_awaited = inspect.isawaitable(value)
        except BaseException as error:  # noqa: BLE001 - an exception of a user's environment ends its own episode alone
            raised = error
        with self._lock:
            goes_on = not (call.is_cancelled or self._is_closed)  # else another thread has replaced this one, or none is needed
            self._num_free += goes_on
        if raised is None and is_awaited:
            call.is_awaited = True
            asyncio.run_coroutine_threadsafe(self._awaited(call, value), self._running_loop())
        else:
            self._end(call, value, raised)
        return goes_on

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), daemon=True, name="environments").start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Restart the loop if a coroutine stopped it or a background task raised SystemExit, since other episodes use the same loop."""
        while not self._is_closed:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt leave run_forever
                self.side_effects.append(f"raised {type(error).__name__} in a background task")

    async def _awaited(self, call: _Call, value: Awaitable[Any]) -> None:
        try:
            with IsolatedCall(self.side_effects):
                result = await asyncio.wait_for(value, max(0.0, call.began + self.timeout - time.monotonic()))
        except BaseException as error:  # noqa: BLE001 - as above
            is_late = isinstance(error, (TimeoutError, asyncio.CancelledError)) and time.monotonic() >= call.began + self.timeout
            self._end(call, None, CallTimeoutError() if is_late else error)
        else:
            self._end(call, result, None)

    def _end(self, call: _Call, value: Any, error: BaseException | None) -> None:
        self._ended.put((call, CallResult(call.key, value, error, time.monotonic() - call.began)))
