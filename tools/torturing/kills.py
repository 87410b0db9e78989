"""Random kills, in chains: a run is killed, resumed, killed again, and so on, and what it then is must be the undisturbed run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.torturing.target import BrokenPromiseError, Running, Target, SharedSetup, sum_cpu_seconds

MAX_KILLS = 8  # kills of a chain
COLD_SHARE = 0.1  # of the runs start cold, so that kills fall into imports too


@dataclass
class Kill:
    """One kill of a chain.

    whom: "launcher", or "process 1 of 4" of the others, by age. after: seconds since the launch. seconds, cpu_seconds: as of `Cost`; None
    if a later kill came before that. again: prompts that the next launch sampled, and an earlier one had.
    """

    chain: int
    number: int
    whom: str
    after: float
    step: int
    cold: bool
    seconds: float | None = None
    cpu_seconds: float | None = None
    sampled_twice: int = 0


@dataclass
class Chain:
    number: int
    seed: int
    launches: int = 0
    verdict: str = "kept"
    why: str = ""
    kills: list[Kill] = field(default_factory=list)

    @property
    def record(self) -> dict:
        return {"kind": "chain", **asdict(self)}


class Killer:
    """life: returns seconds of a whole undisturbed run, started cold or not, as of today's load."""

    def __init__(self, folder: Path, setup: SharedSetup, life: Callable[[bool], float]):
        self.folder, self.setup, self.life = folder, setup, life

    def run_chain(self, number: int, most: int = MAX_KILLS) -> Chain:
        """At most so many kills. The chain is the same for the same seed and number, but for what the machine makes of its moments."""
        chain, rng = Chain(number, self.setup.seed), random.Random(f"{self.setup.seed}/{number}")
        target = Target(self.folder / f"chain_{number}", self.setup)
        times: list[float] = []
        try:
            while len(chain.kills) < most and self._kill_once(target, chain, rng, times):
                self._check_partial_results(target, chain)
            if len(chain.kills) == most:
                chain.launches += 1
                target.run().require(0)
            target.check_results()
        except BrokenPromiseError as broken:
            chain.verdict, chain.why = "BROKEN", self._describe_failure(target, chain, str(broken))
        self._compute_costs(target, chain, times)
        if chain.verdict == "kept":
            shutil.rmtree(target.folder)
        return chain

    def _kill_once(self, target: Target, chain: Chain, rng: random.Random, times: list[float]) -> bool:
        """One launch, and a kill at a random moment of it; whether the run had not ended before."""
        chain.launches += 1
        cold, moment, pick = rng.random() < COLD_SHARE or not self.setup.warm, rng.random(), rng.random()
        began, process = time.monotonic(), target.begin(cold=cold)
        try:
            process.wait(0.02 + 0.75 * moment * self.life(cold))
        except subprocess.TimeoutExpired:
            others = target.find_processes(process)
            index = int(pick * (1 + len(others)))
            whom = "launcher" if index == 0 else f"process {index} of {len(others)}"
            times.append(time.time())
            step = max((line["step"] for line in target.read_log() if line["what"] == "trained"), default=0)
            chain.kills.append(Kill(chain.number, len(chain.kills) + 1, whom, time.monotonic() - began, step, cold))
            self._kill_process([process.pid, *others][index])
            self._wait_for_end(target, process)
            return True
        target.end(process).require(0)
        return False

    @staticmethod
    def _kill_process(pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the run has ended in this moment

    @staticmethod
    def _wait_for_end(target: Target, process: Running) -> None:
        """Any exit code will do; that nothing is left is what counts."""
        target.end(process)

    @staticmethod
    def _check_partial_results(target: Target, chain: Chain) -> None:
        try:
            target.check_partial_results()
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"after kill {len(chain.kills)}: {broken}") from None

    def _describe_failure(self, target: Target, chain: Chain, why: str) -> str:
        """Which kill did it, as far as the steps tell."""
        trained = {line["step"]: line["attempt"] for line in target.read_log() if line["what"] == "trained" and line["rank"] == 0}
        return f"chain {chain.number} (seed {chain.seed}), {len(chain.kills)} kills: {why}; steps by launch: {trained}"

    @staticmethod
    def _compute_costs(target: Target, chain: Chain, times: list[float]) -> None:
        lines = target.read_log()
        trained = [line for line in lines if line["what"] == "trained" and line["rank"] == 0]
        for i, (kill, struck) in enumerate(zip(chain.kills, times, strict=True)):
            kill.sampled_twice = target.count_resampled_prompts(lines, attempts=[i + 2])
            last = max((line["step"] for line in trained if line["time"] <= struck), default=0)
            again = next((line for line in trained if line["time"] > struck and line["step"] > last), None)
            next_kill = times[i + 1] if i + 1 < len(times) else float("inf")
            if again is not None and again["time"] < next_kill and again["attempt"] == str(i + 2):
                kill.seconds, kill.cpu_seconds = again["time"] - struck, sum_cpu_seconds(lines, again)
