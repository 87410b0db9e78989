"""Measure the start and the end of a run: CPU seconds of all processes until the first logged step and after the last.

    bash examples/quickstart/run.sh                                            # once, to make the data and the model
    python benchmarks/start_and_end.py --ranks 1 2 --pairs 3 [--against OTHER_CHECKOUT]

The benchmark runs the quickstart with few steps, optionally alternating with another checkout of the package. Further arguments are
settings of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def read_tree_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its living descendants, including their ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(read_tree_cpu_seconds, children))


def run_once(checkout: Path, ranks: int, settings: list[str]) -> dict[str, float]:
    """Execute a run and return CPU and wall-clock seconds of its start and end, and CPU seconds of the steps between.

    Args:
        checkout: Root of the package.
        ranks: Number of ranks.
        settings: Further settings.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "run")
        with log.open("w") as stream:
            launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)] if ranks > 1 else []
            command = [*launch, "-m", "megatron_grpo", "train", "--config", "examples/quickstart/config.yaml", "--output_dir", str(out)]
            # PYTHONSAFEPATH: the package comes from PYTHONPATH, not from the working directory.
            here = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, *command, *settings], cwd=ROOT, env=os.environ | here, stdout=stream, stderr=subprocess.STDOUT
            )
        marks: dict[int, tuple[float, float]] = {}  # number of logged steps -> CPU seconds, seconds
        while process.poll() is None:
            metrics = out / "metrics.jsonl"
            logged = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if logged and logged not in marks:
                marks[logged] = read_tree_cpu_seconds(process.pid), time.monotonic() - began
            time.sleep(0.02)  # polling interval, a fraction of a step
        if process.returncode:
            sys.exit(log.read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_cpu, seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, time.monotonic() - began
    (first, first_at), (last, last_at) = marks[min(marks)], marks[max(marks)]
    return {
        "start": first, "steps": last - first, "end": all_cpu - last, "all": all_cpu, "start_wall": first_at, "end_wall": seconds - last_at,
    }  # fmt: skip


def main() -> None:
    """Measure all runs and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout, whose runs alternate with this one's")
    parser.add_argument("--steps", default="10", help="optimizer steps of a run")
    args, settings = parser.parse_known_args()
    for ranks in args.ranks:
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(args.pairs):
            for name, checkout in {"other": args.against, "this": ROOT}.items():
                if checkout:
                    found.setdefault(name, []).append(run_once(checkout, ranks, ["--max_steps", args.steps, *settings]))
                    print(ranks, name, json.dumps({key: round(value, 2) for key, value in found[name][-1].items()}), flush=True)
        for name, runs in found.items():
            print(f"{ranks} ranks, {name}: " + ", ".join(f"{key} {statistics.median(run[key] for run in runs):.1f}" for key in runs[0]))


if __name__ == "__main__":
    main()
