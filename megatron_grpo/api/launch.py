"""Start the ranks of a run as processes, wait for them, print their output, and end them all.

One `Popen` per rank. `fork` hangs or fails in a program that has used torch, and `spawn` runs the user's script again in each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_grpo.api.rank import LAUNCH, METRICS, OBJECTS
from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import EXIT_INTERRUPTED, ConfigError, RunError, one_line
from megatron_grpo.run import jobs, python_objects

RANK_MODULE = "megatron_grpo.api.rank"  # the program of each rank
STARTED = ".started"  # in output_dir: one folder for each program that is running ranks
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_END = 30.0  # that the other ranks have once one has failed
_LINES_OF_A_FAILURE = 20  # of a rank whose output is not printed
_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE")  # set by Jupyter: a live line would be redrawn into the pipe
Listen = Callable[[int, Mapping[str, Any]], bool]


@contextlib.contextmanager
def launch_folder(output_dir: Path) -> Iterator[Path]:
    """Create the folder through which the program and its ranks exchange files, and remove it at the end.

    Folders of programs that have been killed are removed too.

    Args:
        output_dir: Output directory of the run.
    """
    started = output_dir / STARTED
    host = socket.gethostname()
    for old in started.glob(f"{host}.*"):
        if not psutil.pid_exists(int(old.name.rpartition(".")[2])):
            shutil.rmtree(old, ignore_errors=True)
    folder = started / f"{host}.{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    made = [path for path in (started, *started.parents) if not path.exists()]
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another program is running ranks, or output_dir holds a run
            for path in dict.fromkeys([started, *made]):
                path.rmdir()


def write_launch(folder: Path, command: str, words: Sequence[str], objects: Mapping[str, Any], *, listens: bool) -> None:
    """Write the files that the ranks read.

    Args:
        folder: The launch folder.
        command: Command of `megatron-grpo`.
        words: Its arguments.
        objects: Objects of the program, by name.
        listens: Whether rank 0 writes metrics for callbacks.

    Raises:
        ConfigError: If an object cannot be pickled, or cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ConfigError("Starting ranks from a Python program needs cloudpickle: pip install 'megatron-grpo[api]'.") from error
    launch = {
        "command": command, "words": list(words), "path": sys.path, "argv": sys.argv, "listens": listens,
        "fingerprints": {name: python_objects.fingerprint(name) for name in objects},
    }  # fmt: skip
    (folder / LAUNCH).write_bytes(pickle.dumps(launch))
    with (folder / OBJECTS).open("wb") as stream:
        pickler = cloudpickle.Pickler(stream)  # one for all: what two objects share, they share in the ranks
        for name, value in objects.items():
            try:
                pickler.dump(value)
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise ConfigError(f"{name} cannot be sent to the ranks ({reason}). Create what it holds inside the function.") from error


