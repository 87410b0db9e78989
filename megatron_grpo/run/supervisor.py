"""Parent process that keeps a premature exit with code 0 from counting as success.

A user's reward function runs inside a rank. `os._exit(0)` there, or in a library, cannot be caught from inside, and a launcher trusts exit
code 0. So the program forks before anything is imported: the child does all the work, and the parent, a few megabytes of Python, waits for
it. The parent forwards signals, ends as the child ends, and turns an exit code 0 before the command has ended into 1. It also kills a child
that is stopped or whose threads are locked out: for a single process, no other rank could notice (`run.watchdog`).
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.cleanup import die_with_launcher, die_with_parent
from megatron_grpo.core.base.errors import EXIT_CRASH
from megatron_grpo.run import jobs

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, jobs.STOP_BY_CALLBACK)
_HEARD = {*_PASSED_ON, signal.SIGCHLD, signal.SIGALRM}
_SECONDS_BETWEEN_LOOKS = 1.0
_SENT_BY_THE_KERNEL = 0x80  # SI_KERNEL: from the terminal, which also sends it to the child
_STARTED_BY: list[int] = []


def supervised(command: Callable[[], int]) -> int:
    """Run `command` in a child process. On other systems than Linux it is called directly.

    Args:
        command: Returns the exit code of the program.

    Returns:
        The exit code of the process, in parent and child.
    """
    if sys.platform != "linux":
        return command()
    started_by = os.getppid()
    if launcher.read().by_torchrun:
        die_with_launcher(started_by)
    if end := jobs.ended_before():
        code, message = end
        _print_error(message)
        return code
    _STARTED_BY.append(started_by)
    own_pid = os.getpid()
    end_reader, end_writer = os.pipe()
    os.set_blocking(end_reader, False)  # a process that outlives the child may hold the other end
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        os.close(end_reader)
        die_with_parent(own_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = command()
        os.write(end_writer, b".")
        _leave(code)
    os.close(end_writer)
    # A timer instead of a timeout of the wait: if SIGCONT interrupts such a wait, Python 3.11 returns a signal that was never sent.
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_LOOKS)
    status = _wait_for(child)
    if status < 0:
        _die_by_signal(-status, mask)
    if status == 0 and not _has_reported_end(end_reader):
        launched = launcher.read()
        process = f"rank {launched.rank}" if launched.is_launched else "the process"
        _print_error(
            f"{process} ended with exit code 0 before its command was complete, so it exits with {EXIT_CRASH}. Code in it, such as a "
            "reward function, called os._exit or replaced the process."
        )
        return EXIT_CRASH
    return status


def _leave(code: int) -> NoReturn:
    """End this process as Python does, but without destroying its modules, which takes two CPU seconds."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as multiprocessing does in its children
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # the output is lost; Python exits with 120 then
            code = code or 120
    os._exit(code)


def launcher_pid() -> int:
    """Return the pid of the process that started this program: this process's parent, or the parent of its supervisor."""
    return _STARTED_BY[0] if _STARTED_BY else os.getppid()


def _print_error(text: str) -> None:
    from megatron_grpo.run.failures import PREFIX, print_error  # imported late, so that this process stays small

    print_error(f"{PREFIX}{text}")


def _wait_for(child: int) -> int:
    """Wait for `child`, forwarding signals to it, and return its exit code, negative for a signal.

    A child that hangs is killed.
    """
    pulse = None
    while True:
        received = signal.sigwaitinfo(_HEARD)
        if received.si_signo == signal.SIGALRM:
            from megatron_grpo.run import watchdog

            note = watchdog.read_note(child)
            pulse = pulse or watchdog.TimeSinceChange(2 * _SECONDS_BETWEEN_LOOKS)
            silent = pulse.update(note.get("beats", pulse.value))
            if note.get("timeout") and silent > note["timeout"]:
                _end_hung(child, Path(note["output_dir"]), silent)
                return EXIT_CRASH
        elif received.si_signo != signal.SIGCHLD:
            if received.si_code != _SENT_BY_THE_KERNEL:
                os.kill(child, received.si_signo)
        elif (waited := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(waited[1])


def _end_hung(child: int, output_dir: Path, seconds: float) -> None:
    """Report where a process hangs, and kill it."""
    from megatron_grpo.run.failures import print_error
    from megatron_grpo.run.watchdog import inspect_process, write_report

    rank = launcher.read().rank
    account = inspect_process(child, rank, output_dir, age=seconds)
    print_error(write_report(output_dir, {rank: account}, {rank: os.uname().nodename}, seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _has_reported_end(end_reader: int) -> bool:
    """Return whether the child has reported that its command ended."""
    try:
        return bool(os.read(end_reader, 1))
    except BlockingIOError:
        return False


def _die_by_signal(number: int, mask: set[int | signal.Signals]) -> None:
    """End this process by the signal that ended the child, so that a launcher or a shell sees what happened."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written the core file that matters
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - {number})
    os.kill(os.getpid(), number)
