"""Run one untrusted Python program in a sandbox: its process and that of its tests, its directory, time limit and output.

The restrictions inside both processes are in jail.py, the communication between them in hidden_tests.py. This module counts what the
kernel does not: bytes written to all files together, number of files, threads. A process that exceeds a limit is killed within a few
hundredths of a second.
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
_SHOWN = 16 << 20  # bytes of output that are read
_STARTUP = 5.0  # seconds for starting the interpreter on a busy machine
_LOOK = 0.02  # seconds between two checks of a program's resource use
_BYTES, _ENTRIES, _THREADS = 128 << 20, 1000, 256  # limits: bytes written, files in its directory, threads
_PREFIX = "megatron_grpo_code_"  # of directory names, followed by the process ID


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Result of a program.

    Args:
        passed: Per completed test, whether it passed, or the end of a sentence that says why it is inconclusive.
        clean: Whether the program, or the process of its tests, ended by itself without an error.
        output: Standard output of the program.
        errors: Standard error of the program.
        timed_out: Whether it was stopped for its time limit.
        exceeded: The limit that was exceeded; "" if none.
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
    """Run a program in a sandboxed process, and tests in a second one that calls functions of the program.

    Args:
        program: Source of the program.
        tests: Source of each test.
        standard_input: Standard input of the program.
        as_main: Whether `__name__` is "__main__", for programs that read and print.
        seconds: Wall-clock limit; the CPU limit is up to one second higher.
        memory_mb: Limit of address space in MiB.
        landlock: "must" runs nothing on a kernel without Landlock, "may" runs without it, "never" does not use it.
    """
    limits = {"seconds": seconds, "memory_bytes": memory_mb << 20, "landlock": landlock}
    with (
        _directory() as folder,
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as report,
        ExitStack() as started,
    ):
        stdin_file.write(standard_input.encode())
        stdin_file.seek(0)
        ends = [started.enter_context(end) for end in (socket.socketpair() if tests else ())]
        descriptors = [end.fileno() for end in ends] or [-1]
        job = {**limits, "program": program, "as_main": as_main}
        processes = [started.enter_context(_started(job, folder, descriptors[0], (), stdin=stdin_file, stdout=output, stderr=errors))]
        if tests:
            job = {**limits, "tests": list(tests), "report": report.fileno()}
            nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            processes.append(started.enter_context(_started(job, folder, descriptors[1], (report.fileno(),), **nowhere)))
        for end in ends:
            end.close()  # so that each process notices when the other ends
        exceeded, last, deadline = "", processes[-1], time.monotonic() + seconds + _STARTUP
        # The processes end themselves after `seconds`, unless the program disabled that.
        while last.poll() is None and not exceeded and time.monotonic() < deadline:
            exceeded = next(filter(None, (_exceeded_limit(process.pid, folder) for process in processes)), "")
            with suppress(subprocess.TimeoutExpired):
                last.wait(_LOOK)
        started.close()
        timed_out = not exceeded and last.returncode in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
        passed = tuple(json.loads(line) for line in _head(report).splitlines())
        return SandboxResult(passed=passed, clean=last.returncode == 0, output=_head(output), errors=_head(errors), timed_out=timed_out,
                       exceeded=exceeded)  # fmt: skip


@contextmanager
def _started(
    job: Mapping[str, object], folder: str, link: int, kept_descriptors: tuple[int, ...], **streams: Any
) -> Iterator[subprocess.Popen]:
    """Start a process of jail.py and stop it at the end of the block.

    Args:
        link: Descriptor of the connection to the other process, or -1.
    """
    with os.fdopen(os.memfd_create("job"), "w+b") as job_file:
        job_file.write(json.dumps(job).encode())
        job_file.seek(0)
        # The command line has the descriptors, but not the contents of the job.
        command = [sys.executable, "-P", "-s", "-B", str(_JAIL), str(job_file.fileno()), str(link), str(os.getpid())]
        descriptors = (job_file.fileno(), *kept_descriptors, *([link] if link >= 0 else []))
        process = subprocess.Popen(command, cwd=folder, env=_environment(folder), pass_fds=descriptors, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _exceeded_limit(pid: int, folder: str) -> str:
    """Return the limit that a process has exceeded; "" if none."""
    try:
        counted = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # the process has just ended; `why_unsafe` has verified that the file is readable
    if int(counted["wchar"]) > _BYTES:
        return f"{_BYTES >> 20} MiB written"
    if threads > _THREADS:
        return f"{_THREADS} threads"
    return _directory_limit(folder)


def _directory_limit(folder: str) -> str:
    """Return the limit on the directory that is exceeded, "" if none.

    There are two: the number of files, and a nesting depth at which they cannot be counted.
    """
    too_deep = False

    def unlisted(error: OSError) -> None:
        nonlocal too_deep
        too_deep |= error.errno == errno.ENAMETOOLONG

    entries = (entry for _, directories, files in os.walk(folder, onerror=unlisted) for entry in (*directories, *files))
    is_full = next(islice(entries, _ENTRIES, None), None) is not None
    return f"{_ENTRIES} files" if is_full else "directories nested deeper than the maximum path length" if too_deep else ""


def why_unsafe(*, landlock: str = "must") -> str | None:
    """Return the reason why programs cannot be sandboxed on this machine, found by trying; None if they can.

    Args:
        landlock: See `run_program`.
    """
    if not Path("/proc/self/io").is_file():
        return "this kernel does not count the bytes that a process writes (/proc/self/io)"
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
    """Create a directory for one program, and remove it with its contents. If this process is killed, the next one removes it."""
    _sweep()
    new = tempfile.mkdtemp(prefix=".megatron_grpo_")
    handle = os.open(new, os.O_RDONLY)
    root = os.path.join(os.path.dirname(new), f"{_PREFIX}{os.getpid()}{os.path.basename(new)}")
    try:
        with suppress(OSError):  # the file system has no locks, so `_sweep` skips the directory
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
    """Remove directories of this user's killed processes: the process does not exist, and the directory is not locked."""
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
    """Remove a directory tree level by level.

    A program can nest directories deeper than a path is long; shutil.rmtree then runs out of stack and descriptors. Subdirectories are
    moved up to `root` before they are read. Links are not followed. The program must have ended.
    """
    waiting: list[str] = []
    with suppress(OSError):
        waiting = [entry.path for entry in os.scandir(root)]
    for directory in waiting:  # grows in the loop
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
    """Return the environment of the sandbox, without keys and tokens. Some Python installations cannot start without LD_LIBRARY_PATH."""
    inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads, **inherited}


def _head(file) -> str:
    file.seek(0)
    return file.read(_SHOWN).decode(errors="replace")
