"""Results of tools/torture.py: a file that grows from call to call, and the tables of the report."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

BEGIN, END = "<!-- torture -->", "<!-- /torture -->"


@dataclass
class FaultResult:
    """Result of one fault.

    Args:
        name: Name, as "family/fault".
        promise: Expected outcome.
        verdict: "kept", "BROKEN" or "not here" (not possible on this machine).
        why: Problem, or reason why the fault is not possible; empty if there is none.
        seconds: Seconds until the interrupted step was trained again.
        cpu_seconds: CPU seconds of the ranks until then.
        sampled_twice: Prompts sampled in two launches.
        trained_twice: Optimizer steps trained in two launches.
        took: Seconds of the test.
        load: Load average of the machine (1 minute) when the test began.
        day: Date.
    """

    name: str
    promise: str
    verdict: str = "kept"
    why: str = ""
    seconds: float | None = None
    cpu_seconds: float | None = None
    sampled_twice: int = 0
    trained_twice: int = 0
    took: float = 0.0
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    day: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    @property
    def family(self) -> str:
        """First part of the name."""
        return self.name.partition("/")[0]

    @property
    def record(self) -> dict:
        """Line of the results file."""
        return {"kind": "fault", **asdict(self)}


@dataclass
class Undisturbed:
    """Measurement of an undisturbed run.

    Args:
        cold: Whether a shell started the run; otherwise it was forked.
        seconds: Seconds of the run.
        cpu_seconds: CPU seconds of its two ranks.
        start: Seconds until the first step was trained.
        cpu_start: CPU seconds of the ranks until then.
        load: Load average of the machine (1 minute).
    """

    cold: bool
    seconds: float
    cpu_seconds: float
    start: float
    cpu_start: float
    load: float

    @property
    def record(self) -> dict:
        """Line of the results file."""
        return {"kind": "undisturbed", **asdict(self)}

    def __str__(self) -> str:
        how = "started by a shell" if self.cold else "forked"
        return (
            f"{how}: first step after {self.start:.1f} s ({self.cpu_start:.1f} CPU s of the ranks), "
            f"ten steps and export {self.seconds:.1f} s ({self.cpu_seconds:.1f}), load {self.load:.1f}"
        )


class Results:
    """Results of this and earlier calls.

    Args:
        path: A .jsonl file to read and to append to; None: results are kept in memory only.
    """

    def __init__(self, path: Path | None):
        self.path, self.lines = path, []
        if path is not None and path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, record: dict) -> None:
        self.lines.append(record)
        if self.path is not None:
            with self.path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")

    def get_rows(self, names: Iterable[str]) -> list[FaultResult]:
        """Return the newest result of each named fault, in the given order."""
        found = {line["name"]: FaultResult(**{key: line[key] for key in line if key != "kind"}) for line in self._select("fault")}
        return [found[name] for name in names if name in found]

    def get_kept_names(self) -> set[str]:
        """Return the names of faults whose newest result is "kept"."""
        newest = {line["name"]: line["verdict"] for line in self._select("fault")}
        return {name for name, verdict in newest.items() if verdict == "kept"}

    def get_chains(self, seed: int) -> list[dict]:
        """Return the chains of kills with this seed."""
        return [line for line in self._select("chain") if line["seed"] == seed]

    def get_undisturbed(self) -> list[Undisturbed]:
        return [Undisturbed(**{key: line[key] for key in line if key != "kind"}) for line in self._select("undisturbed")]

    def _select(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]


def summarize(rows: Sequence[FaultResult], chains: Sequence[dict]) -> list[str]:
    """Return sentences that summarize the results."""
    verdicts = {name: sum(row.verdict == name for row in rows) for name in ("kept", "BROKEN", "not here")}
    lines = [
        f"{len(rows)} faults: {verdicts['kept']} kept, {verdicts['BROKEN']} broken, {verdicts['not here']} impossible on this machine."
    ]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    if seconds:
        lines.append(f"The same step was trained again after: median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s.")
    kills = [kill for chain in chains for kill in chain["kills"]]
    if kills:
        wrong = sum(chain["verdict"] != "kept" for chain in chains)
        again = [kill["seconds"] for kill in kills if kill["seconds"] is not None]
        lines.append(
            f"{len(kills)} random kills in {len(chains)} chains ({sum(chain['launches'] for chain in chains)} launches, seed "
            f"{chains[0]['seed']}): {wrong} chains differed from the undisturbed run."
        )
        if again:
            lines.append(
                f"After {len(again)} of them the same step was trained again before the next kill, within "
                f"{statistics.median(again):.1f} s (median; at most {max(again):.1f})."
            )
        twice = [kill["sampled_twice"] for kill in kills]
        lines.append(f"A kill caused {statistics.mean(twice):.1f} prompts to be sampled again (mean; at most {max(twice)}).")
    return lines


def publish(path: Path, results: Results, promises: Mapping[str, str], seed: int) -> None:
    """Replace the generated part of a Markdown page with the tables of the results.

    Args:
        path: Page that contains the marks BEGIN and END.
        results: Results to report.
        promises: Current promise of each fault, in the order of the table.
        seed: Seed of the chains to report.
    """
    rows, chains = [replace(row, promise=promises[row.name]) for row in results.get_rows(promises)], results.get_chains(seed)
    loads = [row.load for row in rows]
    days = sorted({row.day for row in rows})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    load = f"load {min(loads):.0f} to {max(loads):.0f}, median {statistics.median(loads):.0f}"
    parts = [
        f"Run on {when}, on {os.cpu_count()} cores shared with other work ({load}). {' '.join(summarize(rows, chains))}",
        "",
        *_format_starts(results),
        "",
        *_format_families(rows),
        "",
        *_format_kills(chains),
        "",
        *_format_faults(rows),
        "",
    ]
    head, _, rest = path.read_text().partition(BEGIN)
    path.write_text("\n".join([f"{head}{BEGIN}", *parts]) + f"{END}{rest.partition(END)[2]}")


def _format_starts(results: Results) -> list[str]:
    """Return the lines with the costs of undisturbed runs."""
    lines = ["An undisturbed run, for comparison (median of those measured):", ""]
    for cold in (True, False):
        mine = [one for one in results.get_undisturbed() if one.cold is cold]
        if mine:
            names = ("seconds", "cpu_seconds", "start", "cpu_start", "load")
            lines.append(f"* {Undisturbed(cold, *(statistics.median(getattr(one, name) for one in mine) for name in names))}")
    return lines


def _format_families(rows: Sequence[FaultResult]) -> list[str]:
    table = [
        "| family | kept | seconds until trained again: median (max) | CPU seconds of the ranks: median (max) |",
        "|---|---|---|---|",
    ]
    for family in dict.fromkeys(row.family for row in rows):
        mine = [row for row in rows if row.family == family]
        wall, cpu = ([value for row in mine if (value := getattr(row, name)) is not None] for name in ("seconds", "cpu_seconds"))
        kept = sum(row.verdict == "kept" for row in mine)
        table.append(f"| {family} | {kept} of {len(mine)} | {_format_median_and_max(wall)} | {_format_median_and_max(cpu)} |")
    return table


def _format_kills(chains: Sequence[dict]) -> list[str]:
    kills = [kill for chain in chains for kill in chain["kills"]]
    if not kills:
        return []
    table = [
        "| random kills | number | seconds until trained again | CPU seconds of the ranks | prompts sampled twice: mean (max) |",
        "|---|---|---|---|---|",
    ]
    groups = {
        "of the launcher": [kill for kill in kills if kill["whom"] == "launcher"],
        "of a rank or its supervisor": [kill for kill in kills if kill["whom"] != "launcher"],
        "all in runs started by a shell": [kill for kill in kills if kill["cold"]],
        "all before the first step of a run": [kill for kill in kills if kill["step"] == 0],
    }
    for name, mine in groups.items():
        wall, cpu = ([value for kill in mine if (value := kill[key]) is not None] for key in ("seconds", "cpu_seconds"))
        twice = [kill["sampled_twice"] for kill in mine] or [0]
        table.append(
            f"| {name} | {len(mine)} | {_format_median_and_max(wall)} | {_format_median_and_max(cpu)} | "
            f"{statistics.mean(twice):.1f} ({max(twice)}) |"
        )
    return table


def _format_faults(rows: Sequence[FaultResult]) -> list[str]:
    """Return a table with one row per family and promise; faults that were not kept have their reason."""
    table = ["| family | promise | kept | faults |", "|---|---|---|---|"]
    groups: dict[tuple[str, str], list[FaultResult]] = {}
    for row in rows:
        groups.setdefault((row.family, row.promise), []).append(row)
    for (family, promise), mine in groups.items():
        names = [row.name.partition("/")[2] + (f" ({row.verdict}: {row.why})" if row.verdict != "kept" else "") for row in mine]
        table.append(f"| {family} | {promise} | {sum(row.verdict == 'kept' for row in mine)} of {len(mine)} | {'; '.join(names)} |")
    return table


def _format_median_and_max(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"
