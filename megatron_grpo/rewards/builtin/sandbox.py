"""Owns running one untrusted Python program from outside: its process, its directory, its wall clock, its tests, and what it printed.

The inside, with all that is taken away from the program, is jail.py. Here is counted what the kernel does not: bytes written by all files
together, files, threads. A program beyond one of these is killed, a few hundredths of a second later.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from megatron_grpo.rewards.builtin.held import HeldTest, hold

_JAIL = Path(__file__).with_name("jail.py")
_SHOWN = 16 << 20  # bytes of output that are looked at
_STARTUP = 5.0  # seconds for the interpreter itself, on a machine that is busy
_LOOK = 0.02  # seconds between two looks at what a program has used
_BYTES, _ENTRIES, _THREADS = 128 << 20, 1000, 256  # what it may write, leave in its directory, and have
_PREFIX = "megatron_grpo_code_"  # of directories; then the id of the process
_LONGEST_LINE = 4 << 20  # bytes of one answer: a value to compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """passed: a verdict for each test that came to its end. clean: the program ended by itself, without an error.

    exceeded: what it used too much of, "" for nothing.
    """

    passed: tuple[bool, ...]
    clean: bool
    output: str
    errors: str
    timed_out: bool
    exceeded: str


def run_program(
    program: str,
    *,
    tests: Sequence[str] = (),
    standard_input: str = "",
    as_main: bool = False,
    seconds: float,
    memory_mb: int,
    landlock: str = "must",
) -> Outcome:
    """Runs `program`, then each of `tests` in its namespace, in a process that can reach nothing else.

    as_main: `__name__` is "__main__", for programs that read and print. landlock: "must" runs nothing on a kernel without it, "may" does,
    "never" leaves it out.
    """
    job = {"program": program, "has_tests": bool(tests), "as_main": as_main, "seconds": seconds, "memory_bytes": memory_mb << 20,
           "landlock": landlock}  # fmt: skip
    mine, its = socket.socketpair()
    with (
        mine,
        _directory() as folder,
        os.fdopen(os.memfd_create("job"), "w+b") as job_file,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        job_file.write(json.dumps(job).encode())
        given.write(standard_input.encode())
        job_file.seek(0)
        given.seek(0)
        with its:
            process = subprocess.Popen(
                # The descriptors stand on the command line; the program's secrets do not, and its tests are not there yet.
                [sys.executable, "-P", "-s", "-B", str(_JAIL), str(job_file.fileno()), str(its.fileno()), str(os.getpid())],
                stdin=given,
                stdout=output,
                stderr=errors,
                cwd=folder,
                env=_environment(folder),
                pass_fds=(job_file.fileno(), its.fileno()),
                start_new_session=True,
            )
        try:
            # It ends itself after `seconds`, unless the program turned that off.
            watched = _Watched(process, mine, folder, [hold(test) for test in tests], time.monotonic() + seconds + _STARTUP)
            watched.until_it_ends()
        finally:
            process.kill()
            process.wait()
        timed_out = not watched.exceeded and process.returncode in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
        return Outcome(passed=tuple(watched.passed), clean=process.returncode == 0, output=_head(output), errors=_head(errors),
                       timed_out=timed_out, exceeded=watched.exceeded)  # fmt: skip


class _Watched:
    """One process of a program: gives it its tests one by one, and says when it must be killed."""

    def __init__(self, process: subprocess.Popen, channel: socket.socket, folder: str, tests: Sequence[HeldTest], deadline: float):
        self.process, self.channel, self.folder, self.deadline = process, channel, folder, deadline
        self.waiting = list(tests)
        self.passed: list[bool] = []
        self.exceeded = ""
        self._test: HeldTest | None = None
        self._word = ""
        self._asked: set[int] = set()  # comparisons of the test under way
        self._held: set[int] = set()  # those that came out right
        self._unread = b""

    def until_it_ends(self) -> None:
        """Returns when the process has ended, or must be killed: it is out of time, took too much, or said what it had no reason to say."""
        self.channel.setblocking(False)
        heard = select.poll()
        heard.register(self.channel, select.POLLIN)
        next_look, is_open = 0.0, True
        while self.process.poll() is None and (now := time.monotonic()) < self.deadline:
            if now >= next_look:
                self.exceeded, next_look = _exceeded(self.process.pid, self.folder), now + _LOOK
                if self.exceeded:
                    return
            if is_open and heard.poll(1000 * _LOOK):
                is_open = self._hear()
                if self._unread and not is_open:
                    return
            elif not is_open:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_LOOK)

    def _hear(self) -> bool:
        """Reads what there is and answers it; False where the channel has ended, or said too much or something else than was asked."""
        try:
            received = self.channel.recv(1 << 16)
        except ConnectionError:
            received = b""
        self._unread += received
        if not received or len(self._unread) > _LONGEST_LINE:
            return False
        while b"\n" in self._unread:
            line, _, rest = self._unread.partition(b"\n")
            try:
                self._answer(json.loads(line))
            except (ValueError, TypeError, KeyError, IndexError, RecursionError, OSError):
                return False
            self._unread = rest
        return True

    def _answer(self, words: list) -> None:
        """Raises ValueError for what does not belong to the test under way."""
        if words == ["ready"] and self._test is None and not self.passed:
            return self._next()
        if self._test is None or words[0] != self._word:
            raise ValueError(words)
        if words[1] == "compare":
            return self._compare(*words[2:])
        sure = {number for number, expected in enumerate(self._test.expected) if expected.is_sure}
        self.passed.append(words[1] == "passed" and sure <= self._held)
        self._next()

    def _compare(self, number: int, text: str | None) -> None:
        assert self._test is not None
        expected = self._test.expected[number]
        if expected.is_sure and number in self._asked:
            raise ValueError("a program that guesses")
        self._asked.add(number)
        if text is None or expected.admits(text):
            self._held.add(number)
        self._send({"expression": expected.expression} if text is None else expected.admits(text))

    def _next(self) -> None:
        """The next test; without one the process has nothing to wait for, and ends."""
        self._test, self._word, self._asked, self._held = None, secrets.token_hex(8), set(), set()
        if self.waiting:
            self._test = self.waiting.pop(0)
            self._send(self._test.message(self._word))
        else:
            self.channel.shutdown(socket.SHUT_WR)

    def _send(self, value: object) -> None:
        self.channel.setblocking(True)
        self.channel.settimeout(max(0.1, self.deadline - time.monotonic()))
        self.channel.sendall(json.dumps(value).encode() + b"\n")
        self.channel.setblocking(False)


def _exceeded(pid: int, folder: str) -> str:
    """What a process has used too much of; "" for nothing."""
    try:
        counted = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended; `why_unsafe` has seen that this can be read
        return ""
    if int(counted["wchar"]) > _BYTES:
        return f"{_BYTES >> 20} MiB written"
    if threads > _THREADS:
        return f"{_THREADS} threads"
    return _crowded(folder)


def _crowded(folder: str) -> str:
    """Whether there are too many files, or directories nested deeper than a path is long, where nobody can count them."""
    too_deep = False

    def unlisted(error: OSError) -> None:
        nonlocal too_deep
        too_deep |= error.errno == errno.ENAMETOOLONG

    entries = (entry for _, directories, files in os.walk(folder, onerror=unlisted) for entry in (*directories, *files))
    is_full = next(islice(entries, _ENTRIES, None), None) is not None
    return f"{_ENTRIES} files" if is_full else "directories nested deeper than a path is long" if too_deep else ""


def why_unsafe(*, landlock: str = "must") -> str | None:
    """Why programs cannot be held on this machine, found by trying; None where they can."""
    if not Path("/proc/self/io").is_file():
        return "this kernel does not count what a process writes (/proc/self/io)"
    attempt = f"""
