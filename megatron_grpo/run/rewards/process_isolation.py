"""Protect the process from user code that exits, forks, closes the output streams, or does not return.

`os._exit` and crashes in C code cannot be caught inside the process; `run.supervisor` detects from outside that a process exited too
early.

Deadlines hold in the main thread, in other threads, and on an event loop. Stopping the run also cancels the call. A Python thread cannot
be killed, so a synchronous function runs in the main thread and is interrupted by a signal reserved for that purpose. The signal stops
Python code and blocking system calls. Code that does not return to the interpreter (a huge power, a lock held in C) cannot be
interrupted; after a grace period the process ends with a traceback that shows where it is stuck.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any

from megatron_grpo.core.base.cleanup import run_in_thread
from megatron_grpo.core.base.errors import CancelledError, describe_exception, one_line

_OUTPUTS = {1: "stdout", 2: "stderr"}


class ExitRequestedError(Exception):
    """Error that replaces SystemExit, or KeyboardInterrupt without Ctrl-C, of the user's code.

    Either would end the run, perhaps with exit code 0.
    """


class IsolatedCall:
    """Context manager that runs user code: `with IsolatedCall(side_effects): f()`.

    * A child process that the code forked does not leave the block; otherwise there would be two copies of the run.
    * If the code closed stdout or stderr, it is reopened. Otherwise the next output would end the run, or go to a file opened under the
      same descriptor.
    * If the code changed process-wide settings of torch that affect computation, they are restored.

    Args:
        side_effects: Receives what was closed or changed, each as the end of a sentence about the code.

    Raises:
        ExitRequestedError: If the code raised an exception that would end this process.
    """

    def __init__(self, side_effects: list[str]):
        self.side_effects = side_effects

    def __enter__(self) -> IsolatedCall:
        self._process = os.getpid()
        self._pressed = False
        # A run has its own handlers (`run.signals`). With Python's default handler, Ctrl-C must be told from an exception of the code.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._listens = is_default and threading.current_thread() is threading.main_thread()
        if self._listens:
            signal.signal(signal.SIGINT, self._receive)
        self._copies = {fd: copy for fd in _OUTPUTS if (copy := _duplicate_descriptor(fd)) is not None}
        self._torch = _torch_settings()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            _end_child(error)
        if self._listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, copy in self._copies.items():
            if _open_again(fd, copy):
                self.side_effects.append(f"closed {_OUTPUTS[fd]}; it was reopened")
            os.close(copy)
        for name, (current, _) in _torch_settings().items():
            if name in self._torch and current != self._torch[name][0]:
                initial, change_to = self._torch[name]
                change_to(initial)
                self.side_effects.append(f"changed torch's {name} to {current}; it was reset to {initial}")
        if isinstance(error, SystemExit) or (isinstance(error, KeyboardInterrupt) and not self._pressed):
            text = one_line(error)
            raise ExitRequestedError(f"{type(error).__name__}{': ' * bool(text)}{text}") from error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt


def _torch_settings() -> dict[str, tuple[Any, Callable[[Any], object]]]:
    """Return torch's process-wide settings: name -> (value, setter). Empty if torch has not been imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "default device": (str(torch.get_default_device()), torch.set_default_device),
        "number of threads": (torch.get_num_threads(), torch.set_num_threads),
    }


def _duplicate_descriptor(fd: int) -> int | None:
    try:
        return os.dup(fd)
    except OSError:  # already closed, or no descriptors are left
        return None


def _open_again(fd: int, copy: int) -> bool:
    """Reopen an output stream if needed. Return whether its descriptor, or Python's stream on it, was closed."""
    name, was_closed = _OUTPUTS[fd], False
    try:
        os.fstat(fd)
    except OSError:
        os.dup2(copy, fd)
        was_closed = True
    stream = getattr(sys, name)
    if stream is not None and stream.closed:
        setattr(sys, name, open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False))
        was_closed = True
    return was_closed


def _end_child(error: BaseException | None) -> None:
    if isinstance(error, SystemExit):
        os._exit(error.code if isinstance(error.code, int) else 0 if error.code is None else 1)
    end = "returned" if error is None else describe_exception(error)
    message = (
        f"megatron-grpo: process {os.getpid()}, which a reward function forked, {end} instead of leaving with os._exit. It ends here.\n"
    )
    try:
        os.write(2, message.encode())
    finally:
        os._exit(1)


