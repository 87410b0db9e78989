"""Owns a child process that answers one JSON line with another, and that can be killed when it does not.

A fresh interpreter, not a fork: a rank has threads, a GPU context and gigabytes that a child must not inherit. The child ends with its
parent, even with one killed by SIGKILL, and even while stuck in C code: the kernel sees to that (a parent-death signal and an alarm).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_grpo.base.cleanup import die_with_parent
from megatron_grpo.base.errors import SECRET

_STARTUP = 120.0  # seconds for importing everything, on a machine that is busy


class ChildDied(Exception):
    """The child ended, or had to be killed, before it answered; the message says which. The next request gets a new child."""


class ChildBroken(Exception):
    """The child cannot even start; the message is its own."""


class Child:
    """A process of `python -m module`, started at the first request and after each death. `module` calls `serve` when run."""

    def __init__(self, module: str):
        self.module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def ask(self, request: Any, seconds: float) -> Any:
        """The child's answer to `request` (both JSON). Raises ChildDied where it takes longer than `seconds`; its start does not count."""
        process = self._ensure_started()
        line = json.dumps({"seconds": seconds, "request": request}).encode() + b"\n"
        try:
            _pipe(process.stdin).write(line)
            _pipe(process.stdin).flush()
        except BrokenPipeError:
            self.close()
            raise ChildDied("the checking process ended") from None
        return self._read(process, seconds)

    def close(self) -> None:
        """Kills the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._unread = None, b""

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self._process = process = subprocess.Popen(
            # -P: no current directory on the path, where a user's file.py may be called like a standard module.
            [sys.executable, "-P", "-m", self.module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**_without_secrets(os.environ), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            ready = self._read(process, _STARTUP)
        except ChildDied as error:
            raise ChildBroken(f"python -m {self.module} did not start: {error}") from error
        if ready != "ready":
            self.close()
            raise ChildBroken(f"python -m {self.module} did not start: {ready}")
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        descriptor = _pipe(process.stdout).fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self.close()
                raise ChildDied(f"no answer within {seconds:g} s")
            received = os.read(descriptor, 1 << 16)
            if not received:
                self.close()
                raise ChildDied("the checking process ended")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The child reads what a model writes; it has no use for keys."""
    return {name: value for name, value in environ.items() if not SECRET.search(name)}


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the child was started with pipes"
    return stream


def serve(prepare: Callable[[], Callable[[Any], Any]], *, memory_bytes: int) -> None:
    """The child's side: answers requests until its input closes. `prepare` does the imports and returns what answers one request."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        answer = prepare()
    except Exception as error:  # noqa: BLE001 - the parent says it
        reply(f"{type(error).__name__}: {error}")
        return
    reply("ready")
    for line in sys.stdin.buffer:
        message = json.loads(line)
        # The default action of SIGALRM kills, also inside C code that never returns: nothing outlives a parent that could not kill it.
        signal.setitimer(signal.ITIMER_REAL, message["seconds"] + 5)
        result = answer(message["request"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(result)
