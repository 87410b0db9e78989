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
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.end_to_end.runs import records, write_inputs  # noqa: E402

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
            raise Broken(f"exit code {self.code}, not {'one that is not 0' if code is None else code}: {self.said[-1500:]}")
        for pattern in patterns:
            if not re.search(pattern, self.said):
                raise Broken(f"nothing is said like {pattern!r}: {self.said[-1500:]}")
        return self


class Victim:
    """One output_dir, and the runs in it."""

    def __init__(self, folder: Path, reference: Path | None, template: Path | None, seed: int):
        self.folder, self.out, self.log = folder, folder / "out", folder / "log"
        self.reference, self.template, self.rng = reference, template, random.Random(seed)
        self.log.mkdir(parents=True)
        self.inputs = write_inputs(folder, rows=10)
        self._eval = ["--eval_dataset", str(folder / "data.jsonl"), "--eval_num_prompts", "4"]
        self.attempt = 0

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
            str(ROOT / "tools/torture_rank.py"),
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
        return Ended(code, self.said.read_text())

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
        return next((line["time"] for line in self.lines() if line["what"] == "hurt"), None)


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


# ---- the whole of it -------------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    name: str
    promise: str
    verdict: str = "kept"
    why: str = ""
    seconds: float | None = None
    sampled_twice: int = 0
    trained_twice: int = 0
    took: float = field(default=0.0)


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
        row, begin = Row(fault.name, fault.promise), time.monotonic()
        place = self.folder / re.sub(r"\W+", "_", fault.name)
        victim = Victim(place, self.reference.folder, self.template.folder, self.seed)
        try:
            fault.hurt(victim)
            row.seconds, row.sampled_twice, row.trained_twice = victim.cost(victim.struck())
        except NotHere as reason:
            row.verdict, row.why = "not here", str(reason)
        except Broken as broken:
            row.verdict, row.why = "BROKEN", str(broken)
        row.took = time.monotonic() - begin
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
    from tools.torture_faults import FAULTS, SHORT

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
