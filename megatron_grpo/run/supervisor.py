"""A small parent for the program: no process that leaves before its command has ended is taken for one that is done.

A user's reward function runs inside a rank. `os._exit(0)` there, or in a library, cannot be held from inside, and a launcher believes exit
code 0. So the program forks first, before anything is imported: the child does all the work, and the parent, a few megabytes of Python,
waits for it. It passes signals on, ends as the child ends, and turns an exit code 0 that nobody meant into 1. It also ends a child that
is stopped, or whose threads are locked out: alone, nobody else could notice (`run.watchdog`).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_grpo.base import launcher
from megatron_grpo.base.cleanup import die_with_launcher, die_with_parent
from megatron_grpo.base.errors import EXIT_CRASH

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_HEARD = {*_PASSED_ON, signal.SIGCHLD, signal.SIGALRM}
_SECONDS_BETWEEN_LOOKS = 1.0
_SENT_BY_THE_KERNEL = 0x80  # SI_KERNEL: from the terminal, which tells the child as well
_STARTED_BY: list[int] = []


def supervised(command: Callable[[], int]) -> int:
    """`command()` in a child of this process; returns, in both, what the process should exit with. Linux; elsewhere it is called here."""
    if sys.platform != "linux":
        return command()
    started_by = os.getppid()
    if launcher.read().by_torchrun:
        die_with_launcher(started_by)
    if end := launcher.ended_before():
        code, why = end
        _tell(why)
        return code
    _STARTED_BY.append(started_by)
    me = os.getpid()
    ended, says_end = os.pipe()
    os.set_blocking(ended, False)  # a process that the child leaves behind may hold the other end
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        os.close(ended)
        die_with_parent(me)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = command()
        os.write(says_end, b".")
        return code
    os.close(says_end)
    # A timer, and no time limit of the wait: where SIGCONT ends that, Python 3.11 returns a signal that nobody sent.
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_LOOKS)
    status = _wait_for(child)
    if status < 0:
        _die_of(-status, mask)
    if status == 0 and not _has_said_so(ended):
        _tell(f"{_who()} left with exit code 0 before its command had ended, so it exits with {EXIT_CRASH}. Something in it "
             "called os._exit, a reward function perhaps, or replaced the process.")  # fmt: skip
        return EXIT_CRASH
    return status


def launcher_pid() -> int:
    """The process that started this program, which may be this process's parent or the parent of its supervisor."""
    return _STARTED_BY[0] if _STARTED_BY else os.getppid()


def _tell(text: str) -> None:
    from megatron_grpo.run.failures import PREFIX, tell  # only now: this process stays small

    tell(f"{PREFIX}{text}")


def _wait_for(child: int) -> int:
    """The exit code of `child`, negative for a signal. Until then signals to this process are the child's."""
    looked, beats, silent = time.monotonic(), 0, 0.0
    while True:
        heard = signal.sigwaitinfo(_HEARD)
        if heard.si_signo == signal.SIGALRM:
            from megatron_grpo.run import hung

            now, note = time.monotonic(), hung.note_of(child)
            gap, looked = min(now - looked, 2 * _SECONDS_BETWEEN_LOOKS), now  # no more pass while this process is stopped
            silent, beats = (silent + gap, beats) if note.get("beats", beats) == beats else (0.0, note["beats"])
            if note.get("timeout") and silent > note["timeout"]:
                _end_hung(child, Path(note["output_dir"]), silent)
                return EXIT_CRASH
        elif heard.si_signo != signal.SIGCHLD:
            if heard.si_code != _SENT_BY_THE_KERNEL:
                os.kill(child, heard.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _end_hung(child: int, output_dir: Path, seconds: float) -> None:
    """Says where a process is that gives no sign of life, and kills it."""
    from megatron_grpo.run import hung

    rank = launcher.read().rank
    account = hung.look_from_outside(child, rank, output_dir, age=seconds)
    said = hung.verdict({rank: account}, {rank: os.uname().nodename}, seconds)
    _tell(f"{hung.keep(output_dir, 'report.txt', said)}\n{hung.where_to_look(output_dir)}")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _has_said_so(ended: int) -> bool:
    try:
        return bool(os.read(ended, 1))
    except BlockingIOError:
        return False


def _die_of(number: int, mask: set[int | signal.Signals]) -> None:
    """As the child did, so that a launcher or a shell sees what happened."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child's core file is the one to look at
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - {number})
    os.kill(os.getpid(), number)


def _who() -> str:
    launched = launcher.read()
    return f"rank {launched.rank}" if launched.is_launched else "the process"
