"""Target of a fault: one output_dir with its runs, and the checks of their results."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.end_to_end.runs import read_jsonl, write_inputs
from tools.torturing import warm
from tools.torturing.warm import ENVIRONMENT, Forked

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
# Rollouts of 24 completions, steps of 16 and two passes: the sample buffer always holds untrained rows and cached old log-probs.
FLAGS = ["--allow_unaligned_generation", "true", "--generation_batch_size", "24", "--num_iterations", "2", "--micro_batch_size", "2",
         "--verify_weight_sync", "false", "--max_steps", str(STEPS), "--lr_decay_style", "linear", "--beta", "0.02", "--save_steps", "3",
         "--eval_steps", "4", "--log_completions_steps", "2"]  # fmt: skip
RECORDS = ("metrics.jsonl", "evaluations.jsonl")
VARYING = re.compile(r"^(time|memory)/|^(timestamp|tokens_per_second|num_gpus)")  # metrics that vary between equal runs


Running = subprocess.Popen[Any] | Forked


class BrokenPromiseError(Exception):
    """The run did not do what the fault's promise states."""


class UnsupportedFaultError(Exception):
    """The fault cannot be injected on this machine."""


@dataclass(frozen=True)
class Fault:
    """Fault with the outcome that is expected.

    Args:
        name: Name, as "family/fault".
        promise: Expected outcome.
        inject: Function that injects the fault into a target and checks the outcome.
    """

    name: str
    promise: str
    inject: Callable[[Target], None]


@dataclass
class EndedRun:
    """Exit code and output of a run that has ended."""

    code: int
    output: str

    def require(self, code: int | None, *patterns: str) -> EndedRun:
        """Check the exit code and the output.

        Args:
            code: Expected exit code; None: any except 0.
            patterns: Regular expressions that the output must match.

        Raises:
            BrokenPromiseError: The exit code or the output differs.
        """
        if (self.code == 0) if code is None else (self.code != code):
            raise BrokenPromiseError(f"exit code {self.code}, expected {'any except 0' if code is None else code}: {self.last_output}")
        for pattern in patterns:
            if not re.search(pattern, self.output):
                raise BrokenPromiseError(f"the output does not match {pattern!r}: {self.last_output}")
        return self

    @property
    def last_output(self) -> str:
        """Last 1,500 characters of the program's output, without torchrun's report."""
        return self.output.partition("elastic/multiprocessing")[0][-1500:]


@dataclass
class SharedSetup:
    """State that all runs of one call share.

    Args:
        seed: Seed of random choices.
        warm: Whether runs are forks of this process.
        patience: Seconds after which a run counts as hanging.
        reference: Folder of the undisturbed run.
        half_done: Function that makes, once, a run stopped after step 7 with checkpoints of steps 6 and 7, and returns its folder.
        others: Folders of further undisturbed runs, by name.
    """

    seed: int
    warm: bool
    patience: float = 900.0
    reference: Path | None = None
    half_done: Callable[[], Path] | None = None
    others: dict[str, Path] = field(default_factory=dict)

    def get_reference(self, name: str, run: Callable[[Target], None]) -> Path:
        """Return the folder of a further undisturbed run, which the first call makes.

        Args:
            name: Name of the run.
            run: Function that executes it.
        """
        if name not in self.others:
            assert self.reference is not None
            target = Target(self.reference.with_name(name), self)
            run(target)
            self.others[name] = target.folder
        return self.others[name]


