"""One run that is hurt, in an output_dir of its own, and what it has promised."""

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
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.runs import records, write_inputs

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 240.0  # seconds of a run; one that takes longer hangs
STEPS = 10
# Rollouts of 24 rows against steps of 16, and two passes: there are always rows that wait, and old log-probs that are kept.
FLAGS = ["--allow_unaligned_generation", "true", "--generation_batch_size", "24", "--num_iterations", "2", "--micro_batch_size", "2",
         "--verify_weight_push", "false", "--max_steps", str(STEPS), "--lr_decay_style", "linear", "--beta", "0.02", "--save_steps", "3",
         "--eval_steps", "4", "--log_completions_steps", "2"]  # fmt: skip
UNLIKE = re.compile(r"^(time|memory)/|^(timestamp|tokens_per_second|num_gpus)")  # what two equal runs need not share


class Broken(Exception):
    """A promise was not kept."""


class NotHere(Exception):
    """This machine cannot be hurt in this way."""


@dataclass(frozen=True)
class Fault:
    name: str
    promise: str
    hurt: Callable[[Victim], None]


@dataclass
class Ended:
    code: int
    said: str

    def must(self, code: int | None, *patterns: str) -> Ended:
        """code None: any but 0."""
        if (self.code == 0) if code is None else (self.code != code):
            raise Broken(f"exit code {self.code}, not {'one that is not 0' if code is None else code}: {self.ours}")
        for pattern in patterns:
            if not re.search(pattern, self.said):
                raise Broken(f"nothing is said like {pattern!r}: {self.ours}")
        return self

    @property
    def ours(self) -> str:
        """The end of what the program said, without torchrun's report."""
        return self.said.partition("elastic/multiprocessing")[0][-1500:]


