"""Runs the program of an agent, and ends all processes that it has started, also those that have left its process group.

It is run by path as a script in a new interpreter, so it imports nothing of the package. It is the subreaper of the program: processes
whose parent has ended become its children. SIGTERM ends the program; the kernel sends it too when the run ends, even if that is killed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WAITED = (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)


def main() -> None:
    """Run a program and exit with its status, or as a shell with 128 plus the number of the signal that ended it.

    Command line arguments: process ID of the run, limit of the program's address space in bytes (0: none), seconds between SIGTERM and
    SIGKILL, the program and its arguments.
    """
    run, memory, seconds, words = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    prctl = ctypes.CDLL(None).prctl
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != run:
        sys.exit("the run has ended")
    program = os.fork()
    if not program:
        os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _execute(words, memory)
    with suppress(OSError):  # the program has done it already
        os.setpgid(program, program)
    code = os.waitstatus_to_exitcode(_wait(program, run, seconds))
    _end_children()
    os._exit(code if code >= 0 else 128 - code)


def _execute(words: list[str], memory: int) -> None:
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _wait(program: int, run: int, seconds: float) -> int:
    """Return the wait status of the program. On SIGTERM it is asked to end, and after `seconds` killed; at once if the run has ended."""
    while True:
        received = signal.sigwait(_WAITED)
        if received == signal.SIGTERM:
            os.killpg(program, signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, seconds if os.getppid() == run else 0.01)
        elif received == signal.SIGALRM:
            os.killpg(program, signal.SIGKILL)
        pid = -1
        while pid:  # several children may have ended with one signal
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                return status


def _end_children() -> None:
    """Kill children until none is left: those of a killed process become children of this one."""
    with suppress(ChildProcessError):
        while True:
            with open("/proc/thread-self/children") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    main()
