"""Inject faults into real runs, resume them, and compare the results with those of an undisturbed run.

    python tools/torture.py                           # all faults, then 40 random kills: about half an hour on two idle cores
    python tools/torture.py --only 'kill/*' damage/   # selected faults, by name, prefix or pattern
    python tools/torture.py --short                   # the faults that CI runs
    python tools/torture.py --kills 200 --only none   # random kills only
    python tools/torture.py --results r.jsonl         # append results to a file; faults that passed in it are not run again
    python tools/torture.py --results r.jsonl --only none --kills 0 --table docs/reliability.md

Each run is the complete program under torchrun: two ranks, Megatron-Core and gloo. Only the sampler is replaced; completions come from a
table. By default, torchrun and its ranks are forks of this process, which has imported all modules (`torturing.warm`). The undisturbed run,
a tenth of the randomly killed runs, and runs whose fault must be in place before the interpreter starts are started by a shell. `--cold`
starts all runs by a shell.

A run that was interrupted is started again with the same command. Its metrics, evaluations and exported weights must then equal those of
the undisturbed run bit for bit. The tool also reports what each fault cost: wall-clock and CPU seconds until the interrupted step was
trained again, prompts sampled twice, and optimizer steps trained twice. The exit code is 1 if any result differs from what the fault's
promise states.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.torturing import warm
from tools.torturing.faults import FAULTS, SHORT
from tools.torturing.kills import Killer
from tools.torturing.moments import TRAIN_STEP
from tools.torturing.results import FaultResult, Results, Undisturbed, publish, summarize
from tools.torturing.target import BrokenPromiseError, Fault, SharedSetup, Target, UnsupportedFaultError, sum_cpu_seconds


class TortureTest:
    """State that the runs of one call share: the setup, the undisturbed run and the results.

    Args:
        folder: Folder of all runs.
        seed: Seed of the random kills.
        results: Results of this and earlier calls.
        cold: Whether all runs are started by a shell instead of forked.
        is_short: Whether the undisturbed run is a fork too.
    """

    def __init__(self, folder: Path, seed: int, results: Results, *, cold: bool = False, is_short: bool = False):
        self.folder, self.results = folder, results
        if not cold:
            warm.warm_up()
        self.setup = SharedSetup(seed, warm=not cold)
        self._lives: dict[bool, list[float]] = {True: [], False: []}
        self.setup.reference = self._run_undisturbed("reference", cold=cold or not is_short).folder
        if not cold and not is_short:
            self._run_undisturbed("forked", cold=False).check_results()
        self.setup.half_done = lambda: self._half_done

    def _run_undisturbed(self, name: str, *, cold: bool) -> Target:
        target, load, began = Target(self.folder / name, self.setup), os.getloadavg()[0], time.time()
        target.run(cold=cold).require(0)
        seconds, lines = time.time() - began, target.read_log()
        first = next(line for line in lines if line["what"] == "trained" and line["rank"] == 0)
        start, whole = (sum_cpu_seconds(lines, line) for line in (first, lines[-1]))
        measured = Undisturbed(cold, seconds, whole, first["time"] - began, start, load)
        self.results.add(measured.record)
        self._lives[cold].append(seconds)
        self.setup.patience = max(180.0, 10 * max(self._lives[True] + self._lives[False]))
        print(f"[torture] an undisturbed run {measured}", flush=True)
        return target

    @cached_property
    def _half_done(self) -> Path:
        target = Target(self.folder / "template", self.setup)
        target.run(inject=dict(where=TRAIN_STEP, call=7, do="launcher SIGTERM")).require(None)
        if target.list_checkpoints() != [6, 7]:
            raise SystemExit(f"the run that is stopped after step 7 left checkpoints {target.list_checkpoints()}")
        return target.folder

    def run_fault(self, fault: Fault) -> FaultResult:
        """Run one fault and return its result; the run's folder is kept if the promise was broken."""
        row, began = FaultResult(fault.name, fault.promise), time.time()
        folder = self.folder / re.sub(r"\W+", "_", fault.name)
        target = Target(folder, self.setup)
        try:
            fault.inject(target)
            for name, value in asdict(target.compute_cost(target.find_fault_time())).items():
                setattr(row, name, value)
        except UnsupportedFaultError as reason:
            row.verdict, row.why = "not here", str(reason)
        except BrokenPromiseError as broken:
            row.verdict, row.why = "BROKEN", str(broken)
        row.took = time.time() - began
        if row.verdict != "BROKEN":
            shutil.rmtree(folder, ignore_errors=True)
        self.results.add(row.record)
        return row

    def run_random_kills(self, count: int) -> None:
        """Run chains of random kills until the results contain `count` kills."""
        killer = Killer(self.folder, self.setup, self._get_median_seconds)
        while True:
            chains = self.results.get_chains(self.setup.seed)
            done = sum(len(chain["kills"]) for chain in chains)
            if done >= count:
                return
            chain = killer.run_chain(max((one["number"] for one in chains), default=0) + 1, min(8, count - done))
            self.results.add(chain.record)
            wrong = sum(one["verdict"] != "kept" for one in self.results.get_chains(self.setup.seed))
            print(
                f"[torture] {done + len(chain.kills)} of {count} random kills; chain {chain.number}: {len(chain.kills)} kills, "
                f"{chain.launches} launches, {chain.verdict} {chain.why[-1500:]}; {wrong} wrong in total",
                flush=True,
            )

    def _get_median_seconds(self, cold: bool) -> float:
        return statistics.median(self._lives[cold])


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names, prefixes or patterns of faults; none: random kills only")
    parser.add_argument("--short", action="store_true", help="run the faults that CI runs")
    parser.add_argument("--kills", type=int, help="number of random kills after the faults (default: 40; with --only or --short: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random kills")
    parser.add_argument("--cold", action="store_true", help="start every run by a shell instead of a fork; takes four times as long")
    parser.add_argument("--list", action="store_true", help="print the names and promises of the faults and exit")
    parser.add_argument("--results", type=Path, help="a .jsonl file to append results to; faults that passed in it are not run again")
    parser.add_argument("--table", type=Path, help="a Markdown file whose tables are replaced by those of all results")
    return parser.parse_args()


