"""What must run however a block ends, without hiding why it ended; and processes and threads that end with the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class CleanUp:
    """`with CleanUp() as clean_up: ... clean_up.add(close)`: runs what was added, last first, however the block ends.

    All of it runs. The first error is the one that is raised; errors of the clean-up after another error are noted on that one.
    """

    def __init__(self, *steps: Callable[[], object]):
        self._steps = list(steps)

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def __enter__(self) -> CleanUp:
        return self

    def __exit__(self, kind: object, first: BaseException | None, trace: object) -> None:
        came_in = first
        for step in reversed(self._steps):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever closing raises, the other steps must run and the first error must stay
                if first is None:
                    first = error
                else:
                    first.add_note(f"Cleaning up after this failed too: {type(error).__name__}: {error}")
        if first is not None and came_in is None:
            raise first


def begun(work: Callable[[], T], *, name: str, beside: bool = True) -> Future[T]:
    """What `work` gives, or raises: in a thread of its own, which does not keep this process alive; or, not `beside`, at once."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(error)

    if beside:
        threading.Thread(target=run, name=name, daemon=True).start()
    else:
        run()
    return future


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when the thread that started it ends (Linux; elsewhere this does nothing).

    parent: the number of the process that started it, where it is known: it may have died before this is called.
    For processes that a launcher started, such as torchrun's workers: a launcher killed with SIGKILL cannot end them itself. Not for a
    process that somebody started from a shell: it would die with the shell.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    parent = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_launcher(launcher: int) -> None:
    """As `die_with_parent`, for one of torchrun's workers; and at once if torchrun died before this process could ask for that.

    launcher: the number of the parent, as it was first seen.
    """
    die_with_parent(launcher)
    if sys.platform == "linux" and _adopts(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _adopts(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process is one that takes in orphans: the first of a machine or container, or systemd; but not torchrun itself, which
    may be the first one of a container."""
    try:
        name, command = (proc / str(pid) / "comm").read_text().strip(), (proc / str(pid) / "cmdline").read_text()
    except OSError:
        return False
    return (pid == 1 or name == "systemd") and "python" not in Path(command.split("\0")[0]).name