class Victim:
    """One output_dir, and the runs in it."""

    def __init__(self, folder: Path, reference: Path | None, template: Path | None, seed: int):
        self.folder, self.out, self.log = folder, folder / "out", folder / "log"
        self.reference, self.template, self.rng = reference, template, random.Random(seed)
        self.log.mkdir(parents=True)
        self.inputs = write_inputs(folder, rows=10)
        self._eval = ["--eval_dataset", str(folder / "data.jsonl"), "--eval_num_prompts", "4"]
        self.attempt = 0
        self.failed_at: float | None = None

    # -- runs

    def begin(self, *flags: str, inject: dict | None = None, env: dict[str, str] | None = None, before: str = "",
              inputs: Sequence[str] | None = None) -> subprocess.Popen[str]:  # fmt: skip
        """before: shell that the launcher inherits ("ulimit -n 40")."""
        self.attempt += 1
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(ROOT / "tools/torturing/rank.py"),
        ]
        command = [*launch, "train", *(inputs or self.inputs), *self._eval, *FLAGS, "--output_dir", str(self.out), *flags]
        if before:
            command = ["bash", "-c", f'{before} && exec "$0" "$@"', *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORTURE_LOG": str(self.log), "TORTURE_ATTEMPT": str(self.attempt),
                       "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", **(env or {})}  # fmt: skip
        if inject:
            environment["TORTURE"] = json.dumps({"call": 1, "rank": 0, **inject})
        self.said = self.folder / f"said_{self.attempt}"
        with self.said.open("w") as said:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, text=True,
                                    start_new_session=True)  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> Ended:
        try:
            code = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self.kill(process)
            raise Broken(f"still runs after {LONGEST:.0f} s: {self.said.read_text()[-1500:]}") from None
        left = self._left(process)
        if left:
            self.kill(process)
            raise Broken(f"processes are left: {left}")
        if code and self.failed_at is None:
            self.failed_at = time.time()
        return Ended(code, self.said.read_text(errors="replace"))

    def run(self, *flags: str, **how) -> Ended:
        return self.end(self.begin(*flags, **how))

    def kill(self, process: subprocess.Popen[str]) -> None:
        """The launcher and all that it started; the kernel does not ask."""
        for pid in [process.pid, *map(int, self._left(process))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()

    def _left(self, process: subprocess.Popen[str], seconds: float = 20.0) -> list[str]:
        """Processes of the run that are alive; after its launcher ended they have some seconds."""
        until = time.monotonic() + (seconds if process.poll() is not None else 0)
        while True:
            rows = subprocess.run(["ps", "-eo", "stat=,pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
            found = [row.split()[1] for row in rows if str(self.folder) in row and not row.startswith("Z")]
            found = [pid for pid in found if int(pid) not in (process.pid, os.getpid())]
            if not found or time.monotonic() >= until:
                return found
            time.sleep(0.1)

    def until(self, process: subprocess.Popen[str], holds: Callable[[], object]) -> None:
        """Waits for a moment of a run."""
        end = time.monotonic() + LONGEST
        while not holds():
            if process.poll() is not None or time.monotonic() > end:
                self.kill(process)
                raise Broken(f"the run ended, or hung, before the moment of the fault: {self.said.read_text()[-1500:]}")
            time.sleep(0.02)

    def half_done(self) -> None:
        """As a run leaves it that was stopped after step 7, with checkpoints of steps 6 and 7."""
        assert self.template is not None
        shutil.copytree(self.template / "out", self.out)

    # -- promises

    def continues(self, *flags: str, says: Sequence[str] = (), **how) -> None:
        """The same command again ends well, and the run is the one that nobody disturbed."""
        self.run(*flags, **how).must(0, *says)
        self.is_whole()

    def is_whole(self) -> None:
        assert self.reference is not None
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            mine, right = (numbers(out / name) for out in (self.out, self.reference / "out"))
            if mine != right:
                raise Broken(f"{name} is not that of the undisturbed run: {difference(mine, right)}")
        if weights(self.out) != weights(self.reference / "out"):
            raise Broken("the exported weights are not those of the undisturbed run")

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("iter_")) for path in (self.out / "checkpoints").glob("iter_*"))

    # -- what it cost

    def lines(self) -> list[dict]:
        found = [line for path in self.log.glob("rank_*.jsonl") for line in records(path)]
        return sorted(found, key=lambda line: line["time"])

    def cost(self, struck: float | None) -> tuple[float | None, int, int]:
        """(seconds until the step in progress was trained again, prompts sampled twice, steps trained twice)."""
        lines = [line for line in self.lines() if line["rank"] == 0]
        sampled = [number for line in lines if line["what"] == "sample" for number in line["prompts"]]
        trained = [line for line in lines if line["what"] == "trained"]
        steps = [line["step"] for line in trained]
        seconds = None
        if struck is not None:
            last = max((line["step"] for line in trained if line["time"] <= struck), default=0)
            seconds = next((line["time"] - struck for line in trained if line["time"] > struck and line["step"] > last), None)
        return seconds, len(sampled) - len(set(sampled)), len(steps) - len(set(steps))

    def struck(self) -> float | None:
        """When: as the rank says that was hurt, else when the first run ended that failed."""
        return next((line["time"] for line in self.lines() if line["what"] == "hurt"), self.failed_at)


def numbers(path: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if not UNLIKE.match(name)} for line in records(path)] if path.exists() else []


def weights(out: Path) -> str:
    files = sorted((out / "hf").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else "none"


def difference(mine: list[dict], right: list[dict]) -> str:
    if len(mine) != len(right):
        return f"{len(mine)} lines, not {len(right)}"
    line = next(i for i, (one, other) in enumerate(zip(mine, right, strict=True)) if one != other)
    names = [name for name in {**mine[line], **right[line]} if mine[line].get(name) != right[line].get(name)]
    return f"line {line + 1}: " + ", ".join(f"{name} {mine[line].get(name)}, not {right[line].get(name)}" for name in names[:4])
