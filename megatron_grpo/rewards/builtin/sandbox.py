"""Owns running one untrusted Python program from outside: its process and that of its tests, its directory, its wall clock, and what it
printed.

The inside, with all that is taken away from both processes, is jail.py; how they speak to each other is held.py. Here is counted what the
kernel does not: bytes written by all files together, files, threads. A process beyond one of these is killed, a few hundredths of a second
later.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

_JAIL = Path(__file__).with_name("jail.py")
_SHOWN = 16 << 20  # bytes of output that are looked at
_STARTUP = 5.0  # seconds for the interpreter itself, on a machine that is busy
_LOOK = 0.02  # seconds between two looks at what a program has used
_BYTES, _ENTRIES, _THREADS = 128 << 20, 1000, 256  # what it may write, leave in its directory, and have
_PREFIX = "megatron_grpo_code_"  # of directories; then the id of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """passed: a verdict for each test that came to its end, or, as the end of a sentence, why there can be none. clean: the program, or
    the process of its tests, ended by itself, without an error. exceeded: what one of them used too much of, "" for nothing.
    """

    passed: tuple[bool | str, ...]
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
) -> SandboxResult:
    """Runs `program` in a process that can reach nothing else, and `tests` in another such process, which calls what the program defines.

    as_main: `__name__` is "__main__", for programs that read and print. landlock: "must" runs nothing on a kernel without it, "may" does,
    "never" leaves it out.
    """
    limits = {"seconds": seconds, "memory_bytes": memory_mb << 20, "landlock": landlock}
    with (
        _directory() as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as report,
        ExitStack() as started,
    ):
        given.write(standard_input.encode())
        given.seek(0)
        ends = [started.enter_context(end) for end in (socket.socketpair() if tests else ())]
        places = [end.fileno() for end in ends] or [-1]
        job = {**limits, "program": program, "as_main": as_main}
        processes = [started.enter_context(_started(job, folder, places[0], (), stdin=given, stdout=output, stderr=errors))]
        if tests:
            job = {**limits, "tests": list(tests), "report": report.fileno()}
            nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            processes.append(started.enter_context(_started(job, folder, places[1], (report.fileno(),), **nowhere)))
        for end in ends:
            end.close()  # so that either process hears of the other's end
        exceeded, last, deadline = "", processes[-1], time.monotonic() + seconds + _STARTUP
        # They end themselves after `seconds`, unless the program turned that off.
        while last.poll() is None and not exceeded and time.monotonic() < deadline:
            exceeded = next(filter(None, (_exceeded(one.pid, folder) for one in processes)), "")
            with suppress(subprocess.TimeoutExpired):
                last.wait(_LOOK)
        started.close()
        timed_out = not exceeded and last.returncode in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
        passed = tuple(json.loads(line) for line in _head(report).splitlines())
        return SandboxResult(passed=passed, clean=last.returncode == 0, output=_head(output), errors=_head(errors), timed_out=timed_out,
                       exceeded=exceeded)  # fmt: skip


@contextmanager
def _started(job: Mapping[str, object], folder: str, link: int, kept: tuple[int, ...], **streams: Any) -> Iterator[subprocess.Popen]:
    """A process of jail.py, which does not outlive the block. link, kept: descriptors that it gets."""
    with os.fdopen(os.memfd_create("job"), "w+b") as job_file:
        job_file.write(json.dumps(job).encode())
        job_file.seek(0)
        # The descriptors stand on the command line; what the job says does not.
        command = [sys.executable, "-P", "-s", "-B", str(_JAIL), str(job_file.fileno()), str(link), str(os.getpid())]
        descriptors = (job_file.fileno(), *kept, *([link] if link >= 0 else []))
        process = subprocess.Popen(command, cwd=folder, env=_environment(folder), pass_fds=descriptors, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


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