class RankProcesses:
    """The processes of one job on this machine, from their start to the end of the last one.

    Args:
        folder: The launch folder.
        number: Number of ranks.
        listen: Called with metrics as rank 0 writes them; true asks the run to stop.
        echo: Whether to print what the ranks print.
    """

    def __init__(self, folder: Path, number: int, *, listen: Listen | None, echo: bool):
        self.folder, self.number, self.listen, self.echo = folder, number, listen, echo
        # Ranks write to a terminal themselves. Elsewhere, in a notebook above all, this thread prints their lines, from a file each.
        self._inherits = echo and sys.__stdout__ is not None and sys.stdout is sys.__stdout__ and sys.__stdout__.isatty()
        self._processes: list[subprocess.Popen] = []
        self._is_stopping = False
        self._num_read: Counter[str] = Counter()  # bytes of each file that the ranks write
        self._first_failed: int | None = None
        self._failed_at = float("inf")

    def run(self) -> int:
        """Start the ranks and wait in this thread, whose end would end them.

        Returns:
            0, or 3 if the run was asked to stop and is saved.

        Raises:
            KeyboardInterrupt: After Ctrl-C, once the ranks have saved.
            RunError: If a rank ended without a reason. Otherwise the exception that ended the first rank.
        """
        interrupted = False
        try:
            port = _free_port()
            for rank in range(self.number):
                self._processes.append(self._start(rank, port))
            while None in [process.poll() for process in self._processes]:  # each is polled: `_poll` reads their exit codes
                try:
                    self._poll()
                except KeyboardInterrupt:  # once: the ranks save and exit; twice: they are killed
                    if interrupted:
                        raise
                    interrupted = True
                    self._signal(signal.SIGINT)
        finally:
            self._signal(signal.SIGKILL)
            for process in self._processes:
                process.wait()
            self._print(has_ended=True)
        self._call_back()
        codes = [process.returncode for process in self._processes]
        if interrupted:
            raise KeyboardInterrupt(f"the run was interrupted; exit codes of its ranks: {', '.join(map(str, codes))}")
        return self._outcome(codes)

    def _outcome(self, codes: Sequence[int]) -> int:
        if EXIT_INTERRUPTED in codes and {*codes} <= {0, EXIT_INTERRUPTED}:
            return EXIT_INTERRUPTED
        errors = sorted(self.folder.glob("error.*.pkl"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise pickle.loads(errors[0].read_bytes())
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            rank = failed[0] if self._first_failed is None else self._first_failed  # the others may have been killed here
            ending = f"rank {rank} ended with exit code {codes[rank]} without a reason."
            if self.echo:
                raise RunError(f"{ending} See its output.")
            lines = (self.folder / f"output.{rank}").read_text(errors="replace").splitlines()[-_LINES_OF_A_FAILURE:]
            raise RunError("\n".join([f"{ending} Its last lines:", *lines]))
        return 0

    def _start(self, rank: int, port: int) -> subprocess.Popen:
        attempt = self.folder / "attempt_0" / str(rank)
        attempt.mkdir(parents=True)
        env = dict(os.environ)
        launcher.forget(env)
        env |= launcher.make_environment(rank, world_size=self.number, port=port, error_file=attempt / "error.json")
        env["PYTHONUNBUFFERED"] = "1"
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it
        package = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in () if self._inherits else _COLOURS:
            env.pop(name, None)
        command = [sys.executable, "-m", RANK_MODULE, str(self.folder)]
        if self._inherits:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        # A session of their own keeps a Ctrl-C of the terminal from reaching these ranks; `run` forwards it.
        with (self.folder / f"output.{rank}").open("ab") as output:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _poll(self) -> None:
        """Wait a moment, print and call back, and end the other ranks some time after one has failed."""
        time.sleep(SECONDS_BETWEEN_LOOKS)
        self._print()
        self._call_back()
        failed = [rank for rank, process in enumerate(self._processes) if process.returncode]
        if failed:
            if self._first_failed is None:
                self._first_failed, self._failed_at = failed[0], time.monotonic()
            if time.monotonic() - self._failed_at > SECONDS_TO_END:
                self._signal(signal.SIGKILL)

    def _print(self, *, has_ended: bool = False) -> None:
        """Print the new lines in this thread: a notebook shows the output of another thread below a later cell."""
        for rank in range(self.number):
            text = b"".join(self._new_lines(f"output.{rank}", has_ended=has_ended)).decode(errors="replace")
            if text and self.echo:  # in one piece: a notebook keeps each as an output
                print(text, end="", flush=True)

    def _call_back(self) -> None:
        """Call back with the metrics that rank 0 has written since the last call."""
        for line in self._new_lines(METRICS) if self.listen else ():
            record = json.loads(line)
            if self.listen and self.listen(record["step"], record["numbers"]) and not self._is_stopping:
                self._is_stopping = True
                self._signal(jobs.STOP_BY_CALLBACK)

    def _new_lines(self, name: str, *, has_ended: bool = False) -> Iterator[bytes]:
        """Yield the lines that a rank has added to a file; the last one may be incomplete if the rank has ended."""
        with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as stream:
            stream.seek(self._num_read[name])
            for line in stream:
                if not line.endswith(b"\n") and not has_ended:  # it is still being written: a second read could return its rest
                    return
                self._num_read[name] += len(line)
                yield line

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
