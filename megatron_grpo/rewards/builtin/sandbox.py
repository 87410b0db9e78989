"""Owns running one untrusted Python program from outside: its process, its working directory, its wall clock, and what it printed.

The inside, with all that is taken away from the program, is jail.py.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_JAIL = Path(__file__).with_name("jail.py")
_SHOWN = 16 << 20  # bytes of output that are looked at
_STARTUP = 5.0  # seconds for the interpreter itself, on a machine that is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """passed: a verdict for each test that came to its end. clean: the program ended by itself, without an error."""

    passed: tuple[bool, ...]
    clean: bool
    output: str
    errors: str
    timed_out: bool


def run_program(
    program: str,
    *,
    tests: Sequence[str] = (),
    standard_input: str = "",
    as_main: bool = False,
    seconds: float,
    memory_mb: int,
    landlock: bool = True,
) -> Outcome:
    """Runs `program`, then each of `tests` in its namespace, in a process that can reach nothing else.

    as_main: `__name__` is "__main__", for programs that read and print. landlock False leaves it out, as on a kernel without it.
    """
    word = secrets.token_hex(8)
    job = {"program": program, "tests": list(tests), "as_main": as_main, "seconds": seconds, "memory_bytes": memory_mb << 20,
           "word": word, "landlock": landlock}  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="megatron_grpo_code_", ignore_cleanup_errors=True) as folder,
        os.fdopen(os.memfd_create("job"), "w+b") as job_file,
        os.fdopen(os.memfd_create("verdicts"), "w+b") as verdicts,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        job_file.write(json.dumps(job).encode())
        given.write(standard_input.encode())
        job_file.seek(0)
        given.seek(0)
        process = subprocess.Popen(
            # The descriptors stand on the command line; the program's secrets (its own tests among them) do not.
            [sys.executable, "-P", "-s", "-B", str(_JAIL), str(job_file.fileno()), str(verdicts.fileno()), str(os.getpid())],
            stdin=given,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=_environment(folder),
            pass_fds=(job_file.fileno(), verdicts.fileno()),
            start_new_session=True,
        )
        try:
            process.wait(seconds + _STARTUP)  # it ends itself after `seconds`, unless the program turned that off
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        timed_out = process.returncode in (-signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
        lines = (line.split() for line in _head(verdicts).splitlines())
        passed = tuple(line[1] == "1" for line in lines if len(line) == 2 and line[0] == word)
        return Outcome(passed=passed, clean=process.returncode == 0, output=_head(output), errors=_head(errors), timed_out=timed_out)


def why_unsafe() -> str | None:
    """Why programs cannot be held on this machine, found by trying; None where they can."""
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
assert refused(lambda: open({str(Path(tempfile.gettempdir()) / "megatron_grpo_outside")!r}, "w")), "files can be written"
print("held")
"""
    outcome = run_program(attempt + "\n", as_main=True, seconds=10, memory_mb=512)
    if outcome.output.strip() == "held":
        return None
    reason = outcome.errors.strip().splitlines()
    return reason[-1] if reason else "the sandbox did not start"


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours: no keys, no tokens. The library path is what some Python installations cannot start without."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads, **kept}


def _head(file) -> str:
    file.seek(0)
    return file.read(_SHOWN).decode(errors="replace")
