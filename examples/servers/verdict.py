"""Says whether the run learnt what the quickstart learns, although one of its servers died and another came.

    python examples/servers/verdict.py output/servers output/servers_logs

Exit code 0: yes; 1: no, and why.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from verdict import find_problems

WEIGHTS_RECEIVED = re.compile(r"weights: received version (\d+) in")


def read_received_versions(log: Path) -> list[int]:
    """The versions that a server was given."""
    return [int(version) for version in WEIGHTS_RECEIVED.findall(log.read_text(encoding="utf-8"))] if log.exists() else []


def main() -> int:
    run, logs = Path(sys.argv[1]), Path(sys.argv[2])
    problems, summary = find_problems(run)
    one, two, three = (read_received_versions(logs / f"{name}.log") for name in ("one", "two", "three"))
    if not one or not two or one[-1] >= two[-1]:
        problems.append("server one was to be killed while server two went on")
    if not three or three[-1] != two[-1]:
        problems.append("server three was to come later, and to have the last weights too")
    if any(versions != sorted(versions) for versions in (one, two, three)):  # one twice, if another server died while it came
        problems.append("a server was given an older version after a newer one")
    for problem in problems:
        print(f"[verdict] {problem}")
    given = f"pushes to the servers: {len(one)}, {len(two)} and {len(three)}"
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary}; {given} (see {run})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
