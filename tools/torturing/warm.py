"""Forked runs: torchrun and its ranks are forks of this process, which has imported their modules.

Imports and plots take nine tenths of the CPU seconds of a run of ten steps. A fork of a process that has imported torch, Megatron-Core and
torch.distributed.run behaves like a launcher started by a shell: it has processes with their own parents, sessions, signals and files, and
torchrun's own code starts, watches and ends them. Three things differ: no fault can happen during imports, all processes share one hash
seed, and no plots are drawn. Some runs are therefore started by a shell (`Target.begin` with cold=True), among them the undisturbed run.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MODULES = (
    "numpy.random", "torch.distributed.run", "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "tokenizers",
    "megatron.core.dist_checkpointing", "megatron.core.optimizer", "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_grpo.cli", "megatron_grpo.run.validate", "megatron_grpo.run.lifecycle", "tests.scripted_engine",
    "megatron_grpo.run.failures", "megatron_grpo.run.metrics.metrics_logger",
    "rich.console", "rich.table",
)  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


def warm_up() -> None:
    """Import the modules of a run.

    Raises:
        RuntimeError: An import started a thread. A fork would lack the thread and inherit its locks.
    """
    os.environ.update(ENVIRONMENT)  # before torch is imported
    for name in MODULES:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"{len(threads)} threads after the imports; forks of this process would not be safe. Use --cold")
    gc.collect()
    gc.freeze()


class Forked:
    """Child process that calls a function, with the interface of subprocess.Popen. It leads a session.

    Args:
        function: Function to call.
        env: Complete environment of the child.
        output: File of its standard output and error; None: those of this process.
    """

    def __init__(self, function: Callable[[], object], *, env: Mapping[str, str], output: Path | None = None):
        """env: all of the child's environment. output: takes its stdout and stderr; else they are ours. The child leads a session."""
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os._exit(_run_child(function, env, output))

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.returncode is None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a fork", timeout)
            finally:
                os.close(ended)
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start_torchrun(arguments: Sequence[str], *, env: Mapping[str, str], output: Path) -> Forked:
    """Start `torchrun ARGUMENTS` in a fork; its workers are forks of that fork.

    Args:
        arguments: Arguments of torchrun; the workers must run a Python file.
        env: Complete environment.
        output: File of the standard output and error.
    """
    return Forked(lambda: _launch(arguments), env=env, output=output)


def _run_child(function: Callable[[], object], env: Mapping[str, str], output: Path | None) -> int:
    """Set up a child process, call the function and return the exit code."""
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        if output is not None:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for number in (1, 2):
                os.dup2(descriptor, number)
            os.close(descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _seed_generators()
        function()
        code: object = 0
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
    return code if isinstance(code, int) else 0 if code is None else 1


def _seed_generators() -> None:
    """Seed the random generators as a new interpreter does; torch's default seed is the same in every process."""
    import numpy

    random.seed(os.urandom(16))
    numpy.random.seed(int.from_bytes(os.urandom(4), "little"))


def _launch(arguments: Sequence[str]) -> None:
    """Run torchrun with workers that are forks."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, args, env: Forked(lambda: _run_rank(args), env=env)
    sys.argv = ["torchrun", *arguments]
    run.main(list(arguments))


def _run_rank(command: Sequence[str]) -> None:
    """Run a worker's Python file.

    Args:
        command: [python, -u, script, words ...], as torchrun passes it.
    """
    words = [word for word in command[1:] if word != "-u"]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