import os, socket
def refused(action):
    try:
        action()
    except OSError:
        return True
assert refused(lambda: socket.socket()), "the network can be reached"
assert refused(lambda: os.fork() or os._exit(0)), "processes can be started"
assert refused(lambda: os.kill({os.getpid()}, 0)), "other processes can be signalled"
assert refused(lambda: os.chmod({str(_JAIL)!r}, {os.stat(_JAIL).st_mode & 0o7777})), "the modes of files can be changed"
assert refused(lambda: open({str(Path(tempfile.gettempdir()) / "megatron_grpo_outside")!r}, "w")), "files can be written"
print("held")
"""
    outcome = run_program(attempt + "\n", as_main=True, seconds=10, memory_mb=512, landlock=landlock)
    if outcome.output.strip() == "held":
        return None
    reason = outcome.errors.strip().splitlines()
    return reason[-1] if reason else "the sandbox did not start"


@contextmanager
def _directory() -> Iterator[str]:
    """A directory for one program, removed with whatever is in it; where this process is killed, by the next one that makes some."""
    _sweep()
    new = tempfile.mkdtemp(prefix=".megatron_grpo_")
    handle = os.open(new, os.O_RDONLY)
    root = os.path.join(os.path.dirname(new), f"{_PREFIX}{os.getpid()}{os.path.basename(new)}")
    try:
        with suppress(OSError):  # this file system has no locks, so nobody sweeps it
            fcntl.flock(handle, fcntl.LOCK_EX)
        os.rename(new, root)
        folder = os.path.join(root, "work")
        os.mkdir(folder)
        yield folder
    finally:
        _remove(root)
        os.close(handle)


@cache
def _sweep() -> None:
    """Removes directories of this user's processes that were killed: their ids are nobody's, and nobody holds their locks."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*.*"):
        owner = Path("/proc", root.name.removeprefix(_PREFIX).partition(".")[0])
        with suppress(OSError):
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid() and not owner.exists():
                    _remove(str(root))
            finally:
                os.close(handle)


def _remove(root: str) -> None:
    """Level by level: a program can nest directories deeper than a path is long, where shutil.rmtree runs out of stack and descriptors.

    What is found inside a directory moves up to `root`, then it is looked into. No link is followed. The program has ended.
    """
    waiting: list[str] = []
    with suppress(OSError):
        waiting = [entry.path for entry in os.scandir(root)]
    for directory in waiting:  # grows
        with suppress(OSError):
            os.chmod(directory, 0o700)
            for entry in list(os.scandir(directory)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    waiting.append(os.path.join(root, secrets.token_hex(8)))
                    os.rename(entry.path, waiting[-1])
                else:
                    os.unlink(entry.path)
    for directory in (*waiting, root):
        with suppress(OSError):
            os.rmdir(directory)


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours: no keys, no tokens. The library path is what some Python installations cannot start without."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads, **kept}


def _head(file) -> str:
    file.seek(0)
    return file.read(_SHOWN).decode(errors="replace")