# Not SIGALRM: math-verify and others set and clear that one themselves, which would clear the deadline.
SIGNAL = signal.SIGRTMIN + 11
GRACE = 15.0  # seconds after a deadline until a function that cannot be interrupted ends the process
_REPEAT = 0.5  # seconds between signals to a function that swallowed the first one
_LOOK = 0.5  # seconds between two calls of should_cancel


class RewardTimeoutError(Exception):
    """Error raised if a function does not return before its deadline."""


class _StopCall(BaseException):
    """Raised inside a function that has timed out. Not an Exception, so that `except Exception` in a loop does not swallow it."""


def never_cancel() -> bool:
    """Return False: the default for `should_cancel`."""
    return False


def call_before(seconds: float, function: Callable[[], Any], should_cancel: Callable[[], bool] = never_cancel) -> Any:
    """Call `function()` with a deadline and return its result. Exceptions of the function propagate.

    Args:
        function: Called without arguments.
        should_cancel: Polled during the call; True cancels it.

    Raises:
        RewardTimeoutError: After `seconds`.
        CancelledError: Soon after `should_cancel()` returned True.
    """
    if threading.current_thread() is threading.main_thread():
        return _call_in_main_thread(seconds, function, should_cancel)
    # A thread cannot be interrupted: after a timeout it is left behind and ends with the process.
    return _result_before(time.monotonic() + seconds, run_in_thread(function, name="reward"), should_cancel)


def _call_in_main_thread(seconds: float, function: Callable[[], Any], should_cancel: Callable[[], bool]) -> Any:
    armed, cancelled = threading.Event(), threading.Event()
    finished = threading.Event()
    main, end = threading.get_ident(), time.monotonic() + seconds

    def interrupt(signum: int, frame: Any) -> None:
        if armed.is_set():
            raise _StopCall

    def watch() -> None:
        pause = min(seconds, _LOOK)
        while not finished.wait(pause):
            if should_cancel():
                cancelled.set()
            pause = min(max(0.0, end - time.monotonic()), _LOOK)
            if cancelled.is_set() or not pause:
                signal.pthread_kill(main, SIGNAL)
                pause = _REPEAT

    previous = signal.signal(SIGNAL, interrupt)
    watcher = threading.Thread(target=watch, name="reward-deadline", daemon=True)
    # It runs in a C thread and needs no interpreter lock, so it works even if the function holds that lock.
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        armed.set()
        watcher.start()
        try:
            return function()
        finally:
            armed.clear()
    except _StopCall:
        raise (_cancelled() if cancelled.is_set() else RewardTimeoutError()) from None
    finally:
        armed.clear()
        finished.set()
        faulthandler.cancel_dump_traceback_later()
        watcher.join()
        signal.signal(SIGNAL, previous)


def _result_before(end: float, future: Future[Any], should_cancel: Callable[[], bool]) -> Any:
    """Return the result of a future, or raise its exception, RewardTimeoutError or CancelledError.

    Args:
        end: Deadline, on the clock of `time.monotonic`.
    """
    while True:
        remaining = max(0.0, end - time.monotonic())
        try:
            return future.result(min(remaining, _LOOK))
        except TimeoutError:
            if future.done():  # the function's own TimeoutError
                raise
        if should_cancel():
            raise _cancelled()
        if remaining <= _LOOK:
            raise RewardTimeoutError


def _cancelled() -> CancelledError:
    return CancelledError("reward computation was cancelled")


class EventLoop:
    """An event loop in a separate thread, kept between batches so that a function can keep its HTTP session."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self, coroutine: Coroutine[Any, Any, Any], seconds: float, should_cancel: Callable[[], bool] = never_cancel
    ) -> Callable[[], Any]:
        """Start a coroutine immediately. The returned callable waits for its result.

        Args:
            seconds: Time limit, counted from the start.
            should_cancel: Polled while waiting; True cancels the coroutine.

        Returns:
            A callable that returns the result. It raises RewardTimeoutError after `seconds`, or CancelledError soon after
            `should_cancel()` returned True.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
        loop = self._loop
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        deadline = time.monotonic() + seconds

        def wait() -> Any:
            try:
                return _result_before(deadline, future, should_cancel)
            except (RewardTimeoutError, CancelledError):
                if not future.done():
                    future.cancel()
                    if not is_alive(loop, 1.0):
                        self._loop = None  # the next batch gets a new one
                raise

        return wait


def is_alive(loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
    """Return False if a coroutine blocks the loop (`time.sleep` instead of `asyncio.sleep`)."""
    alive = threading.Event()
    loop.call_soon_threadsafe(alive.set)
    return alive.wait(seconds)
