"""Hurts real runs in more than a hundred named ways, and holds each to its promise.

    python tools/torture.py                           # every fault, then 40 random kills: about two hours on two quiet cores
    python tools/torture.py --only 'kill/*' damage/   # some: names, beginnings of names, or patterns
    python tools/torture.py --short                   # CI's share
    python tools/torture.py --kills 200 --only none   # random kills alone
    python tools/torture.py --table docs/reliability.md

Each run is `torchrun` with two ranks, the whole program, Megatron-Core and gloo; only vLLM's answers come from a table, so that a run takes
seconds. One run that nobody disturbs is the measure: a run that was hurt, and then given the same command again, must have its metrics,
evaluations and exported weights, bit for bit. The table says what each fault cost: seconds until the step in which it struck was trained
again (starting the program is most of them), prompts that were sampled a second time, and optimizer steps that were trained a second time.
Ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.torturing.faults import FAULTS, SHORT
from tools.torturing.victim import Broken, Fault, NotHere, Victim


@dataclass
class Row:
    name: str
    promise: str
    verdict: str = "kept"
    why: str = ""
    seconds: float | None = None
    sampled_twice: int = 0
    trained_twice: int = 0


class Torture:
    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed = folder, seed
        self.reference = Victim(folder / "reference", None, None, seed)
        self.reference.run().must(0)
        self.template = Victim(folder / "template", None, None, seed)
        at_step_7 = dict(where="megatron_grpo.policy.policy:Policy.train_step", call=7, do="launcher SIGTERM")
        self.template.run(inject=at_step_7).must(None)
        if self.template.checkpoints() != [6, 7]:
            raise SystemExit(f"the run that is stopped after step 7 left checkpoints {self.template.checkpoints()}")

    def hurt(self, fault: Fault) -> Row:
        row = Row(fault.name, fault.promise)
        place = self.folder / re.sub(r"\W+", "_", fault.name)
        victim = Victim(place, self.reference.folder, self.template.folder, self.seed)
        try:
            fault.hurt(victim)
            row.seconds, row.sampled_twice, row.trained_twice = victim.cost(victim.struck())
        except NotHere as reason:
            row.verdict, row.why = "not here", str(reason)
        except Broken as broken:
            row.verdict, row.why = "BROKEN", str(broken)
        if row.verdict != "BROKEN":
            shutil.rmtree(place, ignore_errors=True)
        return row

    def random_kills(self, count: int) -> tuple[int, list[str]]:
        """Chains of runs, each killed at a random moment of its life until it has none left; (kills, what was wrong)."""
        rng, done, wrong = random.Random(self.seed), 0, []
        chain = 0
        while done < count:
            chain += 1
            victim = Victim(self.folder / f"kills_{chain}", self.reference.folder, None, self.seed)
            try:
                for _ in range(6):
                    process = victim.begin()
                    try:
                        process.wait(rng.uniform(1.0, 1.5 * self.seconds_of_a_run))
                        break
                    except subprocess.TimeoutExpired:
                        victims = [process.pid, *map(int, victim._left(process))]
                        os.kill(rng.choice(victims), signal.SIGKILL)
                        done += 1
                        victim.end(process)
                victim.continues()
                shutil.rmtree(victim.folder)
            except Broken as broken:
                wrong.append(f"chain {chain} (seed {self.seed}): {broken}")
            print(f"[torture] {done} of {count} random kills, {chain} chains, {len(wrong)} wrong", flush=True)
        return done, wrong

    @property
    def seconds_of_a_run(self) -> float:
        times = [line["time"] for line in self.reference.lines()]
        return times[-1] - times[0] + 6.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names, beginnings of names, patterns; none: random kills alone")
    parser.add_argument("--short", action="store_true", help="those that CI runs")
    parser.add_argument("--kills", type=int, help="random kills after the table (default: 40; with --only or --short: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="names and promises, and no runs")
    parser.add_argument("--table", type=Path, help="a Markdown file whose table is replaced by this one")
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    chosen = [
        fault
        for fault in FAULTS
        if not asked.only or any(fault.name.startswith(one) or fnmatch.fnmatch(fault.name, one) for one in asked.only)
    ]
    if asked.short:
        chosen = [fault for fault in FAULTS if fault.name in SHORT]
    if asked.only and not chosen and asked.only != ["none"]:
        print(f"no fault is named {' or '.join(asked.only)}; --list names them", file=sys.stderr)
        return 2
    if asked.list:
        for fault in chosen:
            print(f"{fault.name:<44}{fault.promise}")
        print(f"{len(chosen)} faults")
        return 0
    kills = asked.kills if asked.kills is not None else 0 if asked.only or asked.short else 40
    folder = Path(tempfile.mkdtemp(prefix="torture_"))
    torture, rows = Torture(folder, asked.seed), []
    for fault in chosen:
        rows.append(row := torture.hurt(fault))
        cost = f"{row.seconds:.0f} s" if row.seconds is not None else ""
        print(f"[torture] {len(rows):>3} of {len(chosen)}  {row.verdict:<9}{row.name:<44}{cost:>6}  {row.why[-600:]}", flush=True)
    done, wrong = torture.random_kills(kills) if kills else (0, [])
    broken = [row for row in rows if row.verdict == "BROKEN"]
    summary = said(rows, done, wrong, asked.seed)
    print("\n".join(["", *summary, *wrong]))
    if asked.table:
        publish(asked.table, rows, summary)
    print(f"VERDICT: {'FAILED; runs are in ' + str(folder) if broken or wrong else 'PASSED'}")
    if not (broken or wrong):
        shutil.rmtree(folder)
    return 1 if broken or wrong else 0


def said(rows: Sequence[Row], kills: int, wrong: Sequence[str], seed: int) -> list[str]:
    verdicts = {name: sum(row.verdict == name for row in rows) for name in ("kept", "BROKEN", "not here")}
    seconds = sorted(row.seconds for row in rows if row.seconds is not None)
    lines = [
        f"{len(rows)} faults: {verdicts['kept']} kept, {verdicts['BROKEN']} broken, {verdicts['not here']} impossible on this machine."
    ]
    if seconds:
        lines.append(f"Until the same step was trained again: median {seconds[len(seconds) // 2]:.0f} s, at most {seconds[-1]:.0f} s.")
    if kills:
        lines.append(f"{kills} random kills (seed {seed}): {len(wrong)} chains were not resumed bit for bit.")
    return lines


def publish(path: Path, rows: Sequence[Row], summary: Sequence[str]) -> None:
    """Replaces what stands between the two marks."""
    table = ["| fault | promise | kept | again after, s | prompts sampled twice | steps trained twice |", "|---|---|---|---|---|---|"]
    for row in rows:
        cost = [f"{row.seconds:.0f}" if row.seconds is not None else "", str(row.sampled_twice or ""), str(row.trained_twice or "")]
        table.append(f"| {row.name} | {row.promise} | {row.why if row.verdict == 'not here' else row.verdict} | {' | '.join(cost)} |")
    begin, end = "<!-- torture -->", "<!-- /torture -->"
    head, _, rest = path.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    day = time.strftime("%Y-%m-%d")
    path.write_text("\n".join([f"{head}{begin}", f"Run on {day}. {' '.join(summary)}", "", *table, ""]) + f"{end}{tail}")


if __name__ == "__main__":
    sys.exit(main())
