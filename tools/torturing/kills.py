"""Chains of random kills: a run is killed and resumed several times and must then equal the undisturbed run."""

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

from tools.torturing.target import BrokenPromiseError, Running, SharedSetup, Target, sum_cpu_seconds

MAX_KILLS = 8  # per chain
COLD_SHARE = 0.1  # share of runs started by a shell, so that some kills happen during imports


@dataclass
class Kill:
    """One kill of a chain.

    Args:
        chain: Number of the chain.
        number: Number of the kill in the chain, from 1.
        whom: "launcher", or "process 1 of 4" of the other processes, by age.
        after: Seconds since the launch.
        step: Last optimizer step trained before the kill.
        cold: Whether the run was started by a shell.
        seconds: Seconds until the interrupted step was trained again; None if the next kill came first.
        cpu_seconds: CPU seconds until then.
        sampled_twice: Prompts that the next launch sampled and an earlier one had sampled.
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
    """Chain of kills of one run.

    Args:
        number: Number of the chain; with the seed it determines the random moments.
        seed: Seed of the random moments.
        launches: Number of launches.
        verdict: "kept" or "BROKEN".
        why: Problem; empty if there is none.
        kills: The kills.
    """

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
    """Runner of chains of random kills.

    Args:
        folder: Folder of the runs.
        setup: Shared state of all runs.
        life: Function that returns the seconds of an undisturbed run, given whether it starts cold.
    """

    def __init__(self, folder: Path, setup: SharedSetup, life: Callable[[bool], float]):
        self.folder, self.setup, self.life = folder, setup, life

    def run_chain(self, number: int, most: int = MAX_KILLS) -> Chain:
        """Run one chain of at most `most` kills. Seed and number determine its random moments."""
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
        """Launch the run and kill one of its processes at a random moment; return False if the run ended first."""
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
            pass  # the run has just ended

    @staticmethod
    def _wait_for_end(target: Target, process: Running) -> None:
        """Wait until no process of the run is left; any exit code is accepted."""
        target.end(process)

    @staticmethod
    def _check_partial_results(target: Target, chain: Chain) -> None:
        """Check what the run has written so far."""
        try:
            target.check_partial_results()
        except BrokenPromiseError as broken:
            raise BrokenPromiseError(f"after kill {len(chain.kills)}: {broken}") from None

    def _describe_failure(self, target: Target, chain: Chain, why: str) -> str:
        """Return the problem with the launch in which each step was trained."""
        trained = {line["step"]: line["attempt"] for line in target.read_log() if line["what"] == "trained" and line["rank"] == 0}
        return f"chain {chain.number} (seed {chain.seed}), {len(chain.kills)} kills: {why}; steps by launch: {trained}"

    @staticmethod
    def _compute_costs(target: Target, chain: Chain, times: list[float]) -> None:
        """Fill in the costs of each kill."""
        lines = target.read_log()
        trained = [line for line in lines if line["what"] == "trained" and line["rank"] == 0]
        for i, (kill, struck) in enumerate(zip(chain.kills, times, strict=True)):
            kill.sampled_twice = target.count_resampled_prompts(lines, attempts=[i + 2])
            last = max((line["step"] for line in trained if line["time"] <= struck), default=0)
            again = next((line for line in trained if line["time"] > struck and line["step"] > last), None)
            next_kill = times[i + 1] if i + 1 < len(times) else float("inf")
            if again is not None and again["time"] < next_kill and again["attempt"] == str(i + 2):
                kill.seconds, kill.cpu_seconds = again["time"] - struck, sum_cpu_seconds(lines, again)