class Target:
    """One output_dir and its runs.

    Args:
        folder: Folder of inputs, logs and output_dir.
        setup: Shared state of all runs.
    """

    def __init__(self, folder: Path, setup: SharedSetup):
        self.folder, self.out, self.log = folder, folder / "out", folder / "log"
        self.setup, self.rng = setup, random.Random(setup.seed)
        self.log.mkdir(parents=True)
        self.inputs = write_inputs(folder, rows=10)
        self._eval = ["--eval_dataset", str(folder / "data.jsonl"), "--eval_num_prompts", "4"]
        self.attempt = 0
        self.failed_at: float | None = None

    # ---- runs

    def begin(self, *flags: str, inject: dict | None = None, env: dict[str, str] | None = None, before: str = "",
              cold: bool = False) -> Running:  # fmt: skip
        """Start the run without waiting for it.

        Args:
            flags: Flags added to the command.
            inject: Fault, as `rank.py` reads it.
            env: Environment variables; the run is then started by a shell.
            before: Shell command executed before the launcher ("ulimit -n 40"); the run is then started by a shell.
            cold: Whether a shell starts the run even if runs are forks.
        """
        self.attempt += 1
        words = ["--standalone", "--nproc_per_node", "2", str(ROOT / "tools/torturing/rank.py"), "train"]
        words += [*self.inputs, *self._eval, *FLAGS, "--output_dir", str(self.out), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORTURE_LOG": str(self.log), "TORTURE_ATTEMPT": str(self.attempt),
                       **ENVIRONMENT, **(env or {})}  # fmt: skip
        if inject:
            environment["TORTURE"] = json.dumps({"call": 1, "rank": 0, **inject})
        self.output_file = self.folder / f"output_{self.attempt}"
        if self.setup.warm and not (cold or env or before):
            return warm.start_torchrun(words, env=environment | {"TORTURE_PLAIN": "1"}, output=self.output_file)
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        if before:
            command = ["bash", "-c", f'{before} && exec "$0" "$@"', *command]
        with self.output_file.open("w") as stream:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, text=True,
                                    start_new_session=True)  # fmt: skip

    def end(self, process: Running) -> EndedRun:
        """Wait for the run and check that no process of it is left."""
        try:
            code = process.wait(self.setup.patience)
        except subprocess.TimeoutExpired:
            self.kill(process)
            raise BrokenPromiseError(
                f"the run has not ended after {self.setup.patience:.0f} s: {self.output_file.read_text()[-1500:]}"
            ) from None
        left = self.find_processes(process)
        if left:
            self.kill(process)
            raise BrokenPromiseError(f"processes are left: {left}")
        if code and self.failed_at is None:
            self.failed_at = time.time()
        return EndedRun(code, self.output_file.read_text(errors="replace"))

    def run(self, *flags: str, **how) -> EndedRun:
        """Start the run and wait for it."""
        return self.end(self.begin(*flags, **how))

    def kill(self, process: Running) -> None:
        """Send SIGKILL to the launcher and all processes of the run."""
        for pid in [process.pid, *self.find_processes(process)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()

    def find_processes(self, process: Running) -> list[int]:
        """Return the living processes of the run except its launcher. After the launcher's exit they have some seconds to end."""
        until = time.monotonic() + (self.setup.patience / 8 if process.poll() is not None else 0)
        while True:
            found = [pid for pid in self._find_all_processes() if pid not in (process.pid, os.getpid())]
            if not found or time.monotonic() >= until:
                return found
            time.sleep(0.1)

    def _find_all_processes(self) -> list[int]:
        """Return the processes that have a file of this folder open or in their command line; forks have their parent's command line."""
        found = []
        for entry in sorted((path for path in Path("/proc").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)):
            with suppress(OSError):  # the process has ended meanwhile
                files = (os.readlink(file) for file in (entry / "fd").iterdir())
                if str(self.folder).encode() + b"/" in (entry / "cmdline").read_bytes() or any(map(self._is_ours, files)):
                    found.append(int(entry.name))
        return found

    def _is_ours(self, file: str) -> bool:
        return file.startswith(f"{self.folder}/")

    def wait_for(self, process: Running, holds: Callable[[], object]) -> None:
        """Wait until `holds` returns true."""
        end = time.monotonic() + self.setup.patience
        while not holds():
            if process.poll() is not None or time.monotonic() > end:
                self.kill(process)
                raise BrokenPromiseError(f"the run ended or hung before the fault: {self.output_file.read_text()[-1500:]}")
            time.sleep(0.02)

    def copy_half_done(self) -> None:
        """Fill output_dir as a run stopped after step 7 leaves it, with checkpoints of steps 6 and 7."""
        assert self.setup.half_done is not None
        shutil.copytree(self.setup.half_done() / "out", self.out)

    # ---- checks

    def resume(self, *flags: str, says: Sequence[str] = (), **how) -> None:
        """Start the run again, and check that it ends normally with the results of the undisturbed run."""
        self.run(*flags, **how).require(0, *says)
        self.check_results()

    def check_results(self) -> None:
        """Check that records and exported weights equal those of the undisturbed run."""
        assert self.setup.reference is not None
        theirs = self.setup.reference / "out"
        for name in RECORDS:
            mine, right = read_numbers(self.out / name), read_numbers(theirs / name)
            if mine != right:
                raise BrokenPromiseError(f"{name} differs from the undisturbed run: {describe_difference(mine, right)}")
        if hash_weights(self.out) != hash_weights(theirs):
            raise BrokenPromiseError("the exported weights differ from those of the undisturbed run")

    def check_partial_results(self) -> None:
        """Check that the records of a killed run are a prefix of those of the undisturbed run; the last line may be incomplete."""
        assert self.setup.reference is not None
        for name in RECORDS:
            mine, right = read_numbers(self.out / name, cut=True), read_numbers(self.setup.reference / "out" / name)
            if mine != right[: len(mine)]:
                raise BrokenPromiseError(
                    f"{name} is not a prefix of the undisturbed run's: {describe_difference(mine, right[: len(mine)])}"
                )

    def list_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints."""
        return sorted(int(path.name.removeprefix("iter_")) for path in (self.out / "checkpoints").glob("iter_*"))

    def compute_fingerprint(self) -> dict[str, str]:
        """Return the SHA-256 of every file in output_dir."""
        files = sorted(path for path in self.out.rglob("*") if path.is_file())
        return {str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    # ---- costs

    def read_log(self) -> list[dict]:
        """Return the lines that all ranks have logged, by time."""
        found = [line for path in self.log.glob("rank_*.jsonl") for line in read_whole_lines(path)]
        return sorted(found, key=lambda line: line["time"])

    def compute_cost(self, struck: float | None) -> Cost:
        """Return the cost of a fault.

        Args:
            struck: Time of the fault; None: unknown.
        """
        lines = self.read_log()
        trained = [line for line in lines if line["what"] == "trained" and line["rank"] == 0]
        steps = [line["step"] for line in trained]
        cost = Cost(sampled_twice=self.count_resampled_prompts(lines), trained_twice=len(steps) - len(set(steps)))
        if struck is not None:
            before = [line for line in lines if line["time"] <= struck]
            last = max((line["step"] for line in before if line["what"] == "trained"), default=0)
            attempt = max((int(line["attempt"]) for line in before), default=1)
            goes_on = trained if self.attempt == attempt else [line for line in trained if int(line["attempt"]) > attempt]
            again = next((line for line in goes_on if line["time"] > struck and line["step"] > last), None)
            if again is not None:
                cost.seconds = again["time"] - struck
                cost.cpu_seconds = sum_cpu_seconds(lines, again)
        return cost

    def count_resampled_prompts(self, lines: Sequence[dict], attempts: Sequence[int] | None = None) -> int:
        """Return the number of prompts that had been sampled in an earlier launch.

        Args:
            lines: Lines of the log.
            attempts: Launches to count; None: all.
        """
        drawn: set[str] = set()
        twice = 0
        for attempt in range(1, self.attempt + 1):
            mine = [line for line in lines if line["what"] == "sample" and line["rank"] == 0 and line["attempt"] == str(attempt)]
            prompts = {prompt for line in mine for prompt in line["prompts"]}
            twice += len(prompts & drawn) if attempts is None or attempt in attempts else 0
            drawn |= prompts
        return twice

    def find_fault_time(self) -> float | None:
        """Return the time of the fault as logged by the rank, or the end of the first run that failed."""
        return next((line["time"] for line in self.read_log() if line["what"] == "fault"), self.failed_at)


@dataclass
class Cost:
    """Cost of a fault.

    Args:
        seconds: Seconds until the resumed run has trained the interrupted step, or a later one if the run ended after a stop.
        cpu_seconds: CPU seconds of both ranks from their start until then.
        sampled_twice: Prompts sampled in two launches.
        trained_twice: Optimizer steps trained in two launches.
    """

    seconds: float | None = None
    cpu_seconds: float | None = None
    sampled_twice: int = 0
    trained_twice: int = 0


def sum_cpu_seconds(lines: Sequence[dict], line: dict) -> float:
    """Return the CPU seconds that the ranks of a launch had used when one of them logged this line."""
    mine = [one for one in lines if one["attempt"] == line["attempt"] and one["time"] <= line["time"]]
    return sum(max(one["cpu"] for one in mine if one["rank"] == rank) for rank in {one["rank"] for one in mine})


def read_whole_lines(path: Path) -> list[dict]:
    """Return the complete lines of a .jsonl file; the writer of the last one may have been killed or still be writing."""
    text = path.read_text(errors="replace")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_numbers(path: Path, *, cut: bool = False) -> list[dict]:
    """Return the lines of a .jsonl file without values that vary between equal runs.

    Args:
        path: Path of the file.
        cut: Whether the last line may be incomplete.
    """
    lines = [] if not path.exists() else read_whole_lines(path) if cut else read_jsonl(path)
    return [{name: value for name, value in line.items() if not VARYING.match(name)} for line in lines]


def hash_weights(out: Path) -> str:
    """Return the SHA-256 of the exported weights; "none" without an export."""
    files = sorted((out / "hf").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def describe_difference(mine: list[dict], right: list[dict]) -> str:
    """Return a phrase with the first difference between two lists of lines."""
    if len(mine) != len(right):
        return f"{len(mine)} lines, not {len(right)}"
    line = next(i for i, (one, other) in enumerate(zip(mine, right, strict=True)) if one != other)
    names = [name for name in {**mine[line], **right[line]} if mine[line].get(name) != right[line].get(name)]
    return f"line {line + 1}: " + ", ".join(f"{name} {mine[line].get(name)}, not {right[line].get(name)}" for name in names[:4])
