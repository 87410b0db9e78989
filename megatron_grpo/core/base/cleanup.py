"""Cleanup steps that run however a block ends and keep its error, and processes and threads that end with their parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class CleanUp:
    """Context manager that runs cleanup steps, last first, however the block ends.

    Usage: `with CleanUp() as clean_up: ... clean_up.add(close)`. All steps run. The first error is the one that is raised; later errors of
    cleanup steps are added to it as notes.
    """

    def __init__(self, *steps: Callable[[], object]):
        self._steps = list(steps)

    def add(self, step: Callable[[], object]) -> None:
        """Add a step that runs before those added earlier.

        Args:
            step: Function without arguments that releases something.
        """
        self._steps.append(step)

    def __enter__(self) -> CleanUp:
        return self

    def __exit__(self, kind: object, first: BaseException | None, trace: object) -> None:
        original = first
        for step in reversed(self._steps):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever a step raises, the other steps must run and the first error is kept
                if first is None:
                    first = error
                else:
                    first.add_note(f"Cleaning up after this failed too: {type(error).__name__}: {error}")
        if first is not None and original is None:
            raise first


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause Python's garbage collector while the block imports, and exempt all objects that exist afterwards from later collections.

    The imports of a run make a million objects that live as long as the process. The collector would visit them again and again: a third of
    the CPU time of a start. What is garbage before the block is collected first.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def run_in_thread(work: Callable[[], T], *, name: str, in_thread: bool = True) -> Future[T]:
    """Run `work` on a daemon thread and return its future.

    The thread does not keep this process alive.

    Args:
        in_thread: Use a thread; if False, run at once on the calling thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(error)

    if in_thread:
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        run()
    return future


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends (Linux; elsewhere this does nothing).

    For processes that a launcher started, such as torchrun's workers: a launcher killed with SIGKILL cannot end them itself. Not for a
    process started from a shell: it would die with the shell.

    Args:
        parent: Process ID of the parent, if known: it may have died before this call. None reads the current parent.

    Raises:
        OSError: The kernel refused.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    parent = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the prctl call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher(launcher: int) -> None:
    """Apply `die_with_parent` in one of torchrun's workers, and kill this process at once if torchrun has already died."""
    die_with_parent(launcher)
    if sys.platform == "linux" and _adopts(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _adopts(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process adopts orphans: PID 1 of a machine or container, or systemd.

    torchrun itself may be PID 1 of a container and does not count.
    """
    try:
        name, command = (proc / str(pid) / "comm").read_text().strip(), (proc / str(pid) / "cmdline").read_text()
    except OSError:
        return False
    return (pid == 1 or name == "systemd") and "python" not in Path(command.split("\0")[0]).name