def select_faults(asked: argparse.Namespace) -> list[Fault]:
    """Return the faults that `--short` or `--only` select."""
    if asked.short:
        return [fault for fault in FAULTS if fault.name in SHORT]
    return [
        fault
        for fault in FAULTS
        if not asked.only or any(fault.name.startswith(one) or fnmatch.fnmatch(fault.name, one) for one in asked.only)
    ]


def main() -> int:
    """Run the selected faults and kills, print the results and return the exit code."""
    asked = parse_arguments()
    chosen = select_faults(asked)
    if asked.only and not chosen and asked.only != ["none"]:
        print(f"no fault is named {' or '.join(asked.only)}; --list names them", file=sys.stderr)
        return 2
    if asked.list:
        for fault in chosen:
            print(f"{fault.name:<44}{fault.promise}")
        print(f"{len(chosen)} faults")
        return 0
    kills = asked.kills if asked.kills is not None else 0 if asked.only or asked.short else 40
    results, folder = Results(asked.results), Path(tempfile.mkdtemp(prefix="torture_"))
    chosen = [fault for fault in chosen if fault.name not in results.get_kept_names()]
    if chosen or kills:
        torture = TortureTest(folder, asked.seed, results, cold=asked.cold, is_short=asked.short)
        for number, fault in enumerate(chosen, 1):
            row = torture.run_fault(fault)
            cost = f"{row.seconds:.1f} s" if row.seconds is not None else ""
            print(f"[torture] {number:>3} of {len(chosen)}  {row.verdict:<9}{row.name:<44}{cost:>7}  {row.why[-1500:]}", flush=True)
        torture.run_random_kills(kills)
    rows, chains = results.get_rows(fault.name for fault in FAULTS), results.get_chains(asked.seed)
    wrong = [row.name for row in rows if row.verdict == "BROKEN"] + [chain["why"] for chain in chains if chain["verdict"] != "kept"]
    print("\n".join(["", *summarize(rows, chains), *wrong]))
    if asked.table:
        publish(asked.table, results, {fault.name: fault.promise for fault in FAULTS}, asked.seed)
    print(f"VERDICT: {'FAILED; runs are in ' + str(folder) if wrong else 'PASSED'}")
    if not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a library prints pages of leak reports at a regular exit
