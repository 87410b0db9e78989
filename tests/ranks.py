"""`run_ranks`: run a function on N real gloo ranks, and return the result of each.

The ranks are forked from one zygote (tests/zygote.py) per test process. It starts at the first call in about 8 s; after that a run costs
about 0.2 s plus the function.
"""

from __future__ import annotations

import atexit
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from tests.zygote import receive, send

START_TIMEOUT = 180.0  # seconds; the first import after an install reads gigabytes from disk
# Set before torch is imported. One thread a rank: more would only fight over the cores. No compile: it needs g++ and seconds.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator; a process with a second thread cannot be forked
}


class RanksFailed(AssertionError):
    """A rank raised, exited or did not finish. `errors` maps rank to traceback, for ranks that have one."""

    def __init__(self, message: str, errors: Mapping[int, str]):
        super().__init__(message)
        self.errors = dict(errors)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` processes with a gloo default group; return the results by rank.

    `fn` may be a closure or a lambda: functions of test modules are pickled by value, so their asserts are explained. `timeout` is in
    seconds and covers the whole run; `env` adds environment variables to the ranks (too late for those that torch reads at import). Raises
    RanksFailed with all tracebacks and the end of each rank's output; for a rank that hung, with the line at which it hung.
    """
    outcomes, reason = _zygote().run(fn, world_size, args, timeout, env or {})
    if reason is None:
        return [pickle.loads(value) for _, value, _ in outcomes]
    errors = {rank: what for rank, (kind, what, _) in enumerate(outcomes) if kind == "error"}
    lines = [f"{reason} (of {world_size})"]
    for rank, (kind, what, log) in enumerate(outcomes):
        state = {"value": "finished", "error": what, "killed": "was still running and was killed"}[kind]
        lines.append(f"--- rank {rank}: {state}".rstrip())
        if log.strip():
            lines.append(f"--- rank {rank} printed:\n{log.strip()}")
    raise RanksFailed("\n".join(lines), errors)


class _Zygote:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        env = {**os.environ, **ENVIRONMENT}
        script = str(Path(__file__).with_name("zygote.py"))
        with tempfile.TemporaryFile() as log:  # pages of warnings about optional parts; shown only if the start fails
            self.process = subprocess.Popen([sys.executable, script, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # fmt: skip
            theirs.close()
            self.socket.settimeout(START_TIMEOUT)
            try:
                hello = receive(self.socket)
            except (OSError, EOFError) as error:
                self.close()
                log.seek(0)
                raise RuntimeError(
                    f"the process to fork ranks from did not start: {log.read()[-4000:].decode(errors='replace')}"
                ) from error
        if "error" in hello:
            raise RuntimeError(hello["error"])
        self.missing: dict[str, str] = hello["missing"]

    def run(self, fn: Callable, world_size: int, args: tuple, timeout: float, env: Mapping[str, str]) -> tuple[list, str | None]:
        request = {"call": _by_value(fn, args), "world_size": world_size, "timeout": timeout, "path": [p or os.getcwd() for p in sys.path],
                   "cwd": os.getcwd(), "env": dict(env)}  # fmt: skip
        self.socket.settimeout(timeout + 30)
        try:
            send(self.socket, request)
            reply = receive(self.socket)
        except (OSError, EOFError):
            self.close()
            raise
        return reply["outcomes"], reply["reason"]

    def close(self) -> None:
        self.socket.close()  # it sees the end of the stream, kills its ranks and leaves
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


_the_zygote: _Zygote | None = None


def _zygote() -> _Zygote:
    global _the_zygote
    if _the_zygote is None or _the_zygote.process.poll() is not None:
        _the_zygote = _Zygote()
        atexit.register(_the_zygote.close)
    return _the_zygote


def _by_value(fn: Callable, args: tuple) -> bytes:
    """Pickle the call. Functions of a test module are pickled as code, with asserts rewritten by pytest, so ranks do not import it."""
    module = inspect.getmodule(inspect.unwrap(fn))
    is_test = module is not None and Path(getattr(module, "__file__", "") or "").name.startswith(("test_", "conftest"))
    if not is_test:
        return cloudpickle.dumps((fn, args))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
